"""Policies cast, and their rules select parameters by path."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_lite as jmp
from tests.support.policy_names import BF16, F16, F32, dtypes_of


def names_of(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.dtype.name
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


# Casting


def test_each_cast_uses_its_own_dtype():
    policy = jmp.Policy("f32", "f16", "bf16")
    tree = {
        "x": jnp.ones(2, jnp.float32),
        "h": np.ones(2, np.float16),
        "n": jnp.arange(2),
        "none": None,
        "f": 1.5,
    }
    for cast, dtype in (
        (policy.cast_to_param, F32),
        (policy.cast_to_compute, F16),
        (policy.cast_to_output, BF16),
    ):
        result = cast(tree)
        assert (result["x"].dtype, result["h"].dtype, result["n"].dtype) == (dtype, dtype, np.int32)
        assert (result["none"], result["f"]) == (None, 1.5)
    assert policy.cast_to_param(tree)["x"] is tree["x"]
    assert policy.cast_to_compute(tree)["h"] is tree["h"]


# Rules


class NnxNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, 3, rngs=rngs), nnx.LayerNorm(3, rngs=rngs)])
        self.head = nnx.Linear(3, 2, rngs=rngs)


@pytest.mark.parametrize(
    "view", [nnx.state, lambda net: nnx.to_pure_dict(nnx.state(net))], ids=["state", "pure"]
)
def test_rules_act_on_nnx_states(view):
    state = view(NnxNet())
    policy = jmp.get_policy("c=f16; layers/1 -> f32; head/kernel -> bf16; **/scale -> f64")
    assert policy.at("head/bias").compute_dtype == F16
    with pytest.raises(ValueError, match=r"The rule 'nothing -> .*matches no parameter"):
        policy.with_rules({"nothing": "f32"}).check_rules(state)
    policy.check_rules(state)
    cast = {
        name.removesuffix("/value"): dtype for name, dtype in names_of(policy.cast_to_compute(state)).items()
    }
    assert cast == {
        "head/bias": "float16",
        "head/kernel": "bfloat16",
        "layers/0/bias": "float16",
        "layers/0/kernel": "float16",
        "layers/1/bias": "float32",
        "layers/1/scale": "float32",
    }


@pytest.mark.slow
def test_rules_act_on_equinox_modules():
    model = eqx.nn.MLP(2, 1, 3, depth=2, key=jax.random.key(0))
    policy = jmp.get_policy("f16; layers/0 -> f32; layers/*/bias -> bf16")
    policy.check_rules(eqx.filter(model, eqx.is_inexact_array))
    cast = policy.cast_to_compute(model)
    assert names_of(eqx.filter(cast, eqx.is_array)) == {
        "layers/0/weight": "float32",
        "layers/0/bias": "float32",
        "layers/1/weight": "float16",
        "layers/1/bias": "bfloat16",
        "layers/2/weight": "float16",
        "layers/2/bias": "bfloat16",
    }
    assert cast.activation is model.activation


def test_the_first_match_wins():
    one_way = jmp.Policy("f32", "f16", "f32", rules=[("head", "bf16"), ("head/kernel", "f32")])
    other = jmp.Policy("f32", "f16", "f32", rules={"head/kernel": "f32", "head": "bf16"})
    assert one_way.at("head/kernel").compute_dtype == BF16
    assert other.at("head/kernel").compute_dtype == F32
    assert other.at("head/bias").compute_dtype == BF16
    assert other.at("body").compute_dtype == F16
    assert other.at("body").rules == ()


def test_later_rules_are_put_before_the_ones_that_are_there():
    policy = jmp.get_policy("f16; head -> bf16").with_rules({"head/kernel": "f32"})
    assert [rule.pattern for rule in policy.rules] == ["head/kernel", "head"]
    assert policy.at("head/kernel").compute_dtype == F32


NORMALIZATION = ["BatchNorm_0", "LayerNorm_3", "GroupNorm_0", "RMSNorm_0", "norm", "layer_norm", "norm1"]
NORMALIZATION += ["final_norm", "bn", "bn1", "BN", "ln_f", "ln_1", "LN"]


def test_o2_keeps_layers_named_normalization_in_float32_and_no_others():
    policy = jmp.get_policy("O2")
    for name in NORMALIZATION:
        tree = {"block": {name: {"scale": jnp.ones(2)}, "Dense_0": {"kernel": jnp.ones(2)}}}
        wanted = {f"block/{name}/scale": "float32", "block/Dense_0/kernel": "float16"}
        assert names_of(policy.cast_to_param(tree)) == wanted
        assert dtypes_of(policy.at(f"block/{name}/scale")) == (F32, F32, F16)
    for name in ("Dense_0", "Conv_1", "attention", "lnk", "bnet", "Embed_0", "mln"):
        assert dtypes_of(policy.at(f"{name}/kernel")) == (F16, F16, F32)
    policy.check_rules({"Dense_0": {"kernel": jnp.ones(2)}})  # A model without them passes.


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("haed", "'head'"),
        ("**/BatchNorm*", "'stem/batch_norm'"),
        ("/kernel", "'head/kernel'"),
        ("head/kernle", "'head/kernel'"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error_that_names_the_nearest_path(pattern, nearest):
    params = {"head": {"kernel": jnp.ones(2)}, "stem": {"batch_norm": {"scale": jnp.ones(2)}}}
    policy = jmp.get_policy("f16").with_rules({pattern: "f32"})
    for refuse in (policy.check_rules, policy.cast_to_param, lambda params: jmp.cast_params(params, policy)):
        with pytest.raises(ValueError, match=r"matches no parameter\. Nearest: ") as error:
            refuse(params)
        assert f"'{pattern} -> p=full,c=full,o=full'" in str(error.value)
        assert nearest in str(error.value).split("Nearest: ")[1]


def test_a_rule_from_the_root_matches_within_a_tuple():
    params = ({"head": jnp.ones(2), "body": jnp.ones(2)}, jnp.int32(0))
    cast, _ = jmp.get_policy("f16; /head -> f32").cast_to_param(params)
    assert (cast["head"].dtype, cast["body"].dtype) == (F32, F16)


def test_check_rules_lists_paths_even_where_none_is_near():
    policy = jmp.get_policy("f16; zzzzzzz -> f32")
    with pytest.raises(ValueError, match="Nearest: 'head', 'head/kernel'"):
        policy.check_rules({"head": {"kernel": 1}})
    with pytest.raises(ValueError, match="Nearest: none"):
        policy.check_rules({})


def test_an_optional_rule_may_match_nothing():
    jmp.get_policy("f16; haed ?-> f32").check_rules({"head": 1})
    jmp.Policy("f16", "f16", "f16", rules=[jmp.Rule("haed", "f32", optional=True)]).check_rules({"head": 1})


def test_an_anchored_rule_holds_for_the_params_in_params_and_inputs():
    policy = jmp.get_policy("c=f16").with_rules({"/head": "float32"})
    params = {"head": {"kernel": jnp.ones(2)}, "body": {"head": jnp.ones(2)}}
    for cast, x in (policy.cast_to_compute((params, jnp.ones(2))), (policy.cast_to_compute(params), None)):
        assert cast["head"]["kernel"].dtype == jnp.float32
        assert cast["body"]["head"].dtype == jnp.float16
        assert x is None or x.dtype == jnp.float16

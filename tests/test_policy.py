"""Policies: spelling, strings, presets and rules by parameter path."""

import copy
import dataclasses
import pickle

import equinox as eqx
import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

import jmp_lite as jmp

F16, BF16, F32, F64 = (np.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))


def dtypes_of(policy):
    return (policy.param_dtype, policy.compute_dtype, policy.output_dtype)


def names_of(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.dtype.name
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


# Spelling

SPELLINGS = [np.float16, jnp.float16, np.dtype("float16"), "f16", "float16"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_policies_are_equal_whatever_way_the_dtypes_were_spelt(spelling):
    policy = jmp.Policy(np.float32, spelling, "full")
    reference = jmp.Policy("f32", "f16", jnp.float32)
    assert policy == reference
    assert hash(policy) == hash(reference)
    assert len({policy, reference}) == 1
    assert jmp.Policy(spelling, "f32", "f32") != reference
    ruled = reference.with_rules({"head": spelling})
    assert ruled == reference.with_rules([jmp.Rule("head", jmp.get_policy("f16"))])
    assert hash(ruled) == hash(reference.with_rules([("head", "float16")]))
    assert ruled != reference


def test_dtypes_are_compared_with_any_spelling():
    policy = jmp.Policy("f32", "bf16", "f32")
    assert policy.param_dtype == jnp.float32 == np.float32
    assert policy.compute_dtype == jnp.bfloat16


def test_policies_are_frozen_and_copied_and_pickled():
    policy = jmp.get_policy("O2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = F32
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.rules[0].pattern = "x"
    for same in (
        pickle.loads(pickle.dumps(policy)),
        copy.deepcopy(policy),
        copy.copy(policy),
        dataclasses.replace(policy),
    ):
        assert same == policy


def test_a_policy_is_a_static_argument_that_compiles_once():
    traces = []

    def cast(x, policy):
        traces.append(policy)
        return policy.cast_to_compute(x)

    cast = jax.jit(cast, static_argnames="policy")
    for spelling in SPELLINGS:
        assert cast(jnp.ones(2), policy=jmp.Policy("f32", spelling, "f32")).dtype == F16
    assert len(traces) == 1


# Strings

dtype_names = st.sampled_from(["f16", "bf16", "full", "f64", "float8_e4m3fn"])
patterns = st.lists(
    st.sampled_from(["head", "**", "*", "Batch*Norm", "layer_[0-9]", "x?", "?", "a b"]),
    min_size=1,
    max_size=3,
).map("/".join)
plain_policies = st.builds(jmp.Policy, dtype_names, dtype_names, dtype_names)
rules = st.builds(
    jmp.Rule,
    st.booleans().flatmap(lambda root: patterns.map(lambda p: "/" * root + p)),
    plain_policies,
    st.booleans(),
)
policies = st.builds(jmp.Policy, dtype_names, dtype_names, dtype_names, st.lists(rules, max_size=4))


@hypothesis.settings(max_examples=300)
@hypothesis.given(policy=policies)
def test_str_is_read_back(policy):
    again = jmp.get_policy(str(policy))
    assert again == policy
    assert str(again) == str(policy)
    assert hash(again) == hash(policy)


@pytest.mark.parametrize("name", ["O0", "O1", "O2", "bf16", "c=f16; head -> float32"])
def test_repr_is_a_short_call_that_makes_the_policy(name):
    policy = jmp.get_policy(name)
    assert eval(repr(policy), {"get_policy": jmp.get_policy}) == policy
    assert len(repr(policy)) < 80
    assert repr(jmp.get_policy("O2")) == "get_policy('O2')"


def test_str_is_that_of_jmp():
    assert str(jmp.Policy(jnp.float32, jnp.float16, jnp.bfloat16)) == "p=full,c=f16,o=bf16"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("params=float32,compute=float16,output=float32", (F32, F16, F32)),
        ("p=f32,c=f16,o=f32", (F32, F16, F32)),
        (" params = float32 , compute = float16 , output = float32 ", (F32, F16, F32)),
        ("o=f32, c=bf16", (F32, BF16, F32)),
        ("c=f16", (F32, F16, F16)),
        ("p=f16", (F16, F16, F16)),
        ("o=f16", (F32, F32, F16)),
        ("p=f16,o=f32", (F16, F16, F32)),
        ("float32", (F32, F32, F32)),
        (" bf16 ", (BF16, BF16, BF16)),
        ("f64", (F64, F64, F64)),
        ("half", (F16, F16, F16)),
        ("c=half,o=full", (F32, F16, F32)),
        ("O0", (F32, F32, F32)),
        ("O1", (F32, F16, F32)),
        ("O2", (F16, F16, F32)),
        ("mixed_float16", (F32, F16, F32)),
        ("mixed_bfloat16", (F32, BF16, F32)),
        ("16-mixed", (F32, F16, F32)),
        ("bf16-mixed; head -> f32", (F32, BF16, F32)),
        ("fp16", (F16, F16, F16)),
        ("c=fp16,o=fp32", (F32, F16, F32)),
        ("O3", (F16, F16, F16)),
        (" O3 ", (F16, F16, F16)),
    ],
)
def test_a_string_gives_its_dtypes(text, expected):
    assert dtypes_of(jmp.get_policy(text)) == expected


def test_half_in_presets_is_that_of_the_backend(monkeypatch):
    class Device:
        platform = "tpu"

    monkeypatch.setattr("jax.local_devices", lambda: [Device])
    assert dtypes_of(jmp.get_policy("O1")) == (F32, BF16, F32)
    assert dtypes_of(jmp.get_policy("O3; head -> half")) == (BF16, BF16, BF16)


def test_rules_are_read_with_any_spaces_and_keep_their_order():
    spaced = jmp.get_policy(" c=f16 , o=f32 ;  head->float32 ;**/Norm* ?->  p=f32, c=bf16 ")
    assert spaced.rules == (jmp.Rule("head", "f32"), jmp.Rule("**/Norm*", "c=bf16", optional=True))
    assert jmp.get_policy("O1; head -> f32").rules == (jmp.Rule("head", "f32"),)


def test_a_question_mark_that_touches_the_pattern_belongs_to_it():
    assert jmp.get_policy("f16; layer_? -> f32").rules == (jmp.Rule("layer_?", "f32"),)
    assert jmp.get_policy("f16; layer_?-> f32").rules == (jmp.Rule("layer_?", "f32"),)
    assert jmp.get_policy("f16; layer_? ?-> f32").rules == (jmp.Rule("layer_?", "f32", optional=True),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compute_float16", "Unknown dtype 'compute_float16'"),
        ("c=f17", "Unknown dtype 'f17'"),
        ("O4", "Unknown dtype 'O4'"),
        ("", "Unknown dtype ''"),
        ("c=f16,x=f32", "Unknown key 'x' in 'c=f16,x=f32' should be 'params', 'compute' or 'output'"),
        ("c=f16,compute=f32", "The key 'compute' is given twice in 'c=f16,compute=f32'"),
        ("c=f16,", "Unknown key ''"),
        ("c=f16; head", "A rule reads 'pattern -> policy'. Got 'head'"),
        ("c=f16; -> f32", "A rule's pattern is a path"),
        ("c=f16; / -> f32", "A rule's pattern is a path"),
        ("c=f16; head -> f17", "Unknown dtype 'f17'"),
        ("c=f16;", "A rule reads"),
    ],
)
def test_a_string_that_says_nothing_sensible_is_a_value_error(text, message):
    with pytest.raises(ValueError, match=message):
        jmp.get_policy(text)


@pytest.mark.parametrize("pattern", ["", "/", "a -> b", "a; b"])
def test_a_pattern_that_could_not_be_read_back_is_a_value_error(pattern):
    with pytest.raises(ValueError, match="A rule's pattern is a path such as"):
        jmp.Rule(pattern, "f32")


@pytest.mark.parametrize("pattern", [" head", "head ", "head ?", "\thead"])
def test_a_pattern_with_spaces_at_its_ends_is_read_back_or_turned_down(pattern):
    try:
        policy = jmp.get_policy("f16").with_rules({pattern: "f32"})
    except ValueError:
        return
    assert jmp.get_policy(str(policy)) == policy


def test_a_rule_within_a_rule_is_a_value_error():
    with pytest.raises(ValueError, match="The policy of rule 'head' has rules of its own"):
        jmp.Rule("head", jmp.get_policy("f16; a -> f32"))


@pytest.mark.parametrize("bad", [jnp.int32, None, 3])
def test_dtypes_that_are_not_floating_are_a_type_error(bad):
    with pytest.raises(TypeError, match="Expected a"):
        jmp.Policy("f32", bad, "f32")
    with pytest.raises(TypeError, match="Expected a"):
        jmp.get_policy("f32").with_output_dtype(bad)


def test_with_output_dtype_changes_the_output_alone_and_keeps_rules():
    policy = jmp.get_policy("c=f16; head -> f32")
    changed = policy.with_output_dtype(jnp.bfloat16)
    assert dtypes_of(changed) == (F32, F16, BF16)
    assert changed.rules == policy.rules
    assert policy.output_dtype == F16


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


def test_rules_touch_the_same_leaves_as_the_policy():
    policy = jmp.get_policy("f16; head -> f32")
    key = jax.random.key(0)
    tree = {
        "head": {"w": jnp.ones(2, jnp.bfloat16), "n": jnp.arange(2), "k": key, "s": "x"},
        "w": np.float64(1),
    }
    result = policy.cast_to_compute(tree)
    assert (result["head"]["w"].dtype, result["w"].dtype) == (F32, F16)
    assert result["head"]["n"] is tree["head"]["n"]
    assert result["head"]["k"] is key
    assert result["head"]["s"] == "x"


# Rules


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(3)(x))
        return nn.Dense(2, name="head")(x)


RULED = "c=f16,o=f32; **/BatchNorm* -> float32; head/** -> c=bf16"


def test_rules_act_on_linen_parameters():
    params = Net().init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    policy = jmp.get_policy(RULED)
    policy.check_rules(params)
    assert names_of(policy.cast_to_compute(params)) == {
        "BatchNorm_0/bias": "float32",
        "BatchNorm_0/scale": "float32",
        "Dense_0/bias": "float16",
        "Dense_0/kernel": "float16",
        "head/bias": "bfloat16",
        "head/kernel": "bfloat16",
    }
    assert set(names_of(policy.cast_to_param(params)).values()) == {"float32"}
    # Under the collection's name too, as `model.apply` takes them.
    assert names_of(policy.cast_to_compute({"params": params}))["params/head/kernel"] == "bfloat16"


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


def test_rules_act_on_nested_containers():
    tree = {"blocks": [(jnp.ones(2), {"norm": jnp.ones(2)}), (jnp.ones(2), {"norm": jnp.ones(2)})]}
    cast = jmp.get_policy("f16; norm -> f32; /blocks/1 -> bf16").cast_to_compute(tree)
    assert names_of(cast) == {
        "blocks/0/0": "float16",
        "blocks/0/1/norm": "float32",
        "blocks/1/0": "bfloat16",
        "blocks/1/1/norm": "float32",
    }


def test_the_first_match_wins():
    one_way = jmp.Policy("f32", "f16", "f32", [("head", "bf16"), ("head/kernel", "f32")])
    other = jmp.Policy("f32", "f16", "f32", {"head/kernel": "f32", "head": "bf16"})
    assert one_way.at("head/kernel").compute_dtype == BF16
    assert other.at("head/kernel").compute_dtype == F32
    assert other.at("head/bias").compute_dtype == BF16
    assert other.at("body").compute_dtype == F16
    assert other.at("body").rules == ()


def test_later_rules_are_put_before_the_ones_that_are_there():
    policy = jmp.get_policy("f16; head -> bf16").with_rules({"head/kernel": "f32"})
    assert [rule.pattern for rule in policy.rules] == ["head/kernel", "head"]
    assert policy.at("head/kernel").compute_dtype == F32


NORMALISATION = ["BatchNorm_0", "LayerNorm_3", "GroupNorm_0", "RMSNorm_0", "norm", "layer_norm", "norm1"]
NORMALISATION += ["final_norm", "bn", "bn1", "BN", "ln_f", "ln_1", "LN"]


@pytest.mark.parametrize("name", NORMALISATION)
def test_o2_keeps_what_is_named_a_normalisation_in_float32(name):
    policy = jmp.get_policy("O2")
    tree = {"block": {name: {"scale": jnp.ones(2)}, "Dense_0": {"kernel": jnp.ones(2)}}}
    assert names_of(policy.cast_to_param(tree)) == {
        f"block/{name}/scale": "float32",
        "block/Dense_0/kernel": "float16",
    }
    assert dtypes_of(policy.at(f"block/{name}/scale")) == (F32, F32, F16)


@pytest.mark.parametrize("name", ["Dense_0", "Conv_1", "attention", "lnk", "bnet", "Embed_0", "mln"])
def test_o2_takes_nothing_else_for_a_normalisation(name):
    assert dtypes_of(jmp.get_policy("O2").at(f"{name}/kernel")) == (F16, F16, F32)


def test_o2_lets_a_model_without_normalisation_pass():
    jmp.get_policy("O2").check_rules({"Dense_0": {"kernel": jnp.ones(2)}})


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
    with pytest.raises(ValueError, match=r"matches no parameter\. Nearest: ") as error:
        policy.check_rules(params)
    assert f"'{pattern} -> p=full,c=full,o=full'" in str(error.value)
    assert nearest in str(error.value).split("Nearest: ")[1]


def test_check_rules_lists_paths_even_where_none_is_near():
    policy = jmp.get_policy("f16; zzzzzzz -> f32")
    with pytest.raises(ValueError, match="Nearest: 'head', 'head/kernel'"):
        policy.check_rules({"head": {"kernel": 1}})
    with pytest.raises(ValueError, match="Nearest: none"):
        policy.check_rules({})


def test_an_optional_rule_may_match_nothing():
    jmp.get_policy("f16; haed ?-> f32").check_rules({"head": 1})
    jmp.Policy("f16", "f16", "f16", [jmp.Rule("haed", "f32", optional=True)]).check_rules({"head": 1})


def test_a_rule_hidden_by_an_earlier_one_still_matches():
    jmp.get_policy("f16; head -> f32; head/kernel -> bf16").check_rules({"head": {"kernel": 1}})


def test_an_anchored_rule_holds_for_the_params_in_params_and_inputs():
    policy = jmp.get_policy("c=f16").with_rules({"/head": "float32"})
    params = {"head": {"kernel": jnp.ones(2)}, "body": {"head": jnp.ones(2)}}
    for cast, x in (policy.cast_to_compute((params, jnp.ones(2))), (policy.cast_to_compute(params), None)):
        assert cast["head"]["kernel"].dtype == jnp.float32
        assert cast["body"]["head"].dtype == jnp.float16
        assert x is None or x.dtype == jnp.float16

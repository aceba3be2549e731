"""`cast_params`: trained parameters in half, or an error that names those that half cannot hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_lite as jmp

HALF = jmp.get_policy("float16")


def test_parameters_get_the_dtype_of_the_policy_and_other_leaves_pass():
    params = {
        "norm": {"scale": jnp.ones(4)},
        "kernel": jnp.linspace(-1, 1, 8),
        "step": jnp.int32(3),
        "no": None,
    }
    cast = jmp.cast_params(params, HALF.with_rules({"norm": "float32"}))
    np.testing.assert_array_equal(cast["kernel"], params["kernel"].astype(jnp.float16))
    assert cast["kernel"].dtype == jnp.float16
    assert cast["norm"]["scale"] is params["norm"]["scale"]
    assert cast["step"] is params["step"]
    assert cast["no"] is None


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (7e4, "70000 is beyond 65504, the largest number of float16"),
        (-7e4, "70000 is beyond 65504"),
        (np.inf, "inf is beyond 65504"),
        (np.nan, "it has NaN"),
    ],
)
def test_a_number_that_float16_cannot_hold_is_an_error_that_names_the_parameter(bad, words):
    array = np.array if bad == 7e4 else jnp.array
    params = {"body": {"kernel": jnp.ones(3)}, "head": {"kernel": array([1.0, bad, 2.0], np.float32)}}
    with pytest.raises(
        ValueError, match=rf"(?s)survive the cast:\n  head/kernel: {words}.*{{'head': 'float32'}}"
    ):
        jmp.cast_params(params, HALF)
    kept = jmp.cast_params(params, HALF.with_rules({"head": "float32"}))
    assert (kept["head"]["kernel"].dtype, kept["body"]["kernel"].dtype) == (jnp.float32, jnp.float16)


def test_the_largest_number_of_float16_survives():
    assert jmp.cast_params(jnp.array([65504.0, 65519.0]), HALF).tolist() == [65504, 65504]
    with pytest.raises(ValueError, match="65520 is beyond"):
        jmp.cast_params({"w": jnp.array([65520.0])}, HALF)


def test_a_parameter_that_becomes_zero_is_an_error_and_a_few_of_its_numbers_are_not():
    w = jnp.ones(1000).at[:10].set(1e-8)
    assert jmp.cast_params({"w": w}, HALF)["w"][:10].tolist() == [0] * 10  # 1.0 %
    with pytest.raises(ValueError, match=r"  w: 1\.1% of its non-zero numbers become zero in float16"):
        jmp.cast_params({"w": w.at[10].set(-1e-8)}, HALF)
    with pytest.raises(ValueError, match=r"  w: 1\.0%"):
        jmp.cast_params({"w": w}, HALF, max_flushed=0)
    with pytest.raises(ValueError, match=r"temperature: 100\.0% .*\n.*{'temperature': 'float32'}"):
        jmp.cast_params({"temperature": jnp.float32(1e-9)}, HALF)
    assert (
        jmp.cast_params({"bias": jnp.zeros(4), "none": jnp.ones((0, 3))}, HALF)["bias"].dtype == jnp.float16
    )
    # bfloat16 has the range of float32.
    assert jmp.cast_params({"w": jnp.array([1e-30, 7e4])}, jmp.get_policy("bf16"))["w"].dtype == jnp.bfloat16


def test_each_parameter_is_named():
    params = {f"layer_{i}": {"kernel": jnp.full(3, 10.0**i)} for i in (3, 5, 6)}
    with pytest.raises(
        ValueError, match=r"(?s)  layer_5/kernel: .*  layer_6/kernel: .*'layer_5'.*'layer_6'"
    ) as error:
        jmp.cast_params(params, HALF)
    assert "layer_3" not in str(error.value)


def test_the_state_of_an_nnx_model_keeps_its_statistics_in_float32():
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.dense, self.norm = nnx.Linear(3, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    model = Model()
    model.norm.var[...] = jnp.full(3, 7e4)  # Beyond float16.
    before, after = nnx.state(model), jmp.cast_params(nnx.state(model), HALF)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.filter_state(after, nnx.Param))} == {"float16"}
    others = nnx.filter_state(after, nnx.BatchStat)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(others)} == {"float32"}
    np.testing.assert_array_equal(others["norm"]["var"][...], np.full(3, 7e4))
    model.dense.kernel[...] = jnp.full((3, 3), 1e5)
    said = r"dense/kernel: 100000 is beyond 65504.*\n.*{'dense': 'float32'}"
    with pytest.raises(ValueError, match=said):
        jmp.cast_params(nnx.state(model), HALF)


def test_it_says_what_it_cannot_do():
    with pytest.raises(TypeError, match=r"outside of jax\.jit"):
        jax.jit(lambda params: jmp.cast_params(params, HALF))(jnp.ones(3))
    with pytest.raises(ValueError, match=r"a share from 0 to 1\. Got 2"):
        jmp.cast_params(jnp.ones(3), HALF, max_flushed=2)


def test_a_policy_is_a_policy():
    for given in ("bloat16", None, jnp.bfloat16):
        with pytest.raises(TypeError, match=r"takes a policy, such as jmp.get_policy\('bfloat16'\). Got"):
            jmp.cast_params({"w": jnp.ones(2)}, given)

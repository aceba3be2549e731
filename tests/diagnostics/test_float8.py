"""Functions of `autocast` to fp8: `find_nonfinite` takes them, and the tools that compare do not."""

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from jmp_lite.diagnostics import compare_precision, doctor, find_nonfinite, profile_ranges
from jmp_lite.diagnostics._values.reference import has_value

pytestmark = pytest.mark.filterwarnings("ignore:autocast.*'float8'")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def two_layers(params, x, weights=1.0):
    with jax.named_scope("body"):
        hidden = jnp.tanh(x @ params["body"])
    with jax.named_scope("head"):
        return jnp.sum(weights * (hidden @ params["head"]))


PARAMS = {"body": normal(0, 64, 32) / 8, "head": normal(1, 32, 48) / 6}
X = normal(2, 16, 64)
float8 = lambda fun, **rules: jmp.autocast(fun, "float8", rules={**rules, "**": "float8"})


@pytest.mark.parametrize("name", ["e3m4", "e4m3", "e4m3fn", "e5m2", "e8m0fnu"])
def test_a_value_in_any_fp8_that_a_policy_takes_is_narrow(name):
    dtype = jmp.Policy("f32", f"float8_{name}", "f32").compute_dtype
    assert has_value(jax.make_jaxpr(lambda x: x.astype(dtype))(jnp.ones(2)))


@pytest.mark.parametrize("tool", [compare_precision, doctor, profile_ranges])
def test_the_tools_that_compare_take_no_function_in_fp8(tool):
    with pytest.raises(ValueError, match=r"compares float16 or bfloat16 with float32. Got float8"):
        tool(float8(two_layers))
    with pytest.raises(ValueError, match="Got float8"):
        tool(two_layers, "float8")


@pytest.mark.exhaustive
def test_the_origin_of_an_inf_is_found_behind_the_bits_of_fp8():
    report = find_nonfinite(float8(two_layers))(PARAMS, X.at[0, 3].set(jnp.inf))
    assert "The data in x is not finite" in report.hint
    overflow = lambda params, x: two_layers(params, jnp.exp(100 * x))
    report = find_nonfinite(float8(overflow))(PARAMS, X)
    assert report.cause.operation == "exp"

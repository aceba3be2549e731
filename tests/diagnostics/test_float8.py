"""`profile_ranges` and `compare_precision` with "float8": what fp8 flushes to zero, what a module costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_lite as jmp
from jmp_lite._float8.quantize import BACKWARD, FORWARD, quantize
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


def flushed(x, dtype):
    return int(np.sum((np.asarray(quantize(x, dtype).array, np.float32) == 0) & (np.asarray(x) != 0)))


@pytest.mark.parametrize("name", ["e3m4", "e4m3", "e4m3fn", "e5m2", "e8m0fnu"])
def test_a_value_in_any_fp8_that_a_policy_takes_is_narrow(name):
    dtype = jmp.Policy("f32", f"float8_{name}", "f32").compute_dtype
    assert has_value(jax.make_jaxpr(lambda x: x.astype(dtype))(jnp.ones(2)))


# profile_ranges


@pytest.mark.slow
def test_the_counts_are_those_of_the_operands():
    """The cotangents span 20 powers of ten. e5m2 holds about ten powers of ten."""
    weights = 10.0 ** jnp.linspace(-20, 0, 16 * 48).reshape(16, 48)
    report = profile_ranges(float8(two_layers))(PARAMS, X, weights)
    rows = {(row.name, row.direction): row for row in report.float8}
    assert [*rows] == [("body", "forward"), ("head", "forward"), ("head", "backward"), ("body", "backward")]
    head = rows["head", "backward"]
    assert (head.magnitudes.dtype, head.magnitudes.values, head.fates.zeros) == (BACKWARD, 2 * 16 * 48, 0)
    # The program casts a cotangent for each of the two products that take it.
    assert head.fates.flushed == 2 * flushed(weights, BACKWARD) > 0.6 * 16 * 48
    body = rows["body", "forward"]
    assert (body.magnitudes.dtype, body.magnitudes.values) == (FORWARD, 16 * 64 + 64 * 32)
    assert body.fates.flushed == flushed(X, FORWARD) + flushed(PARAMS["body"], FORWARD)
    assert 0.375 <= body.magnitudes.largest / float(jnp.finfo(FORWARD).max) <= 0.86
    assert "Operands of matmuls in fp8" in str(report)


@pytest.mark.slow
def test_an_outlier_flushes_the_rest_of_its_tensor():
    x = X.at[0, 0].set(1e5)
    row = profile_ranges(float8(two_layers))(PARAMS, x).float8[0]
    assert row.fates.flushed == flushed(x, FORWARD) + flushed(PARAMS["body"], FORWARD)
    assert row.fates.lost > 0.1
    # With the module in bfloat16 its tensors are no operands in fp8.
    names = {row.name for row in profile_ranges(float8(two_layers, body="bfloat16"))(PARAMS, x).float8}
    assert names == {"head"}


@pytest.mark.slow
def test_zeros_are_no_losses():
    row = profile_ranges(float8(two_layers))(PARAMS, X.at[:8].set(0.0)).float8[0]
    assert row.fates.zeros == 8 * 64
    assert row.fates.lost == 0


@pytest.mark.slow
def test_loops_are_summed_and_recomputed_layers_count_once():
    def loss(w, x):
        with jax.named_scope("body"):
            step = jax.checkpoint(lambda carry, w: (jnp.tanh(carry @ w), None))
            return jnp.sum(lax.scan(step, x, w)[0])

    report = profile_ranges(float8(loss))(normal(0, 3, 32, 32), normal(1, 16, 32))
    rows = {row.direction: row.magnitudes.values for row in report.float8}
    assert rows == {"forward": 3 * (16 * 32 + 32 * 32), "backward": 2 * 3 * 16 * 32}


@pytest.mark.slow
def test_without_products_in_fp8_there_are_no_rows():
    report = profile_ranges(two_layers, "float8")(PARAMS, X)  # The products are small.
    assert report.float8 == ()
    assert report.dtype == jnp.bfloat16
    assert "fp8" not in str(report)
    assert profile_ranges(two_layers, "bfloat16")(PARAMS, X).float8 == ()


# compare_precision


def direct_error(fun):
    exact = jax.grad(two_layers)(PARAMS, X)
    norm = lambda tree: np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(tree)))
    return norm(jax.tree.map(jnp.subtract, jax.grad(fun)(PARAMS, X), exact)) / norm(exact)


@pytest.mark.slow
def test_the_errors_are_those_of_the_functions_themselves():
    close = compare_precision(float8(two_layers))(PARAMS, X)
    assert close.is_close
    report = compare_precision(float8(two_layers), tolerance=0)(PARAMS, X)
    assert report.half.gradients == pytest.approx(direct_error(float8(two_layers)), rel=1e-3)
    assert report.rest.gradients == pytest.approx(direct_error(jmp.autocast(two_layers)), rel=1e-2)
    own = {row.module: row.own.gradients for row in report.modules}
    assert own == {
        "body": pytest.approx(direct_error(float8(two_layers, head="bfloat16")), rel=1e-3),
        "head": pytest.approx(direct_error(float8(two_layers, body="bfloat16")), rel=1e-3),
    }
    assert "module alone in fp8" in str(report)


@pytest.mark.slow
def test_the_rules_keep_the_worst_module_in_bfloat16():
    error = direct_error(float8(two_layers, body="bfloat16"))
    report = compare_precision(float8(two_layers), tolerance=1.01 * error)(PARAMS, X)
    assert report.kept == ("body",)
    assert report.rules == {"/body": "bfloat16", "**": "float8"}
    assert report.advice().startswith("To mend it: rules={'/body': 'bfloat16'")
    rules = jmp.autocast(two_layers, "float8", rules=report.rules)
    assert direct_error(rules) == pytest.approx(report.with_rules.gradients, rel=1e-3)


def test_with_no_product_in_fp8_there_is_nothing_to_compare():
    report = compare_precision(two_layers, "float8")(PARAMS, X)
    assert report.names == ()
    assert report.summary() == "No value of this function is in float8: autocast finds no product for it."


# The others


@pytest.mark.slow
def test_a_sound_model_in_fp8_is_no_finding():
    report = doctor(float8(two_layers))(PARAMS, X)
    assert not [finding for finding in report.findings if finding.severity != "speed"]


@pytest.mark.exhaustive
def test_the_origin_of_an_inf_is_found_behind_the_bits_of_fp8():
    report = find_nonfinite(float8(two_layers))(PARAMS, X.at[0, 3].set(jnp.inf))
    assert "The data in x is not finite" in report.hint
    overflow = lambda params, x: two_layers(params, jnp.exp(100 * x))
    report = find_nonfinite(float8(overflow))(PARAMS, X)
    assert report.cause.operation == "exp"

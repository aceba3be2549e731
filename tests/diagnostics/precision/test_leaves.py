"""A gradient that is wrong is found and named, however small its share of the norm of all gradients is."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_lite as jmp
from jmp_lite.diagnostics import compare_precision, doctor

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.

W, UP, DOWN, X = (
    jax.random.normal(key, shape) * size
    for key, shape, size in zip(
        jax.random.split(jax.random.key(0), 4),
        ((16, 16), (16, 32), (32, 16), (64, 16)),
        (0.3, 0.2, 0.2, 1.0),
    )
)
QUOTIENT = {"w": W, "s": jnp.full(16, 6.0)}
LAYER_SCALE = {"w": W, "up": UP, "down": DOWN, "gamma": jnp.full(16, 1e-6)}


def quotient(dtype):
    """The derivative of the quotient squares the divisor, exp(6) = 403, which overflows: that of `s` is 0."""

    def loss(p, x):
        h, s = (x @ p["w"]).astype(dtype), jnp.exp(p["s"]).astype(dtype)
        return jnp.mean((h / s).astype(jnp.float32) ** 2) + jnp.mean(x @ p["w"])

    return loss


def layer_scale(p, x):
    """ConvNeXt's: the gradients inside the block are 1e-6 times the others, and 0 in float16."""
    h = x @ p["w"]
    h = h + p["gamma"] * (jax.nn.gelu(h @ p["up"]) @ p["down"])
    return jnp.mean(h**2)


def norms(p, x):
    """The gradient of a bias in front of a normalization is rounding error in every dtype."""
    h = x @ p["w"] + p["bias"]
    return jnp.mean(jnp.abs((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5) - 1))


def error_of(name, fun, reference, params, scale=1.0):
    """The error of one gradient in half, over its norm in float32."""
    half = jax.jit(jmp.value_and_grad(fun, jmp.StaticLossScale(scale)))(params, X)[1][name]
    full = jax.jit(jax.grad(reference))(params, X)[name]
    return float(jnp.linalg.norm(half - full) / jnp.linalg.norm(full))


def test_a_quotient_by_hand_whose_divisor_gets_no_gradient():
    half = quotient(jnp.float16)
    assert error_of("s", half, quotient(jnp.float32), QUOTIENT) == 1
    report = compare_precision(half)(QUOTIENT, X)
    assert report.half.gradients < 1e-3  # The norm of all gradients does not show it.
    assert (report.half.group, report.half.leaf) == ("s", 1)
    assert not report.is_close
    assert "(s is lost as a whole)" in " ".join(str(report).split())
    assert report.with_rules.leaf < 1e-3
    (finding,) = (f for f in doctor(half, device=None)(QUOTIENT, X).findings if f.severity == "accuracy")
    assert "s is lost as a whole" in finding.what
    assert finding.advice.startswith("To mend it: use float32 instead of float16 on line ")


def test_small_gradients_need_a_loss_scale_although_the_norm_of_all_is_right():
    half = jmp.autocast(layer_scale, "float16")
    assert error_of("up", half, layer_scale, LAYER_SCALE) == 1
    assert error_of("up", half, layer_scale, LAYER_SCALE, 2.0**15) < 0.1
    report = compare_precision(half)(LAYER_SCALE, X)
    assert report.is_close
    assert report.unscaled.leaf == 1
    assert report.unscaled.gradients < 1e-3
    (finding,) = (f for f in doctor(half, device=None)(LAYER_SCALE, X).findings if f.severity == "accuracy")
    assert "Without a loss scale" in finding.what
    assert "jmp.DynamicLossScale" in finding.advice


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_gradient_that_is_rounding_error_in_float32_too_is_not_judged(dtype):
    params = {"w": W, "bias": jnp.full(16, 0.1)}
    assert error_of("bias", jmp.autocast(norms, dtype), norms, params) > 1
    diagnosis = doctor(norms, dtype, device=None)(params, X)
    assert diagnosis.precision.half.leaf < 0.1
    assert [finding for finding in diagnosis.findings if finding.severity == "accuracy"] == []


def test_a_step_in_which_a_moment_stays_zero_in_half_alone():
    tx = optax.sgd(1e-9, momentum=0.9)

    def step(params, state, x):
        grads = jax.grad(jmp.autocast(layer_scale, "float16"))(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    diagnosis = doctor(step, value_and_grad_fn=None, device=None)(LAYER_SCALE, tx.init(LAYER_SCALE), X)
    (finding,) = (finding for finding in diagnosis.findings if finding.severity == "accuracy")
    assert finding.what.startswith("The update is lost for 100% of the elements of state/0/trace/down")
    assert "the loss is not scaled" in finding.advice

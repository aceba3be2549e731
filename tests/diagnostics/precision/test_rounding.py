"""[precision]: the gradient is rounding error in half, judged by its direction, also at nearby parameters."""

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from jmp_lite.diagnostics import compare_precision, doctor

KEYS = jax.random.split(jax.random.key(0), 3)
X, BEST = jax.random.normal(KEYS[0], (64, 16)), jax.random.normal(KEYS[1], (16, 8))
Y = X @ BEST


def loss(p, x, y):
    return jnp.mean((x @ p - y) ** 2)


def by_hand(p, x, y):
    return jnp.mean(((x.astype(jnp.bfloat16) @ p.astype(jnp.bfloat16)).astype(jnp.float32) - y) ** 2)


def near(distance):
    """Parameters at a distance from the optimum."""
    return BEST + distance * jax.random.normal(KEYS[2], (16, 8)), X, Y


def of_precision(fun, *args):
    findings = doctor(fun, device=None)(*args).findings
    return [finding for finding in findings if finding.severity != "speed"]


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("fun", [jmp.autocast(loss, "bfloat16"), by_hand], ids=["autocast", "by_hand"])
def test_next_to_an_optimum_the_gradient_is_rounding_error_and_no_rule_helps(fun):
    (finding,) = of_precision(fun, *near(1e-4))
    assert finding.severity == "precision"
    assert finding.what.startswith(
        "In bfloat16 this gradient is mostly rounding error (21 times off, cosine 0.19)"
    )
    assert "float16 with a loss scale: " in finding.advice
    # No other sentence about the error of the loss, and no edit.
    assert "To mend" not in str(doctor(fun, device=None)(*near(1e-4)))
    report = compare_precision(fun)(*near(1e-4))
    assert report.is_rounding
    assert report.advice() == "No rule helps: in bfloat16 this gradient is mostly rounding error."


@pytest.mark.slow
@pytest.mark.parametrize("distance", [1e-2, 1.0])
def test_further_away_it_is_not(distance):
    assert of_precision(jmp.autocast(loss, "bfloat16"), *near(distance)) == []


@pytest.mark.slow
def test_where_training_in_half_ends_nothing_is_said():
    """There, the gradient is mostly rounding error at this point and not nearby."""
    half = jmp.autocast(loss, "bfloat16")

    def step(p, _):
        return p - 0.5 * jax.grad(half)(p, X, Y), None

    p, _ = jax.jit(lambda p: jax.lax.scan(step, p, None, 500))(near(1.0)[0])
    assert of_precision(half, p, X, Y) == []

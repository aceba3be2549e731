"""What a report says of a number that float16 rounds away, and of the program in float32, is true."""

import jax.numpy as jnp
import pytest

from jmp_lite.diagnostics import find_nonfinite

F16, F32 = jnp.float16, jnp.float32
X, W = jnp.zeros((2, 4)), jnp.ones(4)
EPS = 1e-12


def norm(v):
    return jnp.sum(jnp.abs(v), -1, keepdims=True)


def with_maximum(v):
    return v / jnp.maximum(norm(v), 1e-12)


def with_full(v):
    return v / (norm(v) + jnp.full((2, 1), 1e-8, F16))


def with_a_global(v):
    return v / (norm(v) + EPS)


def report_of(divided):
    return find_nonfinite(lambda w, x: jnp.sum(divided((x * w).astype(F16)).astype(F32)))(W, X)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("divided", "number"), [(with_maximum, "1e-12"), (with_full, "1e-08"), (with_a_global, "1e-12")]
)
def test_the_number_is_that_of_the_source_and_float32_is_finite(divided, number):
    report = report_of(divided)
    assert report.is_finite_in_float32
    assert report.remedies
    (said,) = report.rounded
    assert said.startswith(f"The number {number} on ")
    assert said.endswith(" is 0 in float16.")


@pytest.mark.slow
def test_a_number_that_is_not_in_the_source_is_not_said():
    def with_an_argument(v, eps):
        return v / (norm(v) + eps)

    report = report_of(lambda v: with_an_argument(v, 1e-12))
    assert report.rounded == ()
    assert report.remedies


@pytest.mark.slow
def test_the_zero_of_a_python_sum_is_no_number():
    def loss(w, x):
        total = sum([(x * w).astype(F16)[:, n] for n in range(4)])
        return jnp.mean(jnp.exp(total * 12).astype(F32)) * 1e-9

    report = find_nonfinite(loss)(W, X + 1)
    assert report.cause.operation == "exp"
    assert report.rounded == ()

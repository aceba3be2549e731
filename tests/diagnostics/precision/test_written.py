"""A remedy is written into the program, and the program that results decides whether it helps."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jmp_lite.diagnostics import compare_precision, doctor, find_nonfinite

F16 = jnp.float16
X = 100 * jax.random.normal(jax.random.key(0), (16, 8))


def tree_map(h):
    return jax.tree.map(lambda leaf: leaf.astype(F16), {"h": h})["h"]


AGAIN = {
    "partial": functools.partial(jnp.asarray, dtype=F16),
    "preferred": lambda h: jnp.dot(h, jnp.eye(8, dtype=F16), preferred_element_type=F16),
    "sum": lambda h: jnp.sum(h[None], 0, dtype=F16),
    "mean": lambda h: jnp.mean(h[None], 0, dtype=F16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGAIN)
def test_a_cast_that_is_made_again_later_is_part_of_the_remedy(name):
    def loss(x):
        h = x.astype(F16)
        return jnp.mean(jnp.square(AGAIN[name](h)).astype(jnp.float32))

    (trial,) = (trial for trial in find_nonfinite(loss)(300 * X).tried if not trial.dtype)
    # The cast of `partial` was made when this module was imported.
    assert trial.helps == (name != "partial")
    assert len(trial.lines) == 1 + trial.helps


@pytest.mark.slow
def test_a_cast_in_a_tree_is_part_of_the_remedy():
    def loss(x):
        h = x.astype(F16)
        return jnp.mean(jnp.square(tree_map(h)).astype(jnp.float32))

    (trial,) = (trial for trial in find_nonfinite(loss)(300 * X).tried if not trial.dtype)
    assert trial.helps
    assert len(trial.lines) == 2


@pytest.mark.slow
def test_an_edit_that_the_program_refuses_is_no_remedy():
    def loss(x):
        h = x.astype(F16)
        if h.dtype != F16:
            raise RuntimeError("It should be in half.")
        return jnp.mean(jnp.square(h).astype(jnp.float32))

    report = find_nonfinite(loss)(X * 10)
    assert all(trial.dtype or not trial.helps for trial in report.tried)


@pytest.mark.slow
def test_random_numbers_that_are_zero_in_half_alone_are_not_said_to_be_zero_in_float32():
    def loss(x, key):
        return jnp.mean(x * -jnp.log(jax.random.uniform(key, (4096,), F16)).astype(jnp.float32))

    args = jnp.ones(4096), jax.random.key(0)
    diagnosis = doctor(loss, device=None)(*args)
    assert diagnosis.nonfinite.is_finite_in_float32 is None
    assert "not finite either" not in str(diagnosis)
    assert diagnosis.skipped["the values in half"].startswith("It is finite in float32 only with")
    ordinary = find_nonfinite(lambda x, key: loss(x, key) / 0.0)(*args)
    assert ordinary.is_finite_in_float32 is False


@pytest.mark.slow
def test_a_state_that_the_step_rounds_again_is_not_mended_by_its_argument():
    tx = optax.scale_by_adam(mu_dtype=F16)
    fun = lambda w, x: 1e-6 * jnp.mean((x @ w) ** 2)

    def step(w, state, x):
        updates, state = tx.update(jax.grad(fun)(w, x), state, w)
        return w - 1e-2 * updates, state

    w = jnp.ones((8, 4))
    page = str(doctor(step, value_and_grad_fn=None, device=None)(w, tx.init(w), X / 100))
    assert "The update is lost" in page
    assert "pass these arguments" not in page


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize(
    ("dtype", "mask", "last"),
    [
        (F16, lambda h: h * h > 1e5, 400),
        (jnp.bfloat16, lambda h: h <= 0.999, 1),
        (jnp.bfloat16, lambda h: jnp.floor(h) + 255 < 257, 4),
    ],
)
def test_a_comparison_with_a_number_that_half_rounds_is_compared(dtype, mask, last):
    def loss(w, x):
        h = x.astype(dtype)
        return jnp.mean(jnp.where(mask(h), 0, x) * w) ** 2

    x = jnp.linspace(0.98 * min(last, 1), last, 512)
    exact = jnp.mean(jnp.where(mask(x), 0, x)) ** 2
    report = compare_precision(loss)(jnp.ones(()), x)
    assert report.half.loss == pytest.approx(float(abs(loss(1.0, x) - exact) / exact), rel=0.02)
    assert report.half.loss > 0.1
    assert re.search(r"use float32 instead of \w+ on line \S+test_written.py", report.change)


def test_an_operation_without_a_rule_is_said_to_run_as_written():
    double = Primitive("double_of_a_test")
    double.def_abstract_eval(lambda x: x)
    mlir.register_lowering(double, mlir.lower_fun(lambda x: x + x, multiple_results=False))

    def loss(w, x):
        return jnp.sum(w * double.bind(x.astype(F16)).astype(jnp.float32))

    skipped = doctor(loss, device=None)(jnp.ones(()), X).skipped
    (name,) = (name for name in skipped if name.startswith("double_of_a_test on "))
    assert skipped[name] == "It runs in half in the comparison with float32 as well."
    assert doctor(lambda x: jnp.sum(x.astype(F16)) * 1.0, device=None)(X).skipped.keys() == set()

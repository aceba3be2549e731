"""Each pass over a plan changes a number: what is kept, a gradient at the end of training, a precision.

`python -m benchmarks.compiled.passes` has the bytes of whole programs, for docs/how-autocast-works.md.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from jmp_lite._autocast import planner
from jmp_lite._autocast.planning.passes.checkpoints import checkpoints
from jmp_lite._autocast.planning.passes.pairs import pairs
from jmp_lite._autocast.planning.passes.precision import precision
from jmp_lite._autocast.planning.passes.recompute import recompute
from tests.autocast.test_cotangents import X as ROWS
from tests.autocast.test_cotangents import errors, fit
from tests.support.jaxprs import equations
from tests.support.small_programs import W, X


def kept_in_float32(fun, half):
    """How many float32 values of a function are kept for its backward pass."""
    pullback = jax.vjp(jmp.autocast(fun, half), X)[1]
    leaves = jax.tree.leaves(pullback)
    return sum(leaf.dtype == jnp.float32 for leaf in leaves if getattr(leaf, "shape", 0) == X.shape)


def of_activation():
    return kept_in_float32(lambda x: jax.nn.gelu(x @ W) @ W, "float16")


def of_checkpoint():
    norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    layer = jax.checkpoint(lambda x: x + norm(x) @ W)
    return kept_in_float32(lambda x: layer(layer(x + 1.0)), "bfloat16")


def of_loss():
    labels = jnp.arange(len(ROWS)) % 4
    loss = lambda logits: optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return errors(loss, fit(loss)(1e-4)[0], "bfloat16")["inside"]


def of_matmuls():
    """How many float32 matmuls have another precision than `jax_default_matmul_precision`."""
    kept = jmp.full_precision(lambda w: w @ w)
    with jax.default_matmul_precision("highest"):
        found = list(equations(jax.make_jaxpr(jmp.autocast(lambda w: kept(w) @ w, "bfloat16"))(W)))
    dots = [each for each in found if each.primitive.name == "dot_general"]
    return sum(each.params["precision"] is None for each in dots if each.invars[0].aval.dtype == jnp.float32)


# For each pass, what it makes smaller, and the part that may be left. A pass that only records is counted by
# what it leaves out.
NUMBERS = {
    recompute: (of_activation, 0.0),
    pairs: (of_loss, 0.3),
    checkpoints: (of_checkpoint, 0.5),
    precision: (of_matmuls, 0.0),
}


def test_each_pass_has_a_number_and_a_row_in_the_page():
    page = (Path(__file__).parents[2] / "docs" / "how-autocast-works.md").read_text()
    for each in planner.PASSES:
        name = f"`{each.__name__}`"
        assert each in NUMBERS, f"{name} needs a row in NUMBERS"
        assert f"| {name} |" in page, f"the page does not say what {name} guarantees"
        assert f"| with {name} |" in page, (
            f"the page has no row 'with {name}': python -m benchmarks.compiled.passes"
        )


# The number of `pairs` is that of a model at the end of its training.
CASES = [
    pytest.param(index, id=each.__name__, marks=pytest.mark.slow if each is pairs else ())
    for index, each in enumerate(planner.PASSES)
]


@pytest.mark.parametrize("index", CASES)
def test_a_number_falls_with_each_pass(index, monkeypatch):
    measure, left = NUMBERS[planner.PASSES[index]]
    with_pass, before = planner.PASSES[: index + 1], planner.PASSES[:index]
    found = []
    for passes in (before, with_pass):
        monkeypatch.setattr(planner, "PASSES", passes)
        found.append(measure())
    assert found[0] > 0
    assert found[1] <= left * found[0], found


@pytest.mark.parametrize("count", range(len(planner.PASSES) + 1))
def test_fewer_passes_give_the_same_loss_and_matmuls(count, monkeypatch):
    fun = lambda w: jnp.mean(jnp.square(jax.nn.gelu(X @ w) @ w))
    whole = jmp.autocast(fun, "bfloat16")(W)
    monkeypatch.setattr(planner, "PASSES", planner.PASSES[:count])
    np.testing.assert_allclose(jmp.autocast(fun, "bfloat16")(W), whole, rtol=2e-2)
    jaxpr = jax.make_jaxpr(jax.grad(jmp.autocast(fun, "bfloat16")))(W)
    dots = [each for each in equations(jaxpr) if each.primitive.name == "dot_general"]
    assert {each.invars[0].aval.dtype.name for each in dots} == {"bfloat16"}

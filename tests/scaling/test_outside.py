"""What is outside of `with_loss_scale`: transforms that are chained after it, and solvers that raise."""

import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from tests.support.steps import bits, make_grads, make_params, make_step, spoil

OUTSIDE = {
    "weight decay": optax.add_decayed_weights(-0.1),
    "momentum": optax.trace(0.9),
    "schedule": optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, 10)),
}


def selecting_step(tx):
    """The step that docs/loss-scaling.md describes for transforms that stay outside."""

    @jax.jit
    def step(params, opt_state, grads):
        updates, new_state = tx.update(grads, opt_state, params)
        finite = jmp.grads_finite(new_state)
        new_params = jmp.select_tree(finite, optax.apply_updates(params, updates), params)
        others = jmp.select_tree(finite, new_state[1:], opt_state[1:])
        return new_params, (new_state[0], *others)

    return step


# The other pairs say the same.
PAIRS = [
    ("weight decay", jmp.with_loss_scale),
    ("momentum", jmp.skip_nonfinite),
    ("schedule", jmp.with_loss_scale),
]


@pytest.mark.cases(fast=1, slow=2)
@pytest.mark.parametrize(("name", "wrap"), PAIRS)
def test_what_is_chained_after_acts_on_a_skipped_step_and_selecting_stops_it(name, wrap):
    tx = optax.chain(wrap(optax.adam(1e-2)), OUTSIDE[name])
    params, state = make_step(tx)(make_params(), tx.init(make_params()), make_grads(0))
    bad = spoil(make_grads(1))
    moved = make_step(tx)(params, state, bad)
    assert (bits(moved[0]), bits(moved[1][1:])) != (bits(params), bits(state[1:]))
    kept = selecting_step(tx)(params, state, bad)
    assert bits(kept[0]) == bits(params)
    assert bits(kept[1][1:]) == bits(state[1:])
    assert jmp.metrics(kept[1])["skipped_steps"] == 1
    if wrap is jmp.with_loss_scale:
        assert float(jmp.get_loss_scale(kept[1]).loss_scale) == 2.0**14


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("name", OUTSIDE)
def test_selecting_changes_nothing_on_a_step_that_is_taken_and_inside_all_is_kept(name):
    tx = optax.chain(jmp.with_loss_scale(optax.adam(1e-2)), OUTSIDE[name])
    arguments = make_params(), tx.init(make_params()), make_grads(0)
    assert bits(selecting_step(tx)(*arguments)) == bits(make_step(tx)(*arguments))
    inside = jmp.with_loss_scale(optax.chain(optax.adam(1e-2), OUTSIDE[name]))
    params, state = make_step(inside)(make_params(), inside.init(make_params()), make_grads(0))
    after = make_step(inside)(params, state, spoil(make_grads(1)))
    assert bits((after[0], after[1].inner_state)) == bits((params, state.inner_state))


def test_what_is_outside_sees_minus_zero():
    seen = []

    def update(updates, state, params=None):
        seen.append(updates)
        return updates, state

    watch = optax.GradientTransformation(lambda params: (), update)
    tx = optax.chain(jmp.with_loss_scale(optax.adamw(1e-2)), watch)
    params = make_params()
    tx.update(spoil(make_grads(0)), tx.init(params), params)
    for leaf in jax.tree.leaves(seen):
        assert (leaf == 0).all()
        assert np.signbit(leaf).all()


SOLVER = """
import jax, jax.numpy as jnp, lineax, optax, jmp_lite as jmp

def loss_fn(w, x):
    return jnp.mean(lineax.linear_solve(lineax.MatrixLinearOperator(w), x @ w).value ** 2)

tx = jmp.with_loss_scale(optax.sgd(1e-3))
w = 2 * jnp.eye(8)
state = tx.init(w)

@jax.jit
def step(w, state, x):
    half = jmp.autocast(loss_fn, jnp.float16)
    loss, grads = jmp.value_and_grad(half, jmp.get_loss_scale(state))(w, x)
    updates, state = tx.update(grads, state, w)
    return optax.apply_updates(w, updates), state

for x in (jnp.ones(8), jnp.full(8, 1e30), jnp.ones(8)):
    w, state = jax.block_until_ready(step(w, state, x))
print("skipped", jmp.metrics(state)["skipped_steps"], bool(jnp.isfinite(w).all()))
"""


@pytest.mark.slow
def test_lineax_ends_the_program_on_an_overflow_and_skips_with_its_switch():
    pytest.importorskip("lineax")
    ended, skipped = (
        subprocess.run(
            [sys.executable, "-c", SOLVER],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | extra,
        )
        for extra in ({}, {"EQX_ON_ERROR": "nan"})
    )
    assert ended.returncode != 0
    assert "non-finite" in ended.stderr
    assert skipped.returncode == 0, skipped.stderr
    assert skipped.stdout.split() == ["skipped", "1", "True"]

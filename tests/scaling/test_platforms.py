"""A skipped step on a CPU, where the update runs under a condition, and on a GPU, where it is selected."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "b": jnp.array([0.0, -0.0, 1.0])}
GOOD = jax.tree.map(lambda x: x + 0.5, PARAMS)
BAD = {**GOOD, "b": jnp.array([1.0, jnp.inf, 2.0])}
INNER = {
    "adamw": lambda: optax.adamw(1e-2),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "multi": lambda: optax.MultiSteps(optax.adamw(1e-2), 2),
    "masters": lambda: jmp.with_master_weights(optax.adamw(1e-2)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adamw(1e-2)),
}


def bits(tree):
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [(np.asarray(data(x)).tobytes(), x.dtype, x.shape) for x in jax.tree.leaves(tree)]


def step_of(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def test_a_cpu_has_a_condition_and_a_gpu_none():
    """benchmarks/tests/compiled/test_h100.py counts the conditions and kernels of a whole GPU program."""
    tx = jmp.with_loss_scale(optax.adamw(1e-2))
    traced = jax.jit(step_of(tx)).trace(PARAMS, tx.init(PARAMS), GOOD)
    lowered = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda", "tpu")}
    # JAX writes the choice of the platform as conditions on a constant, which XLA folds.
    cases = {name: text.count("stablehlo.case") for name, text in lowered.items()}
    assert cases["cpu"] - 1 == cases["cuda"] == cases["tpu"]
    assert traced.lower().compile().as_text().count(" conditional(") == 1


def test_the_optimizer_is_traced_once():
    calls = []

    def update(updates, state, params=None):
        calls.append(1)
        return updates, state

    tx = jmp.with_loss_scale(optax.GradientTransformation(lambda params: optax.EmptyState(), update))
    jax.jit(step_of(tx)).trace(PARAMS, tx.init(PARAMS), GOOD)
    assert len(calls) == 1


@pytest.mark.parametrize("name", INNER)
def test_a_skipped_step_under_jit_changes_no_bit(name):
    tx = jmp.skip_nonfinite(INNER[name]())
    params = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS) if name == "masters" else PARAMS
    step = jax.jit(step_of(tx), donate_argnums=(0, 1))
    params, state = step(jax.tree.map(jnp.copy, params), tx.init(params), GOOD)
    before = bits((params, state.inner_state))
    params, state = step(params, state, BAD)
    assert bits((params, state.inner_state)) == before
    assert not jmp.grads_finite(state)
    params, state = step(params, state, GOOD)
    params, state = step(params, state, GOOD)
    assert bits(params) != before[: len(jax.tree.leaves(params))]


@pytest.mark.parametrize("grads", [GOOD, BAD], ids=["finite", "skipped"])
def test_vmap_selects_for_each_member(grads):
    tx = jmp.with_loss_scale(optax.adamw(1e-2))
    step, state = step_of(tx), tx.init(PARAMS)
    stack = lambda *trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    together = jax.jit(jax.vmap(step, in_axes=(None, None, 0)))(PARAMS, state, stack(grads, GOOD))
    for index, alone in enumerate((grads, GOOD)):
        expected = jax.jit(step)(PARAMS, state, alone)
        for value, other in zip(jax.tree.leaves(together), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(value[index], other, rtol=1e-6)


def test_a_scan_of_good_and_bad_steps():
    tx = jmp.with_loss_scale(optax.adamw(1e-2))
    step, batches = step_of(tx), [GOOD, BAD, GOOD, BAD]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    first = (PARAMS, tx.init(PARAMS))
    last, _ = jax.jit(lambda carry: jax.lax.scan(lambda c, g: (step(*c, g), None), carry, stacked))(first)
    carry = first
    for grads in batches:
        carry = jax.jit(step)(*carry, grads)
    assert bits(last) == bits(carry)


@pytest.mark.parametrize("reverse", [jax.grad, lambda fun: jax.jit(jax.grad(fun))])
def test_a_gradient_goes_through_an_update(reverse):
    """As in meta-learning: of a plain SGD step the gradient is minus the learning rate."""
    tx = jmp.skip_nonfinite(optax.sgd(0.25))
    state = tx.init(PARAMS)
    total = lambda grads: sum(x.sum() for x in jax.tree.leaves(tx.update(grads, state, PARAMS)[0]))
    slope = reverse(total)(GOOD)
    assert all((np.asarray(leaf) == -0.25).all() for leaf in jax.tree.leaves(slope))


def test_an_update_outside_of_jit_is_called_with_arrays():
    """JAX would compile a condition anew on each call outside of `jit`."""
    traced = []

    def update(updates, state, params=None):
        traced.extend(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((updates, params)))
        return updates, state

    tx = jmp.skip_nonfinite(optax.GradientTransformation(lambda params: optax.EmptyState(), update))
    tx.update(GOOD, tx.init(PARAMS), PARAMS)
    assert traced == [False] * 4

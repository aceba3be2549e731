"""`TracedUpdate`: the update itself where finite, the old state bit for bit elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import equations

from jmp_lite._scaling.early_select import TracedUpdate

PARAMS = {"w": jnp.linspace(-1, 1, 12).reshape(3, 4), "b": jnp.ones(4)}
GRADS = jax.tree.map(jnp.cos, PARAMS)

INNER = {
    "adamw": optax.adamw(optax.linear_schedule(0.1, 0.0, 10)),
    "adafactor": optax.adafactor(0.1),
    "noise": optax.chain(optax.add_noise(0.1, 0.1, jax.random.key(0)), optax.sgd(0.1, momentum=0.9)),
    "steps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.lion)(learning_rate=optax.linear_schedule(0.1, 0.0, 10)),
}


def data(tree):
    """The arrays of a tree, keys as numbers."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_where_finite_it_is_the_update_and_elsewhere_the_old_state(inner, jit):
    step = lambda finite, g, s, p: TracedUpdate(inner.update, g, s, p).run(finite)
    step = jax.jit(step) if jit else step
    plain = jax.jit(inner.update) if jit else inner.update
    state = inner.init(PARAMS)
    for _ in range(3):
        bad = jax.tree.map(lambda g: g * jnp.nan, GRADS)
        _, kept = step(jnp.bool_(False), bad, state, PARAMS)
        for a, b in zip(data(kept), data(state), strict=True):
            np.testing.assert_array_equal(a, b)
        updates, taken = step(jnp.bool_(True), GRADS, state, PARAMS)
        expected_updates, state = plain(GRADS, state, PARAMS)
        assert jax.tree.structure((updates, taken)) == jax.tree.structure((expected_updates, state))
        for a, b in zip(data((updates, taken)), data((expected_updates, state)), strict=True):
            np.testing.assert_allclose(a, b, rtol=4 * np.finfo(np.float32).eps)


def test_the_update_reads_the_chosen_moment_so_that_there_is_one_version_of_it():
    inner = optax.trace(0.9)
    run = lambda finite, g, s: TracedUpdate(inner.update, g, s, None).run(finite)
    jaxpr = jax.make_jaxpr(run)(jnp.bool_(True), GRADS, inner.init(PARAMS))
    updates, state = jaxpr.jaxpr.outvars[:2], jaxpr.jaxpr.outvars[2:]
    assert updates == state
    assert sum(eqn.primitive.name == "select_n" for eqn in equations(jaxpr)) == len(state)


def test_values_that_are_no_new_ones_are_kept_too():
    """States that hand on an input, a constant, one value twice, or another dtype."""

    def update(updates, state, params):
        del params
        moved = state["a"] + 1
        return updates, {"a": moved, "b": moved, "c": updates, "d": jnp.float32(7), "e": state["e"] * 1.5}

    state = {
        "a": jnp.float32(1),
        "b": jnp.float32(2),
        "c": jnp.float32(3),
        "d": jnp.float32(4),
        "e": jnp.int32(5),
    }
    run = lambda finite: TracedUpdate(update, jnp.float32(9), state, None).run(jnp.bool_(finite))
    assert jax.tree.map(float, run(True)[1]) == {"a": 2, "b": 2, "c": 9, "d": 7, "e": 7.5}
    assert jax.tree.map(float, run(False)[1]) == {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}


def test_named_scopes_of_the_optimizer_are_kept_for_the_profiler():
    def update(updates, state, params):
        with jax.named_scope("my_moment"):
            return updates, state * 0.9 + updates

    run = lambda g, s: TracedUpdate(update, g, s, None).run(jnp.bool_(True))
    assert "my_moment" in jax.jit(run).lower(jnp.ones(2), jnp.ones(2)).as_text(debug_info=True)


def test_a_state_of_another_structure_is_an_error():
    with pytest.raises(ValueError, match="another structure than it was given"):
        TracedUpdate(lambda g, s, p: (g, (s, s)), jnp.ones(2), jnp.ones(2), None)

"""`resume` matches parameters by their names alone: no parameter gets the values of another one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp


def stepped(tx, params, steps=1):
    """A state of `tx` after some steps; each parameter has moments of its own."""
    state = tx.init(params)
    for _ in range(steps):
        grads = jax.tree.unflatten(
            jax.tree.structure(params),
            [(0.1 + index) * jnp.ones_like(leaf) for index, leaf in enumerate(jax.tree.leaves(params))],
        )
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return state


A, B, C = jnp.ones(5), jnp.full(5, 2.0), jnp.full(5, 3.0)
TREES = {
    "names": {"a": A, "b": B},
    "nested": {"a": {"b": A, "c": B}, "d": C},
    "a tuple": (A, B, C),
    "a tuple with None": (None, A, B),
    "None in between": {"layers": (A, None, (B, None, C))},
    "a slash in a name": {"a": {"b": A}, "a/b": B},
    "one": (A,),
    "one array": A,
    "a list of one": [{"w": A}],
}
PAIRS = {
    "plain to scale": (lambda tx: tx, jmp.with_loss_scale),
    "scale to plain": (jmp.with_loss_scale, lambda tx: tx),
    "scale to masters": (jmp.with_loss_scale, lambda tx: jmp.with_loss_scale(jmp.with_master_weights(tx))),
    "plain to bfloat16 state": (lambda tx: tx, lambda tx: jmp.cast_state(tx)),
    "chain with a clip": (lambda tx: tx, lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx)),
    "apply_if_finite to scale": (lambda tx: optax.apply_if_finite(tx, 5), jmp.with_loss_scale),
}
OPTIMIZERS = {
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "rmsprop": optax.rmsprop(0.1, momentum=0.9),
    "lion": optax.lion(0.1),
    "adagrad": optax.adagrad(0.1),
    "adabelief": optax.adabelief(0.1),
    "lamb": optax.lamb(0.1),
    "amsgrad": optax.amsgrad(0.1),
}


def leaves_by_path(state):
    """The leaves of a state that have the shape of a parameter, in float32."""
    return [np.float32(leaf) for leaf in jax.tree.leaves(state) if np.shape(leaf) == (5,)]


@pytest.mark.cases(fast=len(TREES), slow=3 * len(TREES))
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_parameter_keeps_its_own_values(name, tree, pair):
    before, after = PAIRS[pair]
    params, tx = TREES[tree], OPTIMIZERS[name]
    old = stepped(before(tx), params)
    new = jmp.resume(after(tx), params, old)
    assert jax.tree.structure(new) == jax.tree.structure(after(tx).init(params))
    expected = leaves_by_path(old)
    found = leaves_by_path(new)
    assert len(found) == len(expected)  # Float32 parameters have no masters.
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2.0**-8)


@pytest.mark.parametrize(
    ("old", "new"),
    [((A, B), (None, B)), ((None, A, B), (A, B, None)), ((A,), (A, B)), ({"a": A}, {"b": A}), ([A, B], [B])],
)
def test_other_parameters_are_an_error_that_names_them(old, new):
    for wrap in (lambda tx: tx, jmp.with_loss_scale):
        tx = wrap(optax.adam(0.1))
        with pytest.raises(ValueError, match=r"(it lacks|tx does not know its) '0/(mu|nu)"):
            jmp.resume(tx, new, stepped(tx, old))


def test_masters_of_a_renamed_parameter_are_an_error():
    tx = jmp.with_master_weights(optax.sgd(0.1))
    old = tx.init({"a": jnp.bfloat16(A)})
    with pytest.raises(ValueError, match="masters/b"):
        jmp.resume(tx, {"b": jnp.bfloat16(A)}, old)
    flat = optax.flatten(jmp.with_master_weights(optax.adam(0.1)))
    params = {"a": jnp.bfloat16(A), "b": jnp.bfloat16(B)}
    with pytest.raises(ValueError, match="masters"):
        jmp.resume(jmp.with_master_weights(optax.flatten(optax.adam(0.1))), params, flat.init(params))


def test_scales_are_matched_by_their_names():
    scale = lambda start, name: jmp.with_loss_scale(optax.adam(0.1), jmp.DynamicLossScale(start), name=name)
    params = {"a": A, "b": B}
    chain = lambda *names: optax.chain(*(scale(2.0**number, name) for number, name in names))
    old = stepped(chain((10, "first"), (4, "second")), params)
    new = jmp.resume(chain((15, "second"), (15, "first")), params, old)
    assert float(jmp.get_loss_scale(new, name="first").loss_scale) == 2.0**10
    assert float(jmp.get_loss_scale(new, name="second").loss_scale) == 2.0**4


def test_numbers_of_64_bits_are_not_narrowed_without_a_word():
    tx, params = optax.adam(0.1), {"a": A}
    state = stepped(tx, params)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64 if x.dtype == jnp.float32 else np.int64), state)
    with pytest.raises(ValueError, match="'0/count' is int64 there and int32 in tx"):
        jmp.resume(tx, params, wide)


def test_another_optimizer_with_the_same_fields_is_an_error():
    params = {"a": A}
    with pytest.raises(ValueError, match=r"ScaleByAdamState.*ScaleByBeliefState"):
        jmp.resume(optax.adabelief(0.1), params, stepped(optax.adam(0.1), params))


def test_an_accumulator_with_inf_does_not_move_outside():
    params, tx = {"a": A}, optax.sgd(0.1)
    inside = optax.MultiSteps(jmp.with_loss_scale(tx), 4)
    _, old = inside.update({"a": A * jnp.inf}, inside.init(params), params)
    with pytest.raises(ValueError, match=r"acc_grads.*inf or NaN"):
        jmp.resume(jmp.with_loss_scale(optax.MultiSteps(tx, 4)), params, old)
    _, finite = inside.update({"a": A}, inside.init(params), params)
    moved = jmp.resume(jmp.with_loss_scale(optax.MultiSteps(tx, 4)), params, finite)
    np.testing.assert_array_equal(moved.inner_state.acc_grads["a"], A)

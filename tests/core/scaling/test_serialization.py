"""`flax.serialization` saves and restores every state, into the same settings and into others."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import jmp_lite as jmp
from tests.support.steps import bits, make_grads, make_params, run, spoil

# Flax is imported when there is a state already, made here or in the process that pickled it.
LATE = """
import pickle, sys
import jax.numpy as jnp, optax, jmp_lite as jmp
tx = jmp.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(2.0**10))
params = {{"w": jnp.ones(3)}}
if {pickled}:
    state = pickle.load(open({path!r}, "rb"))
else:
    _, state = tx.update({{"w": jnp.full(3, jnp.inf)}}, tx.init(params), params)
    pickle.dump(state, open({path!r}, "wb"))
from flax import serialization
target = state if {pickled} else tx.init(params)
restored = serialization.from_bytes(target, serialization.to_bytes(state))
print(jmp.get_loss_scale(restored).loss_scale, jmp.grads_finite(restored))
"""


@pytest.mark.slow
def test_a_state_is_saved_by_a_flax_that_was_imported_later_and_after_unpickling(tmp_path):
    for pickled in (False, True):
        script = LATE.format(path=str(tmp_path / "state.pkl"), pickled=pickled)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["512.0", "False"]


def trained(scale, inner=None, **settings):
    """A transform and its state after two steps. One of them was skipped."""
    tx = jmp.with_loss_scale(inner or optax.adam(1e-2), scale, **settings)
    return tx, run(tx, [make_grads(0), spoil(make_grads(1))])[1]


def restored(target, state):
    return serialization.from_bytes(target, serialization.to_bytes(state))


STEADY = {"period": 5, "hysteresis": 2}


@pytest.mark.cases(fast=2, slow=0)
@pytest.mark.parametrize(
    "scale",
    [jmp.NoOpLossScale(), jmp.StaticLossScale(8.0), jmp.DynamicLossScale(8.0, **STEADY)],
    ids=["none", "static", "dynamic"],
)
@pytest.mark.parametrize("settings", [{}, {"clip_norm": 1.0}], ids=["plain", "clip"])
def test_every_field_is_restored(scale, settings):
    tx, state = trained(scale, **settings)
    assert bits(restored(tx.init(make_params()), state)) == bits(state)


# Restored into other settings


DYNAMIC, STATIC = jmp.DynamicLossScale, jmp.StaticLossScale


@pytest.mark.cases(fast=2, slow=2)
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # Hysteresis that is switched on begins with its full tolerance; switched off, it is dropped.
        (DYNAMIC(8.0), DYNAMIC(64.0, hysteresis=3), {"loss_scale": 4, "hysteresis_left": 3, "hysteresis": 3}),
        (DYNAMIC(8.0, **STEADY), DYNAMIC(64.0), {"loss_scale": 8, "hysteresis_left": None}),
        # A static scale continues as a dynamic one, and not the other way round: see below.
        (STATIC(16.0), DYNAMIC(64.0, counter=3), {"loss_scale": 16, "counter": 3}),
        # A run that needs no scale any more drops it.
        (DYNAMIC(16.0), jmp.NoOpLossScale(), {"loss_scale": 1}),
    ],
)
def test_a_scale_is_restored_into_other_settings(before, after, expected):
    _, state = trained(before)
    loaded = restored(jmp.with_loss_scale(optax.adam(1e-2), after).init(make_params()), state)
    scale = jmp.get_loss_scale(loaded)
    assert {name: getattr(scale, name) for name in expected} == expected
    assert bits(loaded.inner_state) == bits(state.inner_state)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            jmp.with_loss_scale(optax.sgd(1.0), STATIC(64.0)),
            "is dynamic and is restored into a StaticLossScale",
        ),
        (jmp.skip_nonfinite(optax.sgd(1.0)), "holds a loss scale, and the optimizer is skip_nonfinite"),
    ],
)
def test_a_dynamic_scale_is_not_lost_in_a_state_without_one(target, message):
    _, state = trained(jmp.DynamicLossScale(16.0), optax.sgd(1.0))
    with pytest.raises(ValueError, match=message):
        restored(target.init(make_params()), state)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("clip", [(None, 1.0), (1.0, None)], ids=["on", "off"])
def test_a_clip_may_be_switched(clip):
    before, after = clip
    _, state = trained(jmp.DynamicLossScale(16.0), clip_norm=before)
    tx = jmp.with_loss_scale(optax.adam(1e-2), clip_norm=after)
    loaded = restored(tx.init(make_params()), state)
    assert bits(loaded.inner_state) == bits(state.inner_state)
    assert jmp.grads_finite(jax.jit(tx.update)(make_grads(2), loaded, make_params())[1])


def test_a_plain_state_says_how_to_go_on():
    plain = optax.adam(1e-2)
    saved = serialization.to_bytes(run(plain, [make_grads(0)])[1])
    tx = jmp.with_loss_scale(plain)
    with pytest.raises(ValueError, match=r"no SkipNonfiniteState: it has \['0', '1'\]\. To go on from"):
        serialization.from_bytes(tx.init(make_params()), saved)
    state = jmp.migrate_state(tx, make_params(), serialization.msgpack_restore(saved))
    assert int(tx.update(make_grads(1), state, make_params())[1].inner_state[0].count) == 2


def test_another_number_of_parameters_is_an_error():
    _, state = trained(jmp.DynamicLossScale(16.0), optax.sgd(1.0))
    target = jmp.with_loss_scale(optax.sgd(1.0)).init({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="saved state is that of 3 parameters, and the model has 1"):
        restored(target, state)


def test_a_scale_of_its_own_is_saved_too():
    scale = jmp.DynamicLossScale(8.0, counter=2)
    after = restored(jmp.DynamicLossScale(64.0), scale)
    assert (float(after.loss_scale), int(after.counter), after.loss_scale.dtype) == (8.0, 2, np.float32)


@pytest.mark.parametrize("number", [0.0, -8.0, np.nan, np.inf, 1e-40])
@pytest.mark.parametrize("make", [jmp.StaticLossScale, jmp.DynamicLossScale])
def test_a_saved_scale_with_which_no_step_can_be_taken_is_an_error(make, number):
    tx = jmp.with_loss_scale(optax.adam(1e-2), make(8.0))
    state = tx.init(make_params())
    saved = serialization.to_state_dict(state)
    saved["loss_scale"]["loss_scale"] = np.float32(number)
    with pytest.raises(ValueError, match=r"saved \w+LossScale has the scale .*Restore an earlier checkpoint"):
        serialization.from_state_dict(state, saved)
    with pytest.raises(ValueError, match="has the scale"):
        serialization.from_bytes(state, serialization.msgpack_serialize(saved))
    assert float(jmp.get_loss_scale(jmp.migrate_state(tx, make_params(), saved)).loss_scale) == 8.0

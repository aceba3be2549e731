"""A run that is saved and restored, or killed and started again, goes on bit for bit."""

import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:orbax", "ignore::DeprecationWarning:orbax")

STEPS, SAVE_AT, KILL_AT = 12, 6, 9

# Hysteresis is on and the scale moves, so that every leaf of the state says something at SAVE_AT.
TX = jmp.with_loss_scale(
    optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS)),
    jmp.DynamicLossScale(2.0**10, period=3, hysteresis=1, min_loss_scale=0.25),
)


def start():
    params = {"w": jnp.linspace(-1, 1, 24).reshape(6, 4), "b": jnp.full(4, -0.0)}
    return {"params": params, "opt_state": TX.init(params), "step": jnp.int32(0)}


@jax.jit
def train_step(state):
    def loss_fn(params, x):
        params, x = jmp.cast_to_half((params, x))
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]).astype(jnp.float32) ** 2)

    x = jnp.cos(jnp.arange(48.0).reshape(8, 6) * (state["step"] + 1))
    bad = (state["step"] == 1) | (state["step"] == 4) | (state["step"] == 8)
    x = x.at[2, 3].set(jnp.where(bad, jnp.inf, x[2, 3]))
    loss, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(state["opt_state"]))(state["params"], x)
    updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss


def run_until(state, last):
    losses = []
    while int(state["step"]) < last:
        state, loss = train_step(state)
        losses.append(float(loss))
    return state, losses


def save(path, state):
    import orbax.checkpoint

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def restore(path):
    """The saved state, into one made anew, as a program that starts again would."""
    import orbax.checkpoint

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, start())


def bits(tree):
    return [(str(leaf.dtype), np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def scale_fields(state):
    scale = jmp.get_loss_scale(state["opt_state"])
    return [float(scale.loss_scale), int(scale.counter), int(scale.hysteresis_left)]


@pytest.mark.slow
def test_a_run_restored_by_orbax_continues_bit_for_bit(tmp_path):
    uninterrupted, losses = run_until(start(), STEPS)
    state, first_losses = run_until(start(), SAVE_AT)
    save(tmp_path / "checkpoint", state)
    restored = restore(tmp_path / "checkpoint")

    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    # None of what was saved is what a new run begins with.
    assert scale_fields(start()) == [2.0**10, 0, 1]
    assert scale_fields(restored) == [2.0**9, 1, 0]
    assert int(jmp.metrics(restored["opt_state"])["skipped_steps"]) == 2
    assert jmp.get_loss_scale(restored["opt_state"]).min_loss_scale == 0.25
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(restored))

    finished, later_losses = run_until(restored, STEPS)
    np.testing.assert_array_equal(first_losses + later_losses, losses)
    assert bits(finished) == bits(uninterrupted)
    assert int(jmp.metrics(finished["opt_state"])["skipped_steps"]) == 3


@pytest.mark.slow
def test_the_restored_state_compiles_nothing_anew(tmp_path):
    state, _ = run_until(start(), 2)
    save(tmp_path / "checkpoint", state)
    traced = []
    step = jax.jit(lambda state: traced.append(1) or train_step(state))
    step(state)
    step(restore(tmp_path / "checkpoint"))
    assert len(traced) == 1


@pytest.mark.slow
def test_a_process_killed_and_started_again_equals_an_uninterrupted_run(tmp_path):
    command = [sys.executable, str(pathlib.Path(__file__)), str(tmp_path)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "final.npz").exists()
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    uninterrupted, _ = run_until(start(), STEPS)
    with np.load(tmp_path / "final.npz") as final:
        leaves = [final[name] for name in sorted(final.files)]
    assert [(str(leaf.dtype), leaf.tobytes()) for leaf in leaves] == bits(uninterrupted)


def main(directory):
    """The program that is killed: it saves at SAVE_AT and dies at KILL_AT, or goes on from a checkpoint."""
    import os

    checkpoint = directory / "checkpoint"
    if checkpoint.exists():
        state, _ = run_until(restore(checkpoint), STEPS)
        leaves = {f"{i:03}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
        np.savez(directory / "final.npz", **leaves)
        return
    state, _ = run_until(start(), SAVE_AT)
    save(checkpoint, state)
    run_until(state, KILL_AT)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

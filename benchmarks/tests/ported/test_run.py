"""A port that is run: the recorder, and the command from end to end."""

import dataclasses
import functools
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_lite as jmp
from benchmarks.ported import __main__ as command
from benchmarks.ported import record
from benchmarks.ported.record import Recorder
from benchmarks.tests.ported import small_program

X = np.ones((4, 8), np.float32)


@jmp.autocast(dtype="float16")
def loss_fn(params, x):
    return jnp.mean((x @ params - 1) ** 2)


def make_step(tx):
    @functools.partial(jax.jit, donate_argnums=(0, 1))  # The recorder must copy what the step deletes.
    def step(params, opt_state, x):
        loss, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def train(tx, steps=record.BAD_CALL + 2, **fields):
    """Trains under a recorder, and returns it with the last parameters."""
    params, recorder = jnp.ones((8, 3)), Recorder(make_step(tx), loss=lambda result: result[2], **fields)
    opt_state = tx.init(params)
    for _ in range(steps):
        params, opt_state, _ = recorder(params, opt_state, X)
    return recorder, params


def test_the_recorder_keeps_losses_share_and_skips():
    tx = jmp.with_loss_scale(optax.sgd(0.01), jmp.DynamicLossScale(2.0**20, period=1000))
    recorder, params = train(tx)
    summary = recorder.summary()
    assert summary["share"] == 1
    assert summary["skipped"] > 0  # 2**20 is too large, and the bad step is not among these.
    assert len(summary["losses"]) == record.BAD_CALL + 2
    assert summary["losses"][-1] < summary["losses"][0] == 49
    assert summary["bad_step_left_params"] is True
    # The bad step left nothing behind.
    plain, state, step = jnp.ones((8, 3)), tx.init(jnp.ones((8, 3))), make_step(tx)
    for _ in range(record.BAD_CALL + 2):
        plain, state, _ = step(plain, state, X)
    assert (params == plain).all()
    assert summary["skipped"] == int(jmp.get_metrics(state)["skipped_steps"])


@pytest.mark.parametrize("spoil", [None, lambda args: (*args[:2], record.with_inf(args[2]))])
def test_a_step_that_a_bad_batch_changes_is_seen(spoil):
    kept = jmp.with_loss_scale(optax.sgd(0.01))
    # A transform that is chained after the check runs on a skipped step too.
    changed = optax.chain(kept, optax.add_decayed_weights(0.1))
    assert train(kept, spoil=spoil)[0].bad_step_left_params is True
    assert train(changed, spoil=spoil)[0].bad_step_left_params is False


def test_a_step_without_a_scale_gets_no_bad_step():
    recorder = Recorder(jax.jit(lambda w: (w - jnp.mean(w @ w.T), jnp.sum(w))), loss=lambda result: result[1])
    for _ in range(record.BAD_CALL + 2):
        recorder(jnp.eye(3))
    assert recorder.summary()["bad_step_left_params"] is None
    assert (recorder.share, recorder.skipped) == (0, 0)


def test_a_step_that_changes_its_arguments():
    model = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    tx = jmp.with_loss_scale(optax.sgd(0.01), jmp.DynamicLossScale(2.0**20, period=1000))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        scale = jmp.get_loss_scale(optimizer)
        grad_fn = jmp.value_and_grad(
            jmp.autocast(lambda model, x: jnp.mean((model(x) - 9) ** 2), jnp.float16),
            scale,
            value_and_grad_fn=nnx.value_and_grad,
        )
        loss, grads = grad_fn(model, x)
        optimizer.update(model, grads)
        return loss

    params = lambda args: nnx.state(args[0], nnx.Param)
    recorder = Recorder(
        step, loss=lambda loss: loss, params=params, new_params=lambda args, result: params(args)
    )
    for _ in range(record.BAD_CALL + 2):
        recorder(model, optimizer, X)
    assert recorder.bad_step_left_params is True
    assert recorder.skipped == int(jmp.get_metrics(optimizer)["skipped_steps"]) > 0
    assert recorder.losses[-1] < recorder.losses[0]


def test_the_time_of_the_first_call_is_without_that_of_a_step():
    recorder = Recorder(None, loss=lambda result: result, seconds=[5.0, 1.0, 1.0, 3.0])
    assert recorder.summary()["first_call_seconds"] == 4


def test_with_inf_spoils_only_floating_arrays():
    spoiled = record.with_inf({"x": jnp.ones((2, 2)), "y": jnp.ones(2, jnp.int32)})
    assert jnp.isinf(spoiled["x"]).sum() == 1
    assert (spoiled["y"] == 1).all()


def test_recorded_meets_the_step_of_its_name():
    compiler, recorder = jax.jit, Recorder(None, loss=lambda result: result)

    def train_step(w):
        return jnp.sum(w @ w)

    with record.recorded(jax, "jit", "train_step", recorder):
        assert jax.jit(train_step) is recorder
        assert jax.jit(lambda w: w)(1) == 1
        assert jax.jit(static_argnums=0)(lambda w: w)(1) == 1
    assert jax.jit is compiler
    assert recorder(jnp.eye(2)) == 2


@pytest.mark.slow
def test_the_command_runs_a_port_from_end_to_end(tmp_path, monkeypatch):
    clone = tmp_path / "small"
    clone.mkdir()
    (clone / "small.py").write_text(small_program.TEXT)
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    with pytest.raises(ValueError, match="Got a clone at"):
        command.measure(small_program.__name__, clone, 30)

    monkeypatch.setattr(small_program, "PORT", dataclasses.replace(small_program.PORT, revision=head))
    row = command.measure(small_program.__name__, clone, 30)
    assert (row["added"], row["removed"]) == (4, 2)
    full, half = row["float32"], row["float16"]
    assert (full["share"], half["share"]) == (0, 1)
    assert (full["bad_step_left_params"], half["bad_step_left_params"]) == (None, True)
    assert len(full["losses"]) == len(half["losses"]) == 30
    assert half["losses"][-1] < 0.8 * half["losses"][0]
    np.testing.assert_allclose(half["losses"], full["losses"], rtol=0.02)
    assert half["losses"] != full["losses"]
    assert (clone / "small.py").read_text() == small_program.TEXT

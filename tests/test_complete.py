"""`examples/complete.py`: skipped steps, resuming, three precisions, and what the command line says.

`benchmarks/tests/arms/test_torch_complete.py` compares each step with the same program in PyTorch.
"""

import dataclasses
import importlib.util
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from examples import complete
from jmp_lite.testing import assert_skips_nonfinite

FLAX = pytest.mark.parametrize("flax", ["linen", "nnx"])


@pytest.fixture(autouse=True)
def few_images(monkeypatch, request):
    """Fast tests read 160 images: five micro-batches an epoch."""
    if "all_images" not in request.fixturenames:
        train_x, test_x, train_y, test_y = complete.load_data()
        few = [train_x[:160], test_x[:50], train_y[:160], test_y[:50]]
        monkeypatch.setattr(complete, "load_data", lambda: few)


@pytest.fixture
def all_images():
    """A test that learns reads all images."""


class Start:
    """The first state of a run, its step, and micro-batches."""

    def __init__(self, *settings):
        self.options = complete.parse(["--precision", "float16", *settings])
        built = complete.BUILDERS[self.options.flax](self.options.dropout, self.options.seed)
        self.params, self.batch_stats, self.forward = built
        self.tx = complete.make_optimizer(self.options, complete.make_schedule(self.options, 10))
        self.train_step = complete.make_train_step(self.forward, self.tx, self.options)
        images, _, labels, _ = complete.load_data()
        self.batches = list(complete.batches(images, labels, self.options, epoch=0, skip=0))

    def state(self):
        copy = lambda tree: jax.tree.map(jnp.copy, tree)
        parts = copy(self.params), copy(self.batch_stats), self.tx.init(self.params), copy(self.params)
        return complete.State(jnp.int32(0), *parts)

    def run(self, state, batches):
        """The state and the loss after each micro-batch."""
        history = []
        for x, y in batches:
            state, loss = self.train_step(state, x, y)
            history.append(jax.device_get((state, loss)))
        return history


@pytest.fixture(scope="module", params=["linen", pytest.param("nnx", marks=pytest.mark.exhaustive)])
def start(request):
    return Start("--flax", request.param, "--accumulate", "2")


def assert_same_bits(a, b):
    leaves = jax.tree.leaves_with_path(a), jax.tree.leaves(b)
    for (path, one), other in zip(*leaves, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes(), jax.tree_util.keystr(path)


def moved(a, b):
    return any(
        np.any(one != other) for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["an inf in the batch", "a scale too large"])
@pytest.mark.parametrize("waiting", [0, 1], ids=["nothing accumulated", "one accumulated"])
def test_a_skipped_micro_batch_leaves_every_bit(start, cause, waiting):
    state = start.state()
    for x, y in start.batches[: 2 + waiting]:
        state, _ = start.train_step(state, x, y)
    x, y = start.batches[3]
    if cause == "an inf in the batch":
        x = x.copy()
        x[0, 0, 0, 0] = np.inf
    else:
        scale = dataclasses.replace(jmp.get_loss_scale(state.opt_state), loss_scale=jnp.float32(2.0**40))
        state = state._replace(opt_state=dataclasses.replace(state.opt_state, loss_scale=scale))
    before = jax.device_get(state)
    after, _ = start.train_step(state, x, y)
    for part in ("params", "batch_stats", "ema"):
        assert_same_bits(getattr(before, part), getattr(after, part))
    # All but the loss scale and the counts of `with_loss_scale`.
    assert_same_bits(before.opt_state.inner_state, after.opt_state.inner_state)
    assert after.opt_state.inner_state.mini_step == waiting
    assert jmp.metrics(after.opt_state)["skipped_steps"] == 1
    assert jmp.get_loss_scale(after.opt_state).loss_scale == before.opt_state.loss_scale.loss_scale / 2
    assert int(after.step) == int(before.step) + 1


@pytest.mark.slow
def test_inf_and_nan_move_nothing_but_the_step_count(start):
    x, y = start.batches[0]
    assert_skips_nonfinite(start.train_step, start.state(), x, y, ignore="step")
    with pytest.raises(AssertionError, match="- step\n"):
        assert_skips_nonfinite(start.train_step, start.state(), x, y)


@pytest.mark.slow
def test_the_average_and_the_parameters_wait_for_an_update(start):
    first = jax.device_get(start.state())
    (one, _), (two, _) = start.run(start.state(), start.batches[:2])
    assert_same_bits(first.params, one.params)
    assert_same_bits(first.ema, one.ema)
    assert moved(first.batch_stats, one.batch_stats)
    assert moved(one.params, two.params)
    expected = jax.tree.map(lambda new, old: 0.05 * new + 0.95 * old, two.params, first.ema)
    assert moved(first.ema, two.ema)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), expected, two.ema)
    assert start.train_step._cache_size() == 1


def test_the_clip_sees_what_is_accumulated(start):
    """Two gradients of norm 100 that nearly cancel. A clip of each would leave another sum."""
    tx = complete.make_optimizer(start.options, lambda _: 1.0)
    params = jnp.ones(4)
    opt_state = tx.init(params)
    for grads in (jnp.full(4, 50.0), jnp.full(4, -30.0)):
        _, opt_state = tx.update(grads, opt_state, params)
    # Their mean is 10 in each place. Its norm is clipped to 1, and Adam keeps a tenth of it.
    np.testing.assert_allclose(optax.tree.get(opt_state, "mu"), 0.1 * 0.5, rtol=1e-5)


@pytest.mark.slow
def test_both_apis_of_flax_have_the_same_losses(monkeypatch):
    """The parameters have the same names, so those of Linen fit the network of NNX."""
    linen, other = (Start("--flax", flax, "--dropout", "0") for flax in ("linen", "nnx"))
    assert moved(linen.params, other.params)
    other.params, other.batch_stats = linen.params, linen.batch_stats
    one, two = (each.run(each.state(), each.batches[:4]) for each in (linen, other))
    assert [float(loss) for _, loss in one] == pytest.approx([float(loss) for _, loss in two], rel=1e-5)
    assert len({float(loss) for _, loss in one}) == 4


@pytest.mark.slow
def test_dropout_differs_from_step_to_step_and_evaluation_has_none(start):
    x, _ = start.batches[0]
    train = [start.forward(start.params, start.batch_stats, x, jax.random.key(k))[0] for k in (0, 0, 1)]
    assert not moved(train[0], train[1])
    assert moved(train[0], train[2])
    logits, batch_stats = start.forward(start.params, start.batch_stats, x, None)
    assert_same_bits(batch_stats, start.batch_stats)
    no_dropout = Start("--flax", start.options.flax, "--dropout", "0").forward
    assert not moved(logits, no_dropout(start.params, start.batch_stats, x, None)[0])


# A whole run, and a run that stops at its seventh micro-batch: in the second epoch, with one accumulated.
RUN = ["--precision", "float16", "--epochs", "3", "--save-every", "7", "--accumulate", "2"]


def stop_after(monkeypatch, count):
    """From here on, the micro-batch after `count` others is the moment when somebody presses Ctrl-C."""
    batches, seen = complete.batches, []

    def interrupted(*arguments):
        for batch in batches(*arguments):
            if len(seen) == count:
                raise KeyboardInterrupt
            seen.append(batch)
            yield batch

    monkeypatch.setattr(complete, "batches", interrupted)


@pytest.mark.cases(slow=2)
@FLAX
def test_a_run_that_was_stopped_goes_on_bit_for_bit(flax, tmp_path, monkeypatch, capsys):
    # Two skipped steps at the start, and a scale that grows: the checkpoint holds more than first values.
    monkeypatch.setitem(complete.LOSS_SCALES, "float16", jmp.DynamicLossScale(2.0**22, period=4))
    whole, accuracy = complete.main([*RUN, "--flax", flax])
    command = [*RUN, "--flax", flax, "--checkpoint", str(tmp_path / "new" / "run.msgpack")]
    with monkeypatch.context() as patch:
        stop_after(patch, 9)
        with pytest.raises(SystemExit) as stopped:
            complete.main(command)
    assert stopped.value.code.strip().startswith("Stopped.")
    assert "\n" not in stopped.value.code.strip()
    capsys.readouterr()
    resumed, resumed_accuracy = complete.main(command)
    assert "Goes on from micro-batch 7." in capsys.readouterr().out
    assert_same_bits(whole, resumed)
    assert accuracy == resumed_accuracy
    assert int(resumed.step) == 15
    assert int(jmp.metrics(resumed.opt_state)["skipped_steps"]) >= 1
    assert list(tmp_path.rglob("*")) == [tmp_path / "new", tmp_path / "new" / "run.msgpack"]
    # Once more: there is nothing left to do.
    again, _ = complete.main(command)
    assert_same_bits(whole, again)


@pytest.mark.slow
def test_a_run_writes_scalars_for_tensorboard(monkeypatch, capsys):
    events = mock.Mock()
    monkeypatch.setattr(complete, "open_events", lambda folder: events)
    complete.main(["--epochs", "1", "--log-every", "2"])
    calls = [arguments for arguments, _ in events.add_scalar.call_args_list]
    scalars = {(name, step): value for name, value, step in calls}
    assert {step for _, step in scalars} == {2, 4, 5}
    names = {name for name, _ in scalars}
    assert names >= {"loss", "learning_rate", "test_accuracy", "loss_scale", "skipped_steps"}
    assert scalars["learning_rate", 4] == pytest.approx(complete.make_schedule(complete.parse([]), 2)(2))
    events.close.assert_called_once_with()
    assert "epoch   1   loss 2." in capsys.readouterr().out


def test_the_packages_for_a_bar_and_for_tensorboard_may_be_missing(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    missing = lambda name: None if name in ("tqdm", "tensorboardX") else find_spec(name)
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    assert complete.progress(iter([1, 2]), "epoch 1", 2, 0).__class__.__name__ == "list_iterator"
    assert_message(["--tensorboard", "out"], "pip install tensorboardX", capsys)


def assert_message(arguments, text, capsys):
    """The program ends with a message of argparse."""
    with pytest.raises(SystemExit) as stopped:
        complete.main(arguments)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--flax", "haiku"], "invalid choice: 'haiku'"),
        (["--precision", "float8"], "invalid choice: 'float8'"),
        (["--epochs", "0"], "--epochs: should be from 1 to inf. Got 0."),
        (["--epochs", "many"], "--epochs: invalid int value: 'many'"),
        (["--batch-size", "2000"], "--batch-size: should be from 1 to 1347. Got 2000."),
        (["--dropout", "nan"], "--dropout: should be from 0 to 1. Got nan."),
        (["--learning-rate", "-1"], "--learning-rate: should be from 0 to inf. Got -1."),
        (["--clip-norm", "0"], "--clip-norm: should be from 1e-09 to inf. Got 0."),
        (["--epochs", "1", "--accumulate", "100"], "Give more --epochs."),
        (["--steps", "3"], "unrecognized arguments: --steps 3"),
    ],
)
def test_a_wrong_option_is_a_message(arguments, text, capsys):
    assert_message(arguments, text, capsys)


def test_every_option_has_help(capsys):
    with pytest.raises(SystemExit):
        complete.main(["--help"])
    options = capsys.readouterr().out.partition("options:")[2].split("\n  -")[1:]
    assert len(options) == 15
    assert all(len(option.split("  ", 1)[1].split()) >= 3 for option in options)


@pytest.mark.slow
def test_a_checkpoint_of_other_settings_is_refused(tmp_path, monkeypatch, capsys):
    path, command = tmp_path / "run", ["--epochs", "1", "--accumulate", "2"]
    complete.main([*command, "--checkpoint", str(path)])
    others = ["--flax", "nnx", "--seed", "1", "--checkpoint", str(path), "--log-every", "3"]
    with pytest.raises(SystemExit) as stopped:
        complete.main([*command, *others])
    assert stopped.value.code.endswith("settings: flax linen, now nnx; seed 0, now 1.")
    for content in (b"", b"words", path.read_bytes()[:-9]):
        path.write_bytes(content)
        with pytest.raises(SystemExit) as stopped:
            complete.main([*command, "--checkpoint", str(path)])
        assert "is no checkpoint of this program" in stopped.value.code
    with pytest.raises(SystemExit) as stopped:
        complete.main([*command, "--checkpoint", str(tmp_path)])
    assert stopped.value.code.startswith("IsADirectoryError")


@pytest.mark.slow
def test_a_run_that_is_stuck_ends_with_the_advice(monkeypatch):
    few = complete.load_data()
    monkeypatch.setattr(complete, "load_data", lambda: [few[0] * np.nan, *few[1:]])
    with pytest.raises(SystemExit) as stopped:
        complete.main(["--batch-size", "2", "--epochs", "1"])
    assert stopped.value.code.startswith("FloatingPointError: The last 80 steps were skipped")
    assert "find_nonfinite" in stopped.value.code


@pytest.mark.cases(slow=4)
@pytest.mark.parametrize("precision", [*complete.LOSS_SCALES][::-1])
@FLAX
def test_each_precision_learns_the_digits(all_images, flax, precision, capsys):
    state, accuracy = complete.main(["--flax", flax, "--precision", precision])
    assert accuracy > 0.98
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert len(capsys.readouterr().out.splitlines()) == 12


@pytest.mark.slow
def test_a_nan_loss_of_a_step_that_was_taken_ends_the_program(monkeypatch, capsys):
    """The losses of skipped steps are left out; all others count."""
    assert complete.mean_loss([1.0, np.nan, 3.0], [True, False, True]) == 2.0
    make = complete.make_train_step

    def make_wrong(*args):
        step = make(*args)

        def wrong_step(state, x, y):
            state, loss = step(state, x, y)
            return state, loss * jnp.nan

        return wrong_step

    monkeypatch.setattr(complete, "make_train_step", make_wrong)
    with pytest.raises(SystemExit, match=r"5 of the last 5 losses are inf or NaN although"):
        complete.train(complete.parse(["--epochs", "1"]))
    assert "loss" not in capsys.readouterr().out

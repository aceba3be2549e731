"""`examples/complete_linen.py` and `complete_nnx.py`: skipped steps, resuming, devices, the command line.

`benchmarks/tests/arms/test_torch_complete.py` compares each step with the same program in PyTorch.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_lite as jmp
from examples import complete_linen, complete_nnx

PROGRAMS = {"linen": complete_linen, "nnx": complete_nnx}
BOTH = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def few_images(monkeypatch, request):
    """Fast tests read 160 images: five micro-batches an epoch."""
    if "all_images" not in request.fixturenames:
        train_x, test_x, train_y, test_y = complete_linen.load_data()
        few = [train_x[:160], test_x[:50], train_y[:160], test_y[:50]]
        for program in PROGRAMS.values():
            monkeypatch.setattr(program, "load_data", lambda: few)


@pytest.fixture
def all_images():
    """A test that learns reads all images."""


def parts_of(state):
    """The state of either program as one tree: step, params, batch_stats, opt_state, ema."""
    if isinstance(state, complete_nnx.Training):
        is_variable = lambda x: isinstance(x, nnx.Variable)
        pure = lambda *filters: nnx.to_pure_dict(nnx.state(*filters))
        return {
            "step": state.optimizer.step[...],
            "params": pure(state.model, nnx.Param),
            "batch_stats": pure(state.model, nnx.BatchStat),
            "opt_state": jax.tree.map(lambda x: x[...], state.optimizer.opt_state, is_leaf=is_variable),
            "ema": pure(state.ema, nnx.Param),
        }
    names = ("step", "params", "batch_stats", "opt_state")
    return {name: getattr(state, name) for name in names} | {"ema": state.ema_params}


class Start:
    """The first state of a run of either program, its step as a function of parts, and micro-batches."""

    def __init__(self, program, *settings):
        self.program = program
        self.options = program.parse(["--precision", "float16", *settings])
        self.schedule = program.make_schedule(self.options, 10)
        self.step = program.make_train_step(self.options)
        images, _, labels, _ = program.load_data()
        self.batches = list(program.batches(images, labels, self.options, epoch=0, skip=0))

    def state(self):
        if self.program is complete_nnx:
            return complete_nnx.Training(self.options, self.schedule)
        return complete_linen.create_state(self.options, self.schedule)

    def train_step(self, state, x, y):
        """The new state and the loss. The step of NNX changes its argument; here it gets a copy."""
        if self.program is complete_nnx:
            state = nnx.merge(*jax.tree.map(jnp.copy, nnx.split(state)))
            loss = self.step(state, x, y)
            return state, loss
        return self.step(jax.tree.map(jnp.copy, state), x, y)

    def run(self, state, batches):
        """The parts of the state and the loss after each micro-batch."""
        history = []
        for x, y in batches:
            state, loss = self.train_step(state, x, y)
            history.append(jax.device_get((parts_of(state), loss)))
        return history


@pytest.fixture(scope="module", params=PROGRAMS.values(), ids=PROGRAMS)
def start(request):
    return Start(request.param, "--accumulate", "2")


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


@pytest.mark.cases(slow=1)
def test_a_skipped_micro_batch_leaves_every_bit(start):
    state = start.state()
    for x, y in start.batches[:3]:
        state, _ = start.train_step(state, x, y)
    x, y = start.batches[3]
    x = x.copy()
    x[0, 0, 0, 0] = np.inf
    before = jax.device_get(parts_of(state))
    after = parts_of(start.train_step(state, x, y)[0])
    for part in ("params", "batch_stats", "ema"):
        assert_same_bits(before[part], after[part])
    # All but the loss scale and the counts of `with_loss_scale`.
    assert_same_bits(before["opt_state"].inner_state, after["opt_state"].inner_state)
    assert optax.tree.get(after["opt_state"], "mini_step") == 1
    assert jmp.get_metrics(after["opt_state"])["skipped_steps"] == 1
    scales = [jmp.get_loss_scale(parts["opt_state"]).loss_scale for parts in (before, after)]
    assert scales[1] == scales[0] / 2
    assert int(after["step"]) == int(before["step"]) + 1


@pytest.mark.cases(slow=1)
def test_the_average_and_the_parameters_wait_for_an_update(start):
    first = jax.device_get(parts_of(start.state()))
    (one, _), (two, _) = start.run(start.state(), start.batches[:2])
    assert_same_bits(first["params"], one["params"])
    assert_same_bits(first["ema"], one["ema"])
    assert moved(first["batch_stats"], one["batch_stats"])
    assert moved(one["params"], two["params"])
    expected = jax.tree.map(lambda new, old: 0.05 * new + 0.95 * old, two["params"], first["ema"])
    assert moved(first["ema"], two["ema"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), expected, two["ema"])


@pytest.mark.slow
def test_both_programs_have_the_same_losses():
    """The parameters have the same names, so those of Linen fit the network of NNX."""
    linen, other = (Start(program, "--dropout", "0") for program in PROGRAMS.values())
    first, second = linen.state(), other.state()
    assert moved(parts_of(first)["params"], parts_of(second)["params"])
    nnx.update(second.model, first.params)
    nnx.update(second.ema, first.params)
    one, two = linen.run(first, linen.batches[:4]), other.run(second, other.batches[:4])
    assert [float(loss) for _, loss in one] == pytest.approx([float(loss) for _, loss in two], rel=1e-5)
    assert len({float(loss) for _, loss in one}) == 4


# A whole run, and a run that stops at its seventh micro-batch: in the second epoch, with one accumulated.
RUN = ["--precision", "float16", "--epochs", "3", "--save-every", "7", "--accumulate", "2"]


def stop_after(monkeypatch, program, count):
    """From here on, the micro-batch after `count` others is the moment when somebody presses Ctrl-C."""
    batches, seen = program.batches, []

    def interrupted(*arguments):
        for batch in batches(*arguments):
            if len(seen) == count:
                raise KeyboardInterrupt
            seen.append(batch)
            yield batch

    monkeypatch.setattr(program, "batches", interrupted)


@pytest.mark.cases(slow=1)
@BOTH
def test_a_run_that_was_stopped_goes_on_bit_for_bit(program, tmp_path, monkeypatch, capsys):
    # Two skipped steps at the start, and a scale that grows: the checkpoint holds more than first values.
    monkeypatch.setitem(program.LOSS_SCALES, "float16", jmp.DynamicLossScale(2.0**22, period=4))
    whole, accuracy = program.main(RUN)
    folder = tmp_path / "new" / "run"
    command = [*RUN, "--checkpoint", str(folder)]
    with monkeypatch.context() as patch:
        stop_after(patch, program, 9)
        with pytest.raises(SystemExit) as stopped:
            program.main(command)
    assert stopped.value.code.strip().startswith("Stopped.")
    assert "\n" not in stopped.value.code.strip()
    capsys.readouterr()
    resumed, resumed_accuracy = program.main(command)
    assert "Continues from micro-batch 7." in capsys.readouterr().out
    whole, resumed = parts_of(whole), parts_of(resumed)
    assert_same_bits(whole, resumed)
    assert accuracy == resumed_accuracy
    assert int(resumed["step"]) == 15
    assert int(jmp.get_metrics(resumed["opt_state"])["skipped_steps"]) >= 1
    assert [path.name for path in (folder / "last").iterdir()] == ["15"]
    # Once more: there is nothing left to do.
    again, _ = program.main(command)
    assert_same_bits(whole, parts_of(again))


@pytest.mark.cases(slow=1)
@BOTH
def test_the_best_average_is_kept_and_evaluated(program, tmp_path, monkeypatch, capsys):
    accuracies = iter([0.2, 0.9, 0.4, 0.4])
    make_evaluate = program.make_evaluate
    command = ["--epochs", "3", "--checkpoint", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(program, "make_evaluate", lambda options: lambda *_: next(accuracies))
        program.main(command)
    (best,) = (tmp_path / "best").iterdir()
    assert best.name == "10"  # The end of the second epoch.
    seen = []

    def noting(options):
        evaluate = make_evaluate(options)
        return lambda *arguments: (seen.append(arguments[0]), evaluate(*arguments))[1]

    monkeypatch.setattr(program, "make_evaluate", noting)
    capsys.readouterr()
    program.main([*command, "--evaluate"])
    assert "best average: accuracy" in capsys.readouterr().out
    _, first_state = seen[0], Start(program).state()

    def average(state):
        return nnx.to_pure_dict(nnx.state(state, nnx.Param)) if program is complete_nnx else state.ema_params

    assert moved(average(seen[0]), parts_of(first_state)["ema"])
    with pytest.raises(SystemExit) as stopped:
        program.main(["--evaluate"])
    assert stopped.value.code.startswith("--evaluate needs --checkpoint")


@pytest.mark.cases(slow=1)
@BOTH
def test_a_run_writes_scalars_for_tensorboard(program, monkeypatch, capsys):
    events = mock.Mock()
    monkeypatch.setattr(program, "open_events", lambda folder: events)
    program.main(["--epochs", "1", "--log-every", "2"])
    calls = [arguments for arguments, _ in events.add_scalar.call_args_list]
    scalars = {(name, step): value for name, value, step in calls}
    assert {step for _, step in scalars} == {2, 4, 5}
    names = {name for name, _ in scalars}
    assert names >= {"loss", "learning_rate", "accuracy", "loss_scale", "skipped_steps", "seconds_a_step"}
    assert scalars["learning_rate", 4] == pytest.approx(program.make_schedule(program.parse([]), 2)(2))
    assert "'precision': 'float16'" in events.add_text.call_args.args[1]
    events.close.assert_called_once_with()
    assert "epoch   1   loss 2." in capsys.readouterr().out


@pytest.mark.exhaustive
@BOTH
def test_a_run_writes_a_trace(program, tmp_path):
    program.main(["--epochs", "4", "--profile", str(tmp_path / "trace")])
    assert [path.suffix for path in tmp_path.rglob("*.pb")] == [".pb"]


@pytest.mark.exhaustive
@BOTH
def test_a_batch_is_split_over_the_devices(program):
    """Four devices see a quarter of each batch, and the run ends with the numbers of one device."""
    code = f"""
import numpy as np
from examples import {program.__name__.rpartition(".")[2]} as program
few = program.load_data()
program.load_data = lambda: [few[0][:160], few[1][:50], few[2][:160], few[3][:50]]
import jax
batch = jax.device_put(np.zeros((32, 8)), program.shardings()[0])
assert len(batch.addressable_shards) == jax.device_count()
assert batch.addressable_shards[0].data.shape == (32 // jax.device_count(), 8)
program.main(["--epochs", "1", "--precision", "float32", "--dropout", "0"])
"""
    lines = []
    for devices in ("1", "4"):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": devices}
        environment |= {"PYTHONPATH": str(ROOT)}
        run = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.split("loss scale")[0])
    assert lines[0] == lines[1] != ""


def assert_message(program, arguments, text, capsys):
    """The program ends with a message of argparse."""
    with pytest.raises(SystemExit) as stopped:
        program.main(arguments)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_the_package_for_tensorboard_may_be_missing(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    missing = lambda name: None if name == "tensorboardX" else find_spec(name)
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    for program in PROGRAMS.values():
        assert_message(program, ["--tensorboard", "out"], "pip install tensorboardX", capsys)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--precision", "float8"], "invalid choice: 'float8'"),
        (["--epochs", "0"], "--epochs: should be 1 or more. Got 0."),
        (["--batch-size", "2000"], "--batch-size should be at most 1347"),
        (["--dropout", "nan"], "--dropout: should be at least 0 and below 1. Got nan."),
        (["--learning-rate", "-1"], "--learning-rate: should be above 0 and finite. Got -1."),
        (["--clip-norm", "inf"], "--clip-norm: should be above 0 and finite. Got inf."),
        (["--epochs", "1", "--accumulate", "100"], "Give more --epochs."),
        (["--checkpoint", __file__], "cannot make the folder"),
    ],
)
def test_a_wrong_option_is_a_message(arguments, text, capsys):
    for program in PROGRAMS.values():
        assert_message(program, arguments, text, capsys)


@pytest.mark.cases(slow=1)
@BOTH
def test_a_checkpoint_of_other_settings_is_refused(program, tmp_path):
    command = ["--epochs", "1", "--accumulate", "2", "--checkpoint", str(tmp_path)]
    program.main(command)
    with pytest.raises(SystemExit) as stopped:
        program.main([*command, "--seed", "1", "--dropout", "0.2", "--log-every", "3"])
    assert stopped.value.code.endswith("settings: dropout 0.1, now 0.2; seed 0, now 1.")


@pytest.mark.cases(slow=1)
@BOTH
def test_a_run_that_is_stuck_ends_with_the_advice(program, monkeypatch):
    few = program.load_data()
    monkeypatch.setattr(program, "load_data", lambda: [few[0] * np.nan, *few[1:]])
    with pytest.raises(SystemExit) as stopped:
        program.main(["--batch-size", "8", "--epochs", "3"])
    assert stopped.value.code.startswith("FloatingPointError: The last 60 steps were skipped")
    assert "find_nonfinite" in stopped.value.code


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", [*complete_linen.LOSS_SCALES][::-1])
@BOTH
def test_each_precision_learns_the_digits(all_images, program, precision, capsys):
    state, accuracy = program.main(["--precision", precision])
    assert accuracy > 0.98
    assert {leaf.dtype for leaf in jax.tree.leaves(parts_of(state)["params"])} == {jnp.dtype("float32")}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    assert all(line.endswith(" images/s") and "nan" not in line for line in lines)

"""examples/data_parallel.py in real processes: skips, a kill in the middle of a save, other devices, sums."""

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from benchmarks.compiled.step import moved
from examples.models import data, gpt2
from jmp_lite.programs import mesh_for, read_program
from tests.support.scripts import load_script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "support" / "poisoned_training.py"
STEPS, SAVE_EVERY = 12, 4
POISONED, KILLED = 3, 8  # The step with an inf in one shard, and the step in whose save a process is killed.


def start(folder, name, *arguments, **variables):
    """Starts `SCRIPT` with environment variables, and checkpoints in a folder `name`."""
    results = folder / f"results-{name}"
    results.mkdir(exist_ok=True)
    command = [sys.executable, SCRIPT, results, "bytes", "--fsdp", *arguments]
    command += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--log-every", "1"]
    command += ["--checkpoint", folder / name, "--log", folder / f"{name}.jsonl"]
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**environment, **variables}, **pipes)


def finish(process):
    """Waits for the end of a process. Returns its exit status and its output."""
    out, errors = process.communicate(timeout=200)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def start_by_slurm(folder, name, *arguments):
    """Starts two processes with the environment variables that `srun` gives to each."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    ranks = ({"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)} for index in range(2))
    return [start(folder, name, "--cluster", *arguments, **job, **rank) for rank in ranks]


def results(folder, name, run="as asked"):
    """What each process wrote of a run at its end."""
    paths = sorted((folder / f"results-{name}").glob("*.json"))
    return [json.loads(path.read_text())[run] for path in paths]


def log(folder, name):
    """The lines that process 0 wrote, as text: a float is written so that it is read back equal."""
    return (folder / f"{name}.jsonl").read_text().splitlines()


TWO = ("--processes", "2", "--devices", "4")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of the runs, and the output of a run that ends."""
    folder = tmp_path_factory.mktemp("runs")
    found = finish(start(folder, "whole", *TWO, "--variants"))
    assert found.returncode == 0, found.stderr
    return folder, found


@pytest.fixture(scope="module")
def runs(ended):
    """The folder, and the output of a run that is killed and that SLURM's variables start again."""
    folder, found = ended[0], {}
    # On a busy machine the processes may not find one another in time. Then no step is saved.
    for _ in range(2):
        found["killed"] = finish(start(folder, "killed", *TWO, "--die-at", str(KILLED)))
        if any(path.is_dir() for path in (folder / "killed").glob("*")):
            break
    found["left"] = sorted(path.name for path in (folder / "killed").iterdir() if path.is_dir())
    found["again"], found["other"] = map(finish, start_by_slurm(folder, "killed", "--devices", "4"))
    for name in ("again", "other"):
        assert found[name].returncode == 0, found[name].stderr
    return folder, found


def test_an_inf_in_the_shard_of_one_process_skips_the_step_on_all(ended):
    first, second = results(ended[0], "whole", "whole")
    # The same scales and counters, and the same bits of arrays.
    assert json.dumps(first) == json.dumps(second)
    history = first["history"]
    assert [row["grads_finite"] for row in history] == [1, 1, 0, 1]
    assert [row["loss_scale"] for row in history] == [2**15, 2**15, 2**14, 2**14]
    assert [row["skipped_steps"] for row in history] == [0, 0, 1, 1]
    assert math.isnan(history[POISONED - 1]["loss"])
    assert math.isfinite(history[POISONED]["loss"])


def test_with_fsdp_a_device_holds_an_eighth_and_skips_with_the_others(ended):
    split, other = results(ended[0], "whole")
    whole, _ = results(ended[0], "whole", "whole")
    assert whole["bytes"] / 8 < split["bytes"] < 1.3 * whole["bytes"] / 8
    assert split["digest"] != other["digest"]  # Other parts of the same arrays.
    assert json.dumps(split["history"]) == json.dumps(other["history"])
    losses = [[row["loss"] for row in each["history"][:4]] for each in (split, whole)]
    np.testing.assert_allclose(*losses, rtol=jnp.finfo(jnp.float16).eps)


def test_process_0_alone_prints_and_logs(ended):
    folder, found = ended
    rows = results(folder, "whole")[0]["history"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert log(folder, "whole") == [json.dumps(row) for row in rows]
    out = found.stdout
    assert out.count("2 processes, 8 devices") == 3  # Once a run.
    assert out.count(f"step {STEPS}: loss {rows[-1]['loss']:.4f}, 1 steps skipped") == 1


@pytest.mark.exhaustive
def test_kill_9_of_one_process_in_the_middle_of_a_save_ends_the_other_and_leaves_no_checkpoint(runs):
    _, found = runs
    assert found["killed"].returncode not in (0, None)
    assert f"step {STEPS}: loss" not in found["killed"].stdout
    assert any(name.startswith(f"{KILLED}.orbax-checkpoint-tmp") for name in found["left"])  # It had begun.
    assert max(int(name) for name in found["left"] if name.isdigit()) == SAVE_EVERY


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_with_the_losses_of_one_that_was_not_killed(runs):
    folder, found = runs
    assert f"Continues from step {SAVE_EVERY}." in found["again"].stdout
    assert "steps skipped" not in found["other"].stdout  # Process 1 says nothing.
    assert log(folder, "killed")[SAVE_EVERY - STEPS :] == log(folder, "whole")[SAVE_EVERY:]
    killed, whole = ([each["digest"] for each in results(folder, name)] for name in ("killed", "whole"))
    assert killed == whole  # The last parameters and optimizer state, bit for bit, on each process.


# In which dtype the sums over devices run.


def test_gradients_are_reduced_in_half_or_float32_by_choice(ended):
    tables = ended[1].stdout.split("2 processes, 8 devices")[2:]  # Half and float32, not split.
    weights, biases = 64 * 64 + 64 * 256, 64 + 256
    rows = [re.findall(r"all-reduce +(f\d+).* ([\d,]+)$", table, re.MULTILINE) for table in tables]
    reduced = [{dtype: int(size.replace(",", "")) for dtype, size in each} for each in rows]
    assert reduced[0]["f16"] == 2 * weights
    assert reduced[0]["f32"] == 4 * (biases + 1)  # And the loss.
    assert reduced[1] == {"f32": 4 * (weights + biases + 1)}
    half, wide = (results(ended[0], "whole", name)[0]["history"] for name in ("whole", "float32"))
    assert half[0]["loss"] == wide[0]["loss"]  # The forward pass is the same.
    assert half[-1]["loss"] != wide[-1]["loss"]
    assert half[-1]["loss"] == pytest.approx(wide[-1]["loss"], rel=2**-10)


def test_the_error_of_sums_in_half_is_that_of_half_rounding_and_float32_has_none(capsys):
    """Of real text, over eight devices, beside the gradient that one device sums in float32."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    starts = np.random.default_rng(0).integers(0, len(data.source_text()) - 65, 512)
    text = data.source_text()[starts[:, None] + np.arange(65)]
    x, y = text[:, :64].astype(np.float32) / 255, text[:, 64].astype(np.int32)
    keys = jax.random.split(jax.random.key(0))
    params = [jax.random.normal(key, (64, width)) / 8 for key, width in zip(keys, (64, 256))]

    def loss_fn(params, x, y):
        logits = jax.nn.relu(x @ params[0]) @ params[1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def gradient(sharding, reduce_dtype):
        half = jmp.autocast(loss_fn, jnp.float16, reduce_dtype=reduce_dtype)
        grads = jax.jit(jmp.grad(half, jmp.StaticLossScale(2.0**15)))(
            params, *jax.device_put((x, y), sharding)
        )
        return np.concatenate([np.asarray(grad, np.float64).ravel() for grad in grads])

    over_devices = NamedSharding(mesh, P("data"))
    exact = gradient(jax.devices()[0], "float32")
    half, wide = (gradient(over_devices, dtype) for dtype in (None, "float32"))
    errors = [np.linalg.norm(found - exact) / np.linalg.norm(exact) for found in (half, wide)]
    with capsys.disabled():
        print(f"\nerror of the gradient: {errors[0]:.1e} in half, {errors[1]:.1e} in float32")
    assert 1e-5 < errors[0] < jnp.finfo(jnp.float16).eps
    assert errors[1] < 1e-6


# The program for 256 H100s, which needs none.


@pytest.mark.exhaustive
def test_256_devices_gather_half_weights_and_scatter_half_gradients():
    """The example's step, of a GPT with one layer. `benchmarks/tests/compiled` has float32 sums of eight."""
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra [h100]")
    script = load_script("data_parallel")
    model = gpt2.GPT2(vocabulary=2048, length=128, width=256, layers=1, heads=4)
    tokens = lambda _, size: ((np.zeros((size, 128), np.int32),), np.zeros((size, 128), np.int32))
    task = dataclasses.replace(gpt2.small(), model=model, make_batch=tokens)
    made = script.Training(task, mesh_for("h100", {"data": 256}), fsdp=True, reduce_dtype=None)
    found = read_program(made.compile(task.batch(0, 512)))
    params = made.state[0]
    vectors = [x for x in jax.tree.leaves(params) if x.ndim == 1]
    parts = (params, params["tokens"], vectors, [x for x in vectors if x.size < 2**10])
    total, table, vectors, small = (sum(x.size for x in jax.tree.leaves(part)) for part in parts)

    # Each device sends its part. The table goes out three times: to look rows up, and to the head and back.
    assert moved(found, "all-gather") == {"f16": 2 * (total - small + 2 * table) // 256}
    assert moved(found, "reduce-scatter", "all-reduce") == {
        "f16": 2 * (total - vectors),  # Products.
        "f32": 4 * (table + vectors + 1),  # Rows that were looked up, sums over the batch, and the loss.
        "pred": moved(found, "all-reduce")["pred"],
    }
    assert moved(found, "all-reduce").keys() == {"f32", "pred"}
    assert moved(found, "all-reduce")["f32"] == 4 * (small + 1)  # What is not split.
    assert moved(found, "all-reduce")["pred"] < 64  # Whether the gradients are finite, once.
    assert {each.kind for each in found.collectives} == {"all-gather", "reduce-scatter", "all-reduce"}


# A checkpoint that cannot be read.


def empty_all(path):
    for file in path.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")


def remove_arrays(path):
    for file in [*path.rglob("d/*"), *path.rglob("manifest.ocdbt")]:
        file.unlink()


NEUMF = ["neumf", "--save-every", "4", "--steps"]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """The script, a folder with the checkpoints of steps 8 and 12, and the run that wrote them."""
    script = load_script("data_parallel")
    folder = tmp_path_factory.mktemp("two") / "run"
    return script, folder, script.main([*NEUMF, "12", "--checkpoint", str(folder)])


# Orbax leaves the event loop of a failed read behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("spoil", [empty_all, remove_arrays])
def test_the_run_falls_back_to_the_checkpoint_before_and_says_so(two_checkpoints, spoil, tmp_path, capfd):
    script, folder, expected = two_checkpoints
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    spoil(broken / "12")
    capfd.readouterr()
    run = script.main([*NEUMF, "12", "--checkpoint", str(broken)])
    out = capfd.readouterr().out
    assert "The checkpoint of step 12 cannot be read (" in out
    assert "Continues from step 8." in out
    assert [row["step"] for row in run.history] == list(range(9, 13))
    assert run.history == expected.history[8:]
    for ours, theirs in zip(jax.tree.leaves(run.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    sizes = [file.stat().st_size for file in (broken / "12").rglob("manifest.ocdbt")]
    assert len(sizes) > 0
    assert all(sizes)  # The new step 12 is whole.

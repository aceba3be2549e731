"""The benchmarks: what an arm claims is checked, a process may fail, what is measured is drawn."""

import dataclasses
import functools
import json
import math
import sys
import time
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import run, table
from benchmarks.flops import training_flops
from benchmarks.jax_arms import JAX_ARMS, JaxArm, Precision, check_lowered
from benchmarks.loss_scalers import SCALERS
from benchmarks.worker import ArmFailed, Worker
from examples.models import FAMILIES, resnet

GPT, NEUMF = FAMILIES["gpt2-small"].small(), FAMILIES["neumf"].small()


# The arms of JAX.


@functools.cache
def loss_at_the_start():
    inputs, targets = NEUMF.batch(0)
    return float(NEUMF.loss(NEUMF.model.apply(NEUMF.init(0), *inputs), targets))


@pytest.mark.parametrize("name", JAX_ARMS)
def test_an_arm_compiles_to_what_it_claims_learns_and_recovers_from_an_overflow(name):
    arm = JaxArm(name, NEUMF, NEUMF.batch_size)
    facts = arm.compile()
    assert sum(facts["products"].values()) >= 3 * 2
    first = arm.steps(1)
    assert first == pytest.approx(loss_at_the_start(), rel=2**-10)
    assert arm.steps(20) < first
    scales = arm.overflow(2.0**40, 60)
    if JAX_ARMS[name].scaler == "plain":
        assert scales is None
    else:
        skipped = len(scales) - 2
        assert 10 < skipped < 40
        np.testing.assert_array_equal(scales, [2.0**40 / 2**k for k in [*range(skipped + 1), skipped]])
        assert np.isfinite(arm.steps(1))


@pytest.mark.parametrize(
    ("name", "claimed"), [("float32", "f16"), ("float16", "f32"), ("bfloat16", "f16"), ("float32", "tf32")]
)
def test_an_arm_that_is_not_what_it_claims_is_found_out(name, claimed):
    arm = JaxArm(name, GPT, 4)
    text = jax.jit(arm.step).lower(*arm.shapes()).as_text()
    check_lowered(text, arm.precision)
    with pytest.raises(AssertionError, match=f"claimed {claimed}"):
        check_lowered(text, Precision(claimed))


def test_statistics_are_kept_when_a_step_is_skipped():
    model = resnet.ResNet(classes=10, stages=(1,), features=4, stem=3)
    workload = dataclasses.replace(FAMILIES["resnet50"].small(), model=model)
    for name in ("float16", "float16 jmp", "float16 Flax DynamicScale"):
        arm = JaxArm(name, workload, 8)
        params, state, statistics = arm.initial_state(2.0**40)
        (new_params, _, new_statistics), _ = jax.jit(arm.step)(
            (params, state, statistics), workload.batch(0, 8)
        )
        for new, old in zip(
            jax.tree.leaves((new_params, new_statistics)), jax.tree.leaves((params, statistics))
        ):
            np.testing.assert_array_equal(new, old)


def test_every_way_to_scale_takes_the_same_step():
    """But for what is wrong with it, which tests/scaling/test_peers.py tells."""
    steps = []
    for make in SCALERS.values():
        scaler = make(GPT.optimizer())
        params = {"w": jnp.float32(0.5)}
        loss = lambda params: (jnp.square(params["w"] * 3), {"seen": params["w"]})
        state = scaler.init(params, 2.0**15)
        params, state, statistics, value = scaler.step(loss, params, state, {"seen": jnp.float32(0)})
        steps.append((float(params["w"]), float(statistics["seen"]), float(value)))
        assert float(scaler.scale(state)) in (1.0, 1024.0, 2.0**15)
    assert steps == [steps[0]] * len(SCALERS)


# FLOPs.


def test_flops_are_counted_through_loops_calls_and_transposed_convolutions():
    w = jnp.ones((4, 4))

    @jax.jit
    def loop(x):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]

    assert training_flops(loop, jnp.ones((2, 4))) == 3 * 5 * 2 * 2 * 4 * 4
    image, kernel = jnp.ones((1, 6, 6, 3)), jnp.ones((3, 3, 3, 8))
    conv = lambda x, k: jax.lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert training_flops(conv, image, kernel) == 3 * 2 * 6 * 6 * 8 * 9 * 3
    widen = lambda x, k: jax.lax.conv_transpose(x, k, (2, 2), "SAME")
    assert training_flops(widen, image, kernel) == 3 * 2 * 6 * 6 * 3 * 9 * 8


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("resnet50", 3 * 2 * 4.09e9),  # 4.09 billion multiplications: torchvision's table.
        # 6 a parameter and token, 12 x layers x width x length for attention: Kaplan et al. (2020), table 1.
        ("gpt2-small", 1024 * (6 * 123.7e6 + 12 * 12 * 768 * 1024)),
    ],
)
def test_the_flops_of_a_model_are_those_of_the_literature(family, expected):
    assert run.model_flops(FAMILIES[family].full(), 1) == pytest.approx(expected, rel=0.01)


# The driver, with processes of its own.


@pytest.fixture
def worker(tmp_path):
    made = []

    def make(script, seconds=20.0, arm="float16"):
        """A worker that is a script of ours: it reads commands and prints answers."""
        with pytest.MonkeyPatch.context() as patch:
            path = tmp_path / "python"
            path.write_text(f"#!{sys.executable}\nimport json, sys, time\n{script}")
            path.chmod(0o755)
            patch.setattr(sys, "executable", str(path))
            made.append(Worker(arm, {}, tmp_path / "log", seconds))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_worker_answers_line_by_line(worker):
    ours = worker("print('{}', flush=True)\nfor line in sys.stdin: print(line, end='', flush=True)")
    assert ours.ask("steps", count=3) == {"do": "steps", "count": 3}
    assert ours.ask("peak") == {"do": "peak"}


def test_beside_a_gpu_an_arm_runs_on_it_with_the_kernels_that_others_found(worker, monkeypatch):
    monkeypatch.setattr("benchmarks.worker.HAS_GPU", True)
    tell = "import os\nprint('{}', flush=True)\n"
    tell += "for _ in sys.stdin: print(json.dumps({**os.environ}), flush=True)"
    told = worker(tell).ask("compile")
    assert told["JAX_PLATFORMS"].split(",")[0] == "cuda"
    assert told["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    folder = told["XLA_FLAGS"].split("--xla_gpu_per_fusion_autotune_cache_dir=")[1]
    assert Path(folder).is_dir()  # Else XLA compiles nothing.
    assert worker(tell, arm="torch float16").ask("compile")["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print(json.dumps({'error': 'ValueError: no'}), flush=True); time.sleep(60)", "ValueError: no"),
        ("sys.exit(3)", "died with exit status 3"),
        ("time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_a_worker_that_fails_says_how(worker, script, message):
    began = time.monotonic()
    with pytest.raises(ArmFailed, match=message):
        worker(script, seconds=1.0 if "within" in message else 20.0).ask("compile")
    assert time.monotonic() - began < 15


class FakeWorker:
    """An arm whose steps take as long as it is told."""

    log: ClassVar[list] = []

    def __init__(self, arm, settings, log, seconds):
        self.arm, self.found, self.milliseconds = arm, {}, []
        self.calls = 0

    def ask(self, do, **command):
        FakeWorker.log.append((self.arm, do))
        if self.arm == "broken" and do == "compile":
            raise ArmFailed("AssertionError: claimed f16")
        if do == "compile":
            return {"program_bytes": 3 * 2**30, "device": "cpu"}
        if do == "peak":
            return {"peak_bytes": None}
        if do == "overflow":
            return {"scales": None, "loss": None}
        self.calls += 1
        rising = self.arm == "rising"
        if self.arm == "nan":
            return {"seconds": 1.0, "loss": math.nan}
        return {
            "seconds": command["count"] * (0.002 if self.arm == "slow" else 0.001),
            "loss": 1.0 * (self.calls if rising else -self.calls),
        }

    def wait_until_ready(self):
        FakeWorker.log.append((self.arm, "ready"))

    def close(self):
        FakeWorker.log.append((self.arm, "close"))


def session(monkeypatch, tmp_path, arms, memory=float("inf"), deadline=float("inf")):
    monkeypatch.setattr(run, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "log", [])
    made = run.Session(arms, {}, run.Protocol(2, 3, 5), memory, deadline, 1.0, tmp_path)
    saved = []
    made.save = lambda: saved.append(len(made.results))
    made.run()
    assert saved == [*range(1, len(arms) + 1)]  # Should it be ended early, what is done is not lost.
    return made.results, FakeWorker.log


def test_arms_take_turns_and_one_that_fails_does_not_stop_the_others(monkeypatch, tmp_path):
    results, log = session(monkeypatch, tmp_path, ["float16", "broken", "slow", "rising"])
    assert set(results) == {"float16", "broken", "slow", "rising"}
    assert "claimed f16" in results["broken"]["error"]
    assert "did not fall" in results["rising"]["error"]
    assert results["float16"]["ms"] == pytest.approx(1.0)
    assert results["slow"]["times_reference"] == pytest.approx([2.0] * 3)
    assert len(results["slow"]["ms_blocks"]) == 3
    timed = [arm for arm, do in log if do == "steps"]
    assert timed == ["float16"] * 2 + ["slow"] * 2 + ["rising"] * 2 + ["float16", "slow", "rising"] * 3
    compiled = [place for place, (_, do) in enumerate(log) if do == "compile"]
    assert compiled == sorted(compiled)
    assert max(compiled) < log.index(("float16", "steps"))


def test_what_does_not_fit_together_is_timed_in_groups_the_reference_with_each(monkeypatch, tmp_path):
    results, log = session(monkeypatch, tmp_path, ["float16", "a", "b", "slow"], memory=14 * 2**30)
    blocks = [arm for arm, do in log if do == "steps"]
    assert blocks.count("a") == 2 + 3
    assert blocks.count("float16") == 3 * (2 + 3)  # With a, with b, with the last.
    assert all(results[arm]["times_reference"] == pytest.approx([1] * 3) for arm in ("float16", "a", "b"))
    assert results["slow"]["times_reference"] == pytest.approx([2] * 3)
    assert log.index(("a", "close")) < log.index(("b", "steps"))  # Its memory is free by then.


def test_without_the_reference_the_others_are_compared_with_one_of_them(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "REFERENCE", "broken")
    monkeypatch.setattr(run.Session, "reference", "broken")
    results, _ = session(monkeypatch, tmp_path, ["broken", "a", "slow"])
    assert {each.get("reference") for each in results.values()} == {None, "a"}
    assert results["slow"]["times_reference"] == pytest.approx([2.0] * 3)


def test_a_loss_that_is_not_finite_is_an_error_and_no_number(monkeypatch, tmp_path):
    results, _ = session(monkeypatch, tmp_path, ["float16", "nan"])
    assert results["nan"]["loss_last"] is None
    assert "did not fall" in results["nan"]["error"]
    assert "error" not in results["float16"]


def test_an_arm_on_the_cpu_of_a_machine_with_a_gpu_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "HAS_GPU", True)
    results, _ = session(monkeypatch, tmp_path, ["float16"])
    assert "runs on the CPU" in results["float16"]["error"]


def test_what_there_is_no_time_for_is_left_out_and_said_so(monkeypatch, tmp_path):
    results, log = session(monkeypatch, tmp_path, ["float16", "a"], deadline=time.monotonic() - 1)
    assert {arm: each["error"] for arm, each in results.items()} == dict.fromkeys(
        ["float16", "a"], "left out: no time"
    )
    assert not [do for _, do in log if do in ("compile", "steps")]


def test_a_family_runs_from_end_to_end(tmp_path, capsys):
    """Real processes: float16 recovers, and an arm whose process cannot start leaves an error."""
    found = run.main(
        ["neumf", "--quick", "--arms", "float16", "float32", "no such arm", "--results", str(tmp_path)]
    )
    written = json.loads((tmp_path / found["device"] / "neumf.json").read_text())
    assert written == json.loads(json.dumps(found))
    arms = written["arms"]
    assert "no such arm" in arms["no such arm"]["error"]
    assert arms["float16"]["overflow"]["skipped_steps"] > 10
    assert arms["float32"]["products"].keys() == {"gemm f32"}
    assert written["flops_a_step"] > 0
    assert written["versions"]["jax"] == jax.__version__
    again = run.main(["neumf", "--quick", "--add", "--arms", "float16", "--results", str(tmp_path)])
    assert again["arms"].keys() == arms.keys()
    assert again["arms"]["float32"] == arms["float32"]
    assert again["arms"]["float16"] != arms["float16"]
    arms = again["arms"]
    table.main(["--results", str(tmp_path), "--output", str(tmp_path / "speed.png")])
    text = capsys.readouterr().out
    assert f"| float32 | {arms['float32']['ms']:.2f} (" in text
    assert (tmp_path / "speed.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# The tables.


def measured(device="nvidia-h100-80gb-hbm3", **times):
    arms = {
        arm: {
            "ms": ms,
            "ms_quartiles": [ms, ms],
            "reference": "float16",
            "times_reference": [ms / 10.0] * 3,
            "peak_bytes": 2_000_000_000,
        }
        for arm, ms in times.items()
    }
    return {
        "family": "resnet50",
        "size": "full",
        "batch_size": 100,
        "flops_a_step": 3 * 10**12,
        "device": device,
        "versions": {"jax": "1"},
        "date": "2026-01-01",
        "protocol": {"warm_up": 10, "blocks": 5, "steps": 20},
        "clocks": [{"clocks.sm": "1980"}],
        "arms": arms,
    }


def test_ratios_utilisation_and_targets_are_computed_from_the_file():
    found = measured(**{"float16": 10.0, "float32": 40.0, "torch float16": 9.0, "TF32": 15.0})
    assert table.faster(found, "float16", "float32") == 4
    assert table.faster(found, "float16", "bfloat16") is None
    assert table.utilisation(found, "float16") == pytest.approx(3e12 / 0.010 / 989.4e12)
    assert table.utilisation(found, "float32") == pytest.approx(3e12 / 0.040 / 66.9e12)
    assert table.utilisation(measured("cpu", float16=1.0), "float16") is None
    assert list(table.targets(found)) == [
        ("float16 over float32", [4.0] * 3, 3.47),
        ("float16 over TF32", [1.5] * 3, 1.6),
        ("jmp_lite over torch.amp", [0.9] * 3, 1.0),
    ]
    found["arms"]["torch float16"]["times_reference"] = [0.8, 0.9, 1.2, 1.2]
    found["arms"]["float16"]["times_reference"] = [1.0] * 4
    verdicts = [line.split(" | ")[-1] for line in table.target_table([found])][2:]
    assert verdicts == ["met |", "missed |", "within the noise |"]
    assert "| float32 | 40.00 (40.00-40.00) | 2,500 | 1.00 |" in "\n".join(table.family_table(found))


def test_an_arm_that_failed_is_shown_and_counts_for_nothing():
    found = measured(float16=10.0, float32=40.0)
    found["arms"]["float16"] = {**found["arms"]["float16"], "error": "AssertionError: claimed f16"}
    assert table.faster(found, "float16", "float32") is None
    assert not list(table.targets(found))
    assert "| float16 | AssertionError: claimed f16 |" in "\n".join(table.family_table(found))


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ("float16 Flax DynamicScale", "f16"),
        ("torch bfloat16, flash", "bf16"),
        ("TF32", "tf32"),
        ("torch float32", "f32"),
    ],
)
def test_the_peak_of_an_arm_is_that_of_its_dtype(arm, expected):
    assert table.arithmetic(arm) == expected


def test_without_results_nothing_is_drawn(tmp_path, capsys):
    table.main(["--results", str(tmp_path), "--output", str(tmp_path / "speed.png")])
    assert "Nothing was measured" in capsys.readouterr().out
    assert not (tmp_path / "speed.png").exists()

"""The driver: arms take turns, an arm may fail, and a whole run writes and draws its measurements."""

import json
import math
import time
from typing import ClassVar

import jax
import pytest

from benchmarks.arms.worker import ArmFailed
from benchmarks.timed import run, table
from benchmarks.timed import session as sessions


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

    def begin(self, do):
        assert do == "lower"

    def wait_until_ready(self):
        FakeWorker.log.append((self.arm, "ready"))

    def close(self):
        FakeWorker.log.append((self.arm, "close"))


def session(monkeypatch, tmp_path, arms, memory=float("inf"), deadline=float("inf")):
    monkeypatch.setattr(sessions, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "log", [])
    made = sessions.Session(arms, {}, sessions.Protocol(2, 3, 5), memory, deadline, 1.0, tmp_path)
    saved = []
    made.save = lambda: saved.append(len(made.results))
    made.run()
    assert saved == [*range(1, len(arms) + 1)]  # A run that ends early keeps its results.
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
    compiled = [index for index, (_, do) in enumerate(log) if do == "compile"]
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
    monkeypatch.setattr(sessions, "REFERENCE", "broken")
    monkeypatch.setattr(sessions.Session, "reference", "broken")
    results, _ = session(monkeypatch, tmp_path, ["broken", "a", "slow"])
    assert {each.get("reference") for each in results.values()} == {None, "a"}
    assert results["slow"]["times_reference"] == pytest.approx([2.0] * 3)


def test_a_loss_that_is_not_finite_is_an_error_and_no_number(monkeypatch, tmp_path):
    results, _ = session(monkeypatch, tmp_path, ["float16", "nan"])
    assert results["nan"]["loss_last"] is None
    assert "did not fall" in results["nan"]["error"]
    assert "error" not in results["float16"]


def test_an_arm_on_the_cpu_of_a_machine_with_a_gpu_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sessions, "HAS_GPU", True)
    results, _ = session(monkeypatch, tmp_path, ["float16"])
    assert "runs on the CPU" in results["float16"]["error"]


def test_what_there_is_no_time_for_is_left_out_and_said_so(monkeypatch, tmp_path):
    results, log = session(monkeypatch, tmp_path, ["float16", "a"], deadline=time.monotonic() - 1)
    assert {arm: each["error"] for arm, each in results.items()} == dict.fromkeys(
        ["float16", "a"], "left out: no time"
    )
    assert not [do for _, do in log if do in ("compile", "steps")]


def test_only_the_arms_that_a_file_lacks_are_run_again_with_their_reference():
    kept = {"float16": {"ms": 1.0}, "float32": {"ms": 2.0}, "TF32": {"ms": 2.0, "error": "no time"}}
    assert run.missing(["float16", "float32"], kept) == []
    assert run.missing(["float16", "float32", "TF32"], kept) == ["float16", "TF32"]
    assert run.missing(["bfloat16", "float32"], kept) == ["bfloat16"]


def test_a_family_runs_from_end_to_end(tmp_path, capsys):
    """Real processes: float16 recovers, and an arm whose process cannot start leaves an error."""
    found = run.main(["neumf", "--quick", "--arms", "float16", "no such arm", "--results", str(tmp_path)])
    written = json.loads((tmp_path / found["device"] / "neumf.json").read_text())
    assert written == json.loads(json.dumps(found))
    arms = written["arms"]
    assert "no such arm" in arms["no such arm"]["error"]
    assert arms["float16"]["overflow"]["skipped_steps"] > 10
    assert written["flops_a_step"] > 0
    assert written["versions"]["jax"] == jax.__version__
    again = run.main(["neumf", "--quick", "--add", "--arms", "float32", "--results", str(tmp_path)])
    assert again["arms"].keys() == {*arms, "float32"}
    assert again["arms"]["float16"] == arms["float16"]
    arms = again["arms"]
    assert arms["float32"]["products"].keys() == {"gemm f32"}
    table.main(["--results", str(tmp_path), "--output", str(tmp_path / "speed.png")])
    text = capsys.readouterr().out
    assert f"| float32 | {arms['float32']['ms']:.2f} (" in text
    assert (tmp_path / "speed.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

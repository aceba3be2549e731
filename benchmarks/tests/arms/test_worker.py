"""A worker is a process that answers, or says how it failed."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks.arms.worker import ArmFailed, Worker


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


def test_a_worker_that_was_told_to_begin_is_asked_after_it(worker):
    """All three answers are there before the first is read. A buffer would hide two of them from select."""
    ours = worker(
        "print('{}', flush=True)\nfor line in sys.stdin: print(line, end='', flush=True)", seconds=2
    )
    ours.begin("lower")
    time.sleep(0.5)
    assert ours.ask("steps", count=3) == {"do": "steps", "count": 3}
    assert ours.begun == 0


def test_what_fails_after_it_was_begun_is_an_error_of_the_next_command(worker):
    ours = worker("print('{}', flush=True)\nprint(json.dumps({'error': 'AssertionError: f32'}), flush=True)")
    ours.begin("lower")
    with pytest.raises(ArmFailed, match="AssertionError: f32"):
        ours.ask("compile")


def test_with_a_gpu_an_arm_uses_the_autotuned_kernels_of_earlier_arms(worker, monkeypatch):
    monkeypatch.setattr("benchmarks.arms.worker.HAS_GPU", True)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    tell = "import os\nprint('{}', flush=True)\n"
    tell += "for _ in sys.stdin: print(json.dumps({**os.environ}), flush=True)"
    told = worker(tell).ask("compile")
    assert told["JAX_PLATFORMS"].split(",")[0] == "cuda"
    assert told["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    folder = told["XLA_FLAGS"].split("--xla_gpu_per_fusion_autotune_cache_dir=")[1]
    assert Path(folder).is_dir()  # Else XLA compiles nothing.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", folder)  # JAX then keeps them there.
    assert "autotune" not in worker(tell).ask("compile").get("XLA_FLAGS", "")
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

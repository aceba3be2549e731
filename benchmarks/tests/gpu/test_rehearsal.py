"""The command itself, at a small size on the CPU. `test_queue` kills it, and keeps it to its deadline."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks

ROOT = Path(benchmarks.__file__).parents[1]
# `test_measurements` runs fp8 and the loss scales.
ONLY = ("compile neumf float16", "compile neumf float32", "time neumf", "example digits")
ONLY += ("attention in bfloat16",)


@pytest.fixture
def tree(tmp_path):
    """A clean copy of the tree, without an example: its piece fails."""
    for name in ("benchmarks", "examples", "jmp_lite"):
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tree" / "examples" / "digits.py").unlink()
    return tmp_path / "tree"


def command(tree, minutes, *only):
    arguments = [sys.executable, "-m", "benchmarks.gpu", "--pretend", "--minutes", str(minutes)]
    arguments += ["--out", tree.parent / "out", "--only", *only]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.Popen(arguments, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)


def left_over(folder):
    """The processes that work in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path] if str(folder) in path.read_text(errors="replace") else []
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_the_rehearsal_of_the_command(tree):
    results = tree.parent / "out" / "gpu-results-cpu-pretended.json"
    run = command(tree, 9.5, *ONLY)
    printed, _ = run.communicate()
    assert run.returncode == 0
    assert not left_over(tree.parent / "out-work")
    found = json.loads(results.read_text())
    pieces = found["pieces"]
    assert {name: pieces[name]["status"] for name in ONLY} == {
        name: "failed" if name == "example digits" else "done" for name in ONLY
    }
    assert "can't open file" in pieces["example digits"]["why"]
    assert f"example digits: failed. {pieces['example digits']['why']}" in printed
    assert pieces["time neumf"]["tries"] == 1
    arms = found["files"]["results/cpu/neumf.json"]["arms"]
    assert arms["float32"]["times_reference"]
    kinds = found["files"]["attention-bfloat16.json"]["kinds"]
    assert len(kinds) == 9
    assert not any(each["fault"] for each in kinds.values())
    sizes = [path.stat().st_size for path in results.parent.iterdir()]
    assert len(sizes) <= 8
    assert max(sizes) < 16 * 2**20

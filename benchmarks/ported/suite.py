"""Runs the tests of another package through us, and counts those that fail only then.

    python -m benchmarks.ported.suite CLONE tests/a_test.py tests/b_test.py
    python -m benchmarks.ported.suite ../jax tests/nn_test.py --modes bf16 fuse --keep 3 --minutes 5
    python -m benchmarks.ported.suite ../flax tests/linen --call flax.linen.Module.apply

CLONE is the folder of a clone at a version that fits the installed JAX. Nothing in it is changed. Each mode
is a run of its own, in which the functions that the tests give to `jax.jit`, `jax.grad`, `jax.vmap` and the
others go through `autocast` or `fuse_attention`. A test fails by us if it passes with `jax.jit` in our place,
and by itself if it fails there too.
"""

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax

import jmp_lite as jmp
from benchmarks.command import make_parser

WIDE = ["sin", "cos", "tanh", "exp", "mul", "add", "sub", "neg", "max", "abs"]  # Half values in every loop.
INFER = ["exp", "log", "reduce_sum", "integer_pow", "cumsum", "add_any", "logistic"]
MODES: dict[str, Callable[..., Any]] = {
    "jit": jax.jit,  # What fails here too, such as a test that branches on values, fails by itself.
    "bf16": functools.partial(jmp.autocast, dtype="bfloat16"),
    "f16": functools.partial(jmp.autocast, dtype="float16"),
    "wide": functools.partial(jmp.autocast, dtype="bfloat16", allow=WIDE),
    "infer": functools.partial(jmp.autocast, dtype="bfloat16", infer=INFER),
    "fuse": functools.partial(jmp.fuse_attention, implementation="xla"),
}
ROOT = pathlib.Path(__file__).parent.parent.parent
Outcomes = dict[str, tuple[bool, str]]  # Whether each test failed, and the message.


def run_suite(mode: str, clone: pathlib.Path, options: Any) -> Outcomes:
    """Runs the tests once, up to the time limit, and returns the outcome of each that ended."""
    with tempfile.TemporaryDirectory() as temporary:
        output = pathlib.Path(temporary) / "outcomes"
        output.touch()
        log = (options.log or pathlib.Path(temporary)) / f"{mode}.log"
        settings = {"mode": mode, "output": str(output)}
        settings |= {name: getattr(options, name) for name in ("tolerance", "keep", "call")}
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        environment = os.environ | {"JMP_THROUGH": json.dumps(settings), "PYTHONPATH": path}
        command = [sys.executable, "-P", "-m", "pytest", "-p", "benchmarks.ported.through"]
        command += ["-p", "no:cacheprovider", "-q", "-c", os.devnull, "--rootdir", ".", *options.tests]
        with log.open("w") as file, contextlib.suppress(subprocess.TimeoutExpired):
            seconds = 60 * options.minutes
            subprocess.run(command, cwd=clone, env=environment, timeout=seconds, stdout=file, stderr=file)
        outcomes = [json.loads(line) for line in output.read_text().splitlines()]
    # A test that fails in its teardown has two outcomes: a failure counts.
    return {test: (failed, message) for test, failed, message in sorted(outcomes)}


def compare(alone: Outcomes, ours: Outcomes) -> dict[str, list[str]]:
    """Returns the names of the tests by outcome, of those that the run with `jax.jit` has reached too."""
    kinds: dict[str, list[str]] = {"passed": [], "failed by us": [], "by themselves": []}
    for test in alone.keys() & ours.keys():
        kind = "passed" if not ours[test][0] else "by themselves" if alone[test][0] else "failed by us"
        kinds[kind].append(test)
    return kinds


def main() -> None:
    """The command."""
    parser = make_parser(__doc__)
    parser.add_argument("clone", type=pathlib.Path, help="the folder of a clone")
    parser.add_argument("tests", nargs="+", help="test files or folders, relative to the clone")
    modes = [mode for mode in MODES if mode != "jit"]
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes, help="default: all")
    parser.add_argument(
        "--call",
        nargs="+",
        default=[],
        help="methods that tests call themselves, such as flax.linen.Module.apply",
    )
    parser.add_argument(
        "--keep", type=int, default=10**6, help="at most so many cases of each parameterized test"
    )
    parser.add_argument("--minutes", type=float, default=60, help="the time limit of a run (default: 60)")
    parser.add_argument(
        "--tolerance", type=float, default=0.06, help="the relative difference that is allowed"
    )
    parser.add_argument("--log", type=pathlib.Path, help="a folder for what pytest prints, with the traces")
    options = parser.parse_args()
    alone = run_suite("jit", options.clone, options)
    table = [
        "| mode | tests | passed | failed by us | by themselves |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for mode in options.modes:
        ours = run_suite(mode, options.clone, options)
        kinds = compare(alone, ours)
        counts = [len(names) for names in kinds.values()]
        table.append(f"| {mode} | {sum(counts)} | " + " | ".join(map(str, counts)) + " |")
        for test in kinds["failed by us"]:
            print(f"{mode}: {test}: {ours[test][1][:400]}", flush=True)
    print("\n".join(table))


if __name__ == "__main__":
    main()

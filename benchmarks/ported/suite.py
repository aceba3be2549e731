"""Runs the tests of another package through us, and counts those that fail only then.

    python -m benchmarks.ported.suite CLONE tests/a_test.py tests/b_test.py
    python -m benchmarks.ported.suite ../jax tests/nn_test.py --modes bf16 fuse --keep 3 --minutes 5
    python -m benchmarks.ported.suite ../flax tests/linen --call flax.linen.Module.apply

CLONE is the folder of a clone at a version that fits the installed JAX. Nothing in it is changed. Each mode
is a run of its own, in which the functions that the tests give to `jax.jit`, `jax.grad`, `jax.vmap` and the
others go through `autocast` or `fuse_attention`. What fails runs again with `jax.jit` in our place: a test
that passes there fails by us, and one that fails there too fails by itself.
"""

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
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


def run_suite(mode: str, tests: Iterable[str], options: Any) -> Outcomes:
    """Runs tests once, up to the time limit, and returns the outcome of each that ended."""
    with tempfile.TemporaryDirectory() as temporary:
        output = pathlib.Path(temporary) / "outcomes"
        output.touch()
        log = (options.log or pathlib.Path(temporary)) / f"{mode}.log"
        settings = {"mode": mode, "output": str(output)}
        settings |= {name: getattr(options, name) for name in ("tolerance", "keep", "call")}
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        environment = os.environ | {"JMP_THROUGH": json.dumps(settings), "PYTHONPATH": path}
        command = [sys.executable, "-P", "-m", "pytest", "-p", "benchmarks.ported.through"]
        command += ["-p", "no:cacheprovider", "-q", "-c", os.devnull, "--rootdir", ".", *tests]
        with log.open("w") as file, contextlib.suppress(subprocess.TimeoutExpired):
            seconds = 60 * options.minutes
            subprocess.run(
                command, cwd=options.clone, env=environment, timeout=seconds, stdout=file, stderr=file
            )
        outcomes = [json.loads(line) for line in output.read_text().splitlines()]
    # A test that fails in its teardown has two outcomes: a failure counts.
    return {test: (failed, message) for test, failed, message in sorted(outcomes)}


def row(mode: str, ours: Outcomes, alone: Outcomes) -> str:
    """Prints the tests that fail by us, and returns the row of a mode. `alone`: the runs with `jax.jit`."""
    failed = [test for test, (wrong, _) in ours.items() if wrong and test in alone]
    by_us = [test for test in failed if not alone[test][0]]
    for test in by_us:
        print(f"{mode}: {test}: {ours[test][1][:400]}", file=sys.stderr)
    passed = sum(not wrong for wrong, _ in ours.values())
    return f"| {mode} | {len(ours)} | {passed} | {len(by_us)} | {len(failed) - len(by_us)} |"


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
    print("| mode | tests | passed | failed by us | by themselves |\n| --- | ---: | ---: | ---: | ---: |")
    alone: Outcomes = {}
    for mode in options.modes:
        ours = run_suite(mode, options.tests, options)
        if again := [test for test, (failed, _) in ours.items() if failed and test not in alone]:
            alone |= run_suite("jit", again, options)
        print(row(mode, ours, alone), flush=True)


if __name__ == "__main__":
    main()

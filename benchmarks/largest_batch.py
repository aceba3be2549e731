"""How large a batch fits, float32 beside half precision.

    python -m benchmarks.largest_batch                                  # GPT-2 small.
    python -m benchmarks.largest_batch resnet50 --arms float32 float16

The step is compiled for ever larger batches, for an H100 that is not there, until arguments, results and
temporary memory together exceed what JAX takes of the device: three quarters. On an H100 the largest is then
run for two steps, and so is the first that should not fit; without one nothing is run. Near the limit XLA
computes anew what it would otherwise keep, so that more fits, and more slowly.
"""

import argparse
import json
import pathlib
from typing import Any

import jax

from benchmarks.device import device_name, versions
from benchmarks.h100 import HAS_GPU, compile_for_gpu
from benchmarks.jax_arms import JaxArm, facts
from benchmarks.predict import PRETENDED
from benchmarks.worker import ArmFailed, Worker
from examples.models import FAMILIES
from jmp_lite.diagnostics import read_program

ARMS = ("float32", "bfloat16", "float16", "float16 autocast")
H100_BYTES = 84_942_979_072  # As `benchmarks.h100` describes it.
SHARE = 0.75  # What JAX takes: XLA_PYTHON_CLIENT_MEM_FRACTION.


def needed(family: str, arm: str, batch_size: int) -> int:
    """Returns the bytes that a step of an arm holds at most: arguments, results and temporary memory."""
    made = JaxArm(arm, FAMILIES[family].full(), batch_size)
    program = read_program(compile_for_gpu(made.step, *made.shapes(), donate_argnums=0, pretend=True))
    return facts(program)["program_bytes"]


def largest(family: str, arm: str, memory: float, step: int) -> int:
    """Returns the largest batch, a multiple of `step`, whose program fits into `memory`; 0 if none does.

    What is held grows in proportion to the batch, so that two programs tell nearly where to look.
    """
    one, two = needed(family, arm, step), needed(family, arm, 2 * step)
    guess = max(1, 1 + int((memory - one) / max(1, two - one)))
    while guess and needed(family, arm, guess * step) > memory:
        guess -= 1
    while needed(family, arm, (guess + 1) * step) <= memory:
        guess += 1
    return guess * step


def runs(family: str, arm: str, batch_size: int) -> str | None:
    """Runs two steps on this machine's GPU, in a process of their own; returns what went wrong, if it did."""
    settings = {"family": family, "size": "full", "batch_size": batch_size}
    worker = Worker(arm, settings, pathlib.Path("out/logs/largest_batch.log"), seconds=300)
    try:
        worker.ask("compile")
        worker.ask("steps", count=2)
    except ArmFailed as error:
        return str(error)
    finally:
        worker.close()
    return None


def main() -> None:
    """Looks for the largest batch of each arm, prints it and writes it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", nargs="?", choices=FAMILIES, default="gpt2-small")
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--step", type=int, default=4, help="try multiples of this")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # The GPU is for the workers.
    memory = SHARE * H100_BYTES
    found: dict[str, Any] = {"family": options.family, "memory_bytes": memory, "versions": versions()}
    folder = options.results / (device_name() if HAS_GPU else PRETENDED)
    folder.mkdir(parents=True, exist_ok=True)
    for arm in options.arms:
        batch_size = largest(options.family, arm, memory, options.step)
        found[arm] = {"batch_size": batch_size}
        if HAS_GPU:
            found[arm] |= {
                "fits": runs(options.family, arm, batch_size) or "yes",
                "one more": runs(options.family, arm, batch_size + options.step) or "fits, too",
            }
        print(f"{arm:20}{batch_size:6}  {'; '.join(map(str, found[arm].values()))[:100]}", flush=True)
        path = folder / f"largest-batch-{options.family}.json"
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

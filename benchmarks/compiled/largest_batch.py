"""How large a batch fits, in float32 and in half precision.

    python -m benchmarks.compiled.largest_batch                                  # GPT-2 small.
    python -m benchmarks.compiled.largest_batch resnet50 --arms float32 float16

The step is compiled for larger and larger batches, for a pretended H100. The largest batch is the last one
whose arguments, results and temporary memory fit into the share of the memory that JAX takes: three quarters.
On an H100 this batch and the next larger one are then run for two steps. Without an H100 nothing is run. Near
the limit XLA computes values again instead of keeping them, so more fits, and the step is slower.
"""

import pathlib
from typing import Any

import jax

from benchmarks.arms.jax_arms import JaxArm, facts
from benchmarks.arms.worker import ArmFailed, Worker
from benchmarks.command import make_parser, write_json
from benchmarks.compiled.h100 import compile_for_gpu
from benchmarks.compiled.predict import PRETENDED
from benchmarks.device import HAS_GPU, device_name, versions
from examples.models import FAMILIES
from jmp_lite.programs import read_program

ARMS = ("float32", "bfloat16", "float16", "float16 autocast")
H100_BYTES = 84_942_979_072  # As in `benchmarks.compiled.h100.H100`.
SHARE = 0.75  # The share that JAX takes: XLA_PYTHON_CLIENT_MEM_FRACTION.


def needed(family: str, arm: str, batch_size: int, size: str = "full") -> int:
    """Returns the bytes that a step of an arm needs: arguments, results and temporary memory."""
    made = JaxArm(arm, getattr(FAMILIES[family], size)(), batch_size)
    program = read_program(compile_for_gpu(made.step, *made.shapes(), donate_argnums=0, pretend=True))
    return facts(program)["program_bytes"]


def largest(family: str, arm: str, memory: float, step: int, size: str = "full") -> int:
    """Returns the largest batch, a multiple of `step`, whose program fits into `memory`; 0 if none does.

    The memory grows in proportion to the batch, so two programs give a good first guess.
    """
    one, two = (needed(family, arm, each * step, size) for each in (1, 2))
    guess = max(1, 1 + int((memory - one) / max(1, two - one)))
    while guess and needed(family, arm, guess * step, size) > memory:
        guess -= 1
    while needed(family, arm, (guess + 1) * step, size) <= memory:
        guess += 1
    return guess * step


def runs(family: str, arm: str, batch_size: int, size: str) -> str | None:
    """Runs two steps on the GPU, in a process of their own. Returns the error, or None."""
    settings = {"family": family, "size": size, "batch_size": batch_size}
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
    parser = make_parser(__doc__)
    parser.add_argument("family", nargs="?", choices=FAMILIES, default="gpt2-small")
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--step", type=int, default=4, help="try multiples of this")
    parser.add_argument("--size", choices=("small", "full"), default="full", help="of the model")
    parser.add_argument("--memory", type=float, default=SHARE * H100_BYTES, help="bytes")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # The workers use the GPU.
    memory = options.memory
    found: dict[str, Any] = {"family": options.family, "memory_bytes": memory, "versions": versions()}
    folder = options.results / (device_name() if HAS_GPU else PRETENDED)
    folder.mkdir(parents=True, exist_ok=True)
    for arm in options.arms:
        batch_size = largest(options.family, arm, memory, options.step, options.size)
        found[arm] = {"batch_size": batch_size}
        if HAS_GPU:
            found[arm] |= {
                "fits": runs(options.family, arm, batch_size, options.size) or "yes",
                "one more": runs(options.family, arm, batch_size + options.step, options.size) or "fits, too",
            }
        print(f"{arm:20}{batch_size:6}  {'; '.join(map(str, found[arm].values()))[:100]}", flush=True)
        path = folder / f"largest-batch-{options.family}.json"
        write_json(path, found)


if __name__ == "__main__":
    main()

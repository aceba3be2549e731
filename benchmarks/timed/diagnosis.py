"""What a diagnosis of GPT-2 small costs on this machine: seconds and memory of each tool, one process each.

    python -m benchmarks.timed.diagnosis                         # Half an hour on two cores.
    python -m benchmarks.timed.diagnosis --tools profile_ranges --size small

The loss is that of one sequence of 1,024 tokens, in float16. The first line is the gradient in float32 alone;
`each_module` is `compare_precision` with `tolerance=0`.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jmp_lite as jmp
from benchmarks.command import make_parser
from examples.models import FAMILIES
from jmp_lite import diagnostics

SCALE = 2.0**15
TOOLS: dict[str, Callable[[Any, Any], Any]] = {
    "gradient": lambda loss, params: jax.block_until_ready(jax.jit(jax.grad(loss))(params)),
    "find_nonfinite": lambda loss, params: diagnostics.find_nonfinite(
        jmp.autocast(loss, jnp.float16), loss_scale=jmp.StaticLossScale(SCALE)
    )(params),
    "profile_ranges": lambda loss, params: diagnostics.profile_ranges(loss, jnp.float16)(params),
    "compare_precision": lambda loss, params: diagnostics.compare_precision(loss, jnp.float16)(params),
    "each_module": lambda loss, params: diagnostics.compare_precision(
        loss, jnp.float16, loss_scale=SCALE, tolerance=0
    )(params),
    "doctor": lambda loss, params: diagnostics.doctor(loss, jnp.float16)(params),
}


def measure(tool: str, size: str) -> tuple[float, float, float]:
    """Runs a tool in this process.

    Returns:
        Seconds on the clock, seconds of CPU time, and the largest memory of the process in GiB.
    """
    workload = FAMILIES["gpt2-small"].full() if size == "full" else FAMILIES["gpt2-small"].small()
    params = workload.init(0)["params"]
    inputs, targets = workload.batch(0, 1)
    loss = lambda params: workload.loss(workload.model.apply({"params": params}, *inputs), targets)
    began, used = time.perf_counter(), time.process_time()
    TOOLS[tool](loss, params)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return time.perf_counter() - began, time.process_time() - used, memory


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each tool."""
    parser = make_parser(__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--alone", action="store_true", help="run the one tool in this process")
    options = parser.parse_args(arguments)
    if options.alone:
        seconds, used, memory = measure(options.tools[0], options.size)
        print(f"{options.tools[0]:20}{seconds:8.0f} s{used:8.0f} s of CPU time{memory:8.1f} GiB", flush=True)
        return
    for tool in options.tools:
        command = ("-m", "benchmarks.timed.diagnosis", "--alone", "--tools", tool, "--size", options.size)
        subprocess.run([sys.executable, *command], check=True)


if __name__ == "__main__":
    main()

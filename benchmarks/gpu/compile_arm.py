"""Compiles one arm of a model in a process of its own.

    python -m benchmarks.gpu.compile_arm resnet50 float16 --size small

The environment names the caches of JAX and PyTorch. The compiled program goes there. A later process times
the arm and does not compile it again. The figures of the real program of the GPU are written as JSON.
"""

import argparse
import collections
import json
import pathlib
from typing import Any

from benchmarks.arms.worker import make_arm
from benchmarks.command import make_parser, write_json
from benchmarks.device import HAS_GPU, versions
from examples.models import FAMILIES
from jmp_lite.programs import Program, read_program, roofline


def targets(program: Program) -> dict[str, int]:
    """Returns the number of products by the function that runs them and their dtype.

    XLA's own kernels, those of Triton included, are `dot` and `convolution`. A product without a name of its
    operation, which a report by module cannot show, is counted under `without a name`.
    """
    found: collections.Counter[str] = collections.Counter()
    for product in program.matmuls:
        found[f"{product.target} {product.arithmetic}"] += product.times
        if not product.operation:
            found["without a name"] += product.times
    return dict(found)


def arm_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the options that name one arm of a model."""
    parser = make_parser(description)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("arm")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    return parser


def main() -> None:
    """Compiles the arm and writes its figures."""
    parser = arm_parser(__doc__)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    options = parser.parse_args()
    workload = getattr(FAMILIES[options.family], options.size)()
    arm: Any = make_arm(options.family, options.arm, options.size, workload.batch_size)
    found = {"family": options.family, "arm": options.arm, "size": options.size} | arm.compile()
    if HAS_GPU and found["device"] == "cpu":
        raise RuntimeError("The arm is compiled for the CPU of a machine with a GPU.")
    if not options.arm.startswith("torch "):
        program = read_program(arm.run)
        found["targets"] = targets(program)
        found["roofline_seconds"] = dict(roofline(program).seconds)
    write_json(options.json, found | {"versions": versions()})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""What the compiled step of each arm of each model does on an H100. On a machine with a GPU, also there.

    python -m benchmarks.compiled.predict            # All families at full size: half an hour on two cores.
    python -m benchmarks.compiled.predict resnet50 neumf --arms float16 "float16 autocast"
    python -m benchmarks.compiled.predict --summary  # The README's table, from the files.

Every arm is checked on the program for the H100: its products must have the dtype that it claims. Where there
is a GPU, the same step is compiled for it as well. Nothing is run. A file of results keeps the arms that the
same versions compiled before. This needs `pip install -e ".[h100]"`.
"""

import json
import pathlib
import time
from typing import Any

from benchmarks.arms.jax_arms import JaxArm, arms_of, check_program, facts
from benchmarks.command import make_parser, read_json, write_json
from benchmarks.compiled.h100 import compile_for_gpu
from benchmarks.device import HAS_GPU, device_name, versions
from examples.models import FAMILIES
from jmp_lite.programs import read_program

PRETENDED = "h100-pretended"  # The folder of the results for a pretended H100.
WANTED = ("float32", "TF32", "bfloat16", "float16", "float16 autocast")


def predict(family: str, arm: str, pretend: bool = True, size: str = "full") -> dict[str, Any]:
    """Compiles the step of an arm.

    Args:
        family: one of `FAMILIES`.
        arm: one of `JAX_ARMS`.
        pretend: whether to compile for a pretended H100, and not for the GPU of this machine.
        size: `full`, or `small`.

    Returns:
        The `benchmarks.arms.jax_arms.facts` of the program, and the seconds of the compilation.

    Raises:
        AssertionError: a product multiplies in another dtype than the arm claims.
    """
    workload = getattr(FAMILIES[family], size)()
    made = JaxArm(arm, workload, workload.batch_size)
    began = time.perf_counter()
    compiled = compile_for_gpu(made.step, *made.shapes(), donate_argnums=0, pretend=pretend)
    seconds = time.perf_counter() - began
    program = read_program(compiled)
    check_program(program, made.precision)
    return {**facts(program), "compile_seconds": round(seconds, 1)}


def kept(path: pathlib.Path) -> dict[str, Any]:
    """Returns the arms in a file of results that the installed versions have compiled."""
    found = read_json(path)
    return found["arms"] if found.get("versions") == versions() else {}


def line(family: str, arm: str, where: str, found: dict[str, Any]) -> str:
    """Returns one line of the table."""
    products = ", ".join(f"{count} {name}" for name, count in found["products"].items())
    return (
        f"{family:12} {arm:18} {where:10}{found['kernels']:>8,}{found['bytes_moved'] / 1e6:>11,.0f}"
        f"{found['program_bytes'] / 1e6:>9,.0f}{found['compile_seconds']:>7.0f}s  {products}"
    )


def summary(folder: pathlib.Path) -> list[str]:
    """Returns the table of the H100 in Markdown, from the files: float32, float16 and autocast."""
    arms = ("float32", "float16", "float16 autocast")
    lines = [
        "| Model | matmuls | traffic GB | peak GB | kernels |",
        "| --- | --- | --- | --- | --- |",
    ]
    for family in FAMILIES:
        path = folder / PRETENDED / f"{family}.json"
        found = json.loads(path.read_text())["arms"] if path.exists() else {}
        if all(arm in found for arm in arms):
            half = [found[arm] for arm in arms]
            cells = (
                family,
                str(sum(half[1]["products"].values())),
                " / ".join(f"{each['bytes_moved'] / 1e9:.1f}" for each in half),
                " / ".join(f"{each['program_bytes'] / 1e9:.1f}" for each in half),
                " / ".join(f"{each['kernels']:,}" for each in half),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Compiles the steps asked for, prints a table and writes it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; all if none is named")
    parser.add_argument("--arms", nargs="*", default=list(WANTED))
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--only-pretended", action="store_true", help="not for the GPU of this machine")
    parser.add_argument("--summary", action="store_true", help="compile nothing")
    options = parser.parse_args()
    if options.summary:
        print("\n".join(summary(options.results)))
        return
    print(f"{'family':12} {'arm':18} {'for':10}{'kernels':>8}{'MB moved':>11}{'MB held':>9}{'compile':>8}")
    for family in options.families or FAMILIES:
        known = arms_of(FAMILIES[family].full())
        for where in ["H100", *([device_name()] if HAS_GPU and not options.only_pretended else [])]:
            pretend = where == "H100"
            path = options.results / (PRETENDED if pretend else f"{where}-compiled") / f"{family}.json"
            found: dict[str, Any] = {"family": family, "versions": versions(), "arms": kept(path)}
            for arm in (each for each in options.arms if each in known):
                found["arms"][arm] = predict(family, arm, pretend, options.size)
                print(line(family, arm, where, found["arms"][arm]), flush=True)
            write_json(path, found)


if __name__ == "__main__":
    main()

"""One profile of a training step, read by module beside the estimate of the roofline.

python -m benchmarks.gpu.profile_arm gpt2-small float16
"""

import pathlib
import tempfile

import jax

from benchmarks.arms.jax_arms import JaxArm
from benchmarks.command import write_json
from benchmarks.device import device_name, versions
from benchmarks.gpu.compile_arm import arm_parser
from benchmarks.gpu.profiles import read_profile, seconds_by_module, table
from examples.models import FAMILIES
from jmp_lite.programs import Program, read_program, roofline

RUNS = 3


def main() -> None:
    """Profiles some steps, prints the table of the modules and writes it as JSON."""
    parser = arm_parser(__doc__)
    parser.add_argument("--depth", type=int, default=2, help="how many names of a scope are one module")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("out/profile.json"))
    options = parser.parse_args()
    workload = getattr(FAMILIES[options.family], options.size)()
    made = JaxArm(options.arm, workload, workload.batch_size)
    made.compile()
    made.steps(2)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            made.steps(RUNS)
        kernels = read_profile(folder, runs=RUNS)
    program = read_program(made.run)
    device = "h200" if "h200" in device_name() else "h100"
    estimate = roofline(program, device, depth=options.depth)
    measured = seconds_by_module(program, kernels, options.depth)
    names = {launch.name for launch in program.launches}
    slowest = sorted(kernels, key=lambda name: -kernels[name])[:40]
    text = f"{estimate}\n\n{table(estimate, measured)}"
    content = {
        "family": options.family,
        "arm": options.arm,
        "size": options.size,
        "device": device_name(),
        "versions": versions(),
        "seconds": sum(kernels.values()),
        "seconds_of_known_kernels": sum(seconds for name, seconds in kernels.items() if name in names),
        "table": text,
        "modules": [
            {
                "module": row.module,
                "measured": measured[row.module],
                "seconds": dict(row.seconds),
                "bound": row.bound,
            }
            for row in estimate.modules
        ],
        "slowest_kernels": [
            {"name": name, "seconds": kernels[name], "operation": _operation(program, name)}
            for name in slowest
        ],
        "launches": len(program.launches),
    }
    write_json(options.json, content)
    print(text)


def _operation(program: Program, name: str) -> str:
    return next((launch.operation for launch in program.launches if launch.name == name), "")


if __name__ == "__main__":
    main()

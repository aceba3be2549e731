"""One profile of a training step, read by module beside the estimate of the roofline.

python -m benchmarks.gpu.profile_arm gpt2-small float16
"""

import json
import pathlib
import tempfile

import jax

from benchmarks.arms.jax_arms import JaxArm
from benchmarks.device import device_name, versions
from benchmarks.gpu.compile_arm import arm_parser
from benchmarks.gpu.files import write_atomically
from examples.models import FAMILIES
from jmp_lite.diagnostics import Program, read_profile, read_program, roofline

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
        measured = read_profile(folder, runs=RUNS)
    program = read_program(made.run)
    device = "h200" if "h200" in device_name() else "h100"
    found = roofline(program, device, depth=options.depth, measured=measured)
    names = {launch.name for launch in program.launches}
    kernels = sorted(measured.items(), key=lambda each: -each[1])
    content = {
        "family": options.family,
        "arm": options.arm,
        "size": options.size,
        "device": device_name(),
        "versions": versions(),
        "seconds": sum(measured.values()),
        "seconds_of_known_kernels": sum(seconds for name, seconds in measured.items() if name in names),
        "table": str(found),
        "modules": [
            {"module": row.module, "measured": row.measured, "seconds": dict(row.seconds), "bound": row.bound}
            for row in found.modules
        ],
        "slowest_kernels": [
            {"name": name, "seconds": seconds, "operation": _operation(program, name)}
            for name, seconds in kernels[:40]
        ],
        "launches": len(program.launches),
    }
    write_atomically(options.json, json.dumps(content, indent=1))
    print(found)


def _operation(program: Program, name: str) -> str:
    return next((launch.operation for launch in program.launches if launch.name == name), "")


if __name__ == "__main__":
    main()

"""Runs a public program in float32 as it is, and in float16 with the lines of its port.

    python -m benchmarks.ported NAME CLONE          # Into benchmarks/results/ported/NAME.json.
    python -m benchmarks.ported --list              # The names, and the revisions that the clones must have.
    python -m benchmarks.compiled.pages             # From there into docs/ported-programs.md.

CLONE is the folder of a clone of the program's repository at the port's revision. It is not changed: each run
has a copy.
"""

import importlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.command import make_parser
from benchmarks.device import versions
from benchmarks.ported import port as ports
from benchmarks.ported.page import RESULTS, program
from benchmarks.ported.programs import NAMES

ROOT = pathlib.Path(__file__).parent.parent.parent
LIBRARIES = ("jax", "jaxlib", "flax", "optax")


def run_copy(port: ports.Port, module: str, clone: pathlib.Path, text: str, steps: int) -> dict[str, Any]:
    """Runs a copy of the clone in which the port's file has this text, and returns its summary."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, output = pathlib.Path(temporary) / "program", pathlib.Path(temporary) / "summary.json"
        shutil.copytree(clone / port.folder, folder, ignore=shutil.ignore_patterns(".git"))
        file = folder / pathlib.Path(port.file).relative_to(port.folder)
        file.with_suffix(".py").write_text(text)
        command = [sys.executable, "-m", "benchmarks.ported.worker", module]
        subprocess.run([*command, str(folder), str(steps), str(output)], cwd=ROOT, check=True)
        return json.loads(output.read_text())


def measure(module: str, clone: pathlib.Path, steps: int) -> dict[str, Any]:
    """Returns the row of a program: its diff, and the summaries of both runs.

    Raises:
        ValueError: the clone has another revision, or a fragment of the port is not in the file.
    """
    port = importlib.import_module(module).PORT
    ports.check_revision(port, clone)
    text = ports.original(port, clone)
    difference = ports.diff(port, text)
    return {
        "edits": ports.digest(port),
        "added": difference.added,
        "removed": difference.removed,
        "lines": difference.lines,
        "steps": steps,
        "versions": {name: versions()[name] for name in LIBRARIES},
        "float32": run_copy(port, module, clone, text, steps),
        "float16": run_copy(port, module, clone, ports.apply(port, text), steps),
    }


def main() -> None:
    """The command."""
    parser = make_parser(__doc__)
    parser.add_argument("name", nargs="?", choices=NAMES, help="the program")
    parser.add_argument("clone", nargs="?", type=pathlib.Path, help="the folder of a clone of its repository")
    parser.add_argument("--steps", type=int, default=60, help="how many steps to train (default: 60)")
    parser.add_argument("--list", action="store_true", help="print the names and revisions, and stop")
    options = parser.parse_args()
    if options.list:
        for name in NAMES:
            print(
                f"{name:14} https://github.com/{program(name).PORT.repository} {program(name).PORT.revision}"
            )
        return
    if options.clone is None:
        parser.error("give the name of a program and the folder of its clone, or --list")
    row = measure(program(options.name).__name__, options.clone, options.steps)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{options.name}.json").write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

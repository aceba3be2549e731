"""One run of one program, in a process of its own.

    python -m benchmarks.ported.worker MODULE FOLDER STEPS OUTPUT

`benchmarks.ported` starts it with the folder of an applied copy.
"""

import importlib
import json
import os
import pathlib
import sys


def main(module: str, folder: str, steps: str, output: str) -> None:
    """Runs the program of `module` in the folder, and writes the summary of its step as JSON."""
    path = pathlib.Path(output).resolve()
    program = importlib.import_module(module)
    os.chdir(folder)
    sys.path.insert(0, os.getcwd())
    recorder = program.run(int(steps))
    path.write_text(json.dumps(recorder.summary()))


if __name__ == "__main__":
    main(*sys.argv[1:])

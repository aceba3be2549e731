"""Runs an exported program. It needs JAX and NumPy: neither Flax nor jmp_lite.

    python examples/run_exported.py PROGRAM INPUTS.npz OUTPUTS.npz

`examples/export.py` writes such a program.
"""

import argparse
from pathlib import Path

import jax
import numpy as np
from jax import export


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", type=Path, help="a file with the bytes of jax.export")
    parser.add_argument(
        "inputs", type=Path, help="the arrays of the arguments, in the order of jax.tree.leaves"
    )
    parser.add_argument("outputs", type=Path, help="the file that gets the arrays of the results")
    options = parser.parse_args()
    for path in (options.program, options.inputs):
        if not path.is_file():
            parser.error(f"There is no file {path}.")

    exported = export.deserialize(bytearray(options.program.read_bytes()))
    arrays = [np.asarray(array) for array in np.load(options.inputs).values()]
    args, kwargs = jax.tree.unflatten(exported.in_tree, arrays)
    np.savez(options.outputs, *map(np.asarray, jax.tree.leaves(exported.call(*args, **kwargs))))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Stopped.") from None

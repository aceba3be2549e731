"""Runs an exported program. It needs JAX and NumPy: neither Flax nor jmp_lite.

    python examples/run_exported.py PROGRAM INPUTS.npz OUTPUTS.npz

INPUTS has the arrays of the arguments, in the order of `jax.tree.leaves`. OUTPUTS gets those of the results.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax import export

if __name__ == "__main__":
    program, inputs, outputs = map(Path, sys.argv[1:])
    exported = export.deserialize(bytearray(program.read_bytes()))
    arrays = [np.asarray(array) for array in np.load(inputs).values()]
    args, kwargs = jax.tree.unflatten(exported.in_tree, arrays)
    np.savez(outputs, *map(np.asarray, jax.tree.leaves(exported.call(*args, **kwargs))))

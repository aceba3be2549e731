"""Saves the arguments of a step, so that a failure on a cluster can be examined on another machine."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from .._paths import named_leaves
from .._tree import is_key


def save_call(path: str | pathlib.Path, *args: Any) -> None:
    """Saves the arguments of a step (parameters, optimizer state, batch, key), unless the file exists.

    Every process of a run calls it, since an array over several processes is gathered. The first one writes.

    Args:
        path: the file, in the format of NumPy's `.npz`.
        args: any pytrees. Their arrays and keys are saved, and nothing else.

    Examples:
        >>> jmp.save_call("/tmp/jmp_lite_call.npz", {"w": jnp.ones(2, jnp.bfloat16)}, jax.random.key(0))
        >>> jmp.load_call("/tmp/jmp_lite_call.npz", {"w": jnp.zeros(2)}, jax.random.key(1))[0]["w"].dtype.name
        'bfloat16'
    """
    # Before the test for the process: to gather an array, all processes must take part.
    arrays = {name: _as_array(leaf) for name, leaf in named_leaves(args) if _is_array(leaf)}
    if jax.process_index() == 0 and not pathlib.Path(path).exists():
        # NumPy's files hold no bfloat16 and no fp8 (https://github.com/jax-ml/ml_dtypes/issues/41): the name
        # of each dtype stands beside its bytes.
        held: dict[str, Any] = {name: array[..., None].view(np.uint8) for name, array in arrays.items()}
        held |= {f"{name}:dtype": np.array(array.dtype.name) for name, array in arrays.items()}
        with open(path, "wb") as file:  # `np.savez` would append `.npz` to a path.
            np.savez(file, **held)


def load_call(path: str | pathlib.Path, *like: Any) -> tuple[Any, ...]:
    """Returns the arguments that `save_call` has saved.

    Args:
        path: the file.
        like: arguments of the same structure, such as those of a new run; the values do not matter.

    Raises:
        ValueError: the file has no array for a leaf of `like`.

    Examples:
        >>> jmp.save_call("/tmp/jmp_lite_key.npz", jax.random.key(0))
        >>> (key,) = jmp.load_call("/tmp/jmp_lite_key.npz", jax.random.key(1))
        >>> key == jax.random.key(0)
        Array(True, dtype=bool)
    """
    leaves = []
    with np.load(path) as file:
        for name, leaf in named_leaves(like):
            if _is_array(leaf):
                if name not in file:
                    raise ValueError(f"load_call: {path} has no array {name!r}. Give like= as it was saved.")
                # The bytes are the last axis, so that an array of shape `()` can be viewed too.
                array = jnp.asarray(file[name].view(jnp.dtype(str(file[f"{name}:dtype"])))[..., 0])
                impl = jax.random.key_impl(leaf) if is_key(leaf) else None
                leaf = array if impl is None else jax.random.wrap_key_data(array, impl=impl)
            leaves.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


def _as_array(leaf: Any) -> np.ndarray:
    array = jax.random.key_data(leaf) if is_key(leaf) else leaf
    is_split = isinstance(array, jax.Array) and not array.is_fully_addressable
    return np.asarray(process_allgather(array, tiled=True) if is_split else array)

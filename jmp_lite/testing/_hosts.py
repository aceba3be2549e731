"""An assertion about several processes: what should be the same on all of them is."""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._paths import named_leaves
from .._tree import is_key, is_traced
from ._matmuls import failure


def assert_same_on_all_hosts(tree: Any) -> None:
    """Asserts that the copies of every array are the same, bit for bit, on all processes and devices.

    A loss scale or a parameter that differs between processes lets them drift apart in silence: one skips a
    step that the other takes. Call it on all processes, outside of `jit`, after the first steps and after a
    checkpoint was restored. It compares a checksum of each copy, and gathers the checksums once.

    Args:
        tree: any pytree, such as the train state. Of an array that is sharded over processes, the shards
            that are copies of one another are compared. A number, an array of NumPy, and an array that
            belongs to one process should be the same on all of them.

    Raises:
        AssertionError: a copy differs, or the trees have other leaves on other processes. The message names
            the leaves and the processes.
        TypeError: a leaf is traced, or is neither an array nor a number.

    Examples:
        >>> tx = jmp.with_loss_scale(optax.adamw(3e-4))
        >>> params = {"w": jnp.ones((4, 2))}
        >>> assert_same_on_all_hosts((params, tx.init(params)))
    """
    leaves = named_leaves(tree)
    copies = _gathered_copies([name for name, _ in leaves], [_copies(name, leaf) for name, leaf in leaves])
    lines = [
        _line(name, leaf, processes)
        for (name, leaf), of_leaf in zip(leaves, np.moveaxis(copies, 0, 1), strict=True)
        if (processes := _processes_that_differ(of_leaf))
    ]
    if lines:
        more = [f"and {len(lines) - 8} more"] if len(lines) > 8 else []
        summary = f"{len(lines)} of {len(leaves)} leaves have copies that differ"
        raise failure("assert_same_on_all_hosts", summary, [*lines[:8], *more])


def _gathered_copies(names: Sequence[str], copies: Sequence[Sequence[tuple[int, int]]]) -> np.ndarray:
    """Returns the copies on all processes, in the shape `(processes, leaves, copies, 2)`; see `_copies`.

    Raises:
        AssertionError: the leaves have other names on other processes.
    """
    # JAX gathers arrays that have the same shape on all processes
    # (https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/experimental/multihost_utils.py#L142). So it first
    # gathers the largest number of copies, with a checksum of the names.
    checksum_of_names = zlib.crc32("\n".join(names).encode())
    most_here = max(map(len, copies), default=0)
    checksums_of_names, most = _gathered(np.array([checksum_of_names, most_here], np.uint32)).T
    if len(set(checksums_of_names.tolist())) > 1:
        raise failure("assert_same_on_all_hosts", "the trees of the processes have other leaves")
    # Zeros stand for no copy: another array may be on more devices.
    here = np.zeros((len(names), most.max(), 2), np.uint32)
    for row, of_leaf in zip(here, copies, strict=True):
        row[: len(of_leaf)] = np.array(of_leaf, np.uint32).reshape(-1, 2)
    return _gathered(here)


def _line(name: str, leaf: Any, processes: Sequence[int]) -> str:
    """Returns what the message says of a leaf whose copies differ, with the number that is here."""
    number = f"; here it is {leaf}" if np.ndim(leaf) == 0 and not is_key(leaf) else ""
    return f"{name}: on the processes {processes}{number}"


def _processes_that_differ(all_copies: np.ndarray) -> list[int]:
    """Returns the processes with copies of one part that differ: their parts and checksums, by process."""
    first: dict[int, tuple[int, int]] = {}
    found = set()
    for process, copies in enumerate(all_copies.tolist()):
        for part, checksum in copies:
            # Copies of the same part are compared with the first of them, on whatever process it is.
            other, expected = first.setdefault(part, (process, checksum))
            if part and checksum != expected:
                found |= {other, process}
    return sorted(found)


def _gathered(values: Any) -> np.ndarray:
    """Returns the values of all processes, one below the other."""
    return np.asarray(multihost_utils.process_allgather(values))


def _copies(name: str, leaf: Any) -> list[tuple[int, int]]:
    """Returns, for each copy on this process, a number above 0 for its part of the leaf, and its checksum."""
    if is_traced(leaf):
        raise TypeError("assert_same_on_all_hosts reads values: call it on the host, outside jit.")
    if isinstance(leaf, jax.Array):
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
        shards = [(str(shard.index), shard.data) for shard in leaf.addressable_shards]
    elif isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
        shards = [("whole", leaf)]
    else:
        raise TypeError(f"assert_same_on_all_hosts compares arrays. Got {type(leaf).__name__} at {name!r}.")
    copies = []
    for part, data in shards:
        array = np.asarray(data)
        # Two arrays of the same bytes may differ in dtype or shape.
        header = f"{array.dtype} {array.shape}".encode()
        # `| 1`: 0 is the number of no copy.
        copies.append((zlib.crc32(part.encode()) | 1, zlib.crc32(array.tobytes(), zlib.crc32(header))))
    return copies

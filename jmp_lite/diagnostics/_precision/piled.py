"""The error that has piled up at each module: sketches of its values, and sums over its gradients."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._autocast.jaxprs import Array
from ..._autocast.operations import Operation
from .._values.sites import Kind, Site
from .._values.trace import Measured, Program, Tapped
from .report import Piled

BUCKETS = 4096
"""The length of a sketch. A value of at most so many elements is its own sketch, but for signs."""

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})

Sums = tuple[float, float, float]
"""The squares of a difference, of the first array and of the second."""


class Sketches:
    """The probe: a sketch of the result of every product of the forward pass.

    Each element gets a sign by chance, the same in each run, and is added to the bucket of its index. The
    distance of two sketches is that of the two values: exactly for values of at most `BUCKETS` elements, else
    within 2 % (a standard deviation of sqrt(2 / BUCKETS) of the square).

    Source: Charikar, Chen, Farach-Colton 2002, Finding Frequent Items in Data Streams; here with the
    index modulo the length in place of a hash.
    """

    adds = False
    operands = False

    def wants(self, site: Site, half: bool) -> bool:
        """Whether a site is the result of a product of the forward pass."""
        del half
        return site.kind is Kind.OPERATION and site.operation in _PRODUCTS and site.direction == "forward"

    def measure(self, array: Array) -> Array:
        """Returns the sketch, shape `(BUCKETS,)`, float32."""
        if jnp.iscomplexobj(array):
            array = jnp.stack([array.real, array.imag])
        flat = array.astype(jnp.float32).reshape(-1)
        rows = -(-flat.size // BUCKETS)
        padded = jnp.pad(flat, (0, rows * BUCKETS - flat.size)).reshape(rows, BUCKETS)
        return jnp.sum(padded * _signs(rows), axis=0)

    def empty(self, dtype: Any) -> Array:
        """Returns the sketch of no elements: zeros."""
        del dtype
        return jnp.zeros(BUCKETS, jnp.float32)

    def join(self, first: Array, second: Array) -> Array:
        """Never asked for: all iterations are kept."""
        del second
        return first

    def alarm(self, record: Array) -> Array:
        """Keeps the first iterations of a while loop, whatever their values are."""
        return jnp.zeros(record.shape[:-1], bool)


def _signs(rows: int) -> Array:
    """Returns 1 or -1 for each element, by the bits of a hash of its index."""
    index = lax.iota(jnp.uint32, rows * BUCKETS)
    mixed = (index ^ (index >> 16)) * jnp.uint32(0x7FEB352D)  # The constants of lowbias32.
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x846CA68B)
    return jnp.where((mixed >> 31) == 0, 1.0, -1.0).reshape(rows, BUCKETS)


def values(program: Program) -> tuple[tuple[Site, ...], tuple[np.ndarray, ...]]:
    """Returns the sites of the products of the forward pass, and their sketches, in the order of the program.

    The loss scale does not reach the forward pass.
    """
    measured: Measured = Tapped(program, Sketches())(1.0)
    paths = sorted(path for path in measured.records if path in measured.sites)
    return tuple(measured.sites[path] for path in paths), tuple(measured.records[path] for path in paths)


def piled(
    modules: Sequence[str],
    products: Sequence[tuple[Operation, str]],
    full: Program,
    half: Program,
    sums: np.ndarray,
) -> dict[str, Piled]:
    """Returns the error that has piled up at each module if all modules are in half.

    Args:
        modules: the names of the modules.
        products: the products of the forward pass, each with its path. A path begins with a module's name.
        full: the loss and its gradients in float32.
        half: the same with all modules in half.
        sums: for each gradient the squares of the difference, of the gradient in half and in float32.
    """
    sites, wanted = values(full)
    others, found = values(half)
    last: dict[str, Sums] = {}
    if len(sites) == len(others):
        for site, one, other in zip(sites, found, wanted, strict=True):
            owners = (_owner(path, modules) for path in (site.module, site.argument, site.near))
            if name := next(filter(None, owners), ""):
                last[name] = _sums(one, other)
    gradients = _gradients(modules, products, full, sums)
    return {name: Piled(*error_of(last.get(name)), *error_of(gradients.get(name))) for name in modules}


def _owner(path: str, modules: Sequence[str]) -> str:
    """Returns the module that a path lies in; the innermost of several; empty for none."""
    return max((each for each in modules if f"{path}/".startswith(f"{each}/")), key=len, default="")


def _sums(one: np.ndarray, other: np.ndarray) -> Sums:
    with np.errstate(over="ignore", invalid="ignore"):
        first, second = one.astype(np.float64), other.astype(np.float64)
        off = first - second
        return tuple(float(np.sum(x * x)) for x in (off, first, second))  # pyright: ignore


def _gradients(
    modules: Sequence[str],
    products: Sequence[tuple[Operation, str]],
    program: Program,
    sums: np.ndarray,
) -> dict[str, Sums]:
    """Returns for each module the sums over the gradients of its parameters."""
    names = [
        name
        for name, array in zip(program.names, program.arrays, strict=True)
        if name.split("/")[0] in program.parameters and jnp.issubdtype(array.dtype, jnp.inexact)
    ]
    if len(names) != len(sums):
        return {}
    own: dict[str, set[str]] = {}
    for product, place in products:
        parameters = {each for each in product.arguments if each.split("/")[0] in program.parameters}
        own.setdefault(_owner(place, modules), set()).update(parameters)
    found = {}
    for module, parameters in own.items():
        holders = {each.rpartition("/")[0] for each in parameters if each.count("/") > 1}  # With the bias.
        mine = [name in parameters or name.rpartition("/")[0] in holders for name in names]
        if module and any(mine):
            found[module] = tuple(sums[mine].sum(axis=0).tolist())
    return found


def error_of(sums: Sequence[float] | np.ndarray | None) -> tuple[float, float]:
    """Returns the relative error and the cosine; NaN for both if there is nothing to compare."""
    if sums is None:
        return math.nan, math.nan
    off, own, reference = sums
    if not math.isfinite(off + own + reference):
        return math.inf, math.nan
    if not reference:
        return (math.inf if off else 0.0), (0.0 if off else 1.0)
    cosine = (own + reference - off) / 2 / math.sqrt(own * reference) if own else 0.0
    return math.sqrt(off / reference), min(1.0, max(-1.0, cosine))

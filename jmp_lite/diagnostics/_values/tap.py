"""The tap: runs a program again, and measures the sites of its description on the way.

A probe chooses the sites and measures them: by default their smallest and largest element.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jaxpr import (
    CALLS,
    Array,
    Category,
    Equation,
    Inner,
    Jaxpr,
    Outputs,
    Side,
    Var,
    bind,
    constants,
    context_of,
    inner_jaxprs,
    replay,
    traits_of,
)
from ..._tree import select_tree
from .describe import CUT, INLINE, KEPT, LEAVE, Description
from .sites import Path, Site

MOST_ITERATIONS = 10_000
"""After so many steps a tool stops a `while` loop, and says that it was not examined."""
LONG_LOOP = f"a loop of more than {MOST_ITERATIONS:,} steps"

Records: TypeAlias = Side
"""What was measured at each site, by its path."""
Operate: TypeAlias = Callable[[Equation, Sequence[Array]], Sequence[Array]]
"""Runs an equation without inner jaxprs on arrays."""


class Probe:
    """Measures values: the smallest and the largest element of each; NaN if there is one."""

    # Joins the measurements of two iterations of a loop, or of two shards; None keeps those of all.
    join: Callable[[Array, Array], Array] | None = None

    def wants(self, site: Site) -> bool:
        """Whether to measure a site."""
        del site
        return True

    def measure(self, array: Array, dtype: Any = None) -> Array:
        """Returns the measurement as one array of a fixed shape; here `(2,)`, float32 or float64.

        `dtype` is that of the value in the program, if the array may have another one.
        """
        del dtype
        if jnp.iscomplexobj(array):
            array = jnp.stack([array.real, array.imag])
        if array.dtype.itemsize == 1:  # Not every fp8 format has inf and NaN; float32 has both.
            array = array.astype(jnp.float32)
        if not array.size:
            return self.empty(array.dtype)  # XLA has no minimum of an array without elements.
        # The bits are compared as integers, in the order NaN, -inf, ..., inf, NaN: XLA's CPU backend does not
        # promise that a minimum of floats keeps a NaN (https://github.com/openxla/xla/issues/21461). The bits
        # of negative numbers fall as the numbers rise, so all of them but the sign are inverted.
        whole = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}[array.dtype.itemsize]

        def order(bits):
            return jnp.where(bits < 0, bits ^ jnp.iinfo(whole).max, bits)

        ordered = order(lax.bitcast_convert_type(array, whole))
        high, inverted_low = maxima(ordered, ~ordered)
        ends = order(jnp.stack([~inverted_low, high]))
        return lax.bitcast_convert_type(ends, array.dtype).astype(_wide(array.dtype))

    def empty(self, dtype: Any) -> Array:
        """Returns the measurement of an array of this dtype without elements; here inf and -inf."""
        return jnp.asarray([np.inf, -np.inf], _wide(dtype))

    def alarm(self, record: Any) -> Any:
        """Whether a measurement has an inf or NaN. That of a probe that joins them is never asked."""
        # NaN is not equal to itself.
        return (record != record).any(-1) | (record[..., 0] == -np.inf) | (record[..., 1] == np.inf)


def _wide(dtype: Any) -> Any:
    return jnp.float64 if dtype in (jnp.float64, jnp.complex128) else jnp.float32


def maxima(first: Array, second: Array) -> tuple[Array, Array]:
    """Returns the largest elements of two arrays of integers, which have the same shape and dtype."""
    # XLA's CPU backend runs this single reduction several times as fast as two.
    least = np.asarray(jnp.iinfo(first.dtype).min, first.dtype)

    def join(one, other):
        return (jnp.maximum(one[0], other[0]), jnp.maximum(one[1], other[1]))

    # Over all axes of the array as it is: to flatten a sharded array, XLA would gather its shards.
    high, other_high = lax.reduce((first, second), (least, least), join, tuple(range(first.ndim)))
    return high, other_high


class Tap:
    """Runs the jaxprs of one program with a probe; `operate` runs their equations."""

    # Each measurement is a small array that is computed right where the value is, and leaves loops, branches,
    # rematerialization and shards as an additional result. So all of this is one program, which keeps no
    # value longer than the original program does.

    def __init__(self, description: Description, probe: Probe, operate: Operate = bind) -> None:
        self.probe, self._operate = probe, operate
        # Most arrays of a model have one of few shapes, for each of which this is traced once.
        self._measure_once = jax.jit(probe.measure, static_argnums=1)
        self.sites = {path: site for path, site in description.sites.items() if probe.wants(site)}

    def run(self, jaxpr: Jaxpr, arrays: Sequence[Array], path: Path = ()) -> tuple[list[Array], Records]:
        """Runs a jaxpr at a path, and measures its inputs, its constants and the results of equations."""
        fixed, records = constants(jaxpr), dict[Any, Any]()
        for number, array in (*enumerate(arrays), *((-2 - n, array) for n, array in enumerate(fixed))):
            records |= self._measured((*path, -1, number), array)

        def action(index: int, equation: Equation, read: Callable[[Var], Array]) -> Sequence[Array]:
            operands, at = list(map(read, equation.invars)), (*path, index)
            with context_of(equation):
                if traits_of(equation.primitive.name).category is Category.CALL:
                    results, inside = self._call(equation, operands, at)
                    records.update(inside)
                else:
                    results = self._operate(equation, operands)
            for number, array in enumerate(results):
                # A while loop that is not measured inside has sites as an operation has.
                for place in ((*at, number), (*at, LEAVE + number)):
                    records.update(self._measured(place, array))
            return results

        return replay(jaxpr, [*fixed, *arrays], lambda var: var.val, action), records

    def _measured(self, path: Path, array: Array) -> Records:
        if (site := self.sites.get(path)) is None:
            return {}
        # Without the barrier XLA would fold the reductions of constant arrays, which takes minutes:
        # https://github.com/jax-ml/jax/issues/21300.
        return {path: self._measure_once(lax.optimization_barrier(array), site.dtype)}

    def _call(
        self, equation: Equation, arrays: Sequence[Array], path: Path
    ) -> tuple[Sequence[Array], Records]:
        """Runs a call. The records of the iterations of a scan and of shards are stacked, or joined."""
        name, inners = equation.primitive.name, inner_jaxprs(equation)
        if name in INLINE:
            ((number, inner),) = ((n, each) for n, each in enumerate(inners) if None not in each.results)
            return self.run(inner.jaxpr, [arrays[index] for index in inner.operands], (*path, number))
        # Literals are numbers of Python or NumPy, and the loops of JAX take arrays.
        arrays = [array if isinstance(array, jax.Array) else np.asarray(array) for array in arrays]
        bodies = [self._body(inner, arrays, (*path, number)) for number, inner in enumerate(inners)]
        results, records = CALLS[name](equation, bodies, arrays, **self._options(name, path))
        if name == "shard_map" and (join := self.probe.join):
            records = {at: functools.reduce(join, record) for at, record in records.items()}
        if name == "while":
            # The first body is the condition: if it still holds at the end, the loop was stopped.
            goes_on = jnp.any(bodies[0](*results)[0][0])
            records = {**records, **self._measured((*path, CUT), goes_on.astype(float))}
        return results, records

    def _options(self, name: str, path: Path) -> dict[str, Any]:
        if name == "cond":  # A branch that is not taken gives empty records.
            return {"skipped": self._empty(path)}
        if name == "scan" and (join := self.probe.join):
            return {"accumulator": _Joined(join, self._empty((*path, 0)))}
        if name == "while":
            empty, join = self._empty((*path, 1)), self.probe.join
            keep = _Joined(join, empty) if join else _First(self.probe, empty)
            return {"most": MOST_ITERATIONS, "accumulator": keep}
        return {}

    def _body(self, inner: Inner, arrays: Sequence[Array], path: Path) -> Callable[..., Outputs]:
        """Returns an inner jaxpr as a body for `_jaxpr.calls`, whose side outputs are its records."""
        fixed = [arrays[index] for index in inner.operands[: inner.constants]]

        def body(*moving: Array) -> Outputs:
            results, records = self.run(inner.jaxpr, [*fixed, *moving], path)
            return list(map(jnp.asarray, results)), records

        return body

    def _empty(self, inside: Path) -> Records:
        """Returns the records of a part of the program that does not run: of all sites inside of a path."""
        start = len(inside)

        def is_inside(path):
            return len(path) > start + 1 and path[:start] == inside

        sites = {path: site for path, site in self.sites.items() if is_inside(path)}
        records = {path: self.probe.empty(site.dtype) for path, site in sites.items()}
        if self.probe.join:
            return records

        # Records that are not joined have an axis for each loop inside of the part.
        def lengths(path):
            return [loop.length for loop in sites[path].loops if len(loop.path) > start]

        return {at: jnp.broadcast_to(each, (*lengths(at), *each.shape)) for at, each in records.items()}


def _any(flags: Iterable[Array]) -> Array:
    return functools.reduce(jnp.logical_or, flags, jnp.bool_(False))


class _Joined:
    """Joins the measurements of all iterations."""

    def __init__(self, join: Callable[[Array, Array], Array], empty: Records) -> None:
        self._join, self.start = join, empty

    def add(self, state: Records, side: Records) -> Records:
        return jax.tree.map(self._join, state, side)

    def side(self, state: Records) -> Records:
        return state


class _First:
    """Keeps the measurements of two iterations: the first with an inf or NaN, and the first with a NaN.

    Without an inf or NaN the first of the two is the last iteration. The other one may be empty.
    """

    def __init__(self, probe: Probe, empty: Records) -> None:
        self._probe = probe
        self.start: Any = [(jnp.bool_(False), empty)] * KEPT

    def add(self, state: list[tuple[Array, Records]], side: Records) -> list[tuple[Array, Records]]:
        is_nan = _any(jnp.isnan(record).any() for record in side.values())
        is_bad = _any(self._probe.alarm(record).any() for record in side.values())
        (found, first), (found_nan, first_nan) = state
        first = select_tree(found, first, side)  # The newest one, until one is bad.
        first_nan = select_tree(is_nan & ~found_nan, side, first_nan)
        return [(found | is_bad, first), (found_nan | is_nan, first_nan)]

    def side(self, state: list[tuple[Array, Records]]) -> Records:
        return jax.tree.map(lambda *kept: jnp.stack(kept), *(records for _, records in state))

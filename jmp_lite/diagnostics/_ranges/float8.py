"""Counts the operands of products that fp8 flushes to zero, for `profile_ranges(fun, "float8")`.

Each operand has a scale of its own, computed from its largest magnitude. So no value overflows, and much
smaller values become zero.
"""

import collections
import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ..._autocast.planning.plan import Decision, Plan
from ..._float8.quantize import BACKWARD, FORWARD, quantize
from ..._jaxpr.read import Array, Equation
from .._values.probe import Probe, TapValue
from .._values.sites import Site, SiteKind
from .._values.trace import LossProgram, Tapped

_FORMATS = (FORWARD, BACKWARD)
_COUNTS = 2 + len(_FORMATS)


@dataclasses.dataclass(frozen=True)
class Float8Range:
    """What fp8 flushes to zero among the operands of one module's products, in one direction.

    Attributes:
        name: the module, as in `ModuleRange`.
        direction: `forward` for activations and weights, `backward` for cotangents.
        dtype: the fp8 dtype that autocast uses: `float8_e4m3fn` forward, `float8_e5m2` backward.
        values: how many values there are.
        zeros: how many of them are zero.
        flushed: how many of the others become zero, by the name of the fp8 dtype.

    Examples:
        >>> counts = {"float8_e4m3fn": 3, "float8_e5m2": 1}
        >>> row = Float8Range("head", "backward", "float8_e5m2", 120, 20, counts)
        >>> row.lost, row.share(row.flushed["float8_e4m3fn"])
        (0.01, 0.03)
    """

    name: str
    direction: str
    dtype: str
    values: int
    zeros: int
    flushed: dict[str, int]

    def share(self, count: int) -> float:
        """Returns `count` as a share of the values that are not zero, from 0 to 1."""
        nonzero = self.values - self.zeros
        return count / nonzero if nonzero else 0.0

    @property
    def lost(self) -> float:
        """The share of the values that become zero in the dtype that autocast uses."""
        return self.share(self.flushed[self.dtype])


@dataclasses.dataclass(frozen=True)
class _FlushCounts(Probe):
    """The probe: counts zeros, and for each fp8 dtype the values that become zero."""

    adds, operands, once = True, True, True

    def wants_operands(self, decision: Decision | None, equation: Equation) -> bool:
        del equation
        return decision is not None and decision.in_float8

    def wants(self, site: Site, half: bool) -> bool:
        """In the backward pass only the cotangent, the first operand: the forward pass has the others."""
        del half
        is_cotangent = site.direction == "backward" and site.path[-1] == -1
        return site.kind is SiteKind.OPERAND and (site.direction == "forward" or is_cotangent)

    def measure(self, array: Array, site: Site | None = None, operands: Sequence[TapValue] = ()) -> Array:
        """Returns the counts, shape `(4,)`, uint32."""
        del site, operands
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return self.empty(array.dtype)
        count = lambda flags: jnp.sum(flags, dtype=jnp.uint32)
        is_zero = array == 0
        counts = [jnp.uint32(array.size), count(is_zero)]
        for dtype in _FORMATS:
            rounded = quantize(array, dtype).array.astype(jnp.float32)
            counts.append(count((rounded == 0) & ~is_zero))
        return jnp.stack(counts)

    def empty(self, dtype: object) -> Array:
        del dtype
        return jnp.zeros(_COUNTS, jnp.uint32)

    def join(self, first: Array, second: Array) -> Array:
        return first + second


def float8_ranges(program: LossProgram, plan: Plan, scale: float) -> tuple[Float8Range, ...]:
    """Returns what fp8 flushes to zero among the operands of products, by module and direction."""
    measured = Tapped(program, _FlushCounts(), plan)(scale)
    groups: dict[tuple[str, str], np.ndarray] = collections.defaultdict(lambda: np.zeros(_COUNTS, np.int64))
    for path in sorted(measured.records):
        site = measured.sites[path]
        record = measured.records[path].astype(np.int64).reshape(-1, _COUNTS).sum(0)
        groups[site.place, site.direction] += record
    names = [dtype.name for dtype in _FORMATS]
    rows = []
    for (name, direction), counts in groups.items():
        values, zeros, *flushed = map(int, counts)
        own, lost = names[direction == "backward"], dict(zip(names, flushed))
        rows.append(Float8Range(name, direction, own, values, zeros, lost))
    return tuple(rows)

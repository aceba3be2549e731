"""Counts values by magnitude, which tells what half precision does to them at any loss scale.

The counts are exact for rounding to nearest, ties to even, as in IEEE 754.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..._jaxpr import Array
from .._values.sites import Site, SiteKind
from .._values.tap import Probe, maxima

LOWEST = -149
"""The exponent of the smallest float32."""
BINS = 277
"""How many powers of two float32 has, with its subnormal numbers."""
_CLASSES = 4  # 1 exactly; the numbers between; those that round up below the range; those that overflow.
_ZERO, _INF, _NAN = BINS * _CLASSES, BINS * _CLASSES + 1, BINS * _CLASSES + 2
_COUNTS = _NAN + 1
"""The number of counts in a record, which are followed by the bits of the largest and smallest magnitude."""
EXPONENTS = range(-24, 128)
"""The exponents of the loss scales that are considered."""
# How much more a smaller scale may lose for its headroom: the share of zeros, and of subnormal numbers.
_OF_VALUES, _OF_DIGITS = 0.001, 0.01


@dataclasses.dataclass(frozen=True)
class Fates:
    """How many values of an array a half dtype keeps, flushes to zero or overflows, at one loss scale.

    The counts add up to all values.

    Attributes:
        zeros: zero already.
        flushed: not zero, and zero in half.
        subnormal: kept with fewer digits.
        normal: kept.
        overflowed: finite, and inf in half.
        nonfinite: inf or NaN already.

    Examples:
        >>> fates = Fates(zeros=5, flushed=2, subnormal=0, normal=6, overflowed=0, nonfinite=0)
        >>> fates.nonzero, fates.lost, fates.share(fates.normal)
        (8, 0.25, 0.75)
    """

    zeros: int
    flushed: int
    subnormal: int
    normal: int
    overflowed: int
    nonfinite: int

    @property
    def nonzero(self) -> int:
        """How many values are finite and not zero."""
        return self.flushed + self.subnormal + self.normal + self.overflowed

    def share(self, count: int) -> float:
        """Returns `count` as a share of the values that are finite and not zero, from 0 to 1."""
        return count / self.nonzero if self.nonzero else 0.0

    @property
    def lost(self) -> float:
        """The share that is flushed to zero or overflows."""
        return self.share(self.flushed + self.overflowed)


@dataclasses.dataclass(frozen=True, eq=False)
class Magnitudes:
    """A histogram of the exponents of an array, from which `fates` counts what a loss scale would lose.

    Attributes:
        dtype: the half dtype for which the edges are counted.
        bins: how many values have each exponent, in four classes, shape `(277, 4)`, int64.
        zeros: how many values are zero.
        infs: how many values are inf or -inf.
        nans: how many values are NaN.
        smallest: the smallest magnitude that is finite and not zero; 0 if there is none.
        largest: the largest finite magnitude; 0 if there is none.

    Examples:
        >>> report = profile_ranges(lambda w: jnp.sum(w * jnp.array([1.0, 2.0**-30])))(jnp.ones(2))
        >>> report.pooled.values, report.pooled.fates(0).flushed, report.pooled.fates(15).flushed
        (2, 1, 0)
    """

    dtype: np.dtype
    bins: np.ndarray
    zeros: int
    infs: int
    nans: int
    smallest: float
    largest: float

    @property
    def values(self) -> int:
        """How many values there are."""
        return int(self.bins.sum()) + self.zeros + self.infs + self.nans

    def fates(self, exponent: int = 0) -> Fates:
        """Returns how many values the half dtype keeps and loses at the scale `2**exponent`."""
        # A value is 2**e times a number from 1 to 2, and a loss scale that is a power of two adds to `e` and
        # changes nothing else. So one count by `e`, in which the values that round at the edges of the range
        # stand apart, tells the fates at every scale.
        info = jnp.finfo(self.dtype)
        digits, least, most = int(info.nmant), int(info.minexp), int(info.maxexp) - 1
        exponents = np.arange(BINS)[:, None] + (LOWEST + exponent)
        kinds = np.arange(_CLASSES)
        # Half of the smallest number is a tie, which goes to the even zero. Everything above it becomes the
        # smallest number.
        half_of_least = least - digits - 1
        flushed = (exponents < half_of_least) | ((exponents == half_of_least) & (kinds == 0))
        overflowed = (exponents > most) | ((exponents == most) & (kinds == 3))
        subnormal = (exponents < least) & ~flushed & ~((exponents == least - 1) & (kinds >= 2))
        chosen = flushed, subnormal, ~(flushed | overflowed | subnormal), overflowed
        lost, coarse, kept, beyond = (int(self.bins[each].sum()) for each in chosen)
        return Fates(self.zeros, lost, coarse, kept, beyond, self.infs + self.nans)

    def __add__(self, other: "Magnitudes") -> "Magnitudes":
        counts = self.zeros + other.zeros, self.infs + other.infs, self.nans + other.nans
        smallest = min(filter(None, (self.smallest, other.smallest)), default=0.0)
        largest = max(self.largest, other.largest)
        return Magnitudes(self.dtype, self.bins + other.bins, *counts, smallest, largest)


def _joined(first: Array, second: Array) -> Array:
    """Returns two records as one: the counts add up."""
    is_count = jnp.arange(_COUNTS + 2) < _COUNTS
    return jnp.where(is_count, first + second, jnp.maximum(first, second))


@dataclasses.dataclass(frozen=True)
class Histogram(Probe):
    """The probe: counts the values that the program has in half, by their bits."""

    dtype: np.dtype  # The half dtype for which the edges are counted.

    join = staticmethod(_joined)

    def wants(self, site: Site) -> bool:
        """Whether it is an array in half. Recomputed values are not counted again."""
        is_new = site.kind in (SiteKind.INPUT, SiteKind.OPERATION) and site.direction != "recomputed"
        return is_new and site.is_half and site.shape != ()

    def measure(self, array: Array, dtype: Any = None) -> Array:
        """Returns counts by exponent and class, and the bits of the extremes, shape `(1113,)`, uint32."""
        del dtype
        if jnp.iscomplexobj(array):
            array = jnp.stack([array.real, array.imag])
        # The bits are compared as integers: XLA's CPU backend treats a subnormal float32 as zero, also in
        # comparisons (https://github.com/jax-ml/jax/issues/16200). The mask takes the sign off.
        bits = lax.bitcast_convert_type(jnp.asarray(array, jnp.float32), jnp.uint32) & 0x7FFFFFFF
        if not bits.size:
            return self.empty(array.dtype)
        finite = bits < 0x7F800000  # Inf: all bits of the exponent, and no mantissa. NaN has one.
        index = jnp.where(finite, self._index(bits), jnp.where(bits == 0x7F800000, _INF, _NAN))
        index = jnp.where(bits == 0, _ZERO, index)
        # On an explicit mesh the counts of all devices are added up.
        mesh = jax.typeof(index).sharding.mesh
        out = NamedSharding(mesh, PartitionSpec()) if AxisType.Explicit in mesh.axis_types else None
        counts = jnp.zeros(_COUNTS, jnp.uint32).at[index].add(1, out_sharding=out)
        # The bits of the smallest are inverted, so that a maximum joins both extremes and 0 stands for none.
        none = jnp.uint32(0)
        extremes = maxima(jnp.where(finite, bits, none), jnp.where(finite & (bits > 0), ~bits, none))
        return jnp.concatenate([counts, jnp.stack(extremes)])

    def _index(self, bits: Array) -> Array:
        """Returns the index of each finite value in the counts."""
        digits = int(jnp.finfo(self.dtype).nmant)
        field, mantissa = bits >> 23, bits & 0x7FFFFF
        # A subnormal float32 has its exponent where its first digit stands. The exponents are counted from
        # that of the smallest one, 2**-149, so that the field 1, 2**-126, is 23.
        first = 31 - lax.clz(jnp.maximum(mantissa, 1))
        normalized = (mantissa << (23 - first)) & 0x7FFFFF
        exponent = jnp.where(field == 0, first, field + 22)
        mantissa = jnp.where(field == 0, normalized, mantissa)
        # From the second edge on, a value just below the least normal number of the dtype rounds up to it.
        # From the third edge on, a value just above the largest number rounds to inf.
        edges = [1, 2**23 - 2 ** (23 - digits), 2**23 - 2 ** (22 - digits)]
        kind = sum((mantissa >= edge).astype(jnp.uint32) for edge in edges)
        return exponent * _CLASSES + kind

    def empty(self, dtype: Any) -> Array:
        del dtype
        return jnp.zeros(_COUNTS + 2, jnp.uint32)

    def read(self, record: np.ndarray) -> Magnitudes:
        counts = record[:_COUNTS].astype(np.int64)
        extremes = np.array([~record[-1] if record[-1] else 0, record[-2]], np.uint32).view(np.float32)
        bins = counts[:_ZERO].reshape(BINS, _CLASSES)
        return Magnitudes(self.dtype, bins, *map(int, counts[_ZERO:]), *map(float, extremes))


def pooled(magnitudes: Iterable[Magnitudes], dtype: np.dtype) -> Magnitudes:
    none = Magnitudes(dtype, np.zeros((BINS, _CLASSES), np.int64), 0, 0, 0, 0.0, 0.0)
    return functools.reduce(Magnitudes.__add__, magnitudes, none)


def suggested(gradients: Magnitudes) -> int | None:
    """Returns the exponent of a static scale with headroom, for gradients at a scale of 1; None without one.

    It is the smallest from 0 to that of the largest safe scale at which hardly more of the gradients are lost
    or subnormal than there.
    """
    safe = largest_safe(gradients.largest, gradients.dtype)
    if safe is None:
        return None
    best = gradients.fates(safe)

    def digits(fates):
        return fates.share(fates.subnormal)

    fates = ((exponent, gradients.fates(exponent)) for exponent in range(min(0, safe), safe + 1))
    enough = (each for each in fates if each[1].lost <= best.lost + _OF_VALUES)
    return next(n for n, each in enough if digits(each) <= digits(best) + _OF_DIGITS)


def largest_safe(largest: float, dtype: np.dtype) -> int | None:
    """Returns the exponent of the largest power of two whose product with `largest` fits into a dtype."""
    if not largest:
        return None
    limit = float(jnp.finfo(dtype).max)
    # Too high by one or two, since only the exponents are compared.
    exponent = math.frexp(limit)[1] - math.frexp(largest)[1] + 1
    while math.ldexp(largest, exponent) >= limit:
        exponent -= 1
    return min(exponent, EXPONENTS[-1]) if exponent >= EXPONENTS[0] else None

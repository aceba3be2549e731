"""The loss scales that keep the gradients of one step (NVIDIA's guide to mixed precision, 2.3.2)."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from .magnitudes import Fates, Magnitudes

EXPONENTS = range(-24, 128)
"""The exponents of the loss scales that are considered."""

TOLERANCE = 0.01
"""The share of the values of a module that may be lost before the module is named."""

# How much more a smaller scale may lose for its headroom: the share of zeros, and of subnormal numbers.
_OF_VALUES, _OF_DIGITS = 0.001, 0.01


@dataclasses.dataclass(frozen=True)
class Scales:
    """What each loss scale does to the gradients.

    Attributes:
        fates: for each power of two, from `2**-24` to `2**127`, the fates of the gradients, by the exponent.
        largest_safe: the exponent of the largest power of two at which the largest gradient times the scale
            is below the largest number of the dtype, 65504 in float16; None if there is none.
        suggested: the exponent of a static scale with headroom for larger gradients: the smallest power of
            two, from 1 to the largest safe one, at which at most 0.1 % more of the gradients are lost than at
            the largest safe one, and at most 1 % more are subnormal.

    Examples:
        >>> report = profile_ranges(lambda w: jnp.sum(w * jnp.array([1.0, 2.0**-30])))(jnp.ones(2))
        >>> report.scales.largest_safe, report.scales.suggested, report.scales.fates[6].flushed
        (15, 6, 0)
    """

    fates: dict[int, Fates]
    largest_safe: int | None
    suggested: int | None


def scales_for(gradients: Magnitudes) -> Scales:
    """Returns what each loss scale does to gradients that were measured at a scale of 1."""
    fates = {exponent: gradients.fates(exponent) for exponent in EXPONENTS}
    safe = largest_safe(gradients.largest, gradients.dtype)
    if safe is None:
        return Scales(fates, None, None)
    best = fates[safe]

    def is_enough(scaled: Fates) -> bool:
        digits = scaled.share(scaled.subnormal) - best.share(best.subnormal)
        return scaled.lost <= best.lost + _OF_VALUES and digits <= _OF_DIGITS

    candidates = range(min(0, safe), safe + 1)
    suggested = next(exponent for exponent in candidates if is_enough(fates[exponent]))
    return Scales(fates, safe, suggested)


def largest_safe(largest: float, dtype: np.dtype) -> int | None:
    """Returns the exponent of the largest power of two whose product with `largest` fits into a dtype."""
    if not largest:
        return None
    limit = float(jnp.finfo(dtype).max)
    exponent = math.frexp(limit)[1] - math.frexp(largest)[1] + 1
    while math.ldexp(largest, exponent) >= limit:
        exponent -= 1
    return min(exponent, EXPONENTS[-1]) if exponent >= EXPONENTS[0] else None

"""The loss scales that keep the gradients of one step (NVIDIA's guide to mixed precision, 2.3.2)."""

import math

import jax.numpy as jnp
import numpy as np

from .magnitudes import Magnitudes

EXPONENTS = range(-24, 128)
"""The exponents of the loss scales that are considered."""

TOLERANCE = 0.01
"""The share of the values of a module that may be lost before the module is named."""

# How much more a smaller scale may lose for its headroom: the share of zeros, and of subnormal numbers.
_OF_VALUES, _OF_DIGITS = 0.001, 0.01


def suggested(gradients: Magnitudes) -> int | None:
    """Returns the exponent of a static scale with headroom, for gradients at a scale of 1; None without one.

    It is the smallest from 0 to that of the largest safe scale at which hardly more of the gradients are lost
    or subnormal than there.
    """
    safe = largest_safe(gradients.largest, gradients.dtype)
    if safe is None:
        return None
    best = gradients.fates(safe)

    def is_enough(exponent: int) -> bool:
        scaled = gradients.fates(exponent)
        digits = scaled.share(scaled.subnormal) - best.share(best.subnormal)
        return scaled.lost <= best.lost + _OF_VALUES and digits <= _OF_DIGITS

    return next(filter(is_enough, range(min(0, safe), safe + 1)))


def largest_safe(largest: float, dtype: np.dtype) -> int | None:
    """Returns the exponent of the largest power of two whose product with `largest` fits into a dtype."""
    if not largest:
        return None
    limit = float(jnp.finfo(dtype).max)
    exponent = math.frexp(limit)[1] - math.frexp(largest)[1] + 1
    while math.ldexp(largest, exponent) >= limit:
        exponent -= 1
    return min(exponent, EXPONENTS[-1]) if exponent >= EXPONENTS[0] else None

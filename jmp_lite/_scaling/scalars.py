"""The numbers of a loss scale: settings as Python numbers, scales and counts as strongly typed scalars.

All functions raise a TypeError if a value is not a number, and a ValueError if it is not a scalar or is out
of range.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._tree import has_dtype

LARGEST = float(np.finfo(np.float32).max)
# XLA flushes smaller numbers to zero on a CPU, and may on a GPU: https://github.com/jax-ml/jax/issues/16200.
SMALLEST = float(np.finfo(np.float32).tiny)


def is_number(value: Any) -> bool:
    is_python_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_python_number or has_dtype(value, jnp.floating) or has_dtype(value, jnp.integer)


def number(name: str, value: Any) -> float:
    """Returns a setting as a Python number, which can be part of a pytree's structure."""
    known = _known(name, value)
    if known is None:
        raise TypeError(
            f"{name} is a traced value. It is a setting, part of the compiled program: give a Python "
            "number, or build the loss scale outside the jitted function."
        )
    return known


def whole_number(name: str, value: Any, minimum: int) -> int:
    """Returns a setting as a Python integer from `minimum` to 2**31 - 1."""
    return _whole(name, number(name, value), minimum)


def float32_scale(name: str, value: Any, maximum: float = LARGEST) -> Any:
    """Returns a scale of a normal float32 and at most `maximum` as a strongly typed float32 scalar."""
    is_traced = _known(name, value) is None
    scale = _strongly_typed(value, np.float32)
    if is_traced:
        # An invalid traced scale becomes NaN. Then every step is skipped, and `raise_if_stuck` names it.
        return jnp.where((scale >= SMALLEST) & jnp.isfinite(scale), scale, jnp.float32(np.nan))
    if not SMALLEST <= float(scale) < math.inf:
        raise ValueError(
            f"{name} should be above 0 and finite in float32, at least {SMALLEST:.3g}. Got {value}."
        )
    if float(scale) > np.float32(maximum):
        raise ValueError(f"{name} should be at most max_loss_scale, {maximum}. Got {value}.")
    return scale


def int32_count(name: str, value: Any) -> Any:
    """Returns a counter as a strongly typed int32 scalar, checked to be 0 or above unless it is traced."""
    if (known := _known(name, value)) is not None:
        _whole(name, known, 0)
    return _strongly_typed(value, np.int32)


def _known(name: str, value: Any) -> float | None:
    """Returns a real scalar as a Python number, or None if it is traced."""
    if not is_number(value):
        raise TypeError(f"{name} should be a number. Got {value!r:.200} of type {type(value).__name__}.")
    if jnp.shape(value) != ():
        raise ValueError(f"{name} should be a scalar. Got shape {jnp.shape(value)}.")
    try:
        return float(value)
    except jax.errors.ConcretizationTypeError:  # Traced.
        return None


def _whole(name: str, known: float, minimum: int) -> int:
    if not (minimum <= known <= 2**31 - 1 and known % 1 == 0):
        raise ValueError(f"{name} should be a whole number from {minimum} to 2**31 - 1. Got {known:.17g}.")
    return int(known)


def _strongly_typed(value: Any, dtype: Any) -> Any:
    if isinstance(value, jax.Array):
        # Copied, so that donating a state that holds the scale does not delete the caller's array:
        # https://github.com/jax-ml/jax/pull/2936.
        return jnp.array(value, dtype, copy=True)
    # An array of NumPy starts no backend, and `jax.distributed.initialize` must come before one is started:
    # https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html. It has a dtype of its own,
    # so that a step does not compile again for its own strongly typed result:
    # https://github.com/jax-ml/jax/issues/4274.
    with np.errstate(over="ignore"):
        return np.array(value, dtype)

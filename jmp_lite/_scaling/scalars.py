"""Checks the scales, counts, settings and flags that users give, and makes strongly typed scalars of them."""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)  # A GPU may flush smaller numbers.
LARGEST_COUNT = 2**31 - 1


def number(name: str, value: Any) -> float:
    """Returns a setting as a Python number, so that it can be part of a pytree's structure.

    Raises:
        TypeError: the value is traced, or no number.
    """
    try:
        if not _is_number(value):
            raise TypeError
        return float(value)
    except jax.errors.ConcretizationTypeError:
        raise TypeError(
            f"{name} is a traced value. It is a setting, part of the compiled program: give a Python "
            "number, or build the loss scale outside the jitted function."
        ) from None
    except TypeError:
        raise TypeError(f"{name} should be a number, got {value!r} of type {type(value).__name__}.") from None


def whole_number(name: str, value: Any, minimum: int) -> int:
    """Returns a setting as a Python integer from `minimum` to 2**31 - 1.

    Raises:
        TypeError: as in `number`.
        ValueError: the number is not whole, or out of range.
    """
    known = number(name, value)
    if not (minimum <= known <= LARGEST_COUNT and known % 1 == 0):
        raise ValueError(f"{name} should be a whole number from {minimum} to 2**31 - 1, got {value}.")
    return int(known)


def positive_number(name: str, value: Any) -> float:
    """Returns a setting above 0 as a Python number.

    Raises:
        TypeError: as in `number`.
        ValueError: the number is 0 or below, or not finite.
    """
    known = number(name, value)
    if not 0 < known < math.inf:
        raise ValueError(f"{name} should be above 0 and finite, got {value}.")
    return known


def float32_scale(name: str, value: Any, maximum: float = LARGEST) -> Any:
    """Returns `value` as a strongly typed float32 scalar, checked as far as it is known.

    Raises:
        TypeError: the value is no number and no array.
        ValueError: the value is no scalar, is not above 0 and finite, or is above `maximum`.
    """
    if not _is_number(value) or jnp.shape(value) != ():
        raise _not_scalar(name, value)
    if isinstance(value, jax.Array):
        # A copy: an optimizer state that holds it may be donated, and the caller's array stays.
        scale: Any = jnp.array(value, jnp.float32, copy=True)
    else:  # NumPy, so that building a loss scale starts no backend.
        with np.errstate(over="ignore"):
            scale = np.asarray(value, np.float32)
    try:
        known = float(scale)
    except jax.errors.ConcretizationTypeError:
        # A traced scale that is invalid becomes NaN: every step is skipped, and `raise_if_stuck` names it.
        return jnp.where((scale > 0) & jnp.isfinite(scale), scale, jnp.float32(np.nan))
    if not (0 < known < math.inf):
        raise ValueError(f"{name} should be above 0 and finite in float32, got {value}.")
    if known > np.float32(maximum):
        raise ValueError(f"{name} should be at most max_loss_scale, {maximum}, got {value}.")
    return scale


def int32_count(name: str, value: Any) -> Any:
    """Returns a counter as a strongly typed int32 scalar, checked as far as it is known.

    Raises:
        TypeError: as in `number`.
        ValueError: the counter is no scalar, is not whole, or is out of range.
    """
    if not _is_number(value) or jnp.shape(value) != ():
        raise _not_scalar(name, value)
    count = jnp.array(value, jnp.int32, copy=True) if isinstance(value, jax.Array) else None
    try:
        known = whole_number(name, value, minimum=0)
    except TypeError:  # It is traced.
        return count
    return np.asarray(known, np.int32) if count is None else count


def _is_number(value: Any) -> bool:
    """Whether `value` is a real number or an array of such."""
    if value is None or isinstance(value, (bool, str, bytes, list, tuple)):
        return False
    try:
        dtype = jnp.result_type(value)
    except (TypeError, ValueError):
        return False
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _not_scalar(name: str, value: Any) -> Exception:
    if _is_number(value):
        return ValueError(f"{name} should be a scalar, got shape {jnp.shape(value)}.")
    return TypeError(f"{name} should be a number, got {value!r} of type {type(value).__name__}.")


def warn_if_not_floating(name: str, value: Any) -> None:
    """Warns of an integer scale, as jmp does."""
    if _is_number(value) and not jnp.issubdtype(dtype := jnp.result_type(value), jnp.floating):
        # stacklevel: this function, __post_init__, the generated __init__, the caller.
        warnings.warn(f"Expected floating type for {name}, got {dtype}", UserWarning, stacklevel=4)


def check_flag(grads_finite: Any) -> jax.Array:
    """Returns the flag that `adjust` was given, having checked that it is one boolean.

    Raises:
        ValueError: it is not.
    """
    shape, dtype = getattr(grads_finite, "shape", ()), getattr(grads_finite, "dtype", type(grads_finite))
    if shape != () or dtype not in (bool, jnp.bool_):
        raise ValueError(
            "adjust takes one boolean scalar, such as jmp.all_finite(grads) or "
            f"jmp.grads_finite(opt_state). Got shape {shape} and dtype {getattr(dtype, '__name__', dtype)}."
        )
    return jnp.asarray(grads_finite)

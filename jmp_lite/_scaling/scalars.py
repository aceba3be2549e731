"""What users give as a scale, a count, a setting or a flag: a strongly typed scalar, or an error."""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LARGEST = float(np.finfo(np.float32).max)


def number(name: str, value: Any) -> float:
    """Returns a setting as a Python number, so that it can be part of a pytree's structure."""
    try:
        return float(value)
    except jax.errors.ConcretizationTypeError:
        raise TypeError(
            f"{name} is a traced value. It is a setting, part of the compiled program: give a Python "
            "number, or build the loss scale outside the jitted function."
        ) from None


def positive_number(name: str, value: Any) -> float:
    """Returns a setting above 0 as a Python number."""
    if isinstance(value, (bool, str)) or (known := number(name, value)) <= 0 or not math.isfinite(known):
        raise ValueError(f"{name} should be a number above 0 and finite, got {value!r}.")
    return known


def float32_scale(name: str, value: Any, minimum: float = 0.0, maximum: float = LARGEST) -> Any:
    """Returns `value` as a strongly typed float32 scalar, checked as far as it is known."""
    if jnp.ndim(value) != 0:
        raise ValueError(f"{name} should be a scalar, got shape {jnp.shape(value)}.")
    if isinstance(value, jax.Array):
        scale: Any = value.astype(jnp.float32)
    else:  # NumPy, so that building a loss scale starts no backend.
        with np.errstate(over="ignore"):
            scale = np.asarray(value, np.float32)
    try:
        known = float(scale)
    except jax.errors.ConcretizationTypeError:
        return scale
    if not (0 < known < math.inf):
        raise ValueError(f"{name} should be above 0 and finite in float32, got {value}.")
    if not (np.float32(minimum) <= known <= np.float32(maximum)):
        raise ValueError(f"{name} should lie between {minimum} and {maximum}, got {value}.")
    return scale


def int32_count(name: str, value: Any) -> Any:
    """Returns a counter as a strongly typed int32 scalar, checked as far as it is known."""
    count = value.astype(jnp.int32) if isinstance(value, jax.Array) else np.asarray(value, np.int32)
    try:
        negative = int(count) < 0
    except jax.errors.ConcretizationTypeError:
        return count
    if negative:
        raise ValueError(f"{name} should be 0 or above, got {value}.")
    return count


def warn_if_not_floating(name: str, value: Any) -> None:
    """Warns of an integer scale, as jmp does."""
    dtype = jnp.result_type(value)
    if not jnp.issubdtype(dtype, jnp.floating):
        # stacklevel: this function, __post_init__, the generated __init__, the caller.
        warnings.warn(f"Expected floating type for {name}, got {dtype}", UserWarning, stacklevel=4)


def check_flag(grads_finite: Any) -> jax.Array:
    """Returns the flag that `adjust` was given, having checked that it is one boolean."""
    if jnp.ndim(grads_finite) != 0 or jnp.result_type(grads_finite) != jnp.bool_:
        raise ValueError(
            "adjust takes one boolean scalar, such as jmp.all_finite(grads) or "
            f"jmp.grads_finite(opt_state). Got shape {jnp.shape(grads_finite)} and dtype "
            f"{jnp.result_type(grads_finite)}."
        )
    return jnp.asarray(grads_finite)

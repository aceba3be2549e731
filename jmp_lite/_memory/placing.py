"""An old array in the place of a new one: whether it fits, and a copy with the dtype and the devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._tree import is_key


def misfit(old: Any, new: Any) -> str | None:
    """Returns, for an error, why the value `old` does not fit into the place of the array `new`, or None."""
    if not (hasattr(old, "dtype") or isinstance(old, (bool, int, float))):
        return f"is a {type(old).__name__} there and an array in tx"
    if np.shape(old) != np.shape(new):
        return f"has the shape {np.shape(old)} there and {np.shape(new)} in tx"
    # A Python number has no dtype: it takes the smallest one that holds it.
    given, asked = (getattr(x, "dtype", None) or np.min_scalar_type(x) for x in (old, new))
    return None if _holds(asked, given) else f"is {given} there and {asked} in tx; cast it yourself"


def _holds(new: Any, old: Any) -> bool:
    """Whether numbers of the dtype `old` may become `new`: only half precision is asked for, and rounds."""
    if jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(old, jnp.floating):
        return jnp.finfo(new).bits < 32 or jnp.finfo(new).bits >= jnp.finfo(old).bits
    # PRNG keys: `np.can_cast` raises an error for the extended dtypes of JAX.
    if jnp.issubdtype(new, jax.dtypes.extended) or jnp.issubdtype(old, jax.dtypes.extended):
        return new == old
    return (new == jnp.bool_) == (old == jnp.bool_) and np.can_cast(old, new)


def placed_like(value: Any, old: Any) -> Any:
    """Returns a copy of `value` with the dtype and the devices of `old`, which may be a Python number."""
    if not hasattr(old, "dtype"):
        return value
    if _is_committed(value) and not _is_committed(old):
        # JAX would not combine an array that was committed to some devices with arrays on others:
        # https://docs.jax.dev/en/latest/_autosummary/jax.Array.committed.html.
        value = _uncommitted(value)
    value = jnp.array(value, old.dtype, copy=True)
    # `jax.device_put` commits an array to its devices, and a jitted step would compile again for it:
    # https://github.com/jax-ml/jax/issues/15924.
    return jax.device_put(value, old.sharding) if _is_committed(old) else value


def _is_committed(array: Any) -> bool:
    """Whether an array is committed to its devices. A traced or NumPy array is not."""
    return getattr(array, "sharding", None) is not None and array.committed


def _uncommitted(array: jax.Array) -> Any:
    """Returns an array that is committed to no device, or the same if it is divided among processes."""
    if not (array.is_fully_addressable or array.is_fully_replicated):
        return array
    if not is_key(array):
        return np.asarray(array)
    data = jnp.asarray(np.asarray(jax.random.key_data(array)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))

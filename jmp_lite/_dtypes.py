"""Floating dtypes and their names in policy strings."""

from typing import Any, Literal, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

DTypeName: TypeAlias = Literal[
    "half",
    "bf16",
    "bfloat16",
    "f16",
    "float16",
    "fp16",
    "full",
    "f32",
    "float32",
    "fp32",
    "f64",
    "float64",
    "float8",
]
"""The strings that name a dtype, for type checkers. `autocast` and what reads it take `"float8"`."""


class HasDType(Protocol):
    """A scalar type of JAX, such as `jnp.float16`."""

    @property
    def dtype(self) -> np.dtype: ...


DTypeLike: TypeAlias = DTypeName | np.dtype | type[Any] | HasDType
"""A floating dtype: `jnp.float16`, `np.dtype("float16")`, `"f16"`, `"half"`."""

# All names are accepted; a policy prints the first. They are jmp's, and PyTorch's fp16 and fp32.
_NAMES = {
    np.dtype(jnp.bfloat16): ("bf16", "bfloat16"),
    np.dtype(jnp.float16): ("f16", "float16", "fp16"),
    np.dtype(jnp.float32): ("full", "f32", "float32", "fp32"),
    np.dtype(jnp.float64): ("f64", "float64"),
}
HALF_DTYPES = (np.dtype(jnp.float16), np.dtype(jnp.bfloat16))
FLOAT8_DTYPES = tuple(np.dtype(getattr(jnp, name)) for name in dir(jnp) if name.startswith("float8_"))
FLOAT8 = "float8"
"""The dtype of an autocast that runs large matmuls in fp8, as users name it. Arrays are e4m3 or e5m2."""
FLOAT8_ADVICE = "For large matmuls in fp8 use jmp.autocast(loss_fn, 'float8')."
"""The advice of an error about fp8: autocast runs fp8, a policy does not."""
_DTYPES = {name: dtype for dtype, names in _NAMES.items() for name in names}


def half_dtype() -> Any:
    """Returns the half precision type of the default backend, as jmp does.

    Returns:
        `jnp.bfloat16` on a TPU, which has no float16 arithmetic, and `jnp.float16` elsewhere.

    Examples:
        >>> jmp.half_dtype() is jnp.float16, float(jmp.half_dtype()(2**15))
        (True, 32768.0)
    """
    # A local device: with several processes, the first device of `jax.devices()` belongs to another one.
    on_tpu = jax.local_devices()[0].platform == "tpu"
    return jnp.bfloat16 if on_tpu else jnp.float16


def parse_dtype(spec: DTypeLike | str) -> np.dtype:
    """Returns the floating dtype of a dtype, a scalar type or a name; other input raises an error."""
    if isinstance(spec, str):
        if spec == "half":
            return np.dtype(half_dtype())
        if spec in _DTYPES:
            return _DTYPES[spec]
    try:
        if spec is None:  # NumPy reads None as float64.
            raise TypeError
        dtype = jnp.dtype(spec)
        if isinstance(spec, str) and dtype.name != spec:  # NumPy reads "f8", 8 bytes, as float64.
            raise TypeError
    except (TypeError, ValueError):  # NumPy reads a dict as the fields of a structured dtype.
        allowed = ["half", *_DTYPES]
        if isinstance(spec, str):
            is_float8 = any(name in spec.lower() for name in ("float8", "fp8", "e4m3", "e5m2"))
            advice = f" {FLOAT8_ADVICE}" if is_float8 else ""
            raise ValueError(f"Unknown dtype '{spec}'. It should be one of {allowed}.{advice}") from None
        raise TypeError(f"Expected a dtype or one of {allowed}. Got {spec!r:.200}.") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"Expected a floating dtype. Got {dtype.name}. A policy casts floating values only; "
            "integers, booleans and keys keep their dtype."
        )
    return dtype


def parse_reduce_dtype(reduce_dtype: DTypeLike | None) -> np.dtype | None:
    """Returns float32 or None, in which devices sum weight gradients; other input raises an error."""
    if reduce_dtype is None:
        return None
    # A dtype of NumPy or JAX, as for a policy. Its own errors would allow every floating dtype.
    allowed = "reduce_dtype should be float32, or None for the dtype of the matmuls."
    try:
        dtype = parse_dtype(reduce_dtype)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{allowed} Got {reduce_dtype!r:.200}.") from None
    if dtype != jnp.float32:
        raise ValueError(f"{allowed} Got {dtype.name}.")
    return dtype


def dtype_name(dtype: np.dtype) -> str:
    """Returns the name that policies print for `dtype`, such as `full`; `parse_dtype` reads it back."""
    return _NAMES[dtype][0] if dtype in _NAMES else dtype.name

"""The reference of the laws: casts around each matmul and convolution, for any function."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp


@contextlib.contextmanager
def by_product(dtype: Any) -> Iterator[None]:
    """Casts the operands of each float32 product to `dtype`, and its result up again.

    A product with a precision of its own stays as it is. The primitives themselves are changed while the
    context lasts, since `jnp.einsum` and the layers of Flax have captured the functions that call them.
    Backward passes are reached as well. Call `jax.jit` inside.
    """
    dtype = jnp.dtype(dtype)
    primitives = [jax.lax.dot_general_p, jax.lax.conv_general_dilated_p]

    def around(bind: Any) -> Any:
        def cast(left: Any, right: Any, **params: Any) -> Any:
            if not left.dtype == right.dtype == jnp.float32 or params.get("precision") is not None:
                return bind(left, right, **params)
            params["preferred_element_type"] = dtype
            return bind(left.astype(dtype), right.astype(dtype), **params).astype(jnp.float32)

        return cast

    jax.clear_caches()
    for primitive in primitives:
        primitive.bind = around(primitive.bind)
    try:
        yield
    finally:
        for primitive in primitives:
            del primitive.bind
        jax.clear_caches()

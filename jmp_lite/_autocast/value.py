"""A value of the program while the interpreter runs a plan: an array, with the casts that were made of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._jaxpr.bind import cast, reuse, round_to, widen
from .._jaxpr.read import Array


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """A value of the program, and the dtypes in which it has been made so far."""

    native: Array  # The array as it was computed.
    # The casts of it that were made, by dtype, so that it is cast once. Those to fp8 are `Quantized`.
    casts: dict[Any, Any] = dataclasses.field(default_factory=dict)
    number: float | None = None  # The value of a literal that is written into the program.
    # For a half value, the same value in float32, to which the gradients of its float32 readers go
    # (`planning.passes.pairs`); None if they go to the half array.
    path: Array | None = None
    # `(fun, arrays)` if the value is `fun(arrays)`, an activation function of one value. A cast to fp8
    # computes it again, so that XLA never writes the result in half.
    computed: tuple[Callable[[Any], Array], Any] | None = None

    def copy(self) -> "Value":
        """Returns a copy for another trace. Later casts of the copy are not shared with the original."""
        # They would leak: https://docs.jax.dev/en/latest/errors.html#jax.errors.UnexpectedTracerError.
        return Value(self.native, dict(self.casts), self.number, self.path)

    def start_path(self) -> None:
        """Starts the float32 path of a half value, on which the gradients of its readers are summed."""
        if self.path is None:
            # As in `widen`: the readers read the rounded value, and their gradients go to the path.
            self.path = cast(self.native, jnp.float32)
            self.casts[jnp.float32] = reuse(self.path, round_to(self.path, self.native.dtype))

    def to(self, dtype: Any) -> Array:
        """Returns the value in `dtype`, float32 or the half dtype."""
        if self.number is not None:  # It needs no cast.
            with np.errstate(over="ignore"):  # As JAX casts: a number beyond float16 is inf.
                return np.asarray(self.number, dtype)
        if self.native.dtype == dtype:
            return self.native
        is_first = dtype not in self.casts
        if is_first:
            has_path = self.path is not None
            self.casts[dtype] = widen(self.native, self.path) if has_path else cast(self.native, dtype)
        # All float32 readers of a half value share one cast, and meet there. The gradients of the half
        # readers of a float32 value meet at the value, in float32.
        is_shared = is_first or self.native.dtype != jnp.float32
        return self.casts[dtype] if is_shared else reuse(self.native, self.casts[dtype])

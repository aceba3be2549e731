"""Probes, which choose the values that the tap measures, and measure them."""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._autocast import Decision
from ..._jaxpr import Array, Equation
from .sites import Path, Site


class TapValue(NamedTuple):
    """A value of the program as the tap passes it on."""

    array: Array
    source: Path | None = None  # The site at which it was measured, if it was.
    argument: str = ""  # The path of the argument that it is, at most moved or cast.
    number: float | None = None  # The number, if it is a literal.
    last_parameter: str = ""  # The path of the last parameter that it was computed from.
    is_scaled: bool = False  # Whether it depends on the loss scale, as gradients do.


class Probe(abc.ABC):
    """Chooses the values to measure, and measures them: by default every floating value."""

    adds = False  # Whether the measurements of a loop's iterations are joined instead of kept.
    operands = False  # Whether operands are measured as well as results.
    once = False  # Whether an operand of several operations is measured only once.

    def wants_operands(self, decision: Decision | None, equation: Equation) -> bool:
        """Whether to measure the operands of an operation, for which autocast may have a decision."""
        del decision, equation
        return False

    def wants(self, site: Site, half: bool) -> bool:
        """Whether to measure a floating value, which autocast would compute in half if `half`."""
        del site, half
        return True

    @abc.abstractmethod
    def measure(self, array: Array, site: Site | None = None, operands: Sequence[TapValue] = ()) -> Array:
        """Returns the measurement as one array of a fixed shape. An output of the program has no site."""

    @abc.abstractmethod
    def empty(self, dtype: Any) -> Array:
        """Returns the measurement of an array of this dtype without elements."""

    def join(self, first: Array, second: Array) -> Array:
        """Returns two measurements of a probe that `adds` as one: by default their sum."""
        return first + second

    def alarm(self, record: Array) -> Array:
        """Whether a measurement is a reason to keep its iteration of a while loop."""
        return jnp.zeros(record.shape[:-1], bool)


def maxima(first: Array, second: Array) -> tuple[Array, Array]:
    """Returns the largest elements of two arrays of integers, which have the same shape and dtype."""
    # XLA's CPU backend runs this single reduction several times as fast as two.
    least = np.asarray(jnp.iinfo(first.dtype).min, first.dtype)
    join = lambda one, other: (jnp.maximum(one[0], other[0]), jnp.maximum(one[1], other[1]))
    # Over all axes of the array as it is: to flatten a sharded array, XLA would gather its shards.
    high, other_high = lax.reduce((first, second), (least, least), join, tuple(range(first.ndim)))
    return high, other_high

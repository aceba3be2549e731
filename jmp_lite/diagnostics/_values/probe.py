"""Probes, which choose and measure values for the tap. `TapValue` is a value that the tap hands on."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._autocast.planning.plan import Decision
from ..._jaxpr.read import Array, Equation
from .sites import Path, Site


class TapValue(NamedTuple):
    """A value of the program.

    Attributes:
        array: the value.
        source: the site at which it was measured; None if it was not.
        argument: the path of the argument that it is, as it came, moved or cast; empty for another value.
        number: the number that it is, written into the program; None for another value.
        last_parameter: the path of the last parameter on the way to it; empty for none.
        is_scaled: whether the loss scale is on the way to it: whether it is a gradient.
    """

    array: Array
    source: Path | None = None
    argument: str = ""
    number: float | None = None
    last_parameter: str = ""
    is_scaled: bool = False


class Probe:
    """Chooses the values to measure, and measures them: by default every floating value.

    Attributes:
        adds: whether the measurements of the iterations of a loop are joined. By default they are all kept.
        operands: whether operands are measured, beside results.
        once: whether an operand of several operations is measured once.
    """

    adds = False
    operands = False
    once = False

    def wants_operands(self, decision: Decision | None, equation: Equation) -> bool:
        """Whether to measure the operands of an operation; `decision` is that of autocast, if any."""
        del decision, equation
        return False

    def wants(self, site: Site, half: bool) -> bool:
        """Whether to measure a floating value; `half` is whether autocast would make it in half."""
        del site, half
        return True

    def measure(self, array: Array, site: Site | None = None, operands: Sequence[TapValue] = ()) -> Array:
        """Returns the measurement of a value: one array, whose shape does not depend on the numbers.

        `operands` are those of the operation that gave it. An output of the program has no site.
        """
        raise NotImplementedError

    def empty(self, dtype: Any) -> Array:
        """Returns what `measure` would return of a value of this dtype without elements."""
        raise NotImplementedError

    def join(self, first: Array, second: Array) -> Array:
        """Returns one measurement of two, if `adds`."""
        raise NotImplementedError

    def alarm(self, record: Array) -> Array:
        """Whether a measurement is one to keep, of an iteration of a while loop."""
        return jnp.zeros(record.shape[:-1], bool)


def maxima(first: Array, second: Array) -> tuple[Array, Array]:
    """Returns the largest elements of two arrays of integers, which have the same shape and dtype.

    One reduction reads both. XLA's CPU backend runs it several times as fast as two.
    """
    least = np.asarray(jnp.iinfo(first.dtype).min, first.dtype)
    join = lambda one, other: (jnp.maximum(one[0], other[0]), jnp.maximum(one[1], other[1]))
    # Over all axes, not flat: XLA would gather the shards of an array that is made flat.
    high, other_high = lax.reduce((first, second), (least, least), join, tuple(range(first.ndim)))
    return high, other_high

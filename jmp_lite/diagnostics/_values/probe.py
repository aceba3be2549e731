"""Probes, which choose and measure values for the tap. `TapValue` is a value that the tap hands on."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

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
        near: the path of the last parameter on the way to it; empty for none.
        is_scaled: whether the loss scale is on the way to it: whether it is a gradient.
    """

    array: Array
    source: Path | None = None
    argument: str = ""
    number: float | None = None
    near: str = ""
    is_scaled: bool = False


class Probe(Protocol):
    """Chooses the values to measure, and measures them.

    Attributes:
        adds: whether the measurements of the iterations of a loop are joined. If not they are all kept.
        operands: whether operands are measured, beside results.
        once: whether an operand of several operations is measured once.
    """

    adds: bool
    operands: bool
    once: bool

    def wants_operands(self, decision: Decision | None, equation: Equation) -> bool:
        """Whether to measure the operands of an operation; `decision` is that of autocast, if any."""
        ...

    def wants(self, site: Site, half: bool) -> bool:
        """Whether to measure a floating value; `half` is whether autocast would make it in half."""
        ...

    def measure(self, array: Array, site: Site | None = None, operands: Sequence[TapValue] = ()) -> Array:
        """Returns the measurement of a value: one array. Its shape does not depend on the numbers.

        Args:
            array: the value.
            site: its site; None for an output of the program.
            operands: the operands of the operation that gave it.
        """
        ...

    def empty(self, dtype: Any) -> Array:
        """Returns what `measure` would return of a value of this dtype without elements."""
        ...

    def join(self, first: Array, second: Array) -> Array:
        """Returns one measurement of two, if `adds`."""
        ...

    def alarm(self, record: Array) -> Array:
        """Whether a measurement is one to keep, of an iteration of a while loop."""
        ...


class EveryValue:
    """The part of a probe that measures every floating value and keeps all iterations."""

    adds = False
    operands = False
    once = False

    def wants_operands(self, decision: Decision | None, equation: Equation) -> bool:
        """None."""
        del decision, equation
        return False

    def wants(self, site: Site, half: bool) -> bool:
        """Everything."""
        del site, half
        return True

    def join(self, first: Array, second: Array) -> Array:
        """Never asked for: all iterations are kept."""
        del second
        return first


class Pooled:
    """The part of a probe that measures operands too, and joins the measurements of all iterations."""

    adds = True
    operands = True
    once = False

    def alarm(self, record: Array) -> Array:
        """Keeps no iteration on its own."""
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

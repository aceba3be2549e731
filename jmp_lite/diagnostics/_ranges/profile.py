"""How much half precision loses, and which loss scale recovers it: `profile_ranges`, and its report."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, ParamSpec, Unpack

import jax.numpy as jnp
import numpy as np

from ..._dtypes import DTypeLike
from ..._jaxpr import in_two_calls
from ..._scaling.loss_scale import DynamicLossScale
from ..._text import Shown, aligned, dynamic_scale, power, wrapped
from .._values.case import Case, Options, tool
from .._values.numbers import lost_numbers
from .._values.reference import Reference
from .._values.trace import Tapped
from .magnitudes import Fates, Histogram, Magnitudes, largest_safe, pooled, suggested

P = ParamSpec("P")
_TOLERANCE = 0.01  # The share of the values of a module that may be lost before it is named.


@dataclasses.dataclass(frozen=True)
class ModuleRange:
    """The values of one module in one direction, or the gradient of one parameter.

    Attributes:
        name: the module: named scopes, Flax modules and jitted functions, joined by slashes. Without one, the
            object that holds the last parameter before. For a gradient, the path of the parameter.
        direction: `forward` or `backward`.
        magnitudes: their magnitudes; in the backward pass, at a scale of 1.
        scale: the loss scale of the report as a power of two: its exponent in the backward pass, else 0.

    Examples:
        >>> report = profile_ranges(lambda w: jnp.sum(w["head"]) * 2.0**-30)({"head": jnp.ones(4)})
        >>> [(row.name, row.direction, row.fates.lost) for row in report.gradients]
        [('head', 'backward', 1.0)]
    """

    name: str
    direction: str
    magnitudes: Magnitudes
    scale: int

    @property
    def fates(self) -> Fates:
        """How many values the half dtype keeps and loses at the loss scale of the report."""
        return self.magnitudes.fates(self.scale)


@dataclasses.dataclass(frozen=True, repr=False)
class RangeReport(Shown):
    """How much of a step half precision loses. `print` it for one page.

    Attributes:
        dtype: the half dtype.
        loss_scale: the loss scale, a power of two.
        modules: the values that are half or would be, by module and direction, in the order of the program.
        gradients: the gradient of each parameter, by its path.

    Examples:
        >>> report = profile_ranges(lambda w, x: jnp.sum(x @ w) * 1e-9)(jnp.ones((8, 4)), jnp.ones((2, 8)))
        >>> report.static_scale, report.without_scale, report.overflowing
        (65536.0, (), ())
        >>> float(report.dynamic_scale.loss_scale) == report.largest_safe_scale == 2.0**44
        True
    """

    dtype: np.dtype
    loss_scale: float
    modules: tuple[ModuleRange, ...]
    gradients: tuple[ModuleRange, ...]

    @cached_property
    def pooled(self) -> Magnitudes:
        """The magnitudes of all gradients at a scale of 1, those inside the backward pass included."""
        return pooled([row.magnitudes for row in self._gradients], self.dtype)

    @property
    def _gradients(self) -> tuple[ModuleRange, ...]:
        return (*(row for row in self.modules if row.direction == "backward"), *self.gradients)

    @property
    def _safe(self) -> int | None:
        """The exponent of the largest safe scale."""
        return largest_safe(self.pooled.largest, self.dtype)

    @property
    def largest_safe_scale(self) -> float | None:
        """The largest power of two whose product with the largest gradient fits into the dtype."""
        return None if self._safe is None else 2.0**self._safe

    @cached_property
    def static_scale(self) -> float | None:
        """A static scale, with room for larger gradients in other batches.

        It is the smallest power of two, from 1 to the largest safe scale, at which at most 0.1 % more of the
        gradients are lost than there, and at most 1 % more are subnormal.
        """
        exponent = suggested(self.pooled)
        return None if exponent is None else 2.0**exponent

    @property
    def dynamic_scale(self) -> DynamicLossScale | None:
        """The `DynamicLossScale` to start with: at the largest safe scale, so that no step is skipped."""
        safe = self.largest_safe_scale
        if safe is None:
            return None
        # The default minimum is 1, from which a smaller scale would not back off.
        return DynamicLossScale(safe, min_loss_scale=2.0**-24) if safe < 1 else DynamicLossScale(safe)

    @property
    def without_scale(self) -> tuple[ModuleRange, ...]:
        """The backward passes of modules, and the gradients, for which no loss scale is large enough.

        Even at the largest safe scale, more than 1 % of their nonzero values become zero.
        """

        def lost(row):
            return 0.0 if self._safe is None else row.magnitudes.fates(self._safe).lost

        return tuple(row for row in self._gradients if lost(row) > _TOLERANCE)

    @property
    def overflowing(self) -> tuple[ModuleRange, ...]:
        """The modules with values that overflow in the forward pass, where no loss scale helps."""
        return tuple(row for row in self.modules if row.fates.overflowed and row.direction == "forward")

    def summary(self) -> str:
        """Returns the scales in one line."""
        if self._safe is None or self.static_scale is None:
            return f"No {self.dtype.name} loss scale can be told: no gradient is finite and not zero."
        lost = self.pooled.fates(int(np.log2(self.loss_scale))).lost
        return (
            f"In {self.dtype.name} at the loss scale {power(self.loss_scale)}, {lost:.2%} of the gradients "
            f"that are not zero are lost. The largest safe scale is {power(2.0**self._safe)}. "
            f"Static: jmp.StaticLossScale(2.0**{int(np.log2(self.static_scale))}). Dynamic: "
            f"{dynamic_scale(self._safe)}."
        )

    def __repr__(self) -> str:
        return f"RangeReport({self.summary()})"

    def __str__(self) -> str:
        lines = [*wrapped(self.summary()), "", *aligned(_table(self.modules), left=2)]
        if self.without_scale:
            names = ", ".join(f"{row.name or '/'} ({row.direction})" for row in self.without_scale[:6])
            lines += ["", *wrapped(f"More than 1 % of these becomes zero at every safe scale: {names}.")]
        if self.overflowing:
            names = ", ".join(row.name or "/" for row in self.overflowing)
            text = "Values overflow in the forward pass, where no loss scale helps:"
            lines += ["", *wrapped(f"{text} {names}.")]
        if self.without_scale or self.overflowing:
            lines += wrapped("compare_precision says whether this matters, and which rules help.")
        return "\n".join(lines)


def _table(modules: tuple[ModuleRange, ...]) -> list[tuple[str, ...]]:
    head = ("module", "direction", "values", "zeros", "min", "max", "flushed", "subnormal", "overflow")
    rows: list[tuple[str, ...]] = [head]
    for module in modules:
        fates, magnitudes = module.fates, module.magnitudes
        zeros = magnitudes.zeros / magnitudes.values if magnitudes.values else 0.0
        ends = (f"{end * 2.0**module.scale:.3g}" for end in (magnitudes.smallest, magnitudes.largest))
        lost = (f"{fates.share(n):.2%}" for n in (fates.flushed, fates.subnormal, fates.overflowed))
        start = (module.name or "/", module.direction, f"{magnitudes.values:,}", f"{zeros:.1%}")
        rows.append((*start, *ends, *lost))
    return rows


@in_two_calls
def profile_ranges(
    fun: Callable[P, Any],
    dtype: DTypeLike | None = None,
    **options: Unpack[Options],
) -> Callable[P, RangeReport]:
    """Returns a function that measures what a half dtype loses of a step, and which loss scale recovers it.

    It runs the loss and its backward pass once, as one compiled program, and counts the magnitudes of the
    values. Only the counts return to the host.

    The values are those that `autocast(fun, dtype)` has in half; of a function that `jmp_lite.autocast`
    returned, or with half values of its own, such as a model under a policy, its own. They are counted while
    the program runs in float32, so that none is lost before.

    Args:
        fun: the loss function, as it is given to `jmp_lite.value_and_grad`. It is not changed.
        dtype: `jnp.float16` or `jnp.bfloat16`, or a name. For a function that `autocast` returned it is the
            dtype of that autocast, for any other float16 by default.
        options: `loss_scale`, `argnums`, `has_aux` and `value_and_grad_fn`, as in `doctor`. The scale is
            rounded down to a power of two.

    Returns:
        A function of the arguments of `fun` that returns a `RangeReport`. Call it outside `jit`.

    Raises:
        TypeError, ValueError: as in `doctor`.

    Source: NVIDIA, Training with Mixed Precision, 2.3 (https://docs.nvidia.com/deeplearning/performance/).

    Examples:
        >>> w, x = jnp.ones((8, 4)), jnp.ones((2, 8))
        >>> report = profile_ranges(lambda w, x: jnp.sum(x @ w) * 1e-9)(w, x)
        >>> report.pooled.fates(0).lost, report.static_scale, report.largest_safe_scale == 2.0**44
        (1.0, 65536.0, True)
    """
    return tool("profile_ranges", fun, dtype, jnp.float16, ranges_of, **options)


def ranges_of(case: Case) -> RangeReport:
    """Returns the report of a call."""
    # The program runs in float32, at a scale of 1: nothing is lost before it is counted, and
    # `Magnitudes.fates` adds the scale.
    program, dtype = case.program, case.given.dtype
    exponent = math.frexp(case.scale)[1] - 1  # Rounded down to a power of two.
    probe = Histogram(dtype)
    reference = Reference({}, lost_numbers(program.jaxpr, case.numbers))
    measured = Tapped(program, probe, reference.apply)(1.0)
    groups: dict[tuple[str, str], list[np.ndarray]] = collections.defaultdict(list)
    for path in sorted(measured.records):
        site = measured.sites[path]
        groups[site.place, "backward" if site.is_scaled else "forward"].append(measured.records[path])
    modules = tuple(
        ModuleRange(
            name, direction, pooled(map(probe.read, records), dtype), exponent * (direction == "backward")
        )
        for (name, direction), records in groups.items()
    )
    gradients = tuple(
        ModuleRange(name, "backward", probe.read(record), exponent)
        for name, record in zip(program.gradients, measured.results[1:])  # The first result is the loss.
    )
    return RangeReport(dtype, 2.0**exponent, modules, gradients)

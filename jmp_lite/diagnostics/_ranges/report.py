"""The report of `profile_ranges`: how much half precision loses, and the loss scale that recovers it."""

import collections
import dataclasses
from functools import cached_property

import numpy as np

from ..._scaling.loss_scale import DynamicLossScale
from ..._text import Shown, aligned, dynamic_scale, power, wrapped
from .._values.sites import Path
from .._values.trace import Measured
from .magnitudes import Fates, Histogram, Magnitudes, largest_safe, pooled, suggested

_TOLERANCE = 0.01  # The share of the values of a module that may be lost before it is named.


@dataclasses.dataclass(frozen=True)
class ModuleRange:
    """The values of one module in one direction, or the gradient of one parameter.

    Attributes:
        name: the module: named scopes, Flax modules and jitted functions, joined by slashes. Without one, the
            object that holds the last parameter before. For a gradient, the path of the parameter.
        direction: `forward` or `backward`.
        magnitudes: their magnitudes; in the backward pass, at a scale of 1. An operand in fp8 is divided
            by its step.
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
        float8: the operands of matmuls in fp8, each divided by its step, by module and direction: e4m3
            forward, and the cotangents in e5m2. Empty if no matmul runs in fp8.

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
    float8: tuple[ModuleRange, ...] = ()

    @cached_property
    def pooled(self) -> Magnitudes:
        """The magnitudes of all gradients at a scale of 1, those inside the backward pass included."""
        return pooled([row.magnitudes for row in self._gradients()], self.dtype)

    def _gradients(self) -> tuple[ModuleRange, ...]:
        return (*(row for row in self.modules if row.direction == "backward"), *self.gradients)

    @cached_property
    def largest_safe_scale(self) -> float | None:
        """The largest power of two whose product with the largest gradient fits into the dtype."""
        safe = largest_safe(self.pooled.largest, self.dtype)
        return None if safe is None else 2.0**safe

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
        return DynamicLossScale(safe, min_loss_scale=2.0**-24) if safe < 1 else DynamicLossScale(safe)

    @property
    def without_scale(self) -> tuple[ModuleRange, ...]:
        """The backward passes of modules, and the gradients, for which no loss scale is large enough.

        Even at the largest safe scale, more than 1 % of their nonzero values become zero.
        """
        if self.largest_safe_scale is None:
            return ()
        safe = int(np.log2(self.largest_safe_scale))
        return tuple(row for row in self._gradients() if row.magnitudes.fates(safe).lost > _TOLERANCE)

    @property
    def overflowing(self) -> tuple[ModuleRange, ...]:
        """The modules with values that overflow in the forward pass, where no loss scale helps."""
        return tuple(row for row in self.modules if row.fates.overflowed and row.direction == "forward")

    def summary(self) -> str:
        """Returns the scales in one line."""
        if self.largest_safe_scale is None or self.static_scale is None:
            return f"No {self.dtype.name} loss scale can be told: no gradient is finite and not zero."
        lost = self.pooled.fates(int(np.log2(self.loss_scale))).lost
        return (
            f"In {self.dtype.name} at the loss scale {power(self.loss_scale)}, {lost:.2%} of the gradients "
            f"that are not zero are lost. The largest safe scale is {power(self.largest_safe_scale)}. "
            f"Static: jmp.StaticLossScale(2.0**{int(np.log2(self.static_scale))}). Dynamic: "
            f"{dynamic_scale(int(np.log2(self.largest_safe_scale)))}."
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
            text = f"Values overflow in the forward pass, where no loss scale helps: {names}."
            lines += ["", *wrapped(text)]
        if self.without_scale or self.overflowing:
            lines += wrapped("compare_precision says whether this matters, and which rules help.")
        if self.float8:
            text = "Operands of matmuls in fp8, each divided by its own scale: e4m3 forward, e5m2 backward."
            lines += ["", *wrapped(text), "", *aligned(_table(self.float8), left=2)]
        return "\n".join(lines)


def by_module(measured: Measured, probe: Histogram, exponent: int) -> tuple[ModuleRange, ...]:
    """Returns the magnitudes of the values, by module, direction and format.

    `2**exponent` is the loss scale of the backward pass.
    """
    groups: dict[tuple[str, str, Histogram], list[Path]] = collections.defaultdict(list)
    for path in sorted(measured.records):
        site = measured.sites[path]
        direction = "backward" if site.is_scaled else "forward"
        groups[site.place, direction, probe.of(site.dtype)].append(path)
    modules = []
    for (name, direction, own), paths in groups.items():
        together = pooled([own.read(measured.records[path]) for path in paths], own.dtype)
        modules.append(ModuleRange(name, direction, together, exponent if direction == "backward" else 0))
    return tuple(modules)


def _table(modules: tuple[ModuleRange, ...]) -> list[tuple[str, ...]]:
    head = ("module", "direction", "values", "zeros", "min", "max", "flushed", "subnormal", "overflow")
    rows: list[tuple[str, ...]] = [head]
    for module in modules:
        fates, magnitudes = module.fates, module.magnitudes
        zeros = magnitudes.zeros / magnitudes.values if magnitudes.values else 0.0
        ends = (magnitudes.smallest, magnitudes.largest)
        extremes = (f"{magnitude * 2.0**module.scale:.3g}" for magnitude in ends)
        counts = (fates.flushed, fates.subnormal, fates.overflowed)
        shares = (f"{fates.share(count):.2%}" for count in counts)
        start = (module.name or "/", module.direction, f"{magnitudes.values:,}", f"{zeros:.1%}")
        rows.append((*start, *extremes, *shares))
    return rows

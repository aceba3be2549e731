"""The operands of matmuls in fp8, for `profile_ranges(fun, "float8")`.

Each operand has a step of its own, computed from its largest magnitude. So no value overflows, and much
smaller values become zero.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..._autocast import Decision, Plan
from ..._float8.quantize import BACKWARD, FORWARD, step_of
from ..._jaxpr import Array, Equation
from .._values.probe import TapValue
from .._values.sites import Site, SiteKind
from .._values.trace import LossProgram, Tapped
from .magnitudes import Histogram
from .report import ModuleRange, by_module

_DTYPES = {"forward": FORWARD, "backward": BACKWARD}


@dataclasses.dataclass(frozen=True)
class _Float8Histogram(Histogram):
    """The probe: counts the operands of matmuls in fp8, divided by their steps."""

    dtype: np.dtype = FORWARD

    once = True

    def wants_operands(self, decision: Decision | None, equation: Equation) -> bool:
        del equation
        return decision is not None and decision.in_float8

    def wants(self, site: Site, half: bool) -> bool:
        """In the backward pass only the cotangent, the first operand: the forward pass has the others."""
        del half
        is_cotangent = site.direction == "backward" and site.path[-1] == -1
        return site.kind is SiteKind.OPERAND and (site.direction == "forward" or is_cotangent)

    def measure(self, array: Array, site: Site | None = None, operands: Sequence[TapValue] = ()) -> Array:
        if site is None:
            return self.empty(array.dtype)
        dtype = _DTYPES[site.direction]
        return Histogram(dtype).measure(array / step_of(array, dtype), site, operands)


def float8_operands(program: LossProgram, plan: Plan, scale: float) -> tuple[ModuleRange, ...]:
    """Returns the magnitudes of the operands of matmuls in fp8, by module and direction."""
    measured = Tapped(program, _Float8Histogram(), plan)(scale)
    probes = {direction: Histogram(dtype) for direction, dtype in _DTYPES.items()}
    return by_module(measured, probes, lambda site: site.direction)

"""The findings of `doctor`: the faults that each report has, in one form."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .._autocast.report.explain import Report
from .._autocast.report.operations import Operation
from .._text import dynamic_scale, power
from ..programs._roofline import Roofline
from ._nonfinite.report import NonfiniteReport
from ._precision.report import PrecisionReport
from ._ranges.report import RangeReport, float32_rules
from ._ranges.scales import TOLERANCE
from ._ranges.updates import run_step, updates_of, zero_gradients
from ._values.trace import LossCall, trace

SEVERITIES: tuple[str, ...] = ("not finite", "accuracy", "speed")
"""The kinds of findings, worst first."""
_UNTRIED = "This was not tried."


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        severity: `not finite`, `accuracy` or `speed`.
        what: the fault, in one sentence.
        where: the module and the line; empty for the whole step.
        advice: what to do, and what it brings.

    Examples:
        >>> diagnosis = doctor(lambda w: jnp.sum(jnp.log(w)), device=None)(jnp.zeros(2))
        >>> diagnosis.findings[0].what
        'inf from log near w, forward pass'
    """

    severity: str
    what: str
    where: str
    advice: str

    def __str__(self) -> str:
        lines = [f"[{self.severity}] {self.what}", self.where, self.advice]
        return "\n    ".join(line for line in lines if line)


def worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Returns the findings in the order of `SEVERITIES`."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def of_values(report: NonfiniteReport) -> Iterator[Finding]:
    cause = report.cause
    if cause is not None:
        what = str(cause).splitlines()[0]
        untried = f" {_UNTRIED}" if "rules=" in cause.advice else ""
        yield Finding("not finite", what, cause.line, cause.advice + untried)


def of_step(call: LossCall, args: Any, kwargs: Any) -> Iterator[Finding]:
    traced = trace("doctor", call, args, kwargs)
    measured = run_step(traced)
    all_zero, site = zero_gradients(measured)
    if all_zero:
        where = "" if site is None else f"The first zero is from {site.operation}, {site.array}, {site.line}"
        yield Finding(
            "accuracy", "The gradients are all zero.", where, "Scale the loss: jmp.with_loss_scale."
        )
    for update in updates_of(measured, traced):
        dtype = update.dtype.name
        if update.lost > TOLERANCE * update.updates and dtype in ("float16", "bfloat16"):
            what = (
                f"The update is lost in {dtype} for {update.lost / update.updates:.0%} of the elements of "
                f"{update.argument} that have one."
            )
            advice = "Keep it in float32, as master weights, or round it stochastically: see docs/memory.md."
            yield Finding("accuracy", what, update.line, advice)


def of_ranges(report: RangeReport | None, precision: PrecisionReport | None) -> Iterator[Finding]:
    if report is None:
        return
    dtype, scale = report.dtype.name, int(np.log2(report.loss_scale))
    if report.static_scale is None:
        what = "All gradients are zero, or none is finite."
        yield Finding("accuracy", what, "", "Try a loss scale, and the plain model.")
        return
    # Lost values are no fault if the gradients are right all the same. A report of no module says nothing.
    if precision is not None and precision.names and precision.is_close and precision.unscaled is None:
        return
    yield from _lost_gradients(report, dtype, scale)
    if report.without_scale:
        names = ", ".join(f"{row.name or '/'} ({row.direction})" for row in report.without_scale[:4])
        advice = f"Keep them in float32: rules={report.rules}. " if report.rules else "Try bfloat16. "
        advice += f"Or give each layer a scale of its own: jmp.scale_layer. {_UNTRIED}"
        yield Finding("accuracy", f"No loss scale serves these gradients in {dtype}.", names, advice)
    if overflowing := report.overflowing:
        what = f"Values of the forward pass are beyond the range of {dtype}, where no loss scale helps."
        where = ", ".join(row.name for row in overflowing)
        yield Finding("accuracy", what, where, f"rules={float32_rules(overflowing)}, or bfloat16. {_UNTRIED}")
    for name, largest in report.too_large.items():
        what = f"A parameter has {largest:.4g}, beyond the range of {dtype}."
        yield Finding(
            "accuracy", what, name, f"Keep it in float32: rules={{{name!r}: 'float32'}}. {_UNTRIED}"
        )


def _lost_gradients(report: RangeReport, dtype: str, scale: int) -> Iterator[Finding]:
    fates, best = report.pooled.fates(scale), report.scales.largest_safe or 0
    if fates.lost <= TOLERANCE or report.loss_scale >= (report.largest_safe_scale or 0):
        return
    what = (
        f"{fates.lost:.2%} of the gradients that are not zero become zero in {dtype} at the loss scale "
        f"{power(report.loss_scale)}."
    )
    backward = [row for row in report.modules if row.direction == "backward"]
    worst = sorted(backward or report.gradients, key=lambda row: -row.fates.lost)[:4]
    where = ", ".join(f"{row.name or '/'} {row.fates.lost:.0%}" for row in worst)
    less = report.pooled.fates(best).lost
    yield Finding("accuracy", what, where, f"Start with {dynamic_scale(best)}: {less:.2%} are lost there.")


def of_precision(report: PrecisionReport | None) -> Iterator[Finding]:
    if report is None:
        return
    if report.unscaled is not None and report.is_close:
        what = f"Without a loss scale the error in {report.dtype} is {report.unscaled}."
        advice = (
            f"Start with jmp.DynamicLossScale(): at {power(report.loss_scale)} the error is {report.half}."
        )
        yield Finding("accuracy", what, "", advice)
    elif not report.is_close:
        worst = [
            f"{row.module} {getattr(row.own, report.measure):.1e} {' '.join(row.lines[:2])}".strip()
            for row in report.modules[:4]
        ]
        where = f"Alone in half, of the {report.measure}: {', '.join(worst)}"
        yield Finding("accuracy", report.summary(), where, report.advice())


def of_operations(report: Report) -> Iterator[Finding]:
    total = sum(operation.flops for operation in report.operations) or 1
    slow: dict[str, list[Operation]] = collections.defaultdict(list)
    for product in report.in_float32():
        slow[product.reason].append(product)
    for reason, products in slow.items():
        share = sum(product.flops for product in products) / total
        what = f"{len(products)} products, {share:.0%} of the FLOPs, are not in half: {reason}."
        advice = "Cast the float32 operands of these products to half, or give the plain model to autocast."
        yield Finding("speed", what, _where(products), "" if "rule for" in reason else advice)
    sizes: dict[str, list[Operation]] = collections.defaultdict(list)
    for operation in report.operations:
        if operation.advice:
            sizes[operation.advice].append(operation)
    for advice, products in sizes.items():
        what = f"{len(products)} products have a size that Tensor Cores run slowly."
        yield Finding("speed", what, _where(products), advice)


def _where(products: Sequence[Operation]) -> str:
    """Returns the modules and lines of the first products, each once."""
    return ", ".join(dict.fromkeys(f"{product.module or '/'}, {product.source}" for product in products[:3]))


def of_roofline(report: Roofline | None) -> Iterator[Finding]:
    if report is not None and (slow := report.fixed_modules):
        name = report.device.name
        what = (
            f"{report.fixed_share:.0%} of the estimated time on {name} is no shorter in float16 than in TF32."
        )
        where = ", ".join(f"{row.module} {1e6 * row.fixed:.1f} us, {row.bound}" for row in slow[:4])
        best = report.speedup()
        yield Finding("speed", what, where, f"The step is at best {best:.2f} times as fast as in TF32.")

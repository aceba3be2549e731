"""The findings of `doctor`: the faults that each report has, in one form."""

import collections
import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._autocast.report import AutocastOperation, AutocastReport
from .._scaling.state import SkipNonfiniteState
from .._scaling.stuck import LINE, raise_if_stuck
from .._text import WIDTH, dynamic_scale, plural, power, shortened, wrapped
from .._tree import nodes_of
from ..programs._roofline import Roofline
from ._nonfinite.report import NonfiniteReport
from ._precision.judge import Judge
from ._precision.modules import Module, is_of_library
from ._precision.remedies import few_edits, words_for
from ._precision.report import HARM, Limits, PrecisionReport
from ._precision.runs import Runs
from ._precision.states import ON, Wrong, times
from ._values.case import Case
from ._values.reference import has_value
from ._values.sites import Site, SiteKind
from ._values.trace import Measured

_CONSTANT = (
    "A hint: the loss is scaled, so it may not depend on the parameters: look for stop_gradient, argmax, a "
    "cast to integers, or a wrong argnums."
)
_UNSCALED = (
    "A hint: small gradients become zero in float16 if the loss is not scaled, or if its scale is too small."
)
_TOO_LARGE = (
    "A hint: if the step scales its loss, the scale may be too large for it. A dynamic scale then skips the "
    "step and halves itself."
)
_LEAST_SHARE = 0.01  # Of the FLOPs: what is named as slow.
MEMORY = "jmp.with_stochastic_rounding, or keep master weights with jmp.with_master_params"
SEVERITIES: tuple[str, ...] = ("not finite", "accuracy", "precision", "speed")
"""The kinds of findings, worst first."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One problem that `doctor` found: what it is, where, and what to do.

    Attributes:
        severity: `not finite`, `accuracy`, `precision` or `speed`.
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
        lines = wrapped(shortened(f"[{self.severity}] {self.what}"), width=WIDTH - len("10. "))
        for text in filter(None, (self.where, self.advice)):
            own = text.split("\n")
            lines += own if len(own) > 1 else wrapped(shortened(text), 4)
        return "\n".join(lines)


def of_all(
    findings: Sequence[Finding], operations: AutocastReport, estimate: Roofline | None
) -> tuple[Finding, ...]:
    """Returns findings in the order of `SEVERITIES`; those about speed only of a run that is right."""
    if not findings:
        findings = [*of_operations(operations), *of_roofline(estimate)]
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def of_values(report: NonfiniteReport) -> Iterator[Finding]:
    """Yields where an inf or NaN begins."""
    if report.cause is not None:
        is_step, cause = report.loss is None, report.cause
        # The scale of a loss function is known, and a smaller one is tried.
        may_be_scaled = is_step and cause.direction == "backward" and cause.result.startswith("float16")
        where = "\n".join([*cause.details(), *report.before()])
        hint = wrapped(_TOO_LARGE, 4) if may_be_scaled and cause.what == "inf" else []
        advice = "\n".join([*report.advice(), *hint])
        yield Finding("not finite", cause.head(), where, advice)


def of_step(case: Case) -> Iterator[Finding]:
    """Yields a finding about the loss scale of a step, from this run or from the states that it is given."""
    run, program = case.measured, case.program
    # bfloat16 and float32 need no loss scale, so a step without float16 may carry one and not use it.
    is_missing = _is_unscaled(run) and has_value(program.jaxpr, (jnp.float16,))
    all_zero, site = zero_gradients(run)
    if all_zero:
        where = f"The first zero is from {site.operation}, {site.array}, {site.line}" if site else ""
        advice = f"Scale the loss: {LINE if is_missing else 'jmp.with_loss_scale'}."
        advice = _CONSTANT if program.loss_scales and not is_missing else advice
        yield Finding("accuracy", "The gradients are all zero.", where, advice)
    elif is_missing:
        what = "The step takes a loss scale, and does not scale the loss by it."
        yield Finding("accuracy", what, "", f"Write {LINE}, in place of jax.value_and_grad.")
    else:
        for complaint in _complaints(case.arguments):
            what, _, advice = complaint.partition(". ")  # The first sentence is the fault.
            yield Finding("accuracy", f"{what}.", "", advice)


def _is_unscaled(measured: Measured) -> bool:
    """Whether a step takes a loss scale, and no value of its backward pass depends on it."""
    sites = measured.sites.values()
    takes_scale = any(site.kind is SiteKind.INPUT and site.is_scaled for site in sites)
    scaled = [site.is_scaled for site in sites if site.direction == "backward"]
    # A step without a backward pass that `jax.grad` has made has nothing that should be scaled.
    return takes_scale and bool(scaled) and not any(scaled)


def zero_gradients(measured: Measured) -> tuple[bool, Site | None]:
    """Returns whether all gradients of a step are zero, and the first operation that makes one zero."""
    backward = {path for path, site in measured.sites.items() if site.direction == "backward"}
    read = {source for path in backward for source in measured.sites[path].sources}
    gradients = backward - read  # What no other operation of the backward pass reads.

    # A value without elements, of a branch that is not taken, is from inf to -inf.
    def is_zero(path):
        return bool(
            (measured.records[path][..., 0] >= 0).all() and (measured.records[path][..., 1] <= 0).all()
        )

    if not gradients or not all(map(is_zero, gradients)):
        return False, None
    # In the order of the program: the first operation that makes zeros of numbers that are not all zero.
    for path in sorted(backward):
        sources = [source for source in measured.sites[path].sources if source is not None]
        if is_zero(path) and sources and not any(map(is_zero, sources)):
            return True, measured.sites[path]
    return True, None


def _complaints(tree: Any) -> list[str]:
    """Returns what `raise_if_stuck` says of the optimizer states in a tree."""
    states, said = nodes_of(tree, SkipNonfiniteState), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for state in states:
            try:
                # Of the whole tree it also sees what is outside of the wrapper, such as `optax.MultiSteps`.
                raise_if_stuck(tree if len(states) == 1 else state)
            except (FloatingPointError, ValueError) as error:
                said.append(str(error))
    return [*said, *(str(warning.message) for warning in caught)]


def of_step_in_float32(runs: Runs) -> Iterator[Finding]:
    """Yields what a step gets wrong in half; if it has states, only what some steps show."""
    # The error of one step with a state says little (see `_precision.states`), so the step is repeated.
    if runs.states:
        if wrong := _wrong(runs):
            yield _of_states(runs, wrong)
    elif not _is_right(runs):
        yield _of_one_step(runs)


def _is_right(runs: Runs) -> bool:
    return Judge(runs).limits(None).allow(runs.keeping(()))


def _wrong(runs: Runs, kept: Sequence[Module] = ()) -> Sequence[Wrong]:
    """Returns what some steps get wrong, with some modules in float32."""
    wrong = runs.states.wrong(kept)
    if runs.states.in_half or not any(each.is_metric for each in wrong) or not _is_right(runs):
        return wrong
    # A metric such as an accuracy may have few values, and one of the loss scale follows an overflow. But
    # rounding makes no metric inf or NaN.
    return [each for each in wrong if not each.is_metric or not math.isfinite(each.error)]


def of_aux(runs: Runs) -> Iterator[Finding]:
    """Yields a state in half among the auxiliary results of a loss function that loses its updates."""
    if runs.states.in_half and (wrong := runs.states.wrong()):
        yield _of_states(runs, wrong)


def _of_one_step(runs: Runs) -> Finding:
    """Returns the tree of a step's results that is furthest from the same step in float32."""
    half, error = runs.keeping(()), lambda kept: runs.keeping(kept).gradients
    what = f"The results in {half.group} are" if half.group else "The result of the step is"
    what += f" off: the relative error against the step in float32 is {error(()):.1e}."
    kept = _helpful(runs)
    mend = f"To mend it: {words_for(runs, kept)}. Then the error is {error(kept):.1e}." if kept else ""
    return Finding("accuracy", what, "", mend)


def _of_states(runs: Runs, wrong: Sequence[Wrong]) -> Finding:
    """Returns what some steps in half get wrong, and what mends it."""
    worst, *others = wrong
    names = [each.name for each in others]
    also = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
    where = f"Also lost or off: {also}." if also else ""
    return Finding("accuracy", worst.what, where, " ".join(_advice(runs, worst, _helpful(runs))))


def _advice(runs: Runs, worst: Wrong, kept: Sequence[Module]) -> Iterator[str]:
    """Yields what mends the worst result of some steps in half, of which `kept` are the edits, if any."""
    is_parameter = worst.name in runs.program.parameters
    if kept:
        yield f"To mend it: {words_for(runs, kept)}. Then it trains as in float32 {ON}."
        yield from runs.program.rounded_to_one({line for edit in kept for line in edit.lines})
    if worst.in_half and not kept:
        yield "Keep it in float32."
    if worst.in_half and is_parameter:  # Or a mean or counter beside the parameters, in the same argument.
        yield f"Or, if an optax optimizer updates it, round it with {MEMORY}."
    if not worst.in_half and (is_parameter or not kept) and _may_be_unscaled(runs, worst, kept):
        yield _UNSCALED


def _may_be_unscaled(runs: Runs, worst: Wrong, kept: Sequence[Module]) -> bool:
    return runs.program.has_float16 and worst.is_lost and not any(edit.is_gradient for edit in kept)


def _helpful(runs: Runs) -> Sequence[Module]:
    """Returns few modules or sources whose float32 mends a step and its states."""

    def is_far(kept):
        return not Limits("gradients", HARM).allow(runs.keeping(kept))

    def is_wrong(kept):
        return bool(_wrong(runs, kept)) if runs.states else is_far(kept)

    # The smallest edit of a step: a cast of its gradients before it computes with them.
    gradients = [edit for edit in runs.program.edits if edit.is_gradient]
    return few_edits(runs, is_wrong, False, gradients) or ()


def of_accuracy(nonfinite: NonfiniteReport | None, precision: PrecisionReport) -> Iterator[Finding]:
    """Yields what is finite and wrong: one finding for one cause, and one loss scale on a page."""
    # An inf that has no remedy of its own, or one in half that a scale does not mend, is in this error.
    may_be_in_it = nonfinite is None or nonfinite.cause is None or nonfinite.smaller_scale is not None
    if precision.names and precision.is_close and precision.unscaled is not None:
        yield _scale_finding(precision)
    elif precision.names and may_be_in_it and not precision.is_close:
        measure = precision.limits.measure

        def leaf(own):
            return own.leaf if measure == "gradients" else 0.0

        def error(row):
            return max(getattr(row.own, measure), leaf(row.own))

        def name(row):
            return "operations outside of all modules" if row.module == "/" else row.module

        where = [f"    The relative error of the {measure} if only this is in half:"]
        rows = precision.modules[:4]
        if all(error(row) <= precision.limits.tolerance for row in rows):
            where, rows = ["    No part of the program has this error if it alone is in half."], ()
        for row in rows:
            lines = "".join(f", {line}" for line in row.lines[:2])
            where += wrapped(shortened(f"{error(row):.1e} {name(row)}{lines}"), 8)
        yield Finding("accuracy", precision.summary(), "\n".join(where), precision.advice())


def of_rounding(runs: Runs) -> Iterator[Finding]:
    """Yields that the gradient is mostly rounding error, which no placement of casts mends."""
    if not runs.is_rounding:
        return
    half, name = runs.keeping(()), runs.program.dtype.name

    def off(error):
        return f"{times(error.gradients)} off, cosine {error.cosine:.2f}"

    what = f"In {name} this gradient is mostly rounding error ({off(half)}), with any placement of casts."
    ran = f"Casts around the matmuls alone: {off(runs.by_hand)} at worst, here and at nearby parameters."
    other = f"float16 with a loss scale: {off(runs.in_float16())}. " if name == "bfloat16" else ""
    advice = f"{other}float32: 0 off. Near this optimum, train in float32."
    yield Finding("precision", what, ran, advice)


def _scale_finding(precision: PrecisionReport) -> Finding:
    """Returns the finding that the gradients need a loss scale, which was tried."""
    given = precision.given_scale
    at = "Without a loss scale" if given == 1 else f"At the loss scale {power(given)}"
    what = f"{at} the error in {precision.dtype} is {precision.unscaled}."
    start = dynamic_scale(int(np.log2(precision.loss_scale)))
    return Finding("accuracy", what, "", f"Start with {start}: at this scale the error is {precision.half}.")


def of_operations(report: AutocastReport) -> Iterator[Finding]:
    total = sum(operation.flops for operation in report.operations) or 1
    for (what, advice), products in _slow_products(report).items():
        share = sum(product.flops for product in products) / total
        where = dict.fromkeys(f"{each.module or '/'}, {each.source}" for each in products[:3])
        count = f"{plural(len(products), 'matmul')}, {share:.0%} of the FLOPs, {what}"
        if share >= _LEAST_SHARE:
            yield Finding("speed", count, ", ".join(where), advice)


def _slow_products(report: AutocastReport) -> dict[tuple[str, str], list[AutocastOperation]]:
    """Returns the products with the same fault and the same advice, by both."""
    slow: dict[tuple[str, str], list[AutocastOperation]] = collections.defaultdict(list)
    for product in filter(_is_of_user, report.in_float32()):
        dtype = max((each.dtype for each in product.operands), key=lambda dtype: dtype.itemsize).name
        cast = f"Cast the {dtype} operands of these products to half, or give the plain model to autocast."
        slow[f"in {dtype}: {product.reason}.", "" if product.why == "rule" else cast].append(product)
    # A matmul and those of its gradient have one line, and the same sizes in another order.
    sizes: dict[str, list[AutocastOperation]] = collections.defaultdict(list)
    for product in filter(_is_of_user, (each for each in report.operations if each.advice)):
        sizes[product.source].append(product)
    for products in sizes.values():
        advice = dict.fromkeys(part for each in products for part in each.advice.split("; "))
        slow["of a size that Tensor Cores run slowly.", "; ".join(advice)] += products
    return slow


def _is_of_user(operation: AutocastOperation) -> bool:
    # A package, such as an optimizer or a solver, has chosen the dtypes of its products.
    return not (operation.caller or is_of_library(operation.source))


def of_roofline(report: Roofline | None) -> Iterator[Finding]:
    if report is not None and (slow := report.fixed_modules):
        what = f"{report.fixed_share:.0%} of the estimated time on {report.device.name} is no shorter in"
        where = ", ".join(f"{row.module} {1e6 * row.fixed:.1f} us, {row.bound}" for row in slow[:4])
        best = f"The step is at best {report.speedup():.2f} times as fast as in TF32."
        yield Finding("speed", f"{what} float16 than in TF32.", where, best)

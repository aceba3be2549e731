"""Finds where a loss or its gradients become inf or NaN, and tries remedies: `find_nonfinite`."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ParamSpec, Unpack

import jax.numpy as jnp
import numpy as np

from ..._jaxpr import in_two_calls
from ..._scaling.loss_scale import DynamicLossScale
from ..._text import dynamic_scale
from .._precision.judge import Judge
from .._precision.modules import Module, is_of_library
from .._precision.remedies import few_edits, rules_for, words_for
from .._precision.report import BY_HAND, HARM, LEAF, Difference
from .._precision.runs import Runs
from .._values.case import Case, Options, tool
from .._values.reference import has_value
from .._values.sites import SiteKind
from .._values.tap import Probe
from .._values.trace import LossProgram, Measured, Tapped
from .flow import Flow, Origin
from .hints import hint
from .report import Nonfinite, NonfiniteReport, Trial

P = ParamSpec("P")

HALF_LOSS = "The loss is {dtype}, so its scaled cotangent is {dtype} too. Return a float32 loss."
MOST_LINES = 4
"""How many lines of the way to the loss are named at most."""
_MASKING = frozenset(("exp", "exp2", "logistic", "tanh", "erf", "max", "min", "clamp", "select_n", "sign"))
"""What programs let an inf end in on purpose: the `exp` of a mask is 0."""
LOWEST = -24
"""The exponent of the smallest scale that is tried. It makes a loss of 1 the smallest number of float16."""


@in_two_calls
def find_nonfinite(fun: Callable[P, Any], **options: Unpack[Options]) -> Callable[P, NonfiniteReport]:
    """Returns a function that finds the operation at which a loss or its gradients become inf or NaN.

    It runs the loss and its backward pass as `jmp_lite.value_and_grad` does, as one compiled program that
    measures the smallest and the largest element of every floating value, also inside jit, scans, branches,
    rematerialization and shards. An inf or NaN is harmful if it reaches the loss or a gradient through values
    that are all inf or NaN; a mask of -inf that a softmax reads is not. An inf from half arithmetic may also
    become a finite number that is wrong (1/inf = 0): it is harmful if float32 changes the result.

    Against the cause it tries remedies, each by running the program: a smaller loss scale, few modules or
    casts in float32, bfloat16 in place of float16. A remedy helps if the loss and the gradients are within
    0.1 of those in float32. If float32 is not finite either, the report says so, and may add a hint. With
    `value_and_grad_fn=None` it runs any function as it is, such as a whole train step. Then an inf or NaN is
    harmful if it reaches what the function returns, or a value that the step tests to skip its update.

    Args:
        fun: the loss function, as it is given to `jmp_lite.value_and_grad`: plain, with a model under a
            policy, or from `jmp_lite.autocast`. With `value_and_grad_fn=None` any function that returns a
            pytree. It is not changed.
        options: `loss_scale`, `argnums`, `has_aux` and `value_and_grad_fn`, as in `doctor`.

    Returns:
        A function of the arguments of `fun` that returns a `NonfiniteReport`. Call it outside `jit`. A NumPy
        array among the arguments is traced, as `jax.jit` does.

    Raises:
        TypeError, ValueError: as in `doctor`.

    Source: Hugging Face's `DebugUnderflowOverflow`, TensorFlow's `enable_check_numerics`, JAX's `checkify`.

    Examples:
        >>> w, x = jnp.ones(4), jnp.arange(4.0)
        >>> report = find_nonfinite(lambda w, x: jnp.sum(w / x))(w, x)
        >>> report.first_inf.operation, report.first_inf.operand_ranges[1], report.loss
        ('div', (0.0, 3.0), inf)
        >>> step = lambda w, g: w - 0.1 * g / jnp.sqrt(jnp.sum(g * g))
        >>> print(find_nonfinite(step, value_and_grad_fn=None)(w, jnp.zeros(4)).summary())
        The result of one step is not finite.
    """

    def answer(case):
        return find(case, lambda: Runs(case))

    return tool("find_nonfinite", fun, None, jnp.float32, answer, **options)


def find(case: Case, runs: Callable[[], Runs]) -> NonfiniteReport:
    """Runs a function at its loss scale, and reports where its values become inf or NaN.

    `runs` gives the runs that compare the function with float32. It is called only if there is an inf or NaN.
    """
    program, measured, trials = case.program, case.measured, None
    # A loop that was stopped computes other numbers, and a program without half values has none to mend. What
    # autocast casts to fp8 is not compared.
    may_compare = not measured.cut and has_value(program.jaxpr) and not case.rules.in_fp8
    aux = _lost_aux(case, runs) if may_compare else {}
    watched = [*range(len(program.outputs)), *aux]
    origins = [origin for origin in Flow(measured, watched).origins() if _is_examined(origin, measured)]
    if may_compare and any(origin.is_harmful or _is_suspect(origin) for origin in origins):
        trials = Trials(runs())
        origins = trials.judged(origins)

    # What the forward pass computes for the backward pass alone does not make the loss inf.
    def is_later(origin):
        return origin.direction in ("derivative", "backward")

    harmful = sorted((origin for origin in origins if origin.is_harmful), key=is_later)
    report = _report(case, harmful, origins, tuple(aux.values()))
    if report.cause is None:
        return report
    is_nan = report.cause is report.first_nan
    # As in `_report`, the first of its kind: a report has rows, and the hints need the origin itself.
    cause = next(origin for origin in harmful if origin.is_nan == is_nan)
    return _with_advice(report, cause, case, watched, trials)


def _is_suspect(origin: Origin) -> bool:
    """Whether an inf may have made finite results wrong: `rsqrt` returns 0 for it, and `argmin` its index."""
    return bool(origin.end) or (origin.site.is_half and origin.site.kind is SiteKind.OPERATION)


def _is_examined(origin: Origin, measured: Measured) -> bool:
    """Whether an origin is before the first loop that was stopped, or inside of it."""
    loop = next((path[:-1] for path in measured.cut), ())
    return origin.site.path[: len(loop)] <= loop


def _lost_aux(case: Case, runs: Callable[[], Runs]) -> dict[int, str]:
    """Returns the auxiliary results that are not finite, and are in float32, by their numbers."""
    named = enumerate(case.program.aux, start=len(case.program.outputs))
    bad = {number: name for number, name in named if Probe().alarm(case.measured.results[number])}
    return {number: name for number, name in bad.items() if name in runs().finite_aux}


def _report(
    case: Case, harmful: Sequence[Origin], origins: Sequence[Origin], aux: tuple[str, ...]
) -> NonfiniteReport:
    """Returns the report without advice."""
    program, results = case.program, case.measured.results
    # Beside a harmful one, an inf that ends in finite numbers is neither known to be harmless nor harmful.
    harmless = [origin for origin in origins if not origin.is_harmful and not (harmful and origin.end)]
    row = functools.partial(_row, program=program)
    first_inf = next((origin for origin in harmful if not origin.is_nan), None)
    first_nan = next((origin for origin in harmful if origin.is_nan), None)
    # The first output of a loss function is the loss.
    outputs = list(zip(program.outputs, results))[0 if program.is_step else 1 :]
    return NonfiniteReport(
        loss=None if program.is_step else float(results[0][0]),
        loss_scale=case.scale,
        parameters=len(outputs),
        gradients=tuple(name for name, ends in outputs if Probe().alarm(ends)),
        aux=aux,
        first_inf=first_inf and row(first_inf),
        first_nan=first_nan and row(first_nan),
        others=tuple(row(origin) for origin in harmful if origin not in (first_inf, first_nan)),
        harmless=tuple(map(row, harmless)),
        earlier=tuple(map(row, _earlier(harmful, origins))),
        cut=tuple(dict.fromkeys(case.measured.sites[path].line for path in case.measured.cut)),
    )


def _earlier(harmful: Sequence[Origin], origins: Sequence[Origin]) -> list[Origin]:
    """Returns the suspects before the first harmful origin, but for those that end where masks do."""
    # No moment is before `()`: without a harmful origin there are none.
    start = harmful[0].moment if harmful else ()
    before = (origin for origin in origins if origin.moment < start and not origin.is_harmful)
    return [origin for origin in before if origin.end and origin.end.operation not in _MASKING]


@dataclasses.dataclass
class Trials:
    """The trials of one program. An error up to `HARM` counts as right."""

    runs: Runs

    def of_cause(self, origin: Origin, fitting: float | None) -> Iterator[Trial]:
        """Yields the remedies that are run. At the smaller loss scale `fitting` all results are finite."""
        if not self.runs.is_finite:
            return
        if fitting is not None:
            change = dynamic_scale(int(math.log2(fitting)))
            trial = self._trial(change, self.runs.keeping((), fitting), loss_scale=fitting)
            yield trial
            if trial.helps:  # The scale is the smallest edit, so nothing else is run.
                return
        near = self.runs.program.groups_on(origin.site.line)
        if kept := few_edits(self.runs, self._error, HARM, near) or self._every():
            yield self._in_float32(kept)
        if self.runs.program.has_float16:
            yield self._trial("bfloat16 in place of float16", self.runs.in_bfloat16(), dtype="bfloat16")

    def _every(self) -> Sequence[Module] | None:
        """Returns all edits, if it is known that they do not help."""
        program = self.runs.program
        edits = program.completed(program.edits)
        # Where a rule of a derivative may follow an edit or not, it is not known.
        if not edits or program.has_rules:
            return None
        every = (*edits, *self.runs.silent)
        return every if self.runs.write(every) or all(edit.pattern for edit in edits) else None

    def judged(self, origins: Sequence[Origin]) -> list[Origin]:
        """Returns origins; if none is harmful yet, the suspects that make the finite result wrong now are."""
        # The flow cannot tell an inf that `rsqrt` turns into a wrong 0 from a mask that `exp` turns into a
        # right 0. So the program is run with the module of each suspect in float32.
        if any(origin.is_harmful for origin in origins) or not self.runs.is_finite:
            return list(origins)
        # One gradient may be lost that is small beside the others. Rounding errors may lose it as well.
        leaf = self._run(())[0].leaf
        limit = max(LEAF, BY_HAND * self.runs.by_hand.leaf) if leaf > LEAF else LEAF

        def measured(kept):
            error = self._run(kept)[0]
            return max(self._worst(error), error.leaf if error.leaf > limit else 0.0)

        if (wrong := measured(())) <= HARM:
            return list(origins)

        def sets(groups):
            return (*([group] for group in groups), groups)

        def near(origin):
            if not _is_suspect(origin):
                return []
            # A package, such as an optimizer, computes with what the program has cast.
            line, program = origin.site.line, self.runs.program
            if is_of_library(line):
                return [program.edits]
            return sets(program.groups_on(line) or program.groups_on(line, only_edits=False))

        def is_harmful(origin):
            return any(measured(kept) < wrong / 2 for kept in near(origin))

        return [dataclasses.replace(origin, is_harmful=is_harmful(origin)) for origin in origins]

    def _in_float32(self, kept: Sequence[Module]) -> Trial:
        lines = dict.fromkeys(line for group in kept if group.casts for line in group.lines)
        arguments = tuple(group.name for group in kept if group.is_argument)
        how = {"rules": rules_for(self.runs, kept), "lines": tuple(lines), "arguments": arguments}
        error, scale = self._run(kept)
        change = words_for(self.runs, kept)
        if scale is not None:
            change, how["loss_scale"] = f"{change}; and {dynamic_scale(int(math.log2(scale)))}", scale
        return self._trial(change, error, **how)

    def _error(self, kept: Collection[Module]) -> float:
        return self._worst(self._run(kept)[0])

    def _run(self, kept: Collection[Module]) -> tuple[Difference, float | None]:
        """Returns the error with some groups in float32, and a loss scale that was not given if it helps."""
        error = self.runs.keeping(kept)
        # With its inf gone, a program may still lack a loss scale: its small gradients are zero in float16.
        if self._worst(error) <= HARM or math.isinf(error.loss) or not self.runs.may_scale:
            return error, None
        scaled = self.runs.keeping(kept, DynamicLossScale.loss_scale)
        helps = self._worst(scaled) < self._worst(error)
        return (scaled, DynamicLossScale.loss_scale) if helps else (error, None)

    def _trial(self, change: str, error: Difference, **how: Any) -> Trial:
        return Trial(change, error, self._worst(error) <= HARM, **how)

    def _worst(self, error: Difference) -> float:
        lost = math.inf if error.lost and error.lost in self.runs.program.aux else 0.0
        return max(Judge(self.runs).loss_error(error), error.gradients, lost)


def _with_advice(
    report: NonfiniteReport, cause: Origin, case: Case, watched: Sequence[int], trials: Trials | None
) -> NonfiniteReport:
    """Adds to a report what is tried against the cause; without a trial a hint."""
    # A scale only mends what the scaled loss reaches. A step has a scale of its own.
    site, is_scaled = cause.site, cause.site.is_scaled and not case.program.is_step
    fitting = _fitting_scale(case.tapped, report.loss_scale, watched) if is_scaled else None
    report = dataclasses.replace(report, fitting_scale=fitting)
    if trials is not None:
        tried = tuple(trials.of_cause(cause, fitting))
        facts = trials.runs.program.rounded_numbers() if tried else ()
        # A half scalar that is scaled and not finite is the cotangent of the loss itself.
        if is_scaled and not site.shape and site.is_half:
            facts = (HALF_LOSS.format(dtype=site.dtype.name), *facts)
        runs = trials.runs
        is_known = runs.failure is None and (runs.is_finite or not runs.is_finite_if_written)
        is_finite = runs.is_finite if is_known else None
        report = dataclasses.replace(report, tried=tried, is_finite_in_float32=is_finite, rounded=facts)
    if report.tried:
        return report
    return dataclasses.replace(report, hint=hint(cause, case.measured.sites, case.program.parameters))


def _fitting_scale(tapped: Tapped, scale: float, watched: Sequence[int]) -> float | None:
    """Returns the largest power of two below `scale` at which the loss and all gradients are finite."""

    # Larger scales only overflow more, so a binary search over the exponents finds it.
    def is_bad(exponent):
        return bool(Flow(tapped(2.0**exponent), watched).bad_outputs())

    exponents = range(LOWEST, math.ceil(math.log2(scale)))
    finite = bisect.bisect_left(exponents, True, key=is_bad)
    return 2.0 ** exponents[finite - 1] if finite else None


def _row(origin: Origin, program: LossProgram) -> Nonfinite:
    site = origin.site
    is_outside = origin.direction == "forward" and program.is_step  # Of any backward pass.
    index = None
    # An input of the program itself, whose array is at hand: the path of one has a -1 and its number.
    if site.operation in ("argument", "constant") and len(site.path) == 2 and site.path[1] >= 0:
        array = program.arrays[site.path[1]]
        bad = jnp.isnan(array) if origin.is_nan else jnp.isinf(array)
        index = tuple(map(int, np.unravel_index(int(jnp.argmax(bad)), array.shape)))
    return Nonfinite(
        what="NaN" if origin.is_nan else "inf",
        operation=site.operation,
        result=site.array,
        range=origin.extent,
        operands=site.operands,
        operand_ranges=origin.operands,
        module=site.module,
        argument=site.argument or site.last_parameter,
        is_operand=bool(site.argument),
        line=site.line,
        caller=site.caller,
        direction="" if is_outside else origin.direction,
        way=_way(origin),
        end="" if origin.end is None else f"{origin.end.operation}, {origin.end.line}".rstrip(", "),
        index=index,
    )


def _way(origin: Origin) -> tuple[tuple[str, str], ...]:
    """Returns the first operation on each line between an origin and an output; of many only a few."""
    lines: dict[str, str] = {}
    for site, is_nan in origin.way:
        if site.line != origin.site.line and not is_of_library(site.line):
            lines.setdefault(site.line, f"{'NaN' if is_nan else 'inf'} from {site.operation}")
    # The lines next to the origin, and the last one: there it reaches the output.
    way = [(what, line) for line, what in lines.items()]
    return tuple(way if len(way) <= MOST_LINES else [*way[: MOST_LINES - 1], way[-1]])

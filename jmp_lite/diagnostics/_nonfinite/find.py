"""Finds where a loss or its gradients become inf or NaN: `find_nonfinite`."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxpr import Array, in_two_calls
from .._precision.compare import Runs
from .._precision.modules import is_of_library
from .._values.case import Case, Options, tool
from .._values.extremes import Extremes
from .._values.reference import has_value, is_narrow
from .._values.sites import Site
from .._values.trace import LossProgram, Measured, Tapped
from .flow import Flow, Origin
from .hints import hint
from .report import Nonfinite, NonfiniteReport
from .trials import Trials

P = ParamSpec("P")

MOST_LINES = 4
"""How many lines of the way to the loss are named at most."""
HALF_LOSS = "The loss is {dtype}, so its scaled cotangent is {dtype} too. Return a float32 loss."
LOWEST = -24
"""The exponent of the smallest scale that is tried. It makes a loss of 1 the smallest number of float16."""


@in_two_calls
def find_nonfinite(fun: Callable[P, Any], **options: Unpack[Options]) -> Callable[P, NonfiniteReport]:
    """Returns a function that finds the operation at which a loss or its gradients become inf or NaN.

    It runs the loss and its backward pass as `jmp_lite.value_and_grad` does, as one compiled program that
    measures the smallest and the largest element of every floating value, also inside jit, loops, branches,
    rematerialization and shards. An inf or NaN is harmful if it reaches the loss or a gradient through values
    that are all inf or NaN; a mask of -inf that a softmax reads is not. An inf from half arithmetic may also
    become a finite number that is wrong (1/inf = 0): it is harmful if float32 changes the result.

    Against the cause it tries remedies, each by running the program: a smaller loss scale if the cause is in
    the backward pass; the module of the cause, and then few other modules, in float32; bfloat16 in place of
    float16. A remedy helps if the loss and the gradients are within 0.1 of those in float32. If float32 is
    not finite either, the report says so, and may add a hint.

    With `value_and_grad_fn=None` it runs any function as it is, such as a whole train step. Then an inf or
    NaN is harmful if it reaches what the function returns, or a value that the step tests to skip its update.

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
        The result of the step is not finite.
    """
    answer = lambda case: find(case, lambda: Runs(case))
    return tool("find_nonfinite", fun, None, jnp.float32, answer, **options)


def find(case: Case, runs: Callable[[], Runs]) -> NonfiniteReport:
    """Runs a function at its loss scale, and reports where its values become inf or NaN.

    `runs` gives the runs that compare the function with float32. It is called only if there is an inf or NaN.
    """
    program, scale = case.program, case.question.scale
    measured = case.measured
    aux = _lost_aux(program, measured, runs)
    watched = [*range(len(program.outputs)), *aux]
    origins = Flow(measured, watched).origins()
    trials = Trials(runs()) if _can_be_tried(program, measured, origins) else None
    if trials is not None:
        origins = trials.judged(origins)
    report, cause = _report(program, measured, scale, origins)
    report = dataclasses.replace(report, aux=tuple(aux.values()))
    if cause is None:
        return report
    fitting = _fitting_scale(case.tapped, scale, watched) if cause.site.is_scaled else None
    report = dataclasses.replace(report, fitting_scale=fitting)
    if trials is not None:
        report = _with_trials(report, cause, trials)
    if report.tried:
        return report
    return dataclasses.replace(report, hint=hint(cause, measured.sites, program.parameters))


def _can_be_tried(program: LossProgram, measured: Measured, origins: Sequence[Origin]) -> bool:
    """Whether float32 may change what an origin does to the result."""
    is_bad = any(origin.is_harmful or origin.end for origin in origins)
    return is_bad and not measured.cut and has_value(program.jaxpr, is_narrow)


def _with_trials(report: NonfiniteReport, cause: Origin, trials: Trials) -> NonfiniteReport:
    tried = tuple(trials.of_cause(cause, report.fitting_scale))
    facts = trials.runs.program.rounded_numbers() if tried else ()
    if cause.site.is_scaled and not cause.site.shape and cause.site.is_half:
        facts = (HALF_LOSS.format(dtype=cause.site.dtype.name), *facts)
    is_finite = trials.runs.is_finite
    return dataclasses.replace(report, tried=tried, is_finite_in_float32=is_finite, rounded=facts)


def finite_summary(runs: Runs) -> str:
    """Returns the first line of a report for a loss and gradients that are finite."""
    names = runs.program.outputs[1:]
    none: Any = dict.fromkeys(("first_inf", "first_nan", "fitting_scale"))
    report = NonfiniteReport(
        **none,
        others=(),
        harmless=(),
        loss=runs.half_loss,
        loss_scale=runs.scale,
        gradients=(),
        parameters=len(names),
    )
    return report.summary()


def _lost_aux(program: LossProgram, measured: Measured, runs: Callable[[], Runs]) -> dict[int, str]:
    """Returns the auxiliary results that are not finite, and are in float32, by their numbers."""
    first = len(program.outputs)
    named = zip(range(first, first + len(program.aux)), program.aux)
    bad = {number: name for number, name in named if Extremes().alarm(measured.results[number])}
    if not bad or measured.cut or not has_value(program.jaxpr, is_narrow):
        return {}
    return {number: name for number, name in bad.items() if name in runs().finite_aux}


def _fitting_scale(tapped: Tapped, scale: float, watched: Sequence[int]) -> float | None:
    """Returns the largest power of two below `scale` at which the loss and all gradients are finite."""
    # Larger scales only overflow more, so a binary search over the exponents finds it.
    is_finite = lambda exponent: not Flow(tapped(2.0**exponent), watched).bad_outputs()
    low, high = LOWEST, math.ceil(math.log2(scale))
    if low >= high or not is_finite(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_finite(middle) else (low, middle)
    return 2.0**low


def _report(
    program: LossProgram, measured: Measured, scale: float, origins: Sequence[Origin]
) -> tuple[NonfiniteReport, Origin | None]:
    """Returns the report without what is tried, and the origin that it names as the cause."""
    harmful = _harmful(origins)
    first_inf = next((origin for origin in harmful if not origin.is_nan), None)
    first_nan = next((origin for origin in harmful if origin.is_nan), None)
    others = [origin for origin in harmful if origin not in (first_inf, first_nan)]
    # The first output of a loss function is the loss.
    outputs = list(zip(program.outputs, measured.results))[0 if program.is_step else 1 :]
    report = NonfiniteReport(
        first_inf=first_inf and _row(first_inf, program),
        first_nan=first_nan and _row(first_nan, program),
        others=tuple(_row(origin, program) for origin in others),
        harmless=tuple(_row(origin, program) for origin in _harmless(origins)),
        loss=None if program.is_step else float(measured.results[0][0]),
        loss_scale=scale,
        gradients=tuple(name for name, ends in outputs if Extremes().alarm(ends)),
        parameters=len(outputs),
        fitting_scale=None,
        cut=measured.cut,
    )
    return report, first_inf if report.cause is report.first_inf else first_nan


def _harmless(origins: Sequence[Origin]) -> list[Origin]:
    harmful = any(origin.is_harmful for origin in origins)
    # Beside a harmful one, an inf that ends in finite numbers is neither known to be harmless nor harmful.
    return [origin for origin in origins if not origin.is_harmful and not (harmful and origin.end)]


def _harmful(origins: Sequence[Origin]) -> list[Origin]:
    """Returns the harmful origins, those of the loss before those of the gradients."""
    # What the forward pass computes for the backward pass alone does not make the loss inf.
    is_later = lambda origin: origin.is_derivative or origin.site.direction == "backward"
    return sorted((origin for origin in origins if origin.is_harmful), key=is_later)


def _row(origin: Origin, program: LossProgram) -> Nonfinite:
    site = origin.site
    direction = "derivative" if origin.is_derivative else site.direction
    is_outside = direction == "forward" and program.is_step  # Of any backward pass.
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
        direction="" if is_outside else direction,
        iterations=tuple((loop.kind, number) for loop, number in zip(site.loops, origin.iterations)),
        way=_way(origin),
        end="" if origin.end is None else f"{origin.end.operation}, {origin.end.line}".rstrip(", "),
        index=_index(site, origin.is_nan, program),
    )


def _way(origin: Origin) -> tuple[tuple[str, str], ...]:
    """Returns the first operation on each line between an origin and an output; of many only a few."""
    lines: dict[str, str] = {}
    for site, is_nan in origin.way:
        if site.line != origin.site.line and not is_of_library(site.line):
            lines.setdefault(site.line, f"{'NaN' if is_nan else 'inf'} from {site.operation}")
    way = [(what, line) for line, what in lines.items()]
    return tuple(way if len(way) <= MOST_LINES else [*way[: MOST_LINES - 1], way[-1]])


def _index(site: Site, is_nan: bool, program: LossProgram) -> tuple[int, ...] | None:
    """Returns the index of the first element of an input that is not finite."""
    if site.operation not in ("argument", "constant") or len(site.path) != 2 or site.path[1] < 0:
        return None
    array = program.arrays[site.path[1]]
    index = _first_index(jnp.isnan(array) if is_nan else jnp.isinf(array))
    return tuple(map(int, np.unravel_index(int(index), array.shape)))


@jax.jit
def _first_index(flags: Array) -> Array:
    return jnp.argmax(flags.ravel())

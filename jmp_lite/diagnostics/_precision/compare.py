"""Measures the accuracy that each module costs in half: `compare_precision`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Unpack

import jax.numpy as jnp

from ..._dtypes import DTypeLike
from ..._jaxpr import in_two_calls
from .._values.case import Case, Options, tool
from .judge import Judge
from .modules import Module
from .remedies import few_edits, rules_for, words_for
from .report import Difference, Limits, ModuleDifference, PrecisionReport
from .runs import Runs

P = ParamSpec("P")


@in_two_calls
def compare_precision(
    fun: Callable[P, Any],
    dtype: DTypeLike | None = None,
    *,
    tolerance: float | None = None,
    **options: Unpack[Options],
) -> Callable[P, PrecisionReport]:
    """Returns a function that measures the accuracy that each module costs in half, and finds remedies.

    It runs the loss and its gradients in float32 and with all modules in half. If the error is above the
    tolerance, it runs them once for each module with that module alone in half, and searches for a small set
    of modules to keep in float32. A function with half matmuls of its own is compared with itself in float32;
    others run under `autocast`. A module is a scope with half values; if the scopes tell no modules apart
    (NNX, Equinox, plain functions), it is the argument that holds the parameters. With `tolerance=0` it
    measures each module, and nothing is left to search.

    The error is that of the gradients: of all, or of one that is off by more than half of its own norm. If
    they are close and the loss is off by more than 0.1, as with a sum that stops growing, it is that of the
    loss. If the error in float16 is above the tolerance, it tries the loss scale `2**15` in place of a
    smaller one; if this more than halves the error, all runs in half use it.

    All runs are runs of one program, which holds half values as float32 numbers and rounds them by flags.
    Products add up in float32, as on Tensor Cores; in float32 they run at the highest precision, not in TF32.

    Args:
        fun: the loss function, as it is given to `jmp_lite.value_and_grad`. It is not changed.
        dtype: `jnp.float16` or `jnp.bfloat16`, or a name. For a function that `autocast` returned it is the
            dtype of that autocast, for any other float16 by default. A function with half matmuls of its own
            keeps its dtypes.
        tolerance: the largest relative error that is allowed; by default 8 times the `eps` of the dtype, or
            twice the error of casts by hand if that is more.
        options: `loss_scale`, `argnums`, `has_aux` and `value_and_grad_fn`, as in `doctor`. Without a scale
            it is 1, or `2**15` as above.

    Returns:
        A function of the arguments of `fun` that returns a `PrecisionReport`. Call it outside `jit`.

    Raises:
        TypeError: as in `doctor`.
        ValueError: as in `doctor`; the loss or a gradient is not finite in float32.

    Source: for inference, the float16 debugging of ONNX Runtime and the tuning of Intel's Neural Compressor.

    Examples:
        >>> w, x = {"a": jnp.full((4, 4), 0.3), "b": jnp.full((4, 1), 1e5)}, jnp.ones((2, 4))
        >>> report = compare_precision(lambda w, x: jnp.mean(x @ w["a"] @ w["b"] / 1e6))(w, x)
        >>> report.modules[0].module, report.modules[0].own.loss, report.rules
        ('w/b', inf, {'/w/b': 'float32'})
    """
    check_tolerance("compare_precision", tolerance)

    def compare(case: Case) -> PrecisionReport:
        runs = Runs(case)
        if runs.failure is not None:
            raise runs.failure
        if not runs.is_finite:
            names = f"; these gradients are not finite: {', '.join(runs.bad[:4])}" if runs.bad else ""
            raise ValueError(
                f"compare_precision compares with float32, in which the loss is {runs.loss:.6g}{names}. Find "
                "the cause first: jmp_lite.diagnostics.find_nonfinite(loss_fn)(*args)."
            )
        harmless = 8 * float(jnp.finfo(runs.program.dtype).eps)
        return report_of(runs, tolerance, Judge(runs, harmless))

    return tool("compare_precision", fun, dtype, jnp.float16, compare, **options)


def check_tolerance(caller: str, tolerance: float | None) -> None:
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and 0 <= tolerance < math.inf):
        raise ValueError(
            f"{caller}: tolerance should be a relative error, 0 or more, or None. Got {tolerance!r}."
        )


def report_of(runs: Runs, tolerance: float | None, judge: Judge) -> PrecisionReport:
    """Returns the report, which measures the modules only if their joint error is above the tolerance."""
    program, given = runs.program, runs.scale
    unscaled, limits = judge.try_scale(tolerance), judge.limits(tolerance)
    is_close = limits.allow(runs.keeping(()))
    # Each module alone in half is a run of its own, which a program that is close does not need.
    every = set() if is_close else set(program.modules)
    own = {module: runs.keeping(every - {module}) for module in program.modules if every}
    # Of modules with equal errors, as inf, the other measure decides.
    other = "gradients" if limits.measure == "loss" else "loss"

    def size(error):
        return (limits.measured(error), getattr(error, other))

    order = sorted(own, key=lambda module: size(own[module]), reverse=True)
    kept = () if is_close else _remedy(runs, judge, limits, tolerance, size)

    def labels(modules):
        return tuple(module.label for module in modules)

    report = PrecisionReport(
        dtype=program.dtype.name,
        loss_scale=runs.scale,
        loss=float(runs.loss or 0.0),
        names=labels(program.modules),
        modules=tuple(ModuleDifference(each.label, own[each], each.pattern, each.lines) for each in order),
        half=runs.keeping(()),
        given_scale=given,
        unscaled=unscaled,
        by_hand=vars(runs).get("by_hand"),  # None if no limit needed it: it compiles a program.
        rest=None if is_close else runs.keeping(program.modules),
        limits=limits,
        is_rounding=is_close and runs.is_rounding,
    )
    if kept is None:
        return report
    words, with_rules = words_for(runs, kept), runs.keeping(kept)
    return dataclasses.replace(
        report, kept=labels(kept), rules=rules_for(runs, kept), change=words, with_rules=with_rules
    )


def _remedy(
    runs: Runs,
    judge: Judge,
    limits: Limits,
    tolerance: float | None,
    size: Callable[[Difference], tuple[float, float]],
) -> Sequence[Module] | None:
    """Returns a few edits that bring the measured error within the limits, and the loss if possible."""
    enough = (limits.tolerance, math.inf)
    kept = few_edits(runs, lambda kept: size(runs.keeping(kept)), enough)

    def with_loss(kept):
        error = runs.keeping(kept)
        return (math.inf if judge.is_loss_wrong(error, tolerance) else limits.measured(error), 0.0)

    # These edits may mend the gradients and leave the loss wrong.
    if kept and judge.is_loss_wrong(runs.keeping(kept), tolerance):
        return few_edits(runs, with_loss, enough) or kept
    return kept

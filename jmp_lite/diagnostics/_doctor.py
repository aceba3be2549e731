"""Runs all diagnostics, and writes one page: `doctor`."""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from .._autocast.report import AutocastReport, page_of
from .._autocast.report import report_of as operations_of
from .._dtypes import DTypeLike
from .._jaxpr import has_objects, in_two_calls
from .._scaling.loss_scale import LossScaleLike
from .._text import Shown, shortened, wrapped
from ..programs._compile import compile_for
from ..programs._program import Program
from ..programs._read import read_program
from ..programs._roofline import Roofline, roofline
from ._findings import (
    Finding,
    of_accuracy,
    of_all,
    of_aux,
    of_rounding,
    of_step,
    of_step_in_float32,
    of_values,
)
from ._nonfinite.find import find
from ._nonfinite.report import NonfiniteReport
from ._precision.compare import check_tolerance, report_of
from ._precision.judge import Judge
from ._precision.remedies import few_edits, words_for
from ._precision.report import HARM, PrecisionReport
from ._precision.runs import Runs
from ._precision.states import ON
from ._values.case import Case, tool
from ._values.reference import has_loop, run_as_written
from ._values.tap import LONG_LOOP
from ._values.trace import ValueAndGrad

P = ParamSpec("P")


class Diagnosis(Shown):
    """The report of `doctor`. `print` it for one page, the worst finding first.

    Examples:
        >>> diagnosis = doctor(lambda w: jnp.sum(jnp.log(w)), device=None)(jnp.zeros(2))
        >>> diagnosis.examined, diagnosis.nonfinite.cause.operation
        ('autocast(fun, "float16") of your program', 'log')
    """

    def __init__(
        self, case: Case, tolerance: float | None, program: Program | None, device: str | None
    ) -> None:
        self._case, self._is_step = case, case.call.value_and_grad_fn is None
        self._tolerance, self._given, self._device = tolerance, program, device

    # The parts are cached properties. Each may compile a program: the call reads those that the page needs.

    def __getstate__(self) -> dict[str, Any]:
        """Returns all parts. The call itself stays behind: its jaxprs cannot be pickled."""
        # The public properties, each of which is computed here if it has not been read yet.
        own = vars(type(self)).items()
        parts = [n for n, each in own if isinstance(each, functools.cached_property) and n[0] != "_"]
        return {name: getattr(self, name) for name in (*parts, "_values")}

    @functools.cached_property
    def examined(self) -> str:
        """The program that was examined: yours as it is, or autocast of it."""
        if self._is_step:
            return "your train step as it is"
        if self._case.is_autocast:
            return "your function of autocast"
        if self._case.is_own:
            return "your program as it is, with its own half values"
        return f'autocast(fun, "{self.operations.dtype}") of your program'

    @functools.cached_property
    def operations(self) -> AutocastReport:
        """The report of `explain`."""
        rules = self._case.rules
        return operations_of(self._case.traced, rules, *self._case.planned(rules))

    @functools.cached_property
    def nonfinite(self) -> NonfiniteReport:
        """The report of `find_nonfinite`."""
        return find(self._case, lambda: self._runs)

    @functools.cached_property
    def precision(self) -> PrecisionReport | None:
        """The report of `compare_precision`; None if it was skipped."""
        if self._is_step or self._why_skipped:
            return None
        self._runs.scale = self._scale  # Smaller if the scale of the call alone makes the results inf.
        return report_of(self._runs, self._tolerance, Judge(self._runs))

    @functools.cached_property
    def roofline(self) -> Roofline | None:
        """The estimate of `roofline`; None if it was skipped."""
        if self._device is None or self._no_program:
            return None
        program = self._given
        if program is None:
            # The loss and its gradients: all matmuls of the user's step, without the optimizer.
            traced = self._case.program
            program = read_program(compile_for("h100", lambda arrays: traced.run(arrays), traced.arrays))
        return roofline(program, self._device)

    @functools.cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The faults, worst first."""
        # An inf inside of a program whose results are right, such as that of a mask, is no fault.
        findings = [] if self._is_sound else list(of_values(self.nonfinite))
        if self._is_step:
            findings += of_step(self._case)
            findings += [] if findings or self._why_skipped else of_step_in_float32(self._runs)
        elif self.precision is not None:
            nonfinite = None if self._is_sound else self.nonfinite
            findings += of_accuracy(nonfinite, self.precision)
            findings += of_aux(self._runs)
            findings += [] if findings else of_rounding(self._runs)
        return of_all(findings, self.operations, self.roofline)

    @functools.cached_property
    def marks(self) -> tuple[tuple[str, str], ...]:
        """The lines at which a fault begins, that lead from there to the loss, or that mend it."""
        reports = (None if self._is_sound else self.nonfinite, self.precision)
        return tuple(mark for report in reports if report is not None for mark in report.marks())

    @functools.cached_property
    def skipped(self) -> dict[str, str]:
        """The parts that were not run, each with the reason."""
        reasons = {"the values in half": self._why_skipped, "roofline": self._no_program}
        if self._is_step and has_objects(self._case.arguments):
            reasons["what the step changes in place"] = (
                "Only what it returns is compared with float32: let it take and return states (nnx.split)."
            )
        # The states of a step are compared element by element, as it repeats.
        if not self._why_skipped and (names := self._case.exact(self._runs.states.names)):
            reasons[f"the rounding of {', '.join(map(shortened, names))}"] = (
                "In half before the trace, so each error above takes it as exact."
            )
        for operation in () if self._why_skipped else run_as_written(self._runs.program.jaxpr):
            reasons[shortened(operation)] = "It runs in half in the comparison with float32 as well."
        if self._is_step and not self._why_skipped and not self._runs.states.ends_finite:
            reasons["what the step trains"] = f"It is not finite {ON} in float32 either."
        return {part: reason for part, reason in reasons.items() if reason}

    @functools.cached_property
    def _runs(self) -> Runs:
        return Runs(self._case)

    @functools.cached_property
    def _values(self) -> str:
        """Which of the results are finite."""
        if not self._is_sound:
            return self.nonfinite.summary()
        # The runs that compare with float32 have the same numbers, so that nothing is run for this line.
        runs = self._runs
        return NonfiniteReport(runs.half_loss, runs.scale, len(runs.program.outputs) - 1).summary()

    @functools.cached_property
    def _is_sound(self) -> bool:
        """Whether the loss and the gradients in half are right, so that no inf inside of them does harm."""
        if self._is_step or self._is_cut or not self._runs.is_finite:
            return False
        return Judge(self._runs).limits(self._tolerance).allow(self._runs.keeping(()))

    @functools.cached_property
    def _loss_is_off(self) -> str:
        """Says how wrong a loss is whose gradients are right, as that of casts around each matmul is too."""
        precision = self.precision
        if precision is None or not precision.is_close or not precision.half.loss > HARM:
            return ""
        if self._runs.is_rounding:  # A finding says so.
            return ""
        runs, off = self._runs, precision.half.gradients
        what = f"The loss is {runs.half_loss:.3g}, and {runs.loss:.3g} in float32"
        what += f"; its gradients are {off:.1%} off."
        kept = few_edits(runs, lambda kept: runs.keeping(kept).loss, HARM)
        if not kept:
            return what
        return (
            f"{what} To mend the loss: {words_for(runs, kept)}. Then it is {runs.keeping(kept).loss:.1%} off."
        )

    @functools.cached_property
    def _is_cut(self) -> bool:
        """Whether a loop was stopped, so that no run computes what the program computes."""
        return has_loop(self._case.program.jaxpr) and bool(self._case.measured.cut)

    @functools.cached_property
    def _why_skipped(self) -> str:
        """Why the values in half are not compared with float32; empty if they are."""
        if self._is_cut:
            return f"It has {LONG_LOOP}, {shortened(self.nonfinite.cut[0])}."
        if self._is_sound or self._runs.is_finite:
            return ""
        if self._runs.failure is not None:
            return f"XLA did not run it in float32: {str(self._runs.failure).partition(chr(10))[0]}"
        if self._runs.is_finite_if_written:
            return "It is finite in float32 only with the other random numbers that JAX draws there."
        results = "results of the step" if self._is_step else "loss or its gradients"
        return f"The {results} are not finite in float32."

    @property
    def _scale(self) -> float:
        """The loss scale of the parts after `nonfinite`."""
        smaller = None if self._is_sound else self.nonfinite.smaller_scale
        return smaller or self._case.scale

    @functools.cached_property
    def _no_program(self) -> str:
        """Why there is no estimate; empty if there is one, or if none is wanted."""
        if self._device is None or self._given is not None or _can_compile():
            return ""
        return 'Give program=, or pip install -e ".[h100]" in the clone and set JAX_PLATFORMS=cpu.'

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page of `operations.save`, with a mark on each line that a finding names.

        Args:
            path: the file, such as `"diagnosis.html"`.

        Raises:
            OSError: the file cannot be written.
        """
        page = page_of(self.operations.operations, "Diagnosis", self._values, str(self), self.marks)
        pathlib.Path(path).write_text(page, encoding="utf-8")

    def __repr__(self) -> str:
        return f"Diagnosis({len(self.findings)} findings)"

    def __str__(self) -> str:
        head = (f"Examined: {self.examined}.", self._values, self.operations.summary() + ".")
        lines = [line for text in head for line in wrapped(text)]
        lines += [f"\n{number}. {finding}" for number, finding in enumerate(self.findings, 1)]
        loss = self._loss_is_off
        nothing = "No fault was found in the gradients." if loss else "No fault was found."
        if loss and self._runs.keeping(()).gradients > HARM:
            nothing = "No fault was found in the gradients that casts around the matmuls alone do not have."
        lines += [] if self.findings else ["", nothing]
        lines += ["", *wrapped(loss)] if loss else []
        if self.roofline is not None:
            best = self.roofline.speedup()
            name = self.roofline.device.name
            lines += ["", f"On {name} float16 is at best {best:.2f} times as fast as TF32."]
        lines += [""] if self.skipped else []
        for part, reason in self.skipped.items():
            lines += wrapped(f"Not examined: {part}. {reason}")
        return "\n".join(lines)


@in_two_calls
def doctor(
    fun: Callable[P, Any],
    dtype: DTypeLike | None = None,
    *,
    loss_scale: LossScaleLike | None = None,
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    value_and_grad_fn: ValueAndGrad | None = jax.value_and_grad,
    program: Program | None = None,
    device: str | None = "h100",
    tolerance: float | None = None,
) -> Callable[P, Diagnosis]:
    """Returns a function that runs all diagnostics on a loss function. `print` its result for one page.

    The function is traced once, and once more for each set of edits of its source or its arguments that is
    tried as a remedy, which are few or some dozens. While it is traced, the functions that are edited have
    the code with the edit. What the page needs runs in the call; the other parts of the result run when they
    are first read, on the arguments that the result keeps until then. A float32 function is examined as
    `autocast(fun, dtype)`; one with half matmuls of its own, such as a model under a policy, as it is, and so
    is one with any half values, unless `dtype` is given. Parts that compare with float32 are skipped if the
    loss or a gradient is not finite in float32 either. `roofline` takes the given program, or compiles the
    loss and its gradients for an H100 if the extra `[h100]` is installed and `JAX_PLATFORMS` is `cpu`.

    With `value_and_grad_fn=None` it examines a whole train step as it is, and compares its results, and what
    it trains, with those of the same step in float32. It also says if gradients are all zero, if the step
    takes a loss scale and does not use it, and what `raise_if_stuck` says of the optimizer states among the
    arguments: give it those of the run.

    Args:
        fun: the loss function, as it is given to `jmp_lite.value_and_grad`; with `value_and_grad_fn=None` a
            train step. It is not changed.
        dtype: `jnp.float16`, `jnp.bfloat16` or `"float8"`. For a function that `autocast` returned it is the
            dtype of that autocast, for any other float16 by default.
        loss_scale: the scale of the step, such as `jmp.get_loss_scale(opt_state)`; a number; or None for 1.
        argnums: as in `jmp_lite.value_and_grad`; for a step, which arguments are the parameters.
        has_aux: whether `fun` returns `(loss, aux)`.
        value_and_grad_fn: as in `jmp_lite.value_and_grad`; None for a step.
        program: the result of `read_program` for your compiled step.
        device: as in `roofline`; None for no estimate.
        tolerance: the error that is no fault, as in `compare_precision`; by default 0.1, or twice the error
            of casts by hand if that is more.

    Returns:
        A function of the arguments of `fun` that returns a `Diagnosis`. Call it outside `jit`. It takes
        seconds for a small model and minutes for a large one: each part compiles programs of its own.

    Raises:
        TypeError: `fun` is not a function; the loss is not a floating scalar; `loss_scale` is not a loss
            scale; an argument is traced.
        ValueError: `dtype` is not a half dtype, or is given for a function of autocast; the scale is not
            above 0 and finite; `tolerance` is out of range; a rule of the autocast selects nothing; a dtype
            or a scale is given for a step.

    Examples:
        >>> w, x = {"a": jnp.ones((8, 4))}, jnp.ones((2, 8))
        >>> diagnosis = doctor(lambda w, x: jnp.mean(x @ w["a"]) * 1e-9)(w, x)
        >>> diagnosis.findings[0].advice  # doctest: +ELLIPSIS
        'Start with jmp.DynamicLossScale(2.0**15): at this scale the error is ...'
    """
    if program is not None and not isinstance(program, Program):
        raise TypeError(
            f"doctor: program should be what read_program returns. Got {type(program).__name__}; write "
            "program=read_program(jax.jit(step).lower(*args).compile())."
        )
    check_tolerance("doctor", tolerance)

    def diagnose(case: Case) -> Diagnosis:
        diagnosis = Diagnosis(case, tolerance, program, device)
        str(diagnosis)  # What the page needs runs here.
        return diagnosis

    return tool("doctor", fun, dtype, jnp.float16, diagnose, loss_scale, argnums, has_aux, value_and_grad_fn)


def _can_compile() -> bool:
    # With the CUDA plugin and without this setting, JAX looks for a driver as soon as a backend is needed.
    config: Any = jax.config
    return importlib.util.find_spec("jax_cuda13_plugin") is not None and config.jax_platforms == "cpu"

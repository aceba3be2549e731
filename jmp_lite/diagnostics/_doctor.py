"""Runs all diagnostics, and writes one page: `doctor`."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from .._autocast import AutocastReport, autocast, explain, given_rules, settings_of
from .._dtypes import DTypeLike
from .._jaxpr import check_function, in_two_calls
from .._scaling.loss_scale import LossScaleLike
from .._text import Shown, wrapped
from ..programs._compile import compile_for
from ..programs._program import Program
from ..programs._read import read_program
from ..programs._roofline import Roofline, roofline
from ._findings import Finding, of_accuracy, of_all, of_step, of_step_in_float32, of_values
from ._nonfinite.find import examine
from ._nonfinite.report import NonfiniteReport
from ._precision.compare import compare_for_doctor, runs_of
from ._precision.modules import gives_half
from ._precision.report import PrecisionReport
from ._ranges.profile import profile_ranges
from ._ranges.report import RangeReport
from ._values.trace import LossCall, ValueAndGrad, scale_of, trace

P = ParamSpec("P")


@dataclasses.dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """The report of `doctor`. `print` it for one page, the worst finding first.

    Attributes:
        examined: the program that was examined: yours as it is, or autocast of it.
        findings: the faults, worst first.
        skipped: the parts that were not run, each with the reason.
        operations: the report of `explain`.
        nonfinite: the report of `find_nonfinite`.
        ranges: the report of `profile_ranges`; None if it was skipped.
        precision: the report of `compare_precision`; None if it was skipped.
        roofline: the estimate of `roofline`; None if it was skipped.

    Examples:
        >>> diagnosis = doctor(lambda w: jnp.sum(jnp.log(w)), device=None)(jnp.zeros(2))
        >>> diagnosis.examined, diagnosis.nonfinite.cause.operation
        ('autocast(fun, "float16") of your float32 program', 'log')
    """

    examined: str
    findings: tuple[Finding, ...]
    skipped: dict[str, str]
    operations: AutocastReport
    nonfinite: NonfiniteReport
    ranges: RangeReport | None
    precision: PrecisionReport | None
    roofline: Roofline | None

    def __repr__(self) -> str:
        return f"Diagnosis({len(self.findings)} findings)"

    def __str__(self) -> str:
        head = (f"Examined: {self.examined}.", self.nonfinite.summary(), self.operations.summary() + ".")
        lines = [line for text in head for line in wrapped(text)]
        lines += [f"\n{number}. {finding}" for number, finding in enumerate(self.findings, 1)]
        lines += [] if self.findings else ["", "No fault was found."]
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

    It calls `explain`, `find_nonfinite`, `profile_ranges` and `compare_precision`. A float32 function is
    examined as `autocast(fun, dtype)`. A function with half matmuls of its own, such as a model under a
    policy, is examined as it is, and compared with itself in float32; so is one with any half values, unless
    `dtype` is given. If the loss or a gradient is not finite in float32 either, the parts that would compare
    with float32 are skipped. If `find_nonfinite` finds a smaller loss scale that helps, the other parts use
    it. It calls `roofline` with the given program, or with the loss and its gradients compiled for an H100 if
    the extra `[h100]` is installed and `JAX_PLATFORMS` is `cpu`.

    With `value_and_grad_fn=None` it examines a whole train step as it is: with `explain` and
    `find_nonfinite`, for updates that are lost in the dtype of an argument and gradients that are all zero,
    and by comparing its results with those of the same step in float32. It also says if a float16 step takes
    a loss scale and does not scale the loss, and what `raise_if_stuck` says of the optimizer states among the
    arguments: give it those of the run. `profile_ranges` takes a loss function.

    Args:
        fun: the loss function, as it is given to `jmp_lite.value_and_grad`; with `value_and_grad_fn=None` a
            train step. It is not changed.
        dtype: as in `profile_ranges`.
        loss_scale: as in `profile_ranges`.
        argnums: as in `jmp_lite.value_and_grad`.
        has_aux: whether `fun` returns `(loss, aux)`.
        value_and_grad_fn: as in `jmp_lite.value_and_grad`; None for a step.
        program: the result of `read_program` for your compiled step.
        device: as in `roofline`; None for no estimate.
        tolerance: the error that is no fault, as in `compare_precision`; by default 0.1. Within it, counts of
            small gradients are no fault either.

    Returns:
        A function of the arguments of `fun` that returns a `Diagnosis`. Call it outside `jit`. It takes a
        minute or more: each part compiles programs of its own.

    Raises:
        TypeError, ValueError: as in the functions that it calls; a dtype or a scale is given for a step.

    Examples:
        >>> w, x = {"a": jnp.ones((8, 4))}, jnp.ones((2, 8))
        >>> diagnosis = doctor(lambda w, x: jnp.mean(x @ w["a"]) * 1e-9)(w, x)
        >>> diagnosis.findings[0].advice  # doctest: +ELLIPSIS
        'Start with jmp.DynamicLossScale(2.0**15): at this scale the error is ...'
    """
    check_function("doctor", fun)
    _check(program)
    if value_and_grad_fn is None:
        if dtype is not None or loss_scale is not None:
            raise ValueError(
                "doctor: a step has its own dtypes and loss scale. Leave dtype and loss_scale out, or give "
                f"the loss function without value_and_grad_fn=None. Got {dtype!r} and {loss_scale!r}."
            )
        return _step_doctor(LossCall(fun, argnums, has_aux, None), program, device)
    scale = scale_of("doctor", loss_scale)
    given_rules("doctor", fun, dtype, jnp.float16)
    is_autocast = settings_of(fun) is not None
    how: dict[str, Any] = {"argnums": argnums, "has_aux": has_aux, "value_and_grad_fn": value_and_grad_fn}

    @functools.wraps(fun)
    def doctor_fun(*args: Any, **kwargs: Any) -> Diagnosis:
        args, kwargs = _with_jax_arrays((args, kwargs))
        own = not is_autocast and _is_own(explain(fun, "float32")(*args, **kwargs), dtype is not None)
        running = fun if own or is_autocast else autocast(fun, jnp.float16 if dtype is None else dtype)
        operations = explain(running, "float32" if own else None)(*args, **kwargs)
        call = LossCall(running, **how)
        runs = functools.cache(lambda: runs_of("doctor", call, scale, loss_scale is None, args, kwargs))
        nonfinite = examine(call, args, kwargs, scale, runs)
        skipped: dict[str, str] = {}
        ranges = precision = None
        if nonfinite.cut:
            skipped["the values in half"] = "A while loop does not end."
        elif not runs().is_finite:
            skipped["the values in half"] = "The loss or its gradients are not finite in float32."
        else:
            best = nonfinite.smaller_scale
            runs().scale = runs().scale if best is None else best
            own_dtype = dtype if own else None
            ranges = profile_ranges(running, own_dtype, loss_scale=best or scale, **how)(*args, **kwargs)
            precision = compare_for_doctor(runs(), tolerance, ranges.largest_safe_scale)
        estimate = _estimate(call, args, kwargs, program, device, skipped)
        findings = [*of_values(nonfinite), *of_accuracy(nonfinite, ranges, precision)]
        findings, examined = of_all(findings, operations, estimate), _examined(own, is_autocast, operations)
        return Diagnosis(examined, findings, skipped, operations, nonfinite, ranges, precision, estimate)

    return doctor_fun


def _check(program: Any) -> None:
    if program is not None and not isinstance(program, Program):
        raise TypeError(
            f"doctor: program should be what read_program returns. Got {type(program).__name__}; write "
            "program=read_program(jax.jit(step).lower(*args).compile())."
        )


def _step_doctor(call: LossCall, program: Program | None, device: str | None) -> Callable[..., Diagnosis]:

    @functools.wraps(call.fun)
    def doctor_fun(*args: Any, **kwargs: Any) -> Diagnosis:
        args, kwargs = _with_jax_arrays((args, kwargs))
        operations = explain(call.fun, "float32")(*args, **kwargs)
        runs = functools.cache(lambda: runs_of("doctor", call, 1.0, False, args, kwargs))
        nonfinite = examine(call, args, kwargs, 1.0, runs)
        skipped: dict[str, str] = {}
        findings = [*of_values(nonfinite), *of_step(call, args, kwargs)]
        if nonfinite.cut or not runs().is_finite:
            skipped["the values in half"] = "The results of the step are not finite in float32."
        elif not findings:
            findings += of_step_in_float32(runs())
        estimate = _estimate(call, args, kwargs, program, device, skipped)
        findings, examined = of_all(findings, operations, estimate), "your train step as it is"
        return Diagnosis(examined, findings, skipped, operations, nonfinite, None, None, estimate)

    return doctor_fun


def _examined(own: bool, is_autocast: bool, operations: AutocastReport) -> str:
    if is_autocast:
        return "your function of autocast"
    as_it_is = "your program as it is, with its own half values"
    return as_it_is if own else f'autocast(fun, "{operations.dtype}") of your float32 program'


def _estimate(
    call: LossCall,
    args: Any,
    kwargs: Any,
    program: Program | None,
    device: str | None,
    skipped: dict[str, str],
) -> Roofline | None:
    """Returns the roofline of a call; without one, writes the reason into `skipped`."""
    if device is None:
        return None
    if program is None and not _can_compile():
        skipped["roofline"] = (
            'Give program=, or pip install -e ".[h100]" in the clone and set JAX_PLATFORMS=cpu.'
        )
        return None
    if program is None:
        traced = trace("doctor", call, args, kwargs)
        program = read_program(compile_for("h100", lambda arrays: traced.run(arrays), traced.arrays))
    return roofline(program, device)


def _can_compile() -> bool:
    config: Any = jax.config
    return importlib.util.find_spec("jax_cuda13_plugin") is not None and config.jax_platforms == "cpu"


def _with_jax_arrays(tree: Any) -> Any:
    """Returns a tree with its NumPy arrays as JAX arrays: `explain` treats a NumPy array as a constant."""
    is_numpy = lambda leaf: isinstance(leaf, np.ndarray)
    if not any(map(is_numpy, jax.tree.leaves(tree))):
        return tree  # `jax.tree.map` would copy the modules of NNX.
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if is_numpy(leaf) else leaf, tree)


def _is_own(report: AutocastReport, is_given: bool) -> bool:
    """Whether a function runs as it is: it has half matmuls, or half values and no dtype was given."""
    return any(each.on_tensor_cores if is_given else gives_half(each) for each in report.operations)

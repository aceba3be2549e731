"""Runs all diagnostics, and writes one page: `doctor`."""

import collections
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from .._autocast.api import autocast, given_rules, settings_of
from .._autocast.report.explain import Report, explain
from .._autocast.report.operations import Operation
from .._dtypes import DTypeLike
from .._text import Shown, power
from ._nonfinite.find import find_nonfinite
from ._nonfinite.report import NonfiniteReport
from ._precision.compare import compare_briefly
from ._precision.report import PrecisionReport
from ._program.compile import compile_for
from ._program.program import Program, read_program
from ._program.roofline import Roofline, roofline
from ._ranges.profile import profile_ranges
from ._ranges.report import RangeReport, keep
from ._ranges.scales import TOLERANCE
from ._ranges.updates import run_step, updates_of, zero_gradients
from ._values.trace import Call, Transform, only_by_name, scale_of, trace

P = ParamSpec("P")

SEVERITIES: tuple[str, ...] = ("not finite", "accuracy", "speed")
"""The kinds of findings, worst first."""


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

    Guide: docs/diagnosis.md.
    """

    severity: str
    what: str
    where: str
    advice: str

    def __str__(self) -> str:
        lines = [f"[{self.severity}] {self.what}", self.where, self.advice]
        return "\n    ".join(line for line in lines if line)


@dataclasses.dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """The report of `doctor`. `str(diagnosis)` says it on one page, worst first.

    Attributes:
        findings: the faults, worst first.
        skipped: the parts that were not run, each with the reason.
        operations: the report of `explain`.
        nonfinite: the report of `find_nonfinite`.
        ranges: the report of `profile_ranges`; None if it was skipped.
        precision: the report of `compare_precision`; None if it was skipped.
        roofline: the estimate of `roofline`; None if it was skipped.

    Examples:
        >>> diagnosis = doctor(lambda w: jnp.sum(jnp.log(w)), device=None)(jnp.zeros(2))
        >>> diagnosis.nonfinite.cause.operation, diagnosis.skipped["roofline"]
        ('log', 'No device was given.')

    Guide: docs/diagnosis.md.
    """

    findings: tuple[Finding, ...]
    skipped: dict[str, str]
    operations: Report
    nonfinite: NonfiniteReport
    ranges: RangeReport | None
    precision: PrecisionReport | None
    roofline: Roofline | None

    def __repr__(self) -> str:
        return f"Diagnosis({len(self.findings)} findings)"

    def __str__(self) -> str:
        lines = [self.nonfinite.summary(), self.operations.summary() + "."]
        lines += [f"\n{number}. {finding}" for number, finding in enumerate(self.findings, 1)]
        lines += [] if self.findings else ["", "Nothing is wrong."]
        if self.roofline is not None:
            best = self.roofline.speedup()
            lines += [
                "",
                f"On {self.roofline.device.name} float16 is at best {best:.2f} times as fast as TF32.",
            ]
        lines += [""] if self.skipped else []
        lines += [f"Skipped: {part}. {reason}" for part, reason in self.skipped.items()]
        return "\n".join(lines)


def doctor(
    fun: Callable[P, Any],
    dtype: DTypeLike | None = None,
    *positional: Any,
    loss_scale: Any = None,
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    transform: Transform | None = jax.value_and_grad,
    program: Program | None = None,
    device: str | None = "h100",
    depth: int = 1,
    tolerance: float | None = None,
) -> Callable[P, Diagnosis]:
    """Returns a function that runs all diagnostics on a loss function and prints its faults on one page.

    It calls `explain`, `find_nonfinite`, `profile_ranges` and `compare_precision`. Of a plain float32
    function it examines `autocast(fun, dtype)`. A function with half values of its own, such as a model under
    a policy, is examined as it is, and compared with itself in float32. If the loss or a gradient is not
    finite in float32 either, the parts that would compare with float32 are skipped. With a program it calls
    `roofline` too. Without one it compiles the loss and its gradients for an H100 if the extra `[h100]` is
    installed and `JAX_PLATFORMS` is `cpu`.

    With `transform=None` it examines a whole train step as it is: `explain`, `find_nonfinite`, the arguments
    whose update is lost in their dtype, and gradients that are all zero. `profile_ranges` and
    `compare_precision` take a loss function.

    Args:
        fun: the loss function, as it is given to `jmp_lite.value_and_grad`; with `transform=None` a train
            step. It is not changed.
        dtype: as in `profile_ranges`.
        positional: empty. What follows is given by its name.
        loss_scale: as in `profile_ranges`.
        argnums: as in `jmp_lite.value_and_grad`.
        has_aux: whether `fun` returns `(loss, aux)`.
        transform: as in `jmp_lite.value_and_grad`; None for a step.
        program: the result of `read_program` for your compiled step.
        device: as in `roofline`; None for no estimate.
        depth: as in `compare_precision`.
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
        >>> print(diagnosis.findings[0])  # doctest: +ELLIPSIS
        [accuracy] 100.00% of the gradients that are not zero become zero in float16 at the loss scale 2**0.
        ...

    Guide: docs/diagnosis.md.
    """
    if not callable(fun):
        raise TypeError(f"doctor takes a loss function first. Got {fun!r}.")
    if program is not None and not isinstance(program, Program):
        raise TypeError(
            f"doctor: program should be what read_program returns. Got {type(program).__name__}; write "
            "program=read_program(jax.jit(step).lower(*args).compile())."
        )
    only_by_name("doctor", "loss_fn, dtype", positional)
    if transform is None:
        if dtype is not None or loss_scale is not None:
            raise ValueError(
                "doctor: a step has its own dtypes and loss scale. Leave dtype and loss_scale out, or give "
                f"the loss function without transform=None. Got {dtype!r} and {loss_scale!r}."
            )
        return _step_doctor(Call(fun, argnums, has_aux, None), program, device)
    scale = scale_of("doctor", loss_scale)
    given_rules("doctor", fun, dtype, jnp.float16)
    is_autocast = settings_of(fun) is not None
    how: dict[str, Any] = {"argnums": argnums, "has_aux": has_aux, "transform": transform}

    @functools.wraps(fun)
    def examine(*args: Any, **kwargs: Any) -> Diagnosis:
        args, kwargs = _with_jax_arrays((args, kwargs))
        own = not is_autocast and _has_half_products(explain(fun, "float32")(*args, **kwargs))
        running = fun if own or is_autocast else autocast(fun, jnp.float16 if dtype is None else dtype)
        operations = explain(running, "float32" if own else None)(*args, **kwargs)
        nonfinite = find_nonfinite(
            running, loss_scale=scale, argnums=argnums, has_aux=has_aux, transform=transform
        )(*args, **kwargs)
        skipped: dict[str, str] = {}
        ranges = None
        call = Call(running, **how)
        precision = compare_briefly(call, scale, depth, tolerance, args, kwargs)
        if precision is None:
            skipped["profile_ranges, compare_precision"] = "The loss or its gradients are not finite."
        elif own and not nonfinite.is_finite:
            skipped["profile_ranges"] = "The loss or its gradients are not finite."
        else:
            ranges = profile_ranges(running, dtype if own else None, loss_scale=scale, **how)(*args, **kwargs)
        estimate = _estimate(call, args, kwargs, program, device, skipped)
        findings = [*_of_values(nonfinite), *_of_ranges(ranges, precision), *_of_precision(precision)]
        findings += [*_of_operations(operations), *_of_roofline(estimate)]
        return Diagnosis(_worst_first(findings), skipped, operations, nonfinite, ranges, precision, estimate)

    return examine


def _step_doctor(call: Call, program: Program | None, device: str | None) -> Callable[..., Diagnosis]:
    """Returns the doctor of a train step."""

    @functools.wraps(call.fun)
    def examine(*args: Any, **kwargs: Any) -> Diagnosis:
        args, kwargs = _with_jax_arrays((args, kwargs))
        operations = explain(call.fun, "float32")(*args, **kwargs)
        how: dict[str, Any] = {"argnums": call.argnums, "transform": None}
        nonfinite = find_nonfinite(call.fun, **how)(*args, **kwargs)
        skipped = {"profile_ranges, compare_precision": "They take the loss function, not the step."}
        estimate = _estimate(call, args, kwargs, program, device, skipped)
        findings = [*_of_values(nonfinite), *_of_step(call, args, kwargs)]
        findings += [*_of_operations(operations), *_of_roofline(estimate)]
        return Diagnosis(_worst_first(findings), skipped, operations, nonfinite, None, None, estimate)

    return examine


def _worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def _estimate(
    call: Call,
    args: Any,
    kwargs: Any,
    program: Program | None,
    device: str | None,
    skipped: dict[str, str],
) -> Roofline | None:
    """Returns the roofline of a call; writes the reason if there is none."""
    if device is None:
        skipped["roofline"] = "No device was given."
        return None
    if program is None and not _can_compile():
        skipped["roofline"] = 'Give program=, or install "jmp_lite[h100]" and set JAX_PLATFORMS=cpu.'
        return None
    return roofline(program or _compiled(call, args, kwargs), device)


def _with_jax_arrays(tree: Any) -> Any:
    """Returns a tree with its NumPy arrays as JAX arrays: `explain` takes a NumPy array for a constant."""
    is_numpy = lambda leaf: isinstance(leaf, np.ndarray)
    if not any(map(is_numpy, jax.tree.leaves(tree))):
        return tree  # `jax.tree.map` would copy the modules of NNX.
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if is_numpy(leaf) else leaf, tree)


def _has_half_products(report: Report) -> bool:
    return any(operation.on_tensor_cores for operation in report.operations)


def _can_compile() -> bool:
    is_installed = importlib.util.find_spec("jax_cuda13_plugin") is not None
    config: Any = jax.config
    return is_installed and config.jax_platforms == "cpu"


def _compiled(call: Call, args: Any, kwargs: Any) -> Program:
    """Returns the loss and its gradients as XLA compiles them for an H100."""
    traced = trace("doctor", call, args, kwargs)
    return read_program(compile_for("h100", lambda arrays: traced.run(arrays), traced.arrays))


def _of_values(report: NonfiniteReport) -> Iterator[Finding]:
    cause = report.cause
    if cause is not None:
        what = str(cause).splitlines()[0]
        yield Finding("not finite", what, cause.line, cause.advice)


def _of_step(call: Call, args: Any, kwargs: Any) -> Iterator[Finding]:
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


def _of_ranges(report: RangeReport | None, precision: PrecisionReport | None) -> Iterator[Finding]:
    if report is None:
        return
    dtype, scale = report.dtype.name, int(np.log2(report.loss_scale))
    if report.static_scale is None:
        what = "All gradients are zero, or none is finite."
        yield Finding("accuracy", what, "", "Try a loss scale, and the plain model.")
        return
    # Lost values are no fault if the gradients are right all the same. A report of no module says nothing.
    if precision is not None and precision.names and precision.is_close:
        return
    fates = report.pooled.fates(scale)
    if fates.lost > TOLERANCE and report.loss_scale < (report.largest_safe_scale or 0):
        what = (
            f"{fates.lost:.2%} of the gradients that are not zero become zero in {dtype} at the loss scale "
            f"{power(report.loss_scale)}."
        )
        backward = [row for row in report.modules if row.direction == "backward"]
        worst = sorted(backward or report.gradients, key=lambda row: -row.fates.lost)[:4]
        where = ", ".join(f"{row.name or '/'} {row.fates.lost:.0%}" for row in worst)
        best = report.scales.largest_safe
        less = report.pooled.fates(best or 0).lost
        advice = f"Start with jmp.DynamicLossScale(2.0**{max(best or 0, 0)}): {less:.2%} are lost there."
        yield Finding("accuracy", what, where, advice)
    if report.without_scale:
        names = ", ".join(f"{row.name or '/'} ({row.direction})" for row in report.without_scale[:4])
        advice = f"Keep them in float32: rules={report.rules}. " if report.rules else "Try bfloat16. "
        advice += "Or give each layer a scale of its own: jmp.scale_layer."
        yield Finding("accuracy", f"No loss scale serves these gradients in {dtype}.", names, advice)
    if overflowing := report.overflowing:
        what = f"Values of the forward pass are beyond the range of {dtype}, where no loss scale helps."
        where = ", ".join(row.name for row in overflowing)
        yield Finding("accuracy", what, where, f"rules={keep(overflowing)}, or bfloat16.")
    for name, largest in report.too_large.items():
        what = f"A parameter has {largest:.4g}, beyond the range of {dtype}."
        yield Finding("accuracy", what, name, f"Keep it in float32: rules={{{name!r}: 'float32'}}.")


def _of_precision(report: PrecisionReport | None) -> Iterator[Finding]:
    if report is not None and not report.is_close:
        worst = [
            f"{row.module} {getattr(row.own, report.measure):.1e} {' '.join(row.lines[:2])}".strip()
            for row in report.modules[:4]
        ]
        where = f"Alone in half, of the {report.measure}: {', '.join(worst)}"
        yield Finding("accuracy", report.summary(), where, report.advice())


def _of_operations(report: Report) -> Iterator[Finding]:
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


def _of_roofline(report: Roofline | None) -> Iterator[Finding]:
    if report is not None and (slow := report.fixed_modules):
        name = report.device.name
        what = (
            f"{report.fixed_share:.0%} of the estimated time on {name} is no shorter in float16 than in TF32."
        )
        where = ", ".join(f"{row.module} {1e6 * row.fixed:.1f} us, {row.bound}" for row in slow[:4])
        best = report.speedup()
        yield Finding("speed", what, where, f"The step is at best {best:.2f} times as fast as in TF32.")

"""Measures the accuracy that each module costs in half: `compare_precision`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from ..._autocast.api import given_rules, settings_of
from ..._dtypes import DTypeLike
from ..._jaxpr.read import Array
from ..._scaling.loss_scale import DynamicLossScale
from .._values.trace import LossCall, scale_of
from .fewest import fewest
from .flags import FlaggedProgram
from .modules import Module, scopes_for
from .report import Difference, ModuleDifference, PrecisionReport

P = ParamSpec("P")

FLOAT8_TOLERANCE = 0.25
"""The tolerance for the gradients in fp8, twice the `eps` of e4m3. A healthy transformer block has 0.12."""
HARM = 0.1
"""The error from which `doctor` reports a fault: ReLUs alone may cost a healthy model some percent."""


def compare_precision(
    fun: Callable[P, Any],
    dtype: DTypeLike | None = None,
    *,
    loss_scale: Any = None,
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
    tolerance: float | None = None,
) -> Callable[P, PrecisionReport]:
    """Returns a function that measures the accuracy that each module costs in half, and finds remedies.

    It runs the loss and its gradients in float32 and with all modules in half. If the error is above the
    tolerance, it runs them once for each module with that module alone in half. A function with half products
    of its own, such as a model under a policy or layers with a half `dtype`, is compared with itself in
    float32. Other functions run under `autocast`; half values of their own stay. A module is a scope with
    half values. If the scopes tell no modules apart (NNX, Equinox, plain functions), a module is the argument
    that holds the parameters. `rules=` of `autocast` selects both.

    Then it searches for a small set of modules to keep in float32. The set contains each module whose own
    error is above the tolerance. The search adds the module with the next largest error until the error is
    small enough, and then drops each module that is not needed. With `tolerance=0` it measures each module,
    and nothing is left to search. The error is that of the gradients. If they are close and the loss is off
    by more than 0.1, as with a sum that stops growing, it is that of the loss.

    If no loss scale is given, and the error in float16 is above the tolerance, it tries `2**15`, the start
    of `DynamicLossScale`. If this scale more than halves the error, all runs in half use it. The report then
    says that the gradients need a loss scale.

    All runs are runs of one program, which is compiled once. It holds half values as float32 numbers, and a
    flag for each module says whether they are rounded. Products add up in float32, as on Tensor Cores. The
    gradients in float32 stay on the device; only sums come back. On a GPU products in float32 run at the
    highest precision, not in TF32.

    Args:
        fun: the loss function, as it is given to `jmp_lite.value_and_grad`. It is not changed.
        dtype: `jnp.float16` or `jnp.bfloat16`, or a name. With `"float8"` a module is one with products
            in fp8, and the runs without it have it in bfloat16. For a function that `autocast` returned
            it is the dtype of that autocast, for any other float16 by default. A function with half
            products of its own keeps its dtypes.
        loss_scale: the scale of the runs in half: a loss scale, a number, or None for 1, or `2**15` as
            above.
        argnums: as in `jmp_lite.value_and_grad`.
        has_aux: whether `fun` returns `(loss, aux)`.
        transform: as in `jmp_lite.value_and_grad`.
        tolerance: the largest relative error that is allowed; by default 8 times the `eps` of the dtype, and
            0.25 for `float8`.

    Returns:
        A function of the arguments of `fun` that returns a `PrecisionReport`. Call it outside `jit`.

    Raises:
        TypeError: `fun` is no function; the loss is no floating scalar; `loss_scale` is not a loss scale; an
            argument is traced.
        ValueError: `dtype` is no half dtype, or is given for a function of autocast; the scale is not above 0
            and finite; `tolerance` is out of range; a rule of the autocast selects nothing; the loss or a
            gradient is not finite in float32.

    Source: the float16 debugging of ONNX Runtime, and the accuracy-driven tuning of Intel's Neural
    Compressor; both are for inference.

    Examples:
        >>> w, x = {"a": jnp.full((4, 4), 0.3), "b": jnp.full((4, 1), 1e5)}, jnp.ones((2, 4))
        >>> report = compare_precision(lambda w, x: jnp.mean(x @ w["a"] @ w["b"] / 1e6))(w, x)
        >>> report.modules[0].module, report.modules[0].own.loss, report.rules
        ('w/b', inf, {'/w/b': 'float32'})
    """
    if not callable(fun):
        raise TypeError(f"compare_precision takes a loss function first. Got {fun!r}.")
    _check(tolerance)
    scale = scale_of("compare_precision", loss_scale)
    is_autocast = settings_of(fun) is not None
    fun, rules = given_rules("compare_precision", fun, dtype, jnp.float16)
    if rules.dtype == jnp.float32:
        raise ValueError("compare_precision compares float16 or bfloat16 with float32. Got float32.")
    call = LossCall(fun, argnums, has_aux, transform)

    @functools.wraps(fun)
    def compare_precision_fun(*args: Any, **kwargs: Any) -> PrecisionReport:
        runs = Runs(FlaggedProgram(call, rules, is_autocast, args, kwargs), scale, loss_scale is None)
        if not runs.is_finite:
            names = f"; these gradients are not finite: {', '.join(runs.bad[:4])}" if runs.bad else ""
            raise ValueError(
                f"compare_precision compares with float32, in which the loss is {runs.loss:.6g}{names}. Find "
                "the cause first: jmp_lite.diagnostics.find_nonfinite(loss_fn)(*args)."
            )
        default = FLOAT8_TOLERANCE if rules.float8 else 8 * float(jnp.finfo(runs.program.dtype).eps)
        return report_of(runs, default if tolerance is None else float(tolerance), HARM)

    return compare_precision_fun


def _check(tolerance: float | None) -> None:
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and 0 <= tolerance < math.inf):
        raise ValueError(
            f"compare_precision: tolerance should be a relative error, 0 or more, or None. Got {tolerance!r}."
        )


class Runs:
    """The errors with some modules in float32; each set of modules is run once.

    Attributes:
        program: the program.
        scale: the loss scale of the runs in half.
        may_scale: whether another loss scale may be tried.
        loss: the loss in float32.
        bad: the gradients that are not finite in float32.
        is_finite: whether the loss and all gradients are finite in float32.
    """

    def __init__(self, program: FlaggedProgram, scale: float, may_scale: bool) -> None:
        self.program, self.scale = program, scale
        self.may_scale = may_scale and program.narrow == "float16"
        loss, *self._gradients = program(None, 1.0)
        self.loss = float(loss)
        self._sizes = [float(jnp.max(jnp.abs(gradient), initial=0)) for gradient in self._gradients]
        self._differences: dict[tuple[float, frozenset[Module]], Difference] = {}
        self.bad = [name for name, size in zip(program.gradients, self._sizes) if not math.isfinite(size)]
        self.is_finite = not self.bad and math.isfinite(self.loss)

    def keeping(self, modules: Iterable[Module]) -> Difference:
        """Returns the error with some modules in float32 and the others in half."""
        kept = frozenset(modules)
        if (self.scale, kept) not in self._differences:
            loss, *gradients = self.program(set(self.program.modules) - kept, self.scale)
            units = [size or 1.0 for size in self._sizes]  # The squares of small gradients would be zero.
            sums = _sums(gradients, self._gradients, units)
            sums = np.square(units)[:, None] * np.asarray(sums, np.float64).reshape(-1, 3)
            self._differences[self.scale, kept] = _difference(float(loss), self.loss, sums)
        return self._differences[self.scale, kept]

    def try_scale(self, tolerance: float) -> Difference | None:
        """Switches to the first scale of `DynamicLossScale` if it helps; returns the error before or None."""
        unscaled = self.keeping(())
        if not self.may_scale or unscaled.gradients <= tolerance:
            return None
        before, self.scale = self.scale, DynamicLossScale.loss_scale
        if self.keeping(()).gradients < unscaled.gradients / 2:
            return unscaled
        self.scale = before
        return None

    def rules(self, kept: Sequence[Module]) -> dict[str, str]:
        """Returns the rules for some modules, with those of the function that still select something."""
        rules, modules = self.program.rules, self.program.modules
        scopes = scopes_for(kept, modules, self.program.wide, self.program.narrow)
        rules = dataclasses.replace(rules, scopes=(*scopes, *rules.scopes))
        operations = self.program.operations
        paths = {path for operation in operations for path in (operation.scope, *operation.arguments)}
        used = {match[0] for path in paths if path and (match := rules.pattern_for(path))}
        # A pattern may occur twice: the first one counts.
        dtypes = dict(reversed(rules.scopes))
        return {pattern: dtypes[pattern] for pattern, _ in rules.scopes if pattern in used}


@jax.jit
def _sums(half: list[Array], full: list[Array], units: list[float]) -> list[Array]:
    """Returns for each gradient the squared norms of the difference, of half and of float32, in units."""
    square = lambda x: jnp.sum(jnp.real(x * jnp.conj(x)))
    scaled = ((one / unit, other / unit) for one, other, unit in zip(half, full, units))
    return [jnp.stack([square(one - other), square(one), square(other)]) for one, other in scaled]


def _difference(half: float, full: float, sums: np.ndarray) -> Difference:
    """Returns the errors of a loss and of its gradients, for which `sums` has what `_sums` returns."""
    distance = abs(half - full)
    loss_error = distance / abs(full) if full else distance
    return Difference(loss_error if math.isfinite(loss_error) else math.inf, *_error(*sums.sum(axis=0)))


def _error(difference: float, half: float, full: float) -> tuple[float, float]:
    """Returns the relative error and the cosine of a vector, from squared norms as `_sums` has them."""
    if not math.isfinite(difference + half + full):
        return math.inf, math.nan
    if not full:
        return (math.inf, 0.0) if difference else (0.0, 1.0)
    cosine = (half + full - difference) / 2 / math.sqrt(half * full) if half else 0.0
    return math.sqrt(difference / full), min(1.0, max(-1.0, cosine))


def report_of(runs: Runs, tolerance: float, harm: float) -> PrecisionReport:
    """Returns the report, which measures the modules only if their joint error is above the tolerance.

    The gradients of a wrong loss may be right, as those of a sum that stops growing. The loss is measured
    only if its error is above `harm`: a small difference of large numbers has a large relative error.
    """
    program, half = runs.program, runs.keeping(())
    is_loss = half.gradients <= tolerance and half.loss > max(tolerance, harm)
    measure = "loss" if is_loss else "gradients"
    tolerance = max(tolerance, harm) if is_loss else tolerance
    unscaled = None if is_loss else runs.try_scale(tolerance)
    error = lambda modules: getattr(runs.keeping(modules), measure)
    is_close = error(()) <= tolerance
    own = {
        module: runs.keeping(set(program.modules) - {module}) for module in program.modules if not is_close
    }
    other = "gradients" if is_loss else "loss"
    size = lambda module: (getattr(own[module], measure), getattr(own[module], other))
    order = sorted(own, key=size, reverse=True)
    kept = fewest(order, error, tolerance)
    return PrecisionReport(
        program.narrow,
        program.wide,
        runs.scale,
        runs.loss,
        tuple(module.label for module in program.modules),
        tuple(ModuleDifference(module.label, own[module], module.pattern, module.lines) for module in order),
        runs.keeping(()),
        unscaled,
        None if is_close else runs.keeping(program.modules),
        measure,
        tolerance,
        None if kept is None else tuple(module.label for module in kept),
        None if kept is None else runs.rules(kept),
        {module.label: module.remedy for module in kept or () if module.remedy},
        None if kept is None else runs.keeping(kept),
    )


def compare_for_doctor(
    call: LossCall, loss_scale: Any, tolerance: float | None, args: Any, kwargs: Any
) -> PrecisionReport | None:
    """Returns the report for `doctor`, which tolerates more; None if the loss is not finite in float32."""
    _check(tolerance)
    is_autocast = settings_of(call.fun) is not None
    fun, rules = given_rules("doctor", call.fun, None, jnp.float32)
    program = FlaggedProgram(dataclasses.replace(call, fun=fun), rules, is_autocast, args, kwargs)
    runs = Runs(program, scale_of("doctor", loss_scale), loss_scale is None)
    if not runs.is_finite:
        return None
    harm = FLOAT8_TOLERANCE if rules.float8 else HARM
    return report_of(runs, harm if tolerance is None else tolerance, harm)

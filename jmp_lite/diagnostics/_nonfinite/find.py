"""Finds where a loss or its gradients become inf or NaN: `find_nonfinite`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxpr import arguments
from ..._jaxpr.read import Array
from .._values.sites import Site
from .._values.trace import LossCall, LossProgram, Measured, Tapped, Transform, scale_of, trace
from .advice import advise
from .case import Case
from .extremes import Extremes
from .flow import Flow, Origin
from .report import Nonfinite, NonfiniteReport
from .rules import Lines, lines_of_rules, own_line

P = ParamSpec("P")

LOWEST = -24
"""The exponent of the smallest scale that is tried. It makes a loss of 1 the smallest number of float16."""


def find_nonfinite(
    fun: Callable[P, Any],
    *,
    loss_scale: Any = None,
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    transform: Transform | None = jax.value_and_grad,
) -> Callable[P, NonfiniteReport]:
    """Returns a function that finds the operation at which a loss or its gradients become inf or NaN.

    It runs the loss and its backward pass as `jmp_lite.value_and_grad` does, as one compiled program that
    measures the smallest and the largest element of every floating value, also inside jit, loops, branches,
    rematerialization and shards. Only these numbers return to the host. An inf or NaN is harmful if it
    reaches the loss or a gradient through values that are all inf or NaN; a mask of -inf that a softmax reads
    is not. An inf from half arithmetic is also harmful if a later operation turns it into a wrong finite
    number (1/inf = 0).

    If the first inf or NaN is in the backward pass, the program also runs at smaller loss scales, to find one
    that fits.

    With `transform=None` it runs any function as it is, such as a whole train step. Then an inf or NaN is
    harmful if it reaches what the function returns, or a value that the step tests to skip its update.

    Args:
        fun: the loss function, as it is given to `jmp_lite.value_and_grad`: plain, with a model under a
            policy, or from `jmp_lite.autocast`. With `transform=None` any function that returns a pytree. It
            is not changed.
        loss_scale: the scale of the step, such as `jmp.get_loss_scale(opt_state)`; a number; or None for 1.
        argnums: as in `jmp_lite.value_and_grad`; for a step, which arguments are the parameters.
        has_aux: whether `fun` returns `(loss, aux)`.
        transform: as in `jmp_lite.value_and_grad`; None for a step.

    Returns:
        A function of the arguments of `fun` that returns a `NonfiniteReport`. Call it outside `jit`. A NumPy
        array among the arguments is traced, as `jax.jit` does.

    Raises:
        TypeError: `fun` is no function; the loss is no floating scalar; `loss_scale` is not a loss scale;
            an argument is traced.
        ValueError: the scale is not above 0 and finite; a scale is given for a step.

    Source: Hugging Face's `DebugUnderflowOverflow`, TensorFlow's `enable_check_numerics`, JAX's `checkify`.

    Examples:
        >>> w, x = jnp.ones(4), jnp.arange(4.0)
        >>> report = find_nonfinite(lambda w, x: jnp.sum(w / x))(w, x)
        >>> report.first_inf.operation, report.first_inf.operand_ranges[1], report.loss
        ('div', (0.0, 3.0), inf)
        >>> step = lambda w, g: w - 0.1 * g / jnp.sqrt(jnp.sum(g * g))
        >>> print(find_nonfinite(step, transform=None)(w, jnp.zeros(4)).summary())
        1 of 1 results of the step are not finite (the only one).
    """
    if not callable(fun):
        raise TypeError(f"find_nonfinite takes a loss function first. Got {fun!r}.")
    scale = scale_of("find_nonfinite", loss_scale)
    call = LossCall(fun, argnums, has_aux, transform)
    if transform is None and loss_scale is not None:
        raise ValueError(
            "find_nonfinite: a step scales its loss itself. Leave loss_scale out, or give the loss function "
            f"without transform=None. Got loss_scale={loss_scale!r}."
        )

    @functools.wraps(fun)
    def find_nonfinite_fun(*args: Any, **kwargs: Any) -> NonfiniteReport:
        lines = functools.partial(_lines_of_rules, call, args, kwargs)
        return examine(trace("find_nonfinite", call, args, kwargs), scale, lines)

    return find_nonfinite_fun


def _lines_of_rules(call: LossCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lines:
    return lines_of_rules(arguments.trace(call.fun, args, kwargs, False, (np.ndarray,)).jaxpr)


def examine(program: LossProgram, scale: float, lines: Callable[[], Lines] = dict) -> NonfiniteReport:
    """Runs a program at a loss scale, and reports where its values become inf or NaN."""
    tapped = Tapped(program, Extremes())
    measured = tapped(scale)
    origins = Flow(measured).origins()
    harmful = [origin for origin in origins if origin.is_harmful]
    fitting = None
    if harmful and harmful[0].site.is_scaled:
        fitting = _fitting_scale(tapped, scale)
    is_backward = any(origin.site.direction == "backward" for origin in origins)
    rules = lines() if is_backward and not measured.is_step else {}
    return _report(_Reader(program, measured, scale, fitting, rules), origins)


def _fitting_scale(tapped: Tapped, scale: float) -> float | None:
    """Returns the largest power of two below `scale` at which the loss and all gradients are finite.

    None if there is none. Larger scales only overflow more, so a binary search over the exponents finds it.
    """
    is_finite = lambda exponent: not Flow(tapped(2.0**exponent)).bad_outputs()
    low, high = LOWEST, math.ceil(math.log2(scale))
    if low >= high or not is_finite(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_finite(middle) else (low, middle)
    return 2.0**low


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Turns origins into the rows of a report.

    Attributes:
        program: the loss and its gradients as one jaxpr.
        measured: the smallest and the largest element of each value.
        scale: the loss scale.
        fitting: a smaller scale at which the gradients are finite; None if there is none.
        rules: the lines of backward rules.
    """

    program: LossProgram
    measured: Measured
    scale: float
    fitting: float | None
    rules: Lines

    def read(self, origin: Origin) -> Nonfinite:
        """Returns an origin as a row of the report."""
        site = origin.site
        argument = site.argument or site.last_parameter
        scale = None if self.measured.is_step else self.scale
        case = Case(origin, self.measured.sites, self.program.parameters, scale, self.fitting)
        return Nonfinite(
            "NaN" if origin.is_nan else "inf",
            site.operation,
            site.array,
            origin.extent,
            site.operands,
            origin.operands,
            site.module,
            argument,
            bool(site.argument),
            own_line(site, self.rules) if site.direction == "backward" else site.line,
            self._direction(origin),
            tuple((loop.kind, number) for loop, number in zip(site.loops, origin.iterations)),
            "" if origin.end is None else f"{origin.end.operation}, {origin.end.line}".rstrip(", "),
            self._index(site, origin.is_nan),
            advise(case),
        )

    def _direction(self, origin: Origin) -> str:
        direction = "derivative" if origin.is_derivative else origin.site.direction
        return "" if direction == "forward" and self.measured.is_step else direction

    def _index(self, site: Site, is_nan: bool) -> tuple[int, ...] | None:
        """Returns the index of the first element of an input that is not finite."""
        if site.operation not in ("argument", "constant") or len(site.path) != 2 or site.path[1] < 0:
            return None
        array = self.program.arrays[site.path[1]]
        index = _first_index(jnp.isnan(array) if is_nan else jnp.isinf(array))
        return tuple(map(int, np.unravel_index(int(index), array.shape)))


@jax.jit
def _first_index(flags: Array) -> Array:
    return jnp.argmax(flags.ravel())


def _report(reader: _Reader, origins: Sequence[Origin]) -> NonfiniteReport:
    harmful = [origin for origin in origins if origin.is_harmful]
    first_inf = next((origin for origin in harmful if not origin.is_nan), None)
    first_nan = next((origin for origin in harmful if origin.is_nan), None)
    read = lambda origin: None if origin is None else reader.read(origin)
    measured, is_step = reader.measured, reader.measured.is_step
    # The first output of a loss function is the loss.
    outputs = list(zip(reader.program.outputs, measured.results))[0 if is_step else 1 :]
    return NonfiniteReport(
        read(first_inf),
        read(first_nan),
        tuple(reader.read(origin) for origin in harmful if origin not in (first_inf, first_nan)),
        tuple(reader.read(origin) for origin in origins if not origin.is_harmful),
        None if is_step else float(measured.results[0][0]),
        reader.scale,
        tuple(
            name for name, ends in outputs if np.isnan(ends).any() or -np.inf == ends[0] or ends[1] == np.inf
        ),
        len(outputs),
        reader.fitting,
        measured.cut,
    )

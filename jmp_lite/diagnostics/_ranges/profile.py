"""How much half precision loses, and which loss scale recovers it: `profile_ranges`."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from ..._autocast import Plan, Planner, Rules, Wanted, given_rules
from ..._dtypes import DTypeLike
from ..._jaxpr import check_function, in_two_calls, open_jaxpr
from ..._scaling.loss_scale import LossScaleLike
from .._values.reference import has_value
from .._values.sites import in_half
from .._values.trace import LossCall, LossProgram, Tapped, ValueAndGrad, scale_of, trace
from .float8 import float8_operands
from .magnitudes import Histogram
from .report import ModuleRange, RangeReport, by_module

P = ParamSpec("P")


@in_two_calls
def profile_ranges(
    fun: Callable[P, Any],
    dtype: DTypeLike | None = None,
    *,
    loss_scale: LossScaleLike | None = None,
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    value_and_grad_fn: ValueAndGrad = jax.value_and_grad,
) -> Callable[P, RangeReport]:
    """Returns a function that measures what a half dtype loses of a step, and which loss scale recovers it.

    It runs the loss and its backward pass once, as one compiled program, and counts the magnitudes of the
    values. Only the counts return to the host.

    A float32 function, or one that `jmp_lite.autocast` returned, runs in float32, so no value is lost yet. It
    counts the values that `autocast(fun, dtype)` computes in half, or casts to half for a product. If the
    program has half values of its own, such as a model under a policy, it counts these, before a cast of the
    program. A value that a half product has flushed to zero counts as a zero: give it the plain model.

    Args:
        fun: the loss function, as it is given to `jmp_lite.value_and_grad`. It is not changed.
        dtype: `jnp.float16` or `jnp.bfloat16`, or a name. With `"float8"` the report also counts the
            operands of products that fp8 flushes to zero. For a function that `autocast` returned it is the
            dtype of that autocast, for any other float16 by default.
        loss_scale: the scale of the step: a loss scale, a number, or None for 1. It is rounded down to a
            power of two.
        argnums: as in `jmp_lite.value_and_grad`.
        has_aux: whether `fun` returns `(loss, aux)`.
        value_and_grad_fn: as in `jmp_lite.value_and_grad`.

    Returns:
        A function of the arguments of `fun` that returns a `RangeReport`. Call it outside `jit`.

    Raises:
        TypeError: `fun` is not a function; the loss is not a floating scalar; `loss_scale` is not a loss
            scale; an argument is traced.
        ValueError: `dtype` is not a half dtype, or is given for a function of autocast; the scale is not
            above 0 and finite; a rule of the autocast selects nothing.

    Source: NVIDIA, Training with Mixed Precision, 2.3 (https://docs.nvidia.com/deeplearning/performance/).

    Examples:
        >>> w, x = jnp.ones((8, 4)), jnp.ones((2, 8))
        >>> report = profile_ranges(lambda w, x: jnp.sum(x @ w) * 1e-9)(w, x)
        >>> report.pooled.fates(0).lost, report.static_scale, report.largest_safe_scale == 2.0**44
        (1.0, 65536.0, True)
    """
    check_function("profile_ranges", fun)
    exponent = math.frexp(scale_of("profile_ranges", loss_scale))[1] - 1
    fun, rules = given_rules("profile_ranges", fun, dtype, jnp.float16)
    if rules.dtype == jnp.float32:
        raise ValueError("profile_ranges takes float16 or bfloat16. Got float32, which loses nothing.")
    call = LossCall(fun, argnums, has_aux, value_and_grad_fn)

    @functools.wraps(fun)
    def profile_ranges_fun(*args: Any, **kwargs: Any) -> RangeReport:
        program = trace("profile_ranges", call, args, kwargs)
        plan = None if has_value(program.jaxpr, in_half) else _plan(program, rules)
        probe = Histogram(rules.dtype)
        measured = Tapped(program, probe, plan)(2.0**exponent)
        gradients = tuple(
            ModuleRange(name, "backward", probe.read(record), exponent)
            for name, record in zip(program.gradients, measured.results[1:])
        )
        float8 = float8_operands(program, plan, 2.0**exponent) if plan is not None and rules.float8 else ()
        probes = {"forward": probe, "backward": probe}
        modules = by_module(measured, probes, lambda s: "backward" if s.is_scaled else "forward", exponent)
        return RangeReport(rules.dtype, 2.0**exponent, modules, gradients, float8)

    return profile_ranges_fun


def _plan(program: LossProgram, rules: Rules) -> Plan:
    """Returns what autocast would do with the jaxpr of a loss and its gradients."""
    planner = Planner(rules)
    states = [
        planner.argument(array, name) if name else planner.constant(array)
        for array, name in zip(program.arrays, program.names)
    ]
    plan = planner.plan(program.jaxpr, states, [Wanted.NO] * len(open_jaxpr(program.jaxpr).outvars))
    planner.scopes.check()
    return plan

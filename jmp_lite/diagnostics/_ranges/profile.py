"""How much half precision loses, and which loss scale recovers it: `profile_ranges`."""

import math
from collections.abc import Callable
from typing import Any, ParamSpec, Unpack

import jax.numpy as jnp

from ..._autocast import Plan, Planner, Rules, Wanted
from ..._dtypes import DTypeLike
from ..._jaxpr import in_two_calls, open_jaxpr
from .._values.case import Case, Options, tool
from .._values.reference import has_value
from .._values.sites import in_half
from .._values.trace import LossProgram, Tapped
from .float8 import float8_operands
from .magnitudes import Histogram
from .report import ModuleRange, RangeReport, by_module

P = ParamSpec("P")


@in_two_calls
def profile_ranges(
    fun: Callable[P, Any],
    dtype: DTypeLike | None = None,
    **options: Unpack[Options],
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
        options: `loss_scale`, `argnums`, `has_aux` and `value_and_grad_fn`, as in `doctor`. The scale is
            rounded down to a power of two.

    Returns:
        A function of the arguments of `fun` that returns a `RangeReport`. Call it outside `jit`.

    Raises:
        TypeError, ValueError: as in `doctor`.

    Source: NVIDIA, Training with Mixed Precision, 2.3 (https://docs.nvidia.com/deeplearning/performance/).

    Examples:
        >>> w, x = jnp.ones((8, 4)), jnp.ones((2, 8))
        >>> report = profile_ranges(lambda w, x: jnp.sum(x @ w) * 1e-9)(w, x)
        >>> report.pooled.fates(0).lost, report.static_scale, report.largest_safe_scale == 2.0**44
        (1.0, 65536.0, True)
    """
    return tool("profile_ranges", fun, dtype, jnp.float16, ranges_of, **options)


def ranges_of(case: Case, loss_scale: float | None = None) -> RangeReport:
    """Returns the report of a call, at its own loss scale or another one."""
    rules, program = case.question.rules, case.plain_program
    exponent = math.frexp(case.question.scale if loss_scale is None else loss_scale)[1] - 1
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

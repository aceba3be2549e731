"""How much half precision loses, and which loss scale recovers it: `profile_ranges`."""

import math
from collections.abc import Callable
from typing import Any, ParamSpec, Unpack

import jax.numpy as jnp

from ..._dtypes import DTypeLike
from ..._jaxpr import in_two_calls
from .._values.case import Case, Options, tool
from .._values.numbers import lost_numbers
from .._values.reference import Reference
from .._values.trace import Tapped
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

    The values are those that `autocast(fun, dtype)` has in half; of a function that `jmp_lite.autocast`
    returned, or with half values of its own, such as a model under a policy, its own. They are counted while
    the program runs in float32, so that none is lost before.

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
    """Returns the report of a call, at its own loss scale or another one.

    The program runs in float32, at a scale of 1: nothing is lost before it is counted.
    """
    program, dtype = case.program, case.question.rules.dtype
    exponent = math.frexp(case.question.scale if loss_scale is None else loss_scale)[1] - 1
    probe = Histogram(dtype)
    reference = Reference({}, lost_numbers(program.jaxpr, case.numbers))
    measured = Tapped(program, probe, reference.apply)(1.0)
    gradients = tuple(
        ModuleRange(name, "backward", probe.read(record), exponent)
        for name, record in zip(program.gradients, measured.results[1:])
    )
    modules = by_module(measured, probe, exponent)
    is_half = lambda row: row.magnitudes.dtype == dtype
    float8 = tuple(row for row in modules if not is_half(row))
    return RangeReport(dtype, 2.0**exponent, tuple(filter(is_half, modules)), gradients, float8)

"""Decides about element-wise operations. Says how any operation takes its operands and gives its results."""

import functools
from collections.abc import Sequence, Set

import jax.numpy as jnp
import numpy as np

from ..._jaxpr.primitives import Category
from ..._jaxpr.read import Var, is_float32
from .op import Op
from .plan import Decision, Run, Take, conversion
from .ruling import Ruling
from .states import FLOAT32, HALF, OTHER, WIDE, Kind, State, fits, kind_for, may_be_rounded, rounding_error
from .wanted import Wanted


def decide_elementwise(op: Op, operands: Sequence[State], wanted: Wanted, half: np.dtype) -> Decision:
    """Decides about an element-wise operation: the widest type of its operands; half only if wanted."""
    kinds = {kind_for(op, var, state.kind) for var, state in zip(op.equation.invars, operands)} - {Kind.OTHER}
    is_wide = not kinds.isdisjoint(WIDE)
    # A product rounds the result in any case. Stored in half, it takes half the memory until then.
    if is_wide and wanted >= Wanted.WITH_OTHERS:
        return store_half(op, operands, "matmuls use its result")
    if Kind.HALF not in kinds:
        return _without_half(op, operands, kinds)
    if reason := _why_float32(op, operands, kinds, wanted, half):
        return run_in_float32(op, operands, Ruling(Category.INFER, reason))
    if reason := _why_stored(op, operands, half):
        return store_half(op, operands, reason)
    reason = "its inputs are half, or take the dtype of the others"
    return Decision(op, Category.INFER, Run(in_half(op, operands)), halves(op), reason, changed=True)


def _without_half(op: Op, operands: Sequence[State], kinds: Set[Kind]) -> Decision:
    """Decides about an operation without a half operand, which runs in float32."""
    # A result is no literal, and a computed value no longer of `keep_float32` or a rule: hence the bounds.
    kind = max({Kind.ADAPTS, *kinds}) if kinds.isdisjoint(WIDE) else Kind.FLOAT32
    constant = all(state.constant for state in operands)
    results = results_of(op, operands, State(kind, constant=constant))
    return Decision(op, Category.INFER, in_full(operands), results, "no input is half")


def _why_float32(op: Op, operands: Sequence[State], kinds: Set[Kind], wanted: Wanted, half: np.dtype) -> str:
    """Returns why an operation with a half operand runs in float32; empty if its result may be in half."""
    if Kind.ARGUMENT in kinds or not kinds.isdisjoint(WIDE):
        return "an input is in float32, the widest dtype"
    if unfit := [number for number in _numbers(operands) if not fits(number, half)]:
        return f"{half.name} does not hold the constant {unfit[0]:g}"
    if wanted <= Wanted.NO and any(map(is_float32, op.equation.outvars)):
        return "float32 operations read its result"
    return ""


def _why_stored(op: Op, operands: Sequence[State], half: np.dtype) -> str:
    """Returns why an operation computes in float32 what it stores in half; empty if it computes in half."""
    rounded = [number for number in _numbers(operands) if op.traits.scales and _is_rounded(number, half)]
    if rounded:
        return f"{half.name} rounds the constant {rounded[0]:g}"
    # The derivative of `x / y` has `y**-2`:
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/lax/lax.py#L5098.
    if op.traits.squares and half == jnp.float16 and not operands[-1].constant:
        return f"the derivative of {op.name} squares an input, which may overflow"
    if all(map(functools.partial(may_be_rounded, op), op.equation.invars, operands)):
        return ""
    return "one input is half; another was computed in float32 and adapts, so the result is stored in half"


def _numbers(operands: Sequence[State]) -> list[float]:
    return [state.number for state in operands if state.number is not None]


def _is_rounded(number: float, half: np.dtype) -> bool:
    """Whether `half` rounds a number by more than a quarter of the largest rounding error."""
    # A rounded factor is off by the same share everywhere, while the errors of other roundings cancel out. In
    # float16 the 0.7 of a dropout doubles the error of the gradient.
    # The largest error of a rounding is eps / 2.
    return rounding_error(number, half) > float(jnp.finfo(half).eps) / 8


def run_in_float32(op: Op, operands: Sequence[State], ruling: Ruling) -> Decision:
    """Runs an operation in float32. A result that is computed from literals alone adapts to its readers."""
    # An operation with an effect, such as an `io_callback`, may give other numbers in each call.
    constant = all(state.constant for state in operands) and not op.equation.effects
    state = State(Kind.ADAPTS, constant=True) if constant else FLOAT32
    changed = any(state.is_half for state in operands)
    results = results_of(op, operands, state)
    return Decision(op, ruling.category, in_full(operands), results, ruling.reason, changed, why=ruling.why)


def in_full(operands: Sequence[State]) -> Run:
    """Returns the action of an operation that takes its operands in float32."""
    return Run(tuple(conversion(state, FLOAT32) for state in operands))


def in_half(op: Op, operands: Sequence[State]) -> tuple[Take, ...]:
    """Returns how an operation takes its operands in half. It may broadcast some of them."""

    def take(var: Var, state: State) -> Take:
        if state.kind == Kind.OTHER:
            return Take.AS_IS
        # The gradient of a broadcast operand is a sum, in float32 if the cast comes after the broadcast.
        if op.traits.broadcasts and var.aval.ndim > 0:
            return Take.HALF if var.aval.shape == op.equation.outvars[0].aval.shape else Take.BROADCAST
        return Take.HALF

    return tuple(map(take, op.equation.invars, operands))


def store_half(op: Op, operands: Sequence[State], reason: str) -> Decision:
    """Computes in float32 and stores the result in half."""
    results = halves(op)
    takes = in_full(operands).operands
    action = Run(takes, narrow=tuple(state.is_half for state in results))
    return Decision(op, Category.INFER, action, results, reason, changed=True)


def halves(op: Op) -> tuple[State, ...]:
    """Returns the states of the results of an operation that runs in half."""
    return tuple(HALF if is_float32(var) else OTHER for var in op.equation.outvars)


def results_of(op: Op, operands: Sequence[State], state: State) -> tuple[State, ...]:
    """Returns `state` for each float32 result. Results of other dtypes are never changed."""
    other = State(Kind.OTHER, constant=all(state.constant for state in operands))
    return tuple(state if is_float32(var) else other for var in op.equation.outvars)

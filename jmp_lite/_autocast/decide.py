"""Decides about one operation: in which precision it runs, and why. One function for each list."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from .jaxprs import Equation, Var, asked_precision, is_float32, name_of
from .plan import (
    Bind,
    CastDown,
    CastUp,
    Decision,
    Gather,
    MoveLater,
    PassOn,
    StoreHalf,
    Take,
    WideGradient,
    conversion,
)
from .primitives import List, Traits, traits_of
from .rules import fits
from .states import FIRM, HALF, OTHER, Kind, State, broadcast, may_be_rounded, moved


def in_float32(equation: Equation, operands: Sequence[State], which: List, reason: str) -> Decision:
    """Float32 operands, and results that insist on float32 unless they are made of literals alone."""
    constant = all(state.constant for state in operands) and not equation.effects
    state = State(Kind.FREE, constant=True) if constant else FIRM
    changed = any(state.kind == Kind.HALF for state in operands)
    return Decision(which, _in_full(operands), _results(equation, operands, state), reason, changed=changed)


def decide_product(equation: Equation, operands: Sequence[State], half: np.dtype, leaves: bool) -> Decision:
    """An operation of the allow list takes half operands, unless the program or a rule says otherwise.

    Args:
        equation: the operation.
        operands: the states of its operands.
        half: the half dtype.
        leaves: whether it makes a weight gradient, which leaves it in float32.
    """
    reason = why_not_half(equation, half)
    if reason is None and any(state.full for state in operands):
        reason = "a rule keeps one of its arguments in float32"
    if reason:
        return in_float32(equation, operands, List.ALLOW, reason)
    name = equation.primitive.name
    takes = _in_half(equation, traits_of(name_of(equation)), operands)
    reason = f"{name} is on the allow list"
    if leaves and name in _GIVES_FLOAT32:
        reason += "; it makes a weight gradient, which it gives in float32"
        action = Bind(takes, np.dtype(np.float32))
        return Decision(List.ALLOW, action, _results(equation, operands, FIRM), reason, changed=True)
    gives = None if equation.params.get("preferred_element_type") is None else half
    action = Bind(takes, gives)
    if name in _GIVES_FLOAT32 and any(state.reduced for state in operands):
        action = WideGradient(takes, gives, wide=tuple(state.reduced for state in operands))
    results = tuple(HALF if is_float32(var) else OTHER for var in equation.outvars)
    return Decision(List.ALLOW, action, results, reason, changed=True)


# Operations that a GPU runs on half operands with a float32 result. For a convolution of such a result XLA
# would widen the operands.
_GIVES_FLOAT32 = ("dot_general",)


def why_not_half(equation: Equation, half: np.dtype) -> str | None:
    """Returns why an operation of the allow list keeps its dtypes; None if it takes half operands."""
    floating = [var for var in equation.invars if jnp.issubdtype(var.aval.dtype, jnp.inexact)]
    if not any(map(is_float32, floating)):
        traced = sorted({var.aval.dtype.name for var in floating}) or ["integers"]
        return f"its operands were traced in {' and '.join(traced)}"
    others = sorted({var.aval.dtype.name for var in floating if var.aval.dtype not in (jnp.float32, half)})
    if others:
        return f"an operand was traced in {' and '.join(others)}"
    if precision := asked_precision(equation):
        return f"the program asks for precision {precision}"
    preferred = equation.params.get("preferred_element_type")
    if preferred not in (None, jnp.float32):
        return f"the program asks for a result in {preferred}"
    return None


def decide_infer(equation: Equation, operands: Sequence[State], wanted: bool, half: np.dtype) -> Decision:
    """The widest type of the operands that insist on one; half only if the result is wanted in half."""
    traits = traits_of(name_of(equation))
    float32 = [
        (var, broadcast(equation, traits, var, state))
        for var, state in zip(equation.invars, operands)
        if state.kind != Kind.OTHER
    ]
    kinds = {state.kind for _, state in float32}
    if Kind.HALF not in kinds:
        kind = max(kinds, default=Kind.FREE)
        constant = all(state.constant for state in operands)
        state = State(Kind.FREE if kind == Kind.LITERAL else kind, constant=constant)
        results = _results(equation, operands, state)
        return Decision(List.INFER, _in_full(operands), results, "no operand is in half")
    reason = None
    if kinds & {Kind.OPEN, Kind.FIRM}:
        reason = "an operand is in float32, the widest type"
    elif unfit := [state.number for _, state in float32 if not _fits(state, half)]:
        reason = f"{half.name} does not hold the constant {unfit[0]:g}"
    elif not wanted and any(map(is_float32, equation.outvars)):
        reason = "float32 operations read its result"
    if reason:
        return in_float32(equation, operands, List.INFER, reason)
    results = tuple(HALF if is_float32(var) else OTHER for var in equation.outvars)
    if all(may_be_rounded(traits, var, state) for var, state in float32):
        reason = "its operands are in half, or take the type of the others"
        action = Bind(_in_half(equation, traits, operands))
        return Decision(List.INFER, action, results, reason, changed=True)
    reason = "one operand is in half; another was computed in float32 and takes its type"
    return Decision(List.INFER, _stored(traits, operands, results), results, reason, changed=True)


def decide_move(equation: Equation, operands: Sequence[State], wanted: bool) -> Decision:
    """Each operand keeps its type. A value that is wanted in half moves later, after its cast.

    Args:
        equation: the operation.
        operands: the states of its operands.
        wanted: whether any operation wants the first result in half.
    """
    traits = traits_of(name_of(equation))
    paired = len(equation.outvars) == len(operands)
    results = tuple(
        moved(equation, operands[index if paired else 0], out) for index, out in enumerate(equation.outvars)
    )
    narrow = tuple(state.kind == Kind.HALF for state in results)
    action = Bind((Take.AS_IS,) * len(operands))
    if traits.spreads and any(narrow):
        action = Bind(tuple(conversion(state, FIRM) for state in operands), narrow=narrow)
    elif traits.gathers and narrow[0]:
        action = Gather()
    elif len(results) == 1 and not traits.spreads and wanted and not _settled(operands[0]):
        action = MoveLater(traits.gathers)
    changed = any(state.kind == Kind.HALF for state in operands)
    return Decision(List.MOVE, action, results, "it moves data and keeps its type", changed=changed)


def decide_cast(equation: Equation, operand: State, half: np.dtype) -> Decision:
    """autocast obeys a cast of the program; a cast from float32 to float32 does nothing."""
    (source,), (target,) = equation.invars, equation.outvars
    action = Bind((Take.AS_IS,))
    if is_float32(source) and is_float32(target):
        action, result, reason = PassOn(), operand, "float32 already"
    elif not is_float32(target):
        result, reason = State(Kind.OTHER, constant=operand.constant), "the program casts"
        if is_float32(source) and target.aval.dtype == half:
            action = CastDown()
    elif source.aval.dtype == jnp.bool_:
        result, reason = State(Kind.FREE, leaf=True, constant=operand.constant), "half holds 0 and 1"
    elif jnp.issubdtype(source.aval.dtype, jnp.integer):
        free = operand.constant or source.aval.ndim == 0
        result = State(Kind.FREE if free else Kind.OPEN, constant=operand.constant)
        reason = "half may not hold the integers"
    else:
        result, reason = FIRM, "the program casts to float32"
        if source.aval.dtype == half:
            action = CastUp()
    changed = Kind.HALF in (operand.kind, result.kind)
    return Decision(List.AS_TRACED, action, (result,), reason, changed=changed)


def _in_full(operands: Sequence[State]) -> Bind:
    return Bind(tuple(conversion(state, FIRM) for state in operands))


def _in_half(equation: Equation, traits: Traits, operands: Sequence[State]) -> tuple[Take, ...]:
    """Returns how an operation takes its operands in half; it may broadcast some of them.

    The gradient of a broadcast operand is a sum, so the operand is broadcast in float32 and cast after.
    """

    def take(var: Var, state: State) -> Take:
        if state.kind == Kind.OTHER:
            return Take.AS_IS
        if traits.broadcasts and var.aval.ndim > 0 and not state.constant:
            return Take.HALF if var.aval.shape == equation.outvars[0].aval.shape else Take.BROADCAST
        return Take.HALF

    return tuple(map(take, equation.invars, operands))


def _stored(traits: Traits, operands: Sequence[State], results: Sequence[State]) -> StoreHalf:
    recompute = traits.scales and any(
        state.kind in (Kind.FREE, Kind.OPEN) and not state.constant for state in operands
    )
    in_half = lambda states: tuple(state.kind == Kind.HALF for state in states)
    return StoreHalf(in_half(operands), in_half(results), recompute)


def _settled(state: State) -> bool:
    """Whether a value has only one dtype in which it can be read."""
    return state.kind in (Kind.OTHER, Kind.HALF)


def _fits(state: State, half: np.dtype) -> bool:
    return state.number is None or fits(state.number, half)


def _results(equation: Equation, operands: Sequence[State], state: State) -> tuple[State, ...]:
    """Returns `state` for each float32 result, and for each other result that it is never changed."""
    other = State(Kind.OTHER, constant=all(state.constant for state in operands))
    return tuple(state if is_float32(var) else other for var in equation.outvars)

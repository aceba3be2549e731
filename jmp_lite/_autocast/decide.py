"""Decides about one operation: in which precision it runs, and why. One function for each list."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .jaxprs import (
    Equation,
    Role,
    Var,
    floating_operands,
    inner_jaxprs,
    is_float32,
    is_literal,
    name_of,
    precisions,
)
from .plan import (
    Bind,
    CastDown,
    CastUp,
    Decision,
    Demand,
    Gather,
    HalfGradient,
    Inside,
    MoveLater,
    PassOn,
    Plan,
    StoreHalf,
    Take,
    Wanted,
    WideGradient,
    conversion,
)
from .primitives import List, Traits, traits_of
from .rules import Rules, fits
from .states import FIRM, HALF, OTHER, Kind, State, broadcast, may_be_rounded, moved


def in_float32(equation: Equation, operands: Sequence[State], which: List, reason: str) -> Decision:
    """Float32 operands, and results that insist on float32 unless they are made of literals alone."""
    constant = all(state.constant for state in operands) and not equation.effects
    state = State(Kind.FREE, constant=True) if constant else FIRM
    changed = any(state.kind == Kind.HALF for state in operands)
    return Decision(which, _in_full(operands), _results(equation, operands, state), reason, changed=changed)


def decide_product(equation: Equation, operands: Sequence[State], rules: Rules, leaves: bool) -> Decision:
    """An operation of the allow list takes half operands, unless the program or a rule says otherwise.

    Args:
        equation: the operation.
        operands: the states of its operands.
        rules: what autocast does.
        leaves: whether it makes a weight gradient, which leaves it in float32.
    """
    if reason := why_not_half(equation, operands, rules):
        return in_float32(equation, operands, List.ALLOW, reason)
    name = equation.primitive.name
    takes = _in_half(equation, traits_of(name_of(equation)), operands)
    params = _half_params(equation, rules.dtype)
    reason = f"{name} is on the allow list"
    if leaves and name in _GIVES_FLOAT32:
        reason += "; it makes a weight gradient, which it gives in float32"
        action = Bind(takes, params | {"preferred_element_type": np.dtype(np.float32)})
        return Decision(List.ALLOW, action, _results(equation, operands, FIRM), reason, changed=True)
    action = Bind(takes, params)
    if name in _GIVES_FLOAT32 and any(state.reduced for state in operands):
        action = WideGradient(takes, params, wide=tuple(state.reduced for state in operands))
    results = tuple(HALF if is_float32(var) else OTHER for var in equation.outvars)
    return Decision(List.ALLOW, action, results, reason, changed=True)


# Operations that a GPU runs on half operands with a float32 result. For a convolution of such a result XLA
# would widen the operands.
_GIVES_FLOAT32 = ("dot_general",)


def decide_outer(
    equation: Equation,
    operands: Sequence[State],
    rules: Rules,
    wanted: Wanted,
    backward: bool,
    leaves: bool,
) -> Decision:
    """An outer product runs as an element-wise operation does. Its gradients are products of half operands.

    Positions times frequencies are an outer product, which half would make wrong. In a backward pass it is
    the gradient of a product, or another such gradient, and runs as the others do.

    Args:
        equation: the operation.
        operands: the states of its operands.
        rules: what autocast does.
        wanted: how the result is wanted in half.
        backward: whether the operation is a part of a backward pass.
        leaves: whether it makes a weight gradient, which leaves it in float32.
    """
    if reason := why_not_half(equation, operands, rules):
        return in_float32(equation, operands, List.INFER, reason)
    constant = all(state.constant for state in operands)
    halves = rules.list_of("dot_general") is List.ALLOW and not constant
    if halves and backward:
        return decide_product(equation, operands, rules, leaves)
    decision = decide_infer(equation, operands, wanted, rules.dtype)
    params = _half_params(equation, rules.dtype)
    if decision.takes_half:
        action = Bind(_in_half(equation, traits_of("outer_product"), operands), params)
        return dataclasses.replace(decision, action=action)
    if not halves or any(state.reduced for state in operands):
        return decision
    action = HalfGradient(_in_full(operands).operands, params)
    # The result is in float32, also where `decide_infer` would store it in half.
    results = _results(equation, operands, FIRM) if decision.gives_half else decision.results
    return dataclasses.replace(decision, action=action, results=results, changed=True)


def _half_params(equation: Equation, half: np.dtype) -> dict[str, Any]:
    """Returns the parameters of a product that change for half operands: precisions are of float32."""
    changed = {"preferred_element_type": half, "precision": None}
    return {name: value for name, value in changed.items() if equation.params.get(name) is not None}


def why_not_half(equation: Equation, operands: Sequence[State], rules: Rules) -> str | None:
    """Returns why an operation of the allow list keeps its dtypes; None if it takes half operands."""
    floating = floating_operands(equation)
    if not any(map(is_float32, floating)):
        traced = sorted({var.aval.dtype.name for var in floating}) or ["integers"]
        return f"its operands were traced in {' and '.join(traced)}"
    others = sorted(
        {var.aval.dtype.name for var in floating if var.aval.dtype not in (jnp.float32, rules.dtype)}
    )
    if others:
        return f"an operand was traced in {' and '.join(others)}"
    if asked := precisions(equation) - rules.precisions:
        return f"the program asks for precision {' and '.join(sorted(asked))}"
    preferred = equation.params.get("preferred_element_type")
    if preferred not in (None, jnp.float32):
        return f"the program asks for a result in {preferred}"
    return "a rule keeps one of its arguments in float32" if any(state.full for state in operands) else None


def decide_infer(equation: Equation, operands: Sequence[State], wanted: Wanted, half: np.dtype) -> Decision:
    """The widest type of the operands that insist on one; half only if the result is wanted in half."""
    traits = traits_of(name_of(equation))
    float32 = [
        (var, broadcast(equation, traits, var, state))
        for var, state in zip(equation.invars, operands)
        if state.kind != Kind.OTHER
    ]
    kinds = {state.kind for _, state in float32}
    halves = tuple(HALF if is_float32(var) else OTHER for var in equation.outvars)
    if Kind.FIRM in kinds and wanted >= Wanted.BY_A_PRODUCT:
        action = _stored(traits, operands, halves)
        return Decision(List.INFER, action, halves, "products read its result", changed=True)
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
    if all(may_be_rounded(traits, var, state) for var, state in float32):
        reason = "its operands are in half, or take the type of the others"
        action = Bind(_in_half(equation, traits, operands))
        return Decision(List.INFER, action, halves, reason, changed=True)
    reason = "one operand is in half; another was computed in float32 and takes its type"
    return Decision(List.INFER, _stored(traits, operands, halves), halves, reason, changed=True)


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


def decide_inside(
    equation: Equation,
    operands: Sequence[State],
    plans: Sequence[Plan],
    results: Sequence[State],
    demand: Demand,
) -> tuple[Inside, ...]:
    """Returns how a call runs its jaxprs, and which operands it is given in half as well.

    The constant of a loop that the body wants in half is cast once, outside the loop. An operand that a
    jitted function or a branch wants in half, and another operation around it too, is cast once for all of
    them.
    """
    shares = equation.primitive.name in ("jit", "cond")

    def enter(plan: Plan, position: int, index: int, role: Role) -> Take:
        var, state = equation.invars[index], plan.inputs[position]
        if role is Role.CONSTANT:
            both = bool(plan.wanted[position]) and state.kind not in (Kind.OTHER, Kind.LITERAL)
        elif shares and state.kind in (Kind.FREE, Kind.OPEN, Kind.FIRM) and not is_literal(var):
            both = demand.uses[var] > 1 and any(each.wanted[position] for each in plans)
        else:
            both = False
        return Take.BOTH if both else conversion(operands[index], state)

    def leave(state: State, index: int | None) -> Take:
        return conversion(state, FIRM if index is None else results[index])

    return tuple(
        Inside(
            plan,
            tuple(enter(plan, *each) for each in zip(range(len(inner.roles)), inner.operands, inner.roles)),
            tuple(map(leave, plan.results, inner.results)),
        )
        for inner, plan in zip(inner_jaxprs(equation), plans)
    )


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
    in_half = lambda states: tuple(state.kind == Kind.HALF for state in states)
    widen = in_half(operands)
    wide = any(state.kind in (Kind.FREE, Kind.OPEN) and not state.constant for state in operands)
    return StoreHalf(widen, in_half(results), recompute=traits.scales and any(widen) and wide)


def _settled(state: State) -> bool:
    """Whether a value has only one dtype in which it can be read."""
    return state.kind in (Kind.OTHER, Kind.HALF)


def _fits(state: State, half: np.dtype) -> bool:
    return state.number is None or fits(state.number, half)


def _results(equation: Equation, operands: Sequence[State], state: State) -> tuple[State, ...]:
    """Returns `state` for each float32 result, and for each other result that it is never changed."""
    other = State(Kind.OTHER, constant=all(state.constant for state in operands))
    return tuple(state if is_float32(var) else other for var in equation.outvars)

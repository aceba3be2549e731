"""Decides in which precision one operation runs, and why. There is one function for each category."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._jaxpr.inner import Role
from ..._jaxpr.precision import params_with_precision
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import AUTOCAST_SCOPE, Var, is_float32
from .demand import Wanted
from .op import Context, Op
from .plan import Decision, Inside, Move, Plan, Run, Skip, Take, conversion
from .rules import Rules, fits
from .ruling import KEPT, Ruling
from .states import FLOAT32, HALF, HALF_SUM, OTHER, Kind, State, broadcast, may_be_rounded, moved


def in_float32(op: Op, operands: Sequence[State], ruling: Ruling) -> Decision:
    """Runs an operation in float32. A result that is computed from literals alone adapts to its readers."""
    constant = all(state.constant for state in operands) and not op.equation.effects and ruling.reason != KEPT
    state = State(Kind.ADAPTS, constant=True) if constant else FLOAT32
    changed = any(state.is_half for state in operands)
    results = _results(op, operands, state)
    return Decision(op, ruling.category, _in_full(operands), results, ruling.reason, changed)


def decide_kept(op: Op, operands: Sequence[State], ruling: Ruling, half: np.dtype) -> Decision:
    """Decides about an operation whose ruling has a reason: it runs as in the program, or in float32."""
    decision = in_float32(op, operands, ruling)
    if ruling.category is not Category.ALLOW or not _widens(op, half):
        return decision
    # JAX would multiply the float32 cotangent with half operands, on no Tensor Core.
    action = Run((Take.AS_IS,) * len(operands), gradients=(half, half))
    return dataclasses.replace(decision, action=action, changed=True)


def _widens(op: Op, half: np.dtype) -> bool:
    """Whether a product of the program's own half operands gives float32."""
    equation = op.equation
    return (
        equation.primitive.name == "dot_general"
        and equation.params.get("preferred_element_type") == jnp.float32
        and all(var.aval.dtype == half for var in equation.invars)
    )


def decide_product(
    op: Op, operands: Sequence[State], rules: Rules, wanted: Wanted, makes_weight_gradient: bool
) -> Decision:
    """Decides about an operation of the allow list: half operands, unless a rule keeps one in float32.

    A product that makes a weight gradient gives float32.
    """
    if any(state.kind == Kind.BY_RULE for state in operands):
        return in_float32(op, operands, Ruling(Category.ALLOW, _BY_RULE))
    if _selects(operands) and not wanted:
        return in_float32(op, operands, Ruling(Category.ALLOW, _SELECTS))
    primitive = op.equation.primitive.name
    takes = _in_half(op, operands)
    params = _half_params(op, rules.dtype)
    reason = f"{primitive} is on the allow list"
    action, results, half = Run(takes, params), _halves(op), rules.dtype
    if primitive in _GIVES_FLOAT32 and makes_weight_gradient:
        reason += "; it makes a weight gradient, which it gives in float32"
        params["preferred_element_type"] = _FLOAT32_DTYPE
        action = Run(takes, params, gradients=(half, half), swapped=True)
        results = _results(op, operands, FLOAT32)
    elif primitive in _GIVES_FLOAT32 and any(state.wide_gradient for state in operands):
        gradients = tuple(_FLOAT32_DTYPE if state.wide_gradient else half for state in operands)
        action = Run(takes, params, gradients=gradients)
    return Decision(op, Category.ALLOW, action, results, reason, changed=True)


def with_float32_result(decision: Decision, pattern: str, half: np.dtype) -> Decision:
    """Returns the decision about a product of half operands that gives float32.

    The Tensor Core sums in float32, so the result is not rounded. The products of the derivatives take half
    operands and give half, as they do for other products.

    Raises:
        ValueError: the operation cannot give float32 from half operands.
    """
    op, action = decision.op, decision.action
    assert isinstance(action, Run)
    if op.equation.primitive.name not in _GIVES_FLOAT32:
        raise ValueError(
            f"float32_results='{pattern}' selects {op.name} in the scope '{op.scope}'. For a float32 result "
            "XLA would run it on float32 operands. Write a narrower pattern, or rules={'...': 'float32'}."
        )
    params = {**action.params, "preferred_element_type": _FLOAT32_DTYPE}
    action = dataclasses.replace(action, params=params, gradients=action.gradients or (half, half))
    reason = f"{decision.reason}; float32_results='{pattern}' keeps its result"
    results = tuple(FLOAT32 if state.is_half else state for state in decision.results)
    return dataclasses.replace(decision, action=action, results=results, reason=reason)


def _selects(operands: Sequence[State]) -> bool:
    """Whether a product picks numbers computed in float32, as a CTC loss does with one-hot labels."""
    return sorted(state.kind for state in operands) == [Kind.BINARY, Kind.FLOAT32]


_SELECTS = "it picks float32 numbers by zeros and ones, and float32 operations read its result"
_BY_RULE = "a rule keeps one of its arguments in float32"
# Operations that a GPU runs on half operands with a float32 result. For a convolution of such a result XLA
# would widen the operands. (`diagnostics/_values/reference.py` names the products as well.)
_GIVES_FLOAT32 = ("dot_general",)
_FLOAT32_DTYPE = np.dtype(np.float32)


def decide_outer(op: Op, operands: Sequence[State], rules: Rules, wanted: Wanted) -> Decision:
    """Decides about a product without a sum, which runs as an element-wise operation does.

    Its gradients are products of half operands. The outer product itself may need float32, such as the
    product of positions and frequencies. In a backward pass `decide_product` decides.
    """
    if any(state.kind == Kind.BY_RULE for state in operands):
        return in_float32(op, operands, Ruling(Category.INFER, _BY_RULE))
    decision = decide_infer(op, operands, wanted, rules.dtype)
    if decision.takes_half:
        params = _half_params(op, rules.dtype)
        return dataclasses.replace(decision, action=Run(_in_half(op, operands), params))
    is_constant = all(state.constant for state in operands)
    gives_products = rules.halves_products and op.name == "outer_product" and not is_constant
    if not gives_products or any(state.wide_gradient for state in operands):
        return decision
    action = dataclasses.replace(_in_full(operands), gradients=(rules.dtype, rules.dtype))
    # The result is in float32, also where `decide_infer` would store it in half.
    results = _results(op, operands, FLOAT32) if decision.gives_half else decision.results
    return dataclasses.replace(decision, action=action, results=results, changed=True)


def _half_params(op: Op, half: np.dtype) -> dict[str, Any]:
    """Returns the parameters of a product that change for half operands: precisions are of float32."""
    changed = {"preferred_element_type": half, "precision": None}
    return {name: value for name, value in changed.items() if op.equation.params.get(name) is not None}


def decide_infer(op: Op, operands: Sequence[State], wanted: Wanted, half: np.dtype) -> Decision:
    """Decides about an element-wise operation: the widest type of its operands; half only if wanted."""
    known = [
        (var, state, broadcast(op, var, state.kind))
        for var, state in zip(op.equation.invars, operands)
        if state.kind != Kind.OTHER
    ]
    kinds = {kind for _, _, kind in known}
    is_wide = not kinds.isdisjoint((Kind.FLOAT32, Kind.BY_RULE))
    if is_wide and wanted >= Wanted.WITH_OTHERS:
        return _store_half(op, operands, "products read its result")
    if Kind.HALF not in kinds:
        kind = min(max(kinds, default=Kind.ADAPTS), Kind.FLOAT32)
        constant = all(state.constant for state in operands)
        results = _results(op, operands, State(max(kind, Kind.ADAPTS), constant=constant))
        return Decision(op, Category.INFER, _in_full(operands), results, "no operand is in half")
    reason = ""
    if is_wide or Kind.ARGUMENT in kinds:
        reason = "an operand is in float32, the widest type"
    elif unfit := [state.number for state in operands if not _fits(state, half)]:
        reason = f"{half.name} does not hold the constant {unfit[0]:g}"
    elif not wanted and any(map(is_float32, op.equation.outvars)):
        reason = "float32 operations read its result"
    if reason:
        return in_float32(op, operands, Ruling(Category.INFER, reason))
    if all(may_be_rounded(op, var, state, kind) for var, state, kind in known):
        reason = "its operands are in half, or take the type of the others"
        return Decision(op, Category.INFER, Run(_in_half(op, operands)), _halves(op), reason, changed=True)
    reason = "one operand is in half; another was computed in float32 and takes its type"
    return _store_half(op, operands, reason)


def decide_half_sum(op: Op, operands: Sequence[State], pattern: str) -> Decision:
    """Decides about a residual sum that `half_sums` selects: it adds in half.

    XLA would leave out the cast of a float32 sum to half, and store the sum in float32.
    """
    reason = f"half_sums='{pattern}' selects it"
    return Decision(op, Category.INFER, Run(_in_half(op, operands)), (HALF_SUM,), reason, changed=True)


def decide_move(op: Op, operands: Sequence[State], wanted: bool, backward: bool) -> Decision:
    """Decides about an operation that moves data: each operand keeps its dtype.

    `wanted` says whether any operation wants the first result in half.
    """
    outvars = op.equation.outvars
    results = tuple(moved(op, operands[op.moved_operand(n)], out) for n, out in enumerate(outvars))
    both = len(results) == 1 and _moves_both(op, operands[0], wanted, backward)
    # The constant of a loop that is in half outside has its array in float32 as well.
    action = Move(tuple(Take.HALF if state.is_half else Take.AS_IS for state in operands), both)
    changed = both or any(state.is_half for state in operands)
    return Decision(op, Category.MOVE, action, results, "it moves data and keeps its type", changed)


def _moves_both(op: Op, operand: State, wanted: bool, backward: bool) -> bool:
    """Whether a value should move in both dtypes.

    The transpose of a copy is a sum, which adds up in float32. A backward pass turns weights around for the
    gradients of inputs. XLA would turn the float32 kernel of a convolution around, and cast it in a kernel of
    its own.
    """
    if operand.is_half:
        return op.traits.gathers or op.traits.copies
    if not wanted:
        return False
    turns = backward and not op.traits.copies
    return (op.traits.gathers or turns) and operand.kind != Kind.OTHER


def decide_cast(op: Op, operand: State) -> Decision:
    """Decides about a cast of the program. autocast obeys it. A cast from float32 to float32 does nothing."""
    (source,), (target,) = op.equation.invars, op.equation.outvars
    action: Run | Skip = Run((Take.AS_IS,))
    if is_float32(source) and is_float32(target):
        action, result, reason = Skip(operand=0), operand, "float32 already"
    elif not is_float32(target):
        result, reason = State(Kind.OTHER, constant=operand.constant), "the program casts"
    elif source.aval.dtype == jnp.bool_:
        result = State(Kind.BINARY, exact_source=True, constant=operand.constant)
        reason = "half holds 0 and 1"
    elif jnp.issubdtype(source.aval.dtype, jnp.integer):
        free = operand.constant or source.aval.ndim == 0
        result = State(Kind.ADAPTS if free else Kind.ARGUMENT, constant=operand.constant)
        reason = "half may not hold the integers"
    else:
        result, reason = FLOAT32, "the program casts to float32"
    changed = operand.is_half or result.is_half
    return Decision(op, Category.AS_TRACED, action, (result,), reason, changed)


def decide_inside(
    op: Op, operands: Sequence[State], plans: Sequence[Plan], results: Sequence[State]
) -> tuple[Inside, ...]:
    """Returns how a call runs its jaxprs.

    If the body of a loop wants a constant in half, the loop gets the constant in both dtypes. So the constant
    is cast once, outside the loop.
    """

    def enter(index: int, role: Role, state: State, is_wanted: bool) -> Take:
        if role is Role.CONSTANT and is_wanted and state.kind not in (Kind.OTHER, Kind.LITERAL):
            return Take.HOISTED
        if role is Role.CONSTANT and state.is_half:  # The gradients of all iterations are summed in float32.
            return Take.HOISTED
        return conversion(operands[index], state)

    def leave(state: State, index: int | None) -> Take:
        return conversion(state, FLOAT32 if index is None else results[index])

    return tuple(
        Inside(
            inner,
            plan,
            tuple(map(enter, inner.operands, inner.roles, plan.inputs, plan.is_wanted)),
            tuple(map(leave, plan.results, inner.results)),
        )
        for inner, plan in zip(op.inner, plans)
    )


def _in_full(operands: Sequence[State]) -> Run:
    return Run(tuple(conversion(state, FLOAT32) for state in operands))


def _in_half(op: Op, operands: Sequence[State]) -> tuple[Take, ...]:
    """Returns how an operation takes its operands in half. It may broadcast some of them.

    The gradient of a broadcast operand is a sum, so the operand is broadcast in float32 and cast after.
    """

    def take(var: Var, state: State) -> Take:
        if state.kind == Kind.OTHER:
            return Take.AS_IS
        if op.traits.broadcasts and var.aval.ndim > 0 and not state.constant:
            return Take.HALF if var.aval.shape == op.equation.outvars[0].aval.shape else Take.BROADCAST
        return Take.HALF

    return tuple(map(take, op.equation.invars, operands))


def _store_half(op: Op, operands: Sequence[State], reason: str) -> Decision:
    """Computes in float32 and stores the result in half."""
    results = _halves(op)
    takes = _in_full(operands).operands
    action = Run(takes, narrow=tuple(state.is_half for state in results))
    return Decision(op, Category.INFER, action, results, reason, changed=True)


def _fits(state: State, half: np.dtype) -> bool:
    return state.number is None or fits(state.number, half)


def _halves(op: Op) -> tuple[State, ...]:
    """Returns the states of the results of an operation that runs in half."""
    return tuple(HALF if is_float32(var) else OTHER for var in op.equation.outvars)


def _results(op: Op, operands: Sequence[State], state: State) -> tuple[State, ...]:
    """Returns `state` for each float32 result. Results of other dtypes are never changed."""
    other = State(Kind.OTHER, constant=all(state.constant for state in operands))
    return tuple(state if is_float32(var) else other for var in op.equation.outvars)


def with_configured_precision(decision: Decision, precision: Any, context: Context) -> Decision:
    """Returns a decision by which a float32 product runs in the precision of `jax_default_matmul_precision`.

    autocast traces a program without the option (`_jaxpr/precision.py`). Products with a precision of their
    own keep it; those that autocast brings to half need none, nor do those of another autocast inside.
    """
    action, op = decision.action, decision.op
    if precision is None or not isinstance(action, Run) or decision.takes_half:
        return decision
    is_product, is_inside = op.traits.category is Category.ALLOW, AUTOCAST_SCOPE in context.scope_of(op)
    if is_product and is_inside and not any(map(is_float32, op.equation.invars)):
        return decision
    params = params_with_precision(op.equation, precision)
    if not params:
        return decision
    action = dataclasses.replace(action, params={**params, **action.params})
    return dataclasses.replace(decision, action=action, changed=True)

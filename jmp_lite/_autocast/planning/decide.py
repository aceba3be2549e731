"""Decides in which precision one operation runs, and why."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._float8.action import NOT_FP8, float8_action, why_not_float8
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import Var, is_float32
from .demand import Analysis, Wanted
from .op import Op
from .plan import Decision, Move, Run, Skip, Take, conversion
from .rules import Rules
from .ruling import DECIDES, KEEP_FLOAT32, Ruling
from .scopes import Scopes, by_rule
from .states import FLOAT32, HALF, HALF_SUM, KEPT, OTHER, WIDE, Kind, State, broadcast, may_be_rounded, moved

_SELECTS = "a matmul with one-hot labels, which selects float32 values for float32 operations"
_EXACT = "only integers or booleans are computed from it, and rounding would change them"
# Operations that a GPU runs on half operands with a float32 result. For a convolution of such a result XLA
# would widen the operands. (`diagnostics/_values/reference.py` names the products as well.)
_GIVES_FLOAT32 = ("dot_general",)
_OUTER = ("outer_product", "elementwise_product")
_FLOAT32_DTYPE = np.dtype(np.float32)


def decide(
    op: Op,
    ruling: Ruling,
    operands: Sequence[State],
    wanted: Wanted,
    analysis: Analysis,
    rules: Rules,
    scopes: Scopes,
) -> Decision:
    """Decides about an operation that runs no jaxprs. `wanted` says how its results are wanted in half.

    Raises:
        ValueError: `float32_results` selects an operation that cannot give float32 from half operands.
    """
    if ruling.rule is not None or any(state.rule is not None for state in operands):
        ruling = _by_first_rule(op, ruling, operands, rules)
    if ruling.reason:
        return _kept(op, operands, ruling, rules.dtype)
    if op.is_cast:
        return _cast(op, operands[0])
    if ruling.half_sum:
        return _half_sum(op, operands, ruling.half_sum)
    is_constant_outer = op.name == "outer_product" and all(state.constant for state in operands)
    if ruling.category is Category.ALLOW and not is_constant_outer:
        return _product(op, ruling, operands, wanted, analysis, rules, scopes)
    if op.name in _OUTER:
        return _outer(op, operands, wanted, rules)
    if ruling.category is Category.MOVE:
        is_wanted, by_products = (
            op.equation.outvars[0] in analysis.demand.wanted,
            wanted >= Wanted.WITH_OTHERS,
        )
        return _move(op, operands, is_wanted, by_products, analysis.context.is_backward(op))
    return _infer(op, operands, wanted, rules.dtype)


def _by_first_rule(op: Op, ruling: Ruling, operands: Sequence[State], rules: Rules) -> Ruling:
    """Returns the ruling on an operation by the first rule that selects the scope or an argument of a product."""
    if ruling.category is not Category.ALLOW and ruling.otherwise is None and op.name not in _OUTER:
        return ruling
    given = [rule for rule in (ruling.rule, *(state.rule for state in operands)) if rule is not None]
    pattern, dtype = min(given, key=rules.scopes.index)
    if dtype != "float32":
        return ruling.otherwise or ruling
    return ruling if ruling.reason else dataclasses.replace(ruling, reason=by_rule(pattern))


def _in_float32(op: Op, operands: Sequence[State], ruling: Ruling) -> Decision:
    """Runs an operation in float32. A result that is computed from literals alone adapts to its readers."""
    constant = all(state.constant for state in operands) and not op.equation.effects
    state = State(Kind.ADAPTS, constant=True) if constant else FLOAT32
    if ruling.reason == KEEP_FLOAT32:
        state = KEPT
    changed = any(state.is_half for state in operands)
    results = _results(op, operands, state)
    return Decision(op, ruling.category, _in_full(operands), results, ruling.reason, changed)


def _kept(op: Op, operands: Sequence[State], ruling: Ruling, half: np.dtype) -> Decision:
    """Decides about an operation whose ruling has a reason: it runs as in the program, or in float32."""
    decision = _in_float32(op, operands, ruling)
    if op.traits.category is not Category.ALLOW:
        return decision
    if ruling.reason == DECIDES and len(operands) == 2:
        # Its gradients decide nothing.
        action = dataclasses.replace(_in_full(operands), gradients=(half, half))
    elif _widens(op, half):
        # Otherwise JAX would multiply a float32 cotangent by half operands, which Tensor Cores cannot do.
        action = Run((Take.AS_IS,) * len(operands), gradients=(half, half))
    else:
        return decision
    return dataclasses.replace(decision, action=action, changed=True)


def _widens(op: Op, half: np.dtype) -> bool:
    """Whether a product of the program's own half operands gives float32."""
    equation = op.equation
    return (
        equation.primitive.name == "dot_general"
        and equation.params.get("preferred_element_type") == jnp.float32
        and all(var.aval.dtype == half for var in equation.invars)
    )


def _product(
    op: Op,
    ruling: Ruling,
    operands: Sequence[State],
    wanted: Wanted,
    analysis: Analysis,
    rules: Rules,
    scopes: Scopes,
) -> Decision:
    """Decides about a product: half operands, unless one of them is kept in float32.

    Raises:
        ValueError: `float32_results` selects an operation that cannot give float32 from half operands.
    """
    if reason := _why_float32(op, operands, wanted, analysis):
        return _in_float32(op, operands, Ruling(Category.ALLOW, reason))
    decision = _product_in_half(op, operands, analysis, rules)
    if not decision.takes_half:
        return decision
    is_backward = analysis.context.is_backward(op)
    by_argument = next((state.float32_result for state in operands if state.float32_result), "")
    pattern = ruling.float32_result or by_argument
    if pattern and not is_backward:
        scopes.note_used("float32_results", pattern)
        decision = _with_float32_result(decision, pattern, rules.dtype)
    return _in_float8(decision, ruling, operands, is_backward, rules) if rules.float8 else decision


def _why_float32(op: Op, operands: Sequence[State], wanted: Wanted, analysis: Analysis) -> str:
    """Returns why a product that may take half operands takes float32 ones; empty if it takes half."""
    if any(state.kind == Kind.KEPT for state in operands):
        return KEEP_FLOAT32
    if wanted is Wanted.EXACT:
        return _EXACT
    if _selects(operands) and wanted is Wanted.NO and analysis.gradients.isdisjoint(op.equation.outvars):
        return _SELECTS
    return ""


def _product_in_half(op: Op, operands: Sequence[State], analysis: Analysis, rules: Rules) -> Decision:
    """Decides about a product of half operands. One that makes a weight gradient may give float32."""
    primitive, half = op.equation.primitive.name, rules.dtype
    takes, params = _in_half(op, operands), _half_params(op, half)
    reason = f"{primitive} is on the allow list"
    action, results = Run(takes, params), _halves(op)
    makes_gradient = rules.reduce_dtype is not None and not analysis.gradients.isdisjoint(op.equation.outvars)
    if primitive in _GIVES_FLOAT32 and makes_gradient:
        reason += "; it makes a weight gradient, which it gives in float32"
        params["preferred_element_type"] = _FLOAT32_DTYPE
        action = Run(takes, params, gradients=(half, half), swapped=True)
        results = _results(op, operands, FLOAT32)
    elif primitive in _GIVES_FLOAT32 and any(state.wide_gradient for state in operands):
        gradients = tuple(_FLOAT32_DTYPE if state.wide_gradient else half for state in operands)
        action = Run(takes, params, gradients=gradients)
    return Decision(op, Category.ALLOW, action, results, reason, changed=True)


def _with_float32_result(decision: Decision, pattern: str, half: np.dtype) -> Decision:
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


def _half_params(op: Op, half: np.dtype) -> dict[str, Any]:
    """Returns the parameters of a product that change in half. `precision` only applies to float32."""
    changed = {"preferred_element_type": half, "precision": None}
    return {name: value for name, value in changed.items() if op.equation.params.get(name) is not None}


def _in_float8(
    decision: Decision, ruling: Ruling, operands: Sequence[State], is_backward: bool, rules: Rules
) -> Decision:
    """Returns the decision about a product in fp8; if it stays in bfloat16, the decision says why."""
    action = decision.action
    assert isinstance(action, Run)
    selecting = filter(None, (ruling.rule, *(state.rule for state in operands)))
    rule = min(selecting, key=rules.scopes.index, default=None)
    if why_not := why_not_float8(decision.op.equation, rule):
        return dataclasses.replace(decision, reason=decision.reason + NOT_FP8 + why_not)
    are_arguments = [state.exact_source for state in operands]
    result = action.params.get("preferred_element_type")
    in_fp8 = float8_action(is_backward, are_arguments, result, action.gradients)
    return dataclasses.replace(decision, action=in_fp8, reason=f"{decision.reason}; in fp8")


def _outer(op: Op, operands: Sequence[State], wanted: Wanted, rules: Rules) -> Decision:
    """Decides about a product without a sum, which runs as an element-wise operation does.

    Its gradients are products of half operands. The outer product itself may need float32, such as the
    product of positions and frequencies. In a backward pass it is on the allow list, and `_product` decides.
    """
    half = rules.dtype
    if any(state.kind == Kind.KEPT for state in operands):
        return _in_float32(op, operands, Ruling(Category.INFER, KEEP_FLOAT32))
    decision = _infer(op, operands, wanted, half)
    if decision.takes_half:
        action = Run(_in_half(op, operands), _half_params(op, half))
        return dataclasses.replace(decision, action=action)
    is_constant = all(state.constant for state in operands)
    gives_products = rules.halves_products and op.name == "outer_product" and not is_constant
    if not gives_products or any(state.wide_gradient for state in operands):
        return decision
    action = dataclasses.replace(_in_full(operands), gradients=(half, half))
    # The result is in float32, also where `_infer` would store it in half.
    results = _results(op, operands, FLOAT32) if decision.gives_half else decision.results
    return dataclasses.replace(decision, action=action, results=results, changed=True)


def _infer(op: Op, operands: Sequence[State], wanted: Wanted, half: np.dtype) -> Decision:
    """Decides about an element-wise operation: the widest type of its operands; half only if wanted."""
    known = [
        (var, state, broadcast(op, var, state.kind))
        for var, state in zip(op.equation.invars, operands)
        if state.kind != Kind.OTHER
    ]
    kinds = {kind for _, _, kind in known}
    is_wide = not kinds.isdisjoint(WIDE)
    if is_wide and wanted >= Wanted.WITH_OTHERS:
        return _store_half(op, operands, "products read its result")
    if Kind.HALF not in kinds:
        kind = Kind.FLOAT32 if is_wide else max(kinds, default=Kind.ADAPTS)
        constant = all(state.constant for state in operands)
        results = _results(op, operands, State(max(kind, Kind.ADAPTS), constant=constant))
        return Decision(op, Category.INFER, _in_full(operands), results, "no operand is in half")
    reason = ""
    if is_wide or Kind.ARGUMENT in kinds:
        reason = "an operand is in float32, the widest type"
    elif unfit := [state.number for state in operands if not state.fits]:
        reason = f"{half.name} does not hold the constant {unfit[0]:g}"
    elif wanted <= Wanted.NO and any(map(is_float32, op.equation.outvars)):
        reason = "float32 operations read its result"
    if reason:
        return _in_float32(op, operands, Ruling(Category.INFER, reason))
    if op.traits.squares and half == jnp.float16 and not operands[-1].constant:
        return _store_half(op, operands, f"the derivative of {op.name} squares an input, which may overflow")
    if all(may_be_rounded(op, var, state, kind) for var, state, kind in known):
        reason = "its operands are in half, or take the type of the others"
        return Decision(op, Category.INFER, Run(_in_half(op, operands)), _halves(op), reason, changed=True)
    reason = "one operand is in half; another was computed in float32 and takes its type"
    return _store_half(op, operands, reason)


def _half_sum(op: Op, operands: Sequence[State], pattern: str) -> Decision:
    """Decides about a residual sum that `half_sums` selects: it adds in half.

    A float32 sum with a cast to half would not do: XLA drops the cast and stores the sum in float32.
    """
    reason = f"half_sums='{pattern}' selects it"
    return Decision(op, Category.INFER, Run(_in_half(op, operands)), (HALF_SUM,), reason, changed=True)


def _move(op: Op, operands: Sequence[State], wanted: bool, by_products: bool, backward: bool) -> Decision:
    """Decides about an operation that moves data: each operand keeps its dtype.

    `wanted` says whether any operation wants the first result in half, `by_products` whether products do and
    no operation reads it in float32.
    """
    outvars = op.equation.outvars
    if _casts_first(op, operands[0], by_products):
        # The devices send half, forwards and backwards, as with a cast by hand.
        half = dataclasses.replace(operands[0], kind=Kind.HALF)
        return Decision(op, Category.MOVE, Move((Take.HALF,)), (half,), "products read its result", True)
    results = tuple(moved(op, operands[op.moved_operand(n)], out) for n, out in enumerate(outvars))
    both = len(results) == 1 and _moves_both(op, operands[0], wanted, backward)
    # A constant of a loop that is in half outside of it has a float32 array too, so ask for the half one.
    action = Move(tuple(Take.HALF if state.is_half else Take.AS_IS for state in operands), both)
    changed = both or any(state.is_half for state in operands)
    return Decision(op, Category.MOVE, action, results, "it moves data and keeps its type", changed)


def _casts_first(op: Op, operand: State, by_products: bool) -> bool:
    """Whether a float32 value is cast before it moves between devices, where only products read it."""
    keeps = operand.kind in (Kind.OTHER, Kind.BY_RULE, Kind.HALF) or operand.wide_gradient
    return op.name == "reshard" and by_products and not keeps


def _moves_both(op: Op, operand: State, wanted: bool, backward: bool) -> bool:
    """Whether a value should move in both dtypes.

    The transpose of a copy is a sum, which adds up in float32. A backward pass transposes or reverses weights
    for the gradients of inputs: XLA would reverse the float32 weights of a convolution, and cast them in a
    kernel of its own.
    """
    if operand.is_half:
        return op.traits.gathers or op.traits.copies
    if not wanted:
        return False
    turns = backward and not op.traits.copies
    gathers = op.traits.gathers or (op.name == "reshard" and operand.wide_gradient)
    return (gathers or turns) and operand.kind != Kind.OTHER


def _cast(op: Op, operand: State) -> Decision:
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


def _in_full(operands: Sequence[State]) -> Run:
    """Returns the action of an operation that takes its operands in float32."""
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


def _halves(op: Op) -> tuple[State, ...]:
    """Returns the states of the results of an operation that runs in half."""
    return tuple(HALF if is_float32(var) else OTHER for var in op.equation.outvars)


def _results(op: Op, operands: Sequence[State], state: State) -> tuple[State, ...]:
    """Returns `state` for each float32 result. Results of other dtypes are never changed."""
    other = State(Kind.OTHER, constant=all(state.constant for state in operands))
    return tuple(state if is_float32(var) else other for var in op.equation.outvars)

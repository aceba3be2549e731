"""Decides about products: matmuls, convolutions and outer products."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._jaxpr.primitives import Category
from .demand import Analysis
from .elementwise import decide_elementwise, halves, in_full, in_half, results_of, run_in_float32
from .op import Op
from .plan import Decision, Float8, Product, Run, WeightGradient
from .rules import Rules
from .ruling import Ruling, Why, is_product
from .scopes import by_rule
from .states import FLOAT32, Kind, State
from .wanted import Wanted

_SELECTS = "a matmul with one-hot labels, which selects float32 values for float32 operations"
_EXACT = "only integers are computed from it, and rounding would change them"
# Operations that a GPU runs on half operands with a float32 result. For a convolution of such a result XLA
# would widen the operands. (`diagnostics/_values/reference.py` names the products as well.)
_GIVES_FLOAT32 = ("dot_general",)
_FLOAT32_DTYPE = np.dtype(np.float32)


def by_first_rule(op: Op, ruling: Ruling, operands: Sequence[State], rules: Rules) -> Ruling:
    """Returns the ruling by the first rule that selects the scope or an argument of a product."""
    first = _first_rule(ruling, operands, rules)
    if first is None or not is_product(op):
        return ruling
    # Whatever selects the product, its scope or an operand, the rule that the user wrote first counts.
    pattern, dtype = first
    if dtype != "float32":
        return ruling.otherwise or ruling
    return ruling if ruling.reason else dataclasses.replace(ruling, reason=by_rule(pattern), why=Why.RULE)


def _first_rule(ruling: Ruling, operands: Sequence[State], rules: Rules) -> tuple[str, str] | None:
    selecting = filter(None, (ruling.rule, *(state.rule for state in operands)))
    return min(selecting, key=rules.scopes.index, default=None)


def decide_product(
    op: Op, ruling: Ruling, operands: Sequence[State], wanted: Wanted, analysis: Analysis
) -> Decision:
    """Decides about a product none of whose operands is kept in float32.

    Raises:
        ValueError: `float32_results` selects an operation that cannot give float32 from half operands.
    """
    if reason := _why_float32(op, operands, wanted, analysis):
        return run_in_float32(op, operands, Ruling(Category.ALLOW, reason))
    # From here on it takes half operands. Options say which dtype it gives, and whether it is in fp8.
    decision, rules = _product_in_half(op, operands, analysis), analysis.rules
    is_backward = analysis.context.is_backward(op)
    by_argument = [state.source.float32_result for state in operands if state.source is not None]
    pattern = next(filter(None, (ruling.float32_result, *by_argument)), "")
    # The products of derivatives give half.
    if pattern and not is_backward and analysis.tangents.isdisjoint(op.variables):
        analysis.scopes.note_used("float32_results", pattern)
        decision = _with_float32_result(decision, pattern, rules.dtype)
    return _in_float8(decision, ruling, operands, is_backward, rules) if rules.in_fp8 else decision


def _why_float32(op: Op, operands: Sequence[State], wanted: Wanted, analysis: Analysis) -> str:
    """Returns why a product that may take half operands takes float32 ones; empty if it takes half."""
    if wanted is Wanted.EXACT:
        return _EXACT
    # A product by one-hot labels selects numbers, for float32 operations if nothing wants half. (The demand
    # asks the same before it knows whether the other operand is float32.)
    selects = sorted(state.kind for state in operands) == [Kind.BINARY, Kind.FLOAT32]  # As in a CTC loss.
    is_gradient = analysis.makes_gradient(op) or analysis.is_gradient_of_half(op)
    return _SELECTS if selects and wanted is Wanted.NO and not is_gradient else ""


def _product_in_half(op: Op, operands: Sequence[State], analysis: Analysis) -> Decision:
    """Decides about a product of half operands. One that makes a weight gradient may give float32."""
    primitive, rules, half = op.equation.primitive.name, analysis.rules, analysis.rules.dtype
    takes, params = in_half(op, operands), half_params(op, half)
    reason = f"{primitive} is on the allow list"
    action: Run | Product | WeightGradient = Run(takes, params)
    results = halves(op)
    makes_gradient = rules.reduce_dtype is not None and analysis.makes_gradient(op)
    # In `autocast(grad(f))` this is the product of the gradient. In `grad(autocast(f))` JAX makes it later:
    # here the product says which of its gradients should be in float32.
    if primitive in _GIVES_FLOAT32 and makes_gradient:
        reason += "; it makes a weight gradient, which it gives in float32"
        params["preferred_element_type"] = _FLOAT32_DTYPE
        action = WeightGradient(takes, params)
        results = results_of(op, operands, FLOAT32)
    elif primitive in _GIVES_FLOAT32 and any(state.wide_gradient for state in operands):
        gradients = tuple(_FLOAT32_DTYPE if state.wide_gradient else half for state in operands)
        action = Product(takes, gradients, params, params)
    return Decision(op, Category.ALLOW, action, results, reason, changed=True)


def half_params(op: Op, half: np.dtype) -> dict[str, Any]:
    """Returns the parameters of a product that change in half."""
    # `precision` only applies to float32. A parameter that the program does not give stays as it is: JAX then
    # takes the dtype of the operands.
    changed = {"preferred_element_type": half, "precision": None}
    return {name: value for name, value in changed.items() if op.equation.params.get(name) is not None}


def _with_float32_result(decision: Decision, pattern: str, half: np.dtype) -> Decision:
    """Returns the decision about a product of half operands that gives float32.

    Raises:
        ValueError: the operation cannot give float32 from half operands.
    """
    op, action = decision.op, decision.action
    assert isinstance(action, (Run, Product))
    if op.equation.primitive.name not in _GIVES_FLOAT32:
        raise ValueError(
            f"float32_results='{pattern}' selects {op.name} in the scope '{op.scope}'. For a float32 result "
            "XLA would run it on float32 operands. Write a narrower pattern, or rules={'...': 'float32'}."
        )
    # The Tensor Core sums in float32, so the result is not rounded. The products of the derivatives take half
    # operands and give half, as they do for other products.
    params = {**action.params, "preferred_element_type": _FLOAT32_DTYPE}
    gradients = action.gradients if isinstance(action, Product) else (half, half)
    action = Product(action.operands, gradients, half_params(op, half), params)
    reason = f"{decision.reason}; float32_results='{pattern}' keeps its result"
    return dataclasses.replace(decision, action=action, results=(FLOAT32,), reason=reason, why=Why.OPTION)


def _in_float8(
    decision: Decision, ruling: Ruling, operands: Sequence[State], is_backward: bool, rules: Rules
) -> Decision:
    """Returns the decision about a product in fp8; if it stays in bfloat16, the decision says why."""
    from ..._float8.action import float8_action, why_not_float8  # Loaded when a user asks for fp8.

    action = decision.action
    assert isinstance(action, (Run, Product, WeightGradient))
    if why_not := why_not_float8(decision.op.equation, _first_rule(ruling, operands, rules)):
        return dataclasses.replace(decision, not_fp8=why_not)
    # Weights are cast to fp8 from float32, without a rounding to bfloat16 on the way (`float8_action`).
    are_arguments = [state.source is not None for state in operands]
    result = action.params.get("preferred_element_type")
    gradients = action.gradients if isinstance(action, Product) else ()
    in_fp8 = Float8(*float8_action(is_backward, are_arguments, result, gradients))
    return dataclasses.replace(decision, action=in_fp8, reason=f"{decision.reason}; in fp8")


def decide_outer(op: Op, operands: Sequence[State], wanted: Wanted, rules: Rules) -> Decision:
    """Decides about a product without a sum, which runs as an element-wise operation does."""
    # In a backward pass it is on the allow list, and `decide_product` decides.
    half = rules.dtype
    decision = decide_elementwise(op, operands, wanted, half)
    if decision.takes_half:
        action = Run(in_half(op, operands), half_params(op, half))
        return dataclasses.replace(decision, action=action)
    # The outer product itself may need float32, such as that of positions and frequencies. Its gradients sum,
    # so they are products as others are, and take half operands.
    is_constant = all(state.constant for state in operands)
    gives_products = rules.halves_products and op.name == "outer_product" and not is_constant
    if not gives_products or any(state.wide_gradient for state in operands):
        return decision
    action = Product(in_full(operands).operands, (half, half), half_params(op, half))
    # The result is in float32, also where `decide_elementwise` would store it in half.
    results = results_of(op, operands, FLOAT32) if decision.gives_half else decision.results
    return dataclasses.replace(decision, action=action, results=results, changed=True)


def widens(op: Op, half: np.dtype) -> bool:
    """Whether a product of the program's own half operands gives float32."""
    equation = op.equation
    return (
        equation.primitive.name == "dot_general"
        and equation.params.get("preferred_element_type") == jnp.float32
        and all(var.aval.dtype == half for var in equation.invars)
    )

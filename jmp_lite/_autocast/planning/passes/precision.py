"""The pass that gives float32 matmuls the precision of `jax_default_matmul_precision`.

autocast traces a program without the option (`_jaxpr/precision.py`), and matmuls in half need none.
"""

import dataclasses

from ...._jaxpr.precision import params_with_precision
from ...._jaxpr.primitives import Category
from ...._jaxpr.read import is_float32
from ...._jaxpr.scopes import AUTOCAST_SCOPE
from ..op import Op
from ..plan import Decision, Plan, Product, Run
from ..rules import Rules


def precision(plan: Plan, rules: Rules) -> Plan:
    """Adds the configured precision to the parameters of matmuls that stay in float32."""
    if rules.precision is None:
        return plan
    return plan.with_decisions([_with_precision(each, plan, rules) for each in plan.decisions])


def _with_precision(decision: Decision, plan: Plan, rules: Rules) -> Decision:
    action, op = decision.action, decision.op
    if decision.category is Category.CALL or not isinstance(action, (Run, Product)) or decision.takes_half:
        return decision
    # Empty for a matmul with a precision of its own, which it keeps. An operation without a plan of its own,
    # such as a Pallas kernel, may hold matmuls too.
    params = params_with_precision(op.equation, rules.precision)
    if not params or _is_of_another_autocast(op, plan):
        return decision
    action = dataclasses.replace(action, params={**params, **action.params})
    return dataclasses.replace(decision, action=action, changed=True)


def _is_of_another_autocast(op: Op, plan: Plan) -> bool:
    """Whether an operation is a half matmul of another autocast."""
    # That autocast has run without the option, and left it out on purpose.
    is_inside = AUTOCAST_SCOPE in plan.analysis.context.scope_of(op)
    is_product = op.traits.category is Category.ALLOW
    return is_product and is_inside and not any(map(is_float32, op.equation.invars))

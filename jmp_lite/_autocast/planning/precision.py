"""Gives the products that stay in float32 the precision of `jax_default_matmul_precision`.

autocast traces a program without the option (`_jaxpr/precision.py`).
"""

import dataclasses
from typing import Any

from ..._jaxpr.precision import params_with_precision
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import AUTOCAST_SCOPE, is_float32
from .op import Around
from .plan import Bind, Decision


def with_configured_precision(decision: Decision, precision: Any, around: Around) -> Decision:
    """Returns a decision by which products without a precision of their own run in another precision.

    Products that autocast brings to half keep none, and so do those of another autocast inside.
    """
    action, op = decision.action, decision.op
    if precision is None or not isinstance(action, Bind) or decision.takes_half:
        return decision
    is_product, is_inside = op.traits.category is Category.ALLOW, AUTOCAST_SCOPE in around.scope_of(op)
    if is_product and is_inside and not any(map(is_float32, op.equation.invars)):
        return decision
    params = params_with_precision(op.equation, precision)
    if not params:
        return decision
    action = dataclasses.replace(action, params={**params, **action.params})
    return dataclasses.replace(decision, action=action, changed=True)

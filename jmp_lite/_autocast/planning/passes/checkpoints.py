"""The pass that lets a `jax.checkpoint` keep float32 inputs in bfloat16 for the backward pass.

`jax.checkpoint` keeps the inputs of a function for the backward pass. In a deep stack of layers that is the
residual stream in front of each layer, and in float32 it takes twice the memory that it takes with casts by
hand. The forward pass, and with it the loss, still reads the float32 stream.
"""

import dataclasses
import enum
from collections.abc import Sequence

import jax.numpy as jnp

from ...._jaxpr.primitives import Category
from ...._jaxpr.read import Var, is_literal, open_jaxpr
from ...._jaxpr.scopes import is_differentiated
from ..op import Op
from ..plan import Call, Decision, Plan, Skip, Take
from ..rules import Rules
from ..states import FLOAT32


class _Part(enum.IntEnum):
    """What a float32 value is to the stream. Among several operands the largest decides."""

    NONE = 0
    STREAM = 1  # The stream, or a linear function of it: its derivative does not depend on the stream.
    NORM = 2  # What a norm computes from the stream.


# A transformer reads its stream in three ways: matmuls take it in half in any case, norms compute from it
# what matmuls take in half, and residual sums have a derivative that does not depend on it. So a bfloat16
# copy is enough for the backward pass.
_LINEAR = frozenset({"add", "concatenate", "neg", "select_n", "sub"})
_IN_NORMS = frozenset({"div", "integer_pow", "max", "mul", "reduce_sum", "rsqrt", "sqrt", "square"})
_HALVES = frozenset({Take.HALF, Take.BROADCAST})
_CALLS = frozenset({"closed_call", "custom_jvp_call", "jit"})


def checkpoints(plan: Plan, rules: Rules) -> Plan:
    """Finds what each `jax.checkpoint` of a plan may keep in bfloat16."""
    # Float16 has too small a range: a stream above 65504, which is harmless in the forward pass, would make
    # the gradients infinite.
    if rules.dtype != jnp.bfloat16 or not any(op.name == "remat2" for op in plan.analysis.ops):
        return plan
    return plan.with_decisions([_with_kept(decision, plan) for decision in plan.decisions])


def _with_kept(decision: Decision, plan: Plan) -> Decision:
    action = decision.action
    if not isinstance(action, Call) or not _may_keep(decision.op):
        return decision
    (inside,) = action.inner
    inputs = zip(inside.inner.operands, open_jaxpr(inside.inner.jaxpr).invars)
    kept = tuple(
        index
        for index, var in inputs
        if _is_float32_array(decision.op.equation.invars[index], plan) and _is_stream(inside.plan, var)
    )
    return dataclasses.replace(decision, action=dataclasses.replace(action, kept=kept))


def _may_keep(op: Op) -> bool:
    """Whether an operation is a `jax.checkpoint` without a policy."""
    # A policy may save further values of the forward pass, and the copies would not match them. One that
    # `jax.grad` has made (`differentiated`) is the backward pass itself: its inputs are kept already.
    if op.name != "remat2" or op.equation.effects:
        return False
    return op.equation.params["policy"] is None and not is_differentiated(op.equation)


def _is_float32_array(var: Var, plan: Plan) -> bool:
    return not is_literal(var) and plan.states[var] == FLOAT32 and var.aval.ndim > 0


def _is_stream(plan: Plan, var: Var) -> bool:
    """Whether matmuls, norms and residual sums alone read an input of a plan."""
    results = _follow(plan, {var: _Part.STREAM})
    # Who reads a norm that leaves the function is not known here.
    return results is not None and _Part.NORM not in results


def _follow(plan: Plan, parts: dict[Var, _Part]) -> list[_Part] | None:
    """Classifies the outputs as stream or norm. None if an operation that is neither reads the stream."""

    def part_of(var: Var) -> _Part:
        return _Part.NONE if is_literal(var) else parts.get(var, _Part.NONE)

    for decision in plan.decisions:
        taken = list(map(part_of, decision.op.equation.invars))
        if any(taken):
            results = _results(decision, taken)
            if results is None:
                return None
            # What is in half has lost the digits already that the copy lacks.
            for var, state, part in zip(decision.op.equation.outvars, decision.results, results):
                parts[var] = _Part.NONE if state.is_half else part
    return list(map(part_of, open_jaxpr(plan.jaxpr).outvars))


def _results(decision: Decision, taken: list[_Part]) -> Sequence[_Part] | None:
    """Returns which part each result of an operation is, given that of its operands; None as in `_follow`."""
    op, count = decision.op, len(decision.op.equation.outvars)
    if decision.category is Category.CALL:
        return _results_of_call(decision, taken) if op.name in _CALLS else None
    if isinstance(decision.action, Skip):  # A cast that changes nothing, or a part of a region.
        return taken
    if decision.takes:  # An operation, not a region: only what it takes in float32 counts.
        taken = [_Part.NONE if take in _HALVES else part for take, part in zip(decision.takes, taken)]
    if not any(taken):
        return (_Part.NONE,) * count
    if decision.category is Category.MOVE:
        return taken if count == len(taken) else (max(taken),) * count
    if op.name in _LINEAR or _scales(op):
        return (max(taken),)
    return (_Part.NORM,) if op.name in _IN_NORMS else None


def _scales(op: Op) -> bool:
    """Whether an operation multiplies or divides a value by a number of the program."""
    # A `div` by the stream is not linear.
    by = {"div": op.equation.invars[1:], "mul": op.equation.invars}.get(op.name, ())
    return any(map(is_literal, by))


def _results_of_call(decision: Decision, taken: list[_Part]) -> Sequence[_Part] | None:
    op, action = decision.op, decision.action
    (inner,), (plan,) = op.inner, decision.inner
    # A call in which nothing changes is a `Run`, whose jaxpr takes the operands as they are.
    enter = action.inner[0].enter if isinstance(action, Call) else (Take.AS_IS,) * len(inner.operands)
    entering = zip(open_jaxpr(inner.jaxpr).invars, inner.operands, enter)
    return _follow(plan, {var: taken[index] for var, index, take in entering if take is not Take.HALF})

"""Plans a jaxpr before anything is computed: the precision in which every operation runs, and the reason.

A plan is made in five passes over the equations of a jaxpr:

1. Reading, forwards (`op`, `activations`): what each operation is, who reads its results, and which
   operations together are one activation function.
2. Ruling, forwards (`ruling`): what the user's options and the scopes say of each operation, and an estimate
   of the values that stay float32 in any case.
3. Demand, backwards (`demand`): does a product want a value in half, and does an operation read it in
   float32?
4. Decision, forwards (`decide`): the dtype of each operation, by its ruling, the demand and the states of its
   operands.
5. Pairs (`pairs`): the half values whose gradients need a path in float32.

The first is made once for a jaxpr, the second and third once for each place in the program where it is
called, the last two once for each set of inputs. A `reduce_dtype`, and a `while` loop, add a search of their
own (`dependence`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._float8.quantize import BACKWARD, FORWARD
from ..._float8.selection import FLOAT8, NOT_FP8, why_not_float8
from ..._jaxpr.bind import is_reverse_only
from ..._jaxpr.inner import Inner
from ..._jaxpr.precision import configured_precision
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import AUTOCAST_SCOPE, Array, Jaxpr, Var, constants, is_float32, is_literal, open_jaxpr
from .activations import inner_members
from .decide import (
    decide_cast,
    decide_half_sum,
    decide_infer,
    decide_inside,
    decide_kept,
    decide_move,
    decide_outer,
    decide_product,
    with_configured_precision,
    with_float32_result,
)
from .demand import Analysis, DemandPass, Wanted, wanted_inside
from .op import Context, Op
from .pairs import find_pairs, with_paths
from .plan import Activation, Call, Decision, Formats, Plan, Run, Skip, Take, rounded
from .rules import Rules
from .ruling import Ruling, estimate_of_state
from .scopes import Scopes
from .states import BY_RULE, FLOAT32, HALF, HALF_SUM, OTHER, Kind, State, entering, join, leaving


class Planner:
    """Makes each plan once, by a set of rules. One planner serves one call of an autocast function."""

    def __init__(self, rules: Rules) -> None:
        self.rules = dataclasses.replace(rules, precision=configured_precision())
        self.scopes = Scopes(rules)
        self._plans: dict[Any, Plan] = {}
        self._demand_pass = DemandPass(self.rules, self.scopes)

    def argument(self, value: Array, path: str) -> State:
        """Returns the state of the argument at `path`. A constant has an empty path."""
        if getattr(value, "dtype", None) != jnp.float32:
            return OTHER
        if self.scopes.rule_for(path):
            return BY_RULE
        if not value.ndim:
            return State(Kind.ADAPTS, exact_source=True)
        return State(
            Kind.ARGUMENT,
            exact_source=True,
            wide_gradient=bool(path) and self.rules.reduce_dtype is not None,
            float32_result=self.rules.float32_result_for(path) if path else "",
            float8_rule=self.rules.pattern_for(path) if path else None,
        )

    def constant(self, value: Array) -> State:
        """Returns the state of a constant: a literal if its value is known, else as an argument."""
        number = _number(value) if getattr(value, "dtype", None) == jnp.float32 else None
        if number is not None:
            return State(Kind.LITERAL, number, constant=True)
        return self.argument(value, path="")

    def literal(self, var: Var) -> State:
        """Returns the state of a constant written into an equation."""
        if not is_float32(var):
            return State(Kind.OTHER, constant=True)
        return self.constant(np.asarray(var.val, np.float32))

    def plan(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[State],
        wanted: Sequence[Wanted],
        context: Context = Context(),  # noqa: B008
    ) -> Plan:
        """Plans a jaxpr."""
        states = (*map(self.constant, constants(jaxpr)), *inputs)
        key = (id(open_jaxpr(jaxpr)), states, tuple(wanted), context)
        if key not in self._plans:
            estimates = tuple(map(estimate_of_state, states))
            analysis = self._demand_pass.analyse(jaxpr, tuple(wanted), estimates, context)
            self._plans[key] = self._make(jaxpr, states, analysis)
        return self._plans[key]

    def _make(self, jaxpr: Jaxpr, states: tuple[State, ...], analysis: Analysis) -> Plan:
        inside, context = analysis.inside, analysis.context
        known = dict(zip((*inside.constvars, *inside.invars), states, strict=True))
        state_of = lambda var: self.literal(var) if is_literal(var) else known[var]
        decisions: list[Decision] = []
        for op, ruling in zip(analysis.ops, analysis.rulings):
            operands = [state_of(var) for var in op.equation.invars]
            wanted = analysis.demand.of_results(op)
            decision = self._decide(op, ruling, operands, wanted, analysis)
            decisions.append(with_configured_precision(decision, self.rules.precision, context))
            if wanted is Wanted.BY_PRODUCTS_ONLY and analysis.activations.may_end(op):
                decisions[-1] = _activation(analysis, decisions, known) or decisions[-1]
            known.update(zip(op.equation.outvars, decisions[-1].results, strict=True))
        ends = [index for index, decision in enumerate(decisions) if isinstance(decision.action, Activation)]
        for index in inner_members(analysis.ops, analysis.activations, ends):
            decisions[index] = dataclasses.replace(decisions[index], action=Skip(), reason=_PART)
        if context.recomputed:
            decisions = [dataclasses.replace(each, action=rounded(each.action)) for each in decisions]
        pairs = find_pairs(inside, decisions, state_of)
        decisions = [with_paths(decision, pairs) for decision in decisions]
        return Plan(
            jaxpr,
            context,
            states,
            tuple(decisions),
            tuple(map(state_of, inside.outvars)),
            analysis.demand,
            pairs,
            changed=any(decision.changed for decision in decisions),
            float8=any(each.in_float8 or any(plan.float8 for plan in each.inner) for each in decisions),
        )

    def _decide(
        self, op: Op, ruling: Ruling, operands: list[State], wanted: Wanted, analysis: Analysis
    ) -> Decision:
        half = self.rules.dtype
        if ruling.category is Category.CALL:
            return self._decide_call(op, operands, analysis)
        if ruling.reason:
            return decide_kept(op, operands, ruling, half)
        if op.is_cast:
            return decide_cast(op, operands[0])
        if ruling.half_sum:
            return decide_half_sum(op, operands, ruling.half_sum)
        is_constant = all(state.constant for state in operands)
        match ruling.category:
            case Category.ALLOW if not (op.name == "outer_product" and is_constant):
                reduces = self.rules.reduce_dtype is not None and analysis.makes_weight_gradient(op)
                decision = decide_product(op, operands, self.rules, wanted, reduces)
                if pattern := self._float32_result(decision, ruling, operands, analysis):
                    decision = with_float32_result(decision, pattern, half)
                return self._with_float8(decision, operands, analysis) if self.rules.float8 else decision
            case _ if op.name in ("outer_product", "elementwise_product"):
                return decide_outer(op, operands, self.rules, wanted)
            case Category.MOVE:
                is_wanted = op.equation.outvars[0] in analysis.demand.wanted
                return decide_move(op, operands, is_wanted, analysis.context.is_backward(op))
        return decide_infer(op, operands, wanted, half)

    def _float32_result(
        self, decision: Decision, ruling: Ruling, operands: Sequence[State], analysis: Analysis
    ) -> str:
        """Returns the pattern of `float32_results` that selects a product of half operands, if any."""
        is_backward = analysis.context.is_backward(decision.op)
        if not self.rules.float32_results or not decision.takes_half or is_backward:
            return ""
        by_argument = (state.float32_result for state in operands if state.float32_result)
        pattern = ruling.float32_result or next(by_argument, "")
        if pattern:
            self.scopes.note_used("float32_results", pattern)
        return pattern

    def _with_float8(self, decision: Decision, operands: Sequence[State], analysis: Analysis) -> Decision:
        """Returns the decision about a product in fp8; if it stays in bfloat16, the decision says why."""
        action = decision.action
        if not decision.takes_half or not isinstance(action, Run):
            return decision
        by_scope = self.rules.pattern_for(analysis.context.scope_of(decision.op))
        rules = filter(None, (by_scope, *(state.float8_rule for state in operands)))
        pattern, dtype = min(rules, key=self.rules.scopes.index, default=("", ""))
        if pattern and dtype != FLOAT8:
            why_not = f"the rule for '{pattern}'"
        else:
            why_not = why_not_float8(decision.op.equation, forced=dtype == FLOAT8)
        if why_not:
            return dataclasses.replace(decision, reason=decision.reason + NOT_FP8 + why_not)
        # JAX's transpose of a product has the cotangent as its first operand.
        first = BACKWARD if analysis.context.is_backward(decision.op) else FORWARD
        # XLA writes a float32 activation once, in bfloat16, for all its readers. A weight is in memory in
        # float32.
        half = self.rules.dtype
        sources = tuple(np.dtype(np.float32) if state.exact_source else half for state in operands)
        gradients = action.gradients or (half, half)
        action = dataclasses.replace(action, gradients=gradients, float8=Formats((first, FORWARD), sources))
        return dataclasses.replace(decision, action=action, reason=f"{decision.reason}; in fp8")

    def _decide_call(self, op: Op, operands: list[State], analysis: Analysis) -> Decision:
        wanted = [analysis.demand.of_var(var) for var in op.equation.outvars]
        plans = [self._plan_inside(op, inner, operands, wanted, analysis) for inner in op.inner]
        results = _results_of_call(op, plans, wanted)
        # The handler of a linear solve brings an overflow of the right side to the finite check, which the
        # solver would hide. Another autocast has done so for its own solvers.
        solves = op.name == "custom_linear_solve" and AUTOCAST_SCOPE not in analysis.context.scope_of(op)
        has_half = any(state.is_half for state in (*operands, *results))
        changed = solves or has_half or any(plan.changed for plan in plans)
        action: Run | Call = Run((Take.AS_IS,) * len(operands))
        if changed:
            inside = decide_inside(op, operands, plans, results)
            action = Call(_handler(op, operands, plans), inside, op.recomputes)
        reason = "decided inside, operation by operation"
        return Decision(op, Category.CALL, action, results, reason, changed, tuple(plans))

    def _plan_inside(
        self, op: Op, inner: Inner, operands: list[State], wanted: list[Wanted], analysis: Analysis
    ) -> Plan:
        inputs = [entering(operands[index], role) for index, role in zip(inner.operands, inner.roles)]
        if op.name == "custom_linear_solve":  # It takes no pairs: half matrices enter in float32.
            inputs = [FLOAT32 if state.is_half else state for state in inputs]
        context = self._demand_pass.context(op, inner, analysis)
        while True:
            plan = self.plan(inner.jaxpr, inputs, wanted_inside(inner, wanted), context)
            # A residual stream in half is carried in half, so that a backward pass keeps it in half.
            ends = enumerate(plan.results[: inner.carried])
            streams = [inner.constants + k for k, state in ends if state.half_sum]
            streams = [number for number in streams if inputs[number] == FLOAT32] if op.name == "scan" else []
            if not streams:
                return plan
            inputs = [HALF_SUM if number in streams else state for number, state in enumerate(inputs)]


def _results_of_call(op: Op, plans: Sequence[Plan], wanted: Sequence[Wanted]) -> tuple[State, ...]:
    """Returns the state of each result of a call: of several branches, the wider one."""
    results: dict[int, State] = {}
    for inner, plan in zip(op.inner, plans):
        for index, carry, state in zip(inner.results, inner.carries, plan.results):
            if index is not None:
                is_scan = op.name == "scan"
                is_wide = carry and not (is_scan and state.half_sum)
                state = leaving(state, is_wide, is_scan and wanted[index] > Wanted.NO)
                results[index] = join(results[index], state) if index in results else state
    return tuple(results[index] for index in range(len(op.equation.outvars)))


def _handler(op: Op, operands: Sequence[State], plans: Sequence[Plan]) -> str:
    """Returns the name of the handler of a call.

    JAX transposes the products in the rule of a `custom_jvp` itself. Where they need a dtype of their own, or
    the rule has no forward mode, autocast makes a backward rule of it.
    """
    if op.name != "custom_jvp_call":
        return op.name
    own_dtypes = any(state.wide_gradient for state in operands) or any(plan.float8 for plan in plans)
    return "custom_vjp_call" if own_dtypes or is_reverse_only(op.equation) else op.name


_PART = "part of a function of half values, computed in float32"


def _activation(
    analysis: Analysis, decisions: Sequence[Decision], known: dict[Var, State]
) -> Decision | None:
    """Returns a decision to compute the last operation as an activation function; None if it is none."""
    last, activations = decisions[-1], analysis.activations
    (out,) = last.op.equation.outvars
    members = [decisions[index] for index in sorted(activations.members[out])]
    in_half = all(known[var].is_half for var in activations.sources[out])
    if not in_half or not {member.category for member in members} <= {Category.DENY, Category.INFER}:
        return None
    action = Activation(activations.sources[out], tuple(member.op.equation for member in members))
    reason = "a function of half values, computed in float32; only products read it"
    return Decision(last.op, last.category, action, (HALF,), reason, changed=True)


def _number(value: Array) -> float | None:
    """Returns the value of a scalar that is known while tracing."""
    if value.ndim:
        return None
    try:
        return float(value)
    except jax.errors.ConcretizationTypeError:
        return None

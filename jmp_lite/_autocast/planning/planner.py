"""Plans a jaxpr before anything is computed: the precision in which every operation runs, and the reason.

A plan is made in three passes. The first pass goes backwards (`demand`). It asks two questions about each
value: does a product want the value in half, and does an operation read the value in float32? The second pass
goes forwards and decides (`decide`), by the category of each operation and the states of its operands. The
third pass finds the half values whose gradients need a path in float32 (`pairs`). Each jaxpr is planned once
for each set of inputs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxpr.bind import is_reverse_only
from ..._jaxpr.precision import configured_precision
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import (
    AUTOCAST_SCOPE,
    Array,
    Jaxpr,
    Var,
    constants,
    is_float32,
    is_literal,
    open_jaxpr,
)
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
    with_float32_result,
)
from .demand import DemandPass, Facts, Wanted, wanted_inside
from .float8 import NOT_FP8, in_float8, why_not_float8
from .marks import Mark
from .op import Around, Course, Op
from .pairs import find_pairs, paired_results
from .plan import Activation, Bind, Call, Decision, Float8, Move, Pairs, Plan, Skip, Take, rounded
from .precision import with_configured_precision
from .rules import FLOAT8, Rules
from .scopes import Scopes
from .states import FIRM, HALF, OTHER, Kind, State, entering, join, leaving


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
            return dataclasses.replace(FIRM, full=True)
        if not value.ndim:
            return State(Kind.FREE, leaf=True)
        reduced = bool(path) and self.rules.reduce_dtype is not None
        pattern = self.rules.float32_result_for(path) if path else ""
        float8_rule = self.rules.pattern_for(path) if path else None
        return State(Kind.OPEN, leaf=True, reduced=reduced, float32_result=pattern, float8_rule=float8_rule)

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
        around: Around = Around(),  # noqa: B008
    ) -> Plan:
        """Plans a jaxpr.

        Args:
            jaxpr: the jaxpr, closed or open.
            inputs: the state of each input.
            wanted: for each output, how it is wanted in half.
            around: the part of the program around the jaxpr.
        """
        states = (*map(self.constant, constants(jaxpr)), *inputs)
        key = (id(open_jaxpr(jaxpr)), states, tuple(wanted), around)
        if key not in self._plans:
            facts = self._demand_pass.facts(jaxpr, tuple(wanted), tuple(map(_mark_of, states)), around)
            self._plans[key] = self._make(jaxpr, states, facts)
        return self._plans[key]

    def _make(self, jaxpr: Jaxpr, states: tuple[State, ...], facts: Facts) -> Plan:
        inside = facts.inside
        known = dict(zip((*inside.constvars, *inside.invars), states, strict=True))
        state_of = lambda var: self.literal(var) if is_literal(var) else known[var]
        decisions: list[Decision] = []
        for op, course in zip(facts.ops, facts.courses):
            operands = [state_of(var) for var in op.equation.invars]
            wanted = facts.demand.of_results(op)
            decision = self._decide(op, course, operands, wanted, facts)
            decisions.append(with_configured_precision(decision, self.rules.precision, facts.around))
            if wanted is Wanted.BY_PRODUCTS_ONLY and facts.anatomy.may_end(op):
                decisions[-1] = _activation(facts, decisions, known) or decisions[-1]
            known.update(zip(op.equation.outvars, decisions[-1].results, strict=True))
        ends = [index for index, decision in enumerate(decisions) if isinstance(decision.action, Activation)]
        for index in inner_members(facts.ops, facts.anatomy, ends):
            decisions[index] = dataclasses.replace(decisions[index], action=Skip(), reason=_PART)
        if facts.around.recomputed:
            decisions = [
                dataclasses.replace(decision, action=rounded(decision.action)) for decision in decisions
            ]
        pairs = find_pairs(inside, decisions, state_of)
        decisions = [_with_paths(decision, pairs) for decision in decisions]
        results = tuple(map(state_of, inside.outvars))
        changed = any(decision.changed for decision in decisions)
        float8 = any(
            isinstance(decision.action, Float8) or any(plan.float8 for plan in decision.inner)
            for decision in decisions
        )
        return Plan(
            jaxpr, facts.around, states, tuple(decisions), results, facts.demand, pairs, changed, float8
        )

    def _decide(
        self, op: Op, course: Course, operands: list[State], wanted: Wanted, facts: Facts
    ) -> Decision:
        half = self.rules.dtype
        if course.category is Category.CALL:
            return self._decide_call(op, operands, facts)
        if course.reason:
            return decide_kept(op, operands, course, half)
        if op.is_cast:
            return decide_cast(op, operands[0])
        if course.half_sum:
            return decide_half_sum(op, operands, course.half_sum)
        is_constant = all(state.constant for state in operands)
        match course.category:
            case Category.ALLOW if not (op.name == "outer_product" and is_constant):
                reduces = self.rules.reduce_dtype is not None and facts.makes_weight_gradient(op)
                decision = decide_product(op, operands, self.rules, wanted, reduces)
                if pattern := self._float32_result(decision, course, operands, facts):
                    decision = with_float32_result(decision, pattern)
                return self._with_float8(decision, operands, facts) if self.rules.float8 else decision
            case _ if op.name in ("outer_product", "elementwise_product"):
                return decide_outer(op, operands, self.rules, wanted)
            case Category.MOVE:
                is_wanted = op.equation.outvars[0] in facts.demand.wanted
                return decide_move(op, operands, is_wanted, facts.around.is_backward(op))
        return decide_infer(op, operands, wanted, half)

    def _float32_result(
        self, decision: Decision, course: Course, operands: Sequence[State], facts: Facts
    ) -> str:
        """Returns the pattern of `float32_results` that selects a product of half operands, if any."""
        if not self.rules.float32_results or not decision.takes_half or facts.around.is_backward(decision.op):
            return ""
        by_argument = (state.float32_result for state in operands if state.float32_result)
        pattern = course.float32_result or next(by_argument, "")
        if pattern:
            self.scopes.select("float32_results", pattern)
        return pattern

    def _with_float8(self, decision: Decision, operands: Sequence[State], facts: Facts) -> Decision:
        """Returns the decision about a product in fp8; if it stays in bfloat16, the decision says why."""
        if not decision.takes_half:
            return decision
        by_scope = self.rules.pattern_for(facts.around.scope_of(decision.op))
        rules = filter(None, (by_scope, *(state.float8_rule for state in operands)))
        pattern, dtype = min(rules, key=self.rules.scopes.index, default=("", ""))
        if pattern and dtype != FLOAT8:
            why_not = f"the rule for '{pattern}'"
        else:
            why_not = why_not_float8(decision.op.equation, forced=dtype == FLOAT8)
        if why_not:
            return dataclasses.replace(decision, reason=decision.reason + NOT_FP8 + why_not)
        return in_float8(decision, operands, facts.around.is_backward(decision.op))

    # Calls: operations that run jaxprs.

    def _decide_call(self, op: Op, operands: list[State], facts: Facts) -> Decision:
        wanted = [facts.demand.of_var(var) for var in op.equation.outvars]
        is_scan = op.name == "scan"
        plans = []
        results: dict[int, State] = {}
        for inner in op.inner:
            inputs = [entering(operands[index], role) for index, role in zip(inner.operands, inner.roles)]
            if op.name == "custom_linear_solve":  # It takes no pairs: half matrices enter in float32.
                inputs = [FIRM if state.is_half else state for state in inputs]
            around = self._demand_pass.around(op, inner, facts)
            plan = self.plan(inner.jaxpr, inputs, wanted_inside(inner, wanted), around)
            plans.append(plan)
            for index, carry, state in zip(inner.results, inner.carries, plan.results):
                if index is not None:
                    state = leaving(state, carry, bool(is_scan and wanted[index]))
                    results[index] = join(results[index], state) if index in results else state
        states = tuple(results[index] for index in range(len(op.equation.outvars)))
        changed = any(plan.changed for plan in plans) or any(state.is_half for state in (*operands, *states))
        if op.name == "custom_linear_solve" and AUTOCAST_SCOPE not in facts.around.scope_of(op):
            changed = True  # Its handler brings an overflow to the check. Another autocast has done so.
        action = Bind((Take.AS_IS,) * len(operands))
        if changed:
            handler = op.name
            if handler == "custom_jvp_call" and (
                any(state.reduced for state in operands)
                or any(plan.float8 for plan in plans)
                or is_reverse_only(op.equation)
            ):
                # JAX transposes the products of a `custom_jvp` itself; a backward rule gives them their
                # dtype.
                handler = "custom_vjp_call"
            action = Call(handler, decide_inside(op, operands, plans, states), op.recomputes)
        reason = "decided inside, operation by operation"
        return Decision(op, Category.CALL, action, states, reason, changed, tuple(plans))


def _mark_of(state: State) -> Mark:
    """Returns the mark of a value in the given state, for the backward pass."""
    if state.full:
        return Mark.FULL
    if state.binary:
        return Mark.BINARY
    marks = {Kind.LITERAL: Mark.CONSTANT, Kind.OPEN: Mark.ARGUMENT, Kind.FIRM: Mark.FIRM}
    return Mark.CONSTANT if state.constant else marks.get(state.kind, Mark.UNKNOWN)


def _with_paths(decision: Decision, pairs: Pairs) -> Decision:
    """Returns a decision whose action knows which of its half results float32 operations read."""
    action, outvars = decision.action, decision.op.equation.outvars
    if isinstance(action, Move) and not action.both and not pairs.read.isdisjoint(outvars):
        action = dataclasses.replace(action, paths=tuple(var in pairs.read for var in outvars))
    elif isinstance(action, Call) and (paired := paired_results(decision, action, pairs.read)):
        action = dataclasses.replace(action, paired=paired)
    return decision if action is decision.action else dataclasses.replace(decision, action=action)


_PART = "part of a function of half values, computed in float32"


def _activation(facts: Facts, decisions: Sequence[Decision], known: dict[Var, State]) -> Decision | None:
    """Returns a decision to compute the last operation as an activation function; None if it is none."""
    last, anatomy = decisions[-1], facts.anatomy
    (out,) = last.op.equation.outvars
    members = [decisions[index] for index in sorted(anatomy.members[out])]
    in_half = all(known[var].is_half for var in anatomy.sources[out])
    if not in_half or not {member.category for member in members} <= {Category.DENY, Category.INFER}:
        return None
    action = Activation(anatomy.sources[out], tuple(member.op.equation for member in members))
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

"""Plans a jaxpr before anything is computed: in which precision every operation runs, and why.

A plan is made in three passes. The first pass goes forwards as if every result were wanted in half, and finds
the operations that end in float32 all the same. The second pass goes backwards and asks of every value
whether a product wants it in half, and whether an operation reads it in float32. The third pass goes forwards
again and decides, by the list of each operation and the states of its operands.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._tree import KEEP_FLOAT32_NAME
from .activations import Anatomy, anatomy, inner_members
from .binding import is_reverse_only
from .decide import (
    decide_cast,
    decide_infer,
    decide_inside,
    decide_move,
    decide_outer,
    decide_product,
    in_float32,
)
from .demand import find_demand, wanted_inside
from .gradients import BackwardPass
from .jaxprs import (
    Array,
    Equation,
    Inner,
    Jaxpr,
    Var,
    call_scope,
    configured_precisions,
    constants,
    equations,
    holds,
    inner_jaxprs,
    is_float32,
    is_literal,
    is_recomputed,
    is_transposed,
    name_of,
    open_jaxpr,
    scope_of,
)
from .plan import (
    Activation,
    Around,
    Bind,
    Call,
    Decision,
    Demand,
    Plan,
    Skip,
    Take,
    Wanted,
)
from .primitives import PRIMITIVES, List, traits_of
from .rules import Rules
from .scopes import Scopes
from .states import FIRM, HALF, OTHER, Kind, State, entering, join, leaving


class _Everything(Demand):
    """Wants everything in half."""

    def of(self, var: Var) -> Wanted:
        del var
        return Wanted.YES


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about a jaxpr before anything is decided.

    Attributes:
        inside: the open jaxpr.
        around: the part of the program around it.
        functions: its anatomy.
        start: the state of each constant and input.
        staying: the variables that stay in the backward pass; empty without a `reduce_dtype`.
    """

    inside: Jaxpr
    around: Around
    functions: Anatomy
    start: dict[Var, State]
    staying: frozenset[Var]


class Planner:
    """Makes plans by a set of rules, each once; one planner serves one call of an autocast function."""

    def __init__(self, rules: Rules) -> None:
        self.rules = dataclasses.replace(rules, precisions=configured_precisions())
        self.scopes = Scopes(rules)
        self._plans: dict[Any, Plan] = {}
        self._anatomies: dict[int, Anatomy] = {}
        self._alive: list[Jaxpr] = []  # The keys of both hold ids of jaxprs.
        self._backward = BackwardPass()

    def argument(self, value: Array, path: str) -> State:
        """Returns the state of an argument called `path`, or of a constant, which has no path."""
        if getattr(value, "dtype", None) != jnp.float32:
            return OTHER
        if self.scopes.rule_for(path):
            return dataclasses.replace(FIRM, full=True)
        if not value.ndim:
            return State(Kind.FREE, leaf=True)
        return State(Kind.OPEN, leaf=True, reduced=bool(path) and self.rules.reduce_dtype is not None)

    def constant(self, value: Array) -> State:
        """Returns the state of a constant: a number that is known, or like an argument."""
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
        wanted: Sequence[Wanted] | None,
        around: Around = Around(),  # noqa: B008
    ) -> Plan:
        """Plans a jaxpr.

        Args:
            jaxpr: the jaxpr, closed or open.
            inputs: the state of each input.
            wanted: for each output, whether it is wanted in half; None for the first pass.
            around: the part of the program around the jaxpr.
        """
        around = dataclasses.replace(around, scope=self.scopes.that_matters(around.scope))
        states = (*map(self.constant, constants(jaxpr)), *inputs)
        key = (id(open_jaxpr(jaxpr)), states, wanted if wanted is None else tuple(wanted), around)
        if key not in self._plans:
            self._alive.append(jaxpr)
            self._plans[key] = self._make(jaxpr, states, wanted, around)
        return self._plans[key]

    def _make(
        self, jaxpr: Jaxpr, states: tuple[State, ...], wanted: Sequence[Wanted] | None, around: Around
    ) -> Plan:
        inside = open_jaxpr(jaxpr)
        facts = self._facts(inside, states, around)
        if wanted is None:
            demand = _Everything(facts.functions.reads)
        else:
            # First as if everything were wanted in half, to learn which operations end in float32 all the
            # same.
            first = self.plan(jaxpr, states[len(constants(jaxpr)) :], None, around)
            demand = find_demand(
                inside, facts.functions, first.decisions, wanted, self.rules.dtype, self._demands_inside
            )
        decisions, known = self._decide_all(facts, demand)
        ends = [index for index, each in enumerate(decisions) if isinstance(each.action, Activation)]
        for index in inner_members(inside, facts.functions, ends):
            decisions[index] = dataclasses.replace(decisions[index], action=Skip(), reason=_PART)
        results = tuple(self._state(var, known) for var in inside.outvars)
        changed = any(decision.changed for decision in decisions)
        return Plan(jaxpr, around, states, tuple(decisions), results, demand, changed)

    def _facts(self, inside: Jaxpr, states: tuple[State, ...], around: Around) -> Facts:
        if id(inside) not in self._anatomies:
            self._anatomies[id(inside)] = anatomy(inside, self._stays_float32)
        staying: frozenset[Var] = frozenset()
        if self.rules.reduce_dtype is not None:
            staying = self._backward.staying(inside, around.staying, around.backward)
        start = dict(zip((*inside.constvars, *inside.invars), states, strict=True))
        return Facts(inside, around, self._anatomies[id(inside)], start, staying)

    def _decide_all(self, facts: Facts, demand: Demand) -> tuple[list[Decision], dict[Var, State]]:
        """Returns a decision for each equation of a jaxpr, and the state of each variable."""
        known = dict(facts.start)
        decisions: list[Decision] = []
        for equation in equations(facts.inside):
            operands = [self._state(var, known) for var in equation.invars]
            decisions.append(self._decide(equation, operands, demand, facts))
            if demand.of_all(equation.outvars) is Wanted.BY_PRODUCTS and facts.functions.may_end(equation):
                decisions[-1] = _activation(facts, decisions, known) or decisions[-1]
            known.update(zip(equation.outvars, decisions[-1].results, strict=True))
        return decisions, known

    def _stays_float32(self, equation: Equation) -> bool:
        name = name_of(equation)
        return self.rules.list_of(name) is List.DENY or traits_of(name).list is List.RANGE

    def _state(self, var: Var, known: dict[Var, State]) -> State:
        return self.literal(var) if is_literal(var) else known[var]

    def _decide(self, equation: Equation, operands: list[State], demand: Demand, facts: Facts) -> Decision:
        path = scope_of(equation, facts.around.scope)
        name = name_of(equation)
        which = self.rules.list_of(name)
        half = self.rules.dtype
        if which is List.CALL:
            return self._decide_call(equation, operands, demand, facts)
        is_cast = name == "convert_element_type"
        if reason := self.scopes.why_as_traced(path):
            decision = in_float32(equation, operands, List.AS_TRACED, reason)
            if is_cast and operands[0].kind != Kind.HALF:  # A cast is the program's own here too.
                action = decide_cast(equation, operands[0], half).action
                decision = dataclasses.replace(decision, action=action)
            return decision
        if is_cast:
            return decide_cast(equation, operands[0], half)
        if name == "name" and equation.params["name"] == KEEP_FLOAT32_NAME:
            return in_float32(equation, operands, List.DENY, "keep_float32")
        wanted = demand.of_all(equation.outvars)
        match which:
            case List.ALLOW:
                return decide_product(equation, operands, self.rules, self._leaves(equation, facts))
            case List.DENY:
                return in_float32(equation, operands, which, f"{name} is on the deny list")
            case List.INFER if name == "outer_product":
                where = _in_backward_pass(equation, facts), self._leaves(equation, facts)
                return decide_outer(equation, operands, self.rules, wanted, *where)
            case List.INFER:
                return decide_infer(equation, operands, wanted, half)
            case List.MOVE:
                return decide_move(equation, operands, bool(demand.uses[equation.outvars[0]]))
        known = name in PRIMITIVES or name in self.rules.lists
        reason = f"{name} {'stays as traced' if known else 'is on no list'}"
        return in_float32(equation, operands, List.AS_TRACED, reason)

    def _leaves(self, equation: Equation, facts: Facts) -> bool:
        """Whether a product makes a weight gradient that leaves it in the `reduce_dtype`."""
        if self.rules.reduce_dtype is None:
            return False
        found = facts.staying.isdisjoint(equation.outvars)
        return (
            _in_backward_pass(equation, facts) and found and any(map(facts.functions.reads, equation.outvars))
        )

    # Calls: equations that run jaxprs.

    def _decide_call(
        self, equation: Equation, operands: list[State], demand: Demand, facts: Facts
    ) -> Decision:
        wanted = [demand.of(var) for var in equation.outvars]
        is_scan = equation.primitive.name == "scan"
        plans = []
        results: dict[int, State] = {}
        for inner in inner_jaxprs(equation):
            inputs = [entering(operands[index], role) for index, role in zip(inner.operands, inner.roles)]
            around = self._around(equation, inner, facts)
            # In the first pass a call is decided as its operations would be in its place.
            first = isinstance(demand, _Everything)
            plan = self.plan(inner.jaxpr, inputs, None if first else wanted_inside(inner, wanted), around)
            plans.append(plan)
            for index, carry, state in zip(inner.results, inner.carries, plan.results):
                if index is not None:
                    state = leaving(state, carry, bool(is_scan and wanted[index]))
                    results[index] = join(results[index], state) if index in results else state
        states = tuple(results[index] for index in range(len(equation.outvars)))
        changed = any(plan.changed for plan in plans) or any(
            state.kind == Kind.HALF for state in (*operands, *states)
        )
        action = Bind((Take.AS_IS,) * len(operands))
        if changed:
            # With a `remat2` the program says itself what the loop keeps for the backward pass.
            recompute = is_scan and not equation.effects and not holds(plans[0].jaxpr, "remat2")
            handler = str(equation.primitive.name)
            if handler == "custom_jvp_call" and (
                any(state.reduced for state in operands) or is_reverse_only(equation)
            ):
                # JAX transposes the products of a `custom_jvp` itself; a backward rule gives them their
                # dtype.
                handler = "custom_vjp_call"
            action = Call(handler, decide_inside(equation, operands, plans, states, demand), recompute)
        reason = "decided inside, operation by operation"
        return Decision(List.CALL, action, states, reason, tuple(plans), changed)

    def _around(self, equation: Equation, inner: Inner, facts: Facts) -> Around:
        """Returns the part of the program around a jaxpr of a call."""
        scope = call_scope(scope_of(equation, facts.around.scope), equation)
        scope = f"{scope}/{inner.scope}" if inner.scope else scope
        backward = _in_backward_pass(equation, facts)
        if self.rules.reduce_dtype is None:
            return Around(scope, backward)
        staying = [var in facts.staying for var in equation.outvars]
        return Around(scope, backward, self._backward.outputs(inner, staying, backward))

    def _demands_inside(
        self, equation: Equation, decision: Decision, results: Sequence[Wanted]
    ) -> list[Demand]:
        """Returns the demands of the jaxprs of a call, planned by how its results are wanted."""
        return [
            self.plan(plan.jaxpr, plan.inputs, wanted_inside(inner, results), plan.around).demand
            for inner, plan in zip(inner_jaxprs(equation), decision.inner)
        ]


def _in_backward_pass(equation: Equation, facts: Facts) -> bool:
    return (facts.around.backward or is_transposed(equation)) and not is_recomputed(equation)


_PART = "part of a function of half values, computed in float32"


def _activation(facts: Facts, decisions: Sequence[Decision], known: dict[Var, State]) -> Decision | None:
    """Returns the last decision as one to compute an activation function, if the rest allows it."""
    functions, all_equations = facts.functions, equations(facts.inside)
    (out,) = all_equations[len(decisions) - 1].outvars
    members = sorted(functions.members[out])
    in_half = all(known[var].kind == Kind.HALF for var in functions.sources[out])
    if not in_half or not {decisions[index].which for index in members} <= {List.DENY, List.INFER}:
        return None
    action = Activation(functions.sources[out], tuple(all_equations[index] for index in members))
    reason = "a function of half values, computed in float32; only products read it"
    return Decision(decisions[-1].which, action, (HALF,), reason, changed=True)


def _number(value: Array) -> float | None:
    """Returns the value of a scalar that is known while tracing."""
    if value.ndim:
        return None
    try:
        return float(value)
    except jax.errors.ConcretizationTypeError:
        return None

"""Decides, before anything is computed, in which precision every operation of a jaxpr runs and why.

A plan is made in three passes. The first goes forwards as if every result were wanted in half, and finds
the operations that end in float32 all the same. The second goes backwards and asks of every value whether a
product wants it in half, directly or through operations that would pass it on, and whether an operation reads
it in float32, which should not read a rounded one. The third goes forwards again and decides, by each
operation's list and the states of its operands.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .activations import Anatomy, anatomy, inner_members
from .demand import find_demand, wanted_inside
from .jaxprs import (
    KEEP_F32_NAME,
    asked_precision,
    call_scope,
    constants,
    equations,
    inner_jaxprs,
    is_float32,
    is_literal,
    name_of,
    open_jaxpr,
    scope_of,
)
from .rules import RANGE, List, Rules, fits
from .scopes import Scopes
from .states import (
    FIRM,
    HALF,
    OTHER,
    Compute,
    Decision,
    Demand,
    Kind,
    Plan,
    State,
    Wanted,
    broadcast,
    entering,
    join,
    may_be_rounded,
    moved,
)


class _Everything(Demand):
    """Wants everything in half."""

    def of(self, var: Any) -> Wanted:
        del var
        return Wanted.YES


class Planner:
    """Makes plans by a set of rules, each once; one planner serves one call of an autocast function."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.scopes = Scopes(rules)
        self._plans: dict[Any, Plan] = {}
        self._alive: list[Any] = []  # The keys hold ids of jaxprs.

    def argument(self, value: Any, path: str) -> State:
        """Returns the state of an argument called `path`."""
        if getattr(value, "dtype", None) != jnp.float32:
            return OTHER
        if self.scopes.rule_for(path):
            return dataclasses.replace(FIRM, full=True)
        return State(Kind.OPEN if value.ndim else Kind.FREE, leaf=True)

    def constant(self, value: Any) -> State:
        """Returns the state of a constant: a number that is known, or like an argument."""
        number = _number(value) if getattr(value, "dtype", None) == jnp.float32 else None
        if number is not None:
            return State(Kind.LITERAL, number, constant=True)
        return self.argument(value, path="")

    def literal(self, var: Any) -> State:
        """Returns the state of a constant written into an equation."""
        if not is_float32(var):
            return State(Kind.OTHER, constant=True)
        return self.constant(np.asarray(var.val, np.float32))

    def plan(self, jaxpr: Any, inputs: Sequence[State], wanted: Sequence[Wanted], scope: str = "") -> Plan:
        """Plans a jaxpr.

        Args:
            jaxpr: the jaxpr, closed or open.
            inputs: the state of each input.
            wanted: for each output, whether it is wanted in half.
            scope: the scopes around the jaxpr.
        """
        scope = self.scopes.that_matters(scope)
        states = (*map(self.constant, constants(jaxpr)), *inputs)
        key = (id(open_jaxpr(jaxpr)), states, tuple(wanted), scope)
        if key not in self._plans:
            self._alive.append(jaxpr)
            self._plans[key] = self._make(jaxpr, states, wanted, scope)
        return self._plans[key]

    def _make(self, jaxpr: Any, states: tuple[State, ...], wanted: Sequence[Wanted], scope: str) -> Plan:
        inside = open_jaxpr(jaxpr)
        start: dict[Any, State] = dict(zip((*inside.constvars, *inside.invars), states, strict=True))
        functions = anatomy(inside)
        # First as if everything were wanted in half, to learn which operations end in float32 all the same.
        demand: Demand = _Everything(functions.reads)
        decisions, _ = self._decide_all(inside, functions, start, demand, scope)
        demand = find_demand(self, inside, functions, decisions, wanted)
        decisions, known = self._decide_all(inside, functions, start, demand, scope)
        ends = [place for place, each in enumerate(decisions) if each.compute is Compute.ACTIVATION]
        return Plan(
            jaxpr,
            scope,
            states,
            decisions,
            tuple(self._state(var, known) for var in inside.outvars),
            demand,
            functions,
            inner_members(inside, functions, ends),
            any(decision.changed for decision in decisions),
        )

    def _decide_all(
        self, inside: Any, functions: Anatomy, start: dict[Any, State], demand: Demand, scope: str
    ) -> tuple[tuple[Decision, ...], dict[Any, State]]:
        """Returns a decision for each equation of a jaxpr, and the state of each variable."""
        known = dict(start)
        decisions: list[Decision] = []
        for equation in equations(inside):
            operands = [self._state(var, known) for var in equation.invars]
            decision = self._decide(equation, operands, demand, scope)
            if demand.of_all(equation.outvars) is Wanted.BY_PRODUCTS and self.may_be_activation(
                equation, inside, functions
            ):
                (out,) = equation.outvars
                so_far = [*decisions, decision]
                lists = {so_far[place].which for place in functions.members[out]}
                in_half = all(known[var].kind == Kind.HALF for var in functions.sources[out])
                if in_half and lists <= {List.DENY, List.INFER}:
                    reason = "a function of half values, computed in float32; only products read it"
                    decision = Decision(decision.which, Compute.ACTIVATION, (HALF,), reason, changed=True)
            known.update(zip(equation.outvars, decision.results, strict=True))
            decisions.append(decision)
        return tuple(decisions), known

    def may_be_activation(self, equation: Any, inside: Any, functions: Anatomy) -> bool:
        """Returns whether `equation` ends a function of which a part is better left in float32."""
        out = equation.outvars[0]
        if out not in functions.members or not is_float32(out):
            return False
        names = {name_of(equations(inside)[place]) for place in functions.members[out]}
        return any(self.rules.list_of(name) is List.DENY or name in RANGE for name in names)

    def _state(self, var: Any, known: dict[Any, State]) -> State:
        return self.literal(var) if is_literal(var) else known[var]

    def _decide(self, equation: Any, operands: list[State], demand: Demand, scope: str) -> Decision:
        path = scope_of(equation, scope)
        name = name_of(equation)
        which = self.rules.list_of(name)
        wanted = [demand.of(var) for var in equation.outvars]
        if which is List.CALL:
            return self._decide_call(equation, operands, wanted, call_scope(path, equation))
        if reason := self.scopes.why_as_traced(path):
            return _as_traced(equation, operands, reason)
        if name == "convert_element_type":
            return self._decide_cast(equation, operands[0])
        if name == "name" and equation.params["name"] == KEEP_F32_NAME:
            return _in_float32(equation, operands, List.DENY, "keep_f32")
        match which:
            case List.ALLOW:
                return self._decide_product(equation, operands)
            case List.DENY:
                return _in_float32(equation, operands, which, f"{name} is on the deny list")
            case List.INFER:
                return self._decide_infer(equation, operands, any(wanted))
            case List.MOVE:
                return _decide_move(equation, operands)
        known = name in self.rules.lists
        return _as_traced(equation, operands, f"{name} {'stays as traced' if known else 'is on no list'}")

    def _decide_product(self, equation: Any, operands: list[State]) -> Decision:
        reason = why_not_half(equation, self.rules.dtype)
        if reason is None and any(state.full for state in operands):
            reason = "a rule keeps one of its arguments in float32"
        if reason:
            return _in_float32(equation, operands, List.ALLOW, reason)
        results = tuple(HALF if is_float32(var) else OTHER for var in equation.outvars)
        name = equation.primitive.name
        return Decision(List.ALLOW, Compute.HALF, results, f"{name} is on the allow list", changed=True)

    def _decide_infer(self, equation: Any, operands: list[State], wanted: bool) -> Decision:
        """The widest type of the operands that insist on one, in half only if the result is of use there."""
        float32 = [
            (var, broadcast(equation, var, state))
            for var, state in zip(equation.invars, operands)
            if state.kind != Kind.OTHER
        ]
        kinds = {state.kind for _, state in float32}
        if Kind.HALF not in kinds:
            kind = max(kinds, default=Kind.FREE)
            state = State(
                Kind.FREE if kind == Kind.LITERAL else kind,
                constant=all(state.constant for state in operands),
            )
            results = tuple(state if is_float32(var) else _other(operands) for var in equation.outvars)
            return Decision(List.INFER, Compute.FLOAT32, results, "no operand is in half")
        reason = None
        if kinds & {Kind.OPEN, Kind.FIRM}:
            reason = "an operand is in float32, the widest type"
        elif unfit := [state.number for _, state in float32 if not self._fits(state)]:
            reason = f"{self.rules.dtype.name} does not hold the constant {unfit[0]:g}"
        elif not wanted and any(map(is_float32, equation.outvars)):
            reason = "float32 operations read its result"
        if reason:
            return _in_float32(equation, operands, List.INFER, reason)
        results = tuple(HALF if is_float32(var) else OTHER for var in equation.outvars)
        if all(may_be_rounded(equation, var, state) for var, state in float32):
            reason = "its operands are in half, or take the type of what they meet"
            return Decision(List.INFER, Compute.HALF, results, reason, changed=True)
        reason = "one operand is in half; another was computed in float32 and takes its type"
        return Decision(List.INFER, Compute.STORE_HALF, results, reason, changed=True)

    def _fits(self, state: State) -> bool:
        return state.number is None or fits(state.number, self.rules.dtype)

    def _decide_cast(self, equation: Any, operand: State) -> Decision:
        """A cast of the user's is obeyed; only one that changes nothing leaves no trace."""
        (source,), (target,) = equation.invars, equation.outvars
        if is_float32(source) and is_float32(target):
            result, reason = operand, "float32 already"
        elif not is_float32(target):
            result, reason = State(Kind.OTHER, constant=operand.constant), "the program casts"
        elif source.aval.dtype == jnp.bool_:
            result, reason = State(Kind.FREE, leaf=True, constant=operand.constant), "half holds 0 and 1"
        elif jnp.issubdtype(source.aval.dtype, jnp.integer):
            free = operand.constant or source.aval.ndim == 0
            result = State(Kind.FREE if free else Kind.OPEN, constant=operand.constant)
            reason = "half may not hold the integers"
        else:
            result, reason = FIRM, "the program casts to float32"
        changed = Kind.HALF in (operand.kind, result.kind)
        return Decision(List.AS_TRACED, Compute.EACH, (result,), reason, changed=changed)

    def _decide_call(
        self, equation: Any, operands: list[State], wanted: list[Wanted], scope: str
    ) -> Decision:
        results: dict[int, State] = {}
        plans = []
        for inner in inner_jaxprs(equation):
            inputs = [entering(operands[place], role) for place, role in zip(inner.operands, inner.roles)]
            plan = self.plan(inner.jaxpr, inputs, wanted_inside(inner, wanted), scope)
            plans.append(plan)
            for place, carry, state in zip(inner.results, inner.carries, plan.results):
                if place is not None:
                    state = FIRM if carry and state.kind != Kind.OTHER else state
                    results[place] = join(results[place], state) if place in results else state
        states = tuple(results[place] for place in range(len(equation.outvars)))
        changed = any(plan.changed for plan in plans) or any(
            s.kind == Kind.HALF for s in (*operands, *states)
        )
        reason = "decided inside, operation by operation"
        return Decision(List.CALL, Compute.EACH, states, reason, tuple(plans), changed)


def why_not_half(equation: Any, half: np.dtype) -> str | None:
    """Returns why an operation of the allow list keeps its dtypes; None if it takes half operands."""
    floating = [var for var in equation.invars if jnp.issubdtype(var.aval.dtype, jnp.inexact)]
    if not any(map(is_float32, floating)):
        traced = sorted({var.aval.dtype.name for var in floating}) or ["integers"]
        return f"its operands were traced in {' and '.join(traced)}"
    others = sorted({var.aval.dtype.name for var in floating if var.aval.dtype not in (jnp.float32, half)})
    if others:
        return f"an operand was traced in {' and '.join(others)}"
    if precision := asked_precision(equation):
        return f"the program asks for precision {precision}"
    preferred = equation.params.get("preferred_element_type")
    if preferred not in (None, jnp.float32):
        return f"the program asks for a result in {preferred}"
    return None


def _as_traced(equation: Any, operands: list[State], reason: str) -> Decision:
    return _in_float32(equation, operands, List.AS_TRACED, reason)


def _in_float32(equation: Any, operands: list[State], which: List, reason: str) -> Decision:
    """Float32 operands, and results that insist on float32 unless they are made of literals alone."""
    constant = all(state.constant for state in operands) and not equation.effects
    state = State(Kind.FREE, constant=True) if constant else FIRM
    results = tuple(state if is_float32(var) else _other(operands) for var in equation.outvars)
    changed = any(state.kind == Kind.HALF for state in operands)
    return Decision(which, Compute.FLOAT32, results, reason, changed=changed)


def _other(operands: list[State]) -> State:
    return State(Kind.OTHER, constant=all(state.constant for state in operands))


def _decide_move(equation: Any, operands: list[State]) -> Decision:
    paired = len(equation.outvars) == len(operands)
    results = tuple(
        moved(equation, operands[index if paired else 0], out) for index, out in enumerate(equation.outvars)
    )
    changed = any(state.kind == Kind.HALF for state in operands)
    return Decision(List.MOVE, Compute.EACH, results, "it moves data and keeps its type", changed=changed)


def _number(value: Any) -> float | None:
    """Returns the value of a scalar that is known while tracing."""
    if value.ndim:
        return None
    try:
        return float(value)
    except jax.errors.ConcretizationTypeError:
        return None

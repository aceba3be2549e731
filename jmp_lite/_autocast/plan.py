"""Decides, before anything is computed, in which precision every operation of a jaxpr runs and why.

A plan is made in three passes. The first goes forwards as if every result were wanted in half, and finds
the operations that end in float32 all the same. The second goes backwards and asks of every value whether a
product wants it in half, directly or through operations that would pass it on: what only float32 operations
read need not be rounded. The third goes forwards again and decides, by each operation's list and the states
of its operands.

Only float32 values are ever changed. The state of one says what autocast knows of it:

- a literal is a number, whose value decides whether half can hold it;
- a free value (a bias, a scale, a mask, an embedding that was looked up, anything made of literals alone)
  takes the type of what it meets;
- an open value is an argument of the function, or made of such: float32, until it is broadcast or looked up;
- a firm value was computed in float32, because an operation demands it or the user does;
- a half value was computed in half.
"""

import collections
import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .jaxprs import (
    AUTOCAST_SCOPE,
    FULL_PRECISION_SCOPE,
    KEEP_F32_NAME,
    Inner,
    Role,
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
from .rules import BROADCASTS, List, Rules, fits


class Kind(enum.IntEnum):
    """What is known of a value, from what yields most to what yields least; see above."""

    OTHER = 0  # No float32: integers, keys, float64, what the user made half. Never changed.
    LITERAL = 1
    FREE = 2
    OPEN = 3
    FIRM = 4
    HALF = 5


@dataclasses.dataclass(frozen=True)
class State:
    """What the plan knows of one value.

    Attributes:
        kind: see `Kind`.
        number: the value of a literal.
        leaf: it is an argument or an exact 0 and 1, at most reshaped: it may be rounded to half.
        constant: it was made of literals alone.
        full: a rule keeps every product of it in float32.
    """

    kind: Kind
    number: float | None = None
    leaf: bool = False
    constant: bool = False
    full: bool = False


OTHER = State(Kind.OTHER)
FIRM = State(Kind.FIRM)
HALF = State(Kind.HALF)


class Compute(enum.Enum):
    """The dtype in which an operation takes its float32 operands."""

    HALF = "half"
    FLOAT32 = "float32"
    STORE_HALF = "float32, the result stored in half"
    EACH = "each operand as it is"


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """How one equation is run.

    Attributes:
        which: the list that decided.
        compute: the dtype of the operands that were traced in float32.
        results: the state of each result.
        reason: why, in words.
        inner: the plans of the jaxprs inside it.
        changed: whether it differs from what was traced.
    """

    which: List
    compute: Compute
    results: tuple[State, ...]
    reason: str
    inner: tuple["Plan", ...] = ()
    changed: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How a jaxpr is run.

    Attributes:
        jaxpr: the jaxpr, closed or open.
        states: of its constants and inputs.
        decisions: one for each equation.
        results: the state of each output.
        wanted: for each input, how many operations want it in half.
        uses: how many operations want each variable in half.
        changed: whether any decision differs from what was traced.
    """

    jaxpr: Any
    states: tuple[State, ...]
    decisions: tuple[Decision, ...]
    results: tuple[State, ...]
    wanted: tuple[int, ...]
    uses: collections.Counter[Any]
    changed: bool

    @property
    def inputs(self) -> tuple[State, ...]:
        """The states of the inputs, without those of the constants."""
        return self.states[len(constants(self.jaxpr)) :]


class _Everything(collections.Counter[Any]):
    """Says of every variable that it is wanted in half."""

    def __missing__(self, key: Any) -> int:
        return 1


class Planner:
    """Makes plans by a set of rules, each once; one planner serves one call of an autocast function."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.patterns_used: set[str] = set()
        self.paths_seen: set[str] = set()
        self._plans: dict[Any, Plan] = {}
        self._reasons: dict[str, str | None] = {}
        self._alive: list[Any] = []  # The keys hold ids of jaxprs.

    def argument(self, value: Any, path: str = "") -> State:
        """Returns the state of an argument or constant called `path`."""
        if getattr(value, "dtype", None) != jnp.float32:
            return OTHER
        if path and self._pattern(path):
            return dataclasses.replace(FIRM, full=True)
        number = None if path else _number(value)
        if number is not None:
            return State(Kind.LITERAL, number, constant=True)
        return State(Kind.FREE if value.ndim <= 1 else Kind.OPEN, leaf=True)

    def literal(self, var: Any) -> State:
        """Returns the state of a constant written into an equation."""
        if not is_float32(var):
            return State(Kind.OTHER, constant=True)
        return self.argument(np.asarray(var.val, np.float32))

    def plan(self, jaxpr: Any, inputs: Sequence[State], wanted: Sequence[bool], scope: str = "") -> Plan:
        """Plans a jaxpr.

        Args:
            jaxpr: the jaxpr, closed or open.
            inputs: the state of each input.
            wanted: for each output, whether it is wanted in half.
            scope: the scopes around the jaxpr.
        """
        scope = self._scope_that_matters(scope)
        states = (*map(self.argument, constants(jaxpr)), *inputs)
        key = (id(open_jaxpr(jaxpr)), states, tuple(wanted), scope)
        if key not in self._plans:
            self._alive.append(jaxpr)
            self._plans[key] = self._make(jaxpr, states, wanted, scope)
        return self._plans[key]

    def _make(self, jaxpr: Any, states: tuple[State, ...], wanted: Sequence[bool], scope: str) -> Plan:
        inside = open_jaxpr(jaxpr)
        start: dict[Any, State] = dict(zip((*inside.constvars, *inside.invars), states, strict=True))
        # First as if everything were wanted in half, to learn which operations end in float32 all the same.
        uses: collections.Counter[Any] = _Everything()
        decisions, _ = self._decide_all(inside, start, uses, scope)
        uses = self._half_uses(inside, decisions, wanted)
        decisions, known = self._decide_all(inside, start, uses, scope)
        return Plan(
            jaxpr,
            states,
            decisions,
            tuple(self._state(var, known) for var in inside.outvars),
            tuple(uses[var] for var in inside.invars),
            uses,
            any(decision.changed for decision in decisions),
        )

    def _decide_all(
        self, inside: Any, start: dict[Any, State], uses: collections.Counter[Any], scope: str
    ) -> tuple[tuple[Decision, ...], dict[Any, State]]:
        """Returns a decision for each equation of a jaxpr, and the state of each variable."""
        known = dict(start)
        decisions = []
        for equation in equations(inside):
            operands = [self._state(var, known) for var in equation.invars]
            decision = self._decide(equation, operands, uses, scope)
            known.update(zip(equation.outvars, decision.results, strict=True))
            decisions.append(decision)
        return tuple(decisions), known

    def _state(self, var: Any, known: dict[Any, State]) -> State:
        return self.literal(var) if is_literal(var) else known[var]

    # Backwards: what is wanted in half.

    def _half_uses(
        self, inside: Any, decisions: Sequence[Decision], wanted: Sequence[bool]
    ) -> collections.Counter[Any]:
        """Returns how many operations want each variable of a jaxpr in half."""
        uses = collections.Counter(
            var for var, want in zip(inside.outvars, wanted) if want and _in_reach(var)
        )
        for equation, decision in zip(reversed(equations(inside)), reversed(decisions)):
            for var, times in self._wants(equation, decision, uses):
                if _in_reach(var):
                    uses[var] += times
        return uses

    def _wants(
        self, equation: Any, decision: Decision, uses: collections.Counter[Any]
    ) -> list[tuple[Any, int]]:
        """Returns the operands that `equation` wants in half, and how many times."""
        wants_any = any(not is_literal(var) and uses[var] for var in equation.outvars)
        match decision.which:
            case List.CALL:
                return [
                    (equation.invars[place], 2 if role is Role.CONSTANT else 1)
                    for inner, plan in zip(inner_jaxprs(equation), decision.inner)
                    for place, role, times in zip(inner.operands, inner.roles, plan.wanted)
                    if times and role is not Role.CARRY
                ]
            case List.ALLOW if decision.compute is Compute.HALF:
                return [(var, 1) for var in equation.invars]
            case List.INFER if wants_any and decision.compute is not Compute.FLOAT32:
                return [(var, 1) for var in equation.invars]
            case List.MOVE if wants_any:
                return [(var, 1) for var in equation.invars]
        if equation.primitive.name == "convert_element_type":
            to_half = equation.params["new_dtype"] == self.rules.dtype
            return [(var, 1) for var in equation.invars] if to_half or wants_any else []
        return []

    # Forwards: what each operation does.

    def _decide(
        self, equation: Any, operands: list[State], uses: collections.Counter[Any], scope: str
    ) -> Decision:
        path = scope_of(equation, scope)
        name = equation.primitive.name
        full_reason = self._full_reason(path)
        if full_reason:
            return _as_traced(equation, operands, full_reason)
        if name == "convert_element_type":
            return self._decide_cast(equation, operands[0])
        if name == "name" and equation.params["name"] == KEEP_F32_NAME:
            return _in_float32(equation, operands, List.DENY, "keep_f32")
        name = name_of(equation)
        which = self.rules.list_of(name)
        wanted = [not is_literal(var) and uses[var] > 0 for var in equation.outvars]
        match which:
            case List.CALL:
                return self._decide_call(equation, operands, wanted, call_scope(path, equation))
            case List.ALLOW:
                return self._decide_product(equation, operands)
            case List.DENY:
                return _in_float32(equation, operands, which, f"{name} is on the deny list")
            case List.INFER:
                return self._decide_infer(equation, operands, any(wanted))
            case List.MOVE:
                return _decide_move(equation, operands)
        return _as_traced(equation, operands, f"{name} is on no list")

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
            (var, _broadcast(equation, var, state))
            for var, state in zip(equation.invars, operands)
            if state.kind != Kind.OTHER
        ]
        kinds = {state.kind for _, state in float32}
        if Kind.HALF not in kinds:
            kind = max(kinds, default=Kind.FREE)
            state = State(
                Kind.FREE if kind == Kind.LITERAL else kind,
                constant=all(state.constant for state in operands),
                full=any(state.full for state in operands),
            )
            results = tuple(state if is_float32(var) else _other(operands) for var in equation.outvars)
            return Decision(List.INFER, Compute.FLOAT32, results, "no operand is in half")
        reason = None
        if kinds & {Kind.OPEN, Kind.FIRM}:
            reason = "an operand is in float32, the widest type"
        elif unfit := [state.number for _, state in float32 if not self._fits(state)]:
            reason = f"{self.rules.dtype.name} does not hold the constant {unfit[0]:g}"
        elif not wanted and any(map(is_float32, equation.outvars)):
            reason = "its result is used in float32 only"
        if reason:
            return _in_float32(equation, operands, List.INFER, reason)
        results = tuple(HALF if is_float32(var) else OTHER for var in equation.outvars)
        if all(_may_be_rounded(var, state) for var, state in float32):
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

    def _decide_call(self, equation: Any, operands: list[State], wanted: list[bool], scope: str) -> Decision:
        results: dict[int, State] = {}
        plans = []
        for inner in inner_jaxprs(equation):
            inputs = [
                _entering(operands[place], role, var)
                for place, role, var in zip(inner.operands, inner.roles, open_jaxpr(inner.jaxpr).invars)
            ]
            plan = self.plan(inner.jaxpr, inputs, _wanted(inner, wanted), scope)
            plans.append(plan)
            for place, carry, state in zip(inner.results, inner.carries, plan.results):
                if place is not None:
                    state = FIRM if carry and state.kind != Kind.OTHER else state
                    results[place] = _join(results[place], state) if place in results else state
        states = tuple(results[place] for place in range(len(equation.outvars)))
        changed = any(plan.changed for plan in plans) or any(
            s.kind == Kind.HALF for s in (*operands, *states)
        )
        reason = "decided inside, operation by operation"
        return Decision(List.CALL, Compute.EACH, states, reason, tuple(plans), changed)

    # Scopes.

    def _scope_that_matters(self, scope: str) -> str:
        """A jaxpr that is called in many places is planned once, unless rules may tell the places apart."""
        if self.rules.scopes:
            return scope
        return next((mark for mark in (AUTOCAST_SCOPE, FULL_PRECISION_SCOPE) if mark in scope), "")

    def _full_reason(self, path: str) -> str | None:
        """Returns why everything in the scope `path` stays as traced; None if it does not."""
        if path not in self._reasons:
            reason = None
            if AUTOCAST_SCOPE in path:
                reason = "another autocast has decided"
            elif FULL_PRECISION_SCOPE in path:
                reason = "inside full_precision"
            elif pattern := self._pattern(path):
                reason = f"the rule for '{pattern}'"
            self._reasons[path] = reason
        return self._reasons[path]

    def _pattern(self, path: str) -> str | None:
        """Returns the rule that keeps the scope or argument `path` in float32, if any."""
        if not path or not self.rules.scopes:
            return None
        self.paths_seen.add(path)
        found = self.rules.pattern_for(path)
        if found is None:
            return None
        self.patterns_used.add(found[0])
        return found[0] if found[1] else None


def why_not_half(equation: Any, half: np.dtype) -> str | None:
    """Returns why an operation of the allow list keeps its dtypes; None if it takes half operands."""
    floating = [var for var in equation.invars if jnp.issubdtype(var.aval.dtype, jnp.inexact)]
    if not any(map(is_float32, floating)):
        traced = sorted({var.aval.dtype.name for var in floating}) or ["integers"]
        return f"its operands were traced in {' and '.join(traced)}"
    others = sorted({var.aval.dtype.name for var in floating if var.aval.dtype not in (jnp.float32, half)})
    if others:
        return f"an operand was traced in {' and '.join(others)}"
    params = equation.params
    precision = params.get("precision")
    asked = {str(getattr(each, "name", each)) for each in _as_tuple(precision)} - {"DEFAULT", "None"}
    if asked:
        return f"the program asks for precision {' and '.join(sorted(asked))}"
    if params.get("preferred_element_type") not in (None, jnp.float32):
        return f"the program asks for a result in {params['preferred_element_type']}"
    if equation.primitive.name == "dot_general":
        (contracted, _), (batch, _) = params["dimension_numbers"]
        axes = len(contracted) + len(batch)
        if contracted and all(var.aval.ndim == axes for var in equation.invars):
            return "an inner product is a sum, which no Tensor Core runs"
    return None


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


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
        _moved(equation, operands[index if paired else 0], out) for index, out in enumerate(equation.outvars)
    )
    changed = any(state.kind == Kind.HALF for state in operands)
    return Decision(List.MOVE, Compute.EACH, results, "it moves data and keeps its type", changed=changed)


def _moved(equation: Any, state: State, out: Any) -> State:
    """The state of a value after a move: what is broadcast, looked up or a vector becomes free."""
    if not is_float32(out) or state.kind != Kind.OPEN:
        return state
    source = equation.invars[0].aval
    grown = equation.primitive.name == "broadcast_in_dim" and math.prod(out.aval.shape) > math.prod(
        source.shape
    )
    freed = grown or (state.leaf and (equation.primitive.name == "gather" or out.aval.ndim <= 1))
    return dataclasses.replace(state, kind=Kind.FREE) if freed else state


def _broadcast(equation: Any, var: Any, state: State) -> State:
    """The state of an operand that an element-wise operation may broadcast along axes of size 1."""
    if state.kind != Kind.OPEN or equation.primitive.name not in BROADCASTS:
        return state
    grown = math.prod(var.aval.shape) < math.prod(equation.outvars[0].aval.shape)
    return dataclasses.replace(state, kind=Kind.FREE) if grown else state


def _may_be_rounded(var: Any, state: State) -> bool:
    """Whether an operand may be taken in half: it is in half, a literal, or a parameter that is no scalar."""
    return state.kind != Kind.FREE or (state.leaf and var.aval.ndim > 0)


def _entering(state: State, role: Role, var: Any) -> State:
    """The state of an operand inside the jaxpr that takes it."""
    if state.kind == Kind.OTHER:
        # What changes from one iteration to the next is no constant.
        return OTHER if role is Role.CARRY else state
    if role is Role.CARRY:
        return FIRM
    if role is Role.ELEMENT and state.kind == Kind.OPEN and state.leaf and var.aval.ndim <= 1:
        return dataclasses.replace(state, kind=Kind.FREE)
    return state


def _join(first: State, second: State) -> State:
    """The state of a result that may come from either of two branches: the widest."""
    if first == second:
        return first
    if Kind.OTHER in (first.kind, second.kind):
        return OTHER
    if Kind.HALF in (first.kind, second.kind):
        return FIRM
    kind = max(first.kind, second.kind, Kind.FREE)
    return State(kind, full=first.full or second.full)


def _wanted(inner: Inner, results_wanted: Sequence[bool]) -> tuple[bool, ...]:
    """For each output of an inner jaxpr, whether it is wanted in half; a carry keeps its dtype."""
    return tuple(
        place is not None and not carry and results_wanted[place]
        for place, carry in zip(inner.results, inner.carries)
    )


def _in_reach(var: Any) -> bool:
    return not is_literal(var) and is_float32(var)


def _number(value: Any) -> float | None:
    """Returns the value of a scalar that is known while tracing."""
    if value.ndim:
        return None
    try:
        return float(value)
    except jax.errors.ConcretizationTypeError:
        return None

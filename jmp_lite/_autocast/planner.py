"""Plans a jaxpr before anything is computed: the precision in which every operation runs, and the reason.

A plan is one decision about each operation, and then a list of passes.

The decision takes four walks over the equations of a jaxpr. Reading (`op`, `regions`) says what each
operation is, who reads its results, and which operations together are one activation function or softmax. A
first decision, forwards, follows what the user's options and the scopes ask of each operation (`ruling`), and
otherwise assumes that everything is wanted in half: what is float32 then is float32 in any case. The demand,
backwards (`demand`), says which values matmuls want in half and no operation reads in float32. Then `decide`,
forwards, gives each operation its dtypes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jaxpr.bind import is_reverse_only
from .._jaxpr.inner import Inner, Role
from .._jaxpr.precision import configured_precision
from .._jaxpr.primitives import Category
from .._jaxpr.read import Array, Jaxpr, Var, constants, is_float32, is_literal, open_jaxpr
from .._jaxpr.scopes import AUTOCAST_SCOPE
from .planning.decide import decide
from .planning.demand import Analysis, DemandWalk, wanted_inside
from .planning.half_sums import HalfSums
from .planning.op import Context, Op
from .planning.passes.checkpoints import checkpoints
from .planning.passes.pairs import pairs
from .planning.passes.precision import precision
from .planning.passes.recompute import recompute
from .planning.plan import Call, Decision, Inside, Plan, Run, Take, conversion
from .planning.rules import Rules, first_match
from .planning.ruling import Ruling, RulingWalk, kind_in_demand
from .planning.scopes import Scopes
from .planning.states import FLOAT32, HALF_SUM, OTHER, Kind, Source, State, entering, leaving, merged
from .planning.wanted import Wanted

# None of them changes the dtype in which an operation of the plan multiplies.
PASSES: tuple[Callable[[Plan, Rules], Plan], ...] = (recompute, pairs, checkpoints, precision)
"""The passes over each plan, in order."""


class Planner:
    """Makes each plan once, by a set of rules. One planner serves one call of an autocast function."""

    def __init__(self, rules: Rules) -> None:
        self.rules = dataclasses.replace(rules, precision=configured_precision())
        self.scopes = Scopes(rules)
        self.forget()

    def forget(self) -> None:
        """Drops the plans that were made, and with them the constants of the program."""
        # JAX keeps the rules of custom derivatives, and so this planner, as long as its own caches. A user's
        # arrays would stay with it.
        self._plans: dict[Any, Plan] = {}
        self._firsts: dict[Any, Analysis] = {}
        self._demand_walk = DemandWalk(self.rules, self.scopes)

    def argument(self, value: Array, path: str) -> State:
        """Returns the state of the argument at `path`. A constant has an empty path."""
        # A mutable array has the dtype of its numbers, and no operation can take it in another one.
        if getattr(value, "dtype", None) != jnp.float32 or isinstance(value, jax.Ref):
            return OTHER
        if not path:  # A constant, such as an array that the function closes over.
            return State(Kind.ARGUMENT if value.ndim else Kind.ADAPTS, source=Source())
        rule = self.scopes.rule_for(path)
        is_wide = self.rules.reduce_dtype is not None
        source = Source(is_wide, first_match(self.rules.float32_results, path), rule)
        if rule is not None and rule[1] == "float32":
            return State(Kind.BY_RULE, source=source)
        # A scalar argument, such as a learned temperature, adapts as a number does.
        if not value.ndim:
            return State(Kind.ADAPTS, source=Source())
        return State(Kind.ARGUMENT, source=source)

    def constant(self, value: Array) -> State:
        """Returns the state of a constant: a number if its value is known, else as an argument."""
        number = _number(value) if getattr(value, "dtype", None) == jnp.float32 else None
        if number is not None:
            return State(Kind.ADAPTS, number, constant=True)
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
        # A jaxpr is read once. The first decision is made once for each context and states of the inputs, and
        # the demand and the decision once for each of these and the wanted outputs. `DemandWalk` keeps the
        # jaxprs alive whose ids are keys.
        states = (*map(self.constant, constants(jaxpr)), *inputs)
        key = (id(open_jaxpr(jaxpr)), states, tuple(wanted), context)
        if key not in self._plans:
            first = self._first(jaxpr, states, context)
            plan = self._decided(jaxpr, states, self._demand_walk.analyse(first, tuple(wanted)))
            for improve in PASSES:
                plan = improve(plan, self.rules)
            self._plans[key] = plan
        return self._plans[key]

    def _first(self, jaxpr: Jaxpr, states: tuple[State, ...], context: Context) -> Analysis:
        """Decides as if everything were wanted in half. What is in float32 then is so in any case."""
        inside = open_jaxpr(jaxpr)
        key = id(inside), states, context
        if key in self._firsts:
            return self._firsts[key]
        known = dict(zip((*inside.constvars, *inside.invars), states, strict=True))
        analysis = self._demand_walk.read(jaxpr, context, known)
        walk = RulingWalk(context, self.rules, self.scopes, analysis.decisive)
        half_sums = self._half_sums(context, analysis, known) if self.rules.half_sums else None
        for op in analysis.ops:
            ruling = walk.rule(op)
            ruling = half_sums.rule(op, ruling) if half_sums is not None else ruling
            analysis.rulings.append(ruling)
            operands = self._states(op.equation.invars, known)
            if ruling.category is Category.CALL:
                inner = [self._first_inside(op, each, operands, analysis) for each in op.inner]
                analysis.inner[op] = inner
                results = _results_of_call(op, inner, [Wanted.INDIRECTLY] * len(op.equation.outvars))
            else:
                results = decide(op, ruling, operands, analysis).results
            known.update(zip(op.equation.outvars, results, strict=True))
        analysis.results = tuple(self._states(inside.outvars, known))
        self._firsts[key] = analysis
        return analysis

    def _half_sums(self, context: Context, analysis: Analysis, known: Mapping[Var, State]) -> HalfSums:
        def may_be_half(var: Var) -> bool:
            if is_literal(var) or known[var].constant:
                return False
            return kind_in_demand(known[var]) == Kind.ADAPTS

        return HalfSums(self.rules, self.scopes, context, analysis.streams, may_be_half)

    def _first_inside(self, op: Op, inner: Inner, operands: Sequence[State], analysis: Analysis) -> Analysis:
        states = (*map(self.constant, constants(inner.jaxpr)), *_entering(op, inner, operands))
        return self._first(inner.jaxpr, states, self._demand_walk.context(op, inner, analysis))

    def _decided(self, jaxpr: Jaxpr, states: tuple[State, ...], analysis: Analysis) -> Plan:
        """Returns the plan of a jaxpr before the passes: the decision about each operation."""
        inside = analysis.inside
        known = dict(zip((*inside.constvars, *inside.invars), states, strict=True))
        decisions: list[Decision] = []
        for op, ruling in zip(analysis.ops, analysis.rulings):
            operands = self._states(op.equation.invars, known)
            is_call = ruling.category is Category.CALL
            decision = (self._decide_call if is_call else decide)(op, ruling, operands, analysis)
            known.update(zip(op.equation.outvars, decision.results, strict=True))
            decisions.append(decision)
        results = tuple(self._states(inside.outvars, known))
        return Plan(jaxpr, analysis, known, tuple(decisions), results)

    def _states(self, variables: Sequence[Var], known: Mapping[Var, State]) -> list[State]:
        return [self.literal(var) if is_literal(var) else known[var] for var in variables]

    def _decide_call(self, op: Op, ruling: Ruling, operands: Sequence[State], analysis: Analysis) -> Decision:
        wanted = list(map(analysis.demand.of_var, op.equation.outvars))
        plans = [self._plan_inside(op, inner, operands, wanted, analysis) for inner in op.inner]
        results = _results_of_call(op, plans, wanted)
        has_half = any(state.is_half for state in (*operands, *results))
        changed = has_half or any(plan.changed for plan in plans) or _solves(op, analysis.context)
        # A call in which nothing changes runs as it is, without a trace of its jaxprs.
        action: Run | Call = Run((Take.AS_IS,) * len(operands))
        if changed:
            inside = _inside(op, operands, plans, results)
            action = Call(_handler(op, operands, plans), inside, op.recomputes)
        reason = "decided inside, operation by operation"
        return Decision(op, ruling.category, action, results, reason, changed, tuple(plans))

    def _plan_inside(
        self, op: Op, inner: Inner, operands: Sequence[State], wanted: list[Wanted], analysis: Analysis
    ) -> Plan:
        inputs = _entering(op, inner, operands)
        context = self._demand_walk.context(op, inner, analysis)
        plan = self.plan(inner.jaxpr, inputs, wanted_inside(inner, wanted), context)
        # A residual stream in half is carried in half, so that a backward pass keeps it in half. A carry
        # changes from float32 to half and never back, so this ends.
        while op.name == "scan" and (streams := _streams_in_float32(inner, plan)):
            inputs = [HALF_SUM if number in streams else state for number, state in enumerate(plan.inputs)]
            plan = self.plan(inner.jaxpr, inputs, wanted_inside(inner, wanted), context)
        return plan


def _entering(op: Op, inner: Inner, operands: Sequence[State]) -> list[State]:
    """Returns the states of the inputs of a jaxpr that a call runs."""
    return [entering(op, operands[n], role) for n, role in zip(inner.operands, inner.roles)]


def _streams_in_float32(inner: Inner, plan: Plan) -> list[int]:
    """Returns the inputs that a scan carries in float32, and that its body makes in half by `half_sums`."""
    # The carries are the first results of the body, and its inputs behind the constants.
    ends = enumerate(plan.results[: inner.carried], start=inner.constants)
    return [number for number, state in ends if state.half_sum and plan.inputs[number] == FLOAT32]


def _solves(op: Op, context: Context) -> bool:
    """Whether an operation is a linear solve of the program."""
    # Its handler brings an overflow of the right side to the finite check, which the solver would hide.
    # Another autocast has done so for its own solvers.
    return op.name == "custom_linear_solve" and AUTOCAST_SCOPE not in context.scope_of(op)


def _inside(
    op: Op, operands: Sequence[State], plans: Sequence[Plan], results: Sequence[State]
) -> tuple[Inside, ...]:
    """Returns how a call runs its jaxprs."""

    # If the body of a loop wants a constant in half, the loop gets the constant in both dtypes. So the
    # constant is cast once, outside the loop.
    def enter(index: int, role: Role, state: State, is_wanted: bool) -> Take:
        # The gradients of all iterations are summed in float32, if the constant is in half outside too.
        is_cast = state.is_half or (is_wanted and state.kind != Kind.OTHER and state.number is None)
        return Take.HOISTED if role is Role.CONSTANT and is_cast else conversion(operands[index], state)

    def leave(state: State, index: int | None) -> Take:
        # The predicate of a `while`, and what the matrices of a linear solve give, are no results (None).
        return conversion(state, FLOAT32 if index is None else results[index])

    return tuple(
        Inside(
            inner,
            plan,
            tuple(map(enter, inner.operands, inner.roles, plan.inputs, plan.is_wanted)),
            tuple(map(leave, plan.results, inner.results)),
        )
        for inner, plan in zip(op.inner, plans)
    )


def _results_of_call(op: Op, plans: Sequence[Plan | Analysis], wanted: Sequence[Wanted]) -> tuple[State, ...]:
    """Returns the state of each result of a call: of several branches, the wider one."""
    results: dict[int, State] = {}
    for inner, plan in zip(op.inner, plans):
        for index, carry, state in zip(inner.results, inner.carries, plan.results):
            if index is not None:
                is_stacked = op.name == "scan" and wanted[index] > Wanted.NO
                state = leaving(op, state, carry, is_stacked)
                results[index] = merged(results[index], state) if index in results else state
    return tuple(results[index] for index in range(len(op.equation.outvars)))


def _handler(op: Op, operands: Sequence[State], plans: Sequence[Plan]) -> str:
    """Returns the name of the handler of a call."""
    # JAX transposes the products in the rule of a `custom_jvp` itself. Where they need a dtype of their own,
    # or the rule has no forward mode, autocast makes a backward rule of it.
    if op.name != "custom_jvp_call":
        return op.name
    own_dtypes = any(state.wide_gradient for state in operands) or any(plan.in_fp8 for plan in plans)
    return "custom_vjp_call" if own_dtypes or is_reverse_only(op.equation) else op.name


def _number(value: Array) -> float | None:
    """Returns the value of a scalar that is known while tracing."""
    if value.ndim or isinstance(value, jax.Ref):
        return None
    try:
        return float(value)
    # Under an outer `jax.jit`, a constant may be a tracer of that one.
    except jax.errors.ConcretizationTypeError:
        return None

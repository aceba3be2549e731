"""The first pass of the planner: it goes backwards, and finds the values that are wanted in half.

A value is wanted in half if two conditions hold. A product takes the value, directly or through operations
that pass it on. No operation reads the value in float32, since that operation would read a rounded value. The
pass uses the operations, their courses and their marks. It does not know the states of the values.
"""

import collections
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..._jaxpr.inner import Inner, Role
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import (
    Jaxpr,
    Var,
    call_scope,
    constants,
    is_float32,
    is_literal,
    open_jaxpr,
)
from .activations import Anatomy, find_anatomy
from .gradients import WeightGradients
from .marks import Mark, Marks, entering, find_marks, mark_of
from .op import Around, Course, Op, courses, read_ops
from .predicates import Predicates
from .rules import Rules
from .scopes import Scopes


class Wanted(enum.IntEnum):
    """How much the readers of a value want the value in half."""

    NO = 0
    INDIRECTLY = 1  # An operation passes the value on to a product. There may be other readers.
    WITH_OTHERS = 2  # A product takes the value and rounds it. Other readers may read the rounded value.
    BY_PRODUCTS_ONLY = 3  # All readers are products, which round the value.


@dataclasses.dataclass(frozen=True)
class Demand:
    """What a jaxpr wants in half.

    Attributes:
        reads: how often each variable is read.
        wanted: the variables that some operation wants in half.
        products: for each variable, how many readers take it in half as a product does.
        kept: the variables that an operation reads in float32. If other readers rounded such a variable, that
            operation would read the rounded value too.
        summed: the variables that a residual sum reads in float32. If a product reads such a variable too,
            the sum may read it rounded: casts written by hand would round it for both.
        stored: the residual sums that `half_sums` selects. They are in half, whatever reads them.
    """

    reads: Callable[[Var], int]
    wanted: set[Var] = dataclasses.field(default_factory=set)
    products: collections.Counter[Var] = dataclasses.field(default_factory=collections.Counter)
    kept: set[Var] = dataclasses.field(default_factory=set)
    summed: set[Var] = dataclasses.field(default_factory=set)
    stored: set[Var] = dataclasses.field(default_factory=set)

    def of_var(self, var: Var) -> Wanted:
        """Returns how the variable `var` is wanted in half."""
        if not is_literal(var) and var in self.stored:
            return Wanted.WITH_OTHERS
        if is_literal(var) or var not in self.wanted or self.keeps(var):
            return Wanted.NO
        if self.products[var] >= self.reads(var):
            return Wanted.BY_PRODUCTS_ONLY
        return Wanted.WITH_OTHERS if self.products[var] else Wanted.INDIRECTLY

    def of_results(self, op: Op) -> Wanted:
        """Returns how the results of an operation are wanted: the largest answer among them."""
        outvars = op.equation.outvars
        if len(outvars) == 1:
            return self.of_var(outvars[0])
        return max(map(self.of_var, outvars), default=Wanted.NO)

    def keeps(self, var: Var) -> bool:
        """Whether an operation reads `var` in float32 and should not read a rounded value."""
        if var in self.stored:
            return False
        return var in self.kept or (var in self.summed and not self.products[var])

    def keep(self, var: Var) -> None:
        """Notes that an operation reads `var` in float32."""
        if not is_literal(var):
            self.kept.add(var)

    def sum(self, var: Var) -> None:
        """Notes that a residual sum reads `var` in float32."""
        if not is_literal(var):
            self.summed.add(var)

    def add(self, var: Var, wanted: Wanted) -> None:
        """Notes that one reader wants `var`."""
        if wanted and not is_literal(var) and is_float32(var):
            self.wanted.add(var)
            self.products[var] += wanted >= Wanted.WITH_OTHERS


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """The result of the backward pass for a jaxpr at one point of the program.

    It does not depend on the states of the inputs.

    Attributes:
        inside: the open jaxpr.
        ops: the operations of the jaxpr.
        anatomy: the anatomy of the jaxpr.
        around: the part of the program around the jaxpr.
        courses: the course of each operation.
        marks: the mark of each variable.
        intermediate: the intermediate variables (`gradients`); empty without a `reduce_dtype`.
        decisive: the variables on which the predicate of a loop depends (`predicates`).
        demand: the variables that the jaxpr wants in half.
    """

    inside: Jaxpr
    ops: tuple[Op, ...]
    anatomy: Anatomy
    around: Around
    courses: tuple[Course, ...]
    marks: Marks
    intermediate: frozenset[Var]
    decisive: frozenset[Var]
    demand: Demand

    def makes_weight_gradient(self, op: Op) -> bool:
        """Whether a product makes the gradient of an argument. Without a `reduce_dtype` no product does."""
        outvars = op.equation.outvars
        is_last = self.intermediate.isdisjoint(outvars) and any(map(self.anatomy.reads, outvars))
        return is_last and self.around.is_backward(op)


class DemandPass:
    """Goes backwards through jaxprs: once through a jaxpr for each set of inputs and wanted outputs."""

    def __init__(self, rules: Rules, scopes: Scopes) -> None:
        self._rules, self._scopes = rules, scopes
        self._read: dict[int, tuple[tuple[Op, ...], Anatomy]] = {}
        self._facts: dict[Any, Facts] = {}
        self._alive: list[Jaxpr] = []  # The keys of both hold ids of jaxprs.
        self._predicates = Predicates()
        self._gradients = WeightGradients(lambda jaxpr: self._ops(jaxpr)[0])

    def facts(
        self, jaxpr: Jaxpr, wanted: tuple[Wanted, ...], inputs: tuple[Mark, ...], around: Around
    ) -> Facts:
        """Returns the facts about a jaxpr, closed or open.

        Args:
            jaxpr: the jaxpr.
            wanted: for each output, how it is wanted in half.
            inputs: the mark of each constant and input.
            around: the part of the program around it.
        """
        inside = open_jaxpr(jaxpr)
        key = (id(inside), wanted, inputs, around)
        if key not in self._facts:
            ops, anatomy = self._ops(inside)
            intermediate: frozenset[Var] = frozenset()
            if self._rules.reduce_dtype is not None:
                intermediate = self._gradients.intermediate(inside, around.intermediate, around.backward)
            decisive = self._predicates.values(inside, around.decides)
            steps = courses(ops, around, self._rules, self._scopes, decisive)
            marks = find_marks(inside, inputs, ops, steps)
            demand = Demand(anatomy.reads)
            facts = Facts(inside, ops, anatomy, around, steps, marks, intermediate, decisive, demand)
            self._go_backwards(facts, wanted)
            self._facts[key] = facts
        return self._facts[key]

    def around(self, op: Op, inner: Inner, facts: Facts) -> Around:
        """Returns the part of the program around a jaxpr of a call."""
        scope = call_scope(facts.around.scope_of(op), op.equation)
        scope = self._scopes.that_matters(f"{scope}/{inner.scope}" if inner.scope else scope)
        backward = facts.around.is_backward(op)
        intermediate: tuple[bool, ...] = ()
        if self._rules.reduce_dtype is not None:
            results = [var in facts.intermediate for var in op.equation.outvars]
            intermediate = self._gradients.outputs(inner, results, backward)
        decisive = [var in facts.decisive for var in op.equation.outvars]
        decides = self._predicates.outputs(op.equation, decisive)[op.inner.index(inner)]
        recomputed = facts.around.recomputed or op.recomputes
        return Around(scope, backward, intermediate, recomputed, decides if any(decides) else ())

    def _ops(self, jaxpr: Jaxpr) -> tuple[tuple[Op, ...], Anatomy]:
        inside = open_jaxpr(jaxpr)
        if id(inside) not in self._read:
            self._alive.append(inside)
            ops = read_ops(inside, self._rules)
            self._read[id(inside)] = ops, find_anatomy(inside, ops)
        return self._read[id(inside)]

    def _go_backwards(self, facts: Facts, wanted: Sequence[Wanted]) -> None:
        """Adds to the demand what each operation wants, from the last operation to the first."""
        demand, anatomy = facts.demand, facts.anatomy
        for var, want in zip(facts.inside.outvars, wanted):
            demand.add(var, want)
            if not want:
                demand.keep(var)
        absorbed: set[int] = set()  # The operations that activation functions of half values compute.
        for index, (op, course) in reversed(list(enumerate(zip(facts.ops, facts.courses)))):
            if course.half_sum:
                demand.stored.add(op.equation.outvars[0])
            elif op.is_residual_sum and op.equation.outvars[0] in demand.summed:
                # Sum upon sum, rounding errors would pile up.
                demand.keep(op.equation.outvars[0])
            result = demand.of_results(op)
            ends = result is Wanted.BY_PRODUCTS_ONLY and anatomy.may_end(op)
            if ends:
                (out,) = op.equation.outvars
                absorbed |= anatomy.members[out]
                for source in anatomy.sources[out]:
                    demand.add(source, Wanted.INDIRECTLY)
            if course.category is Category.CALL:
                self._add_call(op, facts)
                continue
            takes_half, gives_half = self._halves(op, course, facts)
            wants = _wants(op, course, takes_half, gives_half, result, self._rules.dtype)
            for var in op.equation.invars:
                demand.add(var, wants)
            is_absorbed = index in absorbed and (
                ends or anatomy.read_only_by(op.equation.outvars[0], absorbed)
            )
            if not is_absorbed and _reads_in_float32(op, course, takes_half, gives_half, demand):
                for var in op.equation.invars:
                    demand.sum(var) if op.is_residual_sum else demand.keep(var)

    def _halves(self, op: Op, course: Course, facts: Facts) -> tuple[bool, bool]:
        """Returns two flags: the operation takes half operands as a product; its result may be in half."""
        operands = [mark_of(var, facts.marks) for var in op.equation.invars]
        takes_half = course.is_half_product and Mark.FULL not in operands
        if takes_half and Mark.BINARY in operands and not facts.demand.of_results(op):
            return False, False  # It picks numbers for float32 operations.
        infers = course.category is Category.INFER and not course.reason
        firm = any(facts.marks[var] >= Mark.ARGUMENT for var in op.equation.outvars)
        return takes_half, takes_half or (infers and not firm)

    def _add_call(self, op: Op, facts: Facts) -> None:
        """Notes the operands that a call wants in half, and those that it keeps in float32."""
        demand, invars = facts.demand, op.equation.invars
        results = [demand.of_var(var) for var in op.equation.outvars]
        wants: dict[int, list[Wanted]] = collections.defaultdict(list)
        for inner in op.inner:
            inside = self._facts_inside(op, inner, facts, results)
            for index, role, var in zip(inner.operands, inner.roles, inside.inside.invars):
                if role is Role.CARRY or var in inside.demand.kept:
                    demand.keep(invars[index])
                if var in inside.demand.summed:
                    demand.sum(invars[index])
                if role is not Role.CARRY and (want := inside.demand.of_var(var)):
                    wants[index].append(want)
        for index, inner_wants in wants.items():
            demand.add(invars[index], min(inner_wants))

    def _facts_inside(self, op: Op, inner: Inner, facts: Facts, results: Sequence[Wanted]) -> Facts:
        operands = [op.equation.invars[index] for index in inner.operands]
        inputs = (
            *(Mark.UNKNOWN for _ in constants(inner.jaxpr)),
            *(entering(mark_of(var, facts.marks), role, var) for var, role in zip(operands, inner.roles)),
        )
        return self.facts(inner.jaxpr, wanted_inside(inner, results), inputs, self.around(op, inner, facts))


def wanted_inside(inner: Inner, results: Sequence[Wanted]) -> tuple[Wanted, ...]:
    """Returns for each output of an inner jaxpr how it is wanted in half.

    An output that is the carry of a loop is not wanted in half: a carry keeps its dtype.
    """
    return tuple(
        Wanted.NO if index is None or carry else results[index]
        for index, carry in zip(inner.results, inner.carries)
    )


def _wants(
    op: Op, course: Course, takes_half: bool, gives_half: bool, result: Wanted, half: np.dtype
) -> Wanted:
    """Returns how an operation wants its operands in half. Its results are wanted as `result`."""
    if takes_half:
        return Wanted.BY_PRODUCTS_ONLY
    if op.is_cast:
        return Wanted.INDIRECTLY if op.equation.outvars[0].aval.dtype == half else result
    if course.category is Category.MOVE or (course.category is Category.INFER and op.traits.selects):
        return result
    if course.category is Category.INFER and op.traits.saturates:
        return Wanted.INDIRECTLY
    return min(result, Wanted.INDIRECTLY) if gives_half else Wanted.NO


def _reads_in_float32(op: Op, course: Course, takes_half: bool, gives_half: bool, demand: Demand) -> bool:
    """Whether an operation computes a float32 value. Its operands should then not be rounded."""
    if takes_half or (course.category is Category.INFER and op.traits.saturates):
        return False
    keeps = any(map(demand.keeps, op.equation.outvars))
    if course.category is Category.MOVE or op.traits.selects or op.is_cast:
        return keeps
    return (keeps or not gives_half) and any(map(is_float32, op.equation.outvars))

"""The pass that finds the half values which need a path in float32 for their gradients.

Such a value is a pair: its half, which everything reads, and its path, the same value in float32 that nothing
reads. Gradients go back through the path. Moves and calls take both parts of a pair.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable

from ...._jaxpr.read import Var, is_literal
from ..plan import (
    Call,
    Decision,
    Inside,
    Move,
    MoveBoth,
    Pairs,
    Plan,
    Product,
    Recompute,
    Run,
    Skip,
    Take,
    WeightGradient,
)
from ..rules import Rules

_IN_FLOAT32 = (Take.FLOAT32, Take.BROADCAST)


def pairs(plan: Plan, rules: Rules) -> Plan:
    """Finds the pairs, and tells moves and calls which of their half results float32 operations read."""
    del rules
    found = _find_pairs(plan)
    plan = plan.with_decisions([_with_paths(decision, found) for decision in plan.decisions])
    return dataclasses.replace(plan, pairs=found)


# Several operations may read a half value, such as logits, in float32: the `exp` of a softmax and the lookup
# of the label. The cotangent of each reader is float32, and all of them must meet before they are rounded to
# half: the cotangents p/N and -1/N of a well-fitted example, rounded one by one, add up to noise. All readers
# of one value share one cast to float32, where their cotangents meet. But a reader may lie behind a move, or
# in a call.
def _find_pairs(plan: Plan) -> Pairs:
    inside = plan.analysis.inside
    readers = _Readers(plan)
    for decision in plan.decisions:
        readers.note(_read_in_float32(decision))
        readers.note_moves(decision)
    for out in inside.outvars:
        readers.note([out])
    read = readers.before_moves()
    # The cotangent of a value that is read in float32 once is rounded once in any case.
    starts = frozenset(var for var, count in readers.count.items() if count > 1)
    # An input may have a path that starts outside.
    leads_out = starts.union(inside.invars)
    outputs = tuple(readers.is_half(out) and readers.origin(out) in leads_out for out in inside.outvars)
    return Pairs(starts, read, outputs)


class _Readers:
    """The float32 readers of the half values of a plan, found in one walk forwards.

    Attributes:
        count: how many readers each half value has, also behind moves.
    """

    def __init__(self, plan: Plan) -> None:
        self._states = plan.states
        self.count: collections.Counter[Var] = collections.Counter()
        self._read: set[Var] = set()
        self._origins: dict[Var, Var] = {}  # For each moved half variable the one that was moved.
        self._moves: list[tuple[Var, Var]] = []  # Of half variables, in order: the result and the operand.

    def is_half(self, var: Var) -> bool:
        return not is_literal(var) and self._states[var].is_half

    def origin(self, var: Var) -> Var:
        """Returns the half variable of which `var` is a moved one."""
        return self._origins.get(var, var)

    def note(self, variables: Iterable[Var]) -> None:
        """Notes that one operation reads some variables, if they are half."""
        # An operation that reads a variable twice counts once: its cotangents meet in the operation.
        for var in set(filter(self.is_half, variables)):
            self._read.add(var)
            self.count[self.origin(var)] += 1

    def note_moves(self, decision: Decision) -> None:
        """Notes the half values that a decision moves."""
        for out, operand in _moved(decision):
            if self.is_half(operand) and self.is_half(out):
                self._origins[out] = self.origin(operand)
                self._moves.append((out, operand))

    def before_moves(self) -> frozenset[Var]:
        """Returns the half variables that are read in float32: by an operation, or after a move."""
        for out, operand in reversed(self._moves):
            if out in self._read:
                self._read.add(operand)
        return frozenset(self._read)


def _with_paths(decision: Decision, pairs: Pairs) -> Decision:
    """Returns a decision whose action knows whether float32 operations read its half results."""
    action, outvars = decision.action, decision.op.equation.outvars
    # `MoveBoth` makes its own path.
    if isinstance(action, Move) and not pairs.read.isdisjoint(outvars):
        action = dataclasses.replace(action, has_paths=True)
    elif isinstance(action, Call) and (paired := _paired_results(decision, action, pairs.read)):
        action = dataclasses.replace(action, paired=paired)
    else:
        return decision
    return dataclasses.replace(decision, action=action)


def _paired_results(decision: Decision, action: Call, read: frozenset[Var]) -> tuple[int, ...]:
    """Returns the indexes of the half results of a call that should leave it as pairs."""
    # Gradients of such a result meet inside the call, and float32 operations outside read it. It leaves as
    # two arrays; a carry cannot, since a loop gives as many values as it takes.
    outvars = decision.op.equation.outvars
    paired = {
        index
        for each in action.inner
        for index, carry, is_paired in zip(each.inner.results, each.inner.carries, each.plan.pairs.outputs)
        if is_paired and index is not None and not carry
    }
    return tuple(sorted(i for i in paired if outvars[i] in read and decision.results[i].is_half))


def _read_in_float32(decision: Decision) -> Iterable[Var]:
    """Returns the operands that an operation takes in float32, if they are half."""
    action, invars = decision.action, decision.op.equation.invars
    match action:
        case Run() | Product() | WeightGradient():
            return [var for var, take in zip(invars, action.operands) if take in _IN_FLOAT32]
        case MoveBoth():
            return invars[:1]
        case Recompute():
            return (*action.region.sources, *action.region.extras)
        case Call():
            return [invars[index] for index in set(itertools.chain(*map(_entering_in_float32, action.inner)))]
    return ()


def _entering_in_float32(inside: Inside) -> Iterable[int]:
    """Returns the indexes of the operands of a call that one of its jaxprs reads in float32."""
    taken = zip(inside.inner.operands, inside.enter)
    in_float32 = [index for index, take in taken if take is Take.HOISTED or take in _IN_FLOAT32]
    return (*in_float32, *inside.reads)


def _moved(decision: Decision) -> list[tuple[Var, Var]]:
    """Returns each result that is an operand moved, with that operand."""
    op, action = decision.op, decision.action
    if isinstance(action, (Move, MoveBoth)) or (isinstance(action, Skip) and action.operand is not None):
        return [(out, op.equation.invars[op.moved_operand(n)]) for n, out in enumerate(op.equation.outvars)]
    return []

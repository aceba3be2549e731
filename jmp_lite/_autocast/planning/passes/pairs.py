"""The pass that finds the half values which need a path in float32 for their gradients.

Several operations may read a half value, such as logits, in float32: the `exp` of a softmax and the lookup
of the label. The cotangent of each reader is float32, and all of them must meet before they are rounded to
half: the cotangents p/N and -1/N of a well-fitted example, rounded one by one, add up to noise. All readers
of one value share one cast to float32, where their cotangents meet. But a reader may lie behind a move, or
in a call.

So such a value is a pair: its half, which everything reads, and its path, the same value in float32 that
nothing reads. Gradients go back through the path. Moves and calls take both parts of a pair. A value that is
read in float32 once needs no path, since its cotangent is rounded once in any case.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable

from ...._jaxpr.read import Equation, Var, is_literal
from ..plan import Call, Decision, Move, Pairs, Plan, Product, Recompute, Run, Skip, Take, WeightGradient
from ..rules import Rules

_IN_FLOAT32 = (Take.FLOAT32, Take.ROUNDED, Take.BROADCAST)


def pairs(plan: Plan, rules: Rules) -> Plan:
    """Finds the pairs, and tells moves and calls which of their half results float32 operations read."""
    del rules
    found = _find_pairs(plan)
    plan = plan.with_decisions([_with_paths(decision, found) for decision in plan.decisions])
    return dataclasses.replace(plan, pairs=found)


def _find_pairs(plan: Plan) -> Pairs:
    inside = plan.analysis.inside
    sources: dict[Var, Var] = {}  # For each moved half variable the one that was moved.
    meets: collections.Counter[Var] = collections.Counter()
    read: set[Var] = set()

    def is_half(var: Var) -> bool:
        return not is_literal(var) and plan.states[var].is_half

    def note(variables: Iterable[Var]) -> None:
        # An operation that reads a variable twice counts once: its cotangents meet in the operation.
        for var in set(filter(is_half, variables)):
            read.add(var)
            meets[sources.get(var, var)] += 1

    moves: list[tuple[Var, Var]] = []  # Of half variables, in order: the result and the operand.
    for decision in plan.decisions:
        note(_read_in_float32(decision))
        for out, operand in _moved(decision):
            if is_half(operand) and is_half(out):
                sources[out] = sources.get(operand, operand)
                moves.append((out, operand))
    for out in inside.outvars:
        note([out])
    for out, operand in reversed(moves):
        if out in read:
            read.add(operand)
    inputs = set(inside.invars)
    starts = {var for var, count in meets.items() if count > 1}
    begins = (sources.get(out, out) if is_half(out) else None for out in inside.outvars)
    outputs = tuple(var is not None and (var in starts or var in inputs) for var in begins)
    return Pairs(frozenset(starts), frozenset(read), outputs)


def _with_paths(decision: Decision, pairs: Pairs) -> Decision:
    """Returns a decision whose action knows which of its half results float32 operations read."""
    action, outvars = decision.action, decision.op.equation.outvars
    if isinstance(action, Move) and not action.both and not pairs.read.isdisjoint(outvars):
        action = dataclasses.replace(action, paths=tuple(var in pairs.read for var in outvars))
    elif isinstance(action, Call) and (paired := _paired_results(decision, action, pairs.read)):
        action = dataclasses.replace(action, paired=paired)
    else:
        return decision
    return dataclasses.replace(decision, action=action)


def _paired_results(decision: Decision, action: Call, read: frozenset[Var]) -> tuple[int, ...]:
    """Returns the indexes of the half results of a call that should leave it as pairs.

    Gradients of such a result meet inside the call, and float32 operations outside read it.
    """
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
        case Move(both=True):
            return invars[:1]
        case Recompute():
            sums = [_broadcast(*each) for each in action.sums.values()]
            return (*action.region.sources, *action.region.extras, *itertools.chain(*sums))
        case Call():
            entering = [pair for each in action.inner for pair in zip(each.inner.operands, each.enter)]
            indexes = {index for index, take in entering if take is Take.HOISTED or take in _IN_FLOAT32}
            return [invars[index] for index in indexes.union(*(each.reads for each in action.inner))]
    return ()


def _broadcast(equation: Equation, action: Run) -> list[Var]:
    """Returns the operands that a sum broadcasts."""
    return [var for var, take in zip(equation.invars, action.operands) if take is Take.BROADCAST]


def _moved(decision: Decision) -> list[tuple[Var, Var]]:
    """Returns each result that is an operand moved, with that operand."""
    op, action = decision.op, decision.action
    if isinstance(action, Move) or (isinstance(action, Skip) and action.operand is not None):
        return [(out, op.equation.invars[op.moved_operand(n)]) for n, out in enumerate(op.equation.outvars)]
    return []

"""Asks, backwards through a jaxpr, which values are wanted in half: the second pass of a plan.

A value is wanted in half if a product takes it, directly or through operations that would pass it on, and no
operation reads it in float32, which should not read a rounded one.
"""

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .activations import Anatomy
from .jaxprs import Inner, Role, equations, inner_jaxprs, is_float32, open_jaxpr
from .rules import List
from .states import Compute, Decision, Demand, Plan, Wanted

if TYPE_CHECKING:
    from .plan import Planner


def find_demand(
    planner: "Planner",
    inside: Any,
    functions: Anatomy,
    decisions: Sequence[Decision],
    wanted: Sequence[Wanted],
) -> Demand:
    """Returns what an open jaxpr wants in half.

    Args:
        planner: who plans it, for the jaxprs within it.
        inside: the jaxpr.
        functions: its anatomy.
        decisions: for each equation, what would be done if everything were wanted in half.
        wanted: for each output, whether it is wanted in half.
    """
    demand = Demand(functions.reads)
    for var, want in zip(inside.outvars, wanted):
        demand.add(var, want)
        if not want:
            demand.keep(var)
    absorbed: set[int] = set()  # What activation functions compute themselves, of half values.
    for place, (equation, decision) in reversed(list(enumerate(zip(equations(inside), decisions)))):
        ends = demand.of_all(equation.outvars) is Wanted.BY_PRODUCTS
        if ends and planner.may_be_activation(equation, inside, functions):
            (out,) = equation.outvars
            absorbed |= functions.members[out]
            for source in functions.sources[out]:
                demand.add(source, Wanted.YES)
        else:
            ends = False
        _add(planner, demand, equation, decision)
        alone = place in absorbed and (ends or functions.read_only_by(equation.outvars[0], absorbed))
        if not alone and _reads_in_float32(equation, decision, demand):
            for var in equation.invars:
                demand.keep(var)
    return demand


def _add(planner: "Planner", demand: Demand, equation: Any, decision: Decision) -> None:
    """Notes the operands that `equation` wants in half, and those that a call keeps in float32."""
    name = equation.primitive.name
    result = demand.of_all(equation.outvars)
    wanted = Wanted.NO
    if decision.which is List.CALL:
        results = [demand.of(var) for var in equation.outvars]
        inners = inner_jaxprs(equation)
        # Planned by what is wanted now; `decision` was made as if everything were.
        plans = [
            planner.plan(plan.jaxpr, plan.inputs, wanted_inside(inner, results), plan.scope)
            for inner, plan in zip(inners, decision.inner)
        ]
        for place, want, times in _wanted_by_call(inners, plans):
            demand.add(equation.invars[place], want, times)
        for inner, plan in zip(inners, plans):
            for place, role, var in zip(inner.operands, inner.roles, open_jaxpr(inner.jaxpr).invars):
                if role is Role.CARRY or var in plan.demand.kept:
                    demand.keep(equation.invars[place])
    elif decision.which is List.ALLOW and decision.compute is Compute.HALF:
        wanted = Wanted.BY_PRODUCTS
    elif decision.which is List.MOVE or name == "select_n":  # Which moves one of two values.
        wanted = result
    elif decision.which is List.INFER and decision.compute is not Compute.FLOAT32:
        wanted = min(result, Wanted.YES)
    elif name == "convert_element_type":
        wanted = Wanted.YES if equation.params["new_dtype"] == planner.rules.dtype else result
    for var in equation.invars:
        demand.add(var, wanted)


def _reads_in_float32(equation: Any, decision: Decision, demand: Demand) -> bool:
    """Whether an operation computes a float32 value of its operands, for which they should not be rounded."""
    if decision.which is List.CALL or (decision.which is List.ALLOW and decision.compute is Compute.HALF):
        return False
    if decision.which is List.MOVE or equation.primitive.name in ("select_n", "convert_element_type"):
        return any(var in demand.kept for var in equation.outvars)
    computes = decision.compute is Compute.FLOAT32 or any(var in demand.kept for var in equation.outvars)
    return computes and any(map(is_float32, equation.outvars))


def wanted_inside(inner: Inner, results: Sequence[Wanted]) -> tuple[Wanted, ...]:
    """Returns for each output of an inner jaxpr whether it is wanted in half; a carry keeps its dtype."""
    return tuple(
        Wanted.NO if place is None or carry else results[place]
        for place, carry in zip(inner.results, inner.carries)
    )


def _wanted_by_call(inners: Sequence[Inner], plans: Sequence[Plan]) -> list[tuple[int, Wanted, int]]:
    """The places of the operands that a call wants in half, how it wants them, and how many times."""
    wants: dict[int, list[tuple[Wanted, int]]] = collections.defaultdict(list)
    for inner, plan in zip(inners, plans):
        for place, role, var in zip(inner.operands, inner.roles, open_jaxpr(inner.jaxpr).invars):
            if role is not Role.CARRY:
                wants[place].append((plan.demand.of(var), 2 if role is Role.CONSTANT else 1))
    found = []
    for place, each in wants.items():
        wanted = [want for want, _ in each if want]
        if wanted:
            found.append((place, min(wanted), sum(times for want, times in each if want)))
    return found

"""Asks, backwards through a jaxpr, which values are wanted in half: the second pass of the planner.

A value is wanted in half if a product takes it, directly or through operations that would pass it on, and if
no operation reads it in float32: that operation should not read a rounded value.
"""

import collections
from collections.abc import Callable, Sequence

import numpy as np

from .activations import Anatomy
from .jaxprs import Equation, Inner, Jaxpr, Role, equations, inner_jaxprs, is_float32, is_literal, open_jaxpr
from .plan import Decision, Demand, Wanted
from .primitives import List, traits_of

DemandsInside = Callable[[Equation, Decision, Sequence[Wanted]], Sequence[Demand]]
"""Returns the demand of each jaxpr of a call, of the call, its decision, and how its results are wanted."""


def find_demand(
    inside: Jaxpr,
    functions: Anatomy,
    decisions: Sequence[Decision],
    wanted: Sequence[Wanted],
    half: np.dtype,
    demands_inside: DemandsInside,
) -> Demand:
    """Returns what an open jaxpr wants in half.

    Args:
        inside: the jaxpr.
        functions: its anatomy.
        decisions: for each equation, the decision if everything were wanted in half.
        wanted: for each output, whether it is wanted in half.
        half: the half dtype.
        demands_inside: returns the demands of the jaxprs of a call.
    """
    demand = Demand(functions.reads)
    for var, want in zip(inside.outvars, wanted):
        demand.add(var, want)
        if not want:
            demand.keep(var)
    absorbed: set[int] = set()  # The equations that activation functions of half values compute themselves.
    for index, (equation, decision) in reversed(list(enumerate(zip(equations(inside), decisions)))):
        joins = _is_join(equation)
        if joins and equation.outvars[0] in demand.joined:  # Sum upon sum, rounding errors would pile up.
            demand.keep(equation.outvars[0])
        ends = demand.of_all(equation.outvars) is Wanted.BY_PRODUCTS and functions.may_end(equation)
        if ends:
            (out,) = equation.outvars
            absorbed |= functions.members[out]
            for source in functions.sources[out]:
                demand.add(source, Wanted.YES)
        if decision.which is List.CALL:
            results = [demand.of(var) for var in equation.outvars]
            _add_call(demand, equation, demands_inside(equation, decision, results))
            continue
        wants = _wants(equation, decision, demand.of_all(equation.outvars), half)
        for var in equation.invars:
            demand.add(var, wants)
        alone = index in absorbed and (ends or functions.read_only_by(equation.outvars[0], absorbed))
        if not alone and _reads_in_float32(equation, decision, demand):
            for var in equation.invars:
                demand.join(var) if joins else demand.keep(var)
    return demand


def wanted_inside(inner: Inner, results: Sequence[Wanted]) -> tuple[Wanted, ...]:
    """Returns for each output of an inner jaxpr whether it is wanted in half; a carry keeps its dtype."""
    return tuple(
        Wanted.NO if index is None or carry else results[index]
        for index, carry in zip(inner.results, inner.carries)
    )


def _wants(equation: Equation, decision: Decision, result: Wanted, half: np.dtype) -> Wanted:
    """Returns how an operation wants its operands, whose results are wanted as `result`."""
    name = equation.primitive.name
    if decision.which is List.ALLOW and decision.takes_half:
        return Wanted.BY_PRODUCTS
    if decision.which is List.MOVE or (decision.which is List.INFER and traits_of(name).selects):
        return result
    if decision.which is List.INFER and traits_of(name).saturates:
        return Wanted.YES
    if decision.which is List.INFER and decision.gives_half:
        return min(result, Wanted.YES)
    if name == "convert_element_type":
        return Wanted.YES if equation.params["new_dtype"] == half else result
    return Wanted.NO


def _add_call(demand: Demand, equation: Equation, demands: Sequence[Demand]) -> None:
    """Notes the operands that a call wants in half, and those that it keeps in float32."""
    wants: dict[int, list[tuple[Wanted, int]]] = collections.defaultdict(list)
    for inner, each in zip(inner_jaxprs(equation), demands):
        for index, role, var in zip(inner.operands, inner.roles, open_jaxpr(inner.jaxpr).invars):
            if role is Role.CARRY or var in each.kept:
                demand.keep(equation.invars[index])
            if var in each.joined:
                demand.join(equation.invars[index])
            if role is not Role.CARRY and (want := each.of(var)):
                wants[index].append((want, 2 if role is Role.CONSTANT else 1))
    for index, found in wants.items():
        least = min(want for want, _ in found)
        demand.add(equation.invars[index], least, sum(times for _, times in found))


def _is_join(equation: Equation) -> bool:
    """Whether an operation is a residual sum: one of two values of the same shape."""
    if equation.primitive.name != "add":
        return False
    shape = equation.outvars[0].aval.shape
    return all(not is_literal(var) and var.aval.shape == shape for var in equation.invars)


def _reads_in_float32(equation: Equation, decision: Decision, demand: Demand) -> bool:
    """Whether an operation computes a float32 value from its operands, which should then not be rounded."""
    traits = traits_of(equation.primitive.name)
    if decision.which is List.ALLOW and decision.takes_half:
        return False
    if decision.which is List.INFER and traits.saturates:
        return False
    if decision.which is List.MOVE or traits.selects or equation.primitive.name == "convert_element_type":
        return any(map(demand.keeps, equation.outvars))
    computes = not decision.gives_half or any(map(demand.keeps, equation.outvars))
    return computes and any(map(is_float32, equation.outvars))

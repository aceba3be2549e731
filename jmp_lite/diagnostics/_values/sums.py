"""The sums of the gradients of a value, which have its dtype, whatever computes the gradients."""

from collections.abc import Mapping

from ..._jaxpr import (
    Category,
    Equation,
    Jaxpr,
    Var,
    equations,
    inner_jaxprs,
    is_literal,
    open_jaxpr,
    traits_of,
)
from .reference import is_narrow


def sums_of_gradients(jaxpr: Jaxpr) -> dict[int, Equation]:
    """Returns for each sum in half, by the id of its equation, the equation that casts it to float32.

    JAX adds up the gradients of a value that was cast to half before it casts their sum back, also over the
    iterations of a scan that reads the value.
    """
    found: dict[int, Equation] = {}
    every = equations(jaxpr)
    producers = {var: equation for equation in every for var in equation.outvars}
    for equation in every:
        if equation.primitive.name == "convert_element_type" and not is_narrow(equation.outvars[0]):
            _follow(equation.invars[0], producers, equation, found)
        if traits_of(equation.primitive.name).category is Category.CALL:
            for inner in inner_jaxprs(equation):
                found = sums_of_gradients(inner.jaxpr) | found
    return found


def _follow(var: Var, producers: Mapping[Var, Equation], cast: Equation, found: dict[int, Equation]) -> None:
    """Notes the sums in half that give a value, with the equation that casts it."""
    equation = None if is_literal(var) or not is_narrow(var) else producers.get(var)
    if equation is None:
        return
    name, category = equation.primitive.name, traits_of(equation.primitive.name).category
    if name == "add_any":
        found[id(equation)] = cast
    if name == "add_any" or category is Category.MOVE:
        for operand in equation.invars:
            _follow(operand, producers, cast, found)
    elif category is Category.CALL:
        _follow_inside(equation, equation.outvars.index(var), cast, found)


def _follow_inside(call: Equation, number: int, cast: Equation, found: dict[int, Equation]) -> None:
    """Notes the sums in half that give a result of a call, by the number of the result."""
    for inner in inner_jaxprs(call):
        body = open_jaxpr(inner.jaxpr)
        producers = {var: equation for equation in equations(body) for var in equation.outvars}
        for index, out in zip(inner.results, body.outvars):
            if index == number:
                _follow(out, producers, cast, found)

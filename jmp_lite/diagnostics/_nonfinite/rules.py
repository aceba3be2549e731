"""The lines of backward rules. JAX gives the operations of a rule of `jax.custom_vjp` the line of its call.

So each rule is traced once more by itself, where its operations have lines of their own.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from ..._jaxpr.read import (
    Array,
    Equation,
    Jaxpr,
    all_equations,
    bind_params,
    describe,
    equations,
    params_with_backward_rule,
)
from .._values.sites import Site, line_of

Lines = dict[tuple[str, str, str], str]
"""The line of an operation in a rule, by the line of the call, the operation, and its result."""


def lines_of_rules(jaxpr: Jaxpr) -> Lines:
    """Returns the lines of the operations of all backward rules in a function, as it was traced."""
    lines: Lines = {}
    calls = (each for each in all_equations(jaxpr) if each.primitive.name == "custom_vjp_call")
    for call in calls:
        for rule, shapes in _runs_of_rule(call):
            # A rule that runs between shards cannot be traced by itself: its axes have no names there.
            with contextlib.suppress(NameError):
                for equation in equations(jax.make_jaxpr(rule)(*shapes)):
                    key = (line_of(call), equation.primitive.name, describe(equation.outvars[0].aval))
                    lines.setdefault(key, line_of(equation))
    return lines


def own_line(site: Site, lines: Lines) -> str:
    """Returns the line of a site: in its backward rule if it is in one."""
    return lines.get((site.line, site.operation, site.array), site.line)


def _runs_of_rule(call: Equation) -> list[tuple[Callable[..., Any], list[Any]]]:
    """Returns the backward rule of a call, and the shapes of what it takes: only its forward rule knows."""
    runs: list[tuple[Callable[..., Any], list[Any]]] = []

    def recorded(rule: Callable[..., Any], *arrays: Array) -> Any:
        runs.append((rule, [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]))
        return rule(*arrays)

    params = bind_params(call.primitive, params_with_backward_rule(call, recorded))

    def gradients(operands: list[Array], cotangents: list[Array]) -> Any:
        _, pullback = jax.vjp(lambda *operands: call.primitive.bind(*operands, **params), *operands)
        return pullback(cotangents)

    shapes = [
        [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in variables]
        for variables in (call.invars, call.outvars)
    ]
    jax.eval_shape(gradients, *shapes)
    return runs

"""Half values that enter loops and branches, or leave them, as the source has them: scalars, and casts."""

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ..._jaxpr import (
    Equation,
    Jaxpr,
    Place,
    all_equations,
    inner_jaxprs,
    is_literal,
    open_jaxpr,
    users_places,
)
from .._values.casts import Casts, casts_around, casts_entering
from .._values.conversions import constants_at
from .._values.reference import is_narrow
from .._values.sites import line_of
from .modules import Module
from .origins import Origin, Sources, edit_of, joined, number_in_half
from .ties import Ties

Key: TypeAlias = tuple[str, tuple[Place, ...]]
"""A line, and the calls around it."""
Checkpoints: TypeAlias = Mapping[Place, Sequence[tuple[Place, ...]]]
"""By the expressions in functions under `jax.checkpoint`, the calls of these functions."""


def entering(
    equation: Equation,
    line: str,
    places: Sequence[Place],
    operands: Sequence[Origin],
    ties: Ties,
    is_sure: Callable[[str], bool],
) -> tuple[dict[int, Origin], Sources, Casts]:
    """Returns what some operands of a call come from, the edits of the lines that make them half, and casts.

    A half scalar comes from the call that makes it. A value in half may have a cast that JAX left out, which
    is noted in `ties`. `places` are as in `casts_around`; `is_sure` is False for a line whose dtype may be
    float32.
    """
    found = _of_constants(equation, line).items()
    entered = {n: operands[n]._replace(sources=sources) for n, sources in found}
    edits = joined(entered.values())
    casts = casts_entering(equation, places)
    for n, lines in casts.operands.items():
        lines = operands[n].left_out(tuple(filter(is_sure, lines)))
        if is_narrow(equation.invars[n]) and lines:
            left_out = Casts({n: lines})
            ties.of_casts(equation, operands, left_out)
            entered[n] = operands[n]._replace(casts=lines)
            edits |= edit_of(equation, left_out)
    return entered, edits, casts


def _of_constants(equation: Equation, line: str) -> dict[int, Sources]:
    """Returns for each half scalar among the operands of a call the edit of its line, if known."""
    scalars = [n for n, var in enumerate(equation.invars) if is_narrow(var) and is_literal(var)]
    if not scalars:
        return {}
    edits = list(map(number_in_half, constants_at(line, equation.primitive.name)))
    if len(edits) != len(scalars):
        is_loop = equation.primitive.name in ("scan", "while")
        edits = [Module(f"the carry of {line}", "", carries=(line,))] * len(scalars) if is_loop else []
    return dict(zip(scalars, (frozenset({edit}) for edit in edits)))


def scalars_of_branches(equation: Equation) -> dict[tuple[int, int], Module]:
    """Returns the edit of each half scalar that branches of a `cond` return, by branch and result."""
    if equation.primitive.name != "cond":
        return {}
    parts = enumerate(open_jaxpr(part.jaxpr).outvars for part in inner_jaxprs(equation))
    results = [(branch, n, var) for branch, outvars in parts for n, var in enumerate(outvars)]
    scalars = [(branch, n) for branch, n, var in results if is_literal(var) and is_narrow(var)]
    line = line_of(equation)
    edits = list(map(number_in_half, constants_at(line, "cond")))
    # Without its line it is no edit, and no other half result of the branches is widened.
    edits = edits if len(edits) == len(scalars) else [Module(f"a branch on {line}", "")] * len(scalars)
    return dict(zip(scalars, edits))


def calls_of_checkpoints(jaxpr: Jaxpr) -> Checkpoints:
    """Returns the calls of functions under `jax.checkpoint`, by the expressions in these functions.

    In a gradient only the recomputed operations are inside of an equation.
    """
    found = collections.defaultdict[Place, dict[tuple[Place, ...], None]](dict)
    for equation in all_equations(jaxpr):
        if equation.primitive.name == "remat2":
            inside = (all_equations(open_jaxpr(part.jaxpr)) for part in inner_jaxprs(equation))
            for operation in itertools.chain.from_iterable(inside):
                for place in [*users_places(operation)][-1:]:
                    found[place][tuple(users_places(equation))] = None
    return {place: [*calls] for place, calls in found.items()}


def casts_of_calls(line: str, primitive: str, places: Sequence[Place], checkpoints: Checkpoints) -> Casts:
    """Returns the casts of the expression that made an operation, in all calls of its function."""
    calls = checkpoints.get(places[-1], [()]) if places else [()]
    found = [casts_around(line, primitive, [*places, *each]) for each in calls]
    is_one = all(len(each) == 1 for each in found)
    return _merged(list(itertools.chain.from_iterable(found))) if is_one else Casts({})


def _merged(every: Sequence[Casts]) -> Casts:
    """Returns the casts around one expression of all calls of its function."""
    if len(every) == 1:
        return every[0]
    positions = {position: None for casts in every for position in casts.operands}
    lines = {n: dict.fromkeys(line for each in every for line in each.operands.get(n, ())) for n in positions}
    results = dict.fromkeys(line for casts in every for line in casts.of_result)
    operands = {position: tuple(own) for position, own in lines.items()}
    paths = frozenset(itertools.chain.from_iterable(casts.paths for casts in every))
    return every[0]._replace(operands=operands, of_result=tuple(results), paths=paths)


def keys_of(line: str, places: Sequence[Place], checkpoints: Checkpoints) -> list[Key]:
    """Returns what an operation and its backward pass share: the calls around it, or its line alone."""
    calls = checkpoints.get(places[-1], ()) if places else ()
    # JAX hoists invariant operations out of the loop of a forward pass, but not out of a backward pass.
    return [(line, (*places, *(calls[0] if len(calls) == 1 else ()))), (line, ())]

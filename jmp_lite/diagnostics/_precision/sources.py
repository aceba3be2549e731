"""Where the half values of a program come from: casts in lines of the user, and arguments in half.

If such a cast is left out, JAX's promotion computes in float32 all that depends on its result, up to a cast
back to float32. So a source is a remedy that a user can write, where a scope is not.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..._autocast import has_floating
from ..._jaxpr import (
    Arguments,
    Category,
    Equation,
    Forward,
    Jaxpr,
    all_equations,
    call_scope,
    casting_line,
    inner_jaxprs,
    is_by_autocast,
    is_literal,
    is_transposed,
    scope_of,
    traits_of,
)
from ..._jaxpr import equations as equations_of
from ..._paths import visible_scope
from .._values.numbers import Numbers, makes_half, written
from .._values.reference import is_narrow
from .._values.sites import line_of
from .modules import Module, is_of_library

Sources = frozenset[Module]

_LIBRARY = Module("a library", "")
_EVERY = Module("every source", "")
"""For a cast that JAX makes for a gradient, and for zeros in half: they are what another half value needs."""


class _Origin(NamedTuple):
    """What a value comes from."""

    sources: Sources = frozenset()  # Of a half value, or of the half value that was cast to a float32 value.
    line: str = ""  # For a float32 value, the line that has widened it.


_union = frozenset[Module]().union


def _sources_of(origins: Iterable[_Origin]) -> Sources:
    return _union(*(origin.sources for origin in origins))


def sources_of(
    traced: Arguments, is_step: bool, numbers: Numbers, layers: Sequence[Module] = ()
) -> list[Sources]:
    """Returns for each operation of a report what its half values come from.

    An operation in float32 has sources if one of the `numbers` that it takes was converted to half. What one
    of the `layers` of a library gives comes from it alone: it casts whatever it takes to its own dtype.
    """
    named = zip(traced.names, traced.arrays, strict=True)
    source = lambda name: _Origin(frozenset({Module(name.split("/")[0], "", is_argument=True)}))
    operation = lambda equation, operands: _operation(numbers, equation, operands, search.calls, layers)
    join = lambda first, second: _Origin(first.sources | second.sources, first.line or second.line)
    search = Forward[_Origin](operation, join, _Origin())
    search.run(traced.jaxpr, [source(name) if is_narrow(array) else _Origin() for name, array in named])
    found = {key: _sources_of(origins) for key, origins in search.found.items()}
    every = _union(*found.values()) - {_EVERY, _LIBRARY}
    # In a loss, a layer of a library has a dtype of its own. In a step, an optimizer casts to the dtypes of
    # its parameters.
    of_library = frozenset(source for source in every if source.is_argument and is_step)
    carried = _carried(traced.jaxpr, search.found)

    def resolved(sources: Sources) -> Sources:
        own = (sources | of_library if _LIBRARY in sources else sources) - {_LIBRARY}
        own = every if _EVERY in own else own
        return frozenset(dataclasses.replace(each, carries=carried.get(each, ())) for each in own)

    is_half = lambda equation: any(map(is_narrow, equation.outvars)) or _of_numbers(numbers, equation)
    operations = _operations(traced.jaxpr)
    return [resolved(found[id(each)]) if is_half(each) else frozenset() for each in operations]


def _operation(
    numbers: Numbers,
    equation: Equation,
    operands: list[_Origin],
    calls: Sequence[Equation],
    layers: Sequence[Module],
) -> list[_Origin]:
    # A function that JAX jits, such as `jax.nn.one_hot`, has no line of its own: the user's line calls it.
    line = next(filter(None, map(line_of, (equation, *reversed(calls)))), "")
    # `jnp.mean` of half values widens them, sums, and casts back, on one line: the user wrote no cast.
    taken = (origin for origin in operands if origin.line in ("", line))
    sources = _sources_of(taken) | _of_numbers(numbers, equation)
    if any(map(is_narrow, equation.outvars)):
        sources = sources or _cast(equation, line)
    if sources and (own := _layer_of(equation, calls, layers)):
        sources = own
    return [_Origin(sources, "" if is_narrow(var) else line) for var in equation.outvars]


def _of_numbers(numbers: Numbers, equation: Equation) -> Sources:
    """Returns the lines that convert the numbers of an equation to half."""
    found = (written(numbers, equation, position) for position in range(len(equation.invars)))
    lines = (number.line for number in found if number is not None and number.line)
    return frozenset(Module(line, "", (line,), casts="half precision") for line in lines)


def _layer_of(equation: Equation, calls: Sequence[Equation], layers: Sequence[Module]) -> Sources:
    """Returns the layer that an equation belongs to; empty if it is not in one."""
    if not layers:
        return frozenset()
    around = functools.reduce(lambda scope, call: call_scope(scope_of(call, scope), call), calls, "")
    scope = visible_scope(scope_of(equation, around))
    return frozenset(layer for layer in layers if f"{scope}/".startswith(f"{layer.name}/"))


def _cast(equation: Equation, line: str) -> Sources:
    """Returns an operation that makes half values of others as their source; none if it is of a library."""
    dtype = equation.outvars[0].aval.dtype.name
    if is_transposed(equation):
        return frozenset({_EVERY})
    if all(map(is_literal, equation.invars)) and not makes_half(line):
        return frozenset({_EVERY})
    if is_by_autocast(equation) and not makes_half(line):
        scope = visible_scope(scope_of(equation))
        return frozenset({Module(scope or "autocast", "", (line,), autocast=scope)})
    line = casting_line(equation) or line
    if is_of_library(line):
        return frozenset({_LIBRARY})
    return frozenset({Module(line, "", (line,), casts=dtype)})


def _carried(jaxpr: Jaxpr, found: dict[int, list[_Origin]]) -> dict[Module, tuple[str, ...]]:
    """Returns for each source the lines of the loops whose half carries come from it."""
    lines: dict[Module, dict[str, None]] = {}
    for equation in all_equations(jaxpr):
        if equation.primitive.name not in ("scan", "while"):
            continue
        carried = max((inner.carried for inner in inner_jaxprs(equation)), default=0)
        # The carries are the first results of a loop.
        for var, origin in list(zip(equation.outvars, found[id(equation)]))[:carried]:
            for source in origin.sources if is_narrow(var) else ():
                lines.setdefault(source, {})[line_of(equation)] = None
    return {source: tuple(own) for source, own in lines.items()}


def _operations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yields the operations of a jaxpr in the order of a report."""
    for equation in equations_of(jaxpr):
        if traits_of(equation.primitive.name).category is Category.CALL:
            for inner in inner_jaxprs(equation):
                yield from _operations(inner.jaxpr)
        elif has_floating(equation):
            yield equation

"""Where the half values of a program come from: casts in lines of the user, and arguments in half.

If such a cast is left out, JAX's promotion computes in float32 all that depends on its result, up to a cast
back to float32. So a source is a remedy that a user can write, where a scope is not.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..._autocast import has_floating
from ..._jaxpr import (
    Arguments,
    Category,
    Equation,
    Jaxpr,
    Role,
    Var,
    calling_line,
    equations,
    inner_jaxprs,
    is_literal,
    is_transposed,
    open_jaxpr,
    traits_of,
)
from .._values.reference import is_narrow
from .._values.sites import line_of
from .modules import Module, is_of_library

Sources = frozenset[Module]

_LIBRARY = Module("a library", "")
_EVERY = Module("every source", "")
"""For a cast that JAX makes for a gradient, and for zeros in half: they are what another half value needs."""


def sources_of(traced: Arguments, is_step: bool) -> list[Sources]:
    """Returns for each operation of a report what its half values come from."""
    named = zip(traced.names, traced.arrays, strict=True)
    source = lambda name: _Origin(frozenset({Module(name.split("/")[0], "", is_argument=True)}))
    search = _Search()
    search.run(traced.jaxpr, [source(name) if is_narrow(array) else _Origin() for name, array in named])
    every = frozenset[Module]().union(*search.found.values()) - {_EVERY, _LIBRARY}
    # In a loss, a layer of a library has a dtype of its own. In a step, an optimizer casts to the dtypes of
    # its parameters.
    of_library = frozenset(source for source in every if source.is_argument and is_step)

    def resolved(sources: Sources) -> Sources:
        own = (sources | of_library if _LIBRARY in sources else sources) - {_LIBRARY}
        return every if _EVERY in own else own

    return [resolved(search.found[id(equation)]) for equation in _operations(traced.jaxpr)]


class _Origin(NamedTuple):
    """What a value comes from."""

    sources: Sources = frozenset()  # Of a half value, or of the half value that was cast to a float32 value.
    line: str = ""  # For a float32 value, the line that has widened it.


class _Search:
    """Follows half values forwards through a jaxpr."""

    def __init__(self) -> None:
        self.found: dict[int, Sources] = {}  # For each operation, by its `id`, the sources of its results.

    def run(self, jaxpr: Jaxpr, inputs: Sequence[_Origin], around: str = "") -> list[_Origin]:
        """Follows the values of a jaxpr, whose call is on the line `around`; returns those of its outputs."""
        inside = open_jaxpr(jaxpr)
        known: dict[Var, _Origin] = dict(zip(inside.invars, inputs, strict=True))
        read = lambda var: _Origin() if is_literal(var) else known.get(var, _Origin())
        for equation in equations(inside):
            operands = list(map(read, equation.invars))
            if traits_of(equation.primitive.name).category is Category.CALL:
                results = self._call(equation, operands, line_of(equation) or around)
            else:
                results = self._operation(equation, operands, line_of(equation) or around)
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(read, inside.outvars))

    def _call(self, equation: Equation, operands: Sequence[_Origin], line: str) -> list[_Origin]:
        results = [_Origin()] * len(equation.outvars)
        while True:
            before = list(results)
            for inner in inner_jaxprs(equation):
                taken = [operands[number] for number in inner.operands]
                carries = [number for number, role in enumerate(inner.roles) if role is Role.CARRY]
                for number, origin in zip(
                    carries, before
                ):  # A carry comes from the iteration before as well.
                    taken[number] = _joined(taken[number], origin)
                for index, origin in zip(inner.results, self.run(inner.jaxpr, taken, line), strict=True):
                    if index is not None:
                        results[index] = _joined(results[index], origin)
            if results == before:
                return results

    def _operation(self, equation: Equation, operands: Sequence[_Origin], line: str) -> list[_Origin]:
        # `jnp.mean` of half values widens them, sums, and casts back, on one line: the user wrote no cast.
        sources = frozenset[Module]().union(*(o.sources for o in operands if o.line in ("", line)))
        gives_half = any(map(is_narrow, equation.outvars))
        sources = (sources or _cast(equation, line)) if gives_half else sources
        self.found[id(equation)] = self.found.get(id(equation), frozenset[Module]()) | sources
        return [_Origin(sources, "" if is_narrow(var) else line) for var in equation.outvars]


def _joined(first: _Origin, second: _Origin) -> _Origin:
    return _Origin(first.sources | second.sources, first.line or second.line)


def _cast(equation: Equation, line: str) -> Sources:
    """Returns an operation that makes half values of others as their source; none if it is of a library."""
    if is_transposed(equation) or all(map(is_literal, equation.invars)):
        return frozenset({_EVERY})
    if is_of_library(line) or calling_line(equation):
        return frozenset({_LIBRARY})
    return frozenset({Module(line, "", (line,), casts=equation.outvars[0].aval.dtype.name)})


def _operations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yields the operations of a jaxpr in the order of a report."""
    for equation in equations(jaxpr):
        if traits_of(equation.primitive.name).category is Category.CALL:
            for inner in inner_jaxprs(equation):
                yield from _operations(inner.jaxpr)
        elif has_floating(equation):
            yield equation

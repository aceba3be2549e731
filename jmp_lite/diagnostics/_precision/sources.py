"""The sources of a program's half values: casts in lines of the user, layers of a library, arguments in half.

If the cast of a source is left out, JAX's promotion computes in float32 all that depends on its result, up to
a cast back to float32. So a source is an edit that a user can write, where a scope is not.
"""

import collections
import dataclasses
import enum
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..._autocast.report import has_floating
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
    is_of_gradient,
    is_transposed,
    scope_of,
    traits_of,
)
from ..._jaxpr import equations as equations_of
from ..._paths import visible_scope
from .._values.casts import Casts, casts_around
from .._values.numbers import Numbers, written
from .._values.reference import is_narrow
from .._values.sites import line_of
from .._values.source import makes_half
from .modules import Module, is_of_library

Sources = frozenset[Module]

_LIBRARY = Module("a library", "")
_NONE = Module("no source", "")
"""For zeros in half, and casts that JAX makes: they have the dtype of what they meet."""


class Stage(enum.Enum):
    """Where in a step a value is computed."""

    OUTSIDE = "outside of any gradient"
    FORWARD = "in the forward pass of a gradient"
    BACKWARD = "in its backward pass"


class _Origin(NamedTuple):
    """What a value comes from."""

    sources: Sources = frozenset()  # Of a half value, or of the half value that was cast to a float32 value.
    line: str = ""  # For a float32 value, the line that has widened it.
    is_fixed: bool = False  # Whether it is computed from numbers and constants alone.
    stage: Stage = Stage.OUTSIDE


def _joined(origins: Iterable[_Origin]) -> Sources:
    return frozenset[Module]().union(*(origin.sources for origin in origins))


def sources_of(
    traced: Arguments, is_step: bool, numbers: Numbers, layers: Sequence[Module] = ()
) -> list[Sources]:
    """Returns for each operation of a report what its half values come from.

    An operation in float32 has sources if one of the `numbers` that it takes was converted to half. What one
    of the `layers` of a library gives comes from it alone: it casts whatever it takes to its own dtype.
    """
    named = zip(traced.names, traced.arrays, strict=True)

    def source(name):
        return _Origin(frozenset({Module(name.split("/")[0], "", is_argument=True)}))

    search = _Search(traced.jaxpr, numbers, layers)
    search.run(traced.jaxpr, [source(name) if is_narrow(array) else _Origin() for name, array in named])
    every = frozenset[Module]().union(*map(_joined, search.found.values())) - {_NONE, _LIBRARY}
    # In a loss, a layer of a library has a dtype of its own. In a step, an optimizer casts to the dtypes of
    # its parameters.
    of_library = frozenset(source for source in every if source.is_argument and is_step)
    carried = _carried(traced.jaxpr, search.found)

    def resolved(equation: Equation) -> Sources:
        is_half = any(map(is_narrow, equation.outvars)) or id(equation) in search.rounding
        if not (is_half or search.of_numbers(equation)):
            return frozenset()
        sources = _joined(search.found[id(equation)])
        own = (sources | of_library if _LIBRARY in sources else sources) - {_LIBRARY, _NONE}
        # What has no source adapts to what it meets. Alone it is what any half value may need.
        own = own if own or _NONE not in sources else every

        def with_lines(each):
            after = tuple(search.after.get(each.name, ()))
            return dataclasses.replace(each, carries=carried.get(each, ()), after=after)

        return frozenset(map(with_lines, own))

    return list(map(resolved, _operations(traced.jaxpr)))


class _Search(Forward[_Origin]):
    """Follows sources forwards through a program."""

    def __init__(self, jaxpr: Jaxpr, numbers: Numbers, layers: Sequence[Module]) -> None:
        super().__init__(self._origins, _both, _Origin(is_fixed=True))
        # The lines that cast to float32, by a name that the source may not explain.
        self._widening = set(map(line_of, filter(_widens, _forward_operations(jaxpr))))
        self._numbers, self._layers = numbers, layers
        # By the line of a cast to float32, the sources of what it casts.
        self._widened: dict[str, Sources] = collections.defaultdict(frozenset)
        self._narrowed: dict[str, Sources] = collections.defaultdict(frozenset)  # Those of a cast to half.
        # By the name of a source, the casts of what comes from it that JAX left out.
        self.after: dict[str, dict[str, None]] = collections.defaultdict(dict)
        self._differentiated: Sources = frozenset()  # Of the half values that a forward pass takes.
        # By its line, what an operation of a forward pass comes from, and so its backward pass.
        self._of_line: dict[tuple[str, bool], Sources] = {}
        self.rounding = set[int]()  # The ids of the equations that read gradients in half, and give float32.

    def _origins(self, equation: Equation, operands: list[_Origin]) -> list[_Origin]:
        # A function that JAX jits, such as `jax.nn.one_hot`, has no line of its own: that of its call counts.
        line = next(filter(None, map(line_of, (equation, *reversed(self.calls)))), "")
        gives_half = _gives_half(equation)
        stage = self._stage(equation)
        operands = self._across_gradient(equation, operands, stage, line)
        casts, after = self._left_out(equation, operands, line) if stage is not Stage.BACKWARD else (None, "")
        if _widens(equation):
            self._widened[line] |= operands[0].sources
        is_fixed = all(origin.is_fixed for origin in operands)
        sources = casts or self._taken(operands, line) | self.of_numbers(equation)
        if gives_half:
            sources = self._of_half(equation, line, sources, is_fixed)
            sources = self._as_in_forward(equation, sources, stage, line)
        elif _widens(equation) and is_transposed(equation):
            # The gradient of a half value is rounded to half, whatever computes it.
            self.rounding.add(id(equation))
            sources = self._narrowed[line] or sources
        sources = (self._layer_of(equation) if sources else None) or sources
        lines = ("" if is_narrow(var) else line for var in equation.outvars)
        if after and gives_half:
            self._note_after(sources, after)
        return [_Origin(sources, own, is_fixed, stage) for own in lines]

    def _taken(self, operands: Sequence[_Origin], line: str) -> Sources:
        """Returns what the operands of an operation come from."""
        # `jnp.mean` of half values widens them, sums, and casts back, on one line: the user wrote no cast.
        return _joined(origin for origin in operands if origin.line in ("", line))

    def _note_after(self, sources: Sources, cast: str) -> None:
        for source in sources:
            self.after[source.name][cast] = None

    def _left_out(self, equation: Equation, operands: list[_Origin], line: str) -> tuple[Sources, str]:
        """Returns the casts of half operands that JAX left out, one edit for all, and that of the result.

        Such a cast rounds a value and its gradient, also where the other operands are float32. So the
        operation counts as half until the source has no such cast.
        """
        narrow = [var for var in (*equation.invars, *equation.outvars) if is_narrow(var)]
        if not narrow or is_of_library(line):
            return frozenset(), ""
        casts, lines = self._casts_of(equation, operands, line), []
        for position, (var, operand) in enumerate(zip(equation.invars, operands)):
            cast = casts.operands.get(position)
            is_in_half = is_narrow(var) and not is_literal(var)
            if cast and is_in_half and {source.name for source in operand.sources} != {cast}:
                lines.append(cast)
        edit = Module(" and ".join(lines), "", tuple(lines), casts=narrow[0].aval.dtype.name)
        return frozenset({edit} if lines else ()), casts.result

    def _as_in_forward(self, equation: Equation, sources: Sources, stage: Stage, line: str) -> Sources:
        """Returns the sources of a half result; in a backward pass those of the operation on its line."""
        category = traits_of(equation.primitive.name).category
        if is_of_library(line) or equation.primitive.name == "convert_element_type":
            return sources
        key = line, category is Category.ALLOW
        if stage is Stage.BACKWARD:
            return self._of_line.get(key) or sources
        # JAX moves operands before it computes with them: it broadcasts one.
        if stage is Stage.OUTSIDE or category is Category.MOVE:
            return sources
        # Of the operations that begin at one place, the first one may be in half where the last one is not.
        self._of_line[key] = self._of_line.get(key, sources) & sources
        return sources

    def _casts_of(self, equation: Equation, operands: list[_Origin], line: str) -> Casts:
        """Returns the casts of the expression that made an equation."""

        # Of several expressions that begin at one place, `a @ b` and `a @ b @ c`, it is one whose casts of
        # float32 operands are in the jaxpr.
        def is_known(casts):
            named = ((operands[at], cast) for at, cast in casts.operands.items() if at < len(operands))
            return any({source.name for source in o.sources} == {cast} for o, cast in named)

        every = casts_around(line, equation.primitive.name)
        every = [casts.without(self._widening) for casts in every]
        found = every if len(every) < 2 else list(filter(is_known, every))
        return found[0] if len(found) == 1 else Casts({}, "")

    def _across_gradient(
        self, equation: Equation, operands: list[_Origin], stage: Stage, line: str
    ) -> list[_Origin]:
        """Notes half values that enter a gradient; returns the operands, with the gradients among them."""
        halves = [o for o, var in zip(operands, equation.invars) if is_narrow(var)]
        if stage is Stage.FORWARD:
            self._differentiated |= _joined(o for o in halves if o.stage is Stage.OUTSIDE)
        if stage is Stage.OUTSIDE and any(o.stage is Stage.BACKWARD for o in halves):
            return [self._gradient(o, equation, line) for o in operands]
        return operands

    def _stage(self, equation: Equation) -> Stage:
        every = (*self.calls, equation)
        if any(map(is_transposed, every)):
            return Stage.BACKWARD
        return Stage.FORWARD if any(map(is_of_gradient, every)) else Stage.OUTSIDE

    def _gradient(self, origin: _Origin, equation: Equation, line: str) -> _Origin:
        """Returns the origin of an operand that may be a gradient, in an equation outside of the gradient."""
        if origin.stage is not Stage.BACKWARD or not self._differentiated:
            return origin
        # A gradient has the dtype of the value that was differentiated.
        self.rounding.add(id(equation))
        names = frozenset(source.name for source in self._differentiated)
        sources = {Module(f"the gradients of {', '.join(sorted(names))}", "", one_of=names)}
        if _gives_half(equation) and not is_of_library(line):
            sources.add(Module(line, "", (line,), is_gradient=True))
        return origin._replace(sources=frozenset(sources))

    def _of_half(self, equation: Equation, line: str, sources: Sources, is_fixed: bool) -> Sources:
        """Returns the sources of a half result whose operands have the given ones."""
        # A cotangent has the dtype of the value whose gradient it is: what this line has cast to float32.
        if equation.primitive.name == "convert_element_type" and is_transposed(equation):
            return self._widened[line] or frozenset({_NONE})
        if not sources:
            sources = _cast(equation, line, is_fixed)
            self._narrowed[line] |= sources
        return sources

    def of_numbers(self, equation: Equation) -> Sources:
        """Returns the lines that convert the numbers of an equation to half."""
        found = (written(self._numbers, equation, position) for position in range(len(equation.invars)))
        lines = (number.line for number in found if number is not None and number.line)
        return frozenset(Module(line, "", (line,), casts="half precision") for line in lines)

    def _layer_of(self, equation: Equation) -> Sources:
        """Returns the layer that an equation belongs to; empty if it is not in one."""
        if not self._layers:
            return frozenset()
        around = functools.reduce(lambda scope, call: call_scope(scope_of(call, scope), call), self.calls, "")
        scope = visible_scope(scope_of(equation, around))
        return frozenset(layer for layer in self._layers if f"{scope}/".startswith(f"{layer.name}/"))


def _widens(equation: Equation) -> bool:
    """Whether an equation casts half values to float32."""
    is_cast = equation.primitive.name == "convert_element_type" and is_narrow(equation.invars[0])
    return is_cast and not _gives_half(equation)


def _gives_half(equation: Equation) -> bool:
    return any(map(is_narrow, equation.outvars))


def _both(first: _Origin, second: _Origin) -> _Origin:
    sources, is_fixed = first.sources | second.sources, first.is_fixed and second.is_fixed
    stage = second.stage if first.stage is Stage.OUTSIDE else first.stage
    return _Origin(sources, first.line or second.line, is_fixed, stage)


def _cast(equation: Equation, line: str, is_fixed: bool) -> Sources:
    """Returns an operation that makes half values of others as their source; none if it is of a library."""
    # JAX makes a cast for a gradient. Numbers alone, such as the zeros of `jnp.zeros_like` and `jnp.pad`,
    # have the dtype of what they are like.
    if is_transposed(equation) or (is_fixed and not makes_half(line)):
        return frozenset({_NONE})
    if is_by_autocast(equation) and not makes_half(line):
        scope = visible_scope(scope_of(equation))
        return frozenset({Module(scope or "autocast", "", (line,), autocast=scope)})
    line = casting_line(equation) or line
    if is_of_library(line):
        return frozenset({_LIBRARY})
    return frozenset({Module(line, "", (line,), casts=equation.outvars[0].aval.dtype.name)})


def _carried(jaxpr: Jaxpr, found: dict[int, list[_Origin]]) -> dict[Module, tuple[str, ...]]:
    """Returns for each source the lines of the loops whose half carries come from it."""
    lines: dict[Module, dict[str, None]] = collections.defaultdict(dict)
    loops = (equation for equation in all_equations(jaxpr) if equation.primitive.name in ("scan", "while"))
    for equation in loops:
        carried = inner_jaxprs(equation)[-1].carried  # They are the first results of a loop.
        for var, origin in list(zip(equation.outvars, found[id(equation)]))[:carried]:
            for source in origin.sources if is_narrow(var) else ():
                lines[source][line_of(equation)] = None
    return {source: tuple(own) for source, own in lines.items()}


def _forward_operations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yields the operations of a jaxpr but for those of a backward pass."""
    for equation in equations_of(jaxpr):
        if is_transposed(equation):
            continue
        if traits_of(equation.primitive.name).category is Category.CALL:
            for inner in inner_jaxprs(equation):
                yield from _forward_operations(inner.jaxpr)
        else:
            yield equation


def _operations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yields the operations of a jaxpr in the order of a report."""
    for equation in equations_of(jaxpr):
        if traits_of(equation.primitive.name).category is Category.CALL:
            for inner in inner_jaxprs(equation):
                yield from _operations(inner.jaxpr)
        elif has_floating(equation):
            yield equation

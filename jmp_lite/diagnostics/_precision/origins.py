"""What the values of a program come from, and where in a step they are computed."""

import collections
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ..._autocast.report import has_floating
from ..._jaxpr import (
    Category,
    Equation,
    Jaxpr,
    Place,
    casting_line,
    equations,
    inner_jaxprs,
    is_literal,
    is_of_gradient,
    is_transposed,
    traits_of,
    users_places,
)
from .._values.casts import Casts
from .._values.conversions import constants_at
from .._values.reference import is_narrow
from .._values.sites import line_of
from .._values.source import half_at, makes_half
from .modules import Module, is_of_library

Sources: TypeAlias = frozenset[Module]
"""Edits: any one of them makes a half value float32."""

LIBRARY = Module("a library", "")
NONE = Module("no source", "")
"""The source of zeros in half and of casts by JAX itself, whose dtype follows that of another value."""
UNKNOWN = "half precision"
"""The dtype of a number that the source converts."""


class Stage(enum.Enum):
    """Where in a step a value is computed."""

    OUTSIDE = "outside of any gradient"
    FORWARD = "in the forward pass of a gradient"
    BACKWARD = "in its backward pass"


def stage_of(equations: Sequence[Equation]) -> Stage:
    """Returns the stage of an equation, which comes after the calls around it."""
    if any(map(is_transposed, equations)):
        return Stage.BACKWARD
    return Stage.FORWARD if any(map(is_of_gradient, equations)) else Stage.OUTSIDE


class Origin(NamedTuple):
    """What a value comes from."""

    sources: Sources = frozenset()  # Of a half value, or of the half value that was cast to a float32 value.
    line: str = ""  # For a float32 value, the line that has widened it.
    is_fixed: bool = False  # Whether it depends only on numbers and constants.
    stage: Stage = Stage.OUTSIDE
    made: str = ""  # Of a half value, the line of the operation that made it, and did not only move it.
    casts: tuple[str, ...] = ()  # Of a half value that enters a function: those that JAX left out.
    # The edits of other operands: with one of them JAX promotes the value, which its own casts still round.
    promoted: frozenset[str] = frozenset()

    @property
    def edits(self) -> frozenset[str]:
        """The names of the edits with which a half value is float32; empty if its dtype follows another."""
        own = self.sources - {NONE, LIBRARY}
        return frozenset(source.name for source in own if not source.autocast) | self.promoted

    def left_out(self, casts: tuple[str, ...]) -> tuple[str, ...]:
        """Returns those of the casts of a value, the last one first, that JAX left out."""
        # The jaxpr has the first one, if that is where the value comes from. A line may cast several times.
        made = [n for n, cast in enumerate(casts) if self.made == cast and cast in self.edits]
        return casts[: made[-1]] if made else casts

    @property
    def entering(self) -> frozenset[str]:
        """The same, of a value that enters a function, behind its casts there."""
        return frozenset({" and ".join(self.casts)}) if self.casts else self.edits


def joined(origins: Iterable[Origin]) -> Sources:
    return frozenset[Module]().union(*(origin.sources for origin in origins))


def both(first: Origin, second: Origin) -> Origin:
    sources, is_fixed = first.sources | second.sources, first.is_fixed and second.is_fixed
    stage = second.stage if first.stage is Stage.OUTSIDE else first.stage
    casts, promoted = first.casts or second.casts, first.promoted | second.promoted
    every = {origin.made for origin in (first, second) if origin.sources}
    made = every.pop() if len(every) == 1 else ""
    return Origin(sources, first.line or second.line, is_fixed, stage, made, casts, promoted)


def gives_half(equation: Equation) -> bool:
    return any(map(is_narrow, equation.outvars))


def made_at(equation: Equation, operands: Sequence[Origin], line: str) -> str:
    """Returns the line of the operation that made the result of an operation, and did not only move it."""
    halves = {operand.made for operand, var in zip(operands, equation.invars) if is_narrow(var)}
    is_move = traits_of(equation.primitive.name).category is Category.MOVE
    return halves.pop() if is_move and len(halves) == 1 else line


def widens(equation: Equation) -> bool:
    """Whether an equation casts half values to float32."""
    is_cast = equation.primitive.name == "convert_element_type" and is_narrow(equation.invars[0])
    return is_cast and not gives_half(equation)


def of_cast(equation: Equation, line: str, is_fixed: bool, autocast: Module | None) -> Sources:
    """Returns an operation that makes half values of others as their source; none if it is of a library.

    `autocast` is the scope of an operation that an autocast runs.
    """
    # The numbers of `jnp.zeros_like` and `jnp.pad` have the dtype of the array that these functions take.
    if is_fixed and not makes_half(line):
        return frozenset({NONE})
    if autocast is not None and not makes_half(line):
        return frozenset({autocast})
    line = casting_line(equation) or line
    if is_of_library(line):
        return frozenset({LIBRARY})
    return frozenset({Module(line, "", (line,), casts=equation.outvars[0].aval.dtype.name)})


def number_in_half(line: str) -> Module:
    """Returns the edit of a line that makes a number in half."""
    return Module(line, "", (line,), casts=half_at(line) or UNKNOWN)


def edit_of(equation: Equation, left_out: Casts) -> Sources:
    """Returns the casts of the operands that JAX left out, as one edit."""
    if not left_out.operands:
        return frozenset()
    dtype = next(var.aval.dtype.name for var in equation.invars if is_narrow(var))
    return frozenset({Module(left_out.edit, "", left_out.lines, casts=dtype)})


def of_constants(equation: Equation, line: str) -> Sources:
    """Returns the lines that make the half scalars among the operands of an equation, as far as known."""
    if not any(is_narrow(var) and is_literal(var) for var in equation.invars):
        return frozenset()
    return frozenset(map(number_in_half, constants_at(line, equation.primitive.name)))


def operations_of(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yields the operations of a jaxpr in the order of a report."""
    for equation in equations(jaxpr):
        if traits_of(equation.primitive.name).category is Category.CALL:
            for inner in inner_jaxprs(equation):
                yield from operations_of(inner.jaxpr)
        elif has_floating(equation):
            yield equation


def promoting(equation: Equation, operands: Sequence[Origin], casts: Casts) -> Iterator[str]:
    """Yields the edits of half operands: with one the result is float32, also if it rounds another."""
    for n, (var, operand) in enumerate(zip(equation.invars, operands)):
        if is_narrow(var) and not is_literal(var):
            yield from casts.edits_of(n) if n in casts.operands else operand.edits


def forward_operations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yields the operations of a jaxpr but for those of a backward pass."""
    for equation in equations(jaxpr):
        if is_transposed(equation):
            continue
        if traits_of(equation.primitive.name).category is Category.CALL:
            for inner in inner_jaxprs(equation):
                yield from forward_operations(inner.jaxpr)
        else:
            yield equation


def layers_of(operations: Sequence[Equation], layers: Mapping[int, Module]) -> dict[int, Sources]:
    """Returns the layers of a library by the ids of their operations; `layers` has them by index.

    What else a library casts in the same call belongs to its layer: an input has the name of none.
    """
    calls = [tuple(users_places(each)) for each in operations]
    called = collections.defaultdict[tuple[Place, ...], set[Module]](set)
    for n, layer in layers.items():
        called[calls[n]].add(layer)
    found = {id(operations[n]): frozenset({layer}) for n, layer in layers.items()}
    for each, call in zip(operations, calls):
        if len(called[call]) == 1 and is_of_library(line_of(each)):
            found.setdefault(id(each), frozenset(called[call]))
    return found

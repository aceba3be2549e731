"""What the values of a program come from, and where in a step they are computed."""

import collections
import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ..._autocast.report import has_floating
from ..._jaxpr import (
    Category,
    Equation,
    Jaxpr,
    Span,
    all_equations,
    casting_line,
    equations,
    inner_jaxprs,
    is_of_gradient,
    is_of_lax,
    is_transposed,
    open_jaxpr,
    traits_of,
    users_places,
)
from .._values.reference import is_narrow
from .._values.sites import line_of
from .._values.source import half_at, makes_half
from .modules import Module, is_of_library

Sources: TypeAlias = frozenset[Module]
"""Edits: any one of them makes a half value float32."""

Key: TypeAlias = tuple[str, tuple[Span, ...]]
"""A line, and the calls around it."""
Checkpoints: TypeAlias = Mapping[Span, Sequence[tuple[Span, ...]]]
"""By the expressions in functions under `jax.checkpoint`, the calls of these functions."""

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

    @property
    def edits(self) -> frozenset[str]:
        """The names of the edits with which a half value is float32; empty if its dtype follows another."""
        own = self.sources - {NONE, LIBRARY}
        return frozenset(source.name for source in own if not source.autocast)


def joined(origins: Iterable[Origin]) -> Sources:
    return frozenset[Module]().union(*(origin.sources for origin in origins))


def both(first: Origin, second: Origin) -> Origin:
    sources, is_fixed = first.sources | second.sources, first.is_fixed and second.is_fixed
    stage = second.stage if first.stage is Stage.OUTSIDE else first.stage
    return Origin(sources, first.line or second.line, is_fixed, stage)


def gives_half(equation: Equation) -> bool:
    return any(map(is_narrow, equation.outvars))


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


def keeps_dtypes(equation: Equation) -> bool:
    """Whether an operation does not promote operands of two dtypes: the functions of `jax.lax` do not."""
    name = equation.primitive.name
    # Products take them. Of several results, as those of a sort, each has its own.
    has_one_dtype = len(equation.outvars) == 1 and not name.endswith(("dot_general", "convert_element_type"))
    return has_one_dtype and is_of_lax(equation)


def number_in_half(line: str) -> Module:
    """Returns the edit of a line that makes a number in half."""
    return Module(line, "", (line,), casts=half_at(line) or UNKNOWN)


def operations_of(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yields the operations of a jaxpr in the order of a report."""
    for equation in equations(jaxpr):
        if traits_of(equation.primitive.name).category is Category.CALL:
            for inner in inner_jaxprs(equation):
                yield from operations_of(inner.jaxpr)
        elif has_floating(equation):
            yield equation


def layers_of(operations: Sequence[Equation], layers: Mapping[int, Module]) -> dict[int, Sources]:
    """Returns the layers of a library by the ids of their operations; `layers` has them by index.

    What else a library casts in the same call belongs to its layer: an input has the name of none.
    """
    calls = [tuple(users_places(each)) for each in operations]
    called = collections.defaultdict[tuple[Span, ...], set[Module]](set)
    for n, layer in layers.items():
        called[calls[n]].add(layer)
    found = {id(operations[n]): frozenset({layer}) for n, layer in layers.items()}
    for each, call in zip(operations, calls):
        if len(called[call]) == 1 and is_of_library(line_of(each)):
            found.setdefault(id(each), frozenset(called[call]))
    return found


def calls_of_checkpoints(jaxpr: Jaxpr) -> Checkpoints:
    """Returns the calls of functions under `jax.checkpoint`, by the expressions in these functions.

    In a gradient only the recomputed operations are inside of an equation.
    """
    found = collections.defaultdict[Span, dict[tuple[Span, ...], None]](dict)
    for equation in all_equations(jaxpr):
        if equation.primitive.name == "remat2":
            inside = (all_equations(open_jaxpr(part.jaxpr)) for part in inner_jaxprs(equation))
            for operation in itertools.chain.from_iterable(inside):
                for place in [*users_places(operation)][-1:]:
                    found[place][tuple(users_places(equation))] = None
    return {place: [*calls] for place, calls in found.items()}


def keys_of(line: str, places: Sequence[Span], checkpoints: Checkpoints) -> list[Key]:
    """Returns what an operation and its backward pass share: the calls around it, or its line alone."""
    calls = checkpoints.get(places[-1], ()) if places else ()
    # JAX hoists invariant operations out of the loop of a forward pass, but not out of a backward pass.
    return [(line, (*places, *(calls[0] if len(calls) == 1 else ()))), (line, ())]

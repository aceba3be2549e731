"""Finds the activation functions in a jaxpr: what is computed of one or two values, element by element.

A GELU is seven operations, of which a power runs in float32 and takes all after it along. Differentiated one
by one they would keep four float32 arrays for the backward pass. Taken together they are one function of one
value: autocast computes it in float32, keeps that half value alone and computes the rest anew. It does so
where the values are in half and only products read the result, which they take in half in any case.
"""

import collections
import dataclasses
from collections.abc import Sequence, Set
from typing import Any

from .jaxprs import equations, is_float32, is_literal
from .rules import POINTWISE


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """What is known of a jaxpr before anything is decided.

    Attributes:
        sources: for each variable that is computed of one or two others, element by element, those.
        members: for each such variable, the places of the equations that compute it.
        consumers: for each variable, the places of the equations that read it, once for each time.
        outputs: how often each variable is an output.
    """

    sources: dict[Any, tuple[Any, ...]]
    members: dict[Any, frozenset[int]]
    consumers: dict[Any, list[int]]
    outputs: collections.Counter[Any]

    def reads(self, var: Any) -> int:
        """Returns how often `var` is read or given out."""
        return len(self.consumers[var]) + self.outputs[var]

    def read_only_by(self, var: Any, places: Set[int]) -> bool:
        """Whether nothing but the equations at `places` reads `var`."""
        return not self.outputs[var] and all(reader in places for reader in self.consumers[var])


def anatomy(inside: Any) -> Anatomy:
    """Returns what is computed of one or two values, element by element, in an open jaxpr."""
    sources: dict[Any, tuple[Any, ...]] = {}
    members: dict[Any, frozenset[int]] = {}
    consumers: dict[Any, list[int]] = collections.defaultdict(list)
    for place, equation in enumerate(equations(inside)):
        operands = [var for var in equation.invars if not is_literal(var)]
        for var in operands:
            consumers[var].append(place)
        if equation.primitive.name not in POINTWISE:
            continue
        (out,) = equation.outvars
        of = tuple(dict.fromkeys(source for var in operands for source in sources.get(var, (var,))))
        same_shape = all(var.aval.shape == out.aval.shape for var in operands)
        if same_shape and len(of) in (1, 2) and all(map(is_float32, of)):
            sources[out] = of
            members[out] = frozenset({place}).union(*(members.get(var, ()) for var in operands))
    outputs = collections.Counter(var for var in inside.outvars if not is_literal(var))
    return Anatomy(sources, members, consumers, outputs)


def inner_members(inside: Any, anatomy: Anatomy, ends: Sequence[int]) -> frozenset[int]:
    """Returns the places of equations that only activation functions read, which compute them themselves.

    Args:
        inside: an open jaxpr.
        anatomy: what `anatomy` returned of it.
        ends: the places of the equations that give the results of the activation functions.
    """
    all_equations = equations(inside)
    of_end = {end: anatomy.members[all_equations[end].outvars[0]] for end in ends}
    inner: set[int] = set()
    for place in sorted(frozenset().union(*of_end.values()), reverse=True):
        (out,) = all_equations[place].outvars
        read_inside = all(
            reader in inner or place in of_end.get(reader, ()) for reader in anatomy.consumers[out]
        )
        if place not in of_end and read_inside and not anatomy.outputs[out]:
            inner.add(place)
    return frozenset(inner)

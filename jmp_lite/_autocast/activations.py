"""Finds the activation functions in a jaxpr: functions of one or two values, element by element.

A GELU is seven operations. One of them is a power, which runs in float32 and takes all later ones along.
Differentiated one by one, the operations would keep four float32 arrays for the backward pass. Taken together
they are one function of one value: autocast computes it in float32, keeps only the half operand, and computes
the rest again in the backward pass. It does so where the operands are in half and only products read the
result, which they take in half in any case.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence, Set

from .jaxprs import Equation, Jaxpr, Var, equations, is_float32, is_literal, name_of
from .primitives import traits_of


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """Facts about an open jaxpr that hold whatever is decided about it.

    Attributes:
        sources: for each variable that is a function of one or two others, element by element, those others.
        members: for each such variable, the indexes of the equations that compute it.
        ends: the variables among them whose computation has a part that is better left in float32.
        consumers: for each variable, the indexes of the equations that read it, once for each time.
        outputs: how often each variable is an output.
    """

    sources: dict[Var, tuple[Var, ...]]
    members: dict[Var, frozenset[int]]
    ends: frozenset[Var]
    consumers: dict[Var, list[int]]
    outputs: collections.Counter[Var]

    def reads(self, var: Var) -> int:
        """Returns how often `var` is read or given out."""
        return len(self.consumers[var]) + self.outputs[var]

    def read_only_by(self, var: Var, indexes: Set[int]) -> bool:
        """Whether no equation but those at `indexes` reads `var`."""
        return not self.outputs[var] and all(reader in indexes for reader in self.consumers[var])

    def may_end(self, equation: Equation) -> bool:
        """Whether an equation gives the result of a function with a part that is better left in float32."""
        return equation.outvars[0] in self.ends and is_float32(equation.outvars[0])


def anatomy(inside: Jaxpr, stays_float32: Callable[[Equation], bool]) -> Anatomy:
    """Returns the functions of one or two values in an open jaxpr.

    Args:
        inside: the jaxpr.
        stays_float32: whether an operation is better left in float32.
    """
    sources: dict[Var, tuple[Var, ...]] = {}
    members: dict[Var, frozenset[int]] = {}
    ends: set[Var] = set()
    spread: set[Var] = set()  # Biases and scales that the program broadcasts itself.
    consumers: dict[Var, list[int]] = collections.defaultdict(list)
    for index, equation in enumerate(equations(inside)):
        operands = [var for var in equation.invars if not is_literal(var)]
        for var in operands:
            consumers[var].append(index)
        traits = traits_of(name_of(equation))
        if traits.spreads:
            spread.update(equation.outvars)
        if not traits.pointwise:
            continue
        (out,) = equation.outvars
        of = tuple(dict.fromkeys(source for var in operands for source in sources.get(var, (var,))))
        broadcasts = any(var in spread or var.aval.shape != out.aval.shape for var in operands)
        if not broadcasts and len(of) in (1, 2) and all(map(is_float32, of)):
            sources[out] = of
            members[out] = frozenset({index}).union(*(members.get(var, ()) for var in operands))
            if stays_float32(equation) or not ends.isdisjoint(operands):
                ends.add(out)
    outputs = collections.Counter(var for var in inside.outvars if not is_literal(var))
    return Anatomy(sources, members, frozenset(ends), consumers, outputs)


def inner_members(inside: Jaxpr, anatomy: Anatomy, ends: Sequence[int]) -> frozenset[int]:
    """Returns the indexes of the equations whose results only activation functions read.

    The activation functions compute these equations themselves.

    Args:
        inside: an open jaxpr.
        anatomy: its anatomy.
        ends: the indexes of the equations that give the results of the activation functions.
    """
    all_equations = equations(inside)
    of_end = {end: anatomy.members[all_equations[end].outvars[0]] for end in ends}
    inner: set[int] = set()
    for index in sorted(frozenset().union(*of_end.values()), reverse=True):
        (out,) = all_equations[index].outvars
        read_inside = all(
            reader in inner or index in of_end.get(reader, ()) for reader in anatomy.consumers[out]
        )
        if index not in of_end and read_inside and not anatomy.outputs[out]:
            inner.add(index)
    return frozenset(inner)

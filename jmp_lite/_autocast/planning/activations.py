"""Finds the activation functions in a jaxpr: functions of one or two values, element by element.

A GELU is seven operations. One of them is a power, which runs in float32, and so do the operations of the
GELU after it. If JAX differentiated the operations one by one, they would keep four float32 arrays for the
backward pass. Together the operations are one function of one value. autocast computes this function in
float32, keeps only the half operand, and computes the function again in the backward pass. It does so if the
operands are in half and only products read the result: products take half operands in any case.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence, Set

from ..._jaxpr.read import Jaxpr, Var, is_float32, is_literal
from .op import Op
from .softmaxes import find_softmaxes


@dataclasses.dataclass(frozen=True)
class Activations:
    """The activation functions of an open jaxpr, and who reads its variables. No decision changes them."""

    # The one or two operands of each variable that is a function of them, element by element or as a softmax.
    sources: dict[Var, tuple[Var, ...]]
    extras: dict[Var, tuple[Var, ...]]  # The other operands of a softmax, such as masks.
    # For each such variable, the indexes of the operations that compute it.
    members: dict[Var, frozenset[int]]
    ends: Set[Var]  # The variables among them with an operation that should stay in float32.
    gated: Set[Var]  # The variables among them that multiply by a saturating function, such as a SiLU.
    # For each variable, the indexes of the operations that read it. An operation that reads the variable
    # twice is there twice.
    consumers: dict[Var, list[int]]
    outputs: collections.Counter[Var]  # How often each variable is an output.

    def reads(self, var: Var) -> int:
        """Returns how often an operation reads `var` or the jaxpr returns it."""
        return len(self.consumers[var]) + self.outputs[var]

    def read_only_by(self, var: Var, indexes: Set[int]) -> bool:
        """Whether no operation but those at `indexes` reads `var`."""
        return not self.outputs[var] and all(reader in indexes for reader in self.consumers[var])

    def is_end(self, op: Op, by_products_only: bool) -> bool:
        """Whether an operation, whose result is wanted in half, ends an activation function.

        A function of which a part should stay in float32 must be read by products only.
        """
        out = op.equation.outvars[0]
        return is_float32(out) and (out in self.gated or (by_products_only and out in self.ends))


def find_activations(inside: Jaxpr, ops: Sequence[Op], with_softmaxes: bool) -> Activations:
    """Returns the functions of one or two values in an open jaxpr, whose operations are `ops`."""
    sources: dict[Var, tuple[Var, ...]] = {}
    members: dict[Var, frozenset[int]] = {}
    ends: set[Var] = set()
    saturated: set[Var] = set()  # The results of saturating operations.
    gated: set[Var] = set()
    spread: set[Var] = set()  # Biases and scales that the program broadcasts itself.
    consumers: dict[Var, list[int]] = collections.defaultdict(list)
    for index, op in enumerate(ops):
        operands = op.variables
        for var in operands:
            consumers[var].append(index)
        if op.traits.copies:
            spread.update(op.equation.outvars)
        origins = _origins(op, sources, spread)
        if origins:
            (out,) = op.equation.outvars
            sources[out] = origins
            members[out] = frozenset({index}).union(*(members.get(var, ()) for var in operands))
            if op.stays_float32 or not ends.isdisjoint(operands):
                ends.add(out)
            if op.traits.saturates:
                saturated.add(out)
            elif op.name == "mul" and len(operands) == 2 and not saturated.isdisjoint(operands):
                gated.add(out)
    outputs = collections.Counter(var for var in inside.outvars if not is_literal(var))
    activations = Activations(sources, {}, members, ends, gated, consumers, outputs)
    softmaxes = find_softmaxes(ops, consumers, activations.read_only_by) if with_softmaxes else {}
    for out, softmax in softmaxes.items():
        sources[out], activations.extras[out], members[out] = softmax.sources, softmax.extras, softmax.members
        ends.add(out)
    gated -= ends
    return activations


def _origins(op: Op, sources: Mapping[Var, tuple[Var, ...]], spread: Set[Var]) -> tuple[Var, ...]:
    """Returns the one or two float32 variables that an operation is a function of; none if there are others.

    The user's lists win over activation functions.
    """
    if not op.traits.pointwise or op.is_listed:
        return ()
    shape = op.equation.outvars[0].aval.shape
    if any(var in spread or var.aval.shape != shape for var in op.variables):
        return ()
    origins = tuple(dict.fromkeys(source for var in op.variables for source in sources.get(var, (var,))))
    return origins if len(origins) in (1, 2) and all(map(is_float32, origins)) else ()


def inner_members(ops: Sequence[Op], activations: Activations, ends: Sequence[int]) -> frozenset[int]:
    """Returns the indexes of the operations whose results only activation functions read.

    The activation functions compute these operations themselves.
    """
    of_end = {end: activations.members[ops[end].equation.outvars[0]] for end in ends}
    ends_of = [ops[end].equation.outvars[0] for end in ends]
    taken = {var for out in ends_of for var in (*activations.sources[out], *activations.extras.get(out, ()))}
    inner: set[int] = set()
    for index in sorted(frozenset().union(*of_end.values()), reverse=True):
        (out,) = ops[index].equation.outvars
        read_inside = all(
            reader in inner or index in of_end.get(reader, ()) for reader in activations.consumers[out]
        )
        if read_inside and not activations.outputs[out] and out not in taken:
            inner.add(index)
    return frozenset(inner)

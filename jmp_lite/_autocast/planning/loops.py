"""What the variables inside of a loop hold: a search forwards through a jaxpr."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..._jaxpr.inner import Inner, Role
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import Jaxpr, Var, is_literal
from .op import Held, Op

LOOPS = ("scan", "while")  # The operations whose jaxprs run more than once.


# Where a loop selects between its carry and a newly computed value, it decides whether to keep the carry
# (`dependence.LoopDecisions`). So the search tells apart carries, results of products, and what stays.
class Loops:
    """The search, once for each jaxpr and each set of inputs.

    `ops_of` returns the operations of a jaxpr, and keeps the jaxpr alive.
    """

    def __init__(self, ops_of: Callable[[Jaxpr], Sequence[Op]]) -> None:
        self._ops_of = ops_of
        self._held: dict[Any, dict[Var, Held | None]] = {}

    def held(self, inside: Jaxpr, inputs: tuple[Held | None, ...]) -> dict[Var, Held | None]:
        """Returns what the variables of a jaxpr hold of a loop around it. None stands for anything else."""
        if not inputs:  # Outside of loops.
            return {}
        key = id(inside), inputs
        if key not in self._held:
            held = dict(zip(inside.invars, inputs)) | dict.fromkeys(inside.constvars, Held.FIXED)
            for op in self._ops_of(inside):
                held.update(dict.fromkeys(op.equation.outvars, self._held_by_results(op, held)))
            self._held[key] = held
        return self._held[key]

    def inside(
        self, op: Op, held: Mapping[Var, Held | None], results: Sequence[bool]
    ) -> list[tuple[Held | None, ...]]:
        """Returns for each jaxpr of a call what its inputs hold of the innermost loop around them.

        Args:
            op: the call.
            held: what the variables around the call hold of a loop. Empty outside of loops.
            results: for each result of the call, whether a loop around it decides by it.
        """
        if op.name not in LOOPS and not held:
            return [()] * len(op.inner)
        # A loop around this one may change the operands. That counts only if it decides by the results.
        is_outermost = op.name in LOOPS and not (held and any(results))
        operands = [Held.FIXED if is_outermost else held_by(var, held) for var in op.equation.invars]
        of_inputs = _held_in_loop if op.name in LOOPS else _held_in_call
        return [of_inputs(inner, operands) for inner in op.inner]

    def _held_by_results(self, op: Op, held: Mapping[Var, Held | None]) -> Held | None:
        # The order matters: a product of fixed operands is fixed, and any other is computed anew in each
        # iteration. An operation with an effect, such as a callback, may return something else each time.
        of_operands = {held[var] for var in op.variables} | ({None} if op.equation.effects else set())
        if of_operands <= {Held.FIXED}:
            return Held.FIXED
        if Held.COMPUTED in of_operands or self._multiplies(op):
            return Held.COMPUTED
        # A value that is computed from the carry without a product, such as a counter, gets None.
        is_moved_carry = op.traits.category is Category.MOVE and Held.CARRY in of_operands
        return Held.CARRY if is_moved_carry else None

    def _multiplies(self, op: Op) -> bool:
        if op.traits.category is Category.ALLOW:
            return True
        return any(self._multiplies(each) for inner in op.inner for each in self._ops_of(inner.jaxpr))


def held_by(var: Var, held: Mapping[Var, Held | None]) -> Held | None:
    return Held.FIXED if is_literal(var) else held[var]


def _held_in_call(inner: Inner, operands: Sequence[Held | None]) -> tuple[Held | None, ...]:
    return tuple(operands[index] for index in inner.operands)


def _held_in_loop(inner: Inner, operands: Sequence[Held | None]) -> tuple[Held | None, ...]:
    def of_input(index: int, role: Role) -> Held | None:
        if role is Role.CARRY:
            return Held.CARRY
        return Held.FIXED if role is Role.CONSTANT and operands[index] is Held.FIXED else None

    return tuple(map(of_input, inner.operands, inner.roles))

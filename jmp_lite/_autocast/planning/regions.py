"""Finds the regions of a jaxpr: operations that together are one function of half values.

autocast computes a region, such as a GELU, a softmax (`softmaxes`) or a polynomial, in float32 from half
values, rounds its result once, keeps only the half values, and computes the region again in the backward
pass.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence, Set

from ..._jaxpr.primitives import traits_of
from ..._jaxpr.read import Equation, Var, constants, equations, is_float32, name_of
from .op import Op, Readers
from .ruling import Ruling
from .softmaxes import Barrier, Region, find_softmaxes
from .states import State
from .wanted import Wanted

# Moves that XLA computes together with the element-wise operations around them.
_MOVES = {"broadcast_in_dim", "concatenate", "pad", "reshape", "rev", "slice", "squeeze", "transpose"}
# The derivatives of these do not read their operands.
_LINEAR = {*_MOVES, "add", "neg", "sub"}
_EXACT = {*_MOVES, "abs", "jit", "neg", "sign"}


class Regions:
    """The regions of an open jaxpr. Each is found when the demand, a walk backwards, reaches its end."""

    def __init__(self, ops: Sequence[Op], readers: Readers, of_gradient: bool) -> None:
        self._ops, self._readers, self._of_gradient = ops, readers, of_gradient
        self._made_by = {
            op.equation.outvars[0]: n for n, op in enumerate(ops) if len(op.equation.outvars) == 1
        }
        self._softmaxes = {} if of_gradient else find_softmaxes(ops, readers)
        # Each result of element-wise operations, with the one or two variables of its shape that it is
        # computed from.
        self._functions: dict[Var, tuple[Var, ...]] = {}
        self._wide: set[Var] = set()  # Those of which an operation should stay in float32.
        self._gates: set[Var] = set()  # Products with a function that saturates, such as a SiLU.
        self._find_functions()

    def _find_functions(self) -> None:
        saturated: set[Var] = set()
        spread: set[Var] = set()  # Biases and scales that the program broadcasts itself.
        for op in self._ops:
            if op.traits.copies:
                spread.update(op.equation.outvars)
            # The user's lists win over regions.
            elif op.traits.pointwise and not op.is_listed and (sources := self._sources(op, spread)):
                self._add_function(op, sources, saturated)

    def _sources(self, op: Op, spread: Set[Var]) -> tuple[Var, ...]:
        """Returns the one or two float32 variables that an element-wise result is computed from, else ()."""
        shape = op.equation.outvars[0].aval.shape
        if any(var in spread or getattr(var.aval, "shape", None) != shape for var in op.variables):
            return ()
        parts = (self._functions.get(var, (var,)) for var in op.variables)
        sources = tuple(dict.fromkeys(var for part in parts for var in part))
        return sources if len(sources) <= 2 and all(map(is_float32, sources)) else ()

    def _add_function(self, op: Op, sources: tuple[Var, ...], saturated: set[Var]) -> None:
        (out,) = op.equation.outvars
        self._functions[out] = sources
        # A GELU is seven operations. One of them is a power, which runs in float32, and so do those after
        # it. If JAX differentiated them one by one, they would keep four float32 arrays for the backward
        # pass.
        if op.stays_float32 or not self._wide.isdisjoint(op.variables):
            self._wide.add(out)
        elif op.traits.saturates:
            saturated.add(out)
        # In half, a gate would be rounded at each operation.
        elif op.name == "mul" and len(op.variables) == 2 and not saturated.isdisjoint(op.variables):
            self._gates.add(out)

    def ending(
        self, index: int, wanted: Wanted, states: Mapping[Var, State], rulings: Sequence[Ruling]
    ) -> Region | None:
        """Returns the region that ends with an operation; None if there is none.

        Args:
            index: the index of the operation, which has one result.
            wanted: how its result is wanted in half.
            states: the states of the variables if everything is wanted in half.
            rulings: the rulings on the operations.
        """
        (out,), by_products = self._ops[index].equation.outvars, wanted is Wanted.BY_PRODUCTS_ONLY
        if wanted <= Wanted.NO:
            return None
        if out in self._softmaxes:
            return self._softmaxes[out] if by_products else None
        search = _Search(self._ops, self._readers, self._made_by, states, rulings)
        # Products round the result of an activation function in any case. A gate, or a chain of operations
        # that would round several times, is a region whatever reads it.
        if out in self._wide and by_products:
            members = self._members(out)
            # In `autocast(grad(f))` the backward pass reads what is in front of an activation function.
            members = members if self._of_gradient else search.extended(members, members)
            return search.region(members, self._functions[out], Barrier.CHECKPOINT)
        if out in self._gates:
            return search.region(self._members(out), self._functions[out], Barrier.NONE)
        return None if self._of_gradient else search.chain(index)

    def made_outside(self, op: Op, indexes: Set[int]) -> list[Var]:
        """Returns the operands of an operation that none of the operations at `indexes` makes."""
        return [var for var in op.variables if self._made_by.get(var) not in indexes]

    def _members(self, out: Var) -> set[int]:
        """Returns the operations that make a result of element-wise operations."""
        members: set[int] = set()
        open_vars = [out]
        while open_vars:
            var = open_vars.pop()
            if var in self._functions and self._made_by[var] not in members:
                members.add(self._made_by[var])
                open_vars.extend(self._ops[self._made_by[var]].variables)
        return members


class _Search:
    """Extends a region backwards by the operations whose results it alone reads."""

    def __init__(
        self,
        ops: Sequence[Op],
        readers: Readers,
        made_by: Mapping[Var, int],
        states: Mapping[Var, State],
        rulings: Sequence[Ruling],
    ) -> None:
        self._ops, self._readers, self._made_by = ops, readers, made_by
        self._states, self._rulings = states, rulings

    def chain(self, index: int) -> Region | None:
        """Returns the region that ends with an operation in half if its operations would round twice."""
        if not self._is_part(index):
            return None
        region = self.region(self.extended({index}), (), Barrier.NONE)
        members = [self._ops[member] for member in region.members]
        # The derivatives of a sum with a bias, and of its `tanh`, do not need the operands, which a region
        # would keep for the backward pass.
        is_light = self._ops[index].traits.saturates or all(op.name in _LINEAR for op in members)
        return region if sum(_rounds(op.name) for op in members) > (2 if is_light else 1) else None

    def region(self, members: Set[int], inputs: Sequence[Var], barrier: Barrier) -> Region:
        """Returns the region of some operations. `inputs` are those of an activation function or a gate."""
        operands = dict.fromkeys(  # A dict for its order: equal layers then give equal regions.
            var
            for member in sorted(members)
            for var in self._ops[member].variables
            if self._made_by.get(var) not in members
        )
        sources = tuple(var for var in operands if var in inputs or self._states[var].is_half)
        extras = tuple(var for var in operands if var not in sources)
        return Region(sources, extras, frozenset(members), barrier, inputs=tuple(inputs))

    def extended(self, own: Set[int], activation: Set[int] = frozenset()) -> set[int]:
        """Returns the operations, and those in front of them whose results only they read.

        `activation` are the operations of an activation function.
        """
        members = set(own)
        # From the last to the first: the readers of a variable stand behind the operation that makes it.
        queue = [-index for index in self._makers(own)]
        heapq.heapify(queue)
        while queue:
            index = -heapq.heappop(queue)
            if index not in members and self._extends(index, members, activation):
                members.add(index)
                for maker in self._makers([index]):
                    heapq.heappush(queue, -maker)
        # Without the moves and other exact operations in front of all others.
        for index in sorted(members - own):
            is_first = members.isdisjoint(self._makers([index]))
            is_exact = not _rounds(self._ops[index].name)
            if is_first and is_exact and self._states[self._ops[index].equation.outvars[0]].is_half:
                members.remove(index)
        return members

    def _makers(self, indexes: Iterable[int]) -> set[int]:
        variables = (var for index in indexes for var in self._ops[index].variables)
        return {self._made_by[var] for var in variables if var in self._made_by}

    def _extends(self, index: int, members: Set[int], activation: Set[int]) -> bool:
        op = self._ops[index]
        (out,) = op.equation.outvars
        # A region that took a bias in the shape of the result would keep it in this shape.
        if op.name == "broadcast_in_dim" and is_float32(out) and not self._states[out].is_half:
            return not op.is_listed
        # A running sum, such as a residual stream, would keep all of its addends until its end.
        readers = (self._ops[n] for n in self._readers.operations[out] if n not in activation)
        is_running = op.is_residual_sum and any(reader.is_residual_sum for reader in readers)
        return self._is_part(index) and not is_running and self._readers.are_only(out, members)

    def _is_part(self, index: int) -> bool:
        """Whether a region may compute an operation that would take or give half."""
        op, ruling = self._ops[index], self._rulings[index]
        if (
            op.is_listed
            or op.is_transposed
            or ruling.reason
            or ruling.half_sum
            or len(op.equation.outvars) != 1
        ):
            return False
        if op.traits.compares:  # Such as the predicate of a `jnp.where`.
            return any(self._states[var].is_half for var in op.variables)
        state = self._states[op.equation.outvars[0]]
        return state.is_half and not state.half_sum and _is_elementwise(op)


def _is_elementwise(op: Op) -> bool:
    if op.name != "jit":
        return op.traits.pointwise or op.name in _MOVES
    # Such as `jnp.where` or `jnp.clip`. A function that rounds has regions of its own.
    closed = op.equation.params["jaxpr"]
    return not constants(closed) and not any(map(_changes, equations(closed)))


def _changes(equation: Equation) -> bool:
    name = name_of(equation)
    if name == "convert_element_type":
        return equation.params["new_dtype"] not in ("float32", "bool")
    return not (traits_of(name).pointwise or name in _MOVES) or _rounds(name)


def _rounds(name: str) -> bool:
    traits = traits_of(name)
    return not (name in _EXACT or traits.selects or traits.compares)

"""Finds the variables of a jaxpr on which some of its outputs depend, backwards, through loops and calls.

The planner asks four questions, the last of them forwards:

- Which products make the gradients of weights? `Intermediate`, for `reduce_dtype` and one-hot labels.
- Which sums are those of a residual stream? `Streams`, for `half_sums`.
- On what do the decisions of loops depend? `LoopDecisions`.
- What depends on the tangents of a forward-mode rule? `Tangents`.
"""

import abc
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from ..._jaxpr.inner import Inner, Role
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import Jaxpr, Var, is_literal, open_jaxpr
from .loops import LOOPS, Loops, held_by
from .op import Held, Op

_NOTHING: Mapping[Var, Held | None] = MappingProxyType({})


class Dependence(abc.ABC):
    """The search, once for each jaxpr and each set of outputs. A subclass says which operations it crosses.

    `ops_of` returns the operations of a jaxpr, and keeps the jaxpr alive.
    """

    def __init__(self, ops_of: Callable[[Jaxpr], Sequence[Op]]) -> None:
        self._ops_of = ops_of
        self._found: dict[Any, frozenset[Var]] = {}
        self.loops = Loops(ops_of)

    def variables(
        self,
        jaxpr: Jaxpr,
        outputs: Sequence[bool],
        backward: bool = False,
        held: tuple[Held | None, ...] = (),
    ) -> frozenset[Var]:
        """Returns the variables of a jaxpr, closed or open, on which the flagged outputs depend.

        Args:
            jaxpr: the jaxpr.
            outputs: a flag for each output.
            backward: whether the whole jaxpr is a part of a backward pass.
            held: for each input, what it holds of a loop around the jaxpr. Empty outside of loops.
        """
        # Inside a loop, a selection may start the search (`_seeds`), even if no output is flagged.
        if not (self._enters(outputs) or Held.CARRY in held):
            return frozenset()
        inside = open_jaxpr(jaxpr)
        key = id(inside), tuple(outputs), backward, held
        if key not in self._found:
            known = self.loops.held(inside, held)

            def counts(var):
                return self._counts(var, known)

            found = set(filter(counts, itertools.compress(inside.outvars, outputs)))
            found.update(self._seeds(inside, known))
            # One walk is enough: an operation stands behind those that make its operands.
            for op in reversed(self._ops_of(inside)):
                results = [var in found for var in op.equation.outvars]
                operands = self._operands(op, results, backward or op.is_transposed, known)
                found.update(filter(counts, operands))
            self._found[key] = frozenset(found)
        return self._found[key]

    def outputs(
        self,
        op: Op,
        results: Sequence[bool],
        backward: bool,
        held: Mapping[Var, Held | None] = _NOTHING,
    ) -> list[tuple[bool, ...]]:
        """Returns a flag for each output of each jaxpr of a call, from flags for the results of the call.

        `held` says what the variables around the call hold of a loop.
        """
        # The carry of a loop is flagged too if the next iteration computes something flagged from it. Each
        # pass but the last flags a further carry, so there is at most one pass more than there are carries.
        flagged = {index for index, is_flagged in enumerate(results) if is_flagged}
        held_inside = self.loops.inside(op, held, results)
        while True:
            outputs = [self._outputs(op, inner, flagged) for inner in op.inner]
            # Carry number n is result n of the body, and its input n + constants.
            carries = {
                number - inner.constants
                for inner, flags, held_by_inputs in zip(op.inner, outputs, held_inside)
                for number in self._inputs(inner, flags, backward, held_by_inputs)
                if inner.roles[number] is Role.CARRY
            }
            if carries <= flagged:
                return outputs
            flagged |= carries

    def _operands(
        self, op: Op, results: Sequence[bool], backward: bool, held: Mapping[Var, Held | None]
    ) -> Sequence[Var]:
        """Returns the operands of an operation on which a flagged variable depends."""
        if op.category is Category.CALL:
            return self._operands_of_call(op, results, backward, held)
        return op.variables if self._crosses(op, any(results), backward) else ()

    def _operands_of_call(
        self, op: Op, results: Sequence[bool], backward: bool, held: Mapping[Var, Held | None]
    ) -> Sequence[Var]:
        inputs, invars = self.loops.inside(op, held, results), op.equation.invars
        # The call may compute, in front of an inner loop, what that loop decides by.
        is_in_loop = op.name not in LOOPS and any(Held.CARRY in each for each in inputs)
        if not (self._enters(results) or is_in_loop):
            return ()
        return [
            invars[inner.operands[number]]
            for inner, flags, each in zip(op.inner, self.outputs(op, results, backward, held), inputs)
            for number in self._inputs(inner, flags, backward, each)
        ]

    def _inputs(
        self, inner: Inner, outputs: Sequence[bool], backward: bool, held: tuple[Held | None, ...]
    ) -> list[int]:
        found = self.variables(inner.jaxpr, outputs, backward, held)
        return [number for number, var in enumerate(open_jaxpr(inner.jaxpr).invars) if var in found]

    def _outputs(self, op: Op, inner: Inner, results: set[int]) -> tuple[bool, ...]:
        del op
        return tuple(index in results for index in inner.results)

    def _counts(self, var: Var, held: Mapping[Var, Held | None]) -> bool:
        del held
        return not is_literal(var)

    def _enters(self, flags: Sequence[bool]) -> bool:
        """Whether the search enters a jaxpr or call with these flags for its results."""
        del flags
        return True

    def _seeds(self, inside: Jaxpr, held: Mapping[Var, Held | None]) -> Iterable[Var]:
        """Returns further variables of a jaxpr from which the search starts."""
        del inside, held
        return ()

    @abc.abstractmethod
    def _crosses(self, op: Op, is_found: bool, backward: bool) -> bool:
        """Whether an operation leads on to its operands. `is_found` says that one of its results is found."""


# A variable is intermediate if an operation other than a move or a sum reads it. The cotangent of an
# activation is intermediate. The gradient of an argument is not: only moves and sums lead from its product to
# the end of the backward pass. So the products that make weight gradients are those whose results are not
# intermediate. The search needs no forward pass, and works in loops and recomputed layers.
class Intermediate(Dependence):
    """The variables from which a backward pass computes something."""

    def _crosses(self, op: Op, is_found: bool, backward: bool) -> bool:
        # Operations outside the backward pass, such as an optimizer's, read finished gradients.
        return backward and (is_found or not _passes(op))


class Streams(Dependence):
    """The variables from which the forward pass computes an operand of a later product."""

    def outputs(
        self,
        op: Op,
        results: Sequence[bool],
        backward: bool,
        held: Mapping[Var, Held | None] = _NOTHING,
    ) -> list[tuple[bool, ...]]:
        # What a loop carries counts only if a product of the next iteration depends on it: an accumulator,
        # which only a product after the loop reads, is not a stream.
        carries = {index for inner in op.inner for index, carry in zip(inner.results, inner.carries) if carry}
        inside = [flag and index not in carries for index, flag in enumerate(results)]
        return super().outputs(op, inside, backward, held)

    def _crosses(self, op: Op, is_found: bool, backward: bool) -> bool:
        # Norms stand between a stream and the products, so the search crosses every operation.
        is_forward = not backward or op.is_recomputed
        return is_forward and (is_found or op.traits.category is Category.ALLOW)


class LoopDecisions(Dependence):
    """The values on which the decisions of loops depend. They stay in float32."""

    def _outputs(self, op: Op, inner: Inner, results: set[int]) -> tuple[bool, ...]:
        # The predicate of a `while` decides whether the loop goes on. A loop to a tolerance stops when a
        # residual is small. With half products the residual would stay at their rounding error, and the loop
        # would not end.
        is_condition = op.name == "while" and inner is op.inner[0]
        return (True,) if is_condition else super()._outputs(op, inner, results)

    def _counts(self, var: Var, held: Mapping[Var, Held | None]) -> bool:
        # A value that no iteration changes is rounded in the same way each time, as if it were computed in
        # front of the loop: Sinkhorn's algorithm computes its costs in each iteration and once more behind
        # the loop, and both should be the same numbers.
        is_fixed = is_literal(var) or held.get(var) is Held.FIXED
        # An integer does not count: it is a counter, or the token that ends the decoding of a language model,
        # and `argmax` gives the same token of logits in half. A token of effects has no dtype.
        dtype = None if is_fixed else getattr(var.aval, "dtype", None)
        return dtype is not None and (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.inexact))

    def _enters(self, flags: Sequence[bool]) -> bool:
        return any(flags)

    def _seeds(self, inside: Jaxpr, held: Mapping[Var, Held | None]) -> Iterable[Var]:
        """Yields the predicates of selections between a carried value and a newly computed one."""
        # A selection may decide whether a loop keeps its carry, as in a solver with adaptive steps that
        # rejects a step. With rounded errors the solver would accept other steps, and so would a backward
        # pass that repeats them.
        for op in self._ops_of(inside) if held else ():
            if op.name == "select_n" and _decides(op, held):
                yield op.equation.invars[0]

    def _crosses(self, op: Op, is_found: bool, backward: bool) -> bool:
        del backward
        # Rounding does not change the outcome of a check for finite numbers, such as `x != x`.
        is_check = op.name == "is_finite" or (
            op.traits.compares and len(set(op.variables)) < len(op.variables)
        )
        return is_found and not is_check


def _decides(selection: Op, held: Mapping[Var, Held | None]) -> bool:
    # The derivative of a selection does not decide: it selects between a cotangent and zeros, which are
    # fixed. Nor does an activation function of what the loop carries: no product computes its predicate.
    predicate, *cases = (held_by(var, held) for var in selection.equation.invars)
    return predicate is Held.COMPUTED and Held.CARRY in cases and Held.FIXED not in cases


def _passes(op: Op) -> bool:
    """Whether an operation only moves or adds: its operand may be the gradient of an argument."""
    if op.name in ("broadcast_in_dim", "reduce_sum"):  # The gradient of a broadcast weight is a float32 sum.
        sizes = {math.prod(var.aval.shape) for var in (op.equation.invars[0], op.equation.outvars[0])}
        return len(sizes) == 1
    return op.traits.keeps_gradient


class Tangents:
    """The variables that depend on the tangents of a forward-mode rule: a search forwards.

    JAX transposes the operations that compute tangents, so their products become those of the backward pass.
    """

    def __init__(self, ops_of: Callable[[Jaxpr], Sequence[Op]]) -> None:
        self._ops_of = ops_of
        self._found: dict[Any, frozenset[Var]] = {}

    def variables(self, jaxpr: Jaxpr, inputs: tuple[bool, ...]) -> frozenset[Var]:
        """Returns the variables of a jaxpr that depend on the flagged inputs."""
        if not any(inputs):
            return frozenset()
        inside = open_jaxpr(jaxpr)
        key = id(inside), inputs
        if key not in self._found:
            found = {var for var, is_found in zip(inside.invars, inputs) if is_found}
            for op in self._ops_of(inside):
                if not found.isdisjoint(op.variables):
                    found.update(self._results(op, found))
            self._found[key] = frozenset(found)
        return self._found[key]

    def inputs(self, op: Op, found: Set[Var]) -> list[tuple[bool, ...]]:
        """Returns flags for the inputs of each jaxpr of a call. What a loop carries may become flagged."""

        def is_found(var):
            return not is_literal(var) and var in found

        known = {index for index, var in enumerate(op.equation.invars) if is_found(var)}
        # Each pass but the last flags a further carry, so this ends as in `Dependence.outputs`.
        while True:
            inputs = [tuple(index in known for index in inner.operands) for inner in op.inner]
            if op.name not in LOOPS:
                return inputs
            body, flags = op.inner[-1], inputs[-1]  # In front of the body a `while` has its condition.
            outvars = open_jaxpr(body.jaxpr).outvars
            inside = self.variables(body.jaxpr, flags)
            # An output that is carried is the operand behind the constants in the next iteration.
            carried = {
                body.operands[body.constants + index]
                for index, (var, carry) in enumerate(zip(outvars, body.carries))
                if carry and not is_literal(var) and var in inside
            }
            if carried <= known:
                return inputs
            known |= carried

    def _results(self, op: Op, found: Set[Var]) -> Iterable[Var]:
        if op.category is not Category.CALL:
            return op.equation.outvars
        return [
            op.equation.outvars[index]
            for inner, flags in zip(op.inner, self.inputs(op, found))
            for index, var in zip(inner.results, open_jaxpr(inner.jaxpr).outvars)
            if index is not None and not is_literal(var) and var in self.variables(inner.jaxpr, flags)
        ]

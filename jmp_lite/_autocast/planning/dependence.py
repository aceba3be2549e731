"""Finds the variables of a jaxpr on which some of its outputs depend, backwards, through loops and calls.

The planner asks three questions:

- Which products make the gradients of weights? `Intermediate`, for `reduce_dtype` and one-hot labels.
- Which sums are those of a residual stream? `Streams`, for `half_sums`.
- On what do the decisions of loops depend? `Decisions`.

A fourth question goes forwards: what depends on the tangents of a rule? `Tangents`.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from ..._jaxpr.inner import Inner, Role
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import Jaxpr, Var, is_literal, open_jaxpr
from .op import Loop, Op

_LOOPS = ("scan", "while")


@dataclasses.dataclass(frozen=True)
class Carried:
    """The variables of a jaxpr in a loop that hold what the loop carries. Both are empty outside of loops."""

    held: Mapping[Var, Role] = MappingProxyType({})  # What `Loop.inputs` says of inputs, of variables.
    leaving: Set[Var] = frozenset()  # The variables that the loop carries on, at most moved or selected.


class Dependence(abc.ABC):
    """The search, once for each jaxpr and each set of outputs. A subclass says which operations it crosses.

    `ops_of` returns the operations of a jaxpr, and keeps the jaxpr alive.
    """

    def __init__(self, ops_of: Callable[[Jaxpr], Sequence[Op]]) -> None:
        self._ops_of = ops_of
        self._found: dict[Any, frozenset[Var]] = {}

    def variables(
        self,
        jaxpr: Jaxpr,
        outputs: Sequence[bool],
        backward: bool = False,
        loop: Loop | None = None,
    ) -> frozenset[Var]:
        """Returns the variables of a jaxpr, closed or open, on which the flagged outputs depend.

        Args:
            jaxpr: the jaxpr.
            outputs: a flag for each output.
            backward: whether the whole jaxpr is a part of a backward pass.
            loop: what a loop around the jaxpr does with its inputs and outputs. None outside of loops.
        """
        if not (self._enters(outputs) or loop is not None):
            return frozenset()
        inside = open_jaxpr(jaxpr)
        key = id(inside), tuple(outputs), backward, loop
        if key not in self._found:
            found = {var for var, is_found in zip(inside.outvars, outputs) if is_found and self._counts(var)}
            carried = self.carried(inside, loop)
            found.update(self._seeds(inside, carried))
            for op in reversed(self._ops_of(inside)):
                results = [var in found for var in op.equation.outvars]
                operands = self._operands(op, results, backward or op.is_transposed, carried)
                found.update(filter(self._counts, operands))
            self._found[key] = frozenset(found)
        return self._found[key]

    def outputs(
        self,
        op: Op,
        results: Sequence[bool],
        backward: bool,
        carried: Carried = Carried(),
    ) -> list[tuple[bool, ...]]:
        """Returns a flag for each output of each jaxpr of a call, from flags for the results of the call.

        The carry of a loop is flagged too if the next iteration computes something flagged from it. `carried`
        are the variables around the call that hold what a loop carries.
        """
        known = {index for index, is_found in enumerate(results) if is_found}
        loops = self.loops_inside(op, carried)
        while True:
            outputs = [self._outputs(op, inner, known) for inner in op.inner]
            found = {
                number - inner.constants
                for inner, flags, loop in zip(op.inner, outputs, loops)
                for number in self._inputs(inner, flags, backward, loop)
                if inner.roles[number] is Role.CARRY
            }
            if found <= known:
                return outputs
            known |= found

    def carried(self, inside: Jaxpr, loop: Loop | None) -> Carried:
        """Returns the variables of a jaxpr that hold what the loop around it carries."""
        if loop is None:
            return Carried()
        held = {var: role for var, role in zip(inside.invars, loop.inputs) if role is not Role.ONCE}
        held.update(dict.fromkeys(inside.constvars, Role.CONSTANT))
        for op in self._ops_of(inside):
            of_operands = {held.get(var) for var in op.variables}
            if of_operands <= {Role.CONSTANT} and not op.equation.effects:
                held.update(dict.fromkeys(op.equation.outvars, Role.CONSTANT))
            elif op.traits.category is Category.MOVE and Role.CARRY in of_operands:
                held.update(dict.fromkeys(op.equation.outvars, Role.CARRY))
        return Carried(held, self._leaving(inside, loop.outputs))

    def _leaving(self, inside: Jaxpr, outputs: Sequence[bool]) -> frozenset[Var]:
        """Returns the variables that become a flagged output of a jaxpr, at most moved or selected."""
        leaving = {var for var, flag in zip(inside.outvars, outputs) if flag and not is_literal(var)}
        for op in reversed(self._ops_of(inside)):
            invars, outvars = op.equation.invars, op.equation.outvars
            if leaving.isdisjoint(outvars):
                continue
            if op.traits.category is Category.MOVE or op.name == "select_n":
                leaving.update(op.variables)
            for inner in op.inner if op.name not in _LOOPS else ():
                flags = [index is not None and outvars[index] in leaving for index in inner.results]
                found = self._leaving(open_jaxpr(inner.jaxpr), flags)
                pairs = zip(inner.operands, open_jaxpr(inner.jaxpr).invars)
                leaving.update(invars[index] for index, var in pairs if var in found)
        return frozenset(var for var in leaving if not is_literal(var))

    def loops_inside(self, op: Op, carried: Carried) -> list[Loop | None]:
        """Returns for each jaxpr of a call what a loop does with its inputs and outputs."""
        if op.name in _LOOPS:
            roles = [tuple(map(_role_in_loop, inner.roles)) for inner in op.inner]
            return [Loop(inputs, inner.carries) for inputs, inner in zip(roles, op.inner)]
        invars, outvars = op.equation.invars, op.equation.outvars
        role_of = lambda var: Role.CONSTANT if is_literal(var) else carried.held.get(var, Role.ONCE)
        loops = [
            Loop(
                tuple(role_of(invars[index]) for index in inner.operands),
                tuple(index is not None and outvars[index] in carried.leaving for index in inner.results),
            )
            for inner in op.inner
        ]
        return [loop if Role.CARRY in loop.inputs and any(loop.outputs) else None for loop in loops]

    def _operands(self, op: Op, results: Sequence[bool], backward: bool, carried: Carried) -> Sequence[Var]:
        """Returns the operands of an operation on which a flagged variable depends."""
        if op.category is not Category.CALL:
            return op.variables if self._crosses(op, any(results), backward) else ()
        loops, invars = self.loops_inside(op, carried), op.equation.invars
        # What a loop inside decides by may be rounded in front of the loop.
        is_in_loop = op.name not in _LOOPS and any(loop is not None for loop in loops)
        if not (self._enters(results) or is_in_loop):
            return ()
        return [
            invars[inner.operands[number]]
            for inner, flags, loop in zip(op.inner, self.outputs(op, results, backward, carried), loops)
            for number in self._inputs(inner, flags, backward, loop)
        ]

    def _inputs(self, inner: Inner, outputs: Sequence[bool], backward: bool, loop: Loop | None) -> list[int]:
        found = self.variables(inner.jaxpr, outputs, backward, loop)
        return [number for number, var in enumerate(open_jaxpr(inner.jaxpr).invars) if var in found]

    def _outputs(self, op: Op, inner: Inner, results: set[int]) -> tuple[bool, ...]:
        del op
        return tuple(index in results for index in inner.results)

    def _counts(self, var: Var) -> bool:
        return not is_literal(var)

    def _enters(self, flags: Sequence[bool]) -> bool:
        """Whether the search enters a jaxpr or call with these flags for its results."""
        del flags
        return True

    def _seeds(self, inside: Jaxpr, carried: Carried) -> Iterable[Var]:
        """Returns further variables of a jaxpr from which the search starts."""
        del inside, carried
        return ()

    @abc.abstractmethod
    def _crosses(self, op: Op, is_found: bool, backward: bool) -> bool:
        """Whether an operation leads on to its operands. `is_found` says that one of its results is found."""


class Intermediate(Dependence):
    """The variables from which a backward pass computes something.

    A variable is intermediate if an operation other than a move or a sum reads it. The cotangent of an
    activation is intermediate. The gradient of an argument is not: only moves and sums lead from its product
    to the end of the backward pass. So the products that make weight gradients are those whose results are
    not intermediate. The search needs no forward pass, and works in loops and recomputed layers.
    """

    def _crosses(self, op: Op, is_found: bool, backward: bool) -> bool:
        # Operations outside the backward pass, such as an optimizer's, read finished gradients.
        return backward and (is_found or not _passes(op))


class Streams(Dependence):
    """The variables that a product or a norm of the forward pass reads later, as it reads a residual stream.

    From a stream, norms compute what products take, so every operation is crossed. What a loop carries counts
    only if a product of the next iteration depends on it: an accumulator, which only a product after the loop
    reads, is not a stream.
    """

    def outputs(
        self,
        op: Op,
        results: Sequence[bool],
        backward: bool,
        carried: Carried = Carried(),
    ) -> list[tuple[bool, ...]]:
        carries = {index for inner in op.inner for index, carry in zip(inner.results, inner.carries) if carry}
        inside = [flag and index not in carries for index, flag in enumerate(results)]
        return super().outputs(op, inside, backward, carried)

    def _crosses(self, op: Op, is_found: bool, backward: bool) -> bool:
        is_forward = not backward or op.is_recomputed
        return is_forward and (is_found or op.traits.category is Category.ALLOW)


class Decisions(Dependence):
    """The values on which the decisions of loops depend.

    A loop decides by the predicate of a `while` whether it goes on. A loop to a tolerance stops when a
    residual is small. Half products round each iterate, so the residual stays at their rounding error and the
    loop does not end. A loop also decides by a selection whether it keeps what it carries, as a solver with
    adaptive steps does when it rejects a step. With rounded errors it would accept other steps, also where a
    backward pass repeats them. What these decisions depend on therefore stays in float32.

    Only floating numbers and booleans count. A counter of iterations is an integer, and so is the token that
    ends the decoding of a language model: `argmax` gives the same token of logits in half. A check for finite
    numbers decides nothing that rounding changes.
    """

    def _outputs(self, op: Op, inner: Inner, results: set[int]) -> tuple[bool, ...]:
        is_condition = op.name == "while" and inner is op.inner[0]
        return (True,) if is_condition else super()._outputs(op, inner, results)

    def _counts(self, var: Var) -> bool:
        dtype = None if is_literal(var) else getattr(var.aval, "dtype", None)
        return dtype is not None and (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.inexact))

    def _enters(self, flags: Sequence[bool]) -> bool:
        return any(flags)

    def _seeds(self, inside: Jaxpr, carried: Carried) -> Iterable[Var]:
        """Yields the predicates by which a loop carries on what it carried, or what it has computed.

        The derivative of a selection is not one of them: it selects between a cotangent and zeros. Nor is an
        activation function of what the loop carries, whose result the loop does not carry on.
        """
        for op in self._ops_of(inside) if carried.leaving else ():
            if op.name == "select_n" and op.equation.outvars[0] in carried.leaving:
                predicate, *cases = op.equation.invars
                roles = [Role.CONSTANT if is_literal(case) else carried.held.get(case) for case in cases]
                if Role.CARRY in roles and Role.CONSTANT not in roles:
                    yield predicate

    def _crosses(self, op: Op, is_found: bool, backward: bool) -> bool:
        del backward
        is_check = op.name == "is_finite" or (
            op.traits.compares and len(set(op.variables)) < len(op.variables)
        )
        return is_found and not is_check


def _role_in_loop(role: Role) -> Role:
    return role if role in (Role.CARRY, Role.CONSTANT) else Role.ONCE


def _passes(op: Op) -> bool:
    """Whether an operation only moves or adds: its operand may be the gradient of an argument."""
    if op.name in ("broadcast_in_dim", "reduce_sum"):  # The gradient of a broadcast weight is a float32 sum.
        sizes = {math.prod(var.aval.shape) for var in (op.equation.invars[0], op.equation.outvars[0])}
        return len(sizes) == 1
    return op.traits.keeps_gradient


class Tangents:
    """The variables that depend on the tangents of a forward-mode rule: a search forwards.

    JAX transposes what computes them, so the products among them are those of the backward pass.
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
        is_found = lambda var: not is_literal(var) and var in found
        known = {index for index, var in enumerate(op.equation.invars) if is_found(var)}
        while True:
            inputs = [tuple(index in known for index in inner.operands) for inner in op.inner]
            if op.name not in _LOOPS:
                return inputs
            body, flags = op.inner[-1], inputs[-1]
            outvars = open_jaxpr(body.jaxpr).outvars
            inside = self.variables(body.jaxpr, flags)
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

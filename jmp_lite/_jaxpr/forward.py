"""Follows facts about values forwards through a jaxpr: through its calls, branches and loops.

A fact may be anything that two paths can join, such as the arguments that a value depends on. A value that a
loop carries has the facts of all iterations.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from .inner import Role, inner_jaxprs
from .primitives import Category, traits_of
from .read import Equation, Jaxpr, Var, equations, is_literal, open_jaxpr

F = TypeVar("F")


class Forward(Generic[F]):
    """A forward dataflow.

    Args:
        operation: returns the facts of the results of an equation, from those of its operands.
        join: returns what two facts have in common, or both: those of the branches of a `cond`, and of a
            carry before and after an iteration. Joining again must change nothing in the end.
        nothing: the fact of a literal and of a constant.
    """

    def __init__(
        self, operation: Callable[[Equation, list[F]], Sequence[F]], join: Callable[[F, F], F], nothing: F
    ) -> None:
        self._operation, self._join, self._nothing = operation, join, nothing
        # The facts of the results of each equation, by its `id`: JAX shares the jaxpr of equal calls, so an
        # equation inside one has the facts of all of them. The caller keeps the jaxpr, and so the ids, alive.
        self.found: dict[int, list[F]] = {}
        self.calls: list[Equation] = []  # Around the equation at hand, outermost first.

    def run(self, jaxpr: Jaxpr, inputs: Sequence[F]) -> list[F]:
        """Returns the facts of the outputs of a jaxpr, from those of its inputs."""
        inside = open_jaxpr(jaxpr)
        known: dict[Var, F] = dict(zip(inside.invars, inputs, strict=True))

        def read(var):
            return self._nothing if is_literal(var) else known.get(var, self._nothing)

        for equation in equations(inside):
            operands = list(map(read, equation.invars))
            is_call = traits_of(equation.primitive.name).category is Category.CALL
            results = self._call(equation, operands) if is_call else self._operation(equation, operands)
            before = self.found.get(id(equation), results)
            self.found[id(equation)] = list(map(self._join, before, results))
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(read, inside.outvars))

    def _call(self, equation: Equation, operands: Sequence[F]) -> list[F]:
        results = [self._nothing] * len(equation.outvars)
        self.calls.append(equation)
        while True:  # Until what a loop carries has the facts of all iterations; otherwise twice.
            before = list(results)
            for inner in inner_jaxprs(equation):  # The branches of a `cond` join in `results`.
                taken = [operands[number] for number in inner.operands]
                carries = [number for number, role in enumerate(inner.roles) if role is Role.CARRY]
                for number, fact in zip(carries, before):
                    taken[number] = self._join(taken[number], fact)
                for index, fact in zip(inner.results, self.run(inner.jaxpr, taken), strict=True):
                    if index is not None:
                        results[index] = self._join(results[index], fact)
            if results == before:
                self.calls.pop()
                return results


def dependence(jaxpr: Jaxpr) -> list[frozenset[int]]:
    """Returns for each output of a jaxpr the indexes of the inputs that it depends on."""

    def operation(equation, operands):
        return [frozenset().union(*operands)] * len(equation.outvars)

    inputs = [frozenset({number}) for number in range(len(open_jaxpr(jaxpr).invars))]
    return Forward[frozenset[int]](operation, frozenset.union, frozenset()).run(jaxpr, inputs)

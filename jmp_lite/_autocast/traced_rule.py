"""Custom derivatives: the rule of the user is traced at the dtypes for which it was written, planned and run.

A rule of `jax.custom_jvp` or `jax.custom_vjp` is a function of float32 values like any other. The equation
does not hold it in a form that autocast can read: autocast differentiates the equation as it was traced.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._jaxpr.bind import bind, cast
from .._jaxpr.precision import only_own_precisions
from .._jaxpr.read import Array, Equation, Jaxpr, Var, is_float32, sources_of_outputs
from .interpreter import Interpreter
from .planning.op import Context
from .planning.plan import Inside, conversion
from .planning.states import FLOAT32, HALF, OTHER, State
from .planning.wanted import Wanted
from .value import Value


@dataclasses.dataclass(frozen=True, eq=False)
class TracedRule:
    """A function with a custom derivative, and its rules, each run by a plan of its own.

    JAX says which operands are perturbed; the rule is differentiated with respect to those only. JAX gives no
    derivative of what the function closes over, which is its first operands.

    The paths of the operands that are pairs follow the operands, and the paths of such results the results.
    The tangent of a pair is that of its path, in float32; JAX adds nothing of the half operand to it.
    """

    interpreter: Interpreter
    equation: Equation
    inside: Inside  # How the function runs.
    closed_over: list[Array]
    pairs_in: tuple[int, ...]  # The indexes of the operands that are pairs.
    pairs_out: tuple[int, ...]  # Those of the results.

    @property
    def primal(self) -> Callable[..., list[Array]]:
        run = self.interpreter.body(self.inside, (), self.pairs_in, self.pairs_out)

        def fun(*arrays: Array) -> list[Array]:
            return run(*self.closed_over, *arrays)[0]

        fun.__name__ = str(self.equation.params.get("name", "fun"))  # JAX prints it.
        return fun

    def jvp(self, primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Any]]:
        """The forward-mode rule of a `custom_jvp`: the results and their tangents."""
        given = self._by_operand(tangents)
        perturbed = [index for index, x in given.items() if not isinstance(x, SymbolicZero)]

        def rule(arrays: list[Array], directions: list[Array]) -> tuple[list[Array], list[Array]]:
            fun, operands = self._of_perturbed(arrays, perturbed)
            return jax.jvp(fun, operands, tuple(directions))

        directions = [_tangent(given[index], self.equation.invars[index]) for index in perturbed]
        states, pairs = self.inside.plan.results, self.pairs_out
        paired = (*pairs, *(len(states) + index for index in pairs))
        with self.interpreter.in_linear_rule():
            run = self._run(rule, self._inputs(primals), directions, (*states, *states), paired)
        results, of_results = run.results
        return results + run.paths[: len(pairs)], of_results + run.paths[len(pairs) :]

    def forward(self, *given: Any) -> tuple[list[Array], jax.tree_util.Partial]:
        """The forward rule of a `custom_vjp`. Its residuals are the backward rule, with its arrays."""
        primals = self._by_operand(given)
        perturbed = [index for index, primal in primals.items() if primal.perturbed]
        structures: list[Any] = []

        # JAX's caches keep the structure of what a traced function returns. That of the linear function holds
        # the user's backward rule, with the arrays that it closes over.
        def rule(arrays: list[Array], _: list[Array]) -> tuple[list[Array], list[Array]]:
            fun, operands = self._of_perturbed(arrays, perturbed)
            results, pushforward = jax.linearize(fun, *operands)
            leaves, structure = jax.tree.flatten(pushforward)
            structures.append(structure)
            return results, leaves

        inputs, states = self._inputs([primal.value for primal in given]), self.inside.plan.results
        run = self._run(rule, inputs, [], states, self.pairs_out)
        results, leaves = run.results
        backward = functools.partial(self._backward, run.residuals, perturbed, structures[-1])
        return results + run.paths, jax.tree_util.Partial(backward, leaves)

    def _backward(
        self,
        kept: Sequence[State],
        perturbed: Sequence[int],
        structure: Any,
        leaves: list[Array],
        cotangents: list[Any],
    ) -> tuple[Array | None, ...]:
        """The backward rule of a `custom_vjp`. The half of a pair gets no gradient, and its path gets all.

        Args:
            kept: the states of `leaves`.
            perturbed: the indexes of the operands with respect to which the rule differentiates.
            structure: that of a function of their tangents, which gives those of the results.
            leaves: the arrays that this function holds.
            cotangents: those of the results, then those of the paths.
        """
        invars, outvars = self.equation.invars, self.equation.outvars
        arriving = self._arriving(cotangents)

        def rule(leaves: list[Array], arriving_arrays: list[Array]) -> list[Array]:
            def to_given(*tangents: Array) -> list[Array]:
                changes = jax.tree.unflatten(structure, leaves)(*tangents)
                return [changes[index] for index in arriving]

            operands = (invars[index].aval for index in perturbed)
            return list(jax.linear_transpose(to_given, *operands)(arriving_arrays))

        residuals = list(zip(map(Value, leaves), kept, strict=True))
        tangents = [_tangent(array, outvars[index]) for index, array in arriving.items()]
        states = [FLOAT32 if n in self.pairs_in else self.inside.plan.inputs[n] for n in perturbed]
        # The gradient of an activation is read on; that of a parameter leaves the backward pass.
        intermediate = tuple(not state.wide_gradient for state in states)
        context = Context(self.inside.plan.analysis.context.scope, True, intermediate, of_gradient=True)
        try:
            run = self._run(rule, residuals, tangents, states, context=context)
        except jax.errors.UnexpectedTracerError as error:
            raise ValueError(_READS_TRACED) from error
        gradients = dict(zip(perturbed, run.results, strict=True))
        of_paths = [gradients.pop(index, None) for index in self.pairs_in]
        return *map(gradients.get, range(len(self.closed_over), len(invars))), *of_paths

    def _arriving(self, cotangents: Sequence[Any]) -> dict[int, Array]:
        """Returns the cotangents that are not zero, by the indexes of their results.

        Those of a pair, in half and of its path, are summed in float32.
        """
        count = len(self.equation.outvars)
        arriving = dict(enumerate(cotangents[:count]))
        for index, of_path in zip(self.pairs_out, cotangents[count:], strict=True):
            arriving[index] = _sum(arriving[index], of_path)
        return {n: x for n, x in arriving.items() if not isinstance(x, SymbolicZero)}

    def batched(
        self, axis_size: int, in_batched: Sequence[bool], *arrays: Array
    ) -> tuple[list[Array], list[bool]]:
        """The rule of a `custom_vmap`: the results, and for each that it has a batch axis."""
        axes = [0 if is_batched else None for is_batched in in_batched]

        def rule(arrays: list[Array], _: list[Array]) -> list[Array]:
            run = jax.vmap(lambda *arrays: bind(self.equation, arrays), axes, axis_size=axis_size)
            return run(*arrays)

        results = self._run(rule, self._inputs(arrays), [], self.inside.plan.results).results
        return results, [True] * len(results)

    def _inputs(self, arrays: Sequence[Array]) -> list[tuple[Value, State]]:
        values = self.interpreter.with_paths((*self.closed_over, *arrays), self.pairs_in)
        return list(zip(values, self.inside.plan.inputs, strict=True))

    def _by_operand(self, given: Sequence[Any]) -> dict[int, Any]:
        """Returns what JAX gives for each operand, by its index; of a pair, its path's."""
        first, invars = len(self.closed_over), self.equation.invars
        entries = dict(enumerate(given[: len(invars) - first], start=first))
        return entries | dict(zip(self.pairs_in, given[len(invars) - first :], strict=True))

    def _of_perturbed(
        self, arrays: Sequence[Array], perturbed: Sequence[int]
    ) -> tuple[Callable[..., list[Array]], tuple[Array, ...]]:
        """Returns the equation as a function of its perturbed operands, and those operands."""

        def fun(*operands: Array) -> list[Array]:
            given = dict(zip(perturbed, operands, strict=True))
            return bind(self.equation, [given.get(index, x) for index, x in enumerate(arrays)])

        return fun, tuple(arrays[index] for index in perturbed)

    def _run(
        self,
        rule: Callable[[list[Array], list[Array]], Any],
        inputs: Sequence[tuple[Value, State]],
        tangents: Sequence[tuple[Value, State]],
        states: Sequence[State],
        paired: Sequence[int] = (),
        context: Context | None = None,
    ) -> "_Run":
        """Traces a rule, plans it and runs it.

        Args:
            rule: the rule, a function of arrays in their traced dtypes.
            inputs: its operands, each with its state.
            tangents: its tangents or cotangents, each with its state.
            states: the states of its first results, which take their dtypes. Those after them are residuals.
            paired: the indexes of the results that are pairs.
            context: the context of a backward rule; None for another rule.

        """
        interpreter, arguments = self.interpreter, [*inputs, *tangents]
        closed, structure = self._traced(rule, inputs, tangents)
        known = _states_of_outputs(closed, states)
        wanted = [Wanted.INDIRECTLY if state and state.is_half else Wanted.NO for state in known]
        if context is None:  # The scopes around the function are around its rules too.
            around = self.inside.plan.analysis.context
            flags = (False,) * len(inputs) + (True,) * len(tangents)
            context = Context(around.scope, streams=around.streams, decides=around.decides, tangents=flags)
        plan = interpreter.planner.plan(closed, [state for _, state in arguments], wanted, context)
        final = [new if state is None else state for state, new in zip(known, plan.results, strict=True)]
        values = interpreter.run(plan, [value for value, _ in arguments])
        arrays = interpreter.take_all(values, list(map(conversion, plan.results, final)))
        paths = [values[index].to(jnp.float32) for index in paired]
        return _Run(jax.tree.unflatten(structure, arrays), final[len(states) :], paths)

    def _traced(
        self,
        rule: Callable[[list[Array], list[Array]], Any],
        inputs: Sequence[tuple[Value, State]],
        tangents: Sequence[tuple[Value, State]],
    ) -> tuple[Jaxpr, Any]:
        """Traces a rule in the dtypes for which it was written. Returns it, and the tree of its results."""
        given = (
            [self.interpreter.take(value, conversion(state, FLOAT32)) for value, state in arguments]
            for arguments in (inputs, tangents)
        )
        with only_own_precisions():
            closed, shapes = jax.make_jaxpr(rule, return_shape=True)(*given)
        return closed, jax.tree.structure(shapes)


class _Run(NamedTuple):
    """What a rule has given."""

    results: Any
    residuals: Sequence[State]  # The states of the results behind those of the function.
    paths: list[Array]  # The paths of the pairs.


# JAX says "No constant handler for type Tracer" or names an escaped tracer, and not the rule:
# https://github.com/jax-ml/jax/pull/34216.
_READS_TRACED = (
    "The backward rule of a custom_vjp reads a traced value that is not among its residuals, such as an "
    "argument of the function around it. Such a rule fails under jax.grad(jax.jit(fun)), and under "
    "jax.grad(autocast(fun)). Return the value from the forward rule as a residual, or write "
    "autocast(jax.grad(fun))."
)


def _states_of_outputs(closed: Jaxpr, results: Sequence[State]) -> list[State | None]:
    """Returns the states of the outputs of a rule: its results, and its residuals, None where not known."""
    # A residual may be one of the results. Then it is the value that the readers of the result read.
    sources = sources_of_outputs(closed)
    numbers = [sources.index(source) for source in sources[len(results) :]]
    return [*results, *(results[number] if number < len(results) else None for number in numbers)]


def _tangent(array: Array, var: Var) -> tuple[Value, State]:
    """Returns a tangent or cotangent of `var`, which may be half in the program itself, with its state."""
    array = jnp.asarray(array)  # `jax.jvp` passes on a tangent that is a Python number.
    state = FLOAT32 if array.dtype == jnp.float32 else HALF
    return Value(array), state if is_float32(var) else OTHER


def _sum(of_half: Any, of_path: Any) -> Any:
    """Returns the cotangent of a result that is a pair, in float32. Both parts may be symbolic zeros."""
    if isinstance(of_path, SymbolicZero):
        return of_half
    return of_path if isinstance(of_half, SymbolicZero) else of_path + cast(of_half, jnp.float32)

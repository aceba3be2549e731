"""Custom derivatives: the rule of the user is traced at the dtypes for which it was written, planned and run.

A rule of `jax.custom_jvp` or `jax.custom_vjp` is a function of float32 values like any other. The equation
does not hold it in a form that autocast can read: autocast differentiates the equation as it was traced.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .._jaxpr.bind import bind, cast
from .._jaxpr.precision import only_own_precisions
from .._jaxpr.read import Array, Equation, Var, is_float32, sources_of_outputs
from .._tree import STATIC
from .interpreter import Interpreter
from .planning.op import Context
from .planning.plan import Call, conversion
from .planning.states import FLOAT32, HALF, OTHER, State
from .planning.wanted import Wanted
from .value import Value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """What the forward rule of a `custom_vjp` leaves for the backward rule."""

    arrays: list[Array]
    # How to build the pushforward: a function of tangents that gives tangents.
    structure: Any = dataclasses.field(metadata=STATIC)
    states: tuple[State, ...] = dataclasses.field(metadata=STATIC)  # Those of the arrays.
    # The indexes of the operands with respect to which the rule differentiates.
    perturbed: tuple[int, ...] = dataclasses.field(metadata=STATIC)


class TracedRule:
    """A function with a custom derivative, and its rules, each run by a plan of its own.

    JAX says which operands are perturbed; the rule is differentiated with respect to those only. JAX gives no
    derivative of what the function closes over, which is its first operands.

    The paths of the operands that are pairs follow the operands, and the paths of such results the results.
    The tangent of a pair is that of its path, in float32; JAX adds nothing of the half operand to it.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        equation: Equation,
        action: Call,
        closed_over: list[Array],
        pairs: tuple[int, ...],
    ) -> None:
        (self._inside,) = action.inner
        self._interpreter, self._equation = interpreter, equation
        self._closed_over, self._pairs, self._paired = closed_over, pairs, action.paired

    @property
    def primal(self) -> Callable[..., list[Array]]:
        run = self._interpreter.body(self._inside, (), self._pairs, self._paired)

        def fun(*arrays: Array) -> list[Array]:
            return run(*self._closed_over, *arrays)[0]

        fun.__name__ = str(self._equation.params.get("name", "fun"))  # JAX prints it.
        return fun

    # The forward-mode rule.

    def jvp(self, primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Any]]:
        given, outvars = self._by_operand(tangents), self._equation.outvars
        perturbed = self._differentiable(lambda index: not isinstance(given[index], SymbolicZero))
        moved = [index for index, var in enumerate(outvars) if _is_differentiable(var)]

        def rule(arrays: list[Array], directions: list[Array]) -> tuple[list[Array], list[Array]]:
            fun, operands = self._of_perturbed(arrays, perturbed)
            results, changes = jax.jvp(fun, operands, tuple(directions))
            return results, [changes[index] for index in moved]

        directions = [_tangent(given[index], self._equation.invars[index]) for index in perturbed]
        states, count = self._inside.plan.results, len(outvars)
        wanted = (*states, *(states[index] for index in moved))
        paired = (*self._paired, *(count + moved.index(index) for index in self._paired))
        with self._interpreter.in_linear_rule():
            arrays, _, paths = self._run(rule, self._inputs(primals), directions, wanted, paired)
        changes = dict(zip(moved, arrays[count:], strict=True))
        zero = lambda var: np.zeros(var.aval.shape, jax.dtypes.float0)
        of_results = [changes.get(index, zero(var)) for index, var in enumerate(outvars)]
        pairs = len(self._paired)
        return arrays[:count] + paths[:pairs], of_results + paths[pairs:]

    # The reverse-mode rules.

    def forward(self, *given: Any) -> tuple[list[Array], Any]:
        """The forward rule of a `custom_vjp`: the results, and the residuals."""
        primals = self._by_operand(given)
        perturbed = self._differentiable(lambda index: primals[index].perturbed)
        structures: list[Any] = []

        def rule(arrays: list[Array], _: list[Array]) -> tuple[list[Array], list[Array]]:
            fun, operands = self._of_perturbed(arrays, perturbed)
            results, pushforward = jax.linearize(fun, *operands)
            leaves, structure = jax.tree.flatten(pushforward)
            structures.append(structure)
            return results, leaves

        inputs, states = self._inputs([primal.value for primal in given]), self._inside.plan.results
        arrays, residual_states, paths = self._run(rule, inputs, [], states, self._paired)
        saved = _Residuals(arrays[len(states) :], structures[-1], tuple(residual_states), perturbed)
        return arrays[: len(states)] + paths, saved

    def backward(self, saved: _Residuals, cotangents: list[Any]) -> tuple[Array | None, ...]:
        """The backward rule of a `custom_vjp`. The half of a pair gets no gradient, and its path gets all."""
        invars, outvars = self._equation.invars, self._equation.outvars
        arriving = self._arriving(cotangents)

        def rule(leaves: list[Array], arriving_arrays: list[Array]) -> list[Array]:
            pushforward = jax.tree.unflatten(saved.structure, leaves)

            def to_given(*tangents: Array) -> list[Array]:
                changes = pushforward(*tangents)
                return [changes[index] for index in arriving]

            operands = (invars[index].aval for index in saved.perturbed)
            return list(jax.linear_transpose(to_given, *operands)(arriving_arrays))

        residuals = list(zip(map(Value, saved.arrays), saved.states, strict=True))
        tangents = [_tangent(array, outvars[index]) for index, array in arriving.items()]
        own = self._inside.plan.inputs
        states = [FLOAT32 if index in self._pairs else own[index] for index in saved.perturbed]
        # The gradient of an activation is read on; that of a parameter leaves the backward pass.
        intermediate = tuple(not state.wide_gradient for state in states)
        context = Context(self._inside.plan.analysis.context.scope, True, intermediate, of_gradient=True)
        try:
            arrays, _, _ = self._run(rule, residuals, tangents, states, context=context)
        except jax.errors.UnexpectedTracerError as error:
            raise ValueError(_READS_TRACED) from error
        gradients = dict(zip(saved.perturbed, arrays, strict=True))
        of_paths = [gradients.pop(index, None) for index in self._pairs]
        return *map(gradients.get, range(len(self._closed_over), len(invars))), *of_paths

    def _arriving(self, cotangents: Sequence[Any]) -> dict[int, Array]:
        """Returns the cotangents that are not zero, by the indexes of their results.

        Those of a pair, in half and of its path, are summed in float32.
        """
        outvars = self._equation.outvars
        of_results = list(cotangents[: len(outvars)])
        for index, of_path in zip(self._paired, cotangents[len(outvars) :], strict=True):
            of_results[index] = _sum(of_results[index], of_path)
        is_given = lambda x, var: _is_differentiable(var) and not isinstance(x, SymbolicZero)
        return {n: x for n, (x, var) in enumerate(zip(of_results, outvars)) if is_given(x, var)}

    # The batching rule.

    def batched(
        self, axis_size: int, in_batched: Sequence[bool], *arrays: Array
    ) -> tuple[list[Array], list[bool]]:
        """The rule of a `custom_vmap`: the results, and for each that it has a batch axis."""
        axes = [0 if is_batched else None for is_batched in in_batched]

        def rule(arrays: list[Array], _: list[Array]) -> list[Array]:
            run = jax.vmap(lambda *arrays: bind(self._equation, arrays), axes, axis_size=axis_size)
            return run(*arrays)

        results, _, _ = self._run(rule, self._inputs(arrays), [], self._inside.plan.results)
        return results, [True] * len(results)

    # All.

    def _inputs(self, arrays: Sequence[Array]) -> list[tuple[Value, State]]:
        values = self._interpreter.with_paths((*self._closed_over, *arrays), self._pairs)
        return list(zip(values, self._inside.plan.inputs, strict=True))

    def _by_operand(self, given: Sequence[Any]) -> dict[int, Any]:
        """Returns what JAX gives for each operand, such as a tangent, by its index; of a pair, its path's."""
        count = len(given) - len(self._pairs)
        entries = dict(enumerate(given[:count], start=len(self._closed_over)))
        return entries | dict(zip(self._pairs, given[count:], strict=True))

    def _differentiable(self, is_perturbed: Callable[[int], bool]) -> tuple[int, ...]:
        """Returns the indexes of the operands that are perturbed, of those that may be differentiated."""
        invars, first = self._equation.invars, len(self._closed_over)
        indexes = (index for index in range(first, len(invars)) if _is_differentiable(invars[index]))
        return tuple(filter(is_perturbed, indexes))

    def _of_perturbed(
        self, arrays: Sequence[Array], perturbed: Sequence[int]
    ) -> tuple[Callable[..., list[Array]], tuple[Array, ...]]:
        """Returns the equation as a function of its perturbed operands, and those operands."""

        def fun(*operands: Array) -> list[Array]:
            given = dict(zip(perturbed, operands, strict=True))
            return bind(self._equation, [given.get(index, x) for index, x in enumerate(arrays)])

        return fun, tuple(arrays[index] for index in perturbed)

    def _run(
        self,
        rule: Callable[[list[Array], list[Array]], Any],
        inputs: Sequence[tuple[Value, State]],
        tangents: Sequence[tuple[Value, State]],
        states: Sequence[State],
        paired: Sequence[int] = (),
        context: Context | None = None,
    ) -> tuple[list[Array], Sequence[State], list[Array]]:
        """Traces a rule in the dtypes for which it was written, plans it and runs it.

        Args:
            rule: the rule, a function of arrays in their traced dtypes.
            inputs: its operands, each with its state.
            tangents: its tangents or cotangents, each with its state.
            states: the states of its first results, which take their dtypes. Those after them are residuals.
            paired: the indexes of the results that are pairs.
            context: the context of a backward rule; None for another rule.

        Returns:
            The results, the states of the residuals, and the paths of the pairs.
        """
        interpreter, arguments = self._interpreter, [*inputs, *tangents]
        traced = [interpreter.take(value, conversion(state, FLOAT32)) for value, state in arguments]
        with only_own_precisions():
            closed = jax.make_jaxpr(rule)(traced[: len(inputs)], traced[len(inputs) :])
        # A residual may be one of the results. Then it is the value that the readers of the result read.
        sources = sources_of_outputs(closed)
        numbers = [sources.index(source) for source in sources[len(states) :]]
        known = [*states, *(states[number] if number < len(states) else None for number in numbers)]
        wanted = list(map(_wanted, known))
        if context is None:  # The scopes around the function are around its rules too.
            around = self._inside.plan.analysis.context
            flags = (False,) * len(inputs) + (True,) * len(tangents)
            context = Context(around.scope, streams=around.streams, decides=around.decides, tangents=flags)
        plan = interpreter.planner.plan(closed, [state for _, state in arguments], wanted, context)
        final = [new if state is None else state for state, new in zip(known, plan.results, strict=True)]
        values = interpreter.run(plan, [value for value, _ in arguments])
        arrays = interpreter.take_all(values, list(map(conversion, plan.results, final)))
        return arrays, final[len(states) :], [values[index].to(jnp.float32) for index in paired]


# JAX says "No constant handler for type Tracer" or names an escaped tracer, and not the rule:
# https://github.com/jax-ml/jax/pull/34216.
_READS_TRACED = (
    "The backward rule of a custom_vjp reads a traced value that is not among its residuals, such as an "
    "argument of the function around it. Such a rule fails under jax.grad(jax.jit(fun)), and under "
    "jax.grad(autocast(fun)). Return the value from the forward rule as a residual, or write "
    "autocast(jax.grad(fun))."
)


def _tangent(array: Array, var: Var) -> tuple[Value, State]:
    """Returns a tangent or cotangent of `var`, which may be half in the program itself, with its state."""
    if not is_float32(var):
        return Value(array), OTHER
    return Value(array), FLOAT32 if array.dtype == jnp.float32 else HALF


def _wanted(state: State | None) -> Wanted:
    """Returns how a result of a rule is wanted. The state of a residual is not known."""
    return Wanted.INDIRECTLY if state is not None and state.is_half else Wanted.NO


def _sum(of_half: Any, of_path: Any) -> Any:
    """Returns the cotangent of a result that is a pair, in float32. Both parts may be symbolic zeros."""
    if isinstance(of_path, SymbolicZero):
        return of_half
    return of_path if isinstance(of_half, SymbolicZero) else of_path + cast(of_half, jnp.float32)


def _is_differentiable(var: Var) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)

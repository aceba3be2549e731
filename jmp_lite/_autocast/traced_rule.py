"""Custom derivatives: the rule of the user is traced at the dtypes for which it was written, planned and run.

A rule of `jax.custom_jvp` or `jax.custom_vjp` is a function of float32 values like any other. The equation
does not hold it in a form that autocast can read: autocast differentiates the equation as it was traced.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .._jaxpr.bind import bind, cast
from .._jaxpr.precision import only_own_precisions
from .._jaxpr.read import Array, Equation, Var, is_float32, sources_of_outputs
from .interpreter import Interpreter
from .planning.op import Context
from .planning.plan import Call, conversion
from .planning.states import FLOAT32, HALF, OTHER, State
from .planning.wanted import Wanted
from .value import Value


@dataclasses.dataclass(frozen=True)
class _Saved:
    """The static part of the residuals of a forward rule."""

    structure: Any  # How to build the pushforward of a `custom_vjp`: tangents to tangents.
    states: tuple[State, ...]  # The states of the residuals.
    moving: tuple[bool, ...]  # For each operand, whether the rule gives a gradient of it.

    def __call__(self) -> None:
        """Never called. `jax.tree_util.Partial`, the pytree that carries this, asks for a callable."""


class TracedRule:
    """A function with a custom derivative, and its rules, each run by a plan of its own.

    A rule with symbolic zeros is told which operands are perturbed. It is not differentiated by the others.

    The path of an operand that is a pair follows the operands, and the path of such a result the results. The
    tangent of a pair is that of its path, in float32; JAX adds nothing of the half operand to it.
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
        self._name = str(equation.params.get("name", "fun"))
        self._closed_over, self._pairs, self._paired = closed_over, pairs, action.paired
        self._moving = tuple(
            index >= len(closed_over) and _is_differentiable(var) for index, var in enumerate(equation.invars)
        )

    @property
    def primal(self) -> Callable[..., list[Array]]:
        """The function itself, by its plan."""
        run = self._interpreter.body(self._inside, (), self._pairs, self._paired)

        def fun(*arrays: Array) -> list[Array]:
            return run(*self._closed_over, *arrays)[0]

        fun.__name__ = self._name  # JAX prints it.
        return fun

    # The forward-mode rule.

    def jvp(self, primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Any]]:
        """The rule of a `custom_jvp`."""
        tangents = self._of_operands(tangents)
        moving = self._perturbed(not isinstance(tangent, SymbolicZero) for tangent in tangents)
        operands = zip(tangents, self._equation.invars, moving)
        directions = [_tangent(tangent, var) for tangent, var, moves in operands if moves]
        states, outvars = self._inside.plan.results, self._equation.outvars
        moved = [index for index, var in enumerate(outvars) if _is_differentiable(var)]
        pushforward = functools.partial(self._pushforward, moving)
        paired = [*self._paired, *(len(states) + moved.index(index) for index in self._paired)]
        results = [*states, *(states[index] for index in moved)]
        was_linear, self._interpreter.is_linear = self._interpreter.is_linear, True
        try:
            arrays, _, paths = self._run(pushforward, self._inputs(primals), directions, results, paired)
        finally:
            self._interpreter.is_linear = was_linear
        changes = dict(zip(moved, arrays[len(states) :], strict=True))
        count = len(self._paired)
        return arrays[: len(states)] + paths[:count], [
            *(
                changes[index] if index in changes else np.zeros(var.aval.shape, jax.dtypes.float0)
                for index, var in enumerate(outvars)
            ),
            *paths[count:],
        ]

    def _pushforward(
        self, moving: Sequence[bool], primals: list[Array], directions: list[Array]
    ) -> tuple[list[Array], list[Array]]:
        """The rule at the dtypes for which it was written."""
        of_moving, moved = self._of_moving(primals, moving)
        results, changes = jax.jvp(of_moving, moved, tuple(directions))
        differentiable = map(_is_differentiable, self._equation.outvars)
        return results, [change for change, each in zip(changes, differentiable) if each]

    # The reverse-mode rules.

    def forward(self, *given: Any) -> tuple[list[Array], Any]:
        """The forward rule of a `custom_vjp`: the results, and a pytree of the residuals."""
        arrays, moving = [primal.value for primal in given], self._moving
        if self._equation.params["symbolic_zeros"]:
            moving = self._perturbed(
                getattr(primal, "perturbed", False) for primal in self._of_operands(given)
            )
        structures: list[Any] = []

        def trace(arrays: list[Array], _: list[Array]) -> tuple[list[Array], list[Array]]:
            of_moving, moved = self._of_moving(arrays, moving)
            results, pushforward = jax.linearize(of_moving, *moved)
            leaves, structure = jax.tree.flatten(pushforward)
            structures.append(structure)
            return results, leaves

        states = self._inside.plan.results
        results, further, paths = self._run(trace, self._inputs(arrays), [], states, self._paired)
        saved = _Saved(structures[-1], tuple(further), moving)
        return results[: len(states)] + paths, jax.tree_util.Partial(saved, *results[len(states) :])

    def backward(self, saved: Any, cotangents: list[Any]) -> tuple[Array | None, ...]:
        """The backward rule of a `custom_vjp`."""
        moving, outvars = saved.func.moving, self._equation.outvars
        for index, of_path in zip(self._paired, cotangents[len(outvars) :], strict=True):
            cotangents[index] = _sum(cotangents[index], of_path)
        cotangents = cotangents[: len(outvars)]
        is_given = [
            _is_differentiable(var) and not isinstance(cotangent, SymbolicZero)
            for cotangent, var in zip(cotangents, outvars)
        ]
        arriving = [
            _tangent(cotangent, var) for cotangent, var, given in zip(cotangents, outvars, is_given) if given
        ]
        operands = [var.aval for var, moves in zip(self._equation.invars, moving) if moves]

        def pullback(leaves: list[Array], arriving: list[Array]) -> list[Array]:
            pushforward = jax.tree.unflatten(saved.func.structure, leaves)

            def to_given(*tangents: Array) -> list[Array]:
                return [change for change, given in zip(pushforward(*tangents), is_given) if given]

            return list(jax.linear_transpose(to_given, *operands)(arriving))

        residuals = list(zip(map(Value, saved.args), saved.func.states, strict=True))
        states = [
            FLOAT32 if index in self._pairs else state
            for index, (state, moves) in enumerate(zip(self._inside.plan.inputs, moving))
            if moves
        ]
        # The gradient of an activation is read on; that of a parameter leaves the backward pass.
        intermediate = tuple(not state.wide_gradient for state in states)
        try:
            arrays, _, _ = self._run(pullback, residuals, arriving, states, intermediate=intermediate)
        except jax.errors.UnexpectedTracerError as error:
            raise ValueError(_READS_TRACED) from error
        return self._gradients(arrays, moving)

    def _gradients(self, of_moving: Iterable[Array], moving: Sequence[bool]) -> tuple[Array | None, ...]:
        """Returns the gradient of each operand, then those of the paths. The half of a pair has none."""
        given = iter(of_moving)
        gradients = [next(given) if moves else None for moves in moving]
        of_paths = [gradients[index] for index in self._pairs]
        for index in self._pairs:
            gradients[index] = None
        return *gradients[len(self._closed_over) :], *of_paths

    # The batching rule.

    def batched(
        self, axis_size: int, in_batched: Sequence[bool], *arrays: Array
    ) -> tuple[list[Array], list[bool]]:
        """The rule of a `custom_vmap`: the results, and for each that it has a batch axis."""
        axes = [None] * len(self._closed_over) + [0 if is_batched else None for is_batched in in_batched]

        def rule(arrays: list[Array], _: list[Array]) -> list[Array]:
            run = jax.vmap(lambda *arrays: bind(self._equation, arrays), axes, axis_size=axis_size)
            return run(*arrays)

        states = self._inside.plan.results
        results, _, _ = self._run(rule, self._inputs(arrays), [], states)
        return results, [True] * len(results)

    # All.

    def _inputs(self, arrays: Sequence[Array]) -> list[tuple[Value, State]]:
        """Returns all operands of the function, each with its state."""
        values = self._interpreter.with_paths((*self._closed_over, *arrays), self._pairs)
        return list(zip(values, self._inside.plan.inputs, strict=True))

    def _of_operands(self, given: Sequence[Any]) -> list[Any]:
        """Returns what was given for each operand, such as a tangent; of a pair what was given for its path.

        Nothing was given for the operands that are closed over: they stand as None.
        """
        count = len(given) - len(self._pairs)
        operands = [*(None for _ in self._closed_over), *given[:count]]
        for index, of_path in zip(self._pairs, given[count:], strict=True):
            operands[index] = of_path
        return operands

    def _perturbed(self, perturbed: Iterable[bool]) -> tuple[bool, ...]:
        """Returns for each operand whether it moves, of whether each operand is perturbed."""
        return tuple(moves and each for moves, each in zip(self._moving, perturbed, strict=True))

    def _of_moving(
        self, arrays: list[Array], moving: Sequence[bool]
    ) -> tuple[Callable[..., list[Array]], tuple[Array, ...]]:
        """Returns the equation as a function of the operands that move, and those operands."""

        def fun(*moved: Array) -> list[Array]:
            given = iter(moved)
            return bind(self._equation, [next(given) if moves else x for x, moves in zip(arrays, moving)])

        return fun, tuple(x for x, moves in zip(arrays, moving) if moves)

    def _run(
        self,
        rule: Callable[[list[Array], list[Array]], Any],
        inputs: Sequence[tuple[Value, State]],
        tangents: Sequence[tuple[Value, State]],
        states: Sequence[State],
        paired: Sequence[int] = (),
        intermediate: tuple[bool, ...] | None = None,
    ) -> tuple[list[Array], Sequence[State], list[Array]]:
        """Traces a rule in the dtypes for which it was written, plans it and runs it.

        Args:
            rule: the rule, a function of arrays in their traced dtypes.
            inputs: its operands, each with its state.
            tangents: its tangents or cotangents, each with its state.
            states: the states of its first results, which take their dtypes.
            paired: the indexes of the results that are pairs.
            intermediate: for each result of a backward rule, whether the backward pass reads it on; None for
                another rule.

        Returns:
            The results, the states of the results beyond `states`, and the paths of the pairs.
        """
        interpreter = self._interpreter
        arguments = [*inputs, *tangents]
        values = [value for value, _ in arguments]
        traced = [
            interpreter.take(value, conversion(state, FLOAT32))
            for value, (_, state) in zip(values, arguments)
        ]
        with only_own_precisions():
            closed = jax.make_jaxpr(rule)(traced[: len(inputs)], traced[len(inputs) :])
        # A residual that is also a result of the function is the value that the readers of the result read.
        sources = sources_of_outputs(closed)
        first = {source: number for number, source in reversed([*enumerate(sources[: len(states)])])}
        result_of = [first.get(source) for source in sources[len(states) :]]
        wanted = [Wanted.INDIRECTLY if state.is_half else Wanted.NO for state in states]
        wanted += [Wanted.NO if number is None else wanted[number] for number in result_of]
        # The scopes around the function are around its rules too.
        around = self._inside.plan.analysis.context
        are_tangents = (False,) * len(inputs) + (True,) * len(tangents)
        context = Context(around.scope, streams=around.streams, decides=around.decides, tangents=are_tangents)
        if intermediate is not None:
            context = Context(around.scope, True, intermediate, of_gradient=True)
        plan = interpreter.planner.plan(closed, [state for _, state in arguments], wanted, context)
        further = [
            state if number is None else states[number]
            for state, number in zip(plan.results[len(states) :], result_of)
        ]
        leave = map(conversion, plan.results, (*states, *further))
        results = interpreter.run(plan, values)
        paths = [results[index].to(jnp.float32) for index in paired]
        return interpreter.take_all(results, list(leave)), further, paths


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


def _sum(of_half: Any, of_path: Any) -> Any:
    """Returns the cotangent of a result that is a pair, in float32. Both parts may be symbolic zeros."""
    if isinstance(of_path, SymbolicZero):
        return of_half
    return of_path if isinstance(of_half, SymbolicZero) else of_path + cast(of_half, jnp.float32)


def _is_differentiable(var: Var) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)

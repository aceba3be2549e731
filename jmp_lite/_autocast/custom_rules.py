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

from .._jaxpr.bind import bind
from .._jaxpr.read import Array, Equation, Jaxpr, Var, equations, is_float32, is_literal, open_jaxpr
from .interpreter import Interpreter, Value
from .planning.demand import Wanted
from .planning.op import Around
from .planning.plan import Call, conversion
from .planning.states import FIRM, HALF, OTHER, State


def custom_jvp(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> list[Value]:
    """Runs a function with a forward-mode rule of the user's own."""
    rule = TracedRule(interpreter, equation, action, operands)
    fun = jax.custom_jvp(rule.primal)
    fun.defjvp(rule.jvp, symbolic_zeros=equation.params["symbolic_zeros"])
    return list(map(Value, fun(*rule.given)))


def custom_vjp(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> list[Value]:
    """Runs a function with forward and backward rules of the user's own."""
    rule = TracedRule(interpreter, equation, action, operands)
    fun = jax.custom_vjp(rule.primal)
    # Of a result that nothing differentiates, JAX refuses a cotangent of zeros under `jax.vmap`.
    fun.defvjp(rule.forward, rule.backward, symbolic_zeros=True)
    return list(map(Value, fun(*rule.given)))


def custom_vmap(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> list[Value]:
    """Runs a function with a batching rule of the user's own."""
    rule = TracedRule(interpreter, equation, action, operands)
    fun = jax.custom_batching.custom_vmap(rule.primal)
    fun.def_vmap(rule.batched)
    return list(map(Value, fun(*rule.given)))


@dataclasses.dataclass(frozen=True)
class _Saved:
    """The static part of the residuals of a forward rule.

    Attributes:
        structure: how to build the pushforward of a `custom_vjp`: tangents to tangents.
        states: the states of the residuals.
        moving: for each operand, whether the rule gives a gradient of it.
    """

    structure: Any
    states: tuple[State, ...]
    moving: tuple[bool, ...]

    def __call__(self) -> None:
        """Never called. `jax.tree_util.Partial`, the pytree that carries this, asks for a callable."""


class TracedRule:
    """A function with a custom derivative, and its rules, each run by a plan of its own.

    A rule with symbolic zeros is told which operands are perturbed. It is not differentiated by the others.

    Attributes:
        given: the arrays by which the function may be differentiated.
    """

    def __init__(
        self, interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
    ) -> None:
        (self._inside,) = action.inner
        self._interpreter, self._equation = interpreter, equation
        self._name = str(equation.params.get("name", "fun"))
        arrays = interpreter.take_all(operands, self._inside.enter)
        count = equation.params.get("num_consts", 0)
        # A rule says nothing of the gradients of constants. They stay closed over: JAX reports a program that
        # asks for one.
        self._closed_over, self.given = arrays[:count], arrays[count:]
        self._moving = tuple(
            index >= count and _is_differentiable(var) for index, var in enumerate(equation.invars)
        )

    @property
    def primal(self) -> Callable[..., list[Array]]:
        """The function itself, by its plan."""
        run = self._interpreter.body(self._inside)

        def fun(*arrays: Array) -> list[Array]:
            return run(*self._closed_over, *arrays)[0]

        fun.__name__ = self._name  # JAX prints it.
        return fun

    # The forward-mode rule.

    def jvp(self, primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Any]]:
        """The rule of a `custom_jvp`."""
        moving = self._perturbed(not isinstance(tangent, SymbolicZero) for tangent in tangents)
        operands = zip((*self._closed_over, *tangents), self._equation.invars, moving)
        directions = [(tangent, _state_of_tangent(tangent, var)) for tangent, var, moves in operands if moves]
        states = self._inside.plan.results
        outvars = self._equation.outvars
        changing = [state for state, var in zip(states, outvars) if _is_differentiable(var)]
        pushforward = functools.partial(self._pushforward, moving)
        arrays, _ = self._run(pushforward, self._inputs(primals), directions, [*states, *changing])
        changes = iter(arrays[len(states) :])
        return arrays[: len(states)], [
            next(changes) if _is_differentiable(var) else _zero(var) for var in outvars
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
            moving = self._perturbed(primal.perturbed for primal in given)
        structures: list[Any] = []

        def trace(arrays: list[Array], _: list[Array]) -> tuple[list[Array], list[Array]]:
            of_moving, moved = self._of_moving(arrays, moving)
            results, pushforward = jax.linearize(of_moving, *moved)
            leaves, structure = jax.tree.flatten(pushforward)
            structures.append(structure)
            return results, leaves

        states = self._inside.plan.results
        results, further = self._run(trace, self._inputs(arrays), [], states)
        saved = _Saved(structures[-1], tuple(further), moving)
        return results[: len(states)], jax.tree_util.Partial(saved, *results[len(states) :])

    def backward(self, saved: Any, cotangents: list[Any]) -> tuple[Array | None, ...]:
        """The backward rule of a `custom_vjp`."""
        moving = saved.func.moving
        is_given = [
            _is_differentiable(var) and not isinstance(cotangent, SymbolicZero)
            for cotangent, var in zip(cotangents, self._equation.outvars)
        ]
        arriving = [
            (cotangent, _state_of_tangent(cotangent, var))
            for cotangent, var, given in zip(cotangents, self._equation.outvars, is_given)
            if given
        ]
        operands = [var.aval for var, moves in zip(self._equation.invars, moving) if moves]

        def pullback(leaves: list[Array], arriving: list[Array]) -> list[Array]:
            pushforward = jax.tree.unflatten(saved.func.structure, leaves)

            def to_given(*tangents: Array) -> list[Array]:
                return [change for change, given in zip(pushforward(*tangents), is_given) if given]

            return list(jax.linear_transpose(to_given, *operands)(arriving))

        residuals = list(zip(saved.args, saved.func.states, strict=True))
        states = [state for state, moves in zip(self._inside.plan.inputs, moving) if moves]
        # The gradient of an activation is read on; that of a parameter leaves the backward pass.
        intermediate = tuple(not state.reduced for state in states)
        arrays, _ = self._run(pullback, residuals, arriving, states, intermediate)
        gradients = iter(arrays)
        return tuple(next(gradients) if moves else None for moves in moving[len(self._closed_over) :])

    # The batching rule.

    def batched(
        self, axis_size: int, in_batched: Sequence[bool], *arrays: Array
    ) -> tuple[list[Array], list[bool]]:
        """The rule of a `custom_vmap`: the results, and for each that it has a batch axis."""
        axes = [0 if is_batched else None for is_batched in in_batched]

        def rule(arrays: list[Array], _: list[Array]) -> list[Array]:
            run = jax.vmap(lambda *arrays: bind(self._equation, arrays), axes, axis_size=axis_size)
            return run(*arrays)

        results, _ = self._run(rule, self._inputs(arrays), [], self._inside.plan.results)
        return results, [True] * len(results)

    # All.

    def _inputs(self, arrays: Sequence[Array]) -> list[tuple[Array, State]]:
        """Returns all operands of the function, each with its state."""
        return list(zip((*self._closed_over, *arrays), self._inside.plan.inputs, strict=True))

    def _perturbed(self, perturbed: Iterable[bool]) -> tuple[bool, ...]:
        """Returns for each operand whether it moves, of whether each operand that was given is perturbed."""
        every = (*(False for _ in self._closed_over), *perturbed)
        return tuple(moves and each for moves, each in zip(self._moving, every, strict=True))

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
        inputs: Sequence[tuple[Array, State]],
        tangents: Sequence[tuple[Array, State]],
        states: Sequence[State],
        intermediate: tuple[bool, ...] | None = None,
    ) -> tuple[list[Array], Sequence[State]]:
        """Traces a rule in the dtypes for which it was written, plans it and runs it.

        Args:
            rule: the rule, a function of arrays in their traced dtypes.
            inputs: its arrays, each with its state.
            tangents: its tangents or cotangents, each with its state.
            states: the states of its first results, which take their dtypes.
            intermediate: for each result of a backward rule, whether the backward pass reads it on; None for
                another rule.

        Returns:
            The results, and the states of the results beyond `states`.
        """
        interpreter = self._interpreter
        arguments = [*inputs, *tangents]
        values = [Value(array) for array, _ in arguments]
        traced = [
            interpreter.take(value, conversion(state, FIRM)) for value, (_, state) in zip(values, arguments)
        ]
        closed = jax.make_jaxpr(rule)(traced[: len(inputs)], traced[len(inputs) :])
        # A residual that is also a result of the function is the value that the readers of the result read.
        sources = _sources(closed)
        first = {source: number for number, source in reversed([*enumerate(sources[: len(states)])])}
        result_of = [first.get(source) for source in sources[len(states) :]]
        wanted = [Wanted.INDIRECTLY if state.is_half else Wanted.NO for state in states]
        wanted += [Wanted.NO if number is None else wanted[number] for number in result_of]
        # The scopes around the function are around its rules too.
        scope = self._inside.plan.around.scope
        around = Around(scope) if intermediate is None else Around(scope, True, intermediate)
        plan = interpreter.planner.plan(closed, [state for _, state in arguments], wanted, around)
        further = [
            state if number is None else states[number]
            for state, number in zip(plan.results[len(states) :], result_of)
        ]
        leave = map(conversion, plan.results, (*states, *further))
        return interpreter.take_all(interpreter.run(plan, values), list(leave)), further


def _sources(jaxpr: Jaxpr) -> list[Any]:
    """Returns for each output what identifies its value. A jit gives each result a variable of its own."""
    identity = lambda var: id(var) if is_literal(var) else var
    outvars = [identity(var) for var in open_jaxpr(jaxpr).outvars]
    within: dict[Any, Any] = {}
    for equation in equations(jaxpr):
        if equation.primitive.name == "jit" and not set(outvars).isdisjoint(equation.outvars):
            inner = _sources(equation.params["jaxpr"])
            within.update((var, (id(equation), source)) for var, source in zip(equation.outvars, inner))
    return [within.get(var, var) for var in outvars]


def _state_of_tangent(array: Array, var: Var) -> State:
    """The state of a tangent or cotangent of `var`, which may be half in the program itself."""
    if not is_float32(var):
        return OTHER
    return FIRM if array.dtype == jnp.float32 else HALF


def _is_differentiable(var: Var) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _zero(var: Var) -> Array:
    return np.zeros(var.aval.shape, jax.dtypes.float0)

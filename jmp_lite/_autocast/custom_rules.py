"""Custom derivatives: the user's own rule is traced at the dtypes for which it was written, planned and run.

A rule of `jax.custom_jvp` or `jax.custom_vjp` is a function of float32 values like any other. It cannot be
read off the equation; it is had by differentiating the equation as it was traced.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .interpreter import Interpreter, Value, values_of
from .jaxprs import bind, open_jaxpr
from .states import FIRM, HALF, OTHER, Decision, Kind, Plan, State, Wanted


def custom_jvp(
    interpreter: Interpreter, equation: Any, decision: Decision, operands: list[Value], around: Plan
) -> list[Value]:
    """The user's rule is traced at the dtypes for which it was written, and run by a plan of its own."""
    del around
    (plan,) = decision.inner
    primal, given, closed_over = _primal(interpreter, equation, decision, operands)
    fun = jax.custom_jvp(primal)
    moving = _moving(equation)

    def rule(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        values = list(map(Value, plan.inputs, (*closed_over, *primals)))
        full = (*(None for _ in closed_over), *tangents)
        directions = [_tangent(tangent) for tangent, moves in zip(full, moving) if moves]

        def pushforward(primals: list[Any], directions: list[Any]) -> tuple[list[Any], list[Any]]:
            of_moving, moved = _of_moving(equation, primals)
            results, changes = jax.jvp(of_moving, moved, tuple(directions))
            return results, [
                change for change, var in zip(changes, equation.outvars) if _is_differentiable(var)
            ]

        results = decision.results
        changing = [state for state, var in zip(results, equation.outvars) if _is_differentiable(var)]
        arrays = _run_traced(interpreter, pushforward, values, directions, [*results, *changing])
        changes = iter(arrays[len(results) :])
        return arrays[: len(results)], [
            next(changes) if _is_differentiable(var) else _zero(var) for var in equation.outvars
        ]

    fun.defjvp(rule)
    return values_of(decision, fun(*given))


def custom_vjp(
    interpreter: Interpreter, equation: Any, decision: Decision, operands: list[Value], around: Plan
) -> list[Value]:
    """The user's forward and backward rules, each traced at the dtypes for which it was written."""
    del around
    (plan,) = decision.inner
    primal, given, closed_over = _primal(interpreter, equation, decision, operands)
    fun = jax.custom_vjp(primal)
    moving = _moving(equation)

    def forward(*arrays: Any) -> tuple[list[Any], Any]:
        structure = None

        def trace(arrays: list[Any], _: list[Any]) -> tuple[list[Any], list[Any]]:
            nonlocal structure
            of_moving, moved = _of_moving(equation, arrays)
            results, pullback = jax.vjp(of_moving, *moved)
            leaves, structure = jax.tree.flatten(pullback)
            return results, leaves

        values = list(map(Value, plan.inputs, (*closed_over, *arrays)))
        saved_states: list[State] = []
        results = _run_traced(interpreter, trace, values, [], decision.results, saved_states)
        outputs, saved = results[: len(decision.results)], results[len(decision.results) :]
        return outputs, jax.tree_util.Partial(_Saved(structure, tuple(saved_states)), *saved)

    def backward(saved: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        arriving = [
            _tangent(cotangent)
            for cotangent, var in zip(cotangents, equation.outvars)
            if _is_differentiable(var)
        ]

        def pullback(leaves: list[Any], arriving: list[Any]) -> list[Any]:
            given = iter(arriving)
            full = [next(given) if _is_differentiable(var) else _zero(var) for var in equation.outvars]
            return list(jax.tree.unflatten(saved.func.structure, leaves)(full))

        values = list(map(Value, saved.func.states, saved.args))
        states = [state for state, moves in zip(plan.inputs, moving) if moves]
        gradients = iter(_run_traced(interpreter, pullback, values, arriving, states))
        return tuple(next(gradients) if moves else None for moves in moving[len(closed_over) :])

    fun.defvjp(forward, backward)
    return values_of(decision, fun(*given))


def _primal(
    interpreter: Interpreter, equation: Any, decision: Decision, operands: list[Value]
) -> tuple[Callable[..., list[Any]], list[Any], list[Any]]:
    """Returns the function that a custom rule is for, the arrays that it is given, and those it closes over.

    The latter stay closed over: a rule says nothing of their gradients, and JAX reports who asks for one.
    """
    (plan,) = decision.inner
    arrays = interpreter.entering(operands, plan.inputs)
    count = equation.params["num_consts"]
    given, closed_over = arrays[count:], arrays[:count]
    run = interpreter.inside(plan, decision.results)

    def fun(*arrays: Any) -> list[Any]:
        return run(*closed_over, *arrays)

    fun.__name__ = str(equation.params.get("name", fun.__name__))  # JAX prints it.
    return fun, given, closed_over


def _moving(equation: Any) -> list[bool]:
    """For each operand of a custom rule, whether the rule differentiates by it."""
    return [
        place >= equation.params["num_consts"] and _is_differentiable(var)
        for place, var in enumerate(equation.invars)
    ]


def _of_moving(equation: Any, arrays: list[Any]) -> tuple[Callable[..., list[Any]], tuple[Any, ...]]:
    """Returns an equation as a function of the operands by which it is differentiated, and those operands."""
    moving = _moving(equation)

    def fun(*moved: Any) -> list[Any]:
        given = iter(moved)
        return bind(equation, [next(given) if moves else x for x, moves in zip(arrays, moving)])

    return fun, tuple(x for x, moves in zip(arrays, moving) if moves)


@dataclasses.dataclass(frozen=True)
class _Saved:
    """What is static of what a forward rule saves: how its pullback is put together, and the states."""

    structure: Any
    states: tuple[State, ...]

    def __call__(self) -> None:
        """Never called: `jax.tree_util.Partial`, the pytree that carries this, asks for a callable."""


def _run_traced(
    interpreter: Interpreter,
    fun: Callable[[list[Any], list[Any]], Any],
    values: list[Value],
    tangents: list[Value],
    states: Sequence[State],
    further: list[State] | None = None,
) -> list[Any]:
    """Traces a rule in the dtypes for which it was written, plans it and runs it.

    Args:
        fun: the rule, of arrays in their traced dtypes.
        values: its values.
        tangents: its tangents or cotangents.
        states: the states of its results; the results take their dtypes.
        further: filled with the states of the results beyond those.
    """
    closed = jax.make_jaxpr(fun)(*(list(map(interpreter.traced, group)) for group in (values, tangents)))
    beyond = len(open_jaxpr(closed).outvars) - len(states)
    wanted = [Wanted.YES if state.kind == Kind.HALF else Wanted.NO for state in states] + [Wanted.NO] * beyond
    arguments = [*values, *tangents]
    plan = interpreter.planner.plan(closed, [value.state for value in arguments], wanted)
    ends = [*states, *plan.results[len(states) :]]
    if further is not None:
        further += ends[len(states) :]
    return interpreter.entering(interpreter.run(plan, arguments), ends)


def _tangent(array: Any) -> Value:
    dtype = array.dtype
    if dtype == jnp.float32:
        return Value(FIRM, array)
    return Value(HALF if dtype in (jnp.float16, jnp.bfloat16) else OTHER, array)


def _is_differentiable(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _zero(var: Any) -> Any:
    return np.zeros(var.aval.shape, jax.dtypes.float0)

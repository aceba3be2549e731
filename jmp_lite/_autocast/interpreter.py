"""Runs a jaxpr by a plan: carries out the action of every equation, under the caller's own trace.

A value keeps the array that was computed and the cast that was made of it, so that it is cast once. Functions
within the program (jit, loops, branches, rematerialization, custom derivatives) are built again through JAX's
public combinators, by the handlers of `calls.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .binding import bind, cast, context_of, reuse
from .jaxprs import Array, Equation, Var, constants, equations, is_literal, open_jaxpr
from .plan import (
    Activation,
    Bind,
    Call,
    CastDown,
    CastUp,
    Decision,
    Gather,
    HalfGradient,
    Inside,
    MoveLater,
    PassOn,
    Plan,
    Skip,
    StoreHalf,
    Take,
    WideGradient,
)
from .planner import Planner
from .products import product_with_half_gradients, product_with_wide_gradients
from .states import State


class Value:
    """A value of the program, and the dtypes in which it has been made so far.

    Attributes:
        native: the array as it was computed.
        number: the value of a literal that is written into the program.
        casts: casts of it that were made or were there before, by dtype.
        exact: the dtype, if any, from which the program itself cast it up: going back there is no cast.
    """

    __slots__ = ("_move", "_native", "casts", "exact", "number")

    def __init__(
        self,
        native: Array = None,
        casts: dict[Any, Array] | None = None,
        *,
        number: float | None = None,
        exact: Any = None,
        move: Callable[[Any], Array] | None = None,
    ) -> None:
        """Makes a value of an array, or of a move to do later: in a dtype, or in the array's own for None."""
        self.number = number
        self.casts = {} if casts is None else casts
        self.exact = exact
        self._native = native
        self._move = move

    def copy(self) -> "Value":
        """Returns the same value for another trace: later casts of the copy are its own."""
        return Value(self._native, dict(self.casts), number=self.number, exact=self.exact, move=self._move)

    @property
    def native(self) -> Array:
        if self._native is None and self._move is not None:
            self._native = self._move(None)
        return self._native

    def to(self, dtype: Any) -> Array:
        """Returns the value in `dtype`, float32 or the half dtype."""
        if self.number is not None:  # It needs no cast, and stays as it is in float32.
            return self._native if dtype == jnp.float32 else np.asarray(self.number, dtype)
        if self._move is not None and dtype != jnp.float32:
            return self._move(dtype)  # Cast before the move, so that all moves of a value share its cast.
        native = self.native
        if native.dtype == dtype:
            return native
        if dtype not in self.casts:
            self.casts[dtype] = cast(native, dtype)
            return self.casts[dtype]
        if self.exact == dtype or native.dtype != jnp.float32:
            return self.casts[dtype]
        return reuse(native, self.casts[dtype])


class Interpreter:
    """Runs plans; one interpreter serves one call of an autocast function."""

    def __init__(self, planner: Planner, calls: Mapping[str, "Handler"]) -> None:
        """Makes an interpreter of `planner`'s plans, with a handler for each operation that runs jaxprs."""
        self.planner = planner
        self.calls = calls
        self.half = planner.rules.dtype
        self.jitted: dict[Any, Any] = {}

    def run(self, plan: Plan, arguments: Sequence[Value]) -> list[Value]:
        """Runs the equations of a plan's jaxpr.

        Args:
            plan: the plan.
            arguments: a value for each input of the jaxpr.

        Returns:
            A value for each output.
        """
        inside = open_jaxpr(plan.jaxpr)
        fixed = map(_written, constants(plan.jaxpr), plan.states)
        known: dict[Var, Value] = dict(zip((*inside.constvars, *inside.invars), (*fixed, *arguments)))
        self.run_equations(plan, known)
        return [self.read(var, known) for var in inside.outvars]

    def run_equations(self, plan: Plan, known: dict[Var, Value]) -> None:
        """Runs the equations of a plan's jaxpr, and adds the value of each variable to `known`."""
        for equation, decision in zip(equations(plan.jaxpr), plan.decisions):
            self.run_equation(equation, decision, known)

    def read(self, var: Var, known: dict[Var, Value]) -> Value:
        """Returns the value of a variable or literal."""
        return _written(var.val, self.planner.literal(var)) if is_literal(var) else known[var]

    def run_equation(self, equation: Equation, decision: Decision, known: dict[Var, Value]) -> None:
        """Carries out the decision about one equation, and adds its results to `known`."""
        action = decision.action
        if isinstance(action, Skip):
            return
        if isinstance(action, Activation):
            sources = [known[var].to(self.half) for var in action.sources]
            known[equation.outvars[0]] = Value(self._activation(action, sources))
            return
        operands = [self.read(var, known) for var in equation.invars]
        with context_of(equation):
            results = self._carry_out(equation, action, operands)
        known.update(zip(equation.outvars, results, strict=True))

    def _carry_out(self, equation: Equation, action: Any, operands: list[Value]) -> list[Value]:
        match action:
            case WideGradient():
                return self._wide_gradient(equation, action, operands)
            case HalfGradient():
                return self._half_gradient(equation, action, operands)
            case Bind():
                return self._bind(equation, action, operands)
            case StoreHalf():
                return self._store_half(equation, action, operands)
            case Call():
                return self.calls[action.handler](self, equation, action, operands)
            case MoveLater():
                return [self._move_later(equation, action, operands)]
            case Gather():
                return [Value(self._gathered(equation, operands[0]))]
            case PassOn():
                return operands
            case CastDown():
                return [Value(operands[0].to(self.half))]
            case CastUp():
                half = operands[0].native
                return [Value(bind(equation, [half])[0], {self.half: half}, exact=self.half)]
        raise AssertionError(f"unknown action {action}")

    # The actions of operations.

    def _bind(self, equation: Equation, action: Bind, operands: list[Value]) -> list[Value]:
        arrays = self._operands(equation, action, operands)
        results = bind(equation, arrays, **action.params)
        if action.narrow:
            results = self._narrowed(results, action.narrow)
        return list(map(Value, results))

    def _operands(self, equation: Equation, action: Bind, operands: list[Value]) -> list[Array]:
        return [
            cast(jnp.broadcast_to(value.to(jnp.float32), equation.outvars[0].aval.shape), self.half)
            if take is Take.BROADCAST
            else self.take(value, take)
            for value, take in zip(operands, action.operands, strict=True)
        ]

    def _wide_gradient(self, equation: Equation, action: WideGradient, operands: list[Value]) -> list[Value]:
        halves = self._operands(equation, action, operands)
        wide = [value.to(jnp.float32) if each else None for value, each in zip(operands, action.wide)]
        return [Value(product_with_wide_gradients(equation, action.params, halves, wide))]

    def _half_gradient(self, equation: Equation, action: HalfGradient, operands: list[Value]) -> list[Value]:
        wide = self._operands(equation, action, operands)
        halves = [value.to(self.half) for value in operands]
        params = action.params | {"preferred_element_type": self.half}
        return [Value(product_with_half_gradients(equation, params, wide, halves))]

    def _store_half(self, equation: Equation, action: StoreHalf, operands: list[Value]) -> list[Value]:
        """Computes in float32 and stores in half; the backward pass keeps each operand as it came."""

        def compute(*arrays: Array) -> list[Array]:
            wide = [cast(x, jnp.float32) if widen else x for x, widen in zip(arrays, action.widen)]
            return self._narrowed(bind(equation, wide), action.narrow)

        run = jax.checkpoint(compute) if action.recompute else compute
        return list(map(Value, run(*(value.native for value in operands))))

    def _narrowed(self, arrays: Sequence[Array], narrow: Sequence[bool]) -> list[Array]:
        return [cast(array, self.half) if each else array for array, each in zip(arrays, narrow)]

    def _activation(self, action: Activation, sources: list[Array]) -> Array:
        @jax.checkpoint
        def activation(*sources: Array) -> Array:
            wide = [cast(source, jnp.float32) for source in sources]
            known = dict(zip(action.sources, wide, strict=True))
            result = None
            for equation in action.equations:
                operands = [var.val if is_literal(var) else known[var] for var in equation.invars]
                with context_of(equation):
                    (result,) = bind(equation, operands)
                known[equation.outvars[0]] = result
            return cast(result, self.half)

        # The barrier keeps the cast of each cotangent: XLA would store the cotangent in float32 as well.
        return activation(*lax.optimization_barrier(sources))

    def _move_later(self, equation: Equation, action: MoveLater, operands: list[Value]) -> Value:
        value, rest = operands[0], [each.native for each in operands[1:]]

        def move(dtype: Any) -> Array:
            with context_of(equation):
                if dtype is not None and action.gathers:
                    return self._gathered(equation, value)
                array = value.native if dtype is None else value.to(dtype)
                return bind(equation, [array, *rest])[0]

        return Value(move=move)

    def _gathered(self, equation: Equation, value: Value) -> Array:
        """Gathers half values from all devices; the gradients that come back are summed in float32.

        Nothing reads the values that are gathered in float32, and XLA drops them: they lead the way back.
        """
        (wide,) = bind(equation, [value.to(jnp.float32)])
        (half,) = bind(equation, [value.to(self.half)])
        return reuse(wide, half)

    # Values that enter and leave the jaxprs within an equation.

    def take(self, value: Value, take: Take) -> Array:
        """Returns the array of a value, in the dtype in which an operation or a call takes it."""
        if take is Take.AS_IS:
            return value.native
        return value.to(self.half if take is Take.HALF else jnp.float32)

    def take_all(self, values: Sequence[Value], takes: Sequence[Take]) -> list[Array]:
        """Returns the arrays of some values; after them, the halves of the values taken in both dtypes."""
        arrays = [self.take(value, take) for value, take in zip(values, takes)]
        return arrays + [value.to(self.half) for value, take in zip(values, takes) if take is Take.BOTH]

    def values(self, arrays: Sequence[Array], takes: Sequence[Take]) -> list[Value]:
        """Returns values of the arrays that `take_all` returned."""
        halves = iter(arrays[len(takes) :])
        return [
            Value(array, {self.half: next(halves)} if take is Take.BOTH else None)
            for array, take in zip(arrays, takes)
        ]

    def function(self, inside: Inside) -> Callable[..., list[Array]]:
        """Returns a jaxpr of a call as a function of the arrays that `take_all` returns."""

        def fun(*arrays: Array) -> list[Array]:
            results = self.run(inside.plan, self.values(arrays, inside.enter))
            return self.take_all(results, inside.leave)

        return fun


Handler = Callable[[Interpreter, Equation, Call, list[Value]], list[Value]]
"""Runs an equation that runs jaxprs: of the interpreter, the equation, the action and the operands."""


def _written(array: Array, state: State) -> Value:
    """Returns a constant as a value; a number that is known while tracing is written into the program."""
    known = isinstance(array, (float, np.generic, np.ndarray))
    return Value(array, number=state.number if known else None)

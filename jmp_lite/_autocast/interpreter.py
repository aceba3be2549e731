"""Runs a jaxpr by a plan: carries out the action of every equation, under the caller's own trace.

A value keeps the array that was computed and the cast that was made of it, so that it is cast once. Functions
within the program (jit, loops, branches, rematerialization, custom derivatives) are built again by the
handlers of `calls`.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxpr.bind import bind, bind_repeated, cast, is_differentiated, kind_of, reuse
from .._jaxpr.calls import Body, Outputs
from .._jaxpr.float8 import FORWARD, Quantized, float8_product, quantize
from .._jaxpr.products import product_with_half_gradients, product_with_wide_gradients, wide_product
from .._jaxpr.read import Array, Equation, Var, constants, context_of, equations, is_literal
from .._jaxpr.replay import replay
from .planning.plan import (
    Activation,
    Bind,
    Call,
    Float8,
    HalfGradient,
    Inside,
    MoveBoth,
    PassOn,
    Plan,
    Skip,
    Take,
    WideGradient,
    WideResult,
)
from .planning.planner import Planner
from .planning.states import State


class Value:
    """A value of the program, and the dtypes in which it has been made so far.

    Attributes:
        native: the array as it was computed.
        number: the value of a literal that is written into the program.
        casts: casts of it that were made, by dtype. Those to fp8 are `Quantized`.
    """

    __slots__ = ("casts", "native", "number")

    def __init__(
        self, native: Array, casts: dict[Any, Any] | None = None, number: float | None = None
    ) -> None:
        self.native, self.number = native, number
        self.casts = {} if casts is None else casts

    def copy(self) -> "Value":
        """Returns the same value for another trace: later casts of the copy are its own."""
        return Value(self.native, dict(self.casts), self.number)

    def to(self, dtype: Any) -> Array:
        """Returns the value in `dtype`, float32 or the half dtype."""
        if self.number is not None:  # It needs no cast, and stays as it is in float32.
            return self.native if dtype == jnp.float32 else np.asarray(self.number, dtype)
        if self.native.dtype == dtype:
            return self.native
        if dtype not in self.casts:
            self.casts[dtype] = cast(self.native, dtype)
            return self.casts[dtype]
        if self.native.dtype != jnp.float32:
            return self.casts[dtype]
        # The gradients of all readers of the cast meet in float32.
        return reuse(self.native, self.casts[dtype])

    def in_float8(self, array: Array, dtype: np.dtype) -> Quantized:
        """Returns `array`, this value in float32 or in half, in an fp8 dtype. The first answer is kept."""
        if dtype not in self.casts:
            self.casts[dtype] = quantize(array, dtype)
        return self.casts[dtype]


class Interpreter:
    """Runs plans; one interpreter serves one call of an autocast function.

    Attributes:
        planner: the planner, which plans the rules of custom derivatives when they are traced.
        half: the half dtype.
    """

    def __init__(self, planner: Planner, handlers: Mapping[str, "Handler"]) -> None:
        """Makes an interpreter of `planner`'s plans, with a handler for each operation that runs jaxprs."""
        self.planner = planner
        self.half = planner.rules.dtype
        self._bodies: dict[Any, Body] = {}
        self._counts: collections.Counter[Any] = collections.Counter()
        self._handlers = handlers

    def run(self, plan: Plan, arguments: Sequence[Value]) -> list[Value]:
        """Runs the equations of a plan's jaxpr, on a value for each input.

        Returns:
            A value for each output.
        """
        fixed = map(_constant, constants(plan.jaxpr), plan.states)
        if is_differentiated([value.native for value in arguments]):
            self._counts.update(map(kind_of, equations(plan.jaxpr)))

        def action(index: int, equation: Equation, read: Callable[[Var], Value]) -> Sequence[Value]:
            return self._run_equation(equation, plan.decisions[index].action, read)

        return replay(plan.jaxpr, [*fixed, *arguments], self._literal, action)

    def _literal(self, var: Var) -> Value:
        return _constant(var.val, self.planner.literal(var))

    def _run_equation(self, equation: Equation, action: Any, read: Callable[[Var], Value]) -> Sequence[Value]:
        if isinstance(action, Skip):
            return [Value(None)]
        if isinstance(action, Activation):
            return [Value(self._activation(action, [read(var).to(self.half) for var in action.sources]))]
        operands = list(map(read, equation.invars))
        with context_of(equation):
            match action:
                case WideGradient():
                    return self._wide_gradient(equation, action, operands)
                case WideResult():
                    halves = self._operands(equation, action, operands)
                    return [Value(wide_product(equation, halves, jnp.float32, **action.params))]
                case HalfGradient():
                    return self._half_gradient(equation, action, operands)
                case Float8():
                    return self._float8(equation, action, operands)
                case Bind():
                    return self._bind(equation, action, operands)
                case Call():
                    return self._handlers[action.handler](self, equation, action, operands)
                case MoveBoth():
                    return [self._move_both(equation, operands)]
                case PassOn():
                    return operands
        raise AssertionError(f"unknown action {action}")

    def casts_for_loop(self, value: Value, plan: Plan) -> dict[Any, Any]:
        """Returns the casts of a loop's constant that the body may read. They stand in front of the loop.

        XLA drops those that the body does not read.
        """
        casts: dict[Any, Any] = {self.half: value.to(self.half)}
        if plan.float8 and value.native.ndim > 1:
            casts[FORWARD] = value.in_float8(value.native, FORWARD)
        return casts

    # The actions of operations.

    def _bind(self, equation: Equation, action: Bind, operands: list[Value]) -> list[Value]:
        run = bind_repeated if self._counts and self._counts[kind_of(equation)] > 1 else bind
        results = run(equation, self._operands(equation, action, operands), **action.params)
        return list(map(Value, self._narrowed(results, action.narrow)))

    def _operands(self, equation: Equation, action: Bind, operands: list[Value]) -> list[Array]:
        return [
            cast(jnp.broadcast_to(value.to(jnp.float32), equation.outvars[0].aval.shape), self.half)
            if take is Take.BROADCAST
            else self.take(value, take)
            for value, take in zip(operands, action.operands, strict=True)
        ]

    def _wide_gradient(self, equation: Equation, action: WideGradient, operands: list[Value]) -> list[Value]:
        halves = self._operands(equation, action, operands)
        wide = [value.to(jnp.float32) if is_wide else None for value, is_wide in zip(operands, action.wide)]
        product, half_product = _product(equation, action.params), self._half_product(equation)
        return [Value(product_with_wide_gradients(product, half_product, halves, wide))]

    def _half_gradient(self, equation: Equation, action: HalfGradient, operands: list[Value]) -> list[Value]:
        wide = self._operands(equation, action, operands)
        halves = [value.to(self.half) for value in operands]
        product, half_product = _product(equation, action.params), self._half_product(equation)
        return [Value(product_with_half_gradients(product, half_product, wide, halves))]

    def _float8(self, equation: Equation, action: Float8, operands: list[Value]) -> list[Value]:
        arrays = [value.to(source) for value, source in zip(operands, action.sources, strict=True)]
        quantized = [
            value.in_float8(array, dtype) for value, array, dtype in zip(operands, arrays, action.formats)
        ]
        dtype = action.params.get("preferred_element_type", self.half)
        half_product = self._half_product(equation)
        return [Value(float8_product(equation, half_product, arrays, quantized, dtype, action.gradients))]

    def _half_product(self, equation: Equation) -> Callable[[Array, Array], Array]:
        return _product(equation, {"preferred_element_type": self.half, "precision": None})

    def _narrowed(self, arrays: Sequence[Array], narrow: Sequence[bool]) -> Sequence[Array]:
        if not any(narrow):
            return arrays
        return [cast(array, self.half) if is_half else array for array, is_half in zip(arrays, narrow)]

    def _activation(self, action: Activation, sources: list[Array]) -> Array:
        @jax.checkpoint
        def activation(*sources: Array) -> Array:
            known = dict(zip(action.sources, (cast(source, jnp.float32) for source in sources)))
            for equation in action.equations:
                operands = [var.val if is_literal(var) else known[var] for var in equation.invars]
                with context_of(equation):
                    known.update(zip(equation.outvars, bind(equation, operands), strict=True))
            return cast(known[action.equations[-1].outvars[0]], self.half)

        # The barrier keeps the cast of each cotangent: XLA would store the cotangent in float32 as well.
        return activation(*lax.optimization_barrier(sources))

    def _move_both(self, equation: Equation, operands: list[Value]) -> Value:
        """Moves a value in both dtypes. XLA drops the move whose result nothing reads.

        The move of float32 leads the gradients back.
        """
        value, rest = operands[0], [operand.native for operand in operands[1:]]
        (wide,) = bind(equation, [value.to(jnp.float32), *rest])
        (half,) = bind(equation, [value.to(self.half), *rest])
        if value.native.dtype == jnp.float32:
            return Value(wide, {self.half: half})
        return Value(reuse(wide, half))

    # Values that enter and leave the jaxprs within an equation.

    def take(self, value: Value, take: Take) -> Array:
        """Returns the array of a value, in the dtype in which an operation or a call takes it."""
        if take is Take.AS_IS:
            return value.native
        array = value.to(self.half if take is Take.HALF else jnp.float32)
        if take is Take.ROUNDED:
            # With the exponents of float32: with fewer, XLA would make zeros of subnormal numbers. `reuse`
            # leads the gradient around the rounding.
            digits = int(jnp.finfo(self.half).nmant)
            array = reuse(array, lax.reduce_precision(array, 8, digits))
        return array

    def take_all(self, values: Sequence[Value], takes: Sequence[Take]) -> list[Array]:
        """Returns the arrays of some values, as `take` does."""
        return [self.take(value, take) for value, take in zip(values, takes)]

    def body(self, inside: Inside, constants: Sequence[Value] = ()) -> Body:
        """Returns a jaxpr of a call as a body for `_jaxpr.calls`.

        Args:
            inside: how the jaxpr runs.
            constants: values for its first inputs. A body without them is the same for all calls of one kind,
                so that JAX traces it once.
        """
        key = (inside.plan, inside.leave)
        if key in self._bodies and not constants:
            return self._bodies[key]

        def body(*arrays: Array) -> Outputs:
            arguments = [*(value.copy() for value in constants), *map(Value, arrays)]
            return self.take_all(self.run(inside.plan, arguments), inside.leave), {}

        if not constants:
            self._bodies[key] = body
        return body


Handler = Callable[[Interpreter, Equation, Call, list[Value]], list[Value]]
"""Runs an equation that runs jaxprs. Arguments: the interpreter, the equation, the action, the operands."""


def _constant(array: Array, state: State) -> Value:
    """Returns a constant as a value; a number that is known while tracing is written into the program."""
    known = isinstance(array, (float, np.generic, np.ndarray))
    return Value(array, number=state.number if known else None)


def _product(equation: Equation, params: dict[str, Any]) -> Callable[[Array, Array], Array]:
    """Returns a product as a function of its operands, with some of its parameters changed."""
    return lambda *operands: bind(equation, operands, **params)[0]

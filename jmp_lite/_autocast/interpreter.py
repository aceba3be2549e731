"""Runs a jaxpr by a plan: carries out the action of every equation, under the caller's own trace.

Functions within the program (jit, loops, branches, rematerialization, custom derivatives) are built again by
the handlers of `calls`.
"""

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._jaxpr.bind import bind, bind_repeated, cast, is_differentiated, kind_of, reuse
from .._jaxpr.calls import Body, Outputs, remat_from_half
from .._jaxpr.picks import bind_pick
from .._jaxpr.products import product_with_half_gradients, product_with_wide_gradients, wide_product
from .._jaxpr.read import Array, Equation, Var, constants, equations, open_jaxpr
from .._jaxpr.replay import replay
from .._jaxpr.scopes import context_of, reason_scope
from .planner import Planner
from .planning.plan import (
    Call,
    Decision,
    Float8,
    Inside,
    Move,
    MoveBoth,
    Plan,
    Product,
    Recompute,
    Run,
    Skip,
    Take,
    WeightGradient,
)
from .planning.states import State
from .regions import broadcast_to_half, run_region
from .value import Value


class Interpreter:
    """Runs plans; one interpreter serves one call of an autocast function.

    Attributes:
        planner: the planner, which plans the rules of custom derivatives when they are traced.
        half: the half dtype.
        is_linear: whether the rule of a `custom_jvp` runs (`in_linear_rule`).
        is_primal: whether no derivative is taken of what runs (`without_derivative`).
    """

    def __init__(self, planner: Planner, handlers: Mapping[str, "Handler"]) -> None:
        """Makes an interpreter of `planner`'s plans, with a handler for each operation that runs jaxprs."""
        self.planner = planner
        self.half = planner.rules.dtype
        self.is_linear = self.is_primal = False
        self._handlers = handlers
        # JAX remembers the trace and the derivative of a function by the function itself. So equal calls,
        # such as those of equal layers, get the same one.
        self._bodies: dict[Any, Body] = {}
        self._rematerialized: dict[Any, Callable[..., list[Array]]] = {}
        self._counts: collections.Counter[Any] = collections.Counter()  # How often each `kind_of` occurs.

    def forget(self) -> None:
        """Drops what equal parts of the program share, and the plans. See `Planner.forget`."""
        for shared in (self._bodies, self._rematerialized, self._counts):
            shared.clear()
        self.planner.forget()

    @contextlib.contextmanager
    def in_linear_rule(self) -> Iterator[None]:
        """Returns a context for the rule of a `custom_jvp`, in which float32 readers read the path itself."""
        # JAX transposes what such a rule computes from tangents, and does not differentiate it. It could not
        # transpose `widen`, which has a custom derivative and no transpose.
        was_linear, self.is_linear = self.is_linear, True
        try:
            yield
        finally:
            self.is_linear = was_linear

    def rematerialized(
        self, equation: Equation, body: Body, kept: tuple[int, ...]
    ) -> Callable[..., list[Array]]:
        """Returns a `jax.checkpoint` that keeps operands in half; see `remat_from_half`."""
        key = body, kept, equation.params["prevent_cse"]
        if key not in self._rematerialized:
            primal = self.without_derivative(body)
            self._rematerialized[key] = remat_from_half(equation, body, primal, kept, self.half)
        return self._rematerialized[key]

    def without_derivative(self, body: Body) -> Body:
        """Returns the body for a pass that is not differentiated. Its regions run without barriers."""

        # Within another `jax.checkpoint`, barriers would stay in the forward pass and change its roundings:
        # JAX itself leaves them out there (https://github.com/jax-ml/jax/pull/7100).
        def primal(*arrays: Array) -> Outputs:
            was_primal, self.is_primal = self.is_primal, True
            try:
                return body(*arrays)
            finally:
                self.is_primal = was_primal

        return primal

    def run(self, plan: Plan, arguments: Sequence[Value]) -> list[Value]:
        """Runs the equations of a plan's jaxpr, on a value for each input.

        Returns:
            A value for each output.
        """
        fixed = map(_constant, constants(plan.jaxpr), plan.constants)
        # Counting pays only where `bind_repeated` saves a derivative: it makes the trace of a GPT-2 of 12
        # layers 16 % shorter under jax.grad.
        if is_differentiated([value.native for value in arguments]):
            self._counts.update(map(kind_of, equations(plan.jaxpr)))

        starts = plan.pairs.starts

        # As soon as a value is made: a path that starts after a first reader would miss its cotangent.
        def start_paths(variables: Sequence[Var], values: Sequence[Value]) -> Sequence[Value]:
            for var, value in zip(variables, values):
                if var in starts:
                    value.start_path()
            return values

        def action(index: int, equation: Equation, read: Callable[[Var], Value]) -> Sequence[Value]:
            with _reason_of(plan.decisions[index]):
                results = self._run_equation(equation, plan.decisions[index].action, read)
            return start_paths(equation.outvars, results) if starts else results

        start_paths(open_jaxpr(plan.jaxpr).invars, arguments)

        def also_read(index: int) -> Sequence[Var]:
            return _read_by_region(plan.decisions[index].action)

        return replay(plan.jaxpr, [*fixed, *arguments], self._literal, action, also_read)

    def _literal(self, var: Var) -> Value:
        return _constant(var.val, self.planner.literal(var))

    def _run_equation(self, equation: Equation, action: Any, read: Callable[[Var], Value]) -> Sequence[Value]:
        if isinstance(action, Skip):
            # Nothing reads the value of an operation that a region computes.
            return [Value(None) if action.operand is None else read(equation.invars[action.operand])]
        if isinstance(action, Recompute):
            return [run_region(action, read, self.half, self.is_primal)]
        # The program's scopes and source lines stay on what runs in its place, for profiles and for errors.
        operands = list(map(read, equation.invars))
        with context_of(equation):
            match action:
                case Run():
                    return self._bind(equation, action, operands)
                case Product():
                    return [Value(self._product(equation, action, operands))]
                case WeightGradient():
                    arrays = self._operands(equation, action, operands)
                    return [Value(wide_product(equation, arrays, jnp.float32, **action.params))]
                case Float8():
                    return [Value(_run_float8(equation, action, operands))]
                case Move():
                    return self._move(equation, action, operands)
                case MoveBoth():
                    return [self._move_both(equation, action, operands)]
                case Call():
                    return self._handlers[action.handler](self, equation, action, operands)
        raise AssertionError(f"unknown action {action}")

    def casts_for_loop(self, value: Value, plan: Plan) -> dict[Any, Any]:
        """Returns the casts of a loop's constant that the body may read. They stand in front of the loop."""
        # XLA drops those that the body does not read.
        casts: dict[Any, Any] = {self.half: value.to(self.half)}
        if plan.in_fp8 and value.native.ndim > 1:
            from .._float8.action import cast_to_float8
            from .._float8.quantize import FORWARD

            casts[FORWARD] = cast_to_float8(value, value.native, FORWARD)
        return casts

    # The actions of operations.

    def _bind(self, equation: Equation, action: Run, operands: list[Value]) -> list[Value]:
        run = self._how_to_bind(equation, action)
        results = run(equation, self._operands(equation, action, operands), **action.params)
        narrow = action.narrow or [False] * len(results)
        return [Value(cast(x, self.half) if is_half else x) for x, is_half in zip(results, narrow)]

    def _how_to_bind(self, equation: Equation, action: Run | Move | MoveBoth) -> Callable[..., list[Array]]:
        if action.picks:
            return bind_pick
        return bind_repeated if self._counts and self._counts[kind_of(equation)] > 1 else bind

    def _operands(
        self, equation: Equation, action: Run | Product | WeightGradient, operands: list[Value]
    ) -> list[Array]:
        return [
            broadcast_to_half(value.to(jnp.float32), equation, self.half)
            if take is Take.BROADCAST
            else self.take(value, take)
            for value, take in zip(operands, action.operands, strict=True)
        ]

    def _product(self, equation: Equation, action: Product, operands: list[Value]) -> Array:
        arrays = self._operands(equation, action, operands)
        product = _product(equation, action.params)
        half_product = _product(equation, action.half_params)  # The products of the derivatives.
        is_wide = [dtype == jnp.float32 for dtype in action.gradients]
        if any(is_wide):  # The gradient of a weight in float32, by a `custom_vjp`.
            wide = [value.to(jnp.float32) if flag else None for value, flag in zip(operands, is_wide)]
            return product_with_wide_gradients(product, half_product, arrays, wide)
        halves = [value.to(self.half) for value in operands]

        # XLA cannot write a float32 result of bfloat16 operands transposed on a CPU: "Unsupported element
        # type for DotThunk::Execute: BF16 x BF16 = F32".
        def barred(*operands):
            return lax.optimization_barrier(product(*operands))

        return product_with_half_gradients(barred, half_product, arrays, halves)

    def _move(self, equation: Equation, action: Move, operands: list[Value]) -> list[Value]:
        """Moves values, and the path of a half value."""
        arrays = self.take_all(operands, action.operands)
        run = self._how_to_bind(equation, action)
        results = list(map(Value, run(equation, arrays)))
        # Without a path at an operand, the gradients of the readers meet at the result, and no further back.
        if action.has_paths and any(value.path is not None for value in operands):
            wides = [
                value.to(jnp.float32) if take is Take.HALF else array
                for value, take, array in zip(operands, action.operands, arrays)
            ]
            for result, path in zip(results, run(equation, wides)):
                self._attach_path(result, path)
        return results

    def _move_both(self, equation: Equation, action: MoveBoth, operands: list[Value]) -> Value:
        arrays = self.take_all(operands, action.operands)
        run = self._how_to_bind(equation, action)
        # XLA drops a move whose result nothing reads.
        (wide,) = run(equation, [operands[0].to(jnp.float32), *arrays[1:]])
        (half,) = run(equation, [operands[0].to(self.half), *arrays[1:]])
        # If the operand is half, the float32 result is the path, on which cotangents are summed. If it is
        # float32, the half result is a cast of the float32 one, which receives its gradient.
        if action.operands[0] is Take.HALF:
            return Value(reuse(wide, half), path=wide)
        return Value(wide, {self.half: half})

    def _attach_path(self, value: Value, path: Array) -> None:
        """Attaches a path: float32 readers of this half value send their gradients there."""
        value.path = path
        if self.is_linear:  # See `in_linear_rule`.
            value.casts[jnp.float32] = path

    # Values that enter and leave the jaxprs within an equation.

    def take(self, value: Value, take: Take) -> Array:
        """Returns the array of a value, in the dtype in which an operation or a call takes it."""
        if take is Take.AS_IS:
            return value.native
        return value.to(self.half if take is Take.HALF else jnp.float32)

    def take_all(self, values: Sequence[Value], takes: Sequence[Take]) -> list[Array]:
        return [self.take(value, take) for value, take in zip(values, takes)]

    def with_paths(self, arrays: Sequence[Array], pairs: Sequence[int]) -> list[Value]:
        """Returns arrays as values. The last arrays are the paths of those at the indexes `pairs`."""
        values = list(map(Value, arrays[: len(arrays) - len(pairs)]))
        for index, path in zip(pairs, arrays[len(values) :], strict=True):
            self._attach_path(values[index], path)
        return values

    def body(
        self,
        inside: Inside,
        constants: Sequence[Value] = (),
        pairs_in: tuple[int, ...] = (),
        pairs_out: tuple[int, ...] = (),
    ) -> Body:
        """Returns a jaxpr of a call as a body for `_jaxpr.calls`.

        Args:
            inside: how the jaxpr runs.
            constants: values for its first inputs. A body without them is the same for all calls of one kind,
                so that JAX traces it once.
            pairs_in: the indexes of the other inputs that are pairs. Their paths follow the inputs.
            pairs_out: the indexes of the outputs that are pairs. Their paths follow the outputs.
        """
        # A plan is compared by identity: the planner gives equal calls the same one.
        key = (inside.plan, inside.leave, pairs_in, pairs_out, self.is_linear, self.is_primal)
        if key in self._bodies and not constants:
            return self._bodies[key]

        # The constants are copies: a cast made inside the body belongs to its trace, and would leak.
        def body(*arrays: Array) -> Outputs:
            given = self.with_paths(arrays, pairs_in)
            values = self.run(inside.plan, [*(value.copy() for value in constants), *given])
            return self.take_all(values, inside.leave) + [values[i].to(jnp.float32) for i in pairs_out], {}

        if not constants:
            self._bodies[key] = body
        return body


def _reason_of(decision: Decision) -> contextlib.AbstractContextManager[Any]:
    """Returns a scope that tells a report of the step around autocast why matmuls are in float32."""
    if decision.why_float32 is None:
        return contextlib.nullcontext()
    why, reason = decision.why_float32
    return jax.named_scope(reason_scope(why.name.lower(), reason))


def _run_float8(equation: Equation, action: Float8, operands: Sequence[Value]) -> Array:
    from .._float8.action import run_float8  # Loaded when a user asks for fp8.

    return run_float8(equation, action, operands)


def _read_by_region(action: Any) -> Sequence[Var]:
    """Returns what the last operation of a region reads for the others."""
    return (*action.region.sources, *action.region.extras) if isinstance(action, Recompute) else ()


def pairs_entering(action: Call, operands: Sequence[Value]) -> tuple[int, ...]:
    """Returns the indexes of the half operands that enter a call as pairs: with a path, which is read."""
    # Constants of loops are not among them: each has a path of its own.
    return tuple(
        index
        for index in sorted({index for inside in action.inner for index in inside.reads})
        if operands[index].path is not None
    )


Handler = Callable[[Interpreter, Equation, Call, list[Value]], list[Value]]
"""Runs an equation that runs jaxprs. Arguments: the interpreter, the equation, the action, the operands."""


def _constant(array: Array, state: State) -> Value:
    """Returns a constant as a value; a number that is known while tracing is written into the program."""
    return Value(array, number=state.number)


def _product(equation: Equation, params: dict[str, Any]) -> Callable[[Array, Array], Array]:
    """Returns a product as a function of its operands, with some of its parameters changed."""
    return lambda *operands: bind(equation, operands, **params)[0]

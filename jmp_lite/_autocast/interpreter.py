"""Runs a jaxpr by a plan: every equation is bound again, under the caller's own trace.

A value keeps the dtype in which it was computed and the cast that was made of it, so that it is cast once.
Functions within the program (jit, loops, branches, rematerialization, custom derivatives) are built again
through JAX's public combinators, by the handlers of `calls.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._tree import reuse_cast
from .jaxprs import (
    bind,
    cast,
    constants,
    context_of,
    equations,
    is_float32,
    is_literal,
    open_jaxpr,
)
from .plan import Planner
from .rules import BROADCASTS, GATHERS, SCALES, SPREADS, List
from .states import HALF, Compute, Decision, Kind, Plan, State


class Value:
    """A value of the program: its state, and the dtypes in which it has been made so far.

    Attributes:
        state: what the plan knows of it.
        native: the value as it was computed.
        casts: casts of it that were made or were there before, by dtype.
        exact: the dtype, if any, from which the program itself cast it up: going back there is no cast.
    """

    __slots__ = ("_moved", "_native", "casts", "exact", "state")

    def __init__(
        self,
        state: State,
        native: Any = None,
        casts: dict[Any, Any] | None = None,
        exact: Any = None,
        moved: Callable[[Any], Any] | None = None,
    ) -> None:
        self.state = state
        self.casts = {} if casts is None else casts
        self.exact = exact
        self._native = native
        self._moved = moved

    def with_state(self, state: State) -> "Value":
        """Returns the same value, known for something else; the casts made of it from here on are its own."""
        return Value(state, self._native, dict(self.casts), self.exact, self._moved)

    @property
    def native(self) -> Any:
        if self._native is None and self._moved is not None:
            self._native = self._moved(None)
        return self._native

    def to(self, dtype: Any) -> Any:
        """Returns the value in `dtype`, float32 or the half dtype."""
        written = self.state.number is not None and isinstance(self._native, (float, np.generic, np.ndarray))
        if written:  # Into the program: it needs no cast, and stays as it is in float32.
            return self._native if dtype == jnp.float32 else np.asarray(self.state.number, dtype)
        if self._moved is not None and dtype != jnp.float32:
            return self._moved(dtype)  # Cast before the move, so that all moves of a value share its cast.
        native = self.native
        if native.dtype == dtype:
            return native
        if dtype not in self.casts:
            self.casts[dtype] = cast(native, dtype)
            return self.casts[dtype]
        if self.exact == dtype or native.dtype != jnp.float32:
            return self.casts[dtype]
        return reuse_cast(native, self.casts[dtype])


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
        fixed = [Value(state, const) for state, const in zip(plan.states, constants(plan.jaxpr))]
        known: dict[Any, Value] = dict(zip((*inside.constvars, *inside.invars), (*fixed, *arguments)))

        def read(var: Any) -> Value:
            return self._literal(var) if is_literal(var) else known[var]

        for place, (equation, decision) in enumerate(zip(equations(inside), plan.decisions)):
            if place in plan.skipped:
                continue
            if decision.compute is Compute.ACTIVATION:
                (out,) = equation.outvars
                known[out] = self._activation(plan, out, [known[var] for var in plan.anatomy.sources[out]])
                continue
            operands = [read(var) for var in equation.invars]
            with context_of(equation):
                results = self._equation(equation, decision, operands, plan)
            known.update(zip(equation.outvars, results, strict=True))
        return [
            value if value.state == state else value.with_state(state)
            for value, state in zip(map(read, inside.outvars), plan.results)
        ]

    def _activation(self, plan: Plan, out: Any, sources: list[Value]) -> Value:
        """Computes a function of half values in float32; the backward pass computes it anew from them."""
        members = [equations(open_jaxpr(plan.jaxpr))[place] for place in sorted(plan.anatomy.members[out])]

        @jax.checkpoint
        def activation(*sources: jax.Array) -> jax.Array:
            wide = [cast(source, jnp.float32) for source in sources]
            known = dict(zip(plan.anatomy.sources[out], wide, strict=True))
            for equation in members:
                operands = [var.val if is_literal(var) else known[var] for var in equation.invars]
                with context_of(equation):
                    (known[equation.outvars[0]],) = bind(equation, operands)
            return cast(known[out], self.half)

        return Value(HALF, activation(*(source.to(self.half) for source in sources)))

    def _literal(self, var: Any) -> Value:
        return Value(self.planner.literal(var), var.val)

    def _equation(self, equation: Any, decision: Decision, operands: list[Value], plan: Plan) -> list[Value]:
        if decision.which is List.CALL and decision.changed:
            handler = self.calls[equation.primitive.name]
            return handler(self, equation, decision, operands, plan)
        if equation.primitive.name == "convert_element_type":
            return [self._cast(equation, decision, operands[0])]
        if decision.compute is Compute.EACH and decision.which is List.MOVE:
            return self._move(equation, decision, operands, plan)
        if decision.compute is Compute.STORE_HALF:
            return self._stored_in_half(equation, decision, operands)
        takes_half = decision.compute is Compute.HALF
        dtype = self.half if takes_half else jnp.float32
        arrays = [self._operand(equation, var, value, dtype) for var, value in zip(equation.invars, operands)]
        changed = {}
        if takes_half and equation.params.get("preferred_element_type") is not None:
            changed["preferred_element_type"] = self.half
        return values_of(decision, bind(equation, arrays, **changed))

    def _stored_in_half(self, equation: Any, decision: Decision, operands: list[Value]) -> list[Value]:
        """Computes in float32 and stores in half; the backward pass keeps no operand but as it came."""
        kinds = [value.state.kind for value in operands]

        def compute(*arrays: Any) -> list[Any]:
            wide = [
                cast(array, jnp.float32) if kind == Kind.HALF else array for array, kind in zip(arrays, kinds)
            ]
            results = bind(equation, wide)
            return [self._down(array, state) for array, state in zip(results, decision.results)]

        differentiable = any(
            kind in (Kind.FREE, Kind.OPEN) and not value.state.constant
            for value, kind in zip(operands, kinds)
        )
        if differentiable and equation.primitive.name in SCALES:
            compute = jax.checkpoint(compute)
        arrays = self.entering(operands, [value.state for value in operands])
        return values_of(decision, compute(*arrays))

    def _operand(self, equation: Any, var: Any, value: Value, dtype: Any) -> Any:
        """An operand in the dtype of its operation, which may broadcast it.

        The gradient of what is broadcast is a sum, so that it is broadcast in float32 and cast after.
        """
        if value.state.kind == Kind.OTHER:
            return value.native
        broadcasts = equation.primitive.name in BROADCASTS and var.aval.ndim > 0
        if dtype == self.half and broadcasts and not value.state.constant:
            shape = equation.outvars[0].aval.shape
            if var.aval.shape != shape:
                return cast(jnp.broadcast_to(value.to(jnp.float32), shape), dtype)
        return value.to(dtype)

    def _down(self, array: Any, state: State) -> Any:
        return cast(array, self.half) if state.kind == Kind.HALF else array

    def _cast(self, equation: Any, decision: Decision, operand: Value) -> Value:
        (source,), (target,) = equation.invars, equation.outvars
        (state,) = decision.results
        if is_float32(source) and is_float32(target):
            return operand
        if target.aval.dtype == self.half and state.kind == Kind.OTHER and is_float32(source):
            return Value(state, operand.to(self.half))
        native = operand.native
        (result,) = bind(equation, [native])
        if source.aval.dtype == self.half and is_float32(target):
            return Value(state, result, {self.half: native}, exact=self.half)
        return Value(state, result)

    def _move(self, equation: Any, decision: Decision, operands: list[Value], plan: Plan) -> list[Value]:
        spread = equation.primitive.name in SPREADS
        if spread and any(state.kind == Kind.HALF for state in decision.results):
            results = bind(equation, list(map(self.traced, operands)))
            return [Value(state, self._down(array, state)) for state, array in zip(decision.results, results)]
        if equation.primitive.name in GATHERS and decision.results[0].kind == Kind.HALF:
            return [
                Value(state, self._gathered(equation, value))
                for state, value in zip(decision.results, operands, strict=True)
            ]
        (state, *others), (value, *rest) = decision.results, operands
        lazy = not others and not spread and value.state.kind not in (Kind.OTHER, Kind.HALF)
        if lazy and plan.demand.uses[equation.outvars[0]]:
            return [Value(state, moved=self._mover(equation, value, [each.native for each in rest]))]
        return values_of(decision, bind(equation, [each.native for each in operands]))

    def _mover(self, equation: Any, value: Value, rest: list[Any]) -> Callable[[Any], Any]:
        """Moves `value` when it is read: in half it is cast first, so that all its uses share one cast."""

        def moved(dtype: Any) -> Any:
            if dtype is not None and equation.primitive.name in GATHERS:
                with context_of(equation):
                    return self._gathered(equation, value)
            array = value.native if dtype is None else value.to(dtype)
            with context_of(equation):
                (result,) = bind(equation, [array, *rest])
            return result

        return moved

    def _gathered(self, equation: Any, value: Value) -> Any:
        """Gathers half values from all devices; the gradients that come back are summed in float32.

        The gathering in float32 gives only the way back: nothing reads its result, and XLA drops it.
        """
        (wide,) = bind(equation, [value.to(jnp.float32)])
        (half,) = bind(equation, [value.to(self.half)])
        return reuse_cast(wide, half)

    # Values that enter and leave the jaxprs within an equation.

    def entering(self, values: Sequence[Value], states: Sequence[State]) -> list[Any]:
        """Returns one array for each value, in the dtype of its state inside."""
        return [self.leaving(value, state) for value, state in zip(values, states)]

    def traced(self, value: Value) -> Any:
        """Returns the array of a value in the dtype in which it was traced."""
        return value.native if value.state.kind == Kind.OTHER else value.to(jnp.float32)

    def leaving(self, value: Value, state: State) -> Any:
        """Returns the array of a value, in the dtype of its state outside."""
        if state.kind == Kind.OTHER:
            return value.native
        if state.kind != Kind.HALF and value.state.kind != Kind.HALF:
            return value.native
        return value.to(self.half if state.kind == Kind.HALF else jnp.float32)

    def looped(self, values: Sequence[Value], plan: Plan) -> list[Value]:
        """Returns the constants of a loop as its body sees them.

        What the body wants in half is cast once, outside, and its gradients are summed in float32.
        """
        return [
            Value(state, value.to(jnp.float32), {self.half: value.to(self.half)})
            if wanted and state.kind not in (Kind.OTHER, Kind.LITERAL)
            else Value(state, self.leaving(value, state))
            for value, state, wanted in zip(values, plan.inputs, plan.wanted)
        ]

    def cast_beside(self, operands: Sequence[Any], plans: Sequence[Plan], around: Plan) -> tuple[int, ...]:
        """Returns the places of the operands of a call that are given to it in half as well.

        They are what it wants in half and others around it do too: so it is cast once, for all of them.
        """
        return tuple(
            place
            for place, (var, state) in enumerate(zip(operands, plans[0].inputs, strict=True))
            if any(plan.wanted[place] for plan in plans)
            and not is_literal(var)
            and around.demand.uses[var] > 1
            and state.kind in (Kind.FREE, Kind.OPEN, Kind.FIRM)
        )

    def inside(
        self, plan: Plan, states: Sequence[State], beside: Sequence[int] = ()
    ) -> Callable[..., list[Any]]:
        """Returns a plan as a function of what `entering` returns and of the casts `beside` it.

        Its results have the dtypes of `states`.
        """

        def fun(*arrays: Any) -> list[Any]:
            arguments = [Value(state, array) for state, array in zip(plan.inputs, arrays)]
            for place, half in zip(beside, arrays[len(arguments) :], strict=True):
                arguments[place].casts[self.half] = half
            return self.entering(self.run(plan, arguments), states)

        return fun


Handler = Callable[[Interpreter, Any, Decision, list[Value], Plan], list[Value]]
"""Runs an equation that runs jaxprs: of the interpreter, the equation, its decision, its operands, the plan
around it."""


def values_of(decision: Decision, arrays: Sequence[Any]) -> list[Value]:
    """Returns the results of an operation as values."""
    return [Value(state, array) for state, array in zip(decision.results, arrays, strict=True)]

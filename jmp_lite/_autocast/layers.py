"""`layer_scale`: gives each layer that a pattern selects a loss scale of its own, before anything is cast.

The program is traced, and run again with `scale_layer` around the operations of each selected layer. Its
result is a program in the dtypes of the first, which autocast then plans like any other.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._paths import subtrees
from .._scaling.layer import scale_layer
from .._tree import is_half
from .binding import bind, context_of
from .calls import CALLS
from .interpreter import Interpreter, Value
from .jaxprs import (
    Array,
    Equation,
    Inner,
    Jaxpr,
    Var,
    call_scope,
    equations,
    is_literal,
    open_jaxpr,
    scope_of,
)
from .plan import Around, Bind, Decision, Demand, Plan, Take, Wanted
from .planner import Facts, Planner
from .primitives import List
from .rules import make_rules
from .states import OTHER, State


def scale_layers(jaxpr: Jaxpr, patterns: Sequence[str]) -> Jaxpr:
    """Returns a closed jaxpr whose selected layers have a loss scale each.

    Args:
        jaxpr: a closed jaxpr.
        patterns: patterns over scopes.

    Raises:
        ValueError: a pattern selects nothing, or a part of a derivative.
    """
    planner = _Planner(patterns)
    inside = open_jaxpr(jaxpr)
    plan = planner.plan(jaxpr, [OTHER] * len(inside.invars), [Wanted.NO] * len(inside.outvars))
    planner.scopes.check("The pattern of layer_scale=,")
    interpreter = _Interpreter(planner, CALLS)

    def run(*arrays: Array) -> list[Array]:
        return [value.native for value in interpreter.run(plan, list(map(Value, arrays)))]

    return jax.make_jaxpr(run)(*(var.aval for var in inside.invars))


class _Planner(Planner):
    """Plans a program as it was traced. A call that holds a selected layer counts as changed."""

    def __init__(self, patterns: Sequence[str]) -> None:
        super().__init__(make_rules("float32", rules=[(pattern, "float32") for pattern in patterns]))

    def argument(self, value: Array, path: str) -> State:
        del value, path
        return OTHER

    def constant(self, value: Array) -> State:
        del value
        return OTHER

    def layer_of(self, scope: str) -> str:
        """Returns the scope of the selected layer that `scope` lies in; empty for none."""
        return next(filter(self.scopes.rule_for, subtrees(scope)), "") if scope else ""

    def _decide(self, equation: Equation, operands: list[State], demand: Demand, facts: Facts) -> Decision:
        layer = self.layer_of(call_scope(scope_of(equation, facts.around.scope), equation))
        if not layer and self.rules.list_of(equation.primitive.name) is List.CALL:
            return self._decide_call(equation, operands, demand, facts)
        if layer and _in_derivative(equation, facts):
            raise ValueError(
                f"layer_scale= selects '{layer}' in the derivative of a function. Give layer_scale= to the "
                "function itself: jax.grad(autocast(loss_fn, dtype, layer_scale=...))."
            )
        action = Bind((Take.AS_IS,) * len(operands))
        return Decision(List.AS_TRACED, action, (OTHER,) * len(equation.outvars), "", changed=bool(layer))

    def _around(self, equation: Equation, inner: Inner, facts: Facts) -> Around:
        around = super()._around(equation, inner, facts)
        return dataclasses.replace(around, backward=_in_derivative(equation, facts))


def _in_derivative(equation: Equation, facts: Facts) -> bool:
    """Whether `jax.grad`, `jax.jvp` or the like made an equation, or a call around it."""
    stack = str(equation.source_info.name_stack)
    return facts.around.backward or "jvp(" in stack or "transpose(" in stack


class _Interpreter(Interpreter):
    """Runs a program as it was traced, with `scale_layer` around the equations of each selected layer."""

    planner: _Planner

    def run_equations(self, plan: Plan, known: dict[Var, Value]) -> None:
        inside, every = open_jaxpr(plan.jaxpr), equations(plan.jaxpr)
        last_read = {var: index for index, each in enumerate(every) for var in _variables(each.invars)}
        last_read |= dict.fromkeys(_variables(inside.outvars), len(every))

        def layer_of(index: int) -> str | int | None:
            equation, around = every[index], plan.around.scope
            if equation.effects:  # scale_layer takes no equation with effects.
                return None
            scope = scope_of(equation, around)
            # Each call of a selected jitted function is a layer of its own.
            is_called = self.planner.layer_of(call_scope(scope, equation))
            return self.planner.layer_of(scope) or (index if is_called else None)

        for layer, group in itertools.groupby(range(len(every)), layer_of):
            indexes = list(group)
            if layer is not None:
                results = [var for index in indexes for var in every[index].outvars]
                read_later = [var for var in results if last_read.get(var, -1) > indexes[-1]]
                self._scale([every[index] for index in indexes], read_later, known)
            else:
                for index in indexes:
                    self.run_equation(every[index], plan.decisions[index], known)

    def _scale(self, members: Sequence[Equation], results: Sequence[Var], known: dict[Var, Value]) -> None:
        """Runs the equations `members` as one layer, and adds the values of `results` to `known`."""
        operands = {var: None for each in members for var in _variables(each.invars) if var in known}

        def run(*arrays: Array) -> list[Array]:
            values = {var: _as(var, x) for var, x in zip(operands, arrays, strict=True)}
            for equation in members:
                taken = [var.val if is_literal(var) else values[var] for var in equation.invars]
                with context_of(equation):
                    values.update(zip(equation.outvars, bind(equation, taken), strict=True))
            return [values[var] for var in results]

        # The gradient of a half value is half, so half values of the program are float32 between two layers.
        values = [known[var] for var in operands]
        arrays = [value.to(jnp.float32) if is_half(value.native) else value.native for value in values]
        for var, x in zip(results, scale_layer(run)(*arrays), strict=True):
            known[var] = Value(_as(var, x), {jnp.float32: x})


def _variables(operands: Sequence[Var]) -> list[Var]:
    return [var for var in operands if not is_literal(var)]


def _as(var: Var, array: Array) -> Array:
    """Returns an array in the dtype of a variable; the two differ if that is half."""
    return array if array.dtype == var.aval.dtype else array.astype(var.aval.dtype)

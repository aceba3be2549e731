"""Custom derivatives: one handler for each of `jax.custom_jvp`, `jax.custom_vjp` and `custom_vmap`."""

import dataclasses

import jax
import jax.numpy as jnp

from .._jaxpr.read import Array, Equation
from .interpreter import Interpreter, pairs_entering
from .planning.plan import Call
from .traced_rule import TracedRule
from .value import Value


def custom_jvp(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> list[Value]:
    """Runs a function with a forward-mode rule of the user's own."""
    rule, given = _traced_rule(interpreter, equation, action, operands)
    fun = jax.custom_jvp(rule.primal)
    fun.defjvp(rule.jvp, symbolic_zeros=equation.params["symbolic_zeros"])
    return interpreter.with_paths(fun(*given), action.paired)


def custom_vjp(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> list[Value]:
    """Runs a function with forward and backward rules of the user's own."""
    rule, given = _traced_rule(interpreter, equation, action, operands)
    fun = jax.custom_vjp(rule.primal)
    # Under jax.vmap, JAX rejects a zero cotangent for a result that is not differentiated.
    fun.defvjp(rule.forward, rule.backward, symbolic_zeros=True)
    return interpreter.with_paths(fun(*given), action.paired)


def custom_vmap(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> list[Value]:
    """Runs a function with a batching rule of the user's own. It has no reverse mode: it needs no pairs."""
    fixed = [Value(value.native) for value in operands]
    rule, given = _traced_rule(interpreter, equation, dataclasses.replace(action, paired=()), fixed)
    fun = jax.custom_batching.custom_vmap(rule.primal)
    fun.def_vmap(rule.batched)
    return list(map(Value, fun(*given)))


def _traced_rule(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> tuple[TracedRule, list[Array]]:
    """Returns the rules of an equation, and the arrays by which its function may be differentiated.

    JAX keeps the function and so the rules, which therefore do not hold these arrays: they would leak.
    """
    arrays = interpreter.take_all(operands, action.inner[0].enter)
    # The custom rule returns no gradients for closed-over constants. JAX reports a program that asks for one.
    count = equation.params.get("num_consts", 0)
    pairs = tuple(index for index in pairs_entering(action, operands) if index >= count)
    rule = TracedRule(interpreter, equation, action, arrays[:count], pairs)
    return rule, arrays[count:] + [operands[index].to(jnp.float32) for index in pairs]

"""Operations that run jaxprs, by a plan: `_jaxpr.calls` runs them around bodies in half precision.

`traced_rule` has the rules of custom derivatives.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxpr.calls import CALLS, Body
from .._jaxpr.inner import Role, right_sides, with_repeated
from .._jaxpr.primitives import traits_of
from .._jaxpr.read import Array, Equation
from .interpreter import Handler, Interpreter, pairs_entering
from .planning.plan import Call, Inside, Plan, Take
from .traced_rule import TracedRule
from .value import Value


def _inline(interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]) -> list[Value]:
    # These operations hold a jaxpr and nothing else, so it runs in their place.
    del equation
    return interpreter.run(action.inner[0].plan, [value.copy() for value in operands])


def _call(interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]) -> list[Value]:
    """Builds an operation again around its jaxprs, which take the operands, and then the paths of pairs."""
    paired = pairs_entering(action, operands)
    bodies = [_body(interpreter, inside, action, operands, paired) for inside in action.inner]
    arrays = _entering(interpreter, action, operands) + [operands[n].to(jnp.float32) for n in paired]
    if action.kept:  # A `jax.checkpoint` that keeps operands in bfloat16 (`passes.checkpoints`).
        run = interpreter.rematerialized(equation, bodies[0], action.kept)
        return interpreter.with_paths(run(*arrays), action.paired)
    if action.recompute:
        # Nothing differentiates the body of a scan alone, so the barriers of prevent_cse are not needed:
        # https://docs.jax.dev/en/latest/_autosummary/jax.checkpoint.html, as in flax.linen.remat_scan.
        bodies = [jax.checkpoint(bodies[0], policy=_saved_by_loop, prevent_cse=False)]
    # A path has the sharding and the specs of its half value.
    equation = with_repeated(equation, paired, action.paired)
    results, _ = CALLS[action.handler](equation, bodies, arrays)
    return interpreter.with_paths(results, action.paired)


def _entering(interpreter: Interpreter, action: Call, operands: Sequence[Value]) -> list[Array]:
    """Returns the arrays that enter a call. Its bodies close over the constants (`_jaxpr.calls`)."""
    arrays = [value.native for value in operands]
    for inside in action.inner:
        for index, role, take in zip(inside.inner.operands, inside.inner.roles, inside.enter):
            if role is not Role.CONSTANT:
                arrays[index] = interpreter.take(operands[index], take)
    return arrays


def _body(
    interpreter: Interpreter, inside: Inside, action: Call, operands: Sequence[Value], paired: Sequence[int]
) -> Body:
    """Returns one jaxpr of a call as a body. `paired` are the indexes of the operands that enter as pairs."""
    # The constants come first. Indexes of operands and results become those of the body's inputs and outputs.
    indexes, roles = inside.inner.operands, inside.inner.roles
    fixed = [
        _constant(interpreter, operands[index], take, inside.plan)
        for index, role, take in zip(indexes, roles, inside.enter)
        if role is Role.CONSTANT
    ]
    given = indexes[len(fixed) :]
    pairs_out = tuple(inside.inner.results.index(index) for index in action.paired)
    return interpreter.body(inside, fixed, tuple(given.index(index) for index in paired), pairs_out)


def _constant(interpreter: Interpreter, value: Value, take: Take, plan: Plan) -> Value:
    """Returns a constant of a loop for its body."""
    array = interpreter.take(value, take)
    if take is not Take.HOISTED:
        return Value(array, {}, value.number)
    # The body uses it in half. It is cast once, in front of the loop, and its gradients of all iterations are
    # summed in float32: its path is itself.
    return Value(array, interpreter.casts_for_loop(value, plan), value.number, array)


def _linear_solve(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> list[Value]:
    """Brings an overflow of the right side to the finite check."""
    # An iterative solver stops at once at a right side with inf, whose tolerance is inf too, and gives zeros:
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/scipy/sparse/linalg.py#L114. The overflow would
    # be lost, and no step skipped. Zero times inf is NaN.
    results = _call(interpreter, equation, action, operands)
    # A right side in half is cast as for the solver, so that its cotangents meet in float32.
    right = [operands[index] for index in right_sides(equation)]
    arrays = [b.to(jnp.float32) if b.native.dtype == interpreter.half else b.native for b in right]
    solution = [Value(x.native + 0 * array) for x, array in zip(results, arrays)]
    return solution + results[len(right) :]


def _saved_by_loop(primitive: Any, *operands: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint`: whether a loop keeps an operation's results for its backward pass."""
    # A loop writes each value that it keeps to an array of all iterations, so XLA cannot compute it again
    # from lighter ones. The loop keeps half values, booleans and the results of sums and products.
    name, traits = primitive.name, traits_of(primitive.name)
    if name == "convert_element_type":
        return params["new_dtype"] != jnp.float32
    # Roundings, and moves, that can be done again. The whole of a split value is one array.
    if name in ("reduce_precision", "broadcast_in_dim", "split"):
        return False
    wide = any(operand.dtype == jnp.float32 for operand in operands)
    return not (wide and traits.pointwise and not traits.compares)


def _custom_jvp(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> list[Value]:
    """Runs a function with a forward-mode rule of the user's own."""
    rule, given = _traced_rule(interpreter, equation, action, operands)
    fun = jax.custom_jvp(rule.primal)
    fun.defjvp(rule.jvp, symbolic_zeros=equation.params["symbolic_zeros"])
    return interpreter.with_paths(fun(*given), action.paired)


def _custom_vjp(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> list[Value]:
    """Runs a function with forward and backward rules of the user's own."""
    rule, given = _traced_rule(interpreter, equation, action, operands)
    fun = jax.custom_vjp(rule.primal)

    # Under jax.vmap, JAX rejects a zero cotangent for a result that is not differentiated.
    def backward(residuals, cotangents):
        return residuals(cotangents)  # See `TracedRule.forward`.

    fun.defvjp(rule.forward, backward, symbolic_zeros=True)
    return interpreter.with_paths(fun(*given), action.paired)


def _custom_vmap(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> list[Value]:
    """Runs a function with a batching rule of the user's own."""
    # JAX gives it no reverse mode, so it needs no pairs:
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/custom_batching.py#L77.
    fixed = [Value(value.native) for value in operands]
    rule, given = _traced_rule(interpreter, equation, dataclasses.replace(action, paired=()), fixed)
    fun = jax.custom_batching.custom_vmap(rule.primal)
    fun.def_vmap(rule.batched)
    return list(map(Value, fun(*given)))


def _traced_rule(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> tuple[TracedRule, list[Array]]:
    """Returns the rules of an equation, and the arrays by which its function may be differentiated."""
    # JAX keeps the function and so the rules, which therefore do not hold these arrays: they would leak.
    arrays = interpreter.take_all(operands, action.inner[0].enter)
    # The custom rule returns no gradients for closed-over constants. JAX reports a program that asks for one
    # (https://github.com/jax-ml/jax/pull/34216).
    count = equation.params.get("num_consts", 0)
    pairs = tuple(index for index in pairs_entering(action, operands) if index >= count)
    rule = TracedRule(
        interpreter=interpreter,
        equation=equation,
        inside=action.inner[0],
        closed_over=arrays[:count],
        pairs_in=pairs,
        pairs_out=action.paired,
    )
    return rule, arrays[count:] + [operands[index].to(jnp.float32) for index in pairs]


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(CALLS, _call),
    "closed_call": _inline,
    "custom_jvp_call": _custom_jvp,
    "custom_linear_solve": _linear_solve,
    "custom_vjp_call": _custom_vjp,
    "custom_vmap_call": _custom_vmap,
    "eval_jaxpr": _inline,
}

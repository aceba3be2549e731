"""Operations that run jaxprs of their own: one handler each, built of JAX's public combinators.

To teach autocast a new one, add its row to the table in `primitives.py`, its operands to
`jaxprs.inner_jaxprs`, and a handler here.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .binding import advance, bind
from .custom_rules import custom_jvp, custom_vjp, custom_vmap
from .interpreter import Handler, Interpreter, Value
from .jaxprs import Array, Equation, Role, constants, inner_jaxprs, open_jaxpr, without_constants
from .plan import Call, Inside, Take
from .primitives import traits_of


def _inline(interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]) -> list[Value]:
    del equation
    return interpreter.run(action.inner[0].plan, [value.copy() for value in operands])


def _jit(interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]) -> list[Value]:
    """A jitted function stays one, and is made once for all its calls of one kind."""
    (inside,) = action.inner
    arrays = interpreter.take_all(operands, inside.enter)
    key = (inside.plan, inside.enter)
    if key not in interpreter.jitted:
        interpreter.jitted[key] = jax.make_jaxpr(interpreter.function(inside))(*arrays)
    both = [index for index, take in enumerate(inside.enter) if take is Take.BOTH]
    per_operand = {
        name: (*given, *(name != "donated_invars" and given[index] for index in both))
        for name in ("in_shardings", "in_layouts", "donated_invars")
        if both and (given := equation.params.get(name)) is not None
    }
    return list(map(Value, bind(equation, arrays, jaxpr=interpreter.jitted[key], **per_operand)))


def _remat(interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]) -> list[Value]:
    """Recomputation keeps the user's policy; casts are made inside and recomputed, not saved."""
    (inside,) = action.inner
    fun = interpreter.function(inside)
    arrays = interpreter.take_all(operands, inside.enter)
    params = equation.params
    if not params["differentiated"]:
        fun = jax.checkpoint(fun, policy=params["policy"], prevent_cse=params["prevent_cse"])
        return list(map(Value, fun(*arrays)))
    # jax.grad has made this equation. jax.checkpoint would begin anew and save what must be recomputed.
    closed = jax.make_jaxpr(fun)(*arrays)
    results = bind(equation, [*constants(closed), *arrays], jaxpr=without_constants(closed))
    return list(map(Value, results))


def _composite(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> list[Value]:
    """A composite operation keeps its name and attributes."""
    (inside,) = action.inner
    arrays = interpreter.take_all(operands, inside.enter)
    closed = jax.make_jaxpr(interpreter.function(inside))(*arrays)
    param = "jaxpr" if "jaxpr" in equation.params else "call_jaxpr"  # Its name since JAX 0.12.
    return list(map(Value, bind(equation, arrays, **{param: closed})))


def _linear_solve(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> list[Value]:
    """Derivatives run the matrices, which may be in half; the solvers run as traced."""
    arrays = [value.native for value in operands]
    parts = list(zip(inner_jaxprs(equation), action.inner))
    for inner, inside in parts:
        for index, take in zip(inner.operands, inside.enter):
            arrays[index] = interpreter.take(operands[index], take)
    closed = [
        jax.make_jaxpr(interpreter.function(inside))(*(arrays[index] for index in inner.operands))
        for inner, inside in parts
    ]
    given, jaxprs = iter(closed), equation.params["jaxprs"]
    jaxprs = type(jaxprs)(*(None if jaxpr is None else next(given) for jaxpr in jaxprs))
    return list(map(Value, bind(equation, arrays, jaxprs=jaxprs)))


def _shard_map(
    interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]
) -> list[Value]:
    (inside,) = action.inner
    params = equation.params
    fun = jax.shard_map(
        lambda *arrays: tuple(interpreter.function(inside)(*arrays)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    return list(map(Value, fun(*interpreter.take_all(operands, inside.enter))))


def _cond(interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]) -> list[Value]:
    """All branches take the same operands in the same dtypes."""
    del equation
    index, *operands = operands
    arrays = interpreter.take_all(operands, action.inner[0].enter)
    branches = [interpreter.function(inside) for inside in action.inner]
    return list(map(Value, lax.switch(index.native, branches, *arrays)))


class _Loop:
    """One jaxpr of a loop: its constants are values around it, and the rest of its operands are arrays."""

    def __init__(self, interpreter: Interpreter, inside: Inside, constants: list[Value]) -> None:
        self._interpreter, self._inside = interpreter, inside
        self._enter = inside.enter[len(constants) :]
        self._constants = []
        for value, take in zip(constants, inside.enter):
            # A constant that the body wants in half is cast once, outside; its gradients are summed in
            # float32.
            casts = {interpreter.half: value.to(interpreter.half)} if take is Take.BOTH else None
            self._constants.append(Value(interpreter.take(value, take), casts, number=value.number))

    def start(self, operands: list[Value]) -> list[Array]:
        """Returns the arrays with which the loop starts, and the arrays that it slices."""
        return self._interpreter.take_all(operands, self._enter)

    def run(self, arrays: list[Array]) -> list[Array]:
        """Runs one iteration on its carries and slices."""
        arguments = [*(value.copy() for value in self._constants), *map(Value, arrays)]
        return self._interpreter.take_all(
            self._interpreter.run(self._inside.plan, arguments), self._inside.leave
        )


def _scan(interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]) -> list[Value]:
    """The carry keeps its dtype; slices enter and leave in the dtype that they have."""
    (inner,) = inner_jaxprs(equation)
    constant, carried = (inner.roles.count(role) for role in (Role.CONSTANT, Role.CARRY))
    body = _Loop(interpreter, action.inner[0], operands[:constant])
    arrays = body.start(operands[constant:])

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body.run([*carry, *slices])
        return results[:carried], results[carried:]

    if action.recompute:
        step = jax.checkpoint(step, policy=_is_kept, prevent_cse=False)
    params = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    carry, slices = lax.scan(step, arrays[:carried], arrays[carried:], **params)
    return list(map(Value, [*carry, *slices]))


def _is_kept(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Whether a loop keeps the results of an operation for its backward pass: a policy of `jax.checkpoint`.

    A loop writes each value that it keeps to an array of all iterations, so XLA cannot compute it again from
    lighter ones. The loop keeps half values, booleans and the results of sums and products.
    """
    name, traits = primitive.name, traits_of(primitive.name)
    if name == "convert_element_type":
        return params["new_dtype"] != jnp.float32
    if name in ("broadcast_in_dim", "split"):  # Moves that can be done again. The whole is one array.
        return False
    wide = any(operand.dtype == jnp.float32 for operand in operands)
    return not (wide and traits.pointwise and not traits.compares)


def _while(interpreter: Interpreter, equation: Equation, action: Call, operands: list[Value]) -> list[Value]:
    condition, body = (
        _Loop(interpreter, inside, [operands[index] for index in inner.operands[: _constants(inner)]])
        for inside, inner in zip(action.inner, inner_jaxprs(equation))
    )
    start = body.start(operands[sum(map(_constants, inner_jaxprs(equation))) :])
    (predicate,) = open_jaxpr(action.inner[0].plan.jaxpr).outvars
    if not predicate.aval.ndim:
        return list(map(Value, lax.while_loop(lambda carry: condition.run(carry)[0], body.run, start)))

    def step(carry: list[Array]) -> list[Array]:
        return advance(condition.run(carry)[0], body.run(carry), carry)

    return list(map(Value, lax.while_loop(lambda carry: condition.run(carry)[0].any(), step, start)))


def _constants(inner: Any) -> int:
    return inner.roles.count(Role.CONSTANT)


CALLS: dict[str, Handler] = {
    "closed_call": _inline,
    "composite": _composite,
    "cond": _cond,
    "custom_jvp_call": custom_jvp,
    "custom_linear_solve": _linear_solve,
    "custom_vjp_call": custom_vjp,
    "custom_vmap_call": custom_vmap,
    "eval_jaxpr": _inline,
    "jit": _jit,
    "remat2": _remat,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}

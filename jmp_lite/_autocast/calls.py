"""Operations that run jaxprs of their own: one handler each, built of JAX's public combinators.

To teach autocast a new one: its name in `rules.CALLS`, how its operands enter in `jaxprs.inner_jaxprs`, and a
handler here.
"""

from typing import Any

import jax
from jax import lax

from .custom_rules import custom_jvp, custom_vjp
from .interpreter import Handler, Interpreter, Value, values_of
from .jaxprs import Role, bind, constants, inner_jaxprs, without_constants
from .states import Decision, Plan


def _inline(
    interpreter: Interpreter, equation: Any, decision: Decision, operands: list[Value], around: Plan
) -> list[Value]:
    del equation, around
    (plan,) = decision.inner
    arguments = [value.with_state(state) for state, value in zip(plan.inputs, operands, strict=True)]
    return interpreter.run(plan, arguments)


def _jit(
    interpreter: Interpreter, equation: Any, decision: Decision, operands: list[Value], around: Plan
) -> list[Value]:
    """A jitted function stays one, and is made once for all its calls of one kind.

    What several calls want in half is cast outside, once, and given to each call beside the original.
    """
    (plan,) = decision.inner
    beside = interpreter.cast_beside(equation.invars, decision.inner, around)
    arrays = interpreter.entering(operands, plan.inputs)
    arrays += [operands[place].to(interpreter.half) for place in beside]
    key = (plan, beside)
    if key not in interpreter.jitted:
        fun = interpreter.inside(plan, decision.results, beside)
        interpreter.jitted[key] = jax.make_jaxpr(fun)(*arrays)
    per_operand = {
        name: (*given, *(name != "donated_invars" and given[place] for place in beside))
        for name in ("in_shardings", "in_layouts", "donated_invars")
        if beside and (given := equation.params.get(name)) is not None
    }
    return values_of(decision, bind(equation, arrays, jaxpr=interpreter.jitted[key], **per_operand))


def _remat(
    interpreter: Interpreter, equation: Any, decision: Decision, operands: list[Value], around: Plan
) -> list[Value]:
    """Recomputation keeps the user's policy; casts are made inside and recomputed, not saved."""
    del around
    (plan,) = decision.inner
    fun = interpreter.inside(plan, decision.results)
    arrays = interpreter.entering(operands, plan.inputs)
    params = equation.params
    if not params["differentiated"]:
        fun = jax.checkpoint(fun, policy=params["policy"], prevent_cse=params["prevent_cse"])
        return values_of(decision, fun(*arrays))
    # What grad has made of it: jax.checkpoint would begin anew and save what is to be recomputed.
    closed = jax.make_jaxpr(fun)(*arrays)
    return values_of(decision, bind(equation, [*constants(closed), *arrays], jaxpr=without_constants(closed)))


def _shard_map(
    interpreter: Interpreter, equation: Any, decision: Decision, operands: list[Value], around: Plan
) -> list[Value]:
    del around
    (plan,) = decision.inner
    params = equation.params
    fun = jax.shard_map(
        lambda *arrays: tuple(interpreter.inside(plan, decision.results)(*arrays)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    return values_of(decision, fun(*interpreter.entering(operands, plan.inputs)))


def _cond(
    interpreter: Interpreter, equation: Any, decision: Decision, operands: list[Value], around: Plan
) -> list[Value]:
    index, *operands = operands
    plans = decision.inner  # All of the same inputs.
    beside = interpreter.cast_beside(equation.invars[1:], plans, around)
    arrays = interpreter.entering(operands, plans[0].inputs)
    arrays += [operands[place].to(interpreter.half) for place in beside]
    branches = [interpreter.inside(plan, decision.results, beside) for plan in plans]
    return values_of(decision, lax.switch(index.native, branches, *arrays))


def _scan(
    interpreter: Interpreter, equation: Any, decision: Decision, operands: list[Value], around: Plan
) -> list[Value]:
    """The carry keeps its dtype; slices enter and leave in the dtype that they have."""
    del around
    (plan,) = decision.inner
    (body,) = inner_jaxprs(equation)
    constant, carried = (body.roles.count(role) for role in (Role.CONSTANT, Role.CARRY))
    fixed = interpreter.looped(operands[:constant], plan)
    arrays = interpreter.entering(operands[constant:], plan.inputs[constant:])

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        arguments = map(Value, plan.inputs[constant:], (*carry, *slices))
        fresh = [value.with_state(value.state) for value in fixed]
        results = interpreter.entering(interpreter.run(plan, [*fresh, *arguments]), decision.results)
        return results[:carried], results[carried:]

    params = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    carry, slices = lax.scan(step, arrays[:carried], arrays[carried:], **params)
    return values_of(decision, [*carry, *slices])


def _while(
    interpreter: Interpreter, equation: Any, decision: Decision, operands: list[Value], around: Plan
) -> list[Value]:
    del around
    condition, body = decision.inner
    parts = inner_jaxprs(equation)
    counts = [part.roles.count(Role.CONSTANT) for part in parts]
    start = sum(counts)
    fixed = [
        interpreter.looped([operands[place] for place in part.operands[:count]], plan)
        for part, count, plan in zip(parts, counts, decision.inner)
    ]

    def part(plan: Plan, fixed: list[Value], carry: list[Any]) -> list[Value]:
        arguments = map(Value, plan.inputs[len(fixed) :], carry)
        return interpreter.run(plan, [*(value.with_state(value.state) for value in fixed), *arguments])

    return values_of(
        decision,
        lax.while_loop(
            lambda carry: part(condition, fixed[0], carry)[0].native,
            lambda carry: interpreter.entering(part(body, fixed[1], carry), decision.results),
            interpreter.entering(operands[start:], body.inputs[counts[1] :]),
        ),
    )


CALLS: dict[str, Handler] = {
    "closed_call": _inline,
    "cond": _cond,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
    "eval_jaxpr": _inline,
    "jit": _jit,
    "remat2": _remat,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}

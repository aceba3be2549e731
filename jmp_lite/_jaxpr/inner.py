"""The jaxprs inside an equation, such as the body of a loop, and how they take its operands."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params

from .read import Equation, Jaxpr, open_jaxpr
from .scopes import SOLVER_SCOPE


class Role(enum.Enum):
    """How an inner jaxpr takes an operand of its equation."""

    ONCE = "once"
    CONSTANT = "the same in every iteration of a loop"
    CARRY = "changed by every iteration of a loop"
    ELEMENT = "one slice an iteration"


@dataclasses.dataclass(frozen=True)
class Inner:
    """One jaxpr inside an equation, and how its variables belong to those of the equation."""

    jaxpr: Jaxpr  # The inner jaxpr.
    operands: tuple[int, ...]  # For each input, the index of the equation's operand.
    roles: tuple[Role, ...]  # For each input, how the inner jaxpr takes it.
    # For each output, the index of the equation's result; None for an output that is no result.
    results: tuple[int | None, ...]
    carries: tuple[bool, ...]  # Which outputs are carried to the next iteration of a loop.
    scope: str = ""  # A scope of ours around the jaxpr; empty for none.

    @property
    def constants(self) -> int:
        """How many constants of a loop it takes; they are its first inputs."""
        return self.roles.count(Role.CONSTANT)

    @property
    def carried(self) -> int:
        """How many values a loop carries; they follow the constants."""
        return self.roles.count(Role.CARRY)


def inner_jaxprs(equation: Equation) -> tuple[Inner, ...]:
    """Returns the jaxprs that `equation`, an operation on the list `call`, runs."""
    # First those whose jaxprs take only some of the operands, or more than once.
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return (_scan_body(equation),)
    if name == "while":
        return _while_parts(equation)
    if name == "cond":
        return tuple(_called(branch, first_operand=1) for branch in params["branches"])
    if name == "custom_linear_solve":
        return _linear_solve_parts(equation)
    (jaxpr,) = jaxprs_in_params(params)
    # `jaxprs_in_params` opens a closed jaxpr, which JAX before 0.11 keeps apart from its constants
    # (https://github.com/jax-ml/jax/pull/39009).
    closed = [value for value in params.values() if open_jaxpr(value) is jaxpr]
    return (_called(closed[0] if closed else jaxpr, first_operand=0),)


def with_inner_jaxprs(equation: Equation, jaxprs: Sequence[Jaxpr]) -> Equation:
    """Returns an equation around other jaxprs, in the order of `inner_jaxprs`."""
    pairs = zip(inner_jaxprs(equation), jaxprs, strict=True)
    replaced = {id(open_jaxpr(inner.jaxpr)): jaxpr for inner, jaxpr in pairs}

    # The jaxprs are parameters, or stand in a tuple of one, such as the branches of a `cond`.
    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            parts = map(changed, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return replaced.get(id(open_jaxpr(value)), value)

    return equation.replace(params={name: changed(value) for name, value in equation.params.items()})


# The parameters of a jit or a `shard_map` that have an entry for each operand, or for each result.
_OF_OPERANDS = ("donated_invars", "in_layouts", "in_shardings", "in_specs")
_OF_RESULTS = ("out_layouts", "out_shardings", "out_specs")


def with_repeated(equation: Equation, operands: Sequence[int], results: Sequence[int]) -> Equation:
    """Returns an equation whose parameters fit a call with some of its operands and results once more."""
    if not operands and not results:
        return equation
    indexes = dict.fromkeys(_OF_OPERANDS, operands) | dict.fromkeys(_OF_RESULTS, results)
    changed = {
        name: (*equation.params[name], *(equation.params[name][index] for index in repeated))
        for name, repeated in indexes.items()
        if name in equation.params
    }
    return equation.replace(params=equation.params | changed)


def _called(jaxpr: Jaxpr, first_operand: int) -> Inner:
    inputs, outputs = len(open_jaxpr(jaxpr).invars), len(open_jaxpr(jaxpr).outvars)
    return Inner(
        jaxpr,
        operands=tuple(range(first_operand, first_operand + inputs)),
        roles=(Role.ONCE,) * inputs,
        results=tuple(range(outputs)),
        carries=(False,) * outputs,
    )


def _scan_body(equation: Equation) -> Inner:
    """The body of a scan: its operands are constants, carries and slices, its results carries and slices."""
    # Versions of JAX write the counts in different ways. The ranks tell them: a sliced operand has one more
    # axis outside the body than inside.
    body = equation.params["jaxpr"]
    inside = open_jaxpr(body)
    sliced_in = sum(out.aval.ndim != inner.aval.ndim for out, inner in zip(equation.invars, inside.invars))
    sliced_out = sum(out.aval.ndim != inner.aval.ndim for out, inner in zip(equation.outvars, inside.outvars))
    carry = len(inside.outvars) - sliced_out
    constant = len(inside.invars) - carry - sliced_in
    return Inner(
        body,
        operands=tuple(range(len(inside.invars))),
        roles=(Role.CONSTANT,) * constant + (Role.CARRY,) * carry + (Role.ELEMENT,) * sliced_in,
        results=tuple(range(len(inside.outvars))),
        carries=(True,) * carry + (False,) * sliced_out,
    )


def _while_parts(equation: Equation) -> tuple[Inner, Inner]:
    """The condition and the body of a while loop."""
    params, total = equation.params, len(equation.invars)
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    first_carry = of_condition + of_body
    carry = tuple(range(first_carry, total))

    def part(jaxpr: Jaxpr, constants: range, results: tuple[int | None, ...]) -> Inner:
        roles = (Role.CONSTANT,) * len(constants) + (Role.CARRY,) * len(carry)
        return Inner(
            jaxpr, (*constants, *carry), roles, results, tuple(index is not None for index in results)
        )

    return (
        part(params["cond_jaxpr"], range(of_condition), (None,)),
        part(params["body_jaxpr"], range(of_condition, first_carry), tuple(range(len(carry)))),
    )


def _linear_solve_parts(equation: Equation) -> tuple[Inner, ...]:
    """The matrix of a linear system and its transpose, and the solvers of both: those that there are."""
    # Each takes constants of its own, and a vector. Only derivatives of the system run the matrices.
    lengths, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
    results = tuple(range(len(equation.outvars)))
    vector, first, parts = right_sides(equation), 0, []
    for name, length, jaxpr in zip(lengths._fields, lengths, jaxprs):
        constants = tuple(range(first, first + length))
        first += length
        if jaxpr is not None:
            # The vector is a carry to us: what a solver gives must have its dtype. Behind the solution stand
            # auxiliary results, such as a count of iterations (`has_aux=True`).
            roles = (Role.ONCE,) * length + (Role.CARRY,) * len(vector)
            out = results if name == "solve" else (None,) * len(open_jaxpr(jaxpr).outvars)
            carries = (True,) * len(vector) + (False,) * (len(out) - len(vector))
            scope = SOLVER_SCOPE if name in ("solve", "transpose_solve") else ""
            parts.append(Inner(jaxpr, constants + vector, roles, out, carries, scope))
    return tuple(parts)


def right_sides(equation: Equation) -> tuple[int, ...]:
    """Returns the operands of a linear solve that are its right side. The first results are its solution."""
    return tuple(range(sum(equation.params["const_lengths"]), len(equation.invars)))

"""Marks: a first estimate of the dtype of each value.

The planner finds the marks before it decides anything. A mark says which values stay float32 in any case. The
backward pass (`demand`) uses the marks: it asks whether an operation can give a half result. A mark says less
than a state. `UNKNOWN` is the mark of a value that may be in half.
"""

import enum
from collections.abc import Sequence

import jax.numpy as jnp

from ..._jaxpr.inner import Role
from ..._jaxpr.primitives import Category, traits_of
from ..._jaxpr.read import Jaxpr, Var, equations, is_float32, is_literal, open_jaxpr
from .op import Course, Op


class Mark(enum.IntEnum):
    """The mark of a value. The result of an element-wise operation has the largest mark of the operands."""

    CONSTANT = 0  # The value is computed from literals alone.
    BINARY = 1  # The value holds only 0 and 1, such as one-hot labels.
    UNKNOWN = 2  # The value may be in half, or take the type of other operands.
    ARGUMENT = 3  # The value is computed from arguments. It is float32 until it is broadcast or looked up.
    FIRM = 4  # The value is computed in float32.
    FULL = 5  # The value is an argument, at most moved. A rule keeps its products in float32.


Marks = dict[Var, Mark]


def mark_of(var: Var, marks: Marks) -> Mark:
    """Returns the mark of a variable or literal."""
    return Mark.CONSTANT if is_literal(var) else marks[var]


def find_marks(inside: Jaxpr, inputs: Sequence[Mark], ops: Sequence[Op], courses: Sequence[Course]) -> Marks:
    """Returns the marks of all variables of an open jaxpr, from those of its constants and inputs."""
    marks = dict(zip((*inside.constvars, *inside.invars), inputs, strict=True))
    for op, course in zip(ops, courses):
        operands = [mark_of(var, marks) for var in op.equation.invars]
        for index, out in enumerate(op.equation.outvars):
            marks[out] = _mark_of_result(op, course, operands, index)
    return marks


def entering(mark: Mark, role: Role, var: Var) -> Mark:
    """Returns the mark of an operand inside the jaxpr that takes it. The carry of a loop keeps its dtype."""
    if role is not Role.CARRY:
        return mark
    return Mark.FIRM if is_float32(var) else Mark.UNKNOWN


def _mark_of_result(op: Op, course: Course, operands: list[Mark], index: int) -> Mark:
    out = op.equation.outvars[index]
    if course.category is Category.CALL:
        carries = (
            carry for inner in op.inner for at, carry in zip(inner.results, inner.carries) if at == index
        )
        if is_float32(out) and any(carries):
            return Mark.FIRM
        return Mark.BINARY if _is_binary(op, index) else Mark.UNKNOWN
    if all(mark is Mark.CONSTANT for mark in operands) and not op.equation.effects:
        return Mark.CONSTANT
    if not is_float32(out):
        return Mark.UNKNOWN
    if op.is_cast:
        (source,) = op.equation.invars
        if is_float32(source):
            return operands[0]
        if source.aval.dtype == jnp.bool_:
            return Mark.BINARY
        return Mark.FIRM if jnp.issubdtype(source.aval.dtype, jnp.floating) else Mark.UNKNOWN
    if course.category is Category.MOVE:
        mark = operands[op.moved_operand(index)]
        return Mark.UNKNOWN if mark is Mark.ARGUMENT and op.frees(out) else mark
    if course.is_half_product and not course.float32_result and Mark.FULL not in operands:
        return Mark.UNKNOWN
    if course.half_sum:
        return Mark.UNKNOWN
    if course.category is Category.INFER and not course.reason:
        widest = [_after_broadcast(op, var, mark) for var, mark in zip(op.equation.invars, operands)]
        return max(Mark.UNKNOWN, min(max(widest), Mark.FIRM))
    return Mark.FIRM


def _is_binary(call: Op, index: int) -> bool:
    """Whether a result of a call holds only 0 and 1, as far as the inner jaxprs alone tell it."""
    return all(
        result != index or _is_cast_from_bool(inner.jaxpr, open_jaxpr(inner.jaxpr).outvars[number])
        for inner in call.inner
        for number, result in enumerate(inner.results)
    )


def _is_cast_from_bool(jaxpr: Jaxpr, var: Var) -> bool:
    made_by = {out: equation for equation in equations(jaxpr) for out in equation.outvars}
    while not is_literal(var) and var in made_by:
        equation = made_by[var]
        if equation.primitive.name == "convert_element_type":
            return equation.invars[0].aval.dtype == jnp.bool_
        if traits_of(equation.primitive.name).category is not Category.MOVE:
            return False
        var = equation.invars[0]
    return False


def _after_broadcast(op: Op, var: Var, mark: Mark) -> Mark:
    freed = mark is Mark.ARGUMENT and op.broadcasts(var)
    return Mark.UNKNOWN if freed or not is_float32(var) else mark

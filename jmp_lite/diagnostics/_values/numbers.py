"""The numbers of a program that half precision rounds away, as the source has them.

JAX rounds a number when it traces: of `x + 1e-8` in float16 the jaxpr has `x + 0`, and no run of the jaxpr in
float32 brings the number back. So the number is read from the source.
"""

import ast
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ..._dtypes import FLOAT8_DTYPES, HALF_DTYPES
from ..._jaxpr import Equation, Jaxpr, Var, all_equations, is_literal, source_line, traits_of
from .source import Written, operands_at

Numbers = Mapping[tuple[str, np.dtype, float], Written]
"""A number as it is written, by the line of its operation, its dtype, and its value in this dtype."""

_EPSILON = Written(1e-8, is_sure=False)
"""Stands for a name whose number is not known, where it is added and is 0 in half: an epsilon."""


def lost_numbers(jaxpr: Jaxpr, given: Mapping[str, float] = MappingProxyType({})) -> Numbers:
    """Returns the numbers that are rounded to 0 or inf, or by more than a few digits.

    `given` are the Python numbers among the arguments of the program, by their paths.
    """
    found: dict[tuple[str, np.dtype, float], Written] = {}
    for equation in all_equations(jaxpr):
        for var in equation.invars:
            if (key := _key(equation, var)) is not None and key not in found:
                number = _in_the_source(*key, equation, given)
                found.update({} if number is None else {key: number})
    return found


def written_number(numbers: Numbers, equation: Equation, var: Var) -> float | None:
    """Returns a half operand of an equation as it is written; None if it is no such number."""
    key = _key(equation, var) if numbers else None
    return None if key is None or key not in numbers else numbers[key].number


def _key(equation: Equation, var: Var) -> tuple[str, np.dtype, float] | None:
    is_half = is_literal(var) and getattr(var.aval, "dtype", None) in (*HALF_DTYPES, *FLOAT8_DTYPES)
    return (source_line(equation), var.aval.dtype, float(var.val)) if is_half else None


def _in_the_source(
    line: str, dtype: np.dtype, value: float, equation: Equation, given: Mapping[str, float]
) -> Written | None:
    """Returns the operand, in the expression that made an equation, that is rounded to `value`."""
    if traits_of(equation.primitive.name).compares:
        return None
    operands = [(node, _given(node, given) or known) for node, known in operands_at(line)]
    numbers = [number for _, known in operands for number in known]
    with np.errstate(over="ignore"):
        same = [each for each in numbers if float(np.asarray(abs(each.number)).astype(dtype)) == abs(value)]
    if same:
        return _nearest(same, value)
    is_name = any(isinstance(node, (ast.Name, ast.Attribute)) and not known for node, known in operands)
    return _EPSILON if value == 0 and equation.primitive.name == "add" and is_name else None


def _given(node: ast.expr, given: Mapping[str, float]) -> list[Written]:
    path = ast.unparse(node).replace(".", "/") if isinstance(node, (ast.Name, ast.Attribute)) else ""
    return [Written(given[path])] if path in given else []


def _nearest(numbers: Sequence[Written], value: float) -> Written | None:
    """Returns the number that is nearest to the range of the dtype; None if `value` itself is written."""
    sizes = [abs(each.number) for each in numbers]
    if abs(value) in sizes:
        return None
    size = min(sizes) if np.isinf(value) else max(sizes)
    return Written(float(np.copysign(size, value)), len(numbers) == 1 and numbers[0].is_sure)

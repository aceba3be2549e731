"""The numbers of a program that half precision rounds away, as the source has them.

JAX rounds a number when it traces: of `x + 1e-8` in float16 the jaxpr has `x + 0`, and no run of the jaxpr in
float32 brings the number back. So the number is read from the source.
"""

import ast
import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ..._dtypes import HALF_DTYPES
from ..._jaxpr import Equation, Jaxpr, Var, all_equations, is_literal, source_line, traits_of
from .sites import NARROW
from .source import Written, operands_at

Key = tuple[str, np.dtype, float, int]
"""The line of an operation, and the dtype, the value and the position of one of its operands."""
Numbers = Mapping[Key, Written]
"""Numbers as they are written."""

_EPSILON = Written(1e-8, is_sure=False)
"""Stands for a name whose number is not known, where it is added and is 0 in half: an epsilon."""


def lost_numbers(jaxpr: Jaxpr, given: Mapping[str, float] = MappingProxyType({})) -> Numbers:
    """Returns the numbers that are rounded to 0 or inf, or by more than a few digits.

    `given` are the Python numbers among the arguments of the program, by their paths.
    """
    found: dict[Key, Written] = {}
    for equation in all_equations(jaxpr):
        for position, var in enumerate(equation.invars):
            if (key := _key(equation, var, position)) is not None and key not in found:
                number = _in_the_source(key, equation, given)
                found.update({} if number is None else {key: number})
    return found


def written(numbers: Numbers, equation: Equation, position: int) -> Written | None:
    """Returns an operand of an equation as it is written; None if it is no number that half rounds."""
    key = _key(equation, equation.invars[position], position) if numbers else None
    return None if key is None else numbers.get(key)


def _key(equation: Equation, var: Var, position: int) -> Key | None:
    dtype: Any = getattr(var.aval, "dtype", None)
    is_known = is_literal(var) and (dtype in NARROW or (dtype == np.float32 and _fits_half(float(var.val))))
    return (source_line(equation), np.dtype(dtype), float(var.val), position) if is_known else None


@functools.lru_cache(maxsize=1024)
def _fits_half(value: float) -> bool:
    with np.errstate(over="ignore"):
        return value in {float(np.asarray(value).astype(half)) for half in HALF_DTYPES}


def _in_the_source(key: Key, equation: Equation, given: Mapping[str, float]) -> Written | None:
    """Returns the operand, in the expression that made an equation, that is rounded to a literal."""
    line, dtype, value, position = key
    if traits_of(equation.primitive.name).compares:
        return None
    operands = [(node, place, _given(node, given) or known) for node, place, known in operands_at(line)]
    is_same = functools.partial(_is_rounded, value=value, dtype=dtype)
    same = [(place, each) for _, place, known in operands for each in filter(is_same, known)]
    if same:
        at_place = [each for place, each in same if place == position]
        return _nearest(at_place or [each for _, each in same], value)
    is_epsilon = value == 0 and dtype in NARROW and equation.primitive.name == "add"
    return _EPSILON if is_epsilon and _has_unknown_name(operands) else None


def _has_unknown_name(operands: Iterable[tuple[ast.expr, int, list[Written]]]) -> bool:
    return any(isinstance(node, (ast.Name, ast.Attribute)) and not known for node, _, known in operands)


def _is_rounded(written: Written, value: float, dtype: np.dtype) -> bool:
    """Whether half precision rounds a number to a literal, but for the sign."""
    # JAX widens a half number that meets float32: the literal is in float32, and rounded.
    dtypes = (dtype,) if dtype in NARROW else HALF_DTYPES if written.line else ()
    with np.errstate(over="ignore"):
        return abs(value) in {abs(float(np.asarray(written.number).astype(half))) for half in dtypes}


def _given(node: ast.expr, given: Mapping[str, float]) -> list[Written]:
    path = ast.unparse(node).replace(".", "/") if isinstance(node, (ast.Name, ast.Attribute)) else ""
    return [Written(given[path])] if path in given else []


def _nearest(numbers: Sequence[Written], value: float) -> Written | None:
    """Returns the number that is nearest to the range of the dtype; None if `value` itself is written."""
    sizes = [abs(each.number) for each in numbers]
    if abs(value) in sizes:
        return None
    size = min(sizes) if np.isinf(value) else max(sizes)
    lines = [each.line for each in numbers if each.line]
    is_sure = len(numbers) == 1 and numbers[0].is_sure
    return Written(float(np.copysign(size, value)), is_sure, line=next(iter(lines), ""))

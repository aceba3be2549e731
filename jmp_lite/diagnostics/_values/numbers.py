"""The numbers of a program that half precision rounds away, as the source has them.

JAX rounds a number when it traces: of `x + 1e-8` in float16 the jaxpr has `x + 0`, and no run of the jaxpr in
float32 brings the number back. So the number is read from the source.
"""

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ..._dtypes import FLOAT8_DTYPES, HALF_DTYPES
from ..._jaxpr import Equation, Jaxpr, Var, all_equations, is_literal, source_line, traits_of
from .source import Written, operands_at

Key = tuple[str, np.dtype, float, int]
"""The line of an operation, and the dtype, the value and the position of one of its operands."""
Numbers = Mapping[Key, Written]
"""Numbers as they are written."""

_EPSILON = Written(1e-8, is_sure=False)
"""Stands for a name whose number is not known, where it is added and is 0 in half: an epsilon."""
_NARROW = (*HALF_DTYPES, *FLOAT8_DTYPES)


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
    is_known = is_literal(var) and (dtype in _NARROW or (dtype == np.float32 and _fits_half(float(var.val))))
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
    same = list(_rounded_to(value, dtype, ((place, each) for _, place, known in operands for each in known)))
    if same:
        at_place = [each for place, each in same if place == position]
        return _nearest(at_place or [each for _, each in same], value)
    is_epsilon = value == 0 and dtype in _NARROW and equation.primitive.name == "add"
    is_name = any(isinstance(node, (ast.Name, ast.Attribute)) and not known for node, _, known in operands)
    return _EPSILON if is_epsilon and is_name else None


def _rounded_to(
    value: float, dtype: np.dtype, numbers: Iterable[tuple[int, Written]]
) -> Iterator[tuple[int, Written]]:
    """Yields the numbers, each with its position, that half precision rounds to a literal."""
    for place, number in numbers:
        # JAX widens a half number that meets float32: the literal is in float32, and rounded.
        if dtype in _NARROW or number.line:
            with np.errstate(over="ignore"):
                if abs(value) in map(abs, _halves(number, dtype)):
                    yield place, number


def _halves(number: Written, dtype: np.dtype) -> set[float]:
    dtypes = (dtype,) if dtype in _NARROW else HALF_DTYPES
    return {float(np.asarray(number.number).astype(half)) for half in dtypes}


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

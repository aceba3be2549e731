"""The numbers of a program that half precision rounds away, as the source has them.

JAX rounds a number when it traces: of `x + 1e-8` in float16 the jaxpr has `x + 0`, and no run of the jaxpr in
float32 brings the number back. So the number is read from the line of the source.
"""

import linecache
import math
import re
from collections.abc import Mapping

import numpy as np

from ..._dtypes import FLOAT8_DTYPES, HALF_DTYPES
from ..._jaxpr import Category, Equation, Jaxpr, Var, all_equations, is_literal, source_line, traits_of

Numbers = Mapping[tuple[str, np.dtype, float], float]
"""A number as it is written, by the line of its operation, its dtype, and its value in this dtype."""

_NUMBER = re.compile(r"(?<![\w.])(?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?", re.IGNORECASE)
_EPSILON = 1e-8
"""Stands for a number that is not on the line, such as the epsilon of an optimizer, where a 0 is added."""


def lost_numbers(jaxpr: Jaxpr) -> Numbers:
    """Returns the numbers that are rounded to 0 or inf, or by more than a few digits."""
    found: dict[tuple[str, np.dtype, float], float] = {}
    for equation in all_equations(jaxpr):
        for var in equation.invars:
            if (key := _key(equation, var)) is not None and key not in found:
                number = _on_the_line(*key, equation)
                found.update({} if number is None else {key: number})
    return found


def written_number(numbers: Numbers, equation: Equation, var: Var) -> float | None:
    """Returns a half operand of an equation as it is written; None if it is no such number."""
    key = _key(equation, var) if numbers else None
    return None if key is None else numbers.get(key)


def _key(equation: Equation, var: Var) -> tuple[str, np.dtype, float] | None:
    is_half = is_literal(var) and getattr(var.aval, "dtype", None) in (*HALF_DTYPES, *FLOAT8_DTYPES)
    return (source_line(equation), var.aval.dtype, float(var.val)) if is_half else None


def _on_the_line(line: str, dtype: np.dtype, value: float, equation: Equation) -> float | None:
    """Returns the number that is rounded to `value`: on the line, or for inf in the function above it."""
    name = equation.primitive.name
    traits = traits_of(name)
    if traits.compares or name in ("max", "min"):
        return None  # A softmax starts its maximum with -inf, and compares with it.
    is_arithmetic = traits.category is not Category.MOVE and not traits.selects
    if value == 0 and not is_arithmetic:
        return None  # The 0 of `jnp.where(mask, x, 0)`, on a line that has an epsilon as well.
    where, _, _ = line.partition(" ")
    file, number, column = [*where.split(":"), "", ""][:3]
    row = int(number) if number.isdigit() else 0
    lost = _lost(_expression(linecache.getline(file, row), int(column or 0)), dtype, value)
    if not lost and math.isinf(value) and is_arithmetic:
        lost = _lost_above(file, row, dtype, value)
    if lost:  # Of several the one that is nearest to the range of the dtype.
        return float(np.copysign(min(lost) if math.isinf(value) else max(lost), value))
    return _EPSILON if value == 0 and name == "add" else None


def _lost_above(file: str, row: int, dtype: np.dtype, value: float) -> set[float]:
    """Returns the numbers that are rounded to `value` on the nearest such line above, within the function."""
    for above in range(row - 1, 0, -1):
        text = linecache.getline(file, above)
        lost = _lost(text, dtype, value)
        if lost or text.lstrip().startswith(("def ", "class ")):
            return lost
    return set()


def _expression(line: str, column: int) -> str:
    """Returns the expression that begins in a column, from 0: up to a comma or bracket that ends it."""
    depth = 0
    for index, letter in enumerate(line[column:], column):
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0 or (letter == "," and not depth):
            return line[column:index]
    return line[column:]


def _lost(text: str, dtype: np.dtype, value: float) -> set[float]:
    """Returns the numbers in a text that are rounded to `value`; none if `value` itself is among them."""
    written = {float(number.replace("_", "")) for number in _NUMBER.findall(text)}
    with np.errstate(over="ignore"):
        same = {number for number in written if float(np.asarray(number).astype(dtype)) == abs(value)}
    return set() if value and abs(value) in same else same - {0.0}

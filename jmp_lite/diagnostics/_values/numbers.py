"""The numbers of a program that half precision rounds away, as the source has them."""

import ast
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..._dtypes import HALF_DTYPES
from ..._jaxpr import Category, Equation, Jaxpr, Var, all_equations, is_literal, source_line, traits_of
from .sites import NARROW
from .source import FUNCTIONS, Source, assigned, defaults_of, expressions_at, operands_of

Key = tuple[str, np.dtype, float, int]
"""The line of an operation, and the dtype, the value and the position of one of its operands."""


class Written(NamedTuple):
    """A number in the source."""

    number: float
    is_sure: bool = True  # False for a default, in whose place a caller may give another number.
    line: str = ""  # Where the source converts it to half, so that it is rounded in a float32 program too.


Numbers = Mapping[Key, Written]
"""Numbers as they are written."""

_OPERATOR_OF = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div, "pow": ast.Pow}
"""The operator that makes an operation, by its primitive."""
_EPSILON = Written(1e-8, is_sure=False)
"""Stands for a name whose number is not known, where it is added and is 0 in half: an epsilon."""


def lost_numbers(jaxpr: Jaxpr, given: Mapping[str, float] = MappingProxyType({})) -> Numbers:
    """Returns the numbers that are rounded to 0 or inf, or by more than a few digits.

    `given` are the Python numbers among the arguments of the program, by their paths.
    """
    # JAX rounds a number when it traces: of `x + 1e-8` in float16 the jaxpr has `x + 0`, and no run of the
    # jaxpr in float32 brings the number back. So it is read from the source: a constant, a name, an attribute
    # or a default.
    found: dict[Key, Written] = {}
    for equation in all_equations(jaxpr):
        for position, var in enumerate(equation.invars):
            if (key := _key(equation, var, position)) is not None and key not in found:
                number = _in_the_source(key, equation, given)
                found.update({} if number is None else {key: number})
    return found


def unread_numbers(jaxpr: Jaxpr) -> list[str]:
    """Returns the lines that convert a number to half which they do not say, such as a parameter."""
    lines: dict[str, None] = {}
    for equation in all_equations(jaxpr):
        for position, var in enumerate(equation.invars):
            if is_literal(var) and getattr(var.aval, "dtype", None) in NARROW:
                lines |= dict.fromkeys(_unread(equation, position))
    return [*lines]


def _unread(equation: Equation, position: int) -> Iterator[str]:
    line = source_line(equation)
    source, nodes = expressions_at(line)
    if source is None:
        return
    is_call = traits_of(equation.primitive.name).category is Category.CALL
    # An inner function takes a number of the one around it. A whole number is no rounded one.
    if is_call and not float(equation.invars[position].val).is_integer():
        yield line.partition(" ")[0]
    # A function such as `jax.nn.relu` computes with numbers of its own.
    kind = _OPERATOR_OF.get(equation.primitive.name, ())
    operators = (node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, kind))
    for operand in (operands_of(node)[position] for node in operators):
        *_, value = (operand, *(source.values_of(operand) if isinstance(operand, ast.Name) else ()))
        if isinstance(value, ast.Call) and source.makes_half(value) and not _known(source).numbers(value):
            yield source.place(value)


def written(numbers: Numbers, equation: Equation, position: int) -> Written | None:
    """Returns an operand of an equation as it is written; None if it is no number that half rounds."""
    key = _key(equation, equation.invars[position], position) if numbers else None
    return numbers.get(key) if key else None


def all_written(numbers: Numbers, equation: Equation) -> list[Written]:
    """Returns all operands of an equation that are numbers which half rounds."""
    found = (written(numbers, equation, position) for position in range(len(equation.invars)))
    return [number for number in found if number is not None]


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
    compares = traits_of(equation.primitive.name).compares
    found = _operands_at(line, compares)
    operands = [(node, place, _given(node, given) or known) for node, place, known in found]
    is_same = functools.partial(_is_rounded, value=value, dtype=dtype)
    # Of the numbers in the expression, those that half rounds to the literal of the jaxpr.
    same = [(place, each) for _, place, known in operands for each in filter(is_same, known)]
    if same:
        return _nearest(_at(position, same), value)
    # The only guess: what is added, has no known value and is 0 in half, is an epsilon.
    is_epsilon = value == 0 and dtype in NARROW and equation.primitive.name == "add"
    has_unknown_name = any(_is_name(node) and not known for node, _, known in operands)
    return _EPSILON if is_epsilon and has_unknown_name else None


def _at(position: int, numbers: Sequence[tuple[int, Written]]) -> list[Written]:
    """Returns the numbers at a position; if there are none, those at all positions."""
    # The arguments of a function need not be in the order of the operands of its primitive.
    return [each for place, each in numbers if place == position] or [each for _, each in numbers]


def _given(node: ast.expr, given: Mapping[str, float]) -> list[Written]:
    path = ast.unparse(node).replace(".", "/") if _is_name(node) else ""
    return [Written(given[path])] if path in given else []


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute))


def _is_rounded(written: Written, value: float, dtype: np.dtype) -> bool:
    """Whether half precision rounds a number to a literal, but for the sign."""
    # JAX widens a half number that meets float32: the literal is in float32, and rounded.
    dtypes = (dtype,) if dtype in NARROW else HALF_DTYPES if written.line else ()
    with np.errstate(over="ignore"):
        return abs(value) in {abs(float(np.asarray(written.number).astype(half))) for half in dtypes}


def _nearest(numbers: Sequence[Written], value: float) -> Written | None:
    """Returns the number that is nearest to the range of the dtype; None if `value` itself is written."""
    sizes = [abs(each.number) for each in numbers]
    if abs(value) in sizes:
        return None
    size = min(sizes) if np.isinf(value) else max(sizes)
    lines = [each.line for each in numbers if each.line]
    is_sure = len(numbers) == 1 and numbers[0].is_sure
    return Written(float(np.copysign(size, value)), is_sure, line=next(iter(lines), ""))


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
# The last names of functions that return their first argument as a number or an array.
_CONVERSIONS = ("float", "array", "asarray", "float16", "bfloat16", "float32", "float64")


class _Known:
    """The numbers that the expressions of a file may have."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._found: dict[ast.expr, list[Written]] = {}  # The numbers of the expressions so far.
        self._open: set[ast.expr] = set()  # The names whose numbers are being looked for.

    def numbers(self, node: ast.expr) -> list[Written]:
        """Returns the numbers that an expression may have; none if it is not known."""
        if node not in self._found:
            try:
                self._found[node] = list(self._numbers(node))
            except (ArithmeticError, RecursionError, TypeError, ValueError):
                self._found[node] = []  # Also of a name that is computed from itself, in `x = x + 1`.
        return self._found[node]

    def _numbers(self, node: ast.expr) -> Iterator[Written]:
        match node:
            case ast.Constant(value=bool()):  # Python's booleans are integers.
                return
            case ast.Constant(value=int() | float() as value):
                yield Written(float(value))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                yield from (written._replace(number=-written.number) for written in self._numbers(operand))
            case ast.BinOp(op=op) if type(op) in _OPERATORS:
                yield from self._computed(node, _OPERATORS[type(op)])
            case (
                ast.Call(func=ast.Attribute(value=value, attr="astype"))
                | ast.Call(func=ast.Attribute(attr="full"), args=[_, value, *_])
            ):
                yield from self._converted(node, value)
            case ast.Call(func=func, args=[value, *_]) if self._is_conversion(func):
                yield from self._converted(node, value)
            case ast.Name():
                yield from self._named(node)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield from self._of_self(name, self._source.around[node])
            case ast.Attribute():
                yield from _number_of(self._source.value_of(ast.unparse(node)))

    def _computed(self, node: ast.BinOp, compute: Callable[[float, float], float]) -> Iterator[Written]:
        for one, other in itertools.product(self._numbers(node.left), self._numbers(node.right)):
            number = float(compute(one.number, other.number))
            yield Written(number, one.is_sure and other.is_sure, one.line or other.line)

    def _converted(self, call: ast.Call, argument: ast.expr) -> Iterator[Written]:
        """Yields the numbers of a conversion, with its line if that is one to half."""
        is_to_half = self._source.is_half_dtype(call.func) or self._source.makes_half(call)
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield Written(float(argument.value))
        for written in self._numbers(argument):
            line = self._source.line(call) if is_to_half else written.line
            yield written._replace(line=line)

    def _named(self, node: ast.Name) -> Iterator[Written]:
        # A name that is computed from itself. Python's own limit of recursion is reached too late, after a
        # thousand searches.
        if node in self._open:
            raise RecursionError
        self._open.add(node)
        try:
            yield from self._of_name(node.id, self._source.around[node])
        finally:
            self._open.remove(node)

    def _of_name(self, name: str, around: Sequence[ast.AST]) -> Iterator[Written]:
        for function in around:
            if not isinstance(function, FUNCTIONS):
                continue
            # The innermost function that assigns the name, or has it as a parameter, decides.
            if values := assigned(function, ast.Name, name):
                yield from (number for value in values for number in self._numbers(value))
                return
            defaults = defaults_of(function)
            if name in defaults:
                default = defaults[name]
                # A parameter without a default may be any number.
                yield from () if default is None else self._unsure(default)
                return
        yield from _number_of(self._source.value_of(name))

    def _of_self(self, name: str, around: Sequence[ast.AST]) -> Iterator[Written]:
        """Yields the numbers that a class gives to an attribute, in its body or its methods."""
        of_class = next((node for node in around if isinstance(node, ast.ClassDef)), None)
        if of_class is not None:
            values = (*assigned(of_class, ast.Name, name), *assigned(of_class, ast.Attribute, name))
            yield from (number for value in values for number in self._unsure(value))

    def _unsure(self, node: ast.expr) -> Iterator[Written]:
        return (written._replace(is_sure=False) for written in self._numbers(node))

    def _is_conversion(self, func: ast.expr) -> bool:
        name = ast.unparse(func)
        if name.rpartition(".")[2] in _CONVERSIONS:
            return True
        return getattr(self._source.value_of(name), "dtype", None) is not None  # Such as `F16 = jnp.float16`.


@functools.lru_cache(maxsize=16)
def _known(source: Source) -> _Known:
    return _Known(source)


def _operands_at(line: str, compares: bool) -> list[tuple[ast.expr, int, list[Written]]]:
    """Returns the operands of the expressions that begin at `file.py:12:4`: position and numbers of each.

    They are those of comparisons, or of all others.
    """
    source, nodes = expressions_at(line)
    nodes = [node for node in nodes if isinstance(node, ast.Compare) == compares]
    if source is None:
        return []
    numbers = _known(source).numbers
    return [(part, place, numbers(part)) for node in nodes for place, part in enumerate(operands_of(node))]


def _number_of(value: Any) -> list[Written]:
    is_number = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    return [Written(float(value))] if is_number else []

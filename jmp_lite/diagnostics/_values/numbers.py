"""The numbers of a program that half precision rounds away, as the source has them."""

import ast
import functools
import itertools
import linecache
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..._dtypes import HALF_DTYPES
from ..._jaxpr import Equation, Jaxpr, Var, all_equations, is_literal, source_line, traits_of
from .sites import NARROW

Key = tuple[str, np.dtype, float, int]
"""The line of an operation, and the dtype, the value and the position of one of its operands."""


class Written(NamedTuple):
    """A number in the source."""

    number: float
    is_sure: bool = True  # False for a default, in whose place a caller may give another number.
    line: str = ""  # Where the source converts it to half, so that it is rounded in a float32 program too.


Numbers = Mapping[Key, Written]
"""Numbers as they are written."""

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


def written(numbers: Numbers, equation: Equation, position: int) -> Written | None:
    """Returns an operand of an equation as it is written; None if it is no number that half rounds."""
    key = _key(equation, equation.invars[position], position) if numbers else None
    return numbers.get(key) if key else None


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
    operands = [(node, place, _given(node, given) or known) for node, place, known in _operands_at(line)]
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
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_DTYPE_AT = {
    "astype": 0,
    "asarray": 1,
    "array": 1,
    "convert_element_type": 1,
    "zeros": 1,
    "ones": 1,
    "full": 2,
}
"""Where the functions that make arrays of a dtype take it, if not as `dtype=`."""


class _Source:
    """The expressions of a file, and the numbers that they may have."""

    def __init__(self, file: str, text: str) -> None:
        self._file = file
        self.nodes: dict[tuple[int, int], list[ast.AST]] = {}  # The expressions that begin at a place.
        self._around: dict[ast.AST, list[ast.AST]] = {}  # The functions and classes, inner first.
        self._known: dict[ast.expr, list[Written]] = {}  # The numbers of the expressions so far.
        self._open: set[ast.expr] = set()  # The names whose numbers are being looked for.
        self._visit(ast.parse(text), [])

    def _visit(self, node: ast.AST, around: list[ast.AST]) -> None:
        self._around[node] = around
        if isinstance(node, (ast.BinOp, ast.Call, ast.AugAssign)):
            self.nodes.setdefault((node.lineno, node.col_offset), []).append(node)
        inside = [node, *around] if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) else around
        for child in ast.iter_child_nodes(node):
            self._visit(child, inside)

    def numbers(self, node: ast.expr) -> list[Written]:
        """Returns the numbers that an expression may have; none if it is not known."""
        if node not in self._known:
            try:
                self._known[node] = list(self._numbers(node))
            except (ArithmeticError, RecursionError, TypeError, ValueError):
                self._known[node] = []  # Also of a name that is computed from itself, in `x = x + 1`.
        return self._known[node]

    def _numbers(self, node: ast.expr) -> Iterator[Written]:
        match node:
            case ast.Constant(value=bool()):  # Python's booleans are integers.
                return
            case ast.Constant(value=int() | float() as value):
                yield Written(float(value))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                yield from (written._replace(number=-written.number) for written in self._numbers(operand))
            case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
                compute = _OPERATORS[type(op)]
                for one, other in itertools.product(self._numbers(left), self._numbers(right)):
                    number = float(compute(one.number, other.number))
                    yield Written(number, one.is_sure and other.is_sure, one.line or other.line)
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
                yield from self._of_self(name, self._around[node])
            case ast.Attribute():
                yield from _number_of(self._global(ast.unparse(node)))

    def _converted(self, call: ast.Call, argument: ast.expr) -> Iterator[Written]:
        """Yields the numbers of a conversion, with its line if that is one to half."""
        is_to_half = self.is_half_dtype(call.func) or self.makes_half(call)
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield Written(float(argument.value))
        for written in self._numbers(argument):
            line = f"{self._file}:{call.lineno}:{call.col_offset}" if is_to_half else written.line
            yield written._replace(line=line)

    def _named(self, node: ast.Name) -> Iterator[Written]:
        # A name that is computed from itself. Python's own limit of recursion is reached too late, after a
        # thousand searches.
        if node in self._open:
            raise RecursionError
        self._open.add(node)
        try:
            yield from self._of_name(node.id, self._around[node])
        finally:
            self._open.remove(node)

    def _of_name(self, name: str, around: Sequence[ast.AST]) -> Iterator[Written]:
        for function in around:
            if not isinstance(function, _FUNCTIONS):
                continue
            # The innermost function that assigns the name, or has it as a parameter, decides.
            if values := _assigned(function, ast.Name, name):
                yield from (number for value in values for number in self._numbers(value))
                return
            defaults = _defaults(function)
            if name in defaults:
                default = defaults[name]
                # A parameter without a default may be any number.
                yield from () if default is None else self._unsure(default)
                return
        yield from _number_of(self._global(name))

    def _of_self(self, name: str, around: Sequence[ast.AST]) -> Iterator[Written]:
        """Yields the numbers that a class gives to an attribute, in its body or its methods."""
        of_class = next((node for node in around if isinstance(node, ast.ClassDef)), None)
        if of_class is not None:
            values = (*_assigned(of_class, ast.Name, name), *_assigned(of_class, ast.Attribute, name))
            yield from (number for value in values for number in self._unsure(value))

    def _unsure(self, node: ast.expr) -> Iterator[Written]:
        return (written._replace(is_sure=False) for written in self._numbers(node))

    def _is_conversion(self, func: ast.expr) -> bool:
        name = ast.unparse(func)
        if name.rpartition(".")[2] in _CONVERSIONS:
            return True
        return getattr(self._global(name), "dtype", None) is not None  # Such as `F16 = jnp.float16`.

    def makes_half(self, call: ast.Call) -> bool:
        """Whether a call takes a half dtype, or a dtype that has another name here, such as `self.dtype`."""
        at = _DTYPE_AT.get(ast.unparse(call.func).rpartition(".")[2])
        named = [keyword.value for keyword in call.keywords if keyword.arg == "dtype"]
        dtypes = [*(call.args[at : at + 1] if at is not None else ()), *named]
        return any(map(self.is_half_dtype, _operands(call))) or any(map(self._is_other_name, dtypes))

    def is_half_dtype(self, node: ast.expr) -> bool:
        dtype, last = self._dtype(node)
        return dtype in HALF_DTYPES or last in ("float16", "bfloat16")

    def _is_other_name(self, node: ast.expr) -> bool:
        """Whether a dtype has a name whose value is not known here, and is not that of another array."""
        if isinstance(node, ast.Name):
            functions = (function for function in self._around[node] if isinstance(function, _FUNCTIONS))
            values = [value for function in functions for value in _assigned(function, ast.Name, node.id)]
            return self._dtype(node)[0] is None and not any(map(_is_of_array, values))
        return isinstance(node, ast.Attribute) and self._dtype(node)[0] is None and not _is_of_array(node)

    def _dtype(self, node: ast.expr) -> tuple[Any, str]:
        """Returns the dtype that an expression stands for in the module, or None, and its last name."""
        text = node.value if isinstance(node, ast.Constant) else ast.unparse(node)
        dtype = getattr(self._global(text), "dtype", None) if isinstance(text, str) else None
        return dtype, str(text).rpartition(".")[2]

    @functools.cached_property
    def _module(self) -> Any:
        # A list, since another thread may import while this runs. A cell of a notebook belongs to `__main__`.
        modules = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == self._file)
        return next(modules, sys.modules.get("__main__"))

    def _global(self, name: str) -> Any:
        """Returns what a name with dots stands for in the module of the file; None if it is not known."""
        value: Any = self._module
        for part in name.split("."):
            value = getattr(value, part, None)
        return value


@functools.lru_cache(maxsize=16)
def _parsed(file: str, text: str) -> _Source | None:
    try:
        return _Source(file, text)
    except (SyntaxError, ValueError, RecursionError):  # A cell of a notebook with magic commands.
        return None


def makes_half(line: str) -> bool:
    """Whether a call that begins at `file.py:12:4` takes a half dtype, as `x.astype(jnp.float16)` does."""
    source, nodes = _expressions_at(line)
    return source is not None and any(source.makes_half(node) for node in nodes if isinstance(node, ast.Call))


def _operands_at(line: str) -> list[tuple[ast.expr, int, list[Written]]]:
    """Returns the operands of the expressions that begin at `file.py:12:4`: position and numbers of each."""
    source, nodes = _expressions_at(line)
    operands = (enumerate(_operands(node)) for node in nodes)
    return [(part, place, source.numbers(part)) for each in operands for place, part in each if source]


def _expressions_at(line: str) -> tuple[_Source | None, list[ast.AST]]:
    """Returns the source of a file, and the expressions that begin at `file.py:12:4 (function)`."""
    file, row, column = [*line.partition(" ")[0].split(":"), "", "0"][:3]
    # `linecache` also has the cells of a notebook, which are no files.
    text = "".join(linecache.getlines(file)) if row.isdigit() else ""
    source = _parsed(file, text) if text else None
    return source, source.nodes.get((int(row), int(column or 0)), []) if source else []


def _operands(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.Call(args=args, keywords=keywords):
            return [*args, *(keyword.value for keyword in keywords)]
        case ast.AugAssign(value=value):
            return [value]
    return []


def _is_of_array(node: ast.expr) -> bool:
    """Whether an expression is the dtype of an array, as in `x.astype(y.dtype)`: it follows that array."""
    # A layer keeps its dtype in `self.dtype`.
    return isinstance(node, ast.Attribute) and node.attr == "dtype" and ast.unparse(node.value) != "self"


@functools.lru_cache(maxsize=256)  # A long function assigns some names again and again.
def _assigned(inside: ast.AST, kind: type, name: str) -> tuple[ast.expr, ...]:
    """Returns the values that a function or class assigns to a name, or to an attribute of that name."""
    values = []
    for node in ast.walk(inside):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)

        def is_target(each):
            return isinstance(each, kind) and name in (getattr(each, "id", ""), getattr(each, "attr", ""))

        if isinstance(value, ast.expr) and any(map(is_target, targets)):
            values.append(value)
    return tuple(values)


def _defaults(function: Any) -> dict[str, ast.expr | None]:
    """Returns the parameters of a function, each with its default or None."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    missing = [None] * (len(positional) - len(args.defaults))
    pairs = (*zip(positional, [*missing, *args.defaults]), *zip(args.kwonlyargs, args.kw_defaults))
    return {parameter.arg: default for parameter, default in pairs}


def _number_of(value: Any) -> list[Written]:
    is_number = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    return [Written(float(value))] if is_number else []

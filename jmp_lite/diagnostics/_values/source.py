"""The numbers that are written in the source of a program: constants, names, attributes and defaults.

Nothing is guessed: an expression whose number is neither in the source nor in the globals of its module has
none.
"""

import ast
import functools
import itertools
import linecache
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._dtypes import HALF_DTYPES

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_CONVERSIONS = ("float", "array", "asarray", "float16", "bfloat16", "float32", "float64")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Written(NamedTuple):
    """A number in the source."""

    number: float
    is_sure: bool = True  # False for a default, in whose place a caller may give another number.
    line: str = ""  # Where the source converts it to half, so that it is rounded in a float32 program too.


class Source:
    def __init__(self, file: str, text: str) -> None:
        self._file = file
        self._nodes: dict[tuple[int, int], list[ast.AST]] = {}  # The expressions that begin at a place.
        self._around: dict[
            ast.AST, list[ast.AST]
        ] = {}  # The functions and classes around a node, inner first.
        self._known: dict[ast.expr, list[Written]] = {}  # The numbers of the expressions so far.
        self._following: list[tuple[ast.AST, str]] = []  # The names whose numbers are looked for.
        self._visit(ast.parse(text), [])

    def _visit(self, node: ast.AST, around: list[ast.AST]) -> None:
        self._around[node] = around
        if isinstance(node, (ast.BinOp, ast.Call, ast.AugAssign)):
            self._nodes.setdefault((node.lineno, node.col_offset), []).append(node)
        inside = [node, *around] if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) else around
        for child in ast.iter_child_nodes(node):
            self._visit(child, inside)

    def expressions(self, line: int, column: int) -> list[ast.AST]:
        """Returns the operations and calls that begin at a place."""
        return self._nodes.get((line, column), [])

    def makes_half(self, line: int, column: int) -> bool:
        """Whether one of the calls that begin at a place takes a half dtype."""
        calls = (node for node in self.expressions(line, column) if isinstance(node, ast.Call))
        return any(map(self._is_half_dtype, (part for call in calls for part in _operands(call))))

    def numbers(self, node: ast.expr) -> list[Written]:
        """Returns the numbers that an expression may have; none if it is not known."""
        if node not in self._known:
            try:
                self._known[node] = list(self._numbers(node))
            except (ArithmeticError, RecursionError, TypeError, ValueError):
                self._known[node] = []
            self._following.clear()
        return self._known[node]

    def _numbers(self, node: ast.expr) -> Iterator[Written]:
        match node:
            case ast.Constant(value=bool()):
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
            case ast.Call(func=func, args=[_, *_]) if self._is_conversion(func):
                yield from self._converted(node)
            case ast.Name(id=name):
                yield from self._of_name(name, self._around[node])
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield from self._of_self(name, self._around[node])
            case ast.Attribute():
                yield from _number_of(self._global(ast.unparse(node)))

    def _converted(self, call: ast.Call) -> Iterator[Written]:
        """Yields the numbers of a conversion, with its line if that is one to half."""
        argument, *more = call.args
        dtypes = [call.func, *more, *(keyword.value for keyword in call.keywords)]
        is_to_half = any(map(self._is_half_dtype, dtypes))
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield Written(float(argument.value))
        for written in self._numbers(argument):
            line = f"{self._file}:{call.lineno}:{call.col_offset}" if is_to_half else written.line
            yield written._replace(line=line)

    def _of_name(self, name: str, around: Sequence[ast.AST]) -> Iterator[Written]:
        for function in around:
            if not isinstance(function, _FUNCTIONS):
                continue
            if values := list(_assigned(function, ast.Name, name)):
                if (function, name) not in self._following:  # Not in `x = x + 1`.
                    self._following.append((function, name))
                    yield from [number for value in values for number in self._numbers(value)]
                    self._following.pop()
                return
            defaults = _defaults(function)
            if name in defaults:
                default = defaults[name]
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

    def _is_half_dtype(self, node: ast.expr) -> bool:
        text = node.value if isinstance(node, ast.Constant) else ast.unparse(node)
        dtype = getattr(self._global(text), "dtype", None) if isinstance(text, str) else None
        return dtype in HALF_DTYPES or str(text).rpartition(".")[2] in ("float16", "bfloat16")

    @functools.cached_property
    def _module(self) -> Any:
        modules = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == self._file)
        return next(modules, sys.modules.get("__main__"))

    def _global(self, name: str) -> Any:
        """Returns what a name with dots stands for in the module of the file; None if it is not known."""
        value: Any = self._module
        for part in name.split("."):
            value = getattr(value, part, None)
        return value


@functools.lru_cache(maxsize=16)
def _parsed(file: str, text: str) -> Source | None:
    try:
        return Source(file, text)
    except (SyntaxError, ValueError, RecursionError):  # A cell of a notebook with magic commands.
        return None


def makes_half(line: str) -> bool:
    """Whether a call that begins at `file.py:12:4` takes a half dtype, as `x.astype(jnp.float16)` does."""
    source, row, column = _source_of(line)
    return source is not None and source.makes_half(row, column)


def operands_at(line: str) -> list[tuple[ast.expr, int, list[Written]]]:
    """Returns the operands of the expressions that begin at `file.py:12:4`: position and numbers of each."""
    source, row, column = _source_of(line)
    if source is None:
        return []
    operands = (enumerate(_operands(node)) for node in source.expressions(row, column))
    return [(part, position, source.numbers(part)) for each in operands for position, part in each]


def _source_of(line: str) -> tuple[Source | None, int, int]:
    """Returns the source of a file, the line and the column, for `file.py:12:4 (function)`."""
    file, row, column = [*line.partition(" ")[0].split(":"), "", "0"][:3]
    text = "".join(linecache.getlines(file)) if row.isdigit() else ""
    return (_parsed(file, text), int(row), int(column or 0)) if text else (None, 0, 0)


def _operands(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.Call(args=args, keywords=keywords):
            return [*args, *(keyword.value for keyword in keywords)]
        case ast.AugAssign(value=value):
            return [value]
    return []


def _assigned(inside: ast.AST, kind: type, name: str) -> Iterator[ast.expr]:
    """Yields what is assigned to a name, or to an attribute of that name, inside a function or class."""
    for node in ast.walk(inside):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        is_target = lambda each: (
            isinstance(each, kind) and name in (getattr(each, "id", ""), getattr(each, "attr", ""))
        )
        if isinstance(value, ast.expr) and any(map(is_target, targets)):
            yield value


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

"""Reads the source of a program: its expressions, and which of them convert to half precision."""

import ast
import collections
import functools
import linecache
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..._dtypes import HALF_DTYPES
from ..._jaxpr import Span

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
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


class Source:
    """The expressions of a file. `nodes` has those that begin at a place, as `(line, column)`."""

    def __init__(self, file: str, text: str) -> None:
        self._file = file
        self.nodes: dict[tuple[int, int], list[ast.AST]] = {}
        self.around: dict[ast.AST, list[ast.AST]] = {}  # The functions and classes, inner first.
        self.functions: dict[str, list[Any]] = collections.defaultdict(list)  # By their names.
        self._visit(ast.parse(text), [])

    def _visit(self, node: ast.AST, around: list[ast.AST]) -> None:
        self.around[node] = around
        if isinstance(node, (ast.BinOp, ast.Call, ast.Compare, ast.AugAssign, ast.Subscript)):
            self.nodes.setdefault((node.lineno, node.col_offset), []).append(node)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.functions[node.name].append(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            self.functions[ast.unparse(node.targets[0])].append(node.value)
        inside = [node, *around] if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else around
        for child in ast.iter_child_nodes(node):
            self._visit(child, inside)

    def place(self, node: ast.expr) -> str:
        """Returns where an expression begins, as `file.py:12:4`."""
        return f"{self._file}:{node.lineno}:{node.col_offset}"

    def span(self, node: ast.AST) -> Span:
        """Returns the file of an expression, and where it begins and ends."""
        return span_of(self._file, node)

    def functions_around(self, node: ast.AST) -> list[Any]:
        """Returns the functions around an expression, inner first."""
        return [each for each in self.around[node] if isinstance(each, FUNCTIONS)]

    def values_of(self, node: ast.Name) -> Sequence[ast.expr]:
        """Returns what the innermost function that assigns a name gives to it."""
        functions = self.functions_around(node)
        return next(filter(None, (assigned(each, ast.Name, node.id) for each in functions)), ())

    def name_of(self, functions: Sequence[Any]) -> str:
        """Returns the qualified name of the first of the functions around an expression, as Python has it."""
        if not functions:
            return "<module>"
        own = getattr(functions[0], "name", "<lambda>")
        inside = self.around[functions[0]]
        names = [f"{each.name}." if isinstance(each, ast.ClassDef) else "" for each in inside[:1]]
        outer = [f"{self.name_of(functions[1:])}.<locals>."] if functions[1:] else []
        return "".join([*outer, *names, own])

    def line(self, node: ast.expr) -> str:
        """Returns the same with the function around it, as `file.py:12:4 (function)`."""
        return f"{self.place(node)} ({self.name_of(self.functions_around(node))})"

    def makes_half(self, call: ast.Call) -> bool:
        """Whether a call takes a half dtype, or a dtype that has another name here, such as `self.dtype`."""
        return any(map(self.is_half_dtype, operands_of(call))) or bool(self.other_names(call))

    def other_names(self, call: ast.Call) -> list[ast.expr]:
        """Returns the dtypes of a call that have another name here, such as `self.dtype`."""
        return list(filter(self._is_other_name, self.dtypes_of(call)))

    def dtypes_of(self, call: ast.Call) -> list[ast.expr]:
        """Returns the arguments of a call at the places of dtypes, as `y.dtype` in `x.astype(y.dtype)`."""
        at = _DTYPE_AT.get(ast.unparse(call.func).rpartition(".")[2])
        named = [keyword.value for keyword in call.keywords if keyword.arg == "dtype"]
        return [*(call.args[at : at + 1] if at is not None else ()), *named]

    def is_half_dtype(self, node: ast.expr) -> bool:
        return bool(self.half_name(node))

    def half_name(self, node: ast.expr) -> str:
        """Returns the name of a half dtype; empty for another expression."""
        dtype, last = self._dtype(node)
        return dtype.name if dtype in HALF_DTYPES else last if last in ("float16", "bfloat16") else ""

    def _is_other_name(self, node: ast.expr) -> bool:
        """Whether a dtype has a name whose value is not known here, and is not that of another array."""
        if isinstance(node, ast.Name):
            functions = (function for function in self.around[node] if isinstance(function, FUNCTIONS))
            values = [value for function in functions for value in assigned(function, ast.Name, node.id)]
            return self._dtype(node)[0] is None and not any(map(_is_of_array, values))
        return isinstance(node, ast.Attribute) and self._dtype(node)[0] is None and not _is_of_array(node)

    def _dtype(self, node: ast.expr) -> tuple[Any, str]:
        """Returns the dtype that an expression stands for in the module, or None, and its last name."""
        text = node.value if isinstance(node, ast.Constant) else ast.unparse(node)
        dtype = getattr(self.value_of(text), "dtype", None) if isinstance(text, str) else None
        # A class may have a dtype too, as a layer has.
        return dtype if isinstance(dtype, np.dtype) else None, str(text).rpartition(".")[2]

    @functools.cached_property
    def _module(self) -> Any:
        # A list, since another thread may import while this runs. A cell of a notebook belongs to `__main__`.
        modules = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == self._file)
        return next(modules, sys.modules.get("__main__"))

    def value_of(self, name: str) -> Any:
        """Returns what a name with dots stands for in the module of the file; None if it is not known."""
        value: Any = self._module
        for part in name.split("."):
            value = getattr(value, part, None)
        return value


def span_of(file: str, node: Any) -> Span:
    return file, (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


@functools.lru_cache(maxsize=16)
def _parsed(file: str, text: str) -> Source | None:
    try:
        return Source(file, text)
    except (SyntaxError, ValueError, RecursionError):  # A cell of a notebook with magic commands.
        return None


def makes_half(line: str) -> bool:
    """Whether a call that begins at `file.py:12:4` takes a half dtype, as `x.astype(jnp.float16)` does."""
    source, nodes = expressions_at(line)
    return source is not None and any(source.makes_half(node) for node in nodes if isinstance(node, ast.Call))


def half_at(line: str) -> str:
    """Returns the name of the half dtype that such a call takes; empty if it is not known."""
    source, nodes = expressions_at(line)
    dtypes = [
        each for node in nodes if isinstance(node, ast.Call) for each in (node.func, *operands_of(node))
    ]
    names = {source.half_name(each) for each in dtypes} - {""} if source is not None else set[str]()
    return names.pop() if len(names) == 1 else ""


def expressions_at(line: str) -> tuple[Source | None, list[ast.AST]]:
    """Returns the source of a file, and the expressions that begin at `file.py:12:4 (function)`."""
    file, row, column = [*line.partition(" ")[0].split(":"), "", "0"][:3]
    # `linecache` also has the cells of a notebook, which are no files.
    text = "".join(linecache.getlines(file)) if row.isdigit() else ""
    source = _parsed(file, text) if text else None
    return source, source.nodes.get((int(row), int(column or 0)), []) if source else []


def operands_of(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.Call(args=args, keywords=keywords):
            return [*args, *(keyword.value for keyword in keywords)]
        case ast.Compare(left=left, comparators=[right]):
            return [left, right]
        case ast.AugAssign(value=value):
            return [value]
    return []


def _is_of_array(node: ast.expr) -> bool:
    """Whether an expression is the dtype of an array, as in `x.astype(y.dtype)`: it follows that array."""
    # A layer keeps its dtype in `self.dtype`.
    return isinstance(node, ast.Attribute) and node.attr == "dtype" and ast.unparse(node.value) != "self"


@functools.lru_cache(maxsize=256)  # A long function assigns some names again and again.
def assigned(inside: ast.AST, kind: type, name: str) -> tuple[ast.expr, ...]:
    """Returns the values that a function or class assigns to a name, or to an attribute of that name."""
    values = []
    for node in ast.walk(inside):
        for target, value in _assignments(node):
            own = getattr(target, "id", ""), getattr(target, "attr", "")
            if isinstance(target, kind) and name in own and isinstance(value, ast.expr):
                values.append(value)
    return tuple(values)


def _assignments(node: ast.AST) -> Iterator[tuple[Any, Any]]:
    """Yields what a statement assigns: the targets, and the value of each."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    value = getattr(node, "value", None)
    for target in targets:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts)
        else:
            yield target, value


def defaults_of(function: Any) -> dict[str, ast.expr | None]:
    """Returns the parameters of a function, each with its default or None."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    missing = [None] * (len(positional) - len(args.defaults))
    pairs = (*zip(positional, [*missing, *args.defaults]), *zip(args.kwonlyargs, args.kw_defaults))
    return {parameter.arg: default for parameter, default in pairs}

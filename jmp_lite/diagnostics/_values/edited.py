"""Runs the user's functions with float32 in place of half precision on some lines, as if the source said so.

The source is compiled again with the edit, and the functions of the user have this code while a program is
traced. So JAX decides which dtypes result, through whatever tuples, decorators and layers a value goes.
"""

import ast
import contextlib
import functools
import gc
import inspect
import itertools
import linecache
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxpr import Span, is_of_package
from ..._tree import is_half
from .source import expressions_at, operands_of, span_of

_Key: TypeAlias = tuple[str, str, int, Any]
"""What tells functions apart: file, name, first line, and where the last expression is."""
Functions: TypeAlias = Sequence[types.FunctionType]
_ran = dict[int, str]()
"""The numbers of the edits that ran, each with the name of the dtype in half that was there."""
_CASTS = ("cast_to_compute", "cast_to_output", "cast_to_param", "cast_to_half")
"""The casts of this library that take one tree."""
_CARRIED = {"fori_loop": 3, "while_loop": 2, "scan": 1}
"""The position of the start of each loop of JAX."""
_LEAVES = (types.ModuleType, types.CodeType, types.FrameType, jax.Array, np.ndarray, str, bytes, int, float)
_CONTAINERS = (dict, list, tuple, set, frozenset, types.MappingProxyType, types.CellType, types.MethodType)
_CONTAINERS += (functools.partial, staticmethod, classmethod, property)
_GET = object.__getattribute__
# JAX traces functions again that it has traced without the edit.
_edit = jax.make_user_context(None)


class UnknownFunctionError(Exception):
    """A function whose source an edit changes is not found, or did not run."""


def are_known(lines: Collection[str], loops: Collection[str]) -> bool:
    """Whether the source has a dtype on each of some lines, and a loop on each of others.

    A line is given as `file.py:12:4 (function)`.
    """
    return all(_dtypes_at(line) or _casts_of_ours_at(line) for line in lines) and all(map(_start_at, loops))


@contextlib.contextmanager
def edited(functions: Functions, lines: Collection[str], loops: Collection[str]) -> Iterator[None]:
    """Runs functions with float32 in place of the half dtypes of the calls that begin at some lines.

    The carries of `loops` start in float32.

    Raises:
        UnknownFunctionError: an edit did not run.
    """
    edits: dict[Span, Any] = {span: float32 for line in lines for span in _dtypes_at(line)}
    edits |= {span: without_cast for line in lines for span in _casts_of_ours_at(line)}
    edits |= {span: in_float32_at for line in loops for span in _start_at(line)}
    with _running(functions, edits):
        yield
    if missing := set(range(len(edits))) - set(_ran):
        raise UnknownFunctionError(f"{len(missing)} of {len(edits)} edits did not run.")


@contextlib.contextmanager
def watched(functions: Functions, found: dict[str, str]) -> Iterator[None]:
    """Adds to `found` the lines of functions whose calls take a half dtype and return half arrays.

    Each line has the name of the dtype. JAX has no operation for a cast of a value that is in half already.
    """
    files = dict.fromkeys(function.__code__.co_filename for function in functions)
    calls = dict[Span, str]()
    for source in filter(None, (expressions_at(f"{file}:1:0")[0] for file in files)):
        for node in itertools.chain.from_iterable(source.nodes.values()):
            if isinstance(node, ast.Call) and source.makes_half(node):
                calls[source.span(node)] = source.line(node)
    with _running(functions, dict.fromkeys(calls, noted)):
        yield
    lines = [*calls.values()]
    found |= {lines[number]: name for number, name in _ran.items()}


@contextlib.contextmanager
def _running(functions: Functions, edits: Mapping[Span, Any]) -> Iterator[None]:
    """Runs functions with some of their expressions given to others, with the numbers of the edits."""
    files = {file for file, *_ in edits}
    codes = {key: code for file in files for key, code in _codes_with(file, edits)}
    changed = list[tuple[types.FunctionType, types.CodeType]]()
    _ran.clear()
    try:
        for function in functions:
            old = function.__code__
            code = codes.get(_key(old)) if old.co_filename in files else None
            if code is not None and code.co_freevars == old.co_freevars:
                changed.append((function, old))
                function.__code__ = code
        with _edit(object()):
            yield
    finally:
        for function, old in changed:
            function.__code__ = old


def functions_in(roots: Any, files: Collection[str]) -> Functions:
    """Returns the functions of some files that `roots` or the modules of these files can reach.

    This walks through all that they hold: it takes tenths of a second.
    """
    # A notebook, whose module has no file, is read through the functions that it calls.
    modules = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None) in files)
    found, seen, todo = list[types.FunctionType](), set[int](), [roots, *map(vars, modules)]
    while todo:
        each = todo.pop()
        if id(each) in seen or issubclass(type(each), _LEAVES):
            continue
        seen.add(id(each))
        if isinstance(each, types.FunctionType):
            todo += [each.__closure__, each.__defaults__, each.__kwdefaults__, each.__dict__]
            if each.__code__.co_filename in files:
                found.append(each)
                todo.append(each.__globals__)
        elif isinstance(each, type):
            # A class of a package, such as `flax.linen.Module`, has no function of the user.
            todo += [] if is_of_package(_file_of(each)) else [*vars(each).values(), each.__bases__]
        elif issubclass(type(each), _CONTAINERS):
            todo += gc.get_referents(each)
        else:  # Without running the code of an object.
            todo += [inspect.getattr_static(each, "__wrapped__", None), type(each)]
            todo += gc.get_referents(each) if not is_of_package(_file_of(type(each))) else []
            todo.append(getattr(each, "__dict__", None) if type(each).__getattribute__ is _GET else None)
    return found


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _codes_with(file: str, edits: Mapping[Span, Any]) -> Iterator[tuple[_Key, types.CodeType]]:
    """Yields the code of the functions of a file that some edits change."""
    text = "".join(linecache.getlines(file))
    tree = ast.fix_missing_locations(_Edited(file, edits).visit(ast.parse(text)))
    old, new = (compile(each, file, "exec", dont_inherit=True) for each in (text, tree))
    return _changed(old, new)


def _changed(old: types.CodeType, new: types.CodeType) -> Iterator[tuple[_Key, types.CodeType]]:
    """Yields the functions inside of some code that differ in other code, with their code there."""
    for before, after in zip(_functions_of(old), _functions_of(new), strict=True):
        if before != after:
            yield _key(before), after
            yield from _changed(before, after)


def _functions_of(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _key(code: types.CodeType) -> _Key:
    # Two lambdas on one line have one name.
    places = (place for place in code.co_positions() if place[2] is not None and place[0] is not None)
    return code.co_filename, code.co_qualname, code.co_firstlineno, max(places, default=None)


def _dtypes_at(line: str) -> list[Span]:
    """Returns the half dtypes of the calls that begin at a line."""
    source, nodes = expressions_at(line)
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    if source is None:
        return []
    # The function may be the dtype, as in `jnp.float16(0)`.
    known = [each for call in calls for each in (call.func, *operands_of(call)) if source.is_half_dtype(each)]
    named = [each for call in calls for each in source.other_names(call)]
    others = [each for call in calls for each in source.dtypes_of(call)]
    return list(map(source.span, known or named or others))


def float32(number: int, _: Any) -> Any:
    """Returns float32 in place of another dtype; edited functions call it."""
    _ran[number] = ""
    return jnp.float32


def noted(number: int, result: Any) -> Any:
    """Returns what a call returns, and notes it if it is a half array; edited functions call it."""
    if isinstance(result, jax.Array) and is_half(result):
        _ran[number] = result.dtype.name
    return result


def in_float32(tree: Any) -> Any:
    """Returns a tree with its half values in float32."""

    def cast(leaf):
        return leaf.astype(jnp.float32) if is_half(leaf) else leaf

    return jax.tree.map(cast, tree)


def in_float32_at(number: int, tree: Any) -> Any:
    """Returns the same of the start of a carry; edited functions call it."""
    _ran[number] = ""
    return in_float32(tree)


def without_cast(number: int, tree: Any) -> Any:
    """Returns the argument of a cast such as `cast_to_compute` in float32, in place of its result."""
    return in_float32_at(number, tree)


def _casts_of_ours_at(line: str) -> list[Span]:
    """Returns the calls of `cast_to_compute` and the like on a line, such as `file.py:12 (function)`."""
    file, _, row = line.partition(" ")[0].rpartition(":")
    source, _ = expressions_at(f"{file}:{row}:0")
    if source is None or not row.isdigit():
        return []
    nodes = (node for place, each in source.nodes.items() if place[0] == int(row) for node in each)
    calls = [node for node in nodes if isinstance(node, ast.Call) and len(node.args) == 1]
    casts = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in _CASTS]
    return list(map(source.span, casts)) if len(casts) == 1 else []


def _start_at(line: str) -> list[Span]:
    """Returns that with which the loop at a line starts, if its call is known."""
    source, nodes = expressions_at(line)
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    places = [_CARRIED.get(ast.unparse(call.func).rpartition(".")[2]) for call in calls]
    starts = [call.args[at] for call, at in zip(calls, places) if at is not None and at < len(call.args)]
    return list(map(source.span, starts)) if source is not None and len(starts) == 1 else []


class _Edited(ast.NodeTransformer):
    """Puts other expressions in place of some."""

    def __init__(self, file: str, edits: Mapping[Span, Any]) -> None:
        self._file, self._edits = file, edits
        self._numbers = {span: number for number, span in enumerate(edits)}

    def visit(self, node: ast.AST) -> Any:
        node = self.generic_visit(node)
        if not isinstance(node, ast.expr) or (span := span_of(self._file, node)) not in self._edits:
            return node
        edit = self._edits[span]
        # The old expression stays, since a function keeps the names that it reads of those around it.
        operand = node.args[0] if edit is without_cast and isinstance(node, ast.Call) else node
        number = ast.Constant(self._numbers[span])
        return ast.copy_location(ast.Call(_named(edit), [number, operand], []), node)


def _named(function: Any) -> ast.expr:
    """Returns an expression for a function of this module that is valid in any other one."""
    text = f"__import__('importlib').import_module({__name__!r}).{function.__name__}"
    return ast.parse(text, mode="eval").body

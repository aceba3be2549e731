"""The casts to half in functions that ran whose values are not known: through a dict, a tuple or an object.

The jaxpr has no operation for a cast of a value in half already, and no operation in the source around it
says which value that was. An edit that makes the value float32 would leave it rounded by such a cast.
"""

import ast
import collections
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from ..._jaxpr import Place, Span
from .casts import Path
from .conversions import conversion
from .source import Source, expressions_at, operands_of


class _Conversion(NamedTuple):
    at: Span
    line: str  # Of the call that takes the dtype.
    is_half: bool  # Whether that dtype is known to be half, which `self.dtype` is not.


class Expressions:
    """What ran: the expressions that made operations, each with the calls around it, and these calls."""

    def __init__(self) -> None:
        self.casts = set[Path]()  # Those that were found around the operations.
        self._ran = set[Path]()

    def note(self, places: Sequence[Place]) -> None:
        """Notes the expression that made an operation; the calls around it follow."""
        spans = tuple(place.span for place in places)
        self._ran.update(spans[n:] for n in range(len(spans)))

    def unfollowed(self, edits: Collection[str]) -> list[str]:
        """Returns the lines of the casts of the functions that ran whose operands are not known.

        `edits` are the lines that are known to make half values.
        """
        known, chains = self._ran | self.casts, collections.defaultdict[tuple[Source, Any], set[Path]](set)
        for first, *around in self._ran:
            if (found := _function_at(first)) is not None:
                chains[found].add(tuple(around))
        anywhere, functions = {first for first, *_ in known}, {function for _, function in chains}
        lines = {
            each.line: None
            for (source, function), every in chains.items()
            for each, is_inside in _conversions(source, function, functions)
            if each.is_half or each.line in edits
            if not (each.at in anywhere if is_inside else all((each.at, *chain) in known for chain in every))
        }
        return [*lines]


@functools.lru_cache(maxsize=4096)
def _function_at(span: Span) -> tuple[Source, Any] | None:
    """Returns the innermost function around an expression; None if it has no source."""
    file, (row, column), _ = span
    source, nodes = expressions_at(f"{file}:{row}:{column}")
    functions = source.functions_around(nodes[0]) if source is not None and nodes else []
    return (source, functions[0]) if source is not None and functions else None


def _conversions(
    source: Source, function: Any, others: Collection[Any]
) -> Iterator[tuple[_Conversion, bool]]:
    """Yields the conversions of arrays in a function, and whether each is in another function.

    That is one inside of it, or one that it calls, which makes no operation of its own. Those of the `others`
    are left out.
    """
    calls = list(_calls(function))
    called = dict.fromkeys(each for call in calls for each in _called(source, call) if each not in others)
    for call in (*calls, *(call for each in called for call in _calls(each))):
        inner = source.functions_around(call)
        around = inner[: inner.index(function)] if function in inner else inner
        cast = conversion(source, call)
        if cast is None or isinstance(cast.operand, ast.Constant) or not set(around).isdisjoint(others):
            continue
        is_half = any(map(source.is_half_dtype, operands_of(cast.call)))
        yield _Conversion(source.span(call), source.line(cast.call), is_half), bool(around)


def _called(source: Source, call: ast.Call) -> Iterator[Any]:
    """Yields the functions with the name of a called one that are defined where the call is, or around it."""
    for function in source.functions.get(ast.unparse(call.func).rpartition(".")[2], ()):
        if set(source.around[function]) <= set(source.around[call]):
            yield function


@functools.lru_cache(maxsize=1024)
def _calls(function: Any) -> list[ast.Call]:
    # The decorators and defaults of a function run when it is defined.
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    inside = (node for statement in body for node in ast.walk(statement))
    return [node for node in inside if isinstance(node, ast.Call)]

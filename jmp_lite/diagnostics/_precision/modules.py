"""The modules of a program: which operations are in half, and by which names users know them."""

import dataclasses
import glob
import itertools
from collections.abc import Sequence

from ..._autocast.report.operations import Operation

_HALVES = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Module:
    """A part of a program that can be in half or in float32.

    Attributes:
        name: the scope, or the path of the argument that holds its parameters.
        pattern: the pattern that selects it in `rules=` of `autocast`; empty if the program itself makes its
            half values.
        lines: the first lines that make half values, as `file.py:12:4 (function)`; empty with a pattern.
    """

    name: str
    pattern: str
    lines: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name in a report."""
        return self.name if self.pattern else f"{self.name or '/'} (its own casts)"


def is_in_half(operation: Operation) -> bool:
    """Whether an operation takes or gives half values, or rounds to few digits."""
    is_half = any(value.startswith(_HALVES) for value in (*operation.inputs, *operation.outputs))
    return is_half or operation.name == "reduce_precision"


def cast_modules(products: Sequence[Operation], parameters: Sequence[str], depth: int) -> list[Module]:
    """Returns the modules of the products that autocast brings to half."""
    names = _modules(_paths(products, parameters), depth)
    return [Module(name, f"/{glob.escape(name)}") for name in names if name]


def own_modules(
    operations: Sequence[Operation], parameters: Sequence[str], depth: int
) -> tuple[list[Module], list[int]]:
    """Returns the modules of the operations that the program itself has in half.

    Returns:
        The modules, and for each operation the index of its module.
    """
    names = _modules(_paths(operations, parameters), depth)
    distinct = list(dict.fromkeys(names))
    lines: dict[str, dict[str, None]] = {name: {} for name in distinct}
    for name, operation in zip(names, operations):
        if _makes_half(operation):
            lines[name][operation.source] = None
    modules = [Module(name, "", tuple(lines[name])[:4]) for name in distinct]
    return modules, [distinct.index(name) for name in names]


def _makes_half(operation: Operation) -> bool:
    """Whether an operation gives half values, of others."""
    return is_in_half(operation) and not all(value.startswith(_HALVES) for value in operation.inputs)


def scopes_for(kept: Sequence[Module], modules: Sequence[Module]) -> tuple[tuple[str, bool], ...]:
    """Returns rules that keep some modules in float32, and the others in half, also those within them."""
    scopes = []
    selected = [module for module in modules if module.pattern]
    for module in sorted(selected, key=lambda module: -module.name.count("/")):  # The first that matches wins.
        outer = [other for other in selected if module.name.startswith(f"{other.name}/")]
        around = max(outer, key=lambda other: len(other.name), default=None)
        if (module in kept) != (around in kept):
            scopes.append((module.pattern, module in kept))
    return tuple(scopes)


def _paths(operations: Sequence[Operation], parameters: Sequence[str]) -> list[str]:
    """Returns for each operation the path of the module or of the argument that it belongs to."""
    paths = [_path(operation, parameters) for operation in operations]
    if len(set(paths)) < 2:  # A jitted loss has one scope for all.
        paths = [_argument(operation, parameters) or operation.scope for operation in operations]
    return paths


def _modules(operation_paths: Sequence[str], depth: int) -> list[str]:
    """Returns the module of each path: its first names."""
    paths = [path.split("/") for path in operation_paths]
    shared = {first: _shared([path for path in paths if path[0] == first]) for first, *_ in paths}
    return ["/".join(path[: _end(path, shared[path[0]], depth)]) for path in paths]


def _path(operation: Operation, parameters: Sequence[str]) -> str:
    """Returns the scope of an operation; the argument where the scope is that of a class or of an einsum."""
    names = operation.scope.split("/")
    if "->" in names[-1]:  # `jnp.einsum` names a scope by its equation, such as `bi,io->bo`.
        names = names[:-1]
    scope = "/".join(names)
    is_class = "." in scope.rpartition("/")[2]  # All layers of Equinox share such a scope.
    return (_argument(operation, parameters) if is_class or not scope else "") or scope or operation.scope


def _argument(operation: Operation, parameters: Sequence[str]) -> str:
    """Returns the path of the object that holds a parameter of an operation, or of a lone parameter."""
    own = [argument for argument in operation.arguments if argument.split("/")[0] in parameters]
    last = next(reversed(own or operation.arguments), "")
    holder = last.rpartition("/")[0]
    return holder if "/" in holder else last


def _shared(paths: Sequence[list[str]]) -> int:
    """Returns how many names some paths begin with in common."""
    same = (len(set(names)) == 1 for names in zip(*paths))
    return sum(itertools.takewhile(bool, same))


def _end(path: list[str], shared: int, depth: int) -> int:
    """Returns where a path is cut: after `depth` names, and the index after the last of them."""
    count = 0
    for position in range(shared, len(path)):
        count += position == shared or not path[position].isdigit()
        if count > depth:
            return position
    return len(path)

"""The modules of a program: its half operations, grouped under names that users know."""

import collections
import dataclasses
import glob
import itertools
import pathlib
from collections.abc import Collection, Sequence

from ..._autocast import AutocastOperation
from .._values.case import gives_half
from .._values.reference import is_narrow

_PACKAGE = str(pathlib.Path(__file__).parents[2])  # The casts of a policy are lines of this library.


@dataclasses.dataclass(frozen=True)
class Module:
    """A named group of operations that share one flag: half or float32."""

    name: str  # The scope, or the path of the argument that holds its parameters, if any.
    pattern: str  # Selects it in `rules=` of `autocast`; empty if the program itself casts.
    lines: tuple[str, ...] = ()  # Without a pattern, the user's first lines that make half values.
    policy: str = ""  # The path of a module that a rule of its policy selects.
    layer: str = ""  # Otherwise, how to keep it in float32, in words.
    casts: str = ""  # The half dtype to which `lines` cast; empty if they are no casts.
    is_argument: bool = False  # Whether it is an argument in half, and all that is computed from it in half.
    carries: tuple[str, ...] = ()  # The lines of the loops whose half carries come from it.
    autocast: str = ""  # The scope of the casts that an autocast inside of the function makes.

    @property
    def label(self) -> str:
        return self.name or "/"

    @property
    def is_edit(self) -> bool:
        """Whether a user can write what it takes to compute the module, and nothing else, in float32."""
        is_cast = bool(self.casts) and self.lines == (self.name,)
        return is_cast or bool(self.pattern or self.policy or self.layer or self.autocast or self.is_argument)


def is_in_half(operation: AutocastOperation) -> bool:
    """Whether an operation takes or returns half values, or rounds to few digits."""
    return gives_half(operation) or any(map(is_narrow, operation.operands))


def cast_modules(
    products: Sequence[AutocastOperation], parameters: Sequence[str], around: str
) -> list[Module]:
    """Returns the modules of the products that autocast casts to half; `around` as in `own_modules`."""
    names = dict.fromkeys(_modules(_paths(products, parameters), around))
    return [Module(name, f"/{glob.escape(name)}") for name in names if name]


def own_modules(
    operations: Sequence[AutocastOperation], parameters: Sequence[str], paths: Collection[str], around: str
) -> tuple[list[Module], list[int]]:
    """Returns the modules of the program's own half operations, and the index of each operation's module.

    `around` is the scope of a function that is jitted as a whole, which no module shares its name with.
    """
    names = _modules(_paths(operations, parameters), around)
    has_policy = any(operation.source.startswith(_PACKAGE) for operation in operations)
    members: dict[str, list[AutocastOperation]] = {name: [] for name in names}
    for name, operation in zip(names, operations):
        members[name].append(operation)
    modules = [_own_module(name, own, has_policy, paths, around) for name, own in members.items()]
    return modules, [[*members].index(name) for name in names]


def _own_module(
    name: str,
    operations: Sequence[AutocastOperation],
    has_policy: bool,
    paths: Collection[str],
    around: str,
) -> Module:
    casts = [operation for operation in operations if _makes_half(operation)]
    if casts:
        return Module(name, "", _users_lines(casts), casts=casts[0].results[0].dtype.name)
    lines = _users_lines(operations)
    inside = name.removeprefix(f"{around}/")
    parts = inside.split("/")[1:]
    path = "/".join(parts[1:] if parts[:1] == ["params"] else parts)
    # A policy has rules for modules with parameters, and none for the functions that they call. A layer of a
    # library has a dtype of its own. Of other operations no line says in which dtype they run.
    has_parameters = bool(path) and any(f"/{path}/" in f"/{parameter}" for parameter in paths)
    is_layer = has_parameters and not has_policy and not lines
    return Module(
        name,
        "",
        lines,
        policy=path if has_parameters and has_policy else "",
        layer=f"dtype=jnp.float32 in {inside}" if is_layer else "",
    )


def _makes_half(operation: AutocastOperation) -> bool:
    """Whether a line of the user makes half values of others."""
    is_cast = gives_half(operation) and not all(map(is_narrow, operation.operands))
    return is_cast and not is_of_library(operation.source)


def _users_lines(operations: Sequence[AutocastOperation]) -> tuple[str, ...]:
    """Returns the first lines of the user among those of some operations."""
    lines = (operation.source for operation in operations if not is_of_library(operation.source))
    return tuple(dict.fromkeys(lines))[:4]


def in_words(modules: Sequence[Module]) -> str:
    """Returns how to keep modules without a pattern in float32, in the notation of the program."""
    words = _casts_in_words(modules)
    arguments = [module.name for module in modules if module.is_argument]
    words += [f"pass these arguments in float32: {', '.join(arguments)}"] if arguments else []
    policies = ", ".join(f"{module.policy!r}: 'float32'" for module in modules if module.policy)
    words += [f"policy.with_rules({{{policies}}})"] if policies else []
    scopes = ", ".join(f"'/{module.autocast}': 'float32'" for module in modules if module.autocast)
    words += [f"rules={{{scopes}}} in the autocast inside"] if scopes else []
    return "; ".join([*words, *(module.layer for module in modules if module.layer)])


def _casts_in_words(modules: Sequence[Module]) -> list[str]:
    casts: dict[str, set[str]] = collections.defaultdict(set)
    for module in modules:
        if module.casts:
            casts[module.casts].update(line.partition(" ")[0] for line in module.lines)
    which = lambda lines: f"{'lines' if len(lines) > 1 else 'line'} {', '.join(sorted(lines))}"
    words = [f"use float32 instead of {dtype} on {which(lines)}" for dtype, lines in casts.items()]
    loops = {line.partition(" ")[0] for module in modules for line in module.carries}
    return [*words, f"start the carry in float32 for the loop on {which(loops)}"] if loops else words


def is_of_library(line: str) -> bool:
    """Whether a line is no line of the user's program."""
    return not line or line.startswith((_PACKAGE, "<unknown>")) or "site-packages" in line


def scopes_for(
    kept: Sequence[Module], modules: Sequence[Module], wide: str, narrow: str
) -> tuple[tuple[str, str], ...]:
    """Returns rules for the dtype `wide` of the modules in `kept` and `narrow` of the others, also nested."""
    scopes = []
    selected = [module for module in modules if module.pattern]
    # Of the patterns that match, the first one wins: that of the innermost module.
    for module in sorted(selected, key=lambda module: -module.name.count("/")):
        outer = [other for other in selected if module.name.startswith(f"{other.name}/")]
        around = max(outer, key=lambda other: len(other.name), default=None)
        if (module in kept) != (around in kept):
            scopes.append((module.pattern, wide if module in kept else narrow))
    return tuple(scopes)


def _paths(operations: Sequence[AutocastOperation], parameters: Sequence[str]) -> list[str]:
    """Returns for each operation the path of its module or argument."""
    paths = [_path(operation, parameters) for operation in operations]
    if len(set(paths)) < 2:  # A jitted loss has one scope for all.
        paths = [_argument(operation, parameters) or operation.scope for operation in operations]
    return paths


def _modules(operation_paths: Sequence[str], around: str) -> list[str]:
    """Returns the module of each path: its first names inside of the scope `around` all of them."""
    prefixes = [f"{around}/" if path.startswith(f"{around}/") else "" for path in operation_paths]
    paths = [path.removeprefix(prefix).split("/") for path, prefix in zip(operation_paths, prefixes)]
    shared: dict[str, int] = {}  # How many names the paths with the same first name begin with in common.
    for first, *_ in paths:
        same = (len(set(names)) == 1 for names in zip(*(path for path in paths if path[0] == first)))
        shared[first] = sum(itertools.takewhile(bool, same))
    return [prefix + "/".join(path[: _end(path, shared[path[0]])]) for path, prefix in zip(paths, prefixes)]


def _path(operation: AutocastOperation, parameters: Sequence[str]) -> str:
    """Returns the scope of an operation; its argument if the scope names a class or is missing."""
    names = operation.scope.split("/")
    if "->" in names[-1]:  # `jnp.einsum` names a scope by its equation, such as `bi,io->bo`.
        names = names[:-1]
    scope = "/".join(names)
    is_class = "." in scope.rpartition("/")[2]  # All layers of Equinox share such a scope.
    return (_argument(operation, parameters) if is_class or not scope else "") or scope or operation.scope


def _argument(operation: AutocastOperation, parameters: Sequence[str]) -> str:
    """Returns the path of the object that holds a parameter of an operation, or of a lone parameter."""
    own = [argument for argument in operation.arguments if argument.split("/")[0] in parameters]
    last = next(reversed(own or operation.arguments), "")
    holder = last.rpartition("/")[0]
    return holder if "/" in holder else last


def _end(path: list[str], shared: int) -> int:
    """Returns where to cut a path: after the first name that is not shared, and an index behind it."""
    following = range(shared + 1, len(path))
    return next((position for position in following if not path[position].isdigit()), len(path))

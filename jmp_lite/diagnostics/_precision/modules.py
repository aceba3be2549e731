"""The parts of a program that are in half: modules, under names that users know."""

import collections
import dataclasses
import glob
import itertools
import pathlib
from collections.abc import Collection, Sequence

from ..._autocast.report import AutocastOperation
from ..._jaxpr import Jaxpr, equations
from .._values.case import gives_half
from .._values.reference import is_narrow
from .._values.source import makes_half

_PACKAGE = str(pathlib.Path(__file__).parents[2])  # The casts of a policy are lines of this library.


@dataclasses.dataclass(frozen=True)
class Module:
    """A named group of operations that share one flag: half or float32."""

    name: str  # The scope, or the path of the argument that holds its parameters, if any.
    pattern: str  # Selects it in `rules=` of `autocast`; empty if the program itself casts.
    lines: tuple[str, ...] = ()  # Without a pattern, the user's first lines that make half values.
    policy: str = ""  # The path of a module that a rule of its policy selects.
    layer: str = ""  # Otherwise, the path of a layer of a library, which has a `dtype`.
    casts: str = ""  # The half dtype to which its line casts; empty if it is not a line with a cast.
    is_argument: bool = False  # Whether it is an argument in half, and all that is computed from it in half.
    carries: tuple[str, ...] = ()  # The lines of the loops whose half carries come from it.
    autocast: str = ""  # The scope, which a rule of an autocast inside of the function selects.
    is_gradient: bool = False  # Whether the edit casts the half gradients that its line computes with.
    # For half gradients, the names of the sources of the differentiated values: if one of these is half, so
    # are the gradients.
    one_of: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        return self.name or "/"

    @property
    def key(self) -> str:
        """What tells an edit from the others. An argument in half may have the name of a scope."""
        return self.pattern or (f"/{self.autocast}" if self.autocast else self.name)

    @property
    def is_edit(self) -> bool:
        """Whether a user can write what it takes to compute the module, and nothing else, in float32."""
        edits = self.pattern, self.policy, self.layer, self.casts, self.autocast
        return any((*edits, self.is_argument, self.is_gradient, self.carries))


def has_more_half(now: AutocastOperation, before: AutocastOperation) -> bool:
    """Whether autocast has an operand or a result of an operation in half that the program has not."""
    # A product of the program may have one operand in half, and the other one in float32.
    pairs = zip((*now.operands, *now.results), (*before.operands, *before.results), strict=True)
    return any(is_narrow(value) and not is_narrow(own) for value, own in pairs)


def cast_modules(
    products: Sequence[AutocastOperation], parameters: Sequence[str], around: str
) -> list[Module | None]:
    """Returns the module of each product, which a rule of autocast selects; None if no rule does.

    `around` is as in `own_modules`.
    """
    names = _names(products, parameters, around)
    return [Module(name, f"/{glob.escape(name)}") if name else None for name in names]


def jitted_as_a_whole(jaxpr: Jaxpr) -> str:
    """Returns the name of the jitted function that a jaxpr calls and nothing else; empty without one."""
    every = equations(jaxpr)
    return every[0].params["name"] if len(every) == 1 and every[0].primitive.name == "jit" else ""


def own_modules(
    operations: Sequence[AutocastOperation], parameters: Sequence[str], paths: Collection[str], around: str
) -> tuple[list[Module], list[int]]:
    """Returns the modules of the program's own half operations, and the index of each operation's module.

    `around` is the scope of a function that is jitted as a whole, which no module shares its name with.
    """
    names = _with_layers(_names(operations, parameters, around), operations, paths, around)
    has_policy = any(operation.source.startswith(_PACKAGE) for operation in operations)
    members: dict[str, list[AutocastOperation]] = collections.defaultdict(list)
    for name, operation in zip(names, operations):
        members[name].append(operation)
    modules = [_own_module(name, own, has_policy, paths, around) for name, own in members.items()]
    return modules, [[*members].index(name) for name in names]


def _with_layers(
    names: Sequence[str], operations: Sequence[AutocastOperation], paths: Collection[str], around: str
) -> list[str]:
    """Returns the names of modules, with those of the layers of a library beside operations of the user."""
    # A layer has a dtype of its own. What the user computes in half around it follows from that.
    mixed = {name for name, operation in zip(names, operations) if not is_of_library(operation.source)}

    def name_of(name, operation):
        is_layer = name in mixed and is_of_library(operation.source)
        scope = operation.scope.removeprefix(f"{around}/")
        return operation.scope if is_layer and _path_of_parameters(scope, paths) else name

    return list(map(name_of, names, operations))


def renamed(own: Sequence[Module], cast: Sequence[Module]) -> list[Module]:
    """Returns modules of the program's own half values. One that autocast casts too gets another name."""
    names = {module.name for module in cast}

    def rename(part):
        return dataclasses.replace(part, name=f"{part.name} (its own casts)")

    return [rename(part) if part.name in names else part for part in own]


def _own_module(
    name: str,
    operations: Sequence[AutocastOperation],
    has_policy: bool,
    paths: Collection[str],
    around: str,
) -> Module:
    users = [operation for operation in operations if not is_of_library(operation.source)]
    casts = [each for each in users if gives_half(each) and not all(map(is_narrow, each.operands))]
    # A cast to the dtype of another value, such as `x.astype(y.dtype)`, follows from that value.
    named = [operation for operation in casts if makes_half(operation.source)]
    lines = tuple(dict.fromkeys(operation.source for operation in (named if casts else users)))[:4]
    inside = name.removeprefix(f"{around}/")
    path = "" if casts else _path_of_parameters(inside, paths)
    if path and has_policy:
        return Module(name, "", lines, policy=path)
    return Module(name, "", lines, layer="" if lines or not path else inside)


def _path_of_parameters(name: str, paths: Collection[str]) -> str:
    """Returns the path of a module with parameters, of which `paths` are all; empty if it has none."""
    # A policy has rules for modules with parameters, and none for the functions that they call. A layer of a
    # library has a dtype of its own. Of other operations no line says in which dtype they run.
    parts = name.split("/")[1:]
    path = "/".join(parts[1:] if parts[:1] == ["params"] else parts)
    return path if path and any(f"/{path}/" in f"/{parameter}" for parameter in paths) else ""


def in_words(modules: Sequence[Module]) -> str:
    """Returns how to keep modules without a pattern in float32, in the notation of the program."""
    words = _casts_in_words(modules)
    read = [_place(line) for module in modules if module.is_gradient for line in module.lines]
    words += [f"cast the gradients to float32 before the arithmetic on {_places(read)}"] if read else []
    arguments = [module.name for module in modules if module.is_argument]
    words += [f"pass these arguments in float32: {', '.join(arguments)}"] if arguments else []
    policies = ", ".join(f"{module.policy!r}: 'float32'" for module in modules if module.policy)
    words += [f"policy.with_rules({{{policies}}})"] if policies else []
    rules = _rules_inside({f"{module.autocast}/" for module in modules if module.autocast})
    words += [f"rules={{{rules}}} in the autocast inside"] if rules else []
    layers = (f"dtype=jnp.float32 in {module.layer}" for module in modules if module.layer)
    return "; ".join([*words, *layers])


def _rules_inside(scopes: Collection[str]) -> str:
    """Returns the rules that select some scopes; each scope is given with a slash at its end."""
    # A rule selects the scopes inside of its own, and autocast refuses a rule that selects nothing more.
    outer = [each for each in scopes if not any(each != other and each.startswith(other) for other in scopes)]
    return ", ".join(f"'/{scope[:-1]}': 'float32'" for scope in sorted(outer))


def _casts_in_words(modules: Sequence[Module]) -> list[str]:
    named = {_place(line): module.casts for module in modules if module.casts for line in module.lines}
    casts: dict[str, list[str]] = collections.defaultdict(list)
    for line, dtype in named.items():
        casts[dtype].append(line)
    words = [f"use float32 instead of {dtype} on {_places(lines)}" for dtype, lines in casts.items()]
    loops = {_place(line) for module in modules for line in module.carries}
    return [*words, f"start the carry in float32 for the loop on {_places(loops)}"] if loops else words


def _place(line: str) -> str:
    return line.partition(" ")[0]


def _places(lines: Collection[str]) -> str:
    return f"{'lines' if len(lines) > 1 else 'line'} {', '.join(sorted(lines))}"


def is_of_library(line: str) -> bool:
    """Whether a line is no line of the user's program."""
    return not line or line.startswith((_PACKAGE, "<unknown>")) or "site-packages" in line


def scopes_for(kept: Sequence[Module], modules: Sequence[Module], narrow: str) -> tuple[tuple[str, str], ...]:
    """Returns rules for float32 of the modules in `kept` and `narrow` of the others, also nested."""
    scopes = []
    selected = [module for module in modules if module.pattern]
    # Of the patterns that match, the first one wins: that of the innermost module.
    for module in sorted(selected, key=lambda module: -module.name.count("/")):
        # A rule is needed only where the module around it has the other dtype.
        outer = [other for other in selected if module.name.startswith(f"{other.name}/")]
        around = max(outer, key=lambda other: len(other.name), default=None)
        if (module in kept) != (around in kept):
            scopes.append((module.pattern, "float32" if module in kept else narrow))
    return tuple(scopes)


def _names(operations: Sequence[AutocastOperation], parameters: Sequence[str], around: str) -> list[str]:
    """Returns the name of each operation's module: the first names of its path inside the scope `around`."""
    paths = [_path(operation, parameters) for operation in operations]
    if len(set(paths)) < 2:  # A jitted loss has one scope for all.
        paths = [_argument(operation, parameters) or operation.scope for operation in operations]
    prefixes = [f"{around}/" if path.startswith(f"{around}/") else "" for path in paths]
    inside = [path.removeprefix(prefix).split("/") for path, prefix in zip(paths, prefixes)]
    # One more than the number of names with which all paths begin that have the same first name.
    ends: dict[str, int] = {}
    for first, *_ in inside:
        same = (len(set(names)) == 1 for names in zip(*(path for path in inside if path[0] == first)))
        ends[first] = sum(itertools.takewhile(bool, same)) + 1
    return [prefix + "/".join(_first_names(path, ends[path[0]])) for path, prefix in zip(inside, prefixes)]


def _first_names(path: Sequence[str], end: int) -> list[str]:
    # An index belongs to the name in front of it.
    return [*path[:end], *itertools.takewhile(str.isdigit, path[end:])]


def _path(operation: AutocastOperation, parameters: Sequence[str]) -> str:
    """Returns the scope of an operation; its argument if the scope names a class or is missing."""
    outer, _, last = operation.scope.rpartition("/")
    # `jnp.einsum` names a scope by its equation, `bi,io->bo`:
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/numpy/einsum.py#L323.
    scope = outer if "->" in last else operation.scope
    # All layers of one class of Equinox share such a scope:
    # https://github.com/patrick-kidger/equinox/blob/v0.13.8/equinox/nn/_linear.py#L67.
    is_class = "." in scope.rpartition("/")[2]
    return (_argument(operation, parameters) if is_class or not scope else "") or scope or operation.scope


def _argument(operation: AutocastOperation, parameters: Sequence[str]) -> str:
    """Returns the path of the object that holds a parameter of an operation, or of a lone parameter."""
    own = [argument for argument in operation.arguments if argument.split("/")[0] in parameters]
    last = next(reversed(own or operation.arguments), "")
    holder = last.rpartition("/")[0]
    return holder if "/" in holder else last

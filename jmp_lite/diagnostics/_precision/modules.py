"""The parts of a program that are in half: modules, under names that users know, and sources of half values.

A source is a cast in a line of the user, or an argument in half.
"""

import collections
import dataclasses
import functools
import glob
import itertools
import pathlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..._autocast import AutocastOperation, has_floating
from ..._jaxpr import (
    Arguments,
    Category,
    Equation,
    Forward,
    Jaxpr,
    all_equations,
    call_scope,
    casting_line,
    inner_jaxprs,
    is_by_autocast,
    is_literal,
    is_transposed,
    scope_of,
    traits_of,
)
from ..._jaxpr import equations as equations_of
from ..._paths import visible_scope
from .._values.case import gives_half
from .._values.numbers import Numbers, makes_half, written
from .._values.reference import is_narrow
from .._values.sites import line_of

_PACKAGE = str(pathlib.Path(__file__).parents[2])  # The casts of a policy are lines of this library.


@dataclasses.dataclass(frozen=True)
class Module:
    """A named group of operations that share one flag: half or float32."""

    name: str  # The scope, or the path of the argument that holds its parameters, if any.
    pattern: str  # Selects it in `rules=` of `autocast`; empty if the program itself casts.
    lines: tuple[str, ...] = ()  # Without a pattern, the user's first lines that make half values.
    policy: str = ""  # The path of a module that a rule of its policy selects.
    layer: str = ""  # Otherwise, how to keep it in float32, in words.
    casts: str = ""  # The half dtype to which its line casts; empty if it is not a line with a cast.
    is_argument: bool = False  # Whether it is an argument in half, and all that is computed from it in half.
    carries: tuple[str, ...] = ()  # The lines of the loops whose half carries come from it.
    autocast: str = ""  # The scope of the casts that an autocast inside of the function makes.

    @property
    def label(self) -> str:
        return self.name or "/"

    @property
    def is_edit(self) -> bool:
        """Whether a user can write what it takes to compute the module, and nothing else, in float32."""
        edits = self.pattern, self.policy, self.layer, self.casts, self.autocast, self.is_argument
        return any(edits)


def is_in_half(operation: AutocastOperation) -> bool:
    """Whether an operation takes or returns half values, or rounds to few digits."""
    return gives_half(operation) or any(map(is_narrow, operation.operands))


def cast_modules(
    products: Sequence[AutocastOperation], parameters: Sequence[str], around: str
) -> list[Module]:
    """Returns the modules of the products that autocast casts to half; `around` as in `own_modules`."""
    names = dict.fromkeys(_names(products, parameters, around))
    return [Module(name, f"/{glob.escape(name)}") for name in names if name]


def own_modules(
    operations: Sequence[AutocastOperation], parameters: Sequence[str], paths: Collection[str], around: str
) -> tuple[list[Module], list[int]]:
    """Returns the modules of the program's own half operations, and the index of each operation's module.

    `around` is the scope of a function that is jitted as a whole, which no module shares its name with.
    """
    names = _names(operations, parameters, around)
    has_policy = any(operation.source.startswith(_PACKAGE) for operation in operations)
    members: dict[str, list[AutocastOperation]] = collections.defaultdict(list)
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
    users = [operation for operation in operations if not is_of_library(operation.source)]
    casts = [each for each in users if gives_half(each) and not all(map(is_narrow, each.operands))]
    lines = tuple(dict.fromkeys(operation.source for operation in casts or users))[:4]
    inside = name.removeprefix(f"{around}/")
    parts = inside.split("/")[1:]
    path = "/".join(parts[1:] if parts[:1] == ["params"] else parts)
    # A policy has rules for modules with parameters, and none for the functions that they call. A layer of a
    # library has a dtype of its own. Of other operations no line says in which dtype they run.
    has_parameters = bool(path) and any(f"/{path}/" in f"/{parameter}" for parameter in paths)
    if not has_parameters or casts:
        return Module(name, "", lines)
    if has_policy:
        return Module(name, "", lines, policy=path)
    return Module(name, "", lines, layer="" if lines else f"dtype=jnp.float32 in {inside}")


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
    # An index belongs to the name in front of it.
    indexes = lambda path: itertools.takewhile(str.isdigit, path[ends[path[0]] :])
    short = lambda path: [*path[: ends[path[0]]], *indexes(path)]
    return [prefix + "/".join(short(path)) for path, prefix in zip(inside, prefixes)]


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


Sources = frozenset[Module]

_LIBRARY = Module("a library", "")
_EVERY = Module("every source", "")
"""For a cast that JAX makes for a gradient, and for zeros in half: they are what another half value needs."""


class _Origin(NamedTuple):
    """What a value comes from."""

    sources: Sources = frozenset()  # Of a half value, or of the half value that was cast to a float32 value.
    line: str = ""  # For a float32 value, the line that has widened it.


def _sources_of(origins: Iterable[_Origin]) -> Sources:
    return frozenset[Module]().union(*(origin.sources for origin in origins))


def sources_of(
    traced: Arguments, is_step: bool, numbers: Numbers, layers: Sequence[Module] = ()
) -> list[Sources]:
    """Returns for each operation of a report what its half values come from.

    An operation in float32 has sources if one of the `numbers` that it takes was converted to half. What one
    of the `layers` of a library gives comes from it alone: it casts whatever it takes to its own dtype.
    """
    # If the cast of a source is left out, JAX's promotion computes in float32 all that depends on its result,
    # up to a cast back to float32. So a source is an edit that a user can write, where a scope is not.
    named = zip(traced.names, traced.arrays, strict=True)
    source = lambda name: _Origin(frozenset({Module(name.split("/")[0], "", is_argument=True)}))
    operation = lambda equation, operands: _operation(numbers, equation, operands, search.calls, layers)
    join = lambda first, second: _Origin(first.sources | second.sources, first.line or second.line)
    search = Forward[_Origin](operation, join, _Origin())
    search.run(traced.jaxpr, [source(name) if is_narrow(array) else _Origin() for name, array in named])
    every = frozenset[Module]().union(*map(_sources_of, search.found.values())) - {_EVERY, _LIBRARY}
    # In a loss, a layer of a library has a dtype of its own. In a step, an optimizer casts to the dtypes of
    # its parameters.
    of_library = frozenset(source for source in every if source.is_argument and is_step)
    carried = _carried(traced.jaxpr, search.found)

    def resolved(equation: Equation) -> Sources:
        if not (any(map(is_narrow, equation.outvars)) or _of_numbers(numbers, equation)):
            return frozenset()
        sources = _sources_of(search.found[id(equation)])
        own = (sources | of_library if _LIBRARY in sources else sources) - {_LIBRARY}
        own = every if _EVERY in own else own
        return frozenset(dataclasses.replace(each, carries=carried.get(each, ())) for each in own)

    return list(map(resolved, _operations(traced.jaxpr)))


def _operation(
    numbers: Numbers,
    equation: Equation,
    operands: list[_Origin],
    calls: Sequence[Equation],
    layers: Sequence[Module],
) -> list[_Origin]:
    # A function that JAX jits, such as `jax.nn.one_hot`, has no line of its own: the user's line calls it.
    line = next(filter(None, map(line_of, (equation, *reversed(calls)))), "")
    # `jnp.mean` of half values widens them, sums, and casts back, on one line: the user wrote no cast.
    taken = (origin for origin in operands if origin.line in ("", line))
    sources = _sources_of(taken) | _of_numbers(numbers, equation)
    if any(map(is_narrow, equation.outvars)):
        sources = sources or _cast(equation, line)
    sources = (_layer_of(equation, calls, layers) if sources else None) or sources
    return [_Origin(sources, "" if is_narrow(var) else line) for var in equation.outvars]


def _of_numbers(numbers: Numbers, equation: Equation) -> Sources:
    """Returns the lines that convert the numbers of an equation to half."""
    found = (written(numbers, equation, position) for position in range(len(equation.invars)))
    lines = (number.line for number in found if number is not None and number.line)
    return frozenset(Module(line, "", (line,), casts="half precision") for line in lines)


def _layer_of(equation: Equation, calls: Sequence[Equation], layers: Sequence[Module]) -> Sources:
    """Returns the layer that an equation belongs to; empty if it is not in one."""
    if not layers:
        return frozenset()
    around = functools.reduce(lambda scope, call: call_scope(scope_of(call, scope), call), calls, "")
    scope = visible_scope(scope_of(equation, around))
    return frozenset(layer for layer in layers if f"{scope}/".startswith(f"{layer.name}/"))


def _cast(equation: Equation, line: str) -> Sources:
    """Returns an operation that makes half values of others as their source; none if it is of a library."""
    dtype = equation.outvars[0].aval.dtype.name
    # A cast of a cotangent, which has the dtype of the value that it is the gradient of.
    if is_transposed(equation):
        return frozenset({_EVERY})
    # Numbers alone, such as the zeros of a `jnp.zeros_like`: they have the dtype of what they are like.
    if all(map(is_literal, equation.invars)) and not makes_half(line):
        return frozenset({_EVERY})
    if is_by_autocast(equation) and not makes_half(line):
        scope = visible_scope(scope_of(equation))
        return frozenset({Module(scope or "autocast", "", (line,), autocast=scope)})
    line = casting_line(equation) or line
    if is_of_library(line):
        return frozenset({_LIBRARY})
    return frozenset({Module(line, "", (line,), casts=dtype)})


def _carried(jaxpr: Jaxpr, found: dict[int, list[_Origin]]) -> dict[Module, tuple[str, ...]]:
    """Returns for each source the lines of the loops whose half carries come from it."""
    lines: dict[Module, dict[str, None]] = collections.defaultdict(dict)
    loops = (equation for equation in all_equations(jaxpr) if equation.primitive.name in ("scan", "while"))
    for equation in loops:
        carried = inner_jaxprs(equation)[-1].carried  # They are the first results of a loop.
        for var, origin in list(zip(equation.outvars, found[id(equation)]))[:carried]:
            for source in origin.sources if is_narrow(var) else ():
                lines[source][line_of(equation)] = None
    return {source: tuple(own) for source, own in lines.items()}


def _operations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yields the operations of a jaxpr in the order of a report."""
    for equation in equations_of(jaxpr):
        if traits_of(equation.primitive.name).category is Category.CALL:
            for inner in inner_jaxprs(equation):
                yield from _operations(inner.jaxpr)
        elif has_floating(equation):
            yield equation

"""Follows values out of functions: to the argument of a parameter, and to the call that has a result."""

import ast
import itertools
from collections.abc import Sequence
from typing import Any

from ..._jaxpr import Place
from .source import FUNCTIONS, Source, assigned, defaults_of, expressions_at

_LOOPS = (ast.For, ast.While)
_CARRIED = {"fori_loop": 3, "while_loop": 2, "scan": 1}
"""The position of the start of each loop of JAX."""
_FIRST_ARGUMENT = {"cond": 3, "switch": 2, "apply": 1}
"""The position of the argument for the first parameter of the function that is called.

A branch takes what follows the branches, and a Linen module takes its variables first.
"""
_BUILTINS = {"map", "filter", "reduce", "accumulate", "starmap", "sorted", "min", "max", "next"}
"""Functions without a frame of their own that call the functions which they take."""


def call_at(place: Place) -> tuple[Source, ast.Call] | None:
    """Returns the call of a place; None if the place is another expression, or has no source."""
    row, column = place.start
    source, nodes = expressions_at(f"{place.file}:{row}:{column}")
    call = next((node for node in nodes if isinstance(node, ast.Call) and place.is_at(node)), None)
    return (source, call) if source is not None and call is not None else None


def is_parameter(source: Source, name: ast.Name) -> bool:
    """Whether a name is a parameter of the innermost function around it, with the value of the call."""
    functions = source.functions_around(name)
    if not functions or name.id not in defaults_of(functions[0]):
        return False
    values = assigned(functions[0], ast.Name, name.id)
    is_looped = bool(values) and any(isinstance(node, _LOOPS) for node in ast.walk(functions[0]))
    place = name.lineno, name.col_offset
    return not is_looped and all((value.end_lineno, value.end_col_offset) > place for value in values)


def is_returned(source: Source, node: ast.AST) -> bool:
    """Whether the innermost function around an expression returns it, or the name that it is assigned to."""
    functions, outer = source.functions_around(node), source.outer.get(node)
    while isinstance(outer, ast.Subscript):
        node, outer = outer, source.outer.get(outer)
    if not functions:
        return False
    if isinstance(outer, ast.Assign) and isinstance(outer.targets[0], ast.Name):
        values, name = assigned(functions[0], ast.Name, outer.targets[0].id), outer.targets[0].id
        returns = (each.value for each in ast.walk(functions[0]) if isinstance(each, ast.Return))
        is_named = any(isinstance(value, ast.Name) and value.id == name for value in returns)
        return is_named and values[-1] is node
    return isinstance(outer, ast.Return) or outer is functions[0]


def passes_on(call: ast.Call) -> bool:
    """Whether a call passes on all that the function around it takes, as `fun(*args)` of a decorator does."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Starred)


def argument(
    source: Source, name: ast.Name, caller: Place, called: tuple[Source, ast.Call]
) -> ast.expr | None:
    """Returns what a call gives for a parameter of the function around its name; None if it is not known.

    `caller` is the place of the call, and `called` has the call with its source.
    """
    function, (outer, call) = source.functions_around(name)[0], called
    parameters, is_of_jax = [*defaults_of(function)], not caller.is_direct
    is_method = parameters[:1] in (["self"], ["cls"])
    is_known = is_method or _is_called(source, function, call) if is_of_jax else _name(call) not in _BUILTINS
    if not is_known:
        return None
    if is_of_jax and _name(call) in _CARRIED:  # What a loop carries comes from its body as well.
        is_of_inputs = _name(call) == "scan" and parameters.index(name.id) == 1
        return call.args[2] if is_of_inputs and len(call.args) > 2 else None
    given = _positional(outer, call, _FIRST_ARGUMENT.get(_name(call), 0) if is_of_jax else 0)
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    # A method may be called as a function of its class, with the object as an argument.
    parameters = parameters[is_method and len(given) + len(named) < len(parameters) :]
    known = list(itertools.takewhile(lambda each: not isinstance(each, ast.Starred), given))
    values = dict(zip(parameters, known)) | named
    # A call that gives too few is that of a function with some of its arguments bound.
    is_whole = len(known) < len(given) or set(values).issuperset(_required(function, parameters))
    return values.get(name.id) if is_whole else None


def _required(function: Any, parameters: Sequence[str]) -> set[str]:
    """Returns those of the positional parameters of a function that have no default."""
    positional = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    return {*positional[: len(positional) - len(function.args.defaults)]}.intersection(parameters)


def _positional(source: Source, call: ast.Call, first: int) -> list[ast.expr]:
    """Returns the positional arguments of the function that a call runs, whose own ones begin at `first`."""
    func: ast.expr = call.func
    if isinstance(func, ast.Name) and len(values := source.values_of(func)) == 1:
        func = values[0]
    is_partial = isinstance(func, ast.Call) and _name(func) == "partial"
    bound = func.args[1:] if isinstance(func, ast.Call) and is_partial else []
    return [*bound, *call.args[first:]]


def _is_called(source: Source, function: Any, call: ast.Call) -> bool:
    """Whether a call calls a function, what a transform such as `jax.vmap` makes of it, or a loop with it."""
    transformed = call.func.args if isinstance(call.func, ast.Call) else []
    given = call.args if _name(call) in {*_CARRIED, *_FIRST_ARGUMENT} else []
    branches = [each.elts if isinstance(each, (ast.List, ast.Tuple)) else [each] for each in given]
    every: Sequence[ast.expr] = [call.func, *transformed, *itertools.chain.from_iterable(branches)]
    names = (ast.unparse(each).rpartition(".")[2] for each in every if not isinstance(each, FUNCTIONS))
    return function in every or any(function in source.functions.get(name, ()) for name in names)


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def start_of(call: ast.Call) -> list[ast.expr]:
    """Returns that with which a loop starts, if a call runs one; a list of one expression or none."""
    position = _CARRIED.get(_name(call))
    return call.args[position:][:1] if position is not None else []


def entering(call: ast.Call) -> list[ast.expr]:
    """Returns what branches take that a call runs, or what its loop starts from."""
    is_branch = _name(call) in ("cond", "switch")
    return call.args[_FIRST_ARGUMENT[_name(call)] :] if is_branch else start_of(call)

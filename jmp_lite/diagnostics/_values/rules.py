"""Rules of custom derivatives that make half values by themselves, whatever their function computes in."""

import ast
import collections
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..._jaxpr import (
    Array,
    Category,
    Equation,
    Jaxpr,
    all_equations,
    bind,
    equations,
    inner_jaxprs,
    is_by_autocast,
    is_recomputed,
    is_transposed,
    open_jaxpr,
    traits_of,
)
from .reference import is_narrow
from .sites import line_of
from .source import FUNCTIONS, Source, expressions_at


def casts_in_rule(equation: Equation) -> bool:
    """Whether the user's rule of a custom derivative casts to half where its function does not."""
    if equation.primitive.name not in ("custom_jvp_call", "custom_vjp_call"):
        return False
    function = open_jaxpr(inner_jaxprs(equation)[0].jaxpr)
    # Those of JAX follow the dtypes of the operands: "relu at /site-packages/jax/_src/nn/functions.py:60". An
    # autocast inside runs a function of its own.
    if "site-packages" in str(function.debug_info.func_src_info) and not is_by_autocast(equation):
        return False
    # The jaxpr of the rule does not show its casts of operands that are half already.
    if any(map(is_narrow, equation.invars)):
        return _may_cast(line_of(equation))

    def floating(*arrays: Array) -> list[Array]:
        return [result for result in bind(equation, arrays) if jnp.issubdtype(result.dtype, jnp.inexact)]

    def derivative(*arrays: Array) -> Any:
        results, pullback = jax.vjp(floating, *arrays)
        return pullback(list(map(jnp.ones_like, results)))

    traced = jax.make_jaxpr(derivative)(*(var.aval for var in equation.invars))
    # JAX gives the operations of a backward rule the line of the call.
    own = set(map(line_of, all_equations(function)))
    return any(_casts(each) and line_of(each) not in own for each in all_equations(traced))


def _casts(equation: Equation) -> bool:
    is_cast = equation.primitive.name == "convert_element_type"
    return is_cast and is_narrow(equation.outvars[0]) and not is_narrow(equation.invars[0])


def operations_of_rules(jaxpr: Jaxpr) -> set[int]:
    """Returns the ids of the operations of backward rules of the program in a gradient that may cast to half.

    The jaxpr does not show those of its casts whose operands were half already, so its source is read.
    """
    every = list(_with_pass(jaxpr, False))
    forward = {line_of(equation) for equation, is_backward in every if not is_backward}
    # JAX gives the operations of a backward rule the line of the call. The forward pass has others on it only
    # under autocast.
    lines = {line_of(equation) for equation, is_backward in every if is_backward} - {""}
    found = {line for line in lines if _may_cast(line, line in forward)}
    return {id(equation) for equation, is_backward in every if is_backward and line_of(equation) in found}


def _with_pass(jaxpr: Jaxpr, is_backward: bool) -> Iterator[tuple[Equation, bool]]:
    """Yields all equations of a jaxpr, inner ones too, and for each whether a backward pass has made it."""
    for equation in equations(jaxpr):
        own = (is_backward or is_transposed(equation)) and not is_recomputed(equation)
        yield equation, own
        if traits_of(equation.primitive.name).category is Category.CALL:
            for inner in inner_jaxprs(equation):
                yield from _with_pass(inner.jaxpr, own)


def _may_cast(line: str, otherwise_not: bool = False) -> bool:
    """Whether the rule of a function that is called at a line casts to half.

    If no rule is found, it may be that of another module, unless `otherwise_not`.
    """
    source, nodes = expressions_at(line)
    if source is None:
        return not otherwise_not
    # What JAX makes for an operator, or for a function of its own, is no rule.
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    named = (ast.unparse(call.func) for call in calls if isinstance(call.func, (ast.Name, ast.Attribute)))
    called = {name for name in named if not _is_of_jax(source.value_of(name))}
    # A name is that of a function around both.
    around = {function for call in calls for function in source.functions_around(call)}
    every = (rule for name in called for rule in _rules_in(source).get(name, ()))
    rules = [rule for rule in every if around.issuperset(source.functions_around(rule))]
    if not rules:
        return bool(called) and not otherwise_not
    return any(_makes_half(source, rule, set()) for rule in rules)


@functools.lru_cache(maxsize=16)
def _rules_in(source: Source) -> Mapping[str, list[ast.AST]]:
    """Returns the backward rules and the rules of `custom_jvp` in a file, by the names of their functions."""
    rules: dict[str, list[ast.AST]] = collections.defaultdict(list)
    for node in (node for nodes in source.nodes.values() for node in nodes):
        match node:
            case ast.Call(func=ast.Attribute(value=function, attr="defvjp" | "defjvp" as kind)):
                position, name = {"defvjp": (1, "bwd"), "defjvp": (0, "jvp")}[kind]
                named = [keyword.value for keyword in node.keywords if keyword.arg == name]
                rules[ast.unparse(function)] += [*node.args[position : position + 1], *named]
    for function in (function for functions in source.functions.values() for function in functions):
        for decorator in map(ast.unparse, getattr(function, "decorator_list", [])):
            if decorator.endswith(".defjvp"):
                rules[decorator.removesuffix(".defjvp")].append(function)
    return rules


def _makes_half(source: Source, function: ast.AST, seen: set[str]) -> bool:
    """Whether a function makes half values, or calls one that is not known."""
    if (name := ast.unparse(function)) in seen:
        return False
    seen.add(name)
    bodies = [function] if isinstance(function, FUNCTIONS) else source.functions.get(name, [])
    calls = [node for body in bodies for node in ast.walk(body) if isinstance(node, ast.Call)]
    # The method of an array has no name that the module knows.
    others = (call.func for call in calls if not _is_of_jax(source.value_of(ast.unparse(call.func))))
    named = [each for each in others if isinstance(each, ast.Name) or _is_of_module(source, each)]
    is_half = not bodies or any(map(source.makes_half, calls))
    return is_half or any(_makes_half(source, each, seen) for each in named)


def _is_of_jax(value: Any) -> bool:
    """Whether a value is a function of JAX or NumPy, or a builtin."""
    return (getattr(value, "__module__", None) or "").partition(".")[0] in ("jax", "numpy", "builtins")


def _is_of_module(source: Source, node: ast.expr) -> bool:
    """Whether a name with dots begins with a module."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and isinstance(source.value_of(node.id), types.ModuleType)

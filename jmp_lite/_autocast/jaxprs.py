"""How to read and repeat an equation: all that differs between JAX's versions, in one place.

Public interfaces only: `jax.extend.core`, `jax.extend.source_info_util`, and the parameters that
`jax.make_jaxpr` prints. tests/autocast/test_jaxprs.py names every parameter that is relied upon.
"""

import contextlib
import dataclasses
import enum
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Literal, jaxprs_in_params

from .._paths import join

# Names of scopes by which autocast knows, in any trace, what it has done and what it must not touch.
AUTOCAST_SCOPE = "jmp_lite.autocast"
FULL_PRECISION_SCOPE = "jmp_lite.full_precision"
KEEP_F32_NAME = "jmp_lite.keep_f32"

# What makes jax.jit leave no trace of itself in the jaxpr around it. Since JAX 0.12 `True` is something less.
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # pyright: ignore[reportAttributeAccessIssue]


class Role(enum.Enum):
    """How an inner jaxpr takes an operand of its equation."""

    ONCE = "once"
    CONSTANT = "the same in every iteration of a loop"
    CARRY = "changed by every iteration of a loop"
    ELEMENT = "one slice an iteration"


@dataclasses.dataclass(frozen=True)
class Inner:
    """One jaxpr inside an equation, and how its variables belong to those of the equation.

    Attributes:
        jaxpr: the inner jaxpr.
        operands: for each of its inputs, the place of the equation's operand.
        roles: for each of its inputs, how it is taken.
        results: for each of its outputs, the place of the equation's result; None if it is no result.
        carries: for each of its outputs, whether it is the carry of a loop.
    """

    jaxpr: Any
    operands: tuple[int, ...]
    roles: tuple[Role, ...]
    results: tuple[int | None, ...]
    carries: tuple[bool, ...]


def equations(jaxpr: Any) -> Sequence[Any]:
    """Returns the equations of a jaxpr, closed or open."""
    return jaxpr.eqns


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the jaxpr within a closed one; an open one as it is. From JAX 0.11 on they are one class."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> tuple[Any, ...]:
    """Returns the values of the constants of a jaxpr; none for an open one."""
    return tuple(getattr(jaxpr, "consts", ()))


def without_constants(jaxpr: Any) -> Any:
    """Returns a closed jaxpr as an open one that takes its constants as its first inputs."""
    inside = open_jaxpr(jaxpr)
    return inside.replace(constvars=(), invars=[*inside.constvars, *inside.invars])


def is_float32(var: Any) -> bool:
    """Whether a variable or literal of a jaxpr holds float32, the one dtype that autocast changes."""
    return getattr(var.aval, "dtype", None) == jnp.float32


def is_literal(var: Any) -> bool:
    """Whether an operand is a constant written into the equation."""
    return isinstance(var, Literal)


def name_of(equation: Any) -> str:
    """Returns the name by which the lists know an operation: its primitive's, or what it amounts to."""
    name = equation.primitive.name
    if name == "mul" and equation.invars[0] is equation.invars[1] and not is_literal(equation.invars[0]):
        return "square"
    if name == "div" and is_literal(equation.invars[0]):
        return "reciprocal"
    if name == "dot_general" and not asked_precision(equation):
        (contracted, _), (batch, _) = equation.params["dimension_numbers"]
        if math.prod(equation.invars[0].aval.shape[axis] for axis in contracted) <= 1:
            return "outer_product"
        if all(var.aval.ndim == len(contracted) + len(batch) for var in equation.invars):
            return "inner_product"
    return name


def asked_precision(equation: Any) -> str:
    """Returns the precision that the program asks of a product; empty if it asks for none."""
    precision = equation.params.get("precision")
    both = precision if isinstance(precision, tuple) else (precision,)
    return " and ".join(sorted({str(getattr(each, "name", each)) for each in both} - {"DEFAULT", "None"}))


def inner_jaxprs(equation: Any) -> tuple[Inner, ...]:
    """Returns the jaxprs that `equation` runs, if it is one of `rules.CALLS`."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return (_scan_body(equation),)
    if name == "while":
        return _while_parts(equation)
    if name == "cond":
        return tuple(_called(branch, first_operand=1) for branch in params["branches"])
    (jaxpr,) = jaxprs_in_params(params)
    # The closed jaxpr, with its constants, where the parameter holds one.
    closed = [value for value in params.values() if open_jaxpr(value) is jaxpr]
    return (_called(closed[0] if closed else jaxpr, first_operand=0),)


def _called(jaxpr: Any, first_operand: int) -> Inner:
    inputs, outputs = len(open_jaxpr(jaxpr).invars), len(open_jaxpr(jaxpr).outvars)
    return Inner(
        jaxpr,
        operands=tuple(range(first_operand, first_operand + inputs)),
        roles=(Role.ONCE,) * inputs,
        results=tuple(range(outputs)),
        carries=(False,) * outputs,
    )


def _scan_body(equation: Any) -> Inner:
    """A scan's operands are constants, carry and slices, its results carry and slices.

    How their numbers are written differs between versions; the ranks tell: what is sliced has an axis more
    outside than inside.
    """
    body = equation.params["jaxpr"]
    inside = open_jaxpr(body)
    sliced_in = sum(out.aval.ndim != inner.aval.ndim for out, inner in zip(equation.invars, inside.invars))
    sliced_out = sum(out.aval.ndim != inner.aval.ndim for out, inner in zip(equation.outvars, inside.outvars))
    carry = len(inside.outvars) - sliced_out
    constant = len(inside.invars) - carry - sliced_in
    return Inner(
        body,
        operands=tuple(range(len(inside.invars))),
        roles=(Role.CONSTANT,) * constant + (Role.CARRY,) * carry + (Role.ELEMENT,) * sliced_in,
        results=tuple(range(len(inside.outvars))),
        carries=(True,) * carry + (False,) * sliced_out,
    )


def _while_parts(equation: Any) -> tuple[Inner, Inner]:
    """The condition and the body of a while loop."""
    params, total = equation.params, len(equation.invars)
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    first_carry = of_condition + of_body
    carry = tuple(range(first_carry, total))

    def part(jaxpr: Any, constants: range, results: tuple[int | None, ...]) -> Inner:
        roles = (Role.CONSTANT,) * len(constants) + (Role.CARRY,) * len(carry)
        return Inner(
            jaxpr, (*constants, *carry), roles, results, tuple(place is not None for place in results)
        )

    return (
        part(params["cond_jaxpr"], range(of_condition), (None,)),
        part(params["body_jaxpr"], range(of_condition, first_carry), tuple(range(len(carry)))),
    )


def scope_of(equation: Any, around: str = "") -> str:
    """Returns the named scopes and Flax modules around an equation, joined by slashes.

    What transforms add to the names is left out: `transpose(jvp(decoder))/head` is `decoder/head`.

    Args:
        equation: the equation.
        around: the scope in which its jaxpr is run.
    """
    scope = plain_scope(str(equation.source_info.name_stack))
    return join(around, scope) if scope else around


def plain_scope(name_stack: str) -> str:
    """Returns a name stack without the transforms around its names.

    >>> plain_scope("transpose(jvp(decoder))/head"), plain_scope("jvp()")
    ('decoder/head', '')
    """
    names = re.sub(r"\w+\(|\)", "", name_stack) if "(" in name_stack else name_stack
    return "/".join(name for name in names.split("/") if name)


def visible_scope(scope: str) -> str:
    """Returns a scope without the names that only autocast reads."""
    return "/".join(name for name in scope.split("/") if name not in (AUTOCAST_SCOPE, FULL_PRECISION_SCOPE))


def call_scope(scope: str, equation: Any) -> str:
    """Returns the scope of what a call runs: a jitted function's name counts as one."""
    name = equation.params.get("name")
    return join(scope, name) if isinstance(name, str) else scope


@contextlib.contextmanager
def context_of(equation: Any) -> Iterator[None]:
    """What is bound inside keeps the named scopes, source line, mesh and metadata of `equation`."""
    source = equation.source_info
    stack = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=stack), equation.ctx.manager:
        yield


def bind(equation: Any, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """Runs the primitive of `equation` on other operands, with some of its parameters changed.

    An operation that a program has many times, as in each of its layers, is differentiated once: it runs in
    an inlined `jax.jit`, like jnp's functions, whose derivatives JAX remembers. The jaxpr stays the same, and
    a deep model is traced in two thirds of the time.
    """
    primitive, params = equation.primitive, tuple((equation.params | changed).items())
    operation = _inlined if _may_be_remembered(equation) and _hashable(params) else _operation
    results = operation(primitive, params)(*operands)
    return list(results) if primitive.multiple_results else [results]


def _may_be_remembered(equation: Any) -> bool:
    """Whether it is an operation of `jax.lax` itself, whose parameters are plain and mean what they equal.

    Those of others may be functions, which would be kept alive, or 0.0 and -0.0, which are equal.
    """
    own = getattr(lax, f"{equation.primitive.name}_p", None) is equation.primitive
    return own and not equation.effects and not any(True for _ in jaxprs_in_params(equation.params))


def _operation(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return functools.partial(primitive.bind, **primitive.get_bind_params(dict(params)))


@functools.lru_cache(maxsize=4096)
def _inlined(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(_operation(primitive, params), inline=INLINE)


def _hashable(params: tuple[tuple[str, Any], ...]) -> bool:
    try:
        hash(params)
    except TypeError:
        return False
    return True


@functools.partial(jax.jit, static_argnums=1, inline=INLINE)
def cast(x: Any, dtype: Any) -> Any:
    """Returns `x` in `dtype`; differentiated once, as in `bind`."""
    return lax.convert_element_type(x, dtype)


def source_line(equation: Any) -> str:
    """Returns the user's line that made an equation, as `file.py:12 (function)`."""
    return source_info_util.summarize(equation.source_info)

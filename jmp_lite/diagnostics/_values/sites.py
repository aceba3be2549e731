"""Sites: the points of a program at which values are measured."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._autocast import Decision, Kind, Plan
from ..._dtypes import HALF_DTYPES
from ..._jaxpr import (
    Array,
    Equation,
    Var,
    call_scope,
    calling_line,
    describe,
    is_literal,
    is_recomputed,
    is_transposed,
    scope_of,
    source_line,
)
from ..._paths import visible_scope

Path = tuple[int, ...]
"""The position of a site: two numbers for each equation around it and its own. Paths sort as the program."""


class SiteKind(enum.Enum):
    """What kind of value is measured."""

    INPUT = "an argument of the function, or a constant in it"
    OPERATION = "the result of an operation"
    ENTRY = "a value that enters a loop or a shard"
    LEAVE = "a value that leaves a loop, a branch or a shard"
    OPERAND = "a value that an operation takes in half"


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop around a site. The shards of a `shard_map` count as one."""

    kind: str  # `scan`, `while` or `shard_map`.
    path: Path  # The path of its body. All paths in the body begin with it.
    length: int  # The iterations or shards; of a while loop, the iterations that are kept.
    reverse: bool = False  # Whether a scan runs from the last slice to the first.


@dataclasses.dataclass(frozen=True)
class Site:
    """A point of the program at which a value is measured."""

    path: Path
    kind: SiteKind
    operation: str  # The primitive; for an input, `argument` or `constant`.
    shape: tuple[Any, ...]
    dtype: np.dtype
    loops: tuple[Loop, ...]  # The outermost first.
    is_scaled: bool  # Whether it depends on the loss scale, as gradients do.
    operands: tuple[str, ...] = ()  # The dtype and shape of each operand, or the number of a literal.
    numbers: tuple[float | None, ...] = ()  # For each operand that is known while tracing, the number.
    sources: tuple[Path | None, ...] = ()  # For each operand, the site at which it was measured.
    module: str = ""  # The scopes, Flax modules and jitted functions around it, with slashes.
    argument: str = ""  # The path of the argument that it is, or that the operation takes.
    last_parameter: str = ""  # The path of the last parameter that it was computed from.
    line: str = ""  # Such as `file.py:12:4 (function)`.
    direction: str = "forward"  # `forward`, `backward`, or `recomputed` in the backward pass.
    caller: str = ""  # The user's line if `line` is in a library.

    @property
    def array(self) -> str:
        """The dtype and shape in words, such as `float16[8,128]`."""
        return describe(jax.ShapeDtypeStruct(self.shape, self.dtype))

    @property
    def place(self) -> str:
        """The module; without one, the object that holds the argument or the last parameter.

        A scope such as `eqx.nn.Linear` is a class name, shared by all its instances.
        """
        holder = (self.argument or self.last_parameter).rpartition("/")[0]
        is_class = "." in self.module.rpartition("/")[2]
        return holder if holder and (is_class or not self.module) else self.module

    def number(self, operand: int) -> tuple[float, float] | None:
        """Returns an operand that is known while tracing as its range, the number twice; None for others."""
        known = self.numbers[operand] if operand < len(self.numbers) else None
        return None if known is None else (known, known)

    @property
    def is_half(self) -> bool:
        return self.dtype in HALF_DTYPES


@dataclasses.dataclass(frozen=True)
class Where:
    """The surroundings of a jaxpr in the program; `direction` and `loops` as in `Site`."""

    path: Path = ()
    scope: str = ""  # The scopes around it.
    direction: str = "forward"
    loops: tuple[Loop, ...] = ()
    line: str = ""  # That of the call around it, for operations without a line of their own.
    plan: Plan | None = None  # The plan of autocast for it, if the tap runs with one.

    def loop(self, kind: str, length: int, reverse: bool = False) -> "Where":
        return dataclasses.replace(self, loops=(*self.loops, Loop(kind, self.path, length, reverse)))


class Point(NamedTuple):
    """An equation of the program."""

    equation: Equation
    where: Where
    position: int  # In its jaxpr.

    @property
    def decision(self) -> Decision | None:
        """What autocast would do with the equation, if there is a plan."""
        return None if self.where.plan is None else self.where.plan.decisions[self.position]

    def would_be_half(self, number: int) -> bool:
        """Whether autocast would make a result of the equation in half."""
        return self.decision is not None and self.decision.results[number].kind == Kind.HALF

    def path(self, number: int) -> Path:
        """Returns the path of a result; operands have negative numbers."""
        return (*self.where.path, self.position, number)

    def inside(self, number: int) -> Where:
        """Returns the surroundings of an inner jaxpr of the equation."""
        (equation, where, _), decision = self, self.decision
        return Where(
            self.path(number),
            call_scope(_without_repeats(scope_of(equation, where.scope)), equation),
            _direction(equation, where.direction),
            where.loops,
            line_of(equation) or where.line,
            decision.inner[number] if decision is not None and decision.inner else None,
        )

    def site(self, path: Path, kind: SiteKind, operands: Sequence[Any], array: Array) -> Site:
        equation, where, _ = self
        exponents = [equation.params["y"]] if equation.primitive.name == "integer_pow" else []
        is_operation = kind is SiteKind.OPERATION
        described = [*map(_described, equation.invars, operands), *map(str, exponents)]
        numbers = [*map(_number, equation.invars, operands), *map(float, exponents)]
        return Site(
            path=path,
            kind=kind,
            operation=equation.primitive.name,
            shape=array.shape,
            dtype=array.dtype,
            loops=where.loops,
            is_scaled=any(value.is_scaled for value in operands),
            operands=tuple(described) if is_operation else (),
            numbers=tuple(numbers) if is_operation else (),
            sources=(*(value.source for value in operands), *(None for _ in exponents)),
            module=visible_scope(_without_repeats(scope_of(equation, where.scope))),
            argument=_argument_of(operands),
            last_parameter=last_parameter_of(operands),
            line=line_of(equation) or where.line,
            direction=_direction(equation, where.direction),
            caller=calling_line(equation),
        )


def last_parameter_of(operands: Sequence[Any]) -> str:
    """Returns the last parameter that any of some operands was computed from."""
    return next((value.last_parameter for value in reversed(operands) if value.last_parameter), "")


def _argument_of(operands: Sequence[Any]) -> str:
    """Returns the path of the last parameter among some operands; without one, of the last argument."""
    parameters = [
        value.argument for value in operands if value.argument and value.argument == value.last_parameter
    ]
    return next(reversed(parameters or [value.argument for value in operands if value.argument]), "")


def _described(var: Var, value: Any) -> str:
    if value.number is not None:
        return f"{value.number:.4g}"
    return str(var.val) if is_literal(var) else describe(var.aval)


def _number(var: Var, value: Any) -> float | None:
    """Returns the number of an operand that is known while tracing."""
    if value.number is not None:
        return float(f"{value.number:.4g}")  # As it is shown.
    is_number = is_literal(var) and jnp.issubdtype(var.aval.dtype, jnp.number)
    return None if not is_number or jnp.issubdtype(var.aval.dtype, jnp.complexfloating) else float(var.val)


def in_half(value: Any) -> bool:
    """Whether an array, a variable of a jaxpr or its type is in float16 or bfloat16."""
    return getattr(getattr(value, "aval", value), "dtype", None) in HALF_DTYPES


def _direction(equation: Equation, around: str) -> str:
    if is_recomputed(equation):
        return "recomputed"
    if around != "forward":
        return around
    return "backward" if is_transposed(equation) else "forward"


def line_of(equation: Equation) -> str:
    """Returns the line of the program that an equation comes from; empty if JAX knows none."""
    return source_line(equation).removeprefix("<unknown>")


def _without_repeats(scope: str) -> str:
    """Returns a scope as in the forward pass: under `jax.checkpoint` JAX repeats it, `a/a`, with a name."""
    names = [name for name in scope.split("/") if name != "rematted_computation"]
    half = len(names) // 2
    return "/".join(names[:half] if names[:half] == names[half:] else names)

"""Sites: the points of a program at which values are measured."""

import dataclasses
import enum
from typing import Any

import jax
import numpy as np

from ..._dtypes import FLOAT8_DTYPES, HALF_DTYPES
from ..._jaxpr import Equation, describe, source_line

NARROW = frozenset((*HALF_DTYPES, *FLOAT8_DTYPES))
"""The dtypes that round: half precision and fp8."""
Path = tuple[int, ...]
"""The position of a site: two numbers for each equation around it and its own. Paths sort as the program."""


class SiteKind(enum.Enum):
    """What kind of value is measured."""

    INPUT = "an argument of the function, or a constant in it"
    OPERATION = "the result of an operation"
    ENTRY = "a value that enters a loop or a shard"
    LEAVE = "a value that leaves a loop, a branch or a shard"
    CUT = "1 if a while loop was stopped, since it did not end, and else 0"


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop around a site. The shards of a `shard_map` count as one."""

    kind: str  # `scan`, `while` or `shard_map`.
    path: Path  # The path of its body. All paths in the body begin with it.
    length: int  # The iterations or shards; of a `while` those that are kept.
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

    @property
    def is_half(self) -> bool:
        return self.dtype in HALF_DTYPES


def line_of(equation: Equation) -> str:
    """Returns the line of the program that an equation comes from; empty if JAX knows none."""
    return source_line(equation).removeprefix("<unknown>")

"""Reads the source lines of equations: those of the user's program, of packages, and of this library."""

import functools
import inspect
import itertools
import os
import types
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
from jax.extend import source_info_util

from .primitives import Category, traits_of
from .read import Equation

_PACKAGES = ("site-packages", "dist-packages")
_OURS, _JAX = (os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), inspect.getfile(jax)))


def source_line(equation: Equation) -> str:
    """Returns the line that made an equation, as `file.py:12 (function)`.

    It may be one of ours, such as a cast of a policy.
    """
    # The matmuls under a policy are those of its layers.
    is_product = traits_of(equation.primitive.name).category is Category.ALLOW
    return users_line(equation) if is_product else source_info_util.summarize(equation.source_info)


def users_line(equation: Equation) -> str:
    """Returns the line of the user's program that made an equation, as `file.py:12 (function)`."""
    line = source_info_util.summarize(equation.source_info)
    if not line.startswith(_OURS):
        return line
    # A function of ours, such as a cast of a policy, that the user's program calls.
    frames = iter(equation.source_info.traceback.frames)
    while not next(frames).file_name.startswith(_OURS):
        pass
    return _first_line(frame for frame in frames if not frame.file_name.startswith((_OURS, _JAX))) or line


def calling_line(equation: Equation) -> str:
    """Returns the line outside of all packages that made an equation; empty if its own line is there."""
    line = source_line(equation)
    if not line.startswith(_OURS) and not any(name in line for name in _PACKAGES):
        return ""
    frames = equation.source_info.traceback.frames
    return _first_line(frame for frame in frames if not is_of_package(frame.file_name))


def casting_line(equation: Equation) -> str:
    """Returns the line that calls a function of ours, such as a cast of a policy, that made an equation.

    Empty if no such function did, or if an adapter of ours called it for a model.
    """
    files = (frame.file_name for frame in equation.source_info.traceback.frames)
    inner = list(itertools.takewhile(lambda file: file.startswith((_OURS, _JAX)), files))
    is_ours = any(file.startswith(_OURS) for file in inner)
    is_adapter = any(f"{os.sep}_flax{os.sep}" in file for file in inner)
    return users_line(equation) if is_ours and not is_adapter else ""


Span: TypeAlias = tuple[str, tuple[int, int], tuple[int, int]]
"""A file, and where an expression in it begins and ends: each is a line and a column."""


def users_places(equation: Equation) -> Iterator[Span]:
    """Yields the expression of the user that made an equation, and then the calls around it, inner first."""
    for code, instruction in zip(*equation.source_info.traceback.raw_frames()):
        if not is_of_package(code.co_filename):
            # Code of the same text in two files is equal.
            yield _place(code, code.co_filename, instruction)


@functools.lru_cache(maxsize=4096)
def _place(code: types.CodeType, file: str, instruction: int) -> Span:
    # Two bytes are one instruction.
    positions = next(itertools.islice(code.co_positions(), instruction // 2, None))
    row, end_row, column, end_column = (position or 0 for position in positions)
    return file, (row, column), (end_row, end_column)


def is_of_lax(equation: Equation) -> bool:
    """Whether the program, or a package, called a function of `jax.lax` that made an equation."""
    files = (frame.file_name for frame in equation.source_info.traceback.frames)
    inner = itertools.takewhile(lambda file: file.startswith(_JAX), files)
    # A wrapper that shortens tracebacks is around each function.
    called = [file for file in inner if not file.endswith("traceback_util.py")]
    return bool(called) and called[-1].startswith(os.path.join(_JAX, "_src", "lax", ""))


def users_stacklevel() -> int:
    """Returns the `stacklevel` with which a warning of the caller names the line of the user's program."""
    # `skip_file_prefixes` of `warnings.warn` needs Python 3.12.
    files = [frame.filename for frame in inspect.stack(context=0)[1:]]
    return next((number for number, file in enumerate(files, 1) if not is_of_package(file)), 1)


def _first_line(frames: Iterator[Any]) -> str:
    return next((f"{f.file_name}:{f.line_num} ({f.function_name})" for f in frames), "")


def is_of_package(file: str) -> bool:
    """Whether a file belongs to a package that is installed, such as JAX or this one."""
    return any(package in file for package in _PACKAGES) or file.startswith((_OURS, _JAX))

"""The program with edits written into it: its source is changed, and its arguments are passed in float32."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from ..._autocast import run
from ..._jaxpr import Array, has_objects
from ..._paths import positional_names
from .._values.case import Case
from .._values.edited import are_known, edited, in_float32, watched
from .._values.layers import in_float32 as layers_in_float32
from .._values.reference import is_narrow
from .._values.trace import EVERY_CAST, LossProgram
from .flags import FlaggedProgram
from .modules import Module, scopes_for

Written: TypeAlias = Callable[[Sequence[Array]], list[Array]]
"""A function of arrays such as `FlaggedProgram.arrays()` with the results of a program, in float32."""


def can_write(case: Case, kept: Collection[Module]) -> bool:
    """Whether the tool can write some edits: of lines, layers and arguments, and rules of autocast."""
    wide = {edit.name for edit in kept if edit.is_argument}
    given = [tree for name, tree in _named(case).items() if name in wide]
    is_known = not any(edit.policy or edit.autocast or edit.is_gradient for edit in kept)
    # Of rules alone the runs say the same. JAX would copy a module of NNX, of which another argument may hold
    # the same one.
    is_known &= not all(edit.pattern for edit in kept)
    return is_known and len(given) == len(wide) and not has_objects(given) and has_lines(kept)


def has_lines(kept: Collection[Module]) -> bool:
    """Whether the source has what some edits change: a dtype or a loop on each line."""
    return are_known(*_lines_of(kept))


def write(case: Case, program: FlaggedProgram, kept: Collection[Module]) -> Written:
    """Traces a case again with some edits, and returns its results as those of a flagged program."""
    args, kwargs = case.arguments
    wide = {edit.name for edit in kept if edit.is_argument}
    names = positional_names(case.call.fun)
    args = tuple(in_float32(arg) if name in wide else arg for name, arg in zip(names, args))
    args += case.arguments[0][len(args) :]
    kwargs = {name: in_float32(arg) if name in wide else arg for name, arg in kwargs.items()}
    scopes = scopes_for([edit for edit in kept if edit.pattern], program.edits, program.dtype.name)
    rules = dataclasses.replace(case.rules, scopes=(*scopes, *case.rules.scopes)) if scopes else case.rules
    layers = [edit.layer for edit in kept if edit.layer]
    # A backward rule of the program runs while its gradient is traced. JAX may warn of an edit that is tried.
    with (
        warnings.catch_warnings(),
        edited(case.functions, *_lines_of(kept)),
        layers_in_float32(layers, _named(case)),
    ):
        warnings.simplefilter("ignore")
        other = dataclasses.replace(case, arguments=(args, kwargs))
        written = other.program_of(functools.partial(run, *other.planned(rules)))
    return _as(written, program)


def silent_casts(case: Case, program: FlaggedProgram) -> list[Module]:
    """Returns the edits of the half dtypes that the program takes where JAX has nothing to cast.

    JAX traces no operation for a cast of a value that is in half already. Once other edits make the value
    float32, the cast rounds it.
    """
    found = dict[str, str]()
    with watched(case.functions, found):
        other = dataclasses.replace(case)
        other.program_of(functools.partial(run, *other.planned(case.rules)))
    known = {line for edit in program.edits if edit.casts for line in edit.lines}
    return [Module(line, "", (line,), casts=name) for line, name in found.items() if line not in known]


def _named(case: Case) -> dict[str, Any]:
    """Returns the arguments of a call by their names."""
    args, kwargs = case.arguments
    return {**dict(zip(positional_names(case.call.fun), args)), **kwargs}


def _lines_of(kept: Collection[Module]) -> tuple[list[str], list[str]]:
    """Returns the lines of the casts that some edits name, and those of loops whose carries they start."""
    casts = (line for edit in kept if edit.casts for line in edit.lines)
    return list(dict.fromkeys(casts)), list(dict.fromkeys(line for edit in kept for line in edit.carries))


def _as(written: LossProgram, program: FlaggedProgram) -> Written:
    """Returns a function of the arrays of a flagged program, which has constants of its own."""
    numbers = {name: number for number, name in enumerate(written.names) if name}
    # A Jaxpr is a ClosedJaxpr since JAX 0.11, and has an attribute `jaxpr` too.
    closed = written.jaxpr if hasattr(written.jaxpr, "jaxpr") else ClosedJaxpr(written.jaxpr, ())

    def results(arrays: Sequence[Array]) -> list[Array]:
        own = list(written.arrays)
        for number, array in enumerate(arrays):
            name, _ = program.argument(number)
            if name in numbers:
                own[numbers[name]] = jnp.asarray(array, written.arrays[numbers[name]].dtype)
        found = jaxpr_as_fun(closed)(*own)
        return [result.astype(jnp.float32) if is_narrow(result) else result for result in found]

    return jax.jit(results, compiler_options=EVERY_CAST)

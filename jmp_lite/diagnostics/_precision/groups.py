"""Outputs that are compared: all gradients of a loss and each of them, or one tree of a step."""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxpr import Array
from .flags import FlaggedProgram
from .report import LEAF

_NOISE = 0.01


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Outputs whose error is one number."""

    name: str  # The path that they share; empty for the gradients of a loss.
    numbers: tuple[int, ...]  # Their indexes among the outputs of the program.
    # The old parameters, for the new ones of a step: their changes are compared.
    before: tuple[Array, ...] | None = None

    def error(self, half: Sequence[Array], full: Sequence[Array]) -> tuple[float, float]:
        """Returns the relative error and the cosine, as one vector; inf and NaN if one is not finite."""
        return error_of(*self._norms(half, full).sum(axis=0))

    def errors(self, half: Sequence[Array], full: Sequence[Array]) -> dict[int, float]:
        """Returns the relative error of each output that is not zero in float32, by its index."""
        norms = zip(self.numbers, self._norms(half, full))
        return {number: error_of(*row)[0] for number, row in norms if row[-1]}

    def unchanged(self, half: Sequence[Array], full: Sequence[Array]) -> set[int]:
        """Returns the outputs that are zero in half, or as they were before."""
        return {number for number, row in zip(self.numbers, self._norms(half, full)) if not row[1]}

    def _norms(self, half: Sequence[Array], full: Sequence[Array]) -> np.ndarray:
        pick = lambda arrays: [arrays[number] for number in self.numbers]
        units = [float(size) or 1.0 for size in _largest(pick(full))]
        before = self.before or [0.0] * len(units)
        sums = np.asarray(_sums(pick(half), pick(full), list(before), units), np.float64).reshape(-1, 3)
        # The squares of small gradients would be zero in float32, so each array is divided by its unit.
        return np.square(units)[:, None] * sums


def error_of(difference: float, half: float, full: float) -> tuple[float, float]:
    """Returns the relative error and the cosine of a vector, from squared norms as `_sums` has them."""
    if not math.isfinite(difference + half + full):
        return math.inf, math.nan
    if not full:
        return (math.inf, 0.0) if difference else (0.0, 1.0)
    cosine = (half + full - difference) / 2 / math.sqrt(half * full) if half else 0.0
    return math.sqrt(difference / full), min(1.0, max(-1.0, cosine))


@jax.jit
def _largest(arrays: list[Array]) -> list[Array]:
    return [jnp.max(jnp.abs(array), initial=0) for array in arrays]


@jax.jit
def _sums(half: list[Array], full: list[Array], before: list[Any], units: list[float]) -> list[Array]:
    """Returns for each array the squared norms of the difference, of half and of float32, in units."""
    square = lambda x: jnp.sum(jnp.real(x * jnp.conj(x)))
    rows = []
    for one, other, old, unit in zip(half, full, before, units):
        one, other = (one - old) / unit, (other - old) / unit
        rows.append(jnp.stack([square(one - other), square(one), square(other)]))
    return rows


def groups_of(program: FlaggedProgram, full: Sequence[Array]) -> list[Group]:
    """Returns the groups of the outputs of a program; `full` are the outputs in float32."""
    if not program.is_step:
        return [Group("", tuple(range(1, len(program.outputs))))] if len(program.outputs) > 1 else []
    trees: dict[str, list[int]] = collections.defaultdict(list)
    suffixes = {name.partition("/")[2] for name in program.parameters}
    for number, name in enumerate(program.outputs):
        suffix = max((s for s in suffixes if s and f"/{name}".endswith(f"/{s}")), key=len, default="")
        trees[name.removesuffix(suffix).rstrip("/") if suffix else name].append(number)
    arrays, state = program.arrays(1.0), updated(program, full)

    def group(name: str, numbers: Sequence[int]) -> Group:
        # A step changes its state by a small part, which the values would hide.
        is_state = all(number in state for number in numbers)
        before = tuple(arrays[state[number]] for number in numbers) if is_state else None
        return Group(name, tuple(numbers), before)

    return [group(name, numbers) for name, numbers in trees.items()]


def updated(program: FlaggedProgram, full: Sequence[Array]) -> dict[int, int]:
    """Returns the results that are new values of arguments, and the indexes of the arguments.

    The gradients of a function that returns them look like its new parameters, and are far from the old ones.
    """
    arrays = program.arrays(1.0)
    new = {n: index for n, index in program.state.items() if program.name_of(index) in program.parameters}
    square = lambda array: float(jnp.sum(jnp.square(jnp.abs(array))))
    moves = sum(square(full[number] - arrays[index]) for number, index in new.items())
    is_far = moves >= sum(square(arrays[index]) for index in new.values()) / 4
    return {n: index for n, index in program.state.items() if not (is_far and n in new)}


class Leaves:
    """The outputs, each compared alone: a wrong gradient may have a small share of the norm of all."""

    def __init__(self, program: FlaggedProgram, full: Sequence[Array], groups: Sequence[Group]) -> None:
        self._program, self._full, self._groups = program, full, groups

    def worst(self, half: Sequence[Array], full: Sequence[Array]) -> tuple[float, str, str]:
        """Returns the largest error of an output, over its own norm, its path, and that of a zero output.

        Of a step only those outputs count that do not change in half and do in float32: Adam divides each
        gradient by its size, so that the error of a small one is as large as that of any other.
        """
        errors = self._errors(half, full)
        unchanged = set[int]().union(*(group.unchanged(half, full) for group in self._groups))
        zeros = {number: error for number, error in errors.items() if number in unchanged}
        errors = zeros if self._program.is_step else errors
        if not errors:
            return 0.0, "", ""
        number = max(errors, key=lambda number: (errors[number], -number))
        paths = self._program.outputs
        return errors[number], paths[number], paths[min(zeros)] if zeros else ""

    def _errors(self, half: Sequence[Array], full: Sequence[Array]) -> dict[int, float]:
        errors = [pair for group in self._groups for pair in group.errors(half, full).items()]
        if all(error <= LEAF for _, error in errors):
            return dict(errors)
        return {number: error for number, error in errors if number not in self._noise}

    @functools.cached_property
    def _noise(self) -> set[int]:
        """The gradients that are rounding errors in float32 as well, so that no dtype has them right.

        That of a bias in front of a normalization is one: it would be zero if sums were exact. The last
        digits of the parameters change such a gradient as a whole, and other gradients of real models by
        1e-5 at most.
        """
        near = self._program(None, 1.0, nudge=2.0**-23)
        errors = [pair for group in self._groups for pair in group.errors(near, self._full).items()]
        return {number for number, error in errors if error > _NOISE}

"""Outputs that are compared together: all gradients of a loss, or one tree of a step, as Adam's moments."""

import collections
import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxpr.read import Array
from .flags import FlaggedProgram


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Outputs whose error is one number."""

    name: str  # The path that they share; empty for the gradients of a loss.
    numbers: tuple[int, ...]  # Their indexes among the outputs of the program.
    # The old parameters, for the new ones of a step: their changes are compared.
    before: tuple[Array, ...] | None = None

    def error(self, half: Sequence[Array], full: Sequence[Array]) -> tuple[float, float]:
        """Returns the relative error and the cosine, as one vector; inf and NaN if one is not finite."""
        pick = lambda arrays: [arrays[number] for number in self.numbers]
        units = [float(jnp.max(jnp.abs(array), initial=0)) or 1.0 for array in pick(full)]
        before = self.before or [jnp.zeros_like(array) for array in pick(full)]
        sums = np.asarray(_sums(pick(half), pick(full), before, units), np.float64).reshape(-1, 3)
        # The squares of small gradients would be zero in float32, so each array is divided by its unit.
        return error_of(*(np.square(units)[:, None] * sums).sum(axis=0))


def error_of(difference: float, half: float, full: float) -> tuple[float, float]:
    """Returns the relative error and the cosine of a vector, from squared norms as `_sums` has them."""
    if not math.isfinite(difference + half + full):
        return math.inf, math.nan
    if not full:
        return (math.inf, 0.0) if difference else (0.0, 1.0)
    cosine = (half + full - difference) / 2 / math.sqrt(half * full) if half else 0.0
    return math.sqrt(difference / full), min(1.0, max(-1.0, cosine))


@jax.jit
def _sums(half: list[Array], full: list[Array], before: list[Array], units: list[float]) -> list[Array]:
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
    return [Group(name, tuple(numbers), _old(program, full, numbers)) for name, numbers in trees.items()]


def _old(program: FlaggedProgram, full: Sequence[Array], numbers: Sequence[int]) -> tuple[Array, ...] | None:
    """Returns the parameters of which some outputs are the new values; None if they are something else."""
    # A step changes its parameters by a small part, which their values would hide.
    old = list(program.parameters.values())
    new = [full[number] for number in numbers]
    if [array.shape for array in old] != [array.shape for array in new]:
        return None
    old = [jnp.asarray(array, jnp.float32) for array in old]
    moves = sum(float(jnp.sum(jnp.square(a - b))) for a, b in zip(new, old))
    return tuple(old) if moves < sum(float(jnp.sum(jnp.square(a))) for a in old) / 4 else None

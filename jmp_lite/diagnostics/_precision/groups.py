"""Outputs that are compared: all gradients of a loss and each of them, or one tree of a step."""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxpr import (
    Array,
    Category,
    Equation,
    Forward,
    Jaxpr,
    is_of_gradient,
    is_transposed,
    open_jaxpr,
    traits_of,
)
from .flags import FlaggedProgram
from .report import LEAF


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Outputs whose error is one number."""

    name: str  # The path that they share; empty for the gradients of a loss.
    numbers: tuple[int, ...]  # Their indexes among the outputs of the program.
    # The old parameters, for the new ones of a step: their changes are compared.
    before: tuple[Array, ...] | None = None

    def norms(self, half: Sequence[Array], full: Sequence[Array]) -> np.ndarray:
        """Returns for each output the squared norms of the difference, of half and of float32."""

        def pick(arrays):
            return [arrays[number] for number in self.numbers]

        before = self.before or [0.0] * len(self.numbers)
        sums = np.asarray(list(map(_sums, pick(half), pick(full), before)), np.float64).reshape(-1, 4)
        # In float64, which holds the square of the unit of any float32 array.
        return np.square(sums[:, :1]) * sums[:, 1:]


def error_of(difference: float, half: float, full: float) -> tuple[float, float]:
    """Returns the relative error and the cosine of a vector, from squared norms as `Group.norms` has them."""
    if not math.isfinite(difference + half + full):
        return math.inf, math.nan
    if not full:  # Zero in float32: any difference is infinitely large beside it.
        return (math.inf, 0.0) if difference else (0.0, 1.0)
    # |half - full|^2 = |half|^2 + |full|^2 - 2 <half, full>; rounding may leave the cosine beyond 1.
    cosine = (half + full - difference) / 2 / math.sqrt(half * full) if half else 0.0
    return math.sqrt(difference / full), min(1.0, max(-1.0, cosine))


@jax.jit
def _sums(half: Array, full: Array, before: Any) -> Array:
    """Returns a unit, and in this unit the squared norms of the difference, of half and of float32."""
    # The squares of small gradients would be zero in float32, so each array is divided by its unit.
    largest = jnp.max(jnp.abs(full), initial=0)
    unit = jnp.where(largest > 0, largest, 1)

    def square(x):
        return jnp.sum(jnp.real(x * jnp.conj(x)))

    half, full = (half - before) / unit, (full - before) / unit
    return jnp.stack([unit, square(half - full), square(half), square(full)])


def groups_of(program: FlaggedProgram, state: Mapping[int, int]) -> list[Group]:
    """Returns the groups of the outputs of a program; `state` as `updated` returns it."""
    if not program.is_step:
        return [Group("", tuple(range(1, len(program.outputs))))] if len(program.outputs) > 1 else []
    trees: dict[str, list[int]] = collections.defaultdict(list)
    # Outputs whose paths end with that of a parameter are one tree: the gradients, or a moment of each.
    suffixes = {name.partition("/")[2] for name in program.parameters}
    for number, name in enumerate(program.outputs):
        suffix = max((s for s in suffixes if s and f"/{name}".endswith(f"/{s}")), key=len, default="")
        trees[name.removesuffix(suffix).rstrip("/") if suffix else name].append(number)
    arrays = program.arrays(1.0)

    def group(name: str, numbers: Sequence[int]) -> Group:
        # A step changes its state by a small part, which the values would hide.
        is_state = all(number in state for number in numbers)
        before = tuple(arrays[state[number]] for number in numbers) if is_state else None
        return Group(name, tuple(numbers), before)

    return [group(name, numbers) for name, numbers in trees.items()]


def updated(program: FlaggedProgram, full: Sequence[Array]) -> dict[int, int]:
    """Returns the results that are new values of arguments, and the indexes of the arguments."""
    # By structure and shape alone, a loss in half looks like the new value of a half scalar that it depends
    # on, and returned gradients look like new parameters. Both are far from the old values.
    arrays = program.arrays(1.0)

    def is_loss(n, index):
        old, is_half = arrays[index], program.argument(index)[1] in ("float16", "bfloat16")
        return is_half and not old.shape and bool(old) and bool(abs(full[n] - old) > abs(old) / 4)

    state = {n: index for n, index in program.state.items() if not is_loss(n, index)}
    new = {n: index for n, index in state.items() if program.argument(index)[0] in program.parameters}

    def square(array):
        return float(jnp.sum(jnp.square(jnp.abs(array))))

    moves = sum(square(full[number] - arrays[index]) for number, index in new.items())
    # As squares: further than half of the norm of the parameters.
    is_far = moves >= sum(square(arrays[index]) for index in new.values()) / 4
    added = _added_to(program.jaxpr)
    gradients = {n for n, index in new.items() if is_far and index not in added[n]}
    return {n: index for n, index in state.items() if n not in gradients}


def _added_to(jaxpr: Jaxpr) -> list[frozenset[int]]:
    """Returns for each output the inputs to which it adds something outside of any gradient, as `p - g`."""

    def operation(equation: Equation, operands: list[frozenset[int]]) -> list[frozenset[int]]:
        name = equation.primitive.name
        is_of_step = not (is_of_gradient(equation) or is_transposed(equation))
        if name == "sub":
            operands = operands[:1]
        elif name not in ("add", "add_any", "select_n", "convert_element_type") and not _moves(name):
            operands = []
        return [frozenset[int]().union(*operands if is_of_step else ())] * len(equation.outvars)

    inputs = [frozenset({number}) for number in range(len(open_jaxpr(jaxpr).invars))]
    return Forward[frozenset[int]](operation, frozenset.union, frozenset()).run(jaxpr, inputs)


def _moves(name: str) -> bool:
    return traits_of(name).category is Category.MOVE


def worst_leaf(
    program: FlaggedProgram, norms: Mapping[Group, np.ndarray], noise: Callable[[], set[int]]
) -> tuple[float, str, str]:
    """Returns the largest error of an output alone, over its own norm, its path, and that of a zero output.

    `noise` tells those that no dtype has right.
    """
    # A wrong gradient may have a small share of the norm of all, so each is compared alone, too.
    rows = rows_of(norms)
    errors = {number: error_of(*row)[0] for number, row in rows.items()}
    if any(LEAF < error < math.inf for error in errors.values()):
        errors = {number: error for number, error in errors.items() if number not in noise()}
    zeros = {number: error for number, error in errors.items() if not rows[number][1]}
    # Adam divides each gradient by its size, so that the error of a small one is as large as that of any
    # other. So of a step only those outputs count that do not change in half and do in float32.
    errors = zeros if program.is_step else errors
    if not errors:
        return 0.0, "", ""
    number = max(errors, key=lambda number: (errors[number], -number))
    return errors[number], program.outputs[number], program.outputs[min(zeros)] if zeros else ""


def rows_of(norms: Mapping[Group, np.ndarray]) -> dict[int, np.ndarray]:
    """Returns the norms of each output that is not zero in float32, by its number."""
    return {n: row for group, each in norms.items() for n, row in zip(group.numbers, each) if row[-1]}

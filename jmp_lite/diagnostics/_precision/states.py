"""Repeats a step in half and in float32: which elements of its states lose their updates."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxpr import Array
from .._values.trace import EVERY_CAST
from .flags import FlaggedProgram
from .modules import Module
from .report import HARM
from .written import Written

_HALF = ("float16", "bfloat16")
STEPS = 20
"""How often a step is repeated on the same batch."""
# Stochastic rounding leaves one of fifty elements that should move by this many units of the last place.
_UNITS = 4
_SHARE = 0.1  # Of the elements that float32 moves: so many may stay where they are.
_LEAST = 0.5  # A state that comes less than half as far as in float32 loses its updates.
# A float32 state that ends so far off, relative to its movement, is wrong if other roundings change it less.
_OFF = 0.25
# A state that is smaller in float32 than this share of its size in half is a rounding error.
_RESIDUE = 1e-3


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A result that is wrong after some steps in half."""

    what: str  # In one sentence.
    error: float  # Which of several is the worst.
    name: str  # The path of the result, or of the argument whose new value it is.
    in_half: bool = False  # Whether the state is in half itself.
    is_lost: bool = False  # Whether it does not move at all.
    is_metric: bool = False  # Whether it is a scalar result, such as the loss, and not a state.
    may_follow: bool = False  # Whether the cause may be another wrong result.


Trained: TypeAlias = tuple[dict[int, list[float]], list[Array]]
"""The values of each scalar that is no state, by its number, and the floating states at the end."""


class States:
    """The states of a step. `state` has for each result that is one the index of its argument.

    `written` has the steps with edits that are written into the program. A loss scale stays as it is given:
    one that grows makes float16 skip steps that float32 does not skip.
    """

    def __init__(
        self,
        program: FlaggedProgram,
        state: dict[int, int],
        loss_scales: Collection[str],
        written: Mapping[frozenset[Module], Written],
    ) -> None:
        self._program, self._start, self._written = program, program.arrays(1.0), written
        self._state = {n: i for n, i in state.items() if program.argument(i)[0] not in loss_scales}
        # The loss of a loss function is compared where its gradients are.
        self._metrics = len(program.outputs) if program.is_step else 0
        self._floating = [number for number in self._state if number < program.floating]
        dtypes = [program.argument(state[number])[1] for number in self._floating]
        self.in_half = any(dtype in _HALF for dtype in dtypes)

    @property
    def names(self) -> set[str]:
        """The paths of the arguments that are states."""
        return {self._program.argument(index)[0] for index in self._state.values()}

    @property
    def ends_finite(self) -> bool:
        """Whether the states that are finite at first are so in float32 after the steps, if they were run."""
        # The best loss so far may start as inf.
        pairs = zip(self._floating, vars(self).get("_in_float32", ((), ()))[1])
        starts = ((self._start[self._state[number]], end) for number, end in pairs)
        return all(bool(jnp.isfinite(jnp.where(jnp.isfinite(start), end, 0)).all()) for start, end in starts)

    def __bool__(self) -> bool:
        return bool(self._state)

    def wrong(self, kept: Collection[Module] = ()) -> list[Wrong]:
        """Returns what is wrong with some modules in float32 and the others in half, the worst first."""
        # An error of one step says little: the first update of Adam is the sign of each gradient, and near an
        # optimum every gradient is mostly rounding error. So the step is repeated on the same batch.
        half = self._run(kept) if kept else self._in_half
        every = [*self._of_metrics(half), *self._of_states(half)]
        return sorted(every, key=lambda each: (each.may_follow, -each.error))

    @functools.cached_property
    def _in_half(self) -> Trained:
        return self._run(())

    @functools.cached_property
    def _in_float32(self) -> Trained:
        return self._run(None)

    def _of_metrics(self, half: Trained) -> Iterator[Wrong]:
        for number, values in self._in_float32[0].items():
            end, start = _last(values), values[0]
            size, last = max(abs(end), abs(start - end)), _last(half[0][number])
            difference = abs(last - end)
            error = difference / size if size else difference
            if math.isfinite(end) and not error <= HARM:  # Also if it is NaN.
                path = self._program.outputs[number]
                name = f"result {path}".strip()
                # Nothing on the page says otherwise where paths begin.
                what = f"The {name} of the step{', counted from 0,' if path[:1].isdigit() else ''} ends at "
                what += f"{last:.3g} {ON}, and at {end:.3g} in float32."
                yield Wrong(what, error, name, is_metric=True)

    def _of_states(self, half: Trained) -> Iterator[Wrong]:
        for number, own, full in zip(self._floating, half[1], self._in_float32[1]):
            yield from self._of_state(number, full, own)

    def _of_state(self, number: int, full: Array, own: Array) -> Iterator[Wrong]:
        """Yields the faults of a state that ends at `full` in float32 and at `own` in half."""
        index = self._state[number]
        (name, dtype), start = self._program.argument(index), self._start[index]
        in_half = dtype in _HALF
        compared = _compared(start, full, own, jnp.finfo(dtype).eps)
        moved, stuck, far, lost, part, whole, error = map(float, compared)
        share = stuck / moved if moved else 0.0
        # Of a state in float32, the elements that never move also have to matter: half precision makes
        # the smallest gradients zero, whose updates are a small part of the norm of all.
        is_lost = far > _SHARE * moved and (in_half or lost > _SHARE)
        # It comes no part of its way if it is inf or NaN in half.
        if moved and (not _LEAST <= part < math.inf or is_lost):
            what = _lost(name, dtype if in_half else "", share, part)
            worst = max(share, 1 - part) if math.isfinite(part) else math.inf
            yield Wrong(what, worst, name, in_half, share == 1)
        elif in_half and error > 1:
            what = f"{name} in {dtype} ends {times(whole)} as far from float32 as it moves there {ON}."
            yield Wrong(what, error, name, in_half)
        elif error > _OFF and self._of_other_roundings[number] <= HARM:
            what = f"{name} ends {times(whole)} as far from float32 as it moves there {ON}."
            yield Wrong(what, error, name, may_follow=True)

    @functools.cached_property
    def _of_other_roundings(self) -> dict[int, float]:
        """The larger error of each state: with casts by hand, or from a start that is rounded."""
        # Adam moves each element by the size of the learning rate, also one whose gradient is rounding error.
        # So a large error says little where casts by hand, or the last digits of half, cause one as well.
        near = self._program.arrays(1.0, float(jnp.finfo(self._program.dtype).eps))
        # A bias in front of a normalization has a rounding error as its gradient, and may end anywhere. What
        # depends on it, such as a running mean, is no more wrong than it is.
        for number, full, own in zip(self._floating, self._in_float32[1], self._in_half[1]):
            start = self._start[self._state[number]]
            if _is_residue(full - start, own - start):
                near[self._state[number]] = start + own - full
        by_hand = self._repeat(self._program.step_by_hand, self._start)[1]
        nudged = self._repeat(functools.partial(self._program.run, half=None), near)[1]
        errors = {}
        for number, full, hand, other in zip(self._floating, self._in_float32[1], by_hand, nudged):
            index = self._state[number]
            start, eps = self._start[index], jnp.finfo(self._program.argument(index)[1]).eps
            ends = (hand, other - near[index] + start)
            errors[number] = max(float(_compared(start, full, end, eps)[-1]) for end in ends)
        return errors

    def _run(self, kept: Collection[Module] | None) -> Trained:
        """Returns what a step computes with some modules in float32; None for everything in float32."""
        if kept and (step := self._written.get(frozenset(kept))) is not None:
            return self._repeat(step, self._start)
        half = None if kept is None else self._program.groups - frozenset(kept)
        wide = {module.name for module in kept or () if module.is_argument}
        # A state in half stays in half, whatever computes it, unless it is passed in float32.
        narrow = set[int]()
        if kept is not None:
            named = ((index, *self._program.argument(index)) for index in self._state.values())
            narrow = {n for n, name, dtype in named if dtype in _HALF and name.split("/")[0] not in wide}
        return self._repeat(functools.partial(self._program.run, half=half), self._start, narrow)

    def _repeat(
        self,
        step: Callable[[list[Array]], list[Array]],
        start: Sequence[Array],
        narrow: Collection[int] = (),
    ) -> Trained:
        """Repeats a step. The states whose arguments are `narrow` are rounded after each."""
        arrays, metrics = list(start), dict[int, list[float]]()
        for _ in range(STEPS):
            results = step(arrays)
            for number, result in enumerate(results[: self._metrics]):
                if number not in self._state and not result.shape and not jnp.iscomplexobj(result):
                    metrics.setdefault(number, []).append(float(result))
            for number, index in self._state.items():
                new, dtype = results[number], self._program.argument(index)[1]
                arrays[index] = _rounded(new, dtype) if index in narrow else new
        return metrics, [arrays[self._state[number]] for number in self._floating]


ON = f"in {STEPS} steps on this batch"


def _last(values: Collection[float]) -> float:
    """Returns the mean of the last fifth of the values of a metric."""
    return float(np.mean([*values][-STEPS // 5 :]))


def _lost(name: str, half: str, share: float, part: float) -> str:
    """Says what a state has lost: a share of its elements never moves, and it comes a part of its way."""
    if not math.isfinite(part):
        return f"{name} is not finite {ON}, and is in float32."
    if share <= _SHARE:
        return f"The update is lost in part: {name} comes {part:.0%} as far as in float32 {ON}."
    where = f"{f' in {half}' if half else ''} for {share:.0%} of the elements of {name} that have one"
    return f"The update is lost{where}: they never move {ON}."


def times(error: float) -> str:
    """Returns a relative error in words."""
    return f"{error:,.0f} times" if error >= 10 else f"{error:.2g} times" if error >= 2 else f"{error:.0%}"


@functools.partial(jax.jit, static_argnums=1, compiler_options=EVERY_CAST)
def _rounded(array: Array, dtype: str) -> Array:
    return array.astype(dtype).astype(array.dtype)


def _norm(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(jnp.abs(x))))


@jax.jit
def _is_residue(full: Array, half: Array) -> Array:
    # What overflows in half is no rounding error.
    return jnp.isfinite(half).all() & (_norm(full) < _RESIDUE * _norm(half))


@jax.jit
def _compared(start: Array, full: Array, half: Array, eps: float) -> tuple[Array, ...]:
    """Compares a state with float32.

    Returns how many elements move in float32, how many of these never move in half, how many of these should
    by some units, their part of the norm of the movement, how far the state comes, as a part of how far it
    comes in float32, its error over its movement, and the same of the elements that move by some units. Each
    is 0 for a state that is a rounding error, such as Kahan's compensation, or that moves by its last digits.
    """
    # A state may start as inf, such as the best loss so far, which has no distance from where it ends.
    is_finite = jnp.isfinite(start) & jnp.isfinite(full)
    # A unit of the last place of each element, for an `eps` of 1; of 0 it is 0.
    _, exponent = jnp.frexp(jnp.abs(start))
    unit = jnp.where(start == 0, 0, jnp.ldexp(jnp.ones(()), exponent - 1))
    least = _UNITS * jnp.finfo(start.dtype).eps * unit
    is_moved = (jnp.abs(full - start) > least) | ~(jnp.abs(half - start) <= least)  # Also if it is NaN.
    is_compared = is_finite & is_moved.any() & ~_is_residue(full, half)
    way, own = (jnp.where(is_compared, each - start, 0) for each in (full, half))
    largest = jnp.max(jnp.abs(way), initial=0)
    way, own = (each / jnp.where(largest > 0, largest, 1) for each in (way, own))
    units = _UNITS * eps * unit / jnp.where(largest > 0, largest, 1)
    moves, is_stuck = way != 0, (way != 0) & (own == 0)
    is_far = (jnp.abs(way) >= units) & moves

    counts = (jnp.sum(each) for each in (moves, is_stuck, is_stuck & is_far))
    moved = is_far | ((jnp.abs(own) >= units) & (own != 0))

    def chosen(x):
        return _norm(jnp.where(moved, x, 0))

    error = jnp.where(moved.any(), chosen(own - way) / jnp.maximum(chosen(way), 1e-30), 0)
    measured = jnp.where(is_stuck, way, 0), own, own - way
    parts = (_norm(each) / jnp.maximum(_norm(way), 1e-30) for each in measured)
    return (*counts, *parts, error)

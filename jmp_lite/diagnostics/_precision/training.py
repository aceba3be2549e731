"""Trains in half and in float32: whether the error of one step matters after some steps."""

import dataclasses
from collections.abc import Collection, Iterator
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxpr import Array
from .flags import FlaggedProgram
from .modules import Module
from .report import HARM

_LEAST = 0.5
"""A part of the state that comes less than half as far as in float32 loses its updates."""
_LARGE = 1_000_000
"""Elements of the state, from which a step is repeated 20 times in place of 50."""


@dataclasses.dataclass(frozen=True)
class Lag:
    """A result that training in half gets wrong."""

    name: str  # The path of the result, or of the argument whose new value it is.
    dtype: str  # Of the argument; empty for a metric.
    part: float  # How far it comes, as a part of how far it comes in float32; of a metric its error.
    steps: int

    @property
    def error(self) -> float:
        return 1 - self.part if self.dtype else self.part


Trained: TypeAlias = tuple[dict[int, list[float]], list[Array]]
"""The values of each scalar that is no state, by its number, and the floating state at the end."""


class Training:
    """The training of a step. `state` has for each result that is state the index of its argument."""

    def __init__(self, program: FlaggedProgram, state: dict[int, int]) -> None:
        self._program, self._state, self._start = program, state, program.arrays(1.0)
        self._in_float32: dict[int, Trained] = {}  # By the number of steps.
        # The loss of a loss function is compared where its gradients are.
        self._metrics = len(program.outputs) if program.is_step else 0
        self._floating = [number for number in state if number < program.floating]
        size = sum(np.size(self._start[number]) for number in state.values())
        self.has_state, self.steps = bool(state), 20 if size > _LARGE else 50

    def lags(self, kept: Collection[Module] = (), steps: int | None = None) -> list[Lag]:
        """Returns what is wrong with some modules in float32 and the others in half, the worst first."""
        # An error of one step says little: the first update of Adam is the sign of each gradient, and near an
        # optimum every gradient is mostly rounding error. So the step is repeated on the same batch.
        steps = self.steps if steps is None else steps
        if steps not in self._in_float32:
            self._in_float32[steps] = self._run(None, steps)
        half, full = self._run(self._program.groups - frozenset(kept), steps), self._in_float32[steps]
        lags = (*self._of_metrics(half, full, steps), *self._of_state(half, full, steps))
        return sorted(lags, key=lambda lag: -lag.error)

    def _of_metrics(self, half: Trained, full: Trained, steps: int) -> Iterator[Lag]:
        last = lambda values: float(np.mean(values[-max(1, steps // 5) :]))
        for number, values in full[0].items():
            end, start = last(values), values[0]
            size, difference = max(abs(end), abs(start - end)), abs(last(half[0][number]) - end)
            error = difference / size if size else difference
            if not error <= HARM:  # Also if it is NaN.
                yield Lag(self._program.outputs[number], "", error, steps)

    def _of_state(self, half: Trained, full: Trained, steps: int) -> Iterator[Lag]:
        old = [self._start[self._state[number]] for number in self._floating]
        for number, way, own in zip(self._floating, map(_way, old, full[1]), map(_way, old, half[1])):
            # A part that is NaN in half is not at least anything.
            if float(way) > 0 and not float(own) >= _LEAST * float(way):
                index, part = self._state[number], float(own) / float(way)
                yield Lag(*self._program.argument(index), part, steps)

    def _run(self, half: Collection[Module] | None, steps: int) -> Trained:
        arrays, metrics = list(self._start), dict[int, list[float]]()
        for _ in range(steps):
            results = self._program.run(arrays, half)
            for number, result in enumerate(results[: self._metrics]):
                if number not in self._state and not result.shape and not jnp.iscomplexobj(result):
                    metrics.setdefault(number, []).append(float(result))
            for number, index in self._state.items():
                arrays[index] = results[number]
        return metrics, [arrays[self._state[number]] for number in self._floating]


@jax.jit
def _way(before: Array, after: Array) -> Array:
    """Returns how far an array has come: the norm of its change."""
    change = after - before
    return jnp.sqrt(jnp.sum(jnp.real(change * jnp.conj(change))))

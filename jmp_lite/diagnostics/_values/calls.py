"""The tap inside operations that run jaxprs, with one handler for each operation.

A tap runs programs that are already differentiated. Custom derivative rules have been applied, so a call that
exists only for them or for a transform runs inline.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from ..._jaxpr import Array, Inner, cond, inner_jaxprs, remat, scan, shard_map, while_loop
from .probe import Probe, TapValue
from .sites import Path, Point, Where
from .tap import STEPS, Handler, Records, Tap, as_arrays

MOST_ITERATIONS = 10_000
"""After so many iterations a tool stops a `while` loop, and says so."""
INLINE = ("closed_call", "composite", "custom_jvp_call", "custom_linear_solve", "custom_vjp_call")
INLINE += ("custom_vmap_call", "eval_jaxpr", "jit")
"""The calls that run inline: the program is differentiated already, so they are parts of it."""
KEPT = 8
"""How many iterations of a while loop are kept: the first with more non-finite values than any before."""


class _Body:
    """An inner jaxpr as a body for `_jaxpr.calls`: it measures, and its records are its side outputs.

    `enter` measures an array that enters it, given the index and the operand.
    """

    def __init__(
        self,
        tap: Tap,
        inner: Inner,
        inside: Where,
        operands: Sequence[TapValue],
        enter: Callable[[int, TapValue, Array], TapValue] | None = None,
    ) -> None:
        self._tap, self._inner, self._inside = tap, inner, inside
        self._enter = enter or (lambda _, operand, array: operand._replace(array=array))
        self.operands = list(operands)  # Each call of the body brings new arrays for the last ones.
        self.results: list[TapValue] = []  # Those of the last call.

    def __call__(self, *arrays: Array) -> tuple[list[Array], Records]:
        first = len(self.operands) - len(arrays)
        with self._tap.recording() as records:
            moving = zip(range(len(arrays)), self.operands[first:], arrays)
            values = [self._enter(index, operand, array) for index, operand, array in moving]
            self.results = self._tap.run(self._inner.jaxpr, [*self.operands[:first], *values], self._inside)
            for entry, result in zip(values[: self._inner.carried], self.results):
                if entry.source is not None:
                    self._tap.carried[entry.source] = result.source
        return as_arrays(self.results), records

    def trace_until_stable(self, *arrays: Any) -> Records:
        """Traces a loop's body until its gradient carries are known. Returns the shapes of the records.

        A sum of gradients starts as zeros, and becomes a gradient in the second iteration.
        """
        first = len(self.operands) - len(arrays)
        while True:
            _, shapes = jax.eval_shape(self, *arrays)
            carries = range(self._inner.carried)
            late = [n for n in carries if self.results[n].is_scaled > self.operands[first + n].is_scaled]
            if not late:
                return shapes
            for number in late:
                self.operands[first + number] = self.operands[first + number]._replace(is_scaled=True)


def _parts(point: Point) -> list[tuple[Inner, Where]]:
    return [(inner, point.inside(number)) for number, inner in enumerate(inner_jaxprs(point.equation))]


def _inline(tap: Tap, point: Point, operands: list[TapValue]) -> list[TapValue]:
    """Runs a call inline. For a linear solve, that is the solver."""
    ((inner, inside),) = (part for part in _parts(point) if None not in part[0].results)
    return tap.run(inner.jaxpr, [operands[number] for number in inner.operands], inside)


def _remat(tap: Tap, point: Point, operands: list[TapValue]) -> list[TapValue]:
    ((inner, inside),) = _parts(point)
    body = _Body(tap, inner, inside, operands)
    arrays, records = remat(point.equation, [body], as_arrays(operands))
    tap.records.update(records)
    return [value._replace(array=array) for value, array in zip(body.results, arrays)]


def _cond(tap: Tap, point: Point, operands: list[TapValue]) -> list[TapValue]:
    """A branch that is not taken gives empty records."""
    arrays, operands = as_arrays(operands), operands[1:]
    bodies = [_Body(tap, inner, inside, operands) for inner, inside in _parts(point)]
    shapes = [jax.eval_shape(body, *arrays[1:])[1] for body in bodies]
    empty = tap.empty({path: shape for records in shapes for path, shape in records.items()})
    arrays, records = cond(point.equation, bodies, arrays, empty)
    tap.records.update(records)
    results = tap.leave(point, bodies[0].results, arrays)
    for number, result in enumerate(results):  # A result may come from any branch.
        if result.source is not None:
            sources = tuple(body.results[number].source for body in bodies)
            tap.sites[result.source] = dataclasses.replace(tap.sites[result.source], sources=sources)
        is_scaled = any(body.results[number].is_scaled for body in bodies)
        results[number] = result._replace(is_scaled=is_scaled)
    return results


def _shard_map(tap: Tap, point: Point, operands: list[TapValue]) -> list[TapValue]:
    """Each shard has records of its own, which are joined if the probe adds."""
    ((inner, inside),), equation = _parts(point), point.equation
    mesh, manual = equation.params["mesh"], equation.params["newly_manual_axes"]
    shards = math.prod(mesh.shape[name] for name in mesh.axis_names if name in manual)
    inside = inside.loop("shard_map", shards)
    body = _Body(tap, inner, inside, operands, functools.partial(tap.enter, point, inside))
    arrays, records = shard_map(equation, [body], as_arrays(operands))
    if tap.probe.adds:
        records = {path: functools.reduce(tap.probe.join, record) for path, record in records.items()}
    tap.records.update(records)
    return tap.leave(point, body.results, arrays)


def _scan(tap: Tap, point: Point, operands: list[TapValue]) -> list[TapValue]:
    """The records of the iterations are stacked, or joined if the probe adds."""
    ((inner, inside),), equation = _parts(point), point.equation
    inside = inside.loop("scan", equation.params["length"], equation.params["reverse"])

    def enter(number: int, operand: TapValue, array: Array) -> TapValue:
        value = tap.enter(point, inside, number, operand, array)
        # The measurement of a whole array holds for its slices.
        return (
            value._replace(source=operand.source) if not value.source and number >= inner.carried else value
        )

    body = _Body(tap, inner, inside, operands, enter)
    arrays = as_arrays(operands)
    first, last = inner.constants, inner.constants + inner.carried
    slices = [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in arrays[last:]]
    shapes = body.trace_until_stable(*arrays[first:last], *slices)
    joined = _Joined(tap.probe, tap.empty(shapes)) if tap.probe.adds else None
    arrays, records = scan(equation, [body], arrays, joined)
    tap.records.update(records)
    return tap.leave(point, body.results, arrays)


def _while(tap: Tap, point: Point, operands: list[TapValue]) -> list[TapValue]:
    """Keeps the iterations with more non-finite values than any before, or joins all if the probe adds.

    A loop to a tolerance may never end in half precision, so the tap stops it.
    """
    (condition, _), (inner, inside) = _parts(point)
    inside = inside.loop("while", KEPT)
    arrays, operands = as_arrays(operands), operands[condition.constants :]
    test = functools.partial(jaxpr_as_fun(condition.jaxpr), *arrays[: condition.constants])
    body = _Body(tap, inner, inside, operands, functools.partial(tap.enter, point, inside))
    empty = tap.empty(body.trace_until_stable(*arrays[condition.constants + inner.constants :]))
    keeper = _Joined(tap.probe, empty) if tap.probe.adds else _Kept(tap.probe, empty, (*inside.path, STEPS))
    bodies = [lambda *carry: (test(*carry), {}), body]
    arrays, records = while_loop(point.equation, bodies, arrays, keeper, MOST_ITERATIONS)
    tap.records.update(records)
    if not tap.probe.adds:
        tap.loops[inside.path] = inside.line
        is_cut = jnp.any(test(*arrays)[0]).astype(jnp.int32)
        steps = (*inside.path, STEPS)
        tap.records[steps] = jnp.append(tap.records[steps], is_cut)
    return tap.leave(point, body.results, arrays)


class _Joined:
    """Joins the records of the iterations of a loop."""

    def __init__(self, probe: Probe, empty: Records) -> None:
        self._probe = probe
        self.start: Any = empty

    def add(self, state: Records, side: Records) -> Records:
        return jax.tree.map(self._probe.join, state, side)

    def side(self, state: Records) -> Records:
        return state


class _Slots(NamedTuple):
    """The iterations of a while loop that are kept so far."""

    records: Records  # With an axis of `KEPT` slots.
    iterations: Array  # The number of the iteration in each slot; -1 for an empty one.
    filled: Array
    most: Array  # The most non-finite values that an iteration had.
    now: Array  # The number of the iteration that runs.


class _Kept:
    """Keeps the records of a few iterations, since the length of a while loop is not known in advance."""

    def __init__(self, probe: Probe, empty: Records, steps: Path) -> None:
        self._probe, self._steps = probe, steps
        records = {path: jnp.broadcast_to(record, (KEPT, *record.shape)) for path, record in empty.items()}
        none = jnp.int32(0)
        self.start = _Slots(records, jnp.full(KEPT, -1, jnp.int32), filled=none, most=none, now=none)

    def add(self, state: _Slots, side: Records) -> _Slots:
        alarms = (self._probe.alarm(record).any() for path, record in side.items() if path[-1] != STEPS)
        bad = sum(map(jnp.int32, alarms), jnp.int32(0))
        is_worse = (bad > state.most) & (state.filled < KEPT)
        slot = jnp.where(is_worse, state.filled, KEPT)  # mode="drop" ignores the index KEPT.
        write = lambda old, new: old.at[slot].set(new, mode="drop")
        return _Slots(
            records={path: write(old, side[path]) for path, old in state.records.items()},
            iterations=write(state.iterations, state.now),
            filled=state.filled + is_worse,
            most=jnp.maximum(bad, state.most),
            now=state.now + 1,
        )

    def side(self, state: _Slots) -> Records:
        return state.records | {self._steps: state.iterations}


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(INLINE, _inline),
    "cond": _cond,
    "remat2": _remat,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}

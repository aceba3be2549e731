"""The tap inside operations that run jaxprs: one handler each, built of JAX's public combinators."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from ..._autocast.binding import advance, bind
from ..._autocast.jaxprs import Array, Equation, Role, constants, without_constants
from .sites import Path, Where
from .tap import STEPS, Handler, Probe, Records, Tap, Value, as_arrays, inner_places

KEPT = 8
"""How many iterations of a while loop are kept: the first ones that have more values which are not finite."""


def _inline(tap: Tap, equation: Equation, where: Where, index: int, operands: list[Value]) -> list[Value]:
    """Runs a call as a part of the program around it. A differentiated custom rule leaves such a call."""
    ((inner, inside),) = inner_places(equation, where, index)
    return tap.run(inner.jaxpr, operands, inside)


def _remat(tap: Tap, equation: Equation, where: Where, index: int, operands: list[Value]) -> list[Value]:
    """Recomputation stays recomputation: JAX made the equation, and `jax.checkpoint` would begin anew."""
    ((inner, inside),) = inner_places(equation, where, index)
    results: list[Value] = []

    def fun(*arrays: Array) -> tuple[list[Array], Records]:
        values = [value._replace(array=array) for value, array in zip(operands, arrays)]
        with tap.recording() as records:
            results[:] = tap.run(inner.jaxpr, values, inside)
        return as_arrays(results), records

    arrays = as_arrays(operands)
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*arrays)
    found = bind(equation, [*constants(closed), *arrays], jaxpr=without_constants(closed))
    given, records = jax.tree.unflatten(jax.tree.structure(shapes), found)
    tap.records.update(records)
    return [value._replace(array=array) for value, array in zip(results, given)]


def _cond(tap: Tap, equation: Equation, where: Where, index: int, operands: list[Value]) -> list[Value]:
    """A branch that is not taken gives empty records."""
    places = inner_places(equation, where, index)
    outputs: list[list[Value]] = [[] for _ in places]
    which, *operands = operands

    def branch(number: int, arrays: Any) -> tuple[list[Array], Records]:
        inner, inside = places[number]
        values = [value._replace(array=array) for value, array in zip(operands, arrays)]
        with tap.recording() as records:
            outputs[number] = tap.run(inner.jaxpr, values, inside)
        return as_arrays(outputs[number]), records

    arrays = as_arrays(operands)
    shapes = [jax.eval_shape(lambda a, n=number: branch(n, a)[1], arrays) for number in range(len(places))]
    empty = tap.empty({path: shape for records in shapes for path, shape in records.items()})

    def full(number: int, arrays: Any) -> tuple[list[Array], Records]:
        results, records = branch(number, arrays)
        return results, empty | records

    branches = [lambda a, n=number: full(n, a) for number in range(len(places))]
    results, records = lax.switch(which.array, branches, arrays)
    tap.records.update(records)
    found = tap.leave(equation, where, index, outputs[0], results)
    _join(tap, found, outputs)
    is_scaled = [any(value.is_scaled for value in values) for values in zip(*outputs)]
    return [value._replace(is_scaled=each) for value, each in zip(found, is_scaled)]


def _join(tap: Tap, found: list[Value], outputs: list[list[Value]]) -> None:
    """Notes that each result comes from any of the branches."""
    for number, value in enumerate(found):
        if value.source is not None:
            sources = tuple(branch[number].source for branch in outputs)
            tap.sites[value.source] = dataclasses.replace(tap.sites[value.source], sources=sources)


def _shard_map(tap: Tap, equation: Equation, where: Where, index: int, operands: list[Value]) -> list[Value]:
    """Every shard gives records of its own."""
    ((inner, inside),) = inner_places(equation, where, index)
    params = equation.params
    mesh = params["mesh"]
    axes = tuple(name for name in mesh.axis_names if name in params["newly_manual_axes"])
    inside = inside.loop("shard_map", math.prod(mesh.shape[name] for name in axes))
    results: list[Value] = []

    def shard(*arrays: Array) -> tuple[list[Array], Records]:
        with tap.recording() as records:
            values = [
                tap.enter(equation, where, inside, number, operand, array)
                for number, (operand, array) in enumerate(zip(operands, arrays))
            ]
            results[:] = tap.run(inner.jaxpr, values, inside)
        return as_arrays(results), {path: record[None] for path, record in records.items()}

    fun = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    arrays, records = fun(*as_arrays(operands))
    tap.records.update(_summed(tap, records))
    return tap.leave(equation, where, index, results, arrays)


def _summed(tap: Tap, records: Records) -> Records:
    """Joins the records of all shards if the probe does."""
    if not tap.probe.adds:
        return records
    return {path: functools.reduce(tap.probe.join, record) for path, record in records.items()}


def _scan(tap: Tap, equation: Equation, where: Where, index: int, operands: list[Value]) -> list[Value]:
    """Records of the iterations are stacked, or joined."""
    ((inner, inside),) = inner_places(equation, where, index)
    params = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    inside = inside.loop("scan", params["length"], params["reverse"])
    constant, carried = (inner.roles.count(role) for role in (Role.CONSTANT, Role.CARRY))
    moving, results = operands[constant:], list[Value]()
    if not params["length"]:
        return [Value(array) for array in bind(equation, as_arrays(operands))]

    def body(carry: list[Array], slices: list[Array]) -> tuple[list[Array], list[Array], Records]:
        with tap.recording() as records:
            values = [
                tap.enter(equation, where, inside, number, operand, array, is_slice=number >= carried)
                for number, (operand, array) in enumerate(zip(moving, [*carry, *slices]))
            ]
            results[:] = tap.run(inner.jaxpr, [*operands[:constant], *values], inside)
            _note_carries(tap, values[:carried], results)
        arrays = as_arrays(results)
        return arrays[:carried], arrays[carried:], records

    start = as_arrays(moving)
    one = [array[0] for array in start[carried:]]
    trace = lambda: jax.eval_shape(lambda c, s: body(c, s)[2], start[:carried], one)
    shapes = _settled(trace, moving, results, carried)

    def step(state: Any, slices: list[Array]) -> Any:
        carry, out, records = body(state[0], slices)
        if not tap.probe.adds:
            return (carry, {}), (out, records)
        return (carry, jax.tree.map(tap.probe.join, state[1], records)), (out, {})

    empty = tap.empty(shapes) if tap.probe.adds else {}
    (carry, joined), (out, kept) = lax.scan(step, (start[:carried], empty), start[carried:], **params)
    records = joined | kept
    tap.records.update(records)
    return tap.leave(equation, where, index, results, [*carry, *out])


def _settled(trace: Callable[[], Any], moving: list[Value], results: list[Value], carried: int) -> Any:
    """Traces the body of a loop until its gradient carries are known. Returns the shapes of the records.

    A sum of gradients starts as zeros, and is a gradient from the second iteration on.
    """
    while True:
        shapes = trace()
        late = [n for n in range(carried) if results[n].is_scaled and not moving[n].is_scaled]
        if not late:
            return shapes
        for number in late:
            moving[number] = moving[number]._replace(is_scaled=True)


def _note_carries(tap: Tap, entries: list[Value], outputs: list[Value]) -> None:
    for entry, output in zip(entries, outputs):
        if entry.source is not None:
            tap.carried[entry.source] = output.source


def _while(tap: Tap, equation: Equation, where: Where, index: int, operands: list[Value]) -> list[Value]:
    """Of the iterations those are kept in which more values are not finite than in all before."""
    (condition, _), (inner, inside) = inner_places(equation, where, index)
    inside = inside.loop("while", KEPT)
    of_condition, of_body = (part.roles.count(Role.CONSTANT) for part in (condition, inner))
    fixed, moving = operands[of_condition : of_condition + of_body], operands[of_condition + of_body :]
    test = jaxpr_as_fun(condition.jaxpr)
    results: list[Value] = []

    def goes_on(carry: list[Array]) -> Array:
        return test(*as_arrays(operands[:of_condition]), *carry)[0]

    def body(carry: list[Array]) -> tuple[list[Array], Records]:
        with tap.recording() as records:
            values = [
                tap.enter(equation, where, inside, number, operand, array)
                for number, (operand, array) in enumerate(zip(moving, carry))
            ]
            results[:] = tap.run(inner.jaxpr, [*fixed, *values], inside)
            _note_carries(tap, values, results)
        return advance(goes_on(carry), as_arrays(results), carry), records

    start = as_arrays(moving)
    trace = lambda: jax.eval_shape(lambda carry: body(carry)[1], start)
    empty = tap.empty(_settled(trace, moving, results, len(moving)))
    keeper = _Joined(tap.probe, empty) if tap.probe.adds else _Kept(tap.probe, empty, (*inside.path, STEPS))

    def step(state: tuple[list[Array], Any, Array]) -> tuple[list[Array], Any, Array]:
        carry, kept, iteration = state
        carry, records = body(carry)
        return carry, keeper.add(kept, records, iteration), iteration + 1

    carry, kept, _ = lax.while_loop(
        lambda state: goes_on(state[0]).any(), step, (start, keeper.start, jnp.int32(0))
    )
    tap.records.update(keeper.records(kept))
    return tap.leave(equation, where, index, results, carry)


class _Joined:
    """Joins the records of the iterations of a while loop."""

    def __init__(self, probe: Probe, empty: Records) -> None:
        self._probe = probe
        self.start: Any = empty

    def add(self, kept: Records, records: Records, iteration: Array) -> Records:
        del iteration
        return jax.tree.map(self._probe.join, kept, records)

    def records(self, kept: Records) -> Records:
        return kept


class _Kept:
    """Keeps the records of some iterations of a while loop, whose number is not known beforehand."""

    def __init__(self, probe: Probe, empty: Records, steps: Path) -> None:
        self._probe, self._steps = probe, steps
        slots = {path: jnp.broadcast_to(each, (KEPT, *each.shape)) for path, each in empty.items()}
        # The slots, the iteration of each slot, how many are filled, and the most values so far.
        self.start: Any = slots, jnp.full(KEPT, -1, jnp.int32), jnp.int32(0), jnp.int32(0)

    def add(self, kept: Any, records: Records, iteration: Array) -> Any:
        slots, steps, filled, most = kept
        alarms = (self._probe.alarm(each).any() for path, each in records.items() if path[-1] != STEPS)
        bad = sum(map(jnp.int32, alarms), jnp.int32(0))
        keep = (bad > most) & (filled < KEPT)
        slot = jnp.where(keep, filled, KEPT)  # Beyond the last slot nothing is written.
        write = lambda old, new: old.at[slot].set(new, mode="drop")
        slots = {path: write(old, records[path]) for path, old in slots.items()}
        return slots, write(steps, iteration), filled + keep, jnp.maximum(bad, most)

    def records(self, kept: Any) -> Records:
        slots, steps, _, _ = kept
        return slots | {self._steps: steps}


CALLS: dict[str, Handler] = {
    "closed_call": _inline,
    "composite": _inline,
    "cond": _cond,
    "custom_jvp_call": _inline,
    "custom_vjp_call": _inline,
    "custom_vmap_call": _inline,
    "eval_jaxpr": _inline,
    "jit": _inline,
    "remat2": _remat,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}

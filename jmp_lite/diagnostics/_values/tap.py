"""The tap: runs a jaxpr again, and measures values on the way.

A probe chooses the values and measures them. Each measurement is a small array that is computed right where
the value is. Measurements leave loops, branches, rematerialization and shards as additional results. So all
of this is one program, which keeps no value longer than the original program does.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jaxpr import Array, Equation, Jaxpr, Side, Var, bind, constants, context_of, replay, traits_of
from ..._tree import is_floating
from .probe import Probe, TapValue
from .sites import Path, Point, Site, SiteKind, Where, last_parameter_of

STEPS = -3
"""Ends the path of the record with the iterations of a while loop that are kept, and whether it was cut."""
_LEAVE = 1_000_000  # More than any equation has inner jaxprs: what leaves sorts after what is inside.

Values: TypeAlias = Sequence[TapValue]
Records: TypeAlias = Side
"""What was measured at each site, by its path."""
Handler = Callable[["Tap", Point, list[TapValue]], list[TapValue]]
"""Runs an equation that runs jaxprs on its operands."""


class Tap:
    """Runs the jaxprs of one program with a probe, and a handler for each operation that runs jaxprs."""

    def __init__(self, probe: Probe, handlers: Mapping[str, Handler]) -> None:
        self.probe = probe
        self._handlers = handlers
        self.sites: dict[Path, Site] = {}
        # For the entry of each loop carry, the site of the result that enters the next iteration.
        self.carried: dict[Path, Path | None] = {}
        self.checked: set[Path] = set()  # The values that the program itself tests for inf and NaN.
        self.loops: dict[Path, str] = {}  # The line of each while loop, by the path of its body.
        self.records: Records = {}  # The measurements so far in the jaxpr that runs.
        self._measured: dict[int, tuple[Array, Path | None]] = {}

    def run(self, jaxpr: Jaxpr, arguments: Sequence[TapValue], where: Where) -> list[TapValue]:
        """Runs the equations of a jaxpr, measures, and returns a value for each output."""
        fixed = [self.input(array, "", where, -2 - n) for n, array in enumerate(constants(jaxpr))]

        def action(index: int, equation: Equation, read: Callable[[Var], TapValue]) -> list[TapValue]:
            point, operands = Point(equation, where, index), list(map(read, equation.invars))
            handler = self._handlers.get(equation.primitive.name)
            with context_of(equation):
                if handler is not None:
                    return handler(self, point, operands)
                return self._operation(point, self._measured_operands(point, operands))

        return replay(jaxpr, [*fixed, *arguments], _literal, action)

    def input(
        self,
        array: Array,
        name: str,
        where: Where,
        number: int,
        last_parameter: str = "",
        half: bool = False,
        is_scaled: bool = False,
    ) -> TapValue:
        """Measures an input of a program, or a constant in it, and returns it as a value."""
        if not is_floating(array):
            return TapValue(array, argument=name)
        path, operation = (*where.path, -1, number), "argument" if name else "constant"
        site = Site(
            path=path,
            kind=SiteKind.INPUT,
            operation=operation,
            shape=array.shape,
            dtype=array.dtype,
            loops=where.loops,
            is_scaled=is_scaled,
            argument=name,
            last_parameter=last_parameter,
        )
        source = self._measure(site, array, half)
        return TapValue(array, source, name, last_parameter=last_parameter, is_scaled=is_scaled)

    def _operation(self, point: Point, operands: list[TapValue]) -> list[TapValue]:
        arrays = bind(point.equation, [value.array for value in operands])
        name = point.equation.primitive.name
        if name == "is_finite" and operands[0].source is not None:
            self.checked.add(operands[0].source)
        is_cast = name == "convert_element_type"
        # The result has the elements of the operand, so the measurement of the operand holds for it. The
        # bits of an fp8 tensor stand for the tensor.
        is_move = traits_of(name).keeps_elements or name == "bitcast_convert_type"
        if is_move or (is_cast and (self.probe.operands or _survives_cast(operands[0].number, arrays[0]))):
            moved = [operand._replace(array=array) for operand, array in zip(operands, arrays)]
            if all(map(_is_known, moved)):
                return moved
        argument = operands[0].argument if is_move or is_cast else ""
        is_scaled = any(value.is_scaled for value in operands)
        result = TapValue(None, None, argument, None, last_parameter_of(operands), is_scaled)
        results = []
        for number, array in enumerate(arrays):
            path, half = point.path(number), point.would_be_half(number)
            source = self.at(point, path, SiteKind.OPERATION, operands, array, half)
            results.append(result._replace(array=array, source=source))
        return results

    def _measured_operands(self, point: Point, operands: list[TapValue]) -> list[TapValue]:
        """Measures the operands that are cast to half, or would be, if nothing has measured them yet."""
        if not self.probe.operands or not self.probe.wants_operands(point.decision, point.equation):
            return operands
        measured = []
        for number, value in enumerate(operands):
            if value.source is None and getattr(value.array, "ndim", 0):
                if not self.probe.once or id(value.array) not in self._measured:
                    path = point.path(-1 - number)
                    source = self.at(point, path, SiteKind.OPERAND, [value], value.array, half=True)
                    # Kept with its array, since an `id` is unique only while its object lives.
                    self._measured[id(value.array)] = value.array, source
                value = value._replace(source=self._measured[id(value.array)][1])
            measured.append(value)
        return measured

    def at(
        self, point: Point, path: Path, kind: SiteKind, operands: Values, array: Array, half: bool = False
    ) -> Path | None:
        """Measures a value at an equation if the probe wants it; returns the path of its site, or None."""
        if not is_floating(array):
            return None
        return self._measure(point.site(path, kind, operands, array), array, half, operands)

    def _measure(self, site: Site, array: Array, half: bool, operands: Values = ()) -> Path | None:
        if not self.probe.wants(site, half):
            return None
        self.sites[site.path] = site
        # Without the barrier XLA would fold the reductions of constant arrays, which takes minutes.
        self.records[site.path] = self.probe.measure(lax.optimization_barrier(array), site, operands)
        return site.path

    # What the handlers of calls need.

    def leave(self, point: Point, results: Values, arrays: Sequence[Array]) -> list[TapValue]:
        """Measures what leaves an equation; `results` are the same values inside of its jaxprs."""
        values = []
        for number, (value, array) in enumerate(zip(results, arrays, strict=True)):
            path = point.path(_LEAVE + number)
            source = self.at(point, path, SiteKind.LEAVE, [value], array) or value.source
            values.append(value._replace(array=array, source=source, argument="", number=None))
        return values

    def enter(self, point: Point, inside: Where, number: int, operand: TapValue, array: Array) -> TapValue:
        """Measures an array that enters a loop or a shard: the whole operand, or a slice of it."""
        point = point._replace(where=dataclasses.replace(point.where, loops=inside.loops))
        source = self.at(point, (*inside.path, -1, number), SiteKind.ENTRY, [operand], array)
        return operand._replace(array=array, source=source, number=None)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Records]:
        """Collects the measurements inside the `with` statement in a dictionary of their own."""
        # JAX traces the body of a loop more than once: each trace measures the same values.
        outer, self.records, self._measured = (self.records, self._measured), {}, {}
        try:
            yield self.records
        finally:
            self.records, self._measured = outer

    def empty(self, shapes: Mapping[Path, Any]) -> Records:
        """Returns the records, of the given shapes, of a part of the program that does not run."""
        none = lambda path: jnp.int32(-1) if path[-1] == STEPS else self.probe.empty(self.sites[path].dtype)
        return {path: jnp.broadcast_to(none(path), shape.shape) for path, shape in shapes.items()}


def _literal(var: Var) -> TapValue:
    is_number = jnp.issubdtype(var.aval.dtype, jnp.floating) and not var.aval.shape
    return TapValue(var.val, number=float(var.val) if is_number else None)


def _is_known(value: TapValue) -> bool:
    return value.source is not None or value.number is not None or not is_floating(value.array)


def _survives_cast(number: float | None, array: Array) -> bool:
    """Whether the cast of a literal to the dtype of an array does not make a finite number inf."""
    if number is None or not is_floating(array):
        return False
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.asarray(number, array.dtype)) == np.isfinite(number))


def as_arrays(values: Values) -> list[Array]:
    arrays = (value.array for value in values)
    return [array if isinstance(array, jax.Array) else np.asarray(array) for array in arrays]

"""What a train step loses in half: updates that are rounded away, and gradients that are zero or unscaled."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._jaxpr import Array, Category, traits_of
from .._values.probe import Probe, TapValue
from .._values.sites import Path, Site, SiteKind
from .._values.trace import LossProgram, Measured, Tapped

_LARGEST, _UPDATES, _LOST = range(3)
_COUNTS = 3
"""The numbers in a record: the largest magnitude, how many updates are not zero, how many are lost."""


@dataclasses.dataclass(frozen=True)
class Update:
    """An addition that computes the new value of a step's argument."""

    argument: str  # The path of the argument, such as `params/w`.
    dtype: np.dtype
    line: str  # The line of the addition.
    updates: int  # How many elements have an update that is not zero.
    lost: int  # How many of these the update leaves as they were.


@dataclasses.dataclass(frozen=True)
class Additions(Probe):
    """The probe: the largest magnitude of each value, and what an addition to an argument changes."""

    dtypes: Mapping[str, Any]  # The dtype of each argument, by its path.

    def measure(self, array: Array, site: Site | None = None, operands: Sequence[TapValue] = ()) -> Array:
        """Returns the largest magnitude, the updates and the lost updates, shape `(3,)`, float32."""
        largest = jnp.max(jnp.abs(array), initial=0).astype(jnp.float32)
        counts = [largest, jnp.float32(0), jnp.float32(0)]
        if site is not None and _is_addition(site, array, operands):
            dtype = self.dtypes[site.argument]
            old, update = operands if operands[0].argument == site.argument else reversed(operands)
            moves = jnp.asarray(update.array) != 0
            stays = array.astype(dtype) == jnp.asarray(old.array).astype(dtype)
            counts[1:] = [jnp.sum(moves).astype(jnp.float32), jnp.sum(moves & stays).astype(jnp.float32)]
        return jnp.stack(counts)

    def empty(self, dtype: Any) -> Array:
        del dtype
        return jnp.zeros(_COUNTS, jnp.float32)


def _is_addition(site: Site, array: Array, operands: Sequence[TapValue]) -> bool:
    is_sum = site.kind is SiteKind.OPERATION and site.operation in ("add", "sub", "add_any")
    return is_sum and bool(site.argument) and all(jnp.shape(value.array) == array.shape for value in operands)


def run_step(program: LossProgram) -> Measured:
    return Tapped(program, Additions({n: a.dtype for n, a in zip(program.names, program.arrays) if n}))(1.0)


def updates_of(measured: Measured, program: LossProgram) -> list[Update]:
    """Returns the additions that compute the new values of a step's arguments."""
    dtypes = {name: array.dtype for name, array in zip(program.names, program.arrays)}
    updates: dict[Path, Update] = {}
    for output in measured.outputs:
        path = output
        while path is not None and path not in updates:
            site, record = measured.sites[path], measured.records[path]
            if record.ndim == 1 and record[_UPDATES]:
                counts = int(record[_UPDATES]), int(record[_LOST])
                updates[path] = Update(site.argument, dtypes[site.argument], site.line, *counts)
            path = _before(site)
    return list(updates.values())


def _before(site: Site) -> Path | None:
    """Returns the site of the value that a site casts, moves or selects; None for another operation."""
    moves = site.kind is not SiteKind.OPERATION or traits_of(site.operation).category is Category.MOVE
    if moves or site.operation == "convert_element_type":
        return next(iter(site.sources), None)
    # `jnp.where(is_finite, new, old)`: the old value is the first case.
    return site.sources[-1] if site.operation == "select_n" else None


def zero_gradients(measured: Measured) -> tuple[bool, Site | None]:
    """Returns whether all gradients of a step are zero, and the first operation that makes one zero."""
    backward = {path for path, site in measured.sites.items() if site.direction == "backward"}
    read = {source for path in backward for source in measured.sites[path].sources}
    gradients = backward - read
    is_zero = lambda path: not measured.records[path][..., _LARGEST].any()
    if not gradients or not all(map(is_zero, gradients)):
        return False, None
    for path in sorted(backward):
        sources = [source for source in measured.sites[path].sources if source is not None]
        if is_zero(path) and sources and not any(map(is_zero, sources)):
            return True, measured.sites[path]
    return True, None


def holds_scale(program: LossProgram) -> bool:
    """Whether a step takes a loss scale, in the state of its optimizer or as an argument."""
    return any(map(_is_scale, program.names))


def is_unscaled(measured: Measured) -> bool:
    """Whether a step takes a loss scale, and nothing in its backward pass is computed from it."""
    sites, carried = measured.sites, measured.carried
    scaled = {
        path for path, site in sites.items() if site.operation == "argument" and _is_scale(site.argument)
    }
    backward = [path for path, site in sites.items() if site.direction == "backward"]
    found = bool(scaled)
    while found:  # Once, and once more for each loop around a value that it carries on.
        found = False
        for path in sorted(sites.keys() - scaled):
            if not scaled.isdisjoint((*sites[path].sources, carried.get(path))):
                scaled.add(path)
                found = True
    return bool(scaled and backward) and scaled.isdisjoint(backward)


def _is_scale(name: str) -> bool:
    return f"/{name}".endswith("/loss_scale/loss_scale")

"""Where values that are not finite come from, and whether they reach the loss or a gradient.

An instance is a site in one iteration of each loop around it. An instance that is not finite is an origin if
its operands are finite. An origin does harm if a chain of instances that are not finite leads from it to the
loss or to a gradient. A mask of -inf that a softmax reads is on no such chain, since the softmax gives finite
values.
"""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from .._values.sites import Path, Site
from .._values.trace import Measured

Steps = tuple[int, ...]
Instance = tuple[Path, Steps]
"""A site, and the index of the iteration in each loop around it."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """An instance at which values begin to be not finite.

    Attributes:
        site: the site.
        iterations: the number of the iteration in each loop around it.
        is_nan: whether the value has a NaN, and no operand has one. If not it has an inf, and all operands
            are finite.
        extent: the smallest and the largest element.
        operands: the same of each operand of the site; None where it is not known.
        is_harmful: whether it reaches the loss or a gradient.
        moment: sorts origins as the program runs.
    """

    site: Site
    iterations: Steps
    is_nan: bool
    extent: tuple[float, float]
    operands: tuple[tuple[float, float] | None, ...]
    is_harmful: bool
    moment: tuple[int, ...]


class Flow:
    """The instances of one run that are not finite, and how they come from one another."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._sites, self._records = measured.sites, measured.records

    def origins(self) -> list[Origin]:
        """Returns where values begin to be not finite, in the order of the program."""
        harmful = self._harmful()
        origins = [
            self._origin(instance, instance in harmful)
            for path in self._records
            for instance in self._bad_instances(path)
            if self._begins(instance)
        ]
        return sorted(origins, key=lambda origin: origin.moment)

    def bad_outputs(self) -> list[int]:
        """Returns the indexes of the outputs that are not finite."""
        return [
            index
            for index, path in enumerate(self._measured.outputs)
            if path is not None and self._bad(path).any()
        ]

    def _harmful(self) -> set[Instance]:
        """Returns the instances that are not finite and from which an output that is not finite was made."""
        outputs = {self._measured.outputs[index] for index in self.bad_outputs()}
        todo = [instance for path in outputs if path is not None for instance in self._bad_instances(path)]
        seen = set(todo)
        while todo:
            instance = todo.pop()
            bad = [operand for operand in self._operands(instance) if self._is_bad(operand)]
            nans = [operand for operand in bad if self._is_nan(operand)]
            # An operation passes a NaN on. So a NaN comes from the operands that have a NaN, if any has one.
            for operand in nans if nans and self._is_nan(instance) else bad:
                if operand not in seen:
                    seen.add(operand)
                    todo.append(operand)
        return seen

    def _begins(self, instance: Instance) -> bool:
        bad = [operand for operand in self._operands(instance) if self._is_bad(operand)]
        # An operation may make a NaN of infs (inf - inf). So a NaN begins also if an operand has an inf.
        return not (any(map(self._is_nan, bad)) if self._is_nan(instance) else bad)

    def _origin(self, instance: Instance, is_harmful: bool) -> Origin:
        path, steps = instance
        site = self._sites[path]
        return Origin(
            site,
            self._iterations(site, steps),
            self._is_nan(instance),
            self._extent(path, steps),
            tuple(None if source is None else self._extent_at(source, steps) for source in site.sources),
            is_harmful,
            self._moment(site, steps),
        )

    def _operands(self, instance: Instance) -> Iterator[Instance]:
        """Yields the instances from which an instance was made."""
        path, steps = instance
        site = self._sites[path]
        before = self._before(site, steps) if path in self._measured.carried else None
        if before is not None:
            previous = self._measured.carried[path]
            sources: tuple[Path | None, ...] = (previous,)
            steps = before
        else:
            sources = site.sources
        for source in sources:
            if source is None:
                continue
            depth = len(self._sites[source].loops)
            if depth <= len(steps):
                yield source, steps[:depth]
            else:  # What leaves a loop comes from any of its iterations.
                bad = self._bad_instances(source)
                yield from (instance for instance in bad if instance[1][: len(steps)] == steps)

    def _before(self, site: Site, steps: Steps) -> Steps | None:
        """Returns the iteration before an iteration of the innermost loop; None for the first iteration."""
        # A carry enters the first iteration from outside, and each other from the iteration before.
        loop, (*around, step) = site.loops[-1], steps
        if loop.kind == "while":
            # Only some iterations are kept. The one before in the records stands for the one before it.
            return (*around, step - 1) if step and self._iterations(site, steps)[-1] else None
        before = step + 1 if loop.reverse else step - 1
        return (*around, before) if 0 <= before < loop.length else None

    def _iterations(self, site: Site, steps: Steps) -> Steps:
        """Returns the numbers of iterations, from the indexes of those that are kept."""
        return tuple(
            int(self._measured.steps[loop.path][steps[: depth + 1]]) if loop.kind == "while" else step
            for depth, (loop, step) in enumerate(zip(site.loops, steps))
        )

    def _moment(self, site: Site, steps: Steps) -> tuple[int, ...]:
        """Returns the path of a site with the iterations in it."""
        moment: list[int] = []
        start = 0
        for loop, step in zip(site.loops, steps):
            end = len(loop.path)
            moment += [*site.path[start:end], loop.length - 1 - step if loop.reverse else step]
            start = end
        return (*moment, *site.path[start:])

    # The records. The caches live as long as a `Flow`, which is one report.

    @functools.cache  # noqa: B019
    def _bad(self, path: Path) -> np.ndarray:
        record = self._records[path]
        low, high = record[..., 0], record[..., 1]
        bad = self._nan(path) | (low == -np.inf) | (high == np.inf)
        return np.asarray(bad)

    @functools.cache  # noqa: B019
    def _nan(self, path: Path) -> np.ndarray:
        return np.asarray(np.isnan(self._records[path]).any(-1))

    @functools.cache  # noqa: B019
    def _bad_instances(self, path: Path) -> list[Instance]:
        return [(path, tuple(map(int, steps))) for steps in np.argwhere(self._bad(path))]

    def _is_bad(self, instance: Instance) -> bool:
        path, steps = instance
        return bool(self._bad(path)[steps])

    def _is_nan(self, instance: Instance) -> bool:
        path, steps = instance
        return bool(self._nan(path)[steps])

    def _extent(self, path: Path, steps: Steps) -> tuple[float, float]:
        low, high = self._records[path][steps]
        return float(low), float(high)

    def _extent_at(self, source: Path, steps: Steps) -> tuple[float, float] | None:
        depth = len(self._sites[source].loops)
        return self._extent(source, steps[:depth]) if depth <= len(steps) else None

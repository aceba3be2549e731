"""Where inf and NaN come from, and whether they are harmful.

An instance is a site in one iteration of each loop around it. It is bad if it has an inf or NaN, and an
origin if it is bad and its operands are not. An origin is harmful in two ways:

- A chain of bad instances leads from it to the loss or to a gradient.
- It is an inf that half arithmetic computes from finite numbers, and an operation turns it into finite
  numbers that are wrong: `rsqrt` of an overflow is 0. Such an origin is a suspect until `find.Trials.judged`
  has compared the program with float32.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

import numpy as np

from ..._jaxpr import Category, traits_of
from .._values.sites import Path, Site, SiteKind
from .._values.tap import Probe
from .._values.trace import Measured

T = TypeVar("T")
Steps = tuple[int, ...]
Instance = tuple[Path, Steps]
"""A site, and the index of the iteration in each loop around it."""
Extent = tuple[float, float]
"""The smallest and the largest element of a value."""

# Each shard takes the operands of all shards.
_COLLECTIVES = frozenset(
    {"psum", "psum_invariant", "pmax", "pmin", "ppermute", "all_to_all", "reduce_scatter"}
    | {"all_gather", "all_gather_invariant"}
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """An instance at which an inf or NaN begins."""

    site: Site
    is_nan: bool  # Whether it has a NaN and no operand has one. Otherwise it has an inf.
    extent: Extent
    operands: tuple[Extent | None, ...]  # The extent of each operand, where it is known.
    is_harmful: bool  # Whether it reaches the loss or a gradient.
    end: Site | None  # For a suspect, the site that turns it into finite numbers.
    way: tuple[tuple[Site, bool], ...]  # The operations up to an output, and whether each gives a NaN.
    direction: str  # `derivative` if the forward pass computes it for the backward pass alone.
    moment: tuple[int, ...]  # Sorts origins as the program runs.


class Flow:
    """The bad instances of one run, and which of them were computed from which.

    `watched` are the numbers of the outputs that should be finite.
    """

    def __init__(self, measured: Measured, watched: Collection[int]) -> None:
        self._measured, self._watched = measured, watched
        self._sites, self._records = measured.sites, measured.records
        # For each site an array with an axis for each loop around it.
        self._bad = {path: np.asarray(Probe().alarm(record)) for path, record in self._records.items()}
        self._next: dict[Instance, Instance] = {}  # The next bad instance of those that lead to an output.
        self._nan = {path: np.asarray(np.isnan(record).any(-1)) for path, record in self._records.items()}

    def origins(self) -> list[Origin]:
        instances = (each for path in self._records for each in self._bad_instances[path])
        origins = map(self._origin, filter(self._begins, instances))
        return sorted(origins, key=lambda origin: origin.moment)

    def bad_outputs(self) -> list[int]:
        paths = ((n, path) for n, path in enumerate(self._measured.outputs) if n in self._watched)
        return [n for n, path in paths if path is not None and self._bad[path].any()]

    @functools.cached_property
    def _following(self) -> dict[Instance, None]:
        """The bad instances that lead to a bad output."""
        outputs = {self._measured.outputs[index] for index in self.bad_outputs()}
        # A step that tests its gradients skips its update, so no output shows them. A loss that tests a value
        # is guarded against it.
        outputs |= self._measured.described.checked if self._measured.program.is_step else set()
        bad = (self._bad_instances[path] for path in outputs if path is not None)
        found, self._next = self._leading(dict.fromkeys(itertools.chain.from_iterable(bad)))
        return found

    def _way(self, instance: Instance) -> Iterator[tuple[Site, bool]]:
        """Yields the operations after an instance on the way to an output, and whether each gives a NaN."""
        while instance in self._next:
            instance = self._next[instance]
            site = self._sites[instance[0]]
            if site.kind is SiteKind.OPERATION and traits_of(site.operation).category is not Category.MOVE:
                yield site, self._is_nan(instance)

    @functools.cached_property
    def _ends(self) -> dict[Instance, Site]:
        """The infs of half arithmetic that an operation turns into finite numbers, with the first one."""
        has_bad = {path for path, bad in self._bad.items() if bad.any()}
        # An end is the first operation that reads an inf and whose own result is finite.
        readers = [path for path, site in self._sites.items() if not has_bad.isdisjoint(site.sources)]
        ends: dict[Instance, Site] = {}
        for path in sorted(path for path in readers if not _passes_on(self._sites[path])):
            low, high = np.moveaxis(self._records[path], -1, 0)
            # A branch that is not taken has no elements: its record is inf and -inf.
            for steps in np.argwhere(np.isfinite(low) & np.isfinite(high) & (low <= high)):
                for operand in filter(self._is_bad, self._operands((path, tuple(map(int, steps))))):
                    ends.setdefault(operand, self._sites[path])

        # The inf of a mask is written in the program, and is no result of half arithmetic.
        def takes_inf(site):
            return not {"inf", "-inf"}.isdisjoint(site.operands)

        def is_computed(site):
            return site.kind is SiteKind.OPERATION and site.is_half and not takes_inf(site)

        leading, _ = self._leading(ends)
        return {instance: end for instance, end in leading.items() if is_computed(self._sites[instance[0]])}

    def _leading(self, ends: dict[Instance, T]) -> tuple[dict[Instance, T], dict[Instance, Instance]]:
        """Returns the bad instances that lead to some bad instances, each with what is given for its end.

        The second result is the next instance on the way there.
        """
        # Breadth first from the ends, so that `following` is a shortest way.
        found, following, todo = dict(ends), dict[Instance, Instance](), collections.deque(ends)
        while todo:
            instance = todo.popleft()
            bad = [operand for operand in self._operands(instance) if self._is_bad(operand)]
            nans = [operand for operand in bad if self._is_nan(operand)]
            # Operations propagate NaN. So a NaN comes from the operands that have a NaN, if any has one.
            for operand in nans if nans and self._is_nan(instance) else bad:
                if operand not in found:
                    found[operand], following[operand] = found[instance], instance
                    todo.append(operand)
        return found, following

    def _begins(self, instance: Instance) -> bool:
        bad = [operand for operand in self._operands(instance) if self._is_bad(operand)]
        # An operation may compute a NaN from infs (inf - inf). So a NaN may begin at operands with an inf.
        return not (any(map(self._is_nan, bad)) if self._is_nan(instance) else bad)

    def _origin(self, instance: Instance) -> Origin:
        path, steps = instance
        site, is_harmful = self._sites[path], instance in self._following

        def is_inside(source):
            return len(self._sites[source].loops) > len(steps)  # Of a loop that it leaves.

        return Origin(
            site=site,
            is_nan=self._is_nan(instance),
            extent=self._extent(path, steps),
            operands=tuple(
                None if x is None or is_inside(x) else self._extent(x, steps) for x in site.sources
            ),
            is_harmful=is_harmful,
            end=None if is_harmful or self._is_nan(instance) else self._ends.get(instance),
            way=tuple(self._way(instance)),
            direction="derivative" if path in self._derivatives else site.direction,
            moment=self._moment(site, steps),
        )

    def _operands(self, instance: Instance) -> Iterator[Instance]:
        """Yields the instances that an instance was computed from."""
        path, steps = instance
        site, carried = self._sites[path], self._measured.described.carried
        sources = site.sources
        # A carry enters the first iteration from outside, and each other one from the iteration before.
        if path in carried:
            loop, (*around, step) = site.loops[-1], steps
            before = step + 1 if loop.reverse else step - 1
            if 0 <= before < loop.length:
                sources, steps = (carried[path],), (*around, before)
        for source in sources:
            if source is None:
                continue
            depth = len(self._sites[source].loops)
            if depth <= len(steps):
                yield from self._of_shards(source, steps[:depth], site)
            else:  # What leaves a loop may come from any of its iterations.
                bad = self._bad_instances[source]
                yield from (instance for instance in bad if instance[1][: len(steps)] == steps)

    def _of_shards(self, source: Path, steps: Steps, site: Site) -> Iterator[Instance]:
        """Yields the instances of an operand of a site: those of all shards if the site is a collective."""
        shards = [depth for depth, loop in enumerate(site.loops[: len(steps)]) if loop.kind == "shard_map"]
        if site.operation not in _COLLECTIVES or not shards:
            yield source, steps
            return
        depth = shards[-1]
        for shard in range(site.loops[depth].length):
            yield source, (*steps[:depth], shard, *steps[depth + 1 :])

    def _moment(self, site: Site, steps: Steps) -> tuple[int, ...]:
        """Returns the path of a site with the iterations inserted, which sorts as the program runs."""
        moment, start = list[int](), 0
        for loop, step in zip(site.loops, steps):
            moment += site.path[start : len(loop.path)]
            # A reverse scan takes the last slice first.
            moment.append(loop.length - 1 - step if loop.reverse else step)
            start = len(loop.path)
        return (*moment, *site.path[start:])

    @functools.cached_property
    def _derivatives(self) -> set[Path]:
        """The sites of the forward pass that only the backward pass reads, such as 0.5 / sqrt(x)."""
        loss = None if self._measured.program.is_step else self._measured.outputs[0]
        if loss is None:
            return set()
        backward = self._before([path for path, site in self._sites.items() if site.is_scaled])
        forward = {path for path in backward if self._sites[path].direction == "forward"}
        return forward - self._before([loss])

    def _before(self, paths: Iterable[Path]) -> set[Path]:
        """Returns the sites that some values were computed from, and their own."""
        seen, todo = set(paths), list(paths)
        while todo:
            path = todo.pop()
            sources = (*self._sites[path].sources, self._measured.described.carried.get(path))
            new = {source for source in sources if source is not None} - seen
            seen |= new
            todo += new
        return seen

    @functools.cached_property
    def _bad_instances(self) -> dict[Path, list[Instance]]:
        def listed(bad):
            return (tuple(map(int, steps)) for steps in np.argwhere(bad))

        return {path: [(path, steps) for steps in listed(bad)] for path, bad in self._bad.items()}

    def _is_bad(self, instance: Instance) -> bool:
        return bool(self._bad[instance[0]][instance[1]])

    def _is_nan(self, instance: Instance) -> bool:
        return bool(self._nan[instance[0]][instance[1]])

    def _extent(self, path: Path, steps: Steps) -> Extent:
        # An operand may be outside of the innermost loops.
        low, high = self._records[path][steps[: len(self._sites[path].loops)]]
        return float(low), float(high)


def _passes_on(site: Site) -> bool:
    """Whether a site moves or selects elements: where its result is finite, it has left the inf out."""
    traits = traits_of(site.operation)
    is_move = site.kind is not SiteKind.OPERATION or traits.category is Category.MOVE or traits.keeps_gradient
    return is_move or traits.selects

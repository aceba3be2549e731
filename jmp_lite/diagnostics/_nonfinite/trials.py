"""Remedies that are tried: the program runs again with one thing changed, and is compared with float32."""

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ..._scaling.loss_scale import DynamicLossScale
from ..._text import dynamic_scale
from .._precision.compare import HARM, Runs
from .._precision.fewest import fewest
from .._precision.modules import Module
from .._precision.report import Difference
from .flow import Origin
from .report import Trial

MOST_GROUPS = 24
"""How many modules or casts are run alone at most: each is one run of the loss and its gradients."""


@dataclasses.dataclass
class Trials:
    """The trials of one program. An error up to `HARM` counts as right."""

    runs: Runs

    def of_cause(self, origin: Origin, fitting: float | None) -> Iterator[Trial]:
        """Yields what is tried; `fitting` is a smaller loss scale that gives finite numbers."""
        if not self.runs.is_finite:
            return
        if fitting is not None:
            change = dynamic_scale(int(math.log2(fitting)))
            trial = self._trial(change, self.runs.keeping((), fitting), loss_scale=fitting)
            yield trial
            if trial.helps:
                return
        if kept := self._kept(origin):  # None in a backward rule of the user, whose casts have no flags.
            yield self._in_float32(kept)
        if self.runs.program.has_float16:
            yield self._trial("bfloat16 in place of float16", self.runs.in_bfloat16(), dtype="bfloat16")

    def judged(self, origins: Sequence[Origin]) -> list[Origin]:
        """Returns origins; if none is harmful yet, those that make the finite result wrong now are."""
        if any(origin.is_harmful for origin in origins):
            return list(origins)
        return [dataclasses.replace(origin, is_harmful=self._is_harmful(origin)) for origin in origins]

    def _is_harmful(self, origin: Origin) -> bool:
        """Whether the result is wrong, and nearer to float32 if the module of a suspect is in float32."""
        if origin.end is None or not self.runs.is_finite or (wrong := self._error(())) <= HARM:
            return False
        groups = self.runs.program.groups_on(origin.site.line)
        return any(self._error(kept) < wrong / 2 for kept in (*([group] for group in groups), groups))

    def _kept(self, origin: Origin) -> Sequence[Module]:
        """Returns few groups whose float32 makes the result right: first those that the origin is in."""
        near = self.runs.program.groups_on(origin.site.line)
        for kept in (*([group] for group in near), near):
            if kept and self._error(kept) <= HARM:
                return fewest(kept, self._error, HARM) or kept
        groups = sorted(self.runs.program.edits, key=lambda group: group.name)
        if len(groups) > MOST_GROUPS:
            return groups
        own = {group: self._error(set(groups) - {group}) for group in groups}
        return fewest(sorted(own, key=lambda group: -own[group]), self._error, HARM) or groups

    def _in_float32(self, kept: Sequence[Module]) -> Trial:
        lines = dict.fromkeys(line for group in kept if group.casts for line in group.lines)
        arguments = tuple(group.name for group in kept if group.is_argument)
        how = {"rules": self.runs.rules(kept), "lines": tuple(lines), "arguments": arguments}
        error, scale = self._run(kept)
        change = self.runs.change(kept)
        if scale is not None:
            change, how["loss_scale"] = f"{change}; and {dynamic_scale(int(math.log2(scale)))}", scale
        return self._trial(change, error, **how)

    def _error(self, kept: Collection[Module]) -> float:
        return self._worst(self._run(kept)[0])

    def _run(self, kept: Collection[Module]) -> tuple[Difference, float | None]:
        """Returns the error with some groups in float32, and a loss scale that was not given if it helps."""
        error = self.runs.keeping(kept)
        if self._worst(error) <= HARM or math.isinf(error.loss) or not self.runs.may_scale:
            return error, None
        scaled = self.runs.keeping(kept, DynamicLossScale.loss_scale)
        helps = self._worst(scaled) < self._worst(error)
        return (scaled, DynamicLossScale.loss_scale) if helps else (error, None)

    def _trial(self, change: str, error: Difference, **how: Any) -> Trial:
        return Trial(change, error, self._worst(error) <= HARM, **how)

    def _worst(self, error: Difference) -> float:
        lost = math.inf if error.lost and error.lost in self.runs.program.aux else 0.0
        return max(self.runs.loss_error(error), error.gradients, lost)

"""Judges the errors of runs: which of them are harmful, and whether a larger loss scale mends them."""

import math

from ..._scaling.loss_scale import DynamicLossScale
from .report import BY_HAND, HARM, LEAF, Difference, Limits
from .runs import Runs

_SCALES = (DynamicLossScale.loss_scale, 2.0**8, 2.0**30)
"""The loss scales that are tried in place of one that is too small, the default first."""


class Judge:
    """What is harmful in some runs. `harmless` is the tolerance if none is given: by default `doctor`'s."""

    def __init__(self, runs: Runs, harmless: float = HARM) -> None:
        self._runs, self._harmless = runs, harmless

    def loss_error(self, error: Difference) -> float:
        """Returns the error of a loss, over what the parameters contribute to it if that is larger."""
        # A loss may be zero but for rounding, as PPO's is at its first step: its relative error says nothing.
        size = abs(self._runs.loss or 0.0)
        is_small = size < self._runs.contribution and math.isfinite(error.loss)
        # The error of a loss that is exactly 0 is not relative.
        return error.loss * (size or 1.0) / self._runs.contribution if is_small else error.loss

    def limits(self, tolerance: float | None) -> Limits:
        """Returns the errors that are allowed: the tolerance, or what casts by hand cost if that is more."""
        half, least = self._runs.keeping(()), self._harmless if tolerance is None else tolerance
        limits = Limits("gradients", least)
        # Casts by hand have the range of float32, so what overflows in half alone is no rounding error.
        is_random = tolerance is None and not half.lost and math.isfinite(half.gradients)
        if is_random and not limits.allow(half):
            leaf = max(LEAF, BY_HAND * self._runs.by_hand.leaf)
            limits = Limits("gradients", max(least, BY_HAND * self._runs.by_hand.gradients), leaf)
        # The gradients of a wrong loss may be right, as those of a sum that stops growing.
        if not limits.allow(half) or not self.is_loss_wrong(half, tolerance):
            return limits
        of_hand = BY_HAND * self._runs.by_hand.loss if tolerance is None else 0.0
        return Limits("loss", max(least, HARM, of_hand))

    def is_loss_wrong(self, error: Difference, tolerance: float | None) -> bool:
        """Whether the error of a loss is harmful, and more than casts by hand cost."""
        # A small difference of large numbers has a large relative error.
        if self.loss_error(error) <= max(self._harmless if tolerance is None else tolerance, HARM):
            return False
        return tolerance is not None or error.loss > BY_HAND * self._runs.by_hand.loss

    def try_scale(self, tolerance: float | None) -> Difference | None:
        """Switches to the loss scale that is enough, or helps most; returns the error before.

        None if none halves the error.
        """
        unscaled = self._runs.keeping(())
        limits = Limits("gradients", self._harmless if tolerance is None else tolerance)

        def error(scale):
            return limits.measured(self._runs.keeping((), scale))

        # No scale mends a loss that is not finite: it overflows before it is scaled.
        if not self._runs.may_scale or limits.allow(unscaled) or math.isinf(unscaled.loss):
            return None
        enough = (scale for scale in _SCALES if error(scale) <= limits.tolerance)
        best = next(enough, None) or min(_SCALES, key=error)
        if error(best) >= limits.measured(unscaled) / 2:
            return None
        self._runs.scale = best
        return unscaled

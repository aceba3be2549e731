"""Broken runs at a tiny size: each is a program, the operation and the line at which it breaks."""

from .finite import FINITE
from .nonfinite import LOSSES
from .public import PUBLIC
from .remedied import REMEDIED, WRONG
from .run import Run
from .steps import STEPS

NAMED = (*LOSSES, *FINITE, *STEPS, *REMEDIED, *WRONG)
"""The kinds of faults that the documentation names."""

ALL: tuple[Run, ...] = (*NAMED, *PUBLIC)

"""Broken runs at a tiny size: each is a program, the operation and the line at which it breaks."""

from .finite import FINITE
from .nonfinite import LOSSES
from .public import PUBLIC
from .remedied import REMEDIED as REMEDIED
from .remedied import WRONG as WRONG
from .run import Run
from .steps import STEPS

ALL: tuple[Run, ...] = (*LOSSES, *FINITE, *STEPS, *REMEDIED, *WRONG, *PUBLIC)

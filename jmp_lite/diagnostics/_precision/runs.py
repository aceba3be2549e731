"""Runs a program with some of its modules in float32, and measures the errors."""

import functools
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from ..._jaxpr import Array
from ..._scaling.loss_scale import DynamicLossScale
from .._values.case import Case
from .._values.edited import UnknownFunctionError
from .flags import FlaggedProgram
from .groups import error_of, groups_of, rows_of, updated, worst_leaf
from .modules import Module
from .report import ORDER_OF_SUMS, Difference
from .states import States
from .written import Written, can_write, silent_casts, write

_COSINE = 0.5
"""The cosine of a half gradient and that in float32 below which its direction is wrong."""
_NUDGES = (0.0, 1e-3, -1e-3)  # The relative changes of the parameters at which casts by hand are measured.
_UNSTABLE = 0.01  # A gradient that the last digits of the parameters change by more is rounding error.


class Runs:
    """The errors with some modules in float32; each set of modules is run once.

    `scale` is the loss scale of the runs in half; `may_scale` says whether a larger one may help. `failure`
    is the error of XLA if the program does not run in float32; then nothing is finite.
    """

    def __init__(self, case: Case) -> None:
        self.program = program = FlaggedProgram(case)
        self.scale = case.scale
        is_small = self.scale < DynamicLossScale.loss_scale
        self.may_scale = is_small and program.dtype == jnp.float16 and not program.is_step
        self.failure: Exception | None = None
        try:
            self.full = program(None, 1.0)  # In float32, where no scale is needed.
        except jax.errors.JaxRuntimeError as error:
            # A GPU that holds the half values may have no memory for those in float32.
            self.failure, self.full = error, program.unknown()
        self.loss = None if program.is_step else float(self.full[0])
        self.half_loss: float | None = None  # With everything in half, at the scale of the call.
        self._state = updated(program, self.full)
        self._loss_scales = case.program.loss_scales
        self._groups = groups_of(program, self._state)
        self._differences: dict[tuple[float, frozenset[Module]], Difference] = {}
        self._case, self._written = case, dict[frozenset[Module], Written]()
        self._measured: dict[tuple[float, frozenset[Module]], Difference] = {}  # Those of the written edits.
        first = 0 if program.is_step else 1
        self.bad = self._nonfinite(self.full, first, program.outputs[first:])
        # An auxiliary result may hold a mask of -inf: those count that float32 has finite.
        bad_aux = self._nonfinite(self.full, len(program.outputs), program.aux)
        self.finite_aux = set(program.aux) - set(bad_aux)
        self.is_finite = not self.bad and (self.loss is None or math.isfinite(self.loss))

    def keeping(self, modules: Iterable[Module], scale: float | None = None) -> Difference:
        """Returns the error with some modules in float32 and the others in half."""
        key = self.scale if scale is None else scale, frozenset(modules)
        if key not in self._differences:
            outputs = self.program(self.program.groups - key[1], key[0])
            self._differences[key] = self._difference(outputs)
            if self.half_loss is None and not key[1] and not self.program.is_step:
                self.half_loss = float(outputs[0])
        if key[1] in self._written and key not in self._measured:
            outputs = self._written[key[1]](self.program.arrays(key[0]))[: self.program.floating]
            measured = self._difference(outputs)
            # Another program may sum in another order: of equal errors that of the runs is the exact one.
            is_same = _is_same(measured, self._differences[key])
            self._measured[key] = self._differences[key] if is_same else measured
        return self._measured.get(key, self._differences[key])

    @functools.cached_property
    def is_finite_if_written(self) -> bool:
        """Whether the program is finite with all edits written: JAX draws other numbers in float32."""
        edits = frozenset(edit for edit in (*self.program.edits, *self.silent) if not edit.is_gradient)
        if not self.write(edits):
            return False
        outputs = self._written[edits](self.program.arrays(1.0))[: len(self.program.outputs)]
        return not self._nonfinite(outputs, 0, self.program.outputs)

    @functools.cached_property
    def silent(self) -> list[Module]:
        """The edits of casts that have no operation in the program, since they take half values."""
        return silent_casts(self._case, self.program)

    def write(self, modules: Iterable[Module]) -> bool:
        """Writes edits into the program, and measures what results from now on; returns whether it can."""
        key = frozenset(modules)
        if key in self._written or not can_write(self._case, key):
            return key in self._written
        try:
            self._written[key] = write(self._case, self.program, key)
        except UnknownFunctionError:
            return False
        except Exception:  # JAX refuses two dtypes for one value, and a function may check its dtypes.
            self._written[key] = lambda _: self.program.unknown()
        return True

    @functools.cached_property
    def by_hand(self) -> Difference:
        """The error of casts by hand, the largest for these parameters and others near."""
        return max(self._near, key=lambda error: error.gradients)

    @functools.cached_property
    def _near(self) -> list[Difference]:
        """The errors of casts by hand, for these parameters and others near."""
        # Near an optimum every gradient is mostly rounding error, so that one measurement says little.
        full = (self.program(None, 1.0, nudge) if nudge else self.full for nudge in _NUDGES)
        return list(map(self._difference, self.program.by_hand(_NUDGES), full))

    @functools.cached_property
    def is_rounding(self) -> bool:
        """Whether the gradient is mostly rounding error, with casts by hand too, here and nearby."""

        # Half precision still finds the way to a better point if one of the directions nearby is right.
        def is_lost(error):
            return error.gradients > 1 and error.cosine < _COSINE

        return not self.program.is_step and is_lost(self.keeping(())) and all(map(is_lost, self._near))

    def in_float16(self) -> Difference:
        """Returns the error of casts by hand to the digits of float16, with the range of float32."""
        (outputs,) = self.program.by_hand([0.0], jnp.float16)
        return self._difference(outputs)

    @functools.cached_property
    def states(self) -> States:
        return States(self.program, self._state, self._loss_scales, self._written)

    def in_bfloat16(self) -> Difference:
        return self._difference(self.program.in_bfloat16(self.scale))

    def _difference(self, outputs: Sequence[Array], full: Sequence[Array] | None = None) -> Difference:
        """Returns the errors of the loss and of the group of other outputs that is furthest off."""
        full = self.full if full is None else full
        loss_error = 0.0
        if self.loss is not None:
            loss = float(full[0])
            distance = abs(float(outputs[0]) - loss)
            loss_error = distance / abs(loss) if loss else distance
        norms = {group: group.norms(outputs, full) for group in self._groups}
        errors = {group: error_of(*each.sum(axis=0)) for group, each in norms.items()}
        worst = max(errors, key=lambda group: errors[group][0], default=None)
        error, cosine = (0.0, 1.0) if worst is None else errors[worst]
        leaf, name, lost = worst_leaf(self.program, norms, lambda: self._noise)
        if worst is not None and self.program.is_step and leaf <= error:
            name = worst.name
        loss_error = loss_error if math.isfinite(loss_error) else math.inf
        bad = self._nonfinite(outputs, len(self.program.outputs), self.program.aux)
        lost = next(filter(None, [lost, *(name for name in bad if name in self.finite_aux)]), "")
        return Difference(loss_error, error, cosine, name, leaf, lost)

    @functools.cached_property
    def _noise(self) -> set[int]:
        """The gradients that are rounding errors in float32 as well, so that no dtype has them right."""
        # That of a bias in front of a normalization is one: it would be zero if sums were exact. The last
        # digits of the parameters change such a gradient as a whole, and other gradients of real models by
        # 1e-5 at most.
        near = self.program(None, 1.0, nudge=2.0**-23)
        rows = rows_of({group: group.norms(near, self.full) for group in self._groups})
        return {number for number, row in rows.items() if error_of(*row)[0] > _UNSTABLE}

    @functools.cached_property
    def contribution(self) -> float:
        """How much the parameters contribute to a loss, to first order."""
        parameters, gradients = list(self.program.parameters.values()), self.full[1:]
        if self.program.is_step or [p.shape for p in parameters] != [g.shape for g in gradients]:
            return 0.0

        def product(p, g):
            return abs(float(jnp.sum(p.astype(jnp.float32) * jnp.real(g))))

        total = sum(map(product, parameters, gradients))
        return total if math.isfinite(total) else 0.0

    def _nonfinite(self, results: Sequence[Array], first: int, names: Sequence[str]) -> list[str]:
        named = zip(names, results[first:])
        return [name for name, result in named if not bool(jnp.isfinite(result).all())]


def _is_same(one: Difference, other: Difference) -> bool:
    """Whether two errors differ by what another order of sums changes."""
    pairs = ((one.loss, other.loss), (one.gradients, other.gradients), (one.leaf, other.leaf))
    return one.lost == other.lost and all(abs(a - b) <= ORDER_OF_SUMS for a, b in pairs)

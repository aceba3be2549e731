"""Measures the accuracy that each module costs in half: `compare_precision`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, Unpack

import jax.numpy as jnp

from ..._dtypes import DTypeLike, DTypeName
from ..._jaxpr import Array, in_two_calls
from ..._scaling.loss_scale import DynamicLossScale
from .._values.case import Case, Options, tool
from .fewest import fewest
from .flags import FlaggedProgram
from .groups import error_of, groups_of, rows_of, updated, worst_leaf
from .modules import Module, in_words, scopes_for
from .report import BY_HAND, HARM, LEAF, Difference, Limits, ModuleDifference, PrecisionReport
from .states import States

P = ParamSpec("P")
_COSINE = 0.5
"""The cosine of a half gradient and that in float32 below which its direction is wrong."""
_NUDGES = (0.0, 1e-3, -1e-3)  # The relative changes of the parameters at which casts by hand are measured.
_UNSTABLE = 0.01  # A gradient that the last digits of the parameters change by more is rounding error.
_SCALES = (DynamicLossScale.loss_scale, 2.0**8, 2.0**30)
"""The loss scales that are tried in place of one that is too small, the default first."""
MOST_EDITS = 24
"""How many modules or casts are run alone at most to find a remedy: each is one run."""


@in_two_calls
def compare_precision(
    fun: Callable[P, Any],
    dtype: DTypeLike | None = None,
    *,
    tolerance: float | None = None,
    **options: Unpack[Options],
) -> Callable[P, PrecisionReport]:
    """Returns a function that measures the accuracy that each module costs in half, and finds remedies.

    It runs the loss and its gradients in float32 and with all modules in half. If the error is above the
    tolerance, it runs them once for each module with that module alone in half, and searches for a small set
    of modules to keep in float32. A function with half matmuls of its own is compared with itself in float32;
    others run under `autocast`. A module is a scope with half values; if the scopes tell no modules apart
    (NNX, Equinox, plain functions), it is the argument that holds the parameters. With `tolerance=0` it
    measures each module, and nothing is left to search.

    The error is that of the gradients: of all, or of one that is off by more than half of its own norm. If
    they are close and the loss is off by more than 0.1, as with a sum that stops growing, it is that of the
    loss. If the error in float16 is above the tolerance, it tries the loss scale `2**15` in place of a
    smaller one; if this more than halves the error, all runs in half use it.

    All runs are runs of one program, which holds half values as float32 numbers and rounds them by flags.
    Products add up in float32, as on Tensor Cores; in float32 they run at the highest precision, not in TF32.

    Args:
        fun: the loss function, as it is given to `jmp_lite.value_and_grad`. It is not changed.
        dtype: `jnp.float16` or `jnp.bfloat16`, or a name. For a function that `autocast` returned it is the
            dtype of that autocast, for any other float16 by default. A function with half matmuls of its own
            keeps its dtypes.
        tolerance: the largest relative error that is allowed; by default 8 times the `eps` of the dtype, or
            twice the error of casts by hand if that is more.
        options: `loss_scale`, `argnums`, `has_aux` and `value_and_grad_fn`, as in `doctor`. Without a scale
            it is 1, or `2**15` as above.

    Returns:
        A function of the arguments of `fun` that returns a `PrecisionReport`. Call it outside `jit`.

    Raises:
        TypeError: as in `doctor`.
        ValueError: as in `doctor`; the loss or a gradient is not finite in float32.

    Source: for inference, the float16 debugging of ONNX Runtime and the tuning of Intel's Neural Compressor.

    Examples:
        >>> w, x = {"a": jnp.full((4, 4), 0.3), "b": jnp.full((4, 1), 1e5)}, jnp.ones((2, 4))
        >>> report = compare_precision(lambda w, x: jnp.mean(x @ w["a"] @ w["b"] / 1e6))(w, x)
        >>> report.modules[0].module, report.modules[0].own.loss, report.rules
        ('w/b', inf, {'/w/b': 'float32'})
    """
    check_tolerance("compare_precision", tolerance)

    def compare(case: Case) -> PrecisionReport:
        runs = Runs(case)
        if not runs.is_finite:
            names = f"; these gradients are not finite: {', '.join(runs.bad[:4])}" if runs.bad else ""
            raise ValueError(
                f"compare_precision compares with float32, in which the loss is {runs.loss:.6g}{names}. Find "
                "the cause first: jmp_lite.diagnostics.find_nonfinite(loss_fn)(*args)."
            )
        runs.harmless = 8 * float(jnp.finfo(runs.program.dtype).eps)
        return report_of(runs, tolerance)

    return tool("compare_precision", fun, dtype, jnp.float16, compare, **options)


def check_tolerance(caller: str, tolerance: float | None) -> None:
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and 0 <= tolerance < math.inf):
        raise ValueError(
            f"{caller}: tolerance should be a relative error, 0 or more, or None. Got {tolerance!r}."
        )


class Runs:
    """The errors with some modules in float32; each set of modules is run once.

    `scale` is the loss scale of the runs in half; `may_scale` says whether a larger one may help. `harmless`
    is the tolerance if none is given: by default that of `doctor`.
    """

    def __init__(self, case: Case) -> None:
        self.program = program = FlaggedProgram(case)
        self.scale = case.scale
        self.harmless = HARM
        is_small = self.scale < DynamicLossScale.loss_scale
        self.may_scale = is_small and program.dtype == jnp.float16 and not program.is_step
        self._full = program(None, 1.0)  # In float32, where no scale is needed.
        self.loss = None if program.is_step else float(self._full[0])
        self.half_loss: float | None = None  # With everything in half, at the scale of the call.
        self._state = updated(program, self._full)
        self._groups = groups_of(program, self._state)
        self._differences: dict[tuple[float, frozenset[Module]], Difference] = {}
        first = 0 if program.is_step else 1
        self.bad = self._nonfinite(self._full, first, program.outputs[first:])
        # An auxiliary result may hold a mask of -inf: those count that float32 has finite.
        bad_aux = self._nonfinite(self._full, len(program.outputs), program.aux)
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
        return self._differences[key]

    @functools.cached_property
    def by_hand(self) -> Difference:
        """The error of casts by hand, the largest for these parameters and others near."""
        return max(self._near, key=lambda error: error.gradients)

    @functools.cached_property
    def _near(self) -> list[Difference]:
        """The errors of casts by hand, for these parameters and others near."""
        # Near an optimum every gradient is mostly rounding error, so that one measurement says little.
        full = (self.program(None, 1.0, nudge) if nudge else self._full for nudge in _NUDGES)
        return list(map(self._difference, self.program.by_hand(_NUDGES), full))

    @functools.cached_property
    def is_rounding(self) -> bool:
        """Whether the gradient is mostly rounding error, with casts by hand too, here and nearby."""
        # Half precision still finds the way to a better point if one of the directions nearby is right.
        is_lost = lambda error: error.gradients > 1 and error.cosine < _COSINE
        return not self.program.is_step and is_lost(self.keeping(())) and all(map(is_lost, self._near))

    def in_float16(self) -> Difference:
        """Returns the error of casts by hand to the digits of float16, with the range of float32."""
        (outputs,) = self.program.by_hand([0.0], jnp.float16)
        return self._difference(outputs)

    @functools.cached_property
    def states(self) -> States:
        return States(self.program, self._state)

    def in_bfloat16(self) -> Difference:
        return self._difference(self.program.in_bfloat16(self.scale))

    def _difference(self, outputs: Sequence[Array], full: Sequence[Array] | None = None) -> Difference:
        """Returns the errors of the loss and of the group of other outputs that is furthest off."""
        full = self._full if full is None else full
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
        rows = rows_of({group: group.norms(near, self._full) for group in self._groups})
        return {number for number, row in rows.items() if error_of(*row)[0] > _UNSTABLE}

    def _nonfinite(self, results: Sequence[Array], first: int, names: Sequence[str]) -> list[str]:
        named = zip(names, results[first:])
        return [name for name, result in named if not bool(jnp.isfinite(result).all())]

    @functools.cached_property
    def _contribution(self) -> float:
        """How much the parameters contribute to a loss, to first order."""
        parameters, gradients = list(self.program.parameters.values()), self._full[1:]
        if self.program.is_step or [p.shape for p in parameters] != [g.shape for g in gradients]:
            return 0.0
        product = lambda p, g: abs(float(jnp.sum(p.astype(jnp.float32) * jnp.real(g))))
        total = sum(map(product, parameters, gradients))
        return total if math.isfinite(total) else 0.0

    def loss_error(self, error: Difference) -> float:
        """Returns the error of a loss, over what the parameters contribute to it if that is larger."""
        # A loss may be zero but for rounding, as PPO's is at its first step: its relative error says nothing.
        size = abs(self.loss or 0.0)
        is_small = size < self._contribution and math.isfinite(error.loss)
        # The error of a loss that is exactly 0 is not relative.
        return error.loss * (size or 1.0) / self._contribution if is_small else error.loss

    def limits(self, tolerance: float | None) -> Limits:
        """Returns the errors that are allowed: the tolerance, or what casts by hand cost if that is more."""
        half, least = self.keeping(()), self.harmless if tolerance is None else tolerance
        limits = Limits("gradients", least)
        # Casts by hand have the range of float32, so what overflows in half alone is no rounding error.
        is_random = tolerance is None and not half.lost and math.isfinite(half.gradients)
        if is_random and not limits.allow(half):
            leaf = max(LEAF, BY_HAND * self.by_hand.leaf)
            limits = Limits("gradients", max(least, BY_HAND * self.by_hand.gradients), leaf)
        # The gradients of a wrong loss may be right, as those of a sum that stops growing. The loss is
        # measured only if its error is harmful: a small difference of large numbers has a large relative
        # error.
        largest = max(least, HARM)
        if not limits.allow(half) or self.loss_error(half) <= largest:
            return limits
        of_hand = BY_HAND * self.by_hand.loss if tolerance is None else 0.0
        return limits if half.loss <= of_hand else Limits("loss", max(largest, of_hand))

    def try_scale(self, tolerance: float | None) -> Difference | None:
        """Switches to the loss scale that is enough, or helps most; returns the error before.

        None if none halves the error.
        """
        unscaled = self.keeping(())
        limits = Limits("gradients", self.harmless if tolerance is None else tolerance)
        error = lambda scale: limits.measured(self.keeping((), scale))
        # No scale mends a loss that is not finite: it overflows before it is scaled.
        if not self.may_scale or limits.allow(unscaled) or math.isinf(unscaled.loss):
            return None
        enough = (scale for scale in _SCALES if error(scale) <= limits.tolerance)
        best = next(enough, None) or min(_SCALES, key=error)
        if error(best) >= limits.measured(unscaled) / 2:
            return None
        self.scale = best
        return unscaled

    def few(
        self, error: Callable[[Sequence[Module]], Any], tolerance: Any, near: Sequence[Module] = ()
    ) -> Sequence[Module] | None:
        """Returns a small set of edits that bring an error to a tolerance; None if all are not enough.

        The edits that are `near` the cause are tried first, each alone. None of the set can be left out.
        """
        for kept in (*([edit] for edit in near), near):
            if kept and error(kept) <= tolerance:
                return fewest(kept, error, tolerance)
        edits = sorted(self.program.edits, key=lambda edit: edit.name)
        if len(edits) > MOST_EDITS:
            return edits if error(edits) <= tolerance else None
        alone = {edit: error([other for other in edits if other is not edit]) for edit in edits}
        return fewest(sorted(edits, key=lambda edit: alone[edit], reverse=True), error, tolerance)

    def change(self, kept: Sequence[Module]) -> str:
        """Returns what to write to keep modules in float32, in the notation of the program."""
        rules, own = self.rules(kept), [module for module in kept if not module.pattern]
        return "; ".join([*([f"rules={rules}"] if rules else []), *([in_words(own)] if own else [])])

    def rules(self, kept: Sequence[Module]) -> dict[str, DTypeName]:
        """Returns the rules for some modules, with those of the function that still select something."""
        rules, modules = self.program.rules, self.program.modules
        scopes = scopes_for(kept, modules, self.program.dtype.name)
        rules = dataclasses.replace(rules, scopes=(*scopes, *rules.scopes))
        operations = self.program.operations
        paths = {path for operation in operations for path in (operation.scope, *operation.arguments)}
        used = {match[0] for path in paths if path and (match := rules.pattern_for(path))}
        # A pattern may occur twice: the first one counts.
        dtypes: Any = dict(reversed(rules.scopes))
        return {pattern: dtypes[pattern] for pattern, _ in rules.scopes if pattern in used}


def report_of(runs: Runs, tolerance: float | None) -> PrecisionReport:
    """Returns the report, which measures the modules only if their joint error is above the tolerance."""
    program, given = runs.program, runs.scale
    unscaled, limits = runs.try_scale(tolerance), runs.limits(tolerance)
    is_close = limits.allow(runs.keeping(()))
    # Each module alone in half is a run of its own, which a program that is close does not need.
    every = set() if is_close else set(program.modules)
    own = {module: runs.keeping(every - {module}) for module in program.modules if every}
    # Of modules with equal errors, as inf, the other measure decides.
    other = "gradients" if limits.measure == "loss" else "loss"
    size = lambda error: (limits.measured(error), getattr(error, other))
    order = sorted(own, key=lambda module: size(own[module]), reverse=True)
    enough = (limits.tolerance, math.inf)
    kept = () if is_close else runs.few(lambda kept: size(runs.keeping(kept)), enough)
    labels = lambda modules: tuple(module.label for module in modules)
    report = PrecisionReport(
        dtype=program.dtype.name,
        loss_scale=runs.scale,
        loss=float(runs.loss or 0.0),
        names=labels(program.modules),
        modules=tuple(ModuleDifference(each.label, own[each], each.pattern, each.lines) for each in order),
        half=runs.keeping(()),
        given_scale=given,
        unscaled=unscaled,
        by_hand=vars(runs).get("by_hand"),  # None if no limit needed it: it compiles a program.
        rest=None if is_close else runs.keeping(program.modules),
        limits=limits,
        is_rounding=is_close and runs.is_rounding,
    )
    if kept is None:
        return report
    change, with_rules = runs.change(kept), runs.keeping(kept)
    return dataclasses.replace(
        report, kept=labels(kept), rules=runs.rules(kept), change=change, with_rules=with_rules
    )

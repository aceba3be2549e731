"""The report of `compare_precision`: the error of each module in half, and rules that reduce it."""

import dataclasses
import math
from collections.abc import Iterator

from ..._dtypes import DTypeName
from ..._text import Shown, aligned, dynamic_scale, power, shortened, wrapped

ORDER_OF_SUMS = 1e-5  # What a different order of float32 sums may change.
LEAF = 0.5
"""The error of a single gradient, over its own norm, from which it is wrong, however small its share is."""
HARM = 0.1
"""The error from which `doctor` reports a fault: ReLUs alone may cost a healthy model some percent."""
BY_HAND = 2.0
"""How many times the error of casts by hand around each matmul is no fault: both errors are random."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a loss and its gradients are from those in float32.

    Attributes:
        loss: the difference of the losses over the loss in float32; inf if the loss is not finite.
        gradients: the norm of the difference of all gradients over the norm of those in float32; inf if a
            gradient is not finite.
        cosine: of the angle between all gradients and those in float32; NaN if a gradient is not finite.
        group: the path of the gradient that is furthest off. For a step, which compares its results by trees,
            the path of the tree that is furthest off, or of an array that changes in float32 alone.
        leaf: the error of that gradient over its own norm. A gradient that is rounding error in float32 as
            well, as that of a bias in front of a normalization, does not count. For a step, 1 if an array
            changes in float32 alone, and else 0.
        lost: the path of a gradient that is all zero, or of an auxiliary result that is not finite, and is
            neither in float32; empty if there is none.

    Examples:
        >>> print(Difference(loss=1e-4, gradients=2e-3, cosine=0.999998))
        1.00e-04 in the loss, 2.00e-03 in the gradients, cosine 0.999998
    """

    loss: float
    gradients: float
    cosine: float
    group: str = ""
    leaf: float = 0.0
    lost: str = ""

    def __str__(self) -> str:
        of_leaf = f" ({self.leaf:.2e} in that of {self.group or 'the parameter'})" if self.leaf > LEAF else ""
        of_leaf = f" ({self.lost} is lost as a whole)" if self.lost and self.gradients < 1 else of_leaf
        return (
            f"{self.loss:.2e} in the loss, {self.gradients:.2e} in the gradients{of_leaf}, "
            f"cosine {self.cosine:.6f}"
        )


@dataclasses.dataclass(frozen=True)
class Limits:
    """The errors that are no fault."""

    measure: str  # `gradients`, or `loss` if the gradients are right and the loss is not.
    tolerance: float
    leaf: float = LEAF  # That of a single gradient, over its own norm.

    def measured(self, error: Difference) -> float:
        """Returns which part of an `error` is compared with the tolerance; inf if something is lost."""
        if self.measure == "loss":
            return error.loss
        if error.lost:
            return math.inf
        # A single gradient that is wrong counts however small its share of the norm of all is.
        is_leaf = error.leaf > max(self.leaf, self.tolerance)
        return max(error.gradients, error.leaf) if is_leaf else error.gradients

    def allow(self, error: Difference) -> bool:
        """Whether an `error` is no fault."""
        return self.measured(error) <= self.tolerance


@dataclasses.dataclass(frozen=True)
class ModuleDifference:
    """The error that one module costs.

    Attributes:
        module: the scope, or the path of the argument that holds its parameters.
        own: the error if this module alone is in half, and all others in float32.
        pattern: the pattern that selects it in `rules=` of `autocast`; empty if the function itself makes the
            half values, by casts, a policy or the `dtype` of layers.
        lines: without a pattern, the first lines that make half values, as `file.py:12:4 (function)`.

    Examples:
        >>> w, x = {"a": jnp.full((4, 4), 0.3), "b": jnp.full((4, 1), 1e5)}, jnp.ones((2, 4))
        >>> report = compare_precision(lambda w, x: jnp.mean(x @ w["a"] @ w["b"] / 1e6))(w, x)
        >>> [(row.module, row.pattern, row.own.loss < 1e-3) for row in report.modules]
        [('w/b', '/w/b', False), ('w/a', '/w/a', True)]
    """

    module: str
    own: Difference
    pattern: str
    lines: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class PrecisionReport(Shown):
    """The accuracy that each module costs in half precision. `print` it for one page.

    Attributes:
        dtype: the name of the dtype that is compared with float32.
        loss_scale: the loss scale of the runs in half.
        loss: the loss in float32.
        names: the modules that are in half, in the order of the program.
        modules: what each of them costs, the largest error first; empty if the error of all together is
            within the tolerance.
        half: the error with all of them in half.
        unscaled: that error at the loss scale of the call, if the gradients need a larger one.
        rest: the error with all of them in float32: 0, except for matmuls that no rule selects. None if
            `modules` is empty.
        limits: the largest errors that are allowed: `limits.measure` says whether that of the `gradients` is
            compared or that of the `loss`, with `limits.tolerance`; a single gradient may have `limits.leaf`.
        kept: the modules, lines with casts and arguments to keep in float32. None, and the next fields
            empty, if all of them do not bring the error to the tolerance.
        rules: the `rules=` of `autocast` for those of them that autocast casts, with the rules that the
            function had before.
        change: what to write to keep them in float32: these rules, the casts to leave out, or the rules of a
            policy.
        with_rules: the measured error with `kept` in float32.
        given_scale: the loss scale of the call; 1 if none was given.
        by_hand: the error of casts by hand around each matmul, on the same batch, with everything else in
            float32; None if it was not needed to judge the error.
        is_rounding: whether the gradient is mostly rounding error with any placement of casts: off by more
            than its own norm, with a cosine below 0.5, also with casts by hand and at nearby parameters.

    Examples:
        >>> w, x = {"a": jnp.full((4, 4), 0.3), "b": jnp.full((4, 1), 1e5)}, jnp.ones((2, 4))
        >>> report = compare_precision(lambda w, x: jnp.mean(x @ w["a"] @ w["b"] / 1e6))(w, x)
        >>> report.is_close, report.half.loss, report.rules, report.with_rules.loss < 1e-3
        (False, inf, {'/w/b': 'float32'}, True)
    """

    dtype: str
    loss_scale: float
    loss: float
    names: tuple[str, ...]
    modules: tuple[ModuleDifference, ...]
    half: Difference
    unscaled: Difference | None
    rest: Difference | None
    limits: Limits
    kept: tuple[str, ...] | None = None
    rules: dict[str, DTypeName] | None = None
    change: str = ""
    with_rules: Difference | None = None
    given_scale: float = 1.0
    by_hand: Difference | None = None
    is_rounding: bool = False

    @property
    def is_close(self) -> bool:
        """Whether the error with everything in half is within the tolerance."""
        return self.limits.allow(self.half)

    def summary(self) -> str:
        """Returns one line: the error of everything in half."""
        if not self.names:
            return f"No value of this function is in {self.dtype}: autocast finds no product for it."
        # Whether a single gradient decides, and not all of them together.
        is_leaf = self.limits.measured(self.half) > getattr(self.half, self.limits.measure)
        of_each = f", and {self.limits.leaf:.2g} for each of them" if is_leaf else ""
        by_hand = f" Casts around the matmuls alone have {self.by_hand}." if self.by_hand else ""
        return (
            f"In {self.dtype} at the loss scale {power(self.loss_scale)} the error is {self.half}.{by_hand} "
            f"The tolerance is {self.limits.tolerance:.2g} for the {self.limits.measure}{of_each}."
        )

    def advice(self) -> str:
        """Returns one line: whether a loss scale is missing, and the rules, or why there are none."""
        if not self.names:
            return ""
        if self.unscaled is None:
            return self._rules()
        use = "Use a loss scale, such as jmp.DynamicLossScale(): without one the error is"
        if self.given_scale != 1:
            start = dynamic_scale(int(math.log2(self.loss_scale)))
            use = f"Use a larger loss scale, such as {start}: at {power(self.given_scale)} the error is"
        return f"{use} {self.unscaled}. {self._rules()}"

    def _rules(self) -> str:
        if self.is_rounding:
            return f"No rule helps: in {self.dtype} this gradient is mostly rounding error."
        if self.is_close:
            return "No rule is needed."
        if self.kept is None:
            none = "No rule, cast or argument that was tried brings the error below the tolerance"
            left = (
                "Half values that are made of constants alone, their carries, and matmuls outside of all "
                "scopes, which no rule selects, were not tried."
            )
            return f"{none}: with all modules in float32 it is {self.rest}. {left}"
        return f"To mend it: {self.change}. Then the error is {self.with_rules}."

    def marks(self) -> Iterator[tuple[str, str]]:
        """Yields the lines that make half values, each with its error or with what mends it."""
        for row in self.modules:
            if row.module in (self.kept or ()):
                yield from ((line, f"To mend it: {self.change}.") for line in row.lines)
            elif not self.limits.allow(row.own):
                yield from ((line, f"The error with this alone in half is {row.own}.") for line in row.lines)

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the modules as a table of text, with a head."""

        def errors(own):
            return (f"{error:.2e}" for error in (own.loss, own.gradients, own.leaf))

        return [
            ("module alone in half", "loss", "gradients", "one of them", "cosine"),
            *((row.module, *errors(row.own), f"{row.own.cosine:.6f}") for row in self.modules),
        ]

    def __repr__(self) -> str:
        return f"PrecisionReport({self.summary()})"

    def __str__(self) -> str:
        summary, advice = wrapped(self.summary()), wrapped(shortened(self.advice()))
        if not self.names:
            return "\n".join(summary)
        if self.rest is None:
            return "\n".join([*summary, *wrapped(f"{self.advice()} tolerance=0 measures each module.")])
        lines = [*summary, "", *aligned(self.rows())]
        if max(self.rest.gradients, self.rest.loss) > ORDER_OF_SUMS:
            text = f"With all modules in float32 this is left, which no rule selects: {self.rest}."
            lines += ["", *wrapped(text)]
        return "\n".join([*lines, "", *advice])

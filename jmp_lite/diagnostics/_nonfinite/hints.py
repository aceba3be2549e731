"""Well-known reasons for an inf or NaN that float32 has too: a division by zero, an index out of bounds."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .._values.sites import Path, Site
from .flow import Extent, Origin

Sites = Mapping[Path, Site]
"""All sites of the program, by their paths."""

_DERIVATIVES = {
    "atan2": "does not exist at (0, 0)",
    **dict.fromkeys(("asin", "acos"), "is infinite at -1 and 1"),
    **dict.fromkeys(("sqrt", "pow", "cbrt", "rsqrt"), "is infinite at 0"),
    **dict.fromkeys(("eigh", "eig", "svd"), "is infinite for equal eigenvalues or singular values"),
    "div": "divides by the square of the divisor",
}
"""The derivatives that are not finite somewhere, by operation; the more special ones first."""
_FACTORIZATIONS = {"cholesky", "triangular_solve", "lu", "qr", "eigh", "svd"}
_EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh", "logistic")
_POLES = ("lgamma", "digamma", "erf_inv", "atanh", "tan", "polygamma", "igamma", "zeta")
_SUBNORMAL = 2.0**-126  # The smallest normal number of float32.


def hint(origin: Origin, sites: Sites, parameters: Collection[str]) -> str:
    """Returns the first hint that fits an origin; empty if none does. `parameters` are names of arguments."""
    site, case = origin.site, _Case(origin, sites)
    # An argument that is not finite was so before the call: nothing in the program is its cause.
    if site.operation == "argument":
        text = _PARAMETER if site.argument.split("/")[0] in parameters else _DATA
        return text.format(name=site.argument)
    text = next((text for fits, text in _HINTS if fits(case)), "")
    name, (low, high) = case.derivative(), case.extent(0)
    numbers = {"low": low, "high": high, "divisor": case.divisor(), "growth": origin.growth}
    return text.format(operation=site.operation, name=name, where=_DERIVATIVES.get(name), **numbers)


@dataclasses.dataclass(frozen=True)
class _Case:
    """An origin, and what the hints ask about it."""

    origin: Origin
    sites: Sites

    def of(self, *operations: str) -> bool:
        return self.origin.site.operation in operations

    def extent(self, number: int) -> Extent:
        """Returns the smallest and the largest element of an operand; NaN if they are not known."""
        measured, numbers = self.origin.operands, self.origin.site.numbers
        if number < len(measured) and (extent := measured[number]) is not None:
            return extent
        # An operand that was not measured may be a number of the program.
        known = numbers[number] if number < len(numbers) else None
        return (math.nan, math.nan) if known is None else (known, known)

    def has_zero(self, number: int) -> bool:
        """Whether an operand has elements on both sides of 0, or 0."""
        low, high = self.extent(number)
        return low <= 0 <= high

    def behind(self, steps: int = 6, operand: int | None = None) -> set[str]:
        """Returns the names of the operations that it, or an operand, was computed from in `steps` steps."""
        sources = self.origin.site.sources
        start = self.origin.site.path if operand is None else sources[operand]
        # Backwards, one level of operands at a time.
        level = set() if start is None else {start}
        names = {self.sites[path].operation for path in level} if operand is not None else set[str]()
        for _ in range(steps):
            level = {source for path in level for source in self.sites[path].sources if source is not None}
            names |= {self.sites[path].operation for path in level}
        return names

    def derivative(self) -> str:
        """Returns the operation whose derivative it may be; empty if it is none."""
        site = self.origin.site
        is_derivative = self.origin.direction in ("derivative", "backward")
        if not is_derivative or not any(map(self.has_zero, range(len(site.operands)))):
            return ""
        # JAX gives the operations of a derivative the line of the operation that is differentiated.
        sites = (other for other in self.sites.values() if other.line == site.line)
        behind = {other.operation for other in sites if other.direction == "forward"} | self.behind()
        return next((name for name in _DERIVATIVES if name in behind), "")

    def divisor(self) -> float:
        return min(map(abs, self.extent(1)))

    def of_integers(self) -> bool:
        """Whether it is a root or logarithm of negative integers."""
        sites = [self.sites[path] for path in self.origin.site.sources if path is not None]
        is_cast = lambda site: site.operation == "convert_element_type" and "int" in "".join(site.operands)
        takes_positive = self.of("log", "log1p", "log2", "sqrt", "rsqrt", "pow")
        return takes_positive and self.extent(0)[0] < 0 and any(map(is_cast, sites))

    def divides_by_norm(self) -> bool:
        """Whether it is 0 / 0, of zeros and their norm."""
        if not (self.of("div") and self.origin.is_nan and self.has_zero(1)):
            return False
        behind = self.behind(operand=1)
        return "sqrt" in behind or {"abs", "reduce_sum"} <= behind

    def divides_by_zero(self, *dtypes: str) -> bool:
        """Whether it divides by 0, in one of some dtypes if they are given."""
        operands = self.origin.site.operands
        is_power = self.of("integer_pow") and operands[1].startswith("-")
        divisor = 1 if self.of("div", "rem") else 0
        divides = (self.of("div", "rem", "reciprocal") or is_power) and self.has_zero(divisor)
        return divides and operands[divisor].startswith(dtypes or "")


_PARAMETER = (
    "The parameter {name} was not finite before the step, so an earlier update wrote it. Restore a "
    "checkpoint, and let jmp.with_loss_scale skip the steps that are not finite."
)
_DATA = "The data in {name} is not finite. jmp.with_loss_scale skips the steps of such batches."
# A hint is guessed from the operation and from the numbers that it took, and is not tried: it says "may" and
# "often".
# The first that fits is given, so the special ones come first. What JAX does with an index out of bounds is
# in https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/lax/slicing.py#L409; that `jnp.where` does not
# help gradients is https://github.com/jax-ml/jax/issues/5798.
_HINTS: tuple[tuple[Callable[[_Case], Any], str], ...] = (
    (
        lambda case: case.of("gather") and case.origin.is_nan,
        "JAX fills elements whose index is out of bounds with NaN. The indices, such as labels or tokens, "
        "may be larger than the table.",
    ),
    (
        lambda case: {"inf", "-inf"} & set(case.origin.site.operands),
        "The inf is a constant of the program. If it is a mask, it may mask a whole row, and the softmax of "
        "such a row is NaN. A function such as ndtri writes it at its poles.",
    ),
    (
        lambda case: case.origin.growth,
        "What it takes grows in each iteration, at last by a factor of {growth:.3g}. If an iteration is a "
        "step of training, the learning rate may be too large.",
    ),
    (
        _Case.of_integers,
        "It takes integers, of which the smallest is {low:.4g}. Integers that are too large for their dtype "
        "become negative, as in a sum or a product of int32 beyond 2147483647.",
    ),
    (
        lambda case: case.of("div") and 0 < case.divisor() < _SUBNORMAL,
        "The divisor is {divisor:.3g}. Numbers below 1e-38 are subnormal in float32, and the reciprocal of "
        "such a number, by which XLA may multiply, is inf.",
    ),
    (
        _Case.derivative,
        "This may be the derivative of {name}, which {where}. A jnp.where around the result does not help "
        "the gradients: guard the operand.",
    ),
    (
        lambda case: case.of(*_FACTORIZATIONS) or case.behind() & _FACTORIZATIONS,
        "The matrix may be singular, or not positive definite. Often a small multiple of the identity is "
        "added to it.",
    ),
    (
        lambda case: case.of("log", "log1p", "log2") and case.extent(0)[0] <= 0,
        "The smallest operand of the logarithm is {low:.4g}. Often a small number is added to it; for "
        "log(softmax(x)) there is jax.nn.log_softmax.",
    ),
    (
        lambda case: case.of("sqrt", "rsqrt", "pow") and case.extent(0)[0] < 0,
        "The smallest operand of the root is {low:.4g}. A variance as E[x^2] - E[x]^2 may become negative by "
        "rounding, which jnp.mean((x - jnp.mean(x)) ** 2) never does.",
    ),
    (
        lambda case: case.of("sqrt", "rsqrt", "pow") and case.extent(0)[0] == 0,
        "The program divides by the root of 0. Often a small number is added inside of the root.",
    ),
    (
        lambda case: case.divides_by_zero("float16", "bfloat16"),
        "The divisor is 0 in half precision, where 1 - 0.999 may be 0, and where a small number that is "
        "added may be lost.",
    ),
    (
        _Case.divides_by_norm,
        "This is 0 / 0, a row of zeros over its norm. Often a small number is added inside of the root, or "
        "the divisor is jnp.maximum(norm, 1e-12).",
    ),
    (
        lambda case: case.divides_by_zero() and case.origin.is_nan,
        "This is 0 / 0, often a mean over no elements, which jnp.maximum(count, 1) as the divisor avoids.",
    ),
    (
        _Case.divides_by_zero,
        "A divisor is 0. A jnp.where around the quotient does not help its gradients: guard the divisor too.",
    ),
    (
        lambda case: case.of(*_EXPONENTIALS),
        "exp is inf beyond 88.7 in float32, and beyond 11.1 in float16. Often the maximum is subtracted "
        "first, as jax.nn.softmax and jax.nn.logsumexp do.",
    ),
    (
        lambda case: case.of(*_POLES) and not math.isnan(case.extent(0)[0]),
        "{operation} has poles. It took numbers from {low:.4g} to {high:.4g}.",
    ),
)

"""Well-known reasons for an inf or NaN that float32 has too: a division by zero, an index out of bounds.

A hint is guessed from the operation and from the numbers that it took, so it says "may" and "often": it has
not been tried.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping

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
_POLES = ("lgamma", "digamma", "erf_inv", "atanh", "tan", "polygamma", "igamma", "zeta")
_SUBNORMAL = 2.0**-126


def hint(origin: Origin, sites: Sites, parameters: Collection[str]) -> str:
    """Returns the first hint that fits an origin; empty if none does. `parameters` are names of arguments."""
    if origin.site.operation == "argument":
        return _argument(origin.site.argument, parameters)
    return next(filter(None, (each(_Case(origin, sites)) for each in _HINTS)), "")


@dataclasses.dataclass(frozen=True)
class _Case:
    """An origin, and what the hints ask about it."""

    origin: Origin
    sites: Sites

    @property
    def site(self) -> Site:
        return self.origin.site

    def extent(self, number: int) -> Extent:
        """Returns the smallest and the largest element of an operand; NaN if they are not known."""
        known = number < len(self.origin.operands)
        extent = self.origin.operands[number] or self.site.number(number) if known else None
        return extent or (math.nan, math.nan)

    def has_zero(self, number: int) -> bool:
        """Whether an operand has elements on both sides of 0, or 0."""
        low, high = self.extent(number)
        return low <= 0 <= high

    def behind(self, steps: int = 6) -> set[str]:
        """Returns the names of the operations that it was computed from in at most `steps` steps."""
        names: set[str] = set()
        level = {self.site.path}
        for _ in range(steps):
            level = {source for path in level for source in self.sites[path].sources if source is not None}
            names |= {self.sites[path].operation for path in level}
        return names


def _argument(name: str, parameters: Collection[str]) -> str:
    if name.split("/")[0] in parameters:
        return (
            f"The parameter {name} was not finite before the step, so an earlier update wrote it. Restore a "
            "checkpoint, and let jmp.with_loss_scale skip the steps that are not finite."
        )
    return f"The data in {name} is not finite. jmp.with_loss_scale skips the steps of such batches."


def _index(case: _Case) -> str:
    if case.site.operation not in ("gather", "dynamic_gather") or not case.origin.is_nan:
        return ""
    return (
        "JAX fills elements whose index is out of bounds with NaN. The indices, such as labels or tokens, "
        "may be larger than the table."
    )


def _mask(case: _Case) -> str:
    if not {"inf", "-inf"} & set(case.site.operands):
        return ""
    return (
        "The inf is a constant of the program. If it is a mask, it may mask a whole row, and the softmax of "
        "such a row is NaN. A function such as ndtri writes it at its poles."
    )


def _subnormal(case: _Case) -> str:
    smallest = min(map(abs, case.extent(1)))
    if case.site.operation != "div" or not 0 < smallest < _SUBNORMAL:
        return ""
    return (
        f"The divisor is {smallest:.3g}. Numbers below 1e-38 are subnormal in float32, and the reciprocal of "
        "such a number, by which XLA may multiply, is inf."
    )


def _derivative(case: _Case) -> str:
    if not (case.origin.is_derivative or case.site.direction == "backward"):
        return ""
    # JAX gives the operations of a derivative the line of the operation that is differentiated.
    sites = (site for site in case.sites.values() if site.line == case.site.line)
    behind = {site.operation for site in sites if site.direction == "forward"} | case.behind()
    name = next((name for name in _DERIVATIVES if name in behind), "")
    if not name or not any(map(case.has_zero, range(len(case.site.operands)))):
        return ""
    return (
        f"This may be the derivative of {name}, which {_DERIVATIVES[name]}. A jnp.where around the result "
        "does not help the gradients: guard the operand."
    )


def _factorization(case: _Case) -> str:
    if not (case.behind() | {case.site.operation}) & _FACTORIZATIONS:
        return ""
    return (
        "The matrix may be singular, or not positive definite. Often a small multiple of the identity is "
        "added to it."
    )


def _logarithm(case: _Case) -> str:
    low, _ = case.extent(0)
    if case.site.operation not in ("log", "log1p", "log2") or not low <= 0:
        return ""
    return (
        f"The smallest operand of the logarithm is {low:.4g}. Often a small number is added to it; for "
        "log(softmax(x)) there is jax.nn.log_softmax."
    )


def _root(case: _Case) -> str:
    low, _ = case.extent(0)
    if case.site.operation not in ("sqrt", "rsqrt", "pow") or not low <= 0:
        return ""
    if low < 0:
        return (
            f"The smallest operand of the root is {low:.4g}. A variance as E[x^2] - E[x]^2 may become "
            "negative by rounding, which jnp.mean((x - jnp.mean(x)) ** 2) never does."
        )
    return "The program divides by the root of 0. Often a small number is added inside of the root."


def _division(case: _Case) -> str:
    operation, operands = case.site.operation, case.site.operands
    is_power = operation == "integer_pow" and operands[1].startswith("-")
    divisor = 1 if operation in ("div", "rem") else 0
    if not (operation in ("div", "rem", "reciprocal") or is_power) or not case.has_zero(divisor):
        return ""
    if operands[divisor].startswith(("float16", "bfloat16")):
        return (
            "The divisor is 0 in half precision, where 1 - 0.999 may be 0, and where a small number that is "
            "added may be lost."
        )
    if case.origin.is_nan:
        return (
            "This is 0 / 0, often a mean over no elements, which jnp.maximum(count, 1) as the divisor avoids."
        )
    return (
        "A divisor is 0. A jnp.where around the quotient does not help its gradients: guard the divisor too."
    )


def _exponential(case: _Case) -> str:
    if case.site.operation not in ("exp", "exp2", "expm1", "sinh", "cosh", "logistic"):
        return ""
    return (
        "exp is inf beyond 88.7 in float32, and beyond 11.1 in float16. Often the maximum is subtracted "
        "first, as jax.nn.softmax and jax.nn.logsumexp do."
    )


def _pole(case: _Case) -> str:
    low, high = case.extent(0)
    if case.site.operation not in _POLES or math.isnan(low):
        return ""
    return f"{case.site.operation} has poles. It took numbers from {low:.4g} to {high:.4g}."


# The first that fits is given, so the special ones come first.
_HINTS: tuple[Callable[[_Case], str], ...] = (
    *(_index, _mask, _subnormal, _derivative, _factorization, _logarithm, _root, _division),
    *(_exponential, _pole),
)

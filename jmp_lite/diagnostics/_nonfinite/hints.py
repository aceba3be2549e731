"""Hints: well-known reasons why an operation gives inf or NaN in float32 too.

To add one, add a function to `_HINTS`. A hint is a guess from the operation and from the numbers that it
took, so it says "may" and "often"; nobody has tried it.
"""

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
_FACTORIZATIONS = ("cholesky", "triangular_solve", "lu", "qr", "eigh", "svd")
_SUBNORMAL = 2.0**-126
_POLES = ("lgamma", "digamma", "erf_inv", "atanh", "tan", "polygamma", "igamma", "zeta")


def hint(origin: Origin, sites: Sites, parameters: Collection[str]) -> str:
    """Returns the first hint that fits an origin; empty if none does. `parameters` are names of arguments."""
    if origin.site.operation == "argument":
        return _argument(origin.site.argument, parameters)
    return next(filter(None, (each(origin, sites) for each in _HINTS)), "")


def _argument(name: str, parameters: Collection[str]) -> str:
    if name.split("/")[0] in parameters:
        return (
            f"The parameter {name} was not finite before the step, so an earlier update wrote it. Restore a "
            "checkpoint, and let jmp.with_loss_scale skip the steps that are not finite."
        )
    return f"The data in {name} is not finite. jmp.with_loss_scale skips the steps of such batches."


def _index(origin: Origin, sites: Sites) -> str:
    del sites
    if origin.site.operation not in ("gather", "dynamic_gather") or not origin.is_nan:
        return ""
    return (
        "JAX fills elements whose index is out of bounds with NaN. The indices may be beyond the table, "
        "such as labels or tokens."
    )


def _mask(origin: Origin, sites: Sites) -> str:
    del sites
    if not {"inf", "-inf"} & set(origin.site.operands):
        return ""
    return (
        "The inf is written, not computed. If it is a mask, a row may be masked as a whole: a softmax over "
        "it is NaN. A function such as ndtri writes it at its poles."
    )


def _derivative(origin: Origin, sites: Sites) -> str:
    if not (origin.is_derivative or origin.site.direction == "backward"):
        return ""
    # JAX gives the operations of a derivative the line of the operation that is differentiated.
    line = origin.site.line
    own = {site.operation for site in sites.values() if site.line == line and site.direction == "forward"}
    behind = own | _behind(origin.site, sites)
    name = next((name for name in _DERIVATIVES if name in behind), "")
    if not name or not any(map(_has_zero, (*origin.operands, *_numbers(origin.site)))):
        return ""
    return (
        f"This may be the derivative of {name}, which {_DERIVATIVES[name]}. A jnp.where around the result "
        "does not help the gradients: guard the operand."
    )


def _logarithm(origin: Origin, sites: Sites) -> str:
    del sites
    low = _low(origin, 0)
    if origin.site.operation not in ("log", "log1p", "log2") or low > 0:
        return ""
    return (
        f"The smallest operand of the logarithm is {low:.4g}. Often a small number is added to it; for "
        "log(softmax(x)) there is jax.nn.log_softmax."
    )


def _root(origin: Origin, sites: Sites) -> str:
    del sites
    low = _low(origin, 0)
    if origin.site.operation not in ("sqrt", "rsqrt", "pow") or low > 0:
        return ""
    if low < 0:
        return (
            f"The smallest operand of the root is {low:.4g}. A variance as E[x^2] - E[x]^2 may become "
            "negative by rounding, which jnp.mean((x - jnp.mean(x)) ** 2) never does."
        )
    return "The root of 0 is divided by. Often a small number is added inside of the root."


def _division(origin: Origin, sites: Sites) -> str:
    del sites
    divisor = 1 if origin.site.operation in ("div", "rem") else 0
    numbers = _extent(origin, divisor)
    is_division = origin.site.operation in ("div", "rem", "reciprocal")
    is_division |= origin.site.operation == "integer_pow" and origin.site.operands[1].startswith("-")
    if not is_division or not _has_zero(numbers):
        return ""
    if origin.site.operands[divisor].startswith(("float16", "bfloat16")):
        return (
            "The divisor is 0 in half precision, in which 1 - 0.999 may be 0, and a small number that is "
            "added may be lost."
        )
    if origin.is_nan:
        return (
            "This is 0 / 0, often a mean over no elements: jnp.maximum(count, 1) is then the usual divisor."
        )
    return (
        "A divisor is 0. A jnp.where around the quotient does not help its gradients: guard the divisor as "
        "well."
    )


def _subnormal(origin: Origin, sites: Sites) -> str:
    del sites
    numbers = _extent(origin, 1)
    if origin.site.operation != "div" or numbers is None or not 0 < min(map(abs, numbers)) < _SUBNORMAL:
        return ""
    return (
        f"The divisor is {min(map(abs, numbers)):.3g}. Below 1e-38 a number is subnormal in float32: its "
        "reciprocal, by which XLA may multiply, is inf."
    )


def _exponential(origin: Origin, sites: Sites) -> str:
    del sites
    if origin.site.operation not in ("exp", "exp2", "expm1", "sinh", "cosh", "logistic"):
        return ""
    return (
        "exp is inf beyond 88.7 in float32, and beyond 11.1 in float16. Often the maximum is subtracted "
        "first, as jax.nn.softmax and jax.nn.logsumexp do."
    )


def _factorization(origin: Origin, sites: Sites) -> str:
    names = _behind(origin.site, sites) | {origin.site.operation}
    if not names & set(_FACTORIZATIONS):
        return ""
    return (
        "The matrix may be singular, or not positive definite. Often a small multiple of the identity is "
        "added."
    )


def _pole(origin: Origin, sites: Sites) -> str:
    del sites
    numbers = _extent(origin, 0)
    if origin.site.operation not in _POLES or numbers is None:
        return ""
    return f"{origin.site.operation} has poles. It took numbers from {numbers[0]:.4g} to {numbers[1]:.4g}."


# The first that fits is given, so the special ones come first.
_HINTS: tuple[Callable[[Origin, Sites], str], ...] = (
    *(_index, _mask, _subnormal, _derivative, _factorization, _logarithm, _root, _division),
    *(_exponential, _pole),
)


def _numbers(site: Site) -> list[Extent | None]:
    """Returns the operands that are numbers in the program."""
    return [site.number(index) for index in range(len(site.operands))]


def _extent(origin: Origin, number: int) -> Extent | None:
    """Returns the smallest and the largest element of an operand; None if they are not known."""
    if number >= len(origin.operands):
        return None
    return origin.operands[number] or origin.site.number(number)


def _low(origin: Origin, number: int) -> float:
    extent = _extent(origin, number)
    return float("inf") if extent is None else extent[0]


def _has_zero(extent: Extent | None) -> bool:
    return extent is not None and extent[0] <= 0 <= extent[1]


def _behind(site: Site, sites: Sites, steps: int = 6) -> set[str]:
    """Returns the names of the operations that a site was computed from in at most `steps` steps."""
    names: set[str] = set()
    level = {site.path}
    for _ in range(steps):
        level = {source for path in level for source in sites[path].sources if source is not None}
        names |= {sites[path].operation for path in level}
    return names

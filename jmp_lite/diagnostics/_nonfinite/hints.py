"""Well-known reasons for an inf or NaN that float32 has too, such as a logarithm of 0."""

import math
from collections.abc import Collection, Mapping

from .._values.sites import Path, Site
from .flow import Extent, Origin

Sites = Mapping[Path, Site]
"""All sites of the program, by their paths."""

_ROOTS = ("sqrt", "cbrt", "pow")
_LOGARITHMS = ("log", "log1p", "log2")
_STEPS = 6  # So many operations lie between a root and its derivative at most.
_PARAMETER = (
    "The parameter {name} was not finite before the step, so an earlier update wrote it. Restore a "
    "checkpoint, and let jmp.with_loss_scale skip the steps that are not finite."
)
_DATA = "The data in {name} is not finite. jmp.with_loss_scale skips the steps of such batches."
_OF_ROOT = (
    "This may be the derivative of {name}, which is infinite at 0. A jnp.where around the result does not "
    "help the gradients: guard the operand."
)
_OF_LOGARITHM = (
    "The smallest operand of the logarithm is {low:.4g}. Often a small number is added to it; for "
    "log(softmax(x)) there is jax.nn.log_softmax."
)
_OF_ZEROS = (
    "This is 0 / 0, such as a mean over no elements, or a row of zeros over its norm. Often the divisor is "
    "jnp.maximum(count, 1), or a small number is added inside of the root."
)


def hint(origin: Origin, sites: Sites, parameters: Collection[str]) -> str:
    """Returns the first hint that fits an origin; empty if none does. `parameters` are names of arguments."""
    # A hint is guessed from the operation and the numbers that it took, and is not tried: it says "may" or
    # "often".
    site = origin.site
    # An argument that is not finite was so before the call: nothing in the program is its cause.
    if site.operation == "argument":
        text = _PARAMETER if site.argument.split("/")[0] in parameters else _DATA
        return text.format(name=site.argument)
    # That `jnp.where` does not help gradients is https://github.com/jax-ml/jax/issues/5798.
    if name := _root_behind(origin, sites):
        return _OF_ROOT.format(name=name)
    low, _ = _extent(origin, 0)
    if site.operation in _LOGARITHMS and low <= 0:
        return _OF_LOGARITHM.format(low=low)
    is_quotient = site.operation == "div" and origin.is_nan
    return _OF_ZEROS if is_quotient and all(_has_zero(origin, number) for number in (0, 1)) else ""


def _extent(origin: Origin, number: int) -> Extent:
    """Returns the smallest and the largest element of an operand; NaN if they are not known."""
    measured, numbers = origin.operands, origin.site.numbers
    if number < len(measured) and (extent := measured[number]) is not None:
        return extent
    # An operand that was not measured may be a number of the program.
    known = numbers[number] if number < len(numbers) else None
    return (math.nan, math.nan) if known is None else (known, known)


def _has_zero(origin: Origin, number: int) -> bool:
    """Whether an operand has elements on both sides of 0, or 0."""
    low, high = _extent(origin, number)
    return low <= 0 <= high


def _root_behind(origin: Origin, sites: Sites) -> str:
    """Returns the root whose derivative an origin may be; empty if it is none."""
    site = origin.site
    is_derivative = origin.direction in ("derivative", "backward")
    if not is_derivative or not any(_has_zero(origin, number) for number in range(len(site.operands))):
        return ""
    # JAX gives the operations of a derivative the line of the operation that is differentiated.
    same_line = (other for other in sites.values() if other.line == site.line)
    behind = {other.operation for other in same_line if other.direction == "forward"}
    level = {site.path}
    for _ in range(_STEPS):
        level = {source for path in level for source in sites[path].sources if source is not None}
        behind |= {sites[path].operation for path in level}
    return next((name for name in _ROOTS if name in behind), "")

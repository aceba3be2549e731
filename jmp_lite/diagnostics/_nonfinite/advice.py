"""A sentence of advice for each way in which values begin to be not finite."""

import dataclasses
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np

from ..._text import power
from .._values.sites import Path, Site
from .flow import Origin

Extent = tuple[float, float]

_LOGARITHMS = {
    "log": "Add a small number to its operand, or use jax.nn.log_softmax for log(softmax(x)).",
    "log1p": "Keep its operand above -1.",
    "log2": "Add a small number to its operand.",
}
_EXPONENTIALS = frozenset({"exp", "exp2", "expm1", "sinh", "cosh", "pow", "logistic"})
_DIVISIONS = frozenset({"div", "reciprocal", "rem", "integer_pow", "rsqrt", "pow"})
_FACTORIZATIONS = frozenset({"cholesky", "triangular_solve", "lu", "eigh", "svd", "qr"})


@dataclasses.dataclass(frozen=True)
class Case:
    """An origin, and what else is known.

    Attributes:
        origin: the origin.
        sites: all sites of the program.
        parameters: the names of the arguments that are differentiated.
        scale: the loss scale.
        fitting: the largest smaller power of two at which the gradients are finite; None if there is none.
    """

    origin: Origin
    sites: Mapping[Path, Site]
    parameters: tuple[str, ...]
    scale: float
    fitting: float | None

    @property
    def site(self) -> Site:
        """The site of the origin."""
        return self.origin.site

    @property
    def dtype(self) -> str:
        """The name of the dtype of the result."""
        return self.site.dtype.name


def advise(case: Case) -> str:
    """Returns what to do about an origin: the first advice that applies."""
    return next(filter(None, (rule(case) for rule in _RULES)), "")


def _input(case: Case) -> str:
    site, what = case.site, "NaN" if case.origin.is_nan else "inf"
    if site.operation == "constant":
        return f"A constant that the function closes over has {what}."
    if site.operation != "argument":
        return ""
    if site.argument.split("/")[0] in case.parameters:
        return (
            f"The parameter {site.argument} has {what} before the step. An earlier update wrote it. Restore "
            "a checkpoint, and let jmp.with_loss_scale skip the steps that are not finite."
        )
    return (
        f"The argument {site.argument} has {what} already. Clean the data, or leave such batches out: "
        "jmp.with_loss_scale skips their steps."
    )


def _written_inf(case: Case) -> str:
    if not {"inf", "-inf"} & set(case.site.operands):
        return ""
    number = "-inf" if "-inf" in case.site.operands else "inf"
    return (
        f"The program writes the number {number} in {case.dtype}; a number such as -1e9 is -inf "
        "in float16. For a mask take jnp.finfo(x.dtype).min, and let no row be masked as a whole."
    )


def _mask(case: Case) -> str:
    limit = largest(case.site.dtype)
    extents = [*_literals(case.site), *(extent for extent in case.origin.operands if extent is not None)]
    masks = [low for low, high in extents if low < -limit and (high <= 0 or low <= -1e8)]
    if case.site.is_scaled or not masks or not case.site.is_half:
        return ""
    return (
        f"A mask of {min(masks):.3g} is -inf in {case.dtype}, whose range ends at "
        f"{-limit:g}. Use jnp.finfo(x.dtype).min for the mask."
    )


def _out_of_bounds(case: Case) -> str:
    if case.site.operation != "gather" or not case.origin.is_nan:
        return ""
    # That is the mode "fill" of a gather, the default of `jnp.take`. JAX cannot raise an error inside jit.
    return (
        "An index is out of bounds: JAX fills such elements with NaN. Check the range of the indices, such "
        "as labels or tokens beyond the vocabulary."
    )


def _logarithm(case: Case) -> str:
    name = case.site.operation
    return f"{name} of {_low(case.origin, 0):.4g}. {_LOGARITHMS[name]}" if name in _LOGARITHMS else ""


def _root(case: Case) -> str:
    if case.site.operation == "sqrt" and case.origin.is_nan:
        return f"sqrt of {_low(case.origin, 0):.4g}. Keep its operand at 0 or above."
    if case.site.operation == "rsqrt":
        return (
            f"1 / sqrt({_low(case.origin, 0):.4g}), as of a norm or a variance of zero. Add a small number "
            "inside of the root, such as the epsilon of a normalization layer."
        )
    # The derivative of sqrt(x) is 0.5 / sqrt(x): JAX divides by the result of the forward pass.
    sources = enumerate(case.site.sources)
    roots = [index for index, path in sources if path is not None and case.sites[path].operation == "sqrt"]
    if not any(_low(case.origin, index) == 0 for index in roots):
        return ""
    return (
        "The derivative of a square root, such as that of a norm, is infinite at 0. Add a small number "
        "inside of the root: jnp.sqrt(x + 1e-12) in float32."
    )


def _exponential(case: Case) -> str:
    if case.site.operation not in _EXPONENTIALS or case.origin.is_nan:
        return ""
    operand = case.origin.operands[0] if case.origin.operands else None
    limit = np.log(largest(case.site.dtype))
    if operand is None or (case.site.operation == "pow" and operand[0] <= 0 <= operand[1]):
        return ""
    return (
        f"{case.site.operation} of {operand[1]:.4g}. In {case.dtype} exp ends at {limit:.4g}. "
        "Subtract the maximum first, as jax.nn.softmax and jax.nn.logsumexp do, or bound the operand."
    )


def _division(case: Case) -> str:
    name = case.site.operation
    if name not in _DIVISIONS or (name == "integer_pow" and not case.site.operands[1].startswith("-")):
        return ""
    number = 1 if name in ("div", "rem") else 0
    divisor = case.origin.operands[number] if number < len(case.origin.operands) else None
    if divisor is None or not divisor[0] <= 0 <= divisor[1]:
        return ""
    is_derivative = case.site.direction == "backward"
    where = "The derivative divides by zero." if is_derivative else "A division by zero."
    # The gradient of the branch that jnp.where does not take is 0, and 0 * inf is NaN.
    return (
        f"{where} Add a small number to the divisor. A jnp.where around the result does not help the "
        "gradients: put a jnp.where around the divisor as well."
    )


def _factorization(case: Case) -> str:
    if case.site.operation not in _FACTORIZATIONS:
        return ""
    return (
        "The matrix is singular, or not positive definite. Add a small multiple of the identity, in float32."
    )


def _gradient(case: Case) -> str:
    if not case.site.is_scaled or case.origin.is_nan:
        return ""
    limit = f"A gradient is beyond {largest(case.site.dtype):g}, where {case.dtype} ends, "
    if case.fitting is not None:
        exponent = int(np.log2(case.fitting))
        return (
            f"{limit}at the loss scale {power(case.scale)}. At a scale of 2**{exponent} it would fit: a "
            f"jmp.DynamicLossScale finds that scale, or starts there, jmp.DynamicLossScale(2.0**{exponent})."
        )
    advice = _rule(case) if case.site.is_half else "The program itself diverges."
    return f"{limit}at every loss scale from {power(case.scale)} down to 2**-24. {advice}"


def _loss(case: Case) -> str:
    site = case.site
    if not (site.is_half and site.array.endswith("[]") and site.direction == "forward"):
        return ""
    return (
        f"A loss, or another sum, is beyond {largest(site.dtype):g}, where {site.dtype.name} ends. Compute "
        "the loss in float32: loss_fn(logits.astype(jnp.float32))."
    )


def _activation(case: Case) -> str:
    if case.origin.is_nan:
        return ""
    dtype = case.site.dtype
    if case.site.is_half:
        return f"A value is beyond {largest(dtype):g}, where {dtype.name} ends. {_rule(case)}"
    return f"A value is beyond {largest(dtype):.3g}, where {dtype.name} ends: the program itself diverges."


def _nan_of_inf(case: Case) -> str:
    extents = [extent for extent in case.origin.operands if extent is not None]
    if not case.origin.is_nan or not any(np.isinf(extent).any() for extent in extents):
        return ""
    return "An operand has inf already: inf - inf, 0 * inf and inf / inf are NaN. See to the inf first."


# The first that applies is given, so the special ones come first: a mask of -1e9 is also a value beyond the
# range.
_RULES: tuple[Callable[[Case], str], ...] = (
    _input,
    _nan_of_inf,
    _written_inf,
    _mask,
    _out_of_bounds,
    _logarithm,
    _root,
    _exponential,
    _division,
    _factorization,
    _gradient,
    _loss,
    _activation,
)


def largest(dtype: np.dtype) -> float:
    """Returns the largest finite number of a dtype.

    Examples:
        >>> largest(np.dtype("float16"))
        65504.0
    """
    return float(jnp.finfo(dtype).max)


def _rule(case: Case) -> str:
    module = case.site.place
    if not module:
        return "Keep the operation in float32 with jmp.full_precision, or use bfloat16."
    return f'Keep the module in float32 with a rule, {{"{module}": "float32"}}, or use bfloat16.'


def _literals(site: Site) -> list[Extent]:
    """The operands that are numbers written into the program."""
    extents = []
    for text in site.operands:
        try:
            extents.append((float(text), float(text)))
        except ValueError:  # A dtype and shape, such as `float16[8]`.
            continue
    return extents


def _low(origin: Origin, number: int) -> float:
    operand = origin.operands[number] if number < len(origin.operands) else None
    return np.nan if operand is None else operand[0]

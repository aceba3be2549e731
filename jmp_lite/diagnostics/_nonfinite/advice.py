"""A sentence of advice for each way in which values begin to be not finite."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from ..._text import dynamic_scale, power
from .._values.sites import Path
from .case import Case, largest, lost_number

_LOGARITHMS = {
    "log": "Add a small number to its operand, or use jax.nn.log_softmax for log(softmax(x)).",
    "log1p": "Keep its operand above -1.",
    "log2": "Add a small number to its operand.",
}
_EXPONENTIALS = frozenset({"exp", "exp2", "expm1", "sinh", "cosh", "pow", "logistic"})
_DIVISIONS = frozenset({"div", "reciprocal", "rem", "integer_pow", "rsqrt", "pow"})
_FACTORIZATIONS = {
    "cholesky": "The matrix is not positive definite.",
    "triangular_solve": "The matrix is singular: a pivot is 0.",
    "lu": "The matrix is singular.",
    "qr": "The matrix is singular.",
    "eigh": "The matrix has no finite eigenvalues.",
    "svd": "The matrix has no finite singular values.",
}
_SINGULAR = {
    "atan2": "The derivative of atan2 at (0, 0) does not exist. Move one argument away from 0.",
    "cbrt": "The derivative of cbrt is infinite at 0. Add a small number to its operand.",
    "asin": "The derivative of asin is infinite at -1 and 1. Keep its operand between them.",
    "acos": "The derivative of acos is infinite at -1 and 1. Keep its operand between them.",
}


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
        "in float16. For a mask write jnp.finfo(jnp.float16).min / 2, and let no row be masked as a whole."
    )


def _mask(case: Case) -> str:
    limit = largest(case.site.dtype)
    extents = filter(None, map(case.extent, range(len(case.site.operands))))
    masks = [low for low, high in extents if low < -limit and (high <= 0 or low <= -1e8)]
    if case.site.is_scaled or not masks or not case.site.is_half:
        return ""
    return (
        f"A mask of {min(masks):.3g} is -inf in {case.dtype}, whose range ends at "
        f"{-limit:g}. Write jnp.finfo(jnp.{case.dtype}).min / 2, which leaves room for the scores."
    )


def _two_masks(case: Case) -> str:
    lows = [extent[0] for extent in map(case.extent, range(2)) if extent is not None]
    limit = largest(case.site.dtype)
    if case.site.operation != "add" or case.origin.is_nan or sum(low < -limit / 4 for low in lows) < 2:
        return ""
    return (
        f"Two masks are added: {lows[0]:.4g} and {lows[1]:.4g} are -inf together in {case.dtype}. Join the "
        "masks with jnp.logical_and, and add one."
    )


def _out_of_bounds(case: Case) -> str:
    if case.site.operation != "gather" or not case.origin.is_nan:
        return ""
    # That is the mode "fill" of a gather, the default of `jnp.take`. JAX cannot raise an error inside jit.
    return (
        "An index is out of bounds: JAX fills such elements with NaN. Check the range of the indices, such "
        "as labels or tokens beyond the vocabulary."
    )


def _epsilon(case: Case) -> str:
    """An epsilon that is 0 in the dtype: `x + 1e-8` in float16."""
    name = case.site.operation
    divisor = 1 if name in ("div", "rem") else 0
    if name not in _DIVISIONS | _LOGARITHMS.keys() or not case.has_zero(divisor):
        return ""
    if case.origin.flushed is not None:
        return _zero_in_half(f"{case.origin.flushed:.3g}", case.site.sources[divisor], case)
    guard = case.behind(divisor, ("add", "max"), 5)
    if guard is None or not any(guard.number(n) in ((0.0, 0.0), (-0.0, -0.0)) for n in range(2)):
        return ""
    lost = lost_number(guard)
    if lost is None and (guard.operation == "max" or not guard.is_half):
        return ""  # A maximum with 0 is a ReLU.
    return _zero_in_half("A small number such as 1e-08" if lost is None else f"{lost:g}", guard.path, case)


def _zero_in_half(number: str, path: Path | None, case: Case) -> str:
    dtype = case.site.dtype if path is None else case.sites[path].dtype
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    return (
        f"{number} is 0 in {dtype.name}; the smallest is {smallest:.0e}. Use a larger number, or compute "
        "this part in float32: it should keep the operand above 0."
    )


def _logarithm(case: Case) -> str:
    name = case.site.operation
    return f"{name} of {case.low(0):.4g}. {_LOGARITHMS[name]}" if name in _LOGARITHMS else ""


def _variance(case: Case) -> str:
    if case.site.operation not in ("sqrt", "rsqrt", "log", "pow") or not case.low(0) < 0:
        return ""
    difference = case.behind(0, ("sub",), 5)
    squares = ("square", "integer_pow", "mul")
    sources = difference.sources if difference is not None else ()
    if len(sources) < 2 or sources[1] is None or case.sites[sources[1]].operation not in squares:
        return ""
    return (
        f"A variance is {case.low(0):.4g} by rounding: E[x^2] - E[x]^2 is a small difference of large "
        "numbers. Compute jnp.mean((x - jnp.mean(x)) ** 2), or jnp.maximum(variance, 0)."
    )


def _root(case: Case) -> str:
    name = case.site.operation
    if name in ("sqrt", "rsqrt") and case.origin.is_nan:
        return f"{name} of {case.low(0):.4g}. Keep its operand at 0 or above."
    if case.site.operation == "rsqrt":
        return (
            f"1 / sqrt({case.low(0):.4g}), as of a norm or a variance of zero. Add a small number "
            "inside of the root, such as the epsilon of a normalization layer."
        )
    # The derivative of sqrt(x) is 0.5 / sqrt(x): JAX divides by the result of the forward pass.
    if not case.is_derivative and case.extent(0) != (0.5, 0.5):
        return ""
    sources = enumerate(case.site.sources)
    roots = [index for index, path in sources if path is not None and case.sites[path].operation == "sqrt"]
    if not any(case.low(index) == 0 for index in roots):
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


def _singular(case: Case) -> str:
    """A derivative that divides by zero where no divisor is in the program of the user."""
    name, exponent = case.site.operation, case.low(1)
    if name not in _DIVISIONS or not any(map(case.has_zero, range(2))):
        return ""
    if name == "pow" and exponent < 0 and case.is_derivative:
        return (
            f"The derivative of x ** {exponent + 1:g} is infinite at 0. Add a small number to x: "
            f"(x + 1e-12) ** {exponent + 1:g} in float32."
        )
    divisor = 1 if name == "div" else 0
    if case.is_derivative and case.behind(divisor, ("eigh", "svd", "eig")) is not None:
        return (
            "The derivative of eigenvectors divides by the differences of the eigenvalues. It is infinite "
            "for equal eigenvalues. Take the eigenvalues alone, or add a diagonal of small distinct numbers."
        )
    function = case.on_the_line(_SINGULAR)
    return _SINGULAR[function] if function and case.is_derivative else ""


def _small_divisor(case: Case) -> str:
    extent = case.extent(1)
    if case.site.operation != "div" or extent is None or extent[0] <= 0 <= extent[1]:
        return ""
    smallest, limit = min(map(abs, extent)), largest(case.site.dtype)
    if 1 / smallest > largest(np.dtype(np.float32)):
        return (
            f"1 / {smallest:.3g} is inf in float32, and XLA's CPU backend multiplies by the reciprocal of a "
            "number. Keep the divisor above 1e-37."
        )
    if case.origin.is_nan or smallest >= 1:
        return ""
    return f"A quotient is beyond {limit:.6g}: the divisor is as small as {smallest:.3g}. Bound the divisor."


def _division(case: Case) -> str:
    name = case.site.operation
    if name not in _DIVISIONS or (name == "integer_pow" and not case.site.operands[1].startswith("-")):
        return ""
    if not case.has_zero(1 if name in ("div", "rem") else 0):
        return ""
    if name == "div" and case.extent(0) == case.extent(1) and not case.is_derivative:
        return (
            "A division by zero, 0 / 0, such as a mean of no elements. Divide by jnp.maximum(count, 1), or "
            "add a small number to the divisor."
        )
    where = "The derivative divides by zero." if case.is_derivative else "A division by zero."
    # The gradient of the branch that jnp.where does not take is 0, and 0 * inf is NaN.
    return (
        f"{where} Add a small number to the divisor. A jnp.where around the result does not help the "
        "gradients: put a jnp.where around the divisor as well."
    )


def _factorization(case: Case) -> str:
    if case.site.operation not in _FACTORIZATIONS:
        return ""
    return f"{_FACTORIZATIONS[case.site.operation]} Add a small multiple of the identity, in float32."


def _gradient(case: Case) -> str:
    if case.origin.is_nan:
        return ""
    if case.scale is None:
        if not case.site.is_half or case.site.direction != "backward":
            return ""
        return (
            f"A gradient is beyond {largest(case.site.dtype):g}, where {case.dtype} ends. A smaller loss "
            "scale may fit: find_nonfinite(loss_fn, loss_scale=...) tries them."
        )
    if not case.site.is_scaled:
        return ""
    limit = f"A gradient is beyond {largest(case.site.dtype):g}, where {case.dtype} ends, "
    if case.fitting is not None:
        exponent = int(np.log2(case.fitting))
        at = f"{limit}at the loss scale {power(case.scale)}. At a scale of 2**{exponent} it would fit: "
        finds = "a jmp.DynamicLossScale finds that scale, or starts there, " if exponent >= 0 else ""
        return f"{at}{finds}{dynamic_scale(exponent)}."
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
    _two_masks,
    _mask,
    _out_of_bounds,
    _epsilon,
    _logarithm,
    _variance,
    _singular,
    _root,
    _exponential,
    _small_divisor,
    _division,
    _factorization,
    _gradient,
    _loss,
    _activation,
)


def _rule(case: Case) -> str:
    module = case.site.place
    if not module:
        return "Keep the operation in float32 with jmp.full_precision, or use bfloat16."
    return f'Keep the module in float32 with a rule, {{"{module}": "float32"}}, or use bfloat16.'

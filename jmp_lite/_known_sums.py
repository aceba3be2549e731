"""Finds sums that an optimizer computes of its gradients and that tell whether they are finite.

A clip by global norm adds up the squares of every gradient. Inf and NaN are contagious: squares and sums of
them are inf or NaN again. So where the norm is finite all gradients are, and the check is free.

The one difference: gradients beyond 1.8e19 have squares that float32 cannot hold. They are finite and their
norm is not, and the clip would turn them all into zeros. Such a step counts as non-finite.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

# Operations of one operand whose result is inf or NaN wherever the operand is.
_OF_ONE = {"broadcast_in_dim", "convert_element_type", "copy", "reduce_sum", "reshape", "square", "squeeze"}


@dataclasses.dataclass(frozen=True)
class KnownSums:
    """Scalars in the jaxpr of an optimizer's update.

    Attributes:
        leaves: for each gradient, a variable that is finite only if all of its elements are.
        total: the variable that is finite only if all of them are.
        needed: the places of the equations that compute it, and them on the way.
    """

    leaves: tuple[Any, ...]
    total: Any
    needed: tuple[int, ...]


def find_known_sums(jaxpr: Any, gradients: Sequence[Any], scales: Collection[Any] = ()) -> KnownSums | None:
    """Looks for a sum over all gradients, and in it one over each.

    Args:
        jaxpr: of an optimizer's update, open.
        gradients: those of its variables that are gradients of a floating dtype.
        scales: those that are loss scales, finite and above zero.

    Returns:
        The sums, or None if they are not there.
    """
    # For each variable the gradients whose inf or NaN it shows; none for what is made of numbers alone.
    shows: dict[Any, frozenset[Any]] = {var: frozenset([var]) for var in gradients}
    for equation in jaxpr.eqns:
        shown = _shown(equation, shows, scales)
        if shown is None:
            continue
        (total,) = equation.outvars
        shows[total] = shown
        if not gradients or len(shown) < len(gradients) or math.prod(total.aval.shape) != 1:
            continue
        needed = _needed(jaxpr, total)
        sums: dict[Any, Any] = {}
        for place in needed:
            for var in jaxpr.eqns[place].outvars:
                if len(shown := shows.get(var, frozenset())) == math.prod(var.aval.shape) == 1:
                    sums.setdefault(next(iter(shown)), var)
        if len(sums) == len(gradients):
            return KnownSums(tuple(sums[var] for var in gradients), total, needed)
    return None


def _shown(equation: Any, shows: dict[Any, frozenset[Any]], scales: Collection[Any]) -> frozenset[Any] | None:
    """The gradients whose inf or NaN the result of `equation` shows; None if it may hide or make one."""
    if len(equation.outvars) != 1:
        return None
    out = equation.outvars[0].aval
    if 0 in out.shape or out.dtype not in (jnp.float32, jnp.float64):
        return None  # Of no elements, or half precision, which overflows where float32 does not.
    each = [
        (frozenset() if np.isfinite(var.val).all() else None) if isinstance(var, Literal) else shows.get(var)
        for var in equation.invars
    ]
    name = equation.primitive.name
    if name in _OF_ONE or (name == "integer_pow" and equation.params["y"] > 0):
        return each[0]
    if name == "add" and each[0] is not None and each[1] is not None:
        return each[0] | each[1]  # Inf and minus inf are NaN.
    if name == "mul" and equation.invars[0] is equation.invars[1]:
        return each[0]
    if name in ("mul", "div") and _makes_no_inf(name, equation.invars[1], scales):
        return each[0]
    return None


def _makes_no_inf(name: str, factor: Any, scales: Collection[Any]) -> bool:
    """Whether a finite number times or divided by `factor` is finite; a loss scale is trusted."""
    if isinstance(factor, Literal):
        size = np.abs(factor.val)
        return bool(0 < size <= 1 if name == "mul" else 1 <= size < np.inf)
    return any(factor is scale for scale in scales)


def _needed(jaxpr: Any, wanted: Any) -> tuple[int, ...]:
    """The places of the equations that compute the variable `wanted`."""
    variables, places = {wanted}, []
    for place in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[place]
        if variables.intersection(equation.outvars):
            places.append(place)
            variables |= {var for var in equation.invars if not isinstance(var, Literal)}
    return tuple(reversed(places))

"""Finds sums that an optimizer computes of its gradients and that tell whether they are finite.

A clip by global norm adds up the squares of every gradient. Inf and NaN are contagious: squares, sums and
multiples of them are inf or NaN again. So where the norm is finite all gradients are, and the check is free.

The one difference: gradients beyond 1.8e19 have squares that float32 cannot hold. They are finite and their
norm is not, and the clip would turn them all into zeros. Such a step counts as non-finite.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

# Operations of one operand whose result is inf or NaN wherever the operand is.
_OF_ONE = {"broadcast_in_dim", "convert_element_type", "copy", "reduce_sum", "reshape", "square", "squeeze"}


@dataclasses.dataclass(frozen=True)
class KnownSums:
    """Scalars in the jaxpr of an optimizer's update.

    Attributes:
        leaves: for each gradient, the variable that is finite only if all of its elements are.
        total: the variable that is finite only if all elements of all gradients are.
        needed: the places of the equations that compute them.
    """

    leaves: tuple[Any, ...]
    total: Any
    needed: tuple[int, ...]


def find_known_sums(jaxpr: Any, gradients: Sequence[Any], constants: Sequence[Any]) -> KnownSums | None:
    """Looks for a sum over each gradient and one over all of them.

    Args:
        jaxpr: of an optimizer's update, open.
        gradients: those of its variables that are gradients of a floating dtype.
        constants: those that are constants of the update, such as a loss scale.

    Returns:
        The sums, or None if they are not all there.
    """
    # For each variable the gradients whose inf or NaN it shows; none for what is made of numbers alone.
    shows: dict[Any, frozenset[Any]] = {var: frozenset([var]) for var in gradients}
    sums: dict[Any, Any] = {}
    total = None
    for equation in jaxpr.eqns:
        shown = _shown(equation, shows, constants)
        if shown is None:
            continue
        (out,) = equation.outvars
        shows[out] = shown
        if math.prod(out.aval.shape) == 1:
            if len(shown) == 1:
                sums.setdefault(next(iter(shown)), out)
            if total is None and len(shown) == len(gradients):
                total = out
    if total is None or len(sums) < len(gradients):
        return None
    leaves = tuple(sums[var] for var in gradients)
    return KnownSums(leaves, total, _needed(jaxpr, {*leaves, total}))


def _shown(
    equation: Any, shows: dict[Any, frozenset[Any]], constants: Sequence[Any]
) -> frozenset[Any] | None:
    """The gradients whose inf or NaN the result of `equation` shows; None if it may hide or make one."""
    name, params = equation.primitive.name, equation.params
    literal = [isinstance(var, Literal) for var in equation.invars]
    each = [frozenset() if number else shows.get(var) for var, number in zip(equation.invars, literal)]
    if len(equation.outvars) > 1 or equation.outvars[0].aval.dtype not in (jnp.float32, jnp.float64):
        return None  # Half precision overflows where float32 does not.
    if name in _OF_ONE or (name == "integer_pow" and params["y"] > 0):
        return each[0]
    if name == "add" and each[0] is not None and each[1] is not None:
        return each[0] | each[1]  # Inf and minus inf are NaN.
    if name == "mul" and equation.invars[0] is equation.invars[1]:
        return each[0]
    if name in ("mul", "div") and (literal[1] or equation.invars[1] in constants):
        return each[0]
    return None


def _needed(jaxpr: Any, wanted: set[Any]) -> tuple[int, ...]:
    """The places of the equations that compute `wanted`."""
    places = []
    for place in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[place]
        if wanted.intersection(equation.outvars):
            places.append(place)
            wanted |= {var for var in equation.invars if not isinstance(var, Literal)}
    return tuple(reversed(places))

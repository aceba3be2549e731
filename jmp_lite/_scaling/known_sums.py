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
from jax.extend.core import Literal, Var

# Operations that move the elements of one operand, or convert them.
_MOVES = {"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"}


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


@dataclasses.dataclass(frozen=True)
class _Shows:
    """What a variable shows.

    Attributes:
        gradients: those whose inf or NaN make it inf or NaN; none if it is made of numbers alone.
        squared: whether it is made of their squares.
    """

    gradients: frozenset[Any]
    squared: bool = False


_NUMBER = _Shows(frozenset())


def find_known_sums(
    jaxpr: Any, gradients: Sequence[Any], updates: Sequence[Any], scales: Collection[Any] = ()
) -> KnownSums | None:
    """Looks for a sum of squares over all gradients, and in it one over each.

    Args:
        jaxpr: of an optimizer's update, open.
        gradients: those of its variables that are gradients of a floating dtype.
        updates: the variables that come out as updates, which should be made of the sum.
        scales: what is known to be a loss scale, variables or numbers: finite and above zero.

    Returns:
        The sums, or None if they are not there.
    """
    shows = {var: _Shows(frozenset([var])) for var in gradients}
    for equation in jaxpr.eqns:
        shown = _shown(equation, shows, scales)
        if shown is None:
            continue
        (total,) = equation.outvars
        shows[total] = shown
        all_of_them = bool(gradients) and len(shown.gradients) == len(gradients)
        if not (all_of_them and _is_sum(total, shown) and _reaches(jaxpr, total, updates)):
            continue
        needed = _needed(jaxpr, total)
        sums: dict[Any, Any] = {}
        for place in needed:
            for var in jaxpr.eqns[place].outvars:
                each = shows.get(var, _NUMBER)
                if len(each.gradients) == 1 and _is_sum(var, each):
                    sums.setdefault(next(iter(each.gradients)), var)
        if len(sums) == len(gradients):
            return KnownSums(tuple(sums[var] for var in gradients), total, needed)
    return None


def _is_sum(var: Any, shown: _Shows) -> bool:
    return shown.squared and math.prod(var.aval.shape) == 1


def _shown(equation: Any, shows: dict[Any, _Shows], scales: Collection[Any]) -> _Shows | None:
    """What the result of `equation` shows; None if it may hide an inf or NaN, or make one."""
    name, operands = equation.primitive.name, equation.invars
    if len(equation.outvars) != 1:
        return None
    out = equation.outvars[0].aval
    if 0 in out.shape or out.dtype not in (jnp.float32, jnp.float64):
        return None  # Of no elements, or half precision, which overflows where float32 does not.
    each = [_shown_by(var, shows) for var in operands]
    first = each[0] if each else None
    if first is None:
        return None
    squares = (
        name == "square"
        or (name == "integer_pow" and equation.params["y"] == 2)
        or (name == "mul" and operands[0] is operands[1])
    )
    if squares:
        return _Shows(first.gradients, squared=True) if not first.squared else None
    if name in _MOVES and operands[0].aval.dtype.itemsize <= out.dtype.itemsize:
        return first
    if name == "reduce_sum" and (first.squared or not first.gradients):
        return first
    if name == "add" and each[1] is not None:  # Inf and minus inf are NaN.
        parts = [part for part in (first, each[1]) if part.gradients]
        if all(part.squared for part in parts):
            return _Shows(first.gradients | each[1].gradients, squared=bool(parts))
    if name in ("mul", "div") and _is_scale(operands[1], scales):
        return first
    return None


def _shown_by(var: Any, shows: dict[Any, _Shows]) -> _Shows | None:
    if isinstance(var, Literal):
        return _NUMBER if np.isfinite(var.val).all() else None
    return shows.get(var)


def _is_scale(var: Any, scales: Collection[Any]) -> bool:
    """Whether `var` is a loss scale, or 1."""
    if isinstance(var, Literal):
        return any(not isinstance(scale, Var) and var.val == scale for scale in (1.0, *scales))
    return any(var is scale for scale in scales)


def _reaches(jaxpr: Any, start: Any, ends: Sequence[Any]) -> bool:
    """Whether one of `ends` is computed of `start`."""
    reached = {start}
    for equation in jaxpr.eqns:
        if any(not isinstance(var, Literal) and var in reached for var in equation.invars):
            reached.update(equation.outvars)
    return any(not isinstance(var, Literal) and var in reached for var in ends)


def _needed(jaxpr: Any, wanted: Any) -> tuple[int, ...]:
    """The places of the equations that compute the variable `wanted`."""
    variables, places = {wanted}, []
    for place in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[place]
        if variables.intersection(equation.outvars):
            places.append(place)
            variables |= {var for var in equation.invars if not isinstance(var, Literal)}
    return tuple(reversed(places))

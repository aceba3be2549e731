"""How a softmax is written in a jaxpr: exp(x) / sum(exp(x)) over the last axis."""

from collections.abc import Mapping

from .axes import Labels, moved_axes
from .read import Equation, Var, is_literal


def moved_from(
    var: Var, made_by: Mapping[Var, Equation], through_stops: bool = False
) -> tuple[Var, Labels, Equation | None]:
    """Follows a variable back through moves, and through `stop_gradient` if `through_stops` is set.

    Returns what was moved, for each axis of `var` that of what was moved, and the equation that made it.
    """
    # An axis of size 1 is none: moves drop and add such axes at will.
    shape = getattr(var.aval, "shape", ())
    axes: Labels = tuple(None if size == 1 else axis for axis, size in enumerate(shape))
    while not is_literal(var) and var in made_by:
        equation = made_by[var]
        moved = moved_axes(equation)
        if moved is None or (equation.primitive.name == "stop_gradient" and not through_stops):
            return var, axes, equation
        var, axes = equation.invars[0], tuple(None if axis is None else moved[axis] for axis in axes)
    return var, axes, None


def softmax_input(division: Equation, made_by: Mapping[Var, Equation]) -> Var | None:
    """Returns x if an operation computes the softmax of x over the last axis, and None otherwise."""
    if division.primitive.name != "div" or any(map(is_literal, division.invars)):
        return None
    exponentials, sums = division.invars
    exponential = made_by.get(exponentials)
    if (
        exponential is None
        or exponential.primitive.name != "exp"
        or not _are_sums(sums, exponentials, made_by)
    ):
        return None
    return _without_shift(exponential.invars[0], made_by)


def _are_sums(sums: Var, exponentials: Var, made_by: Mapping[Var, Equation]) -> bool:
    """Whether `sums` holds the sum of each row of `exponentials`."""
    last = exponentials.aval.ndim - 1
    _, axes, total = moved_from(sums, made_by)
    if total is None or total.primitive.name != "reduce_sum" or total.invars[0] is not exponentials:
        return False
    is_of_rows = axes[last] is None and all(axis in (None, place) for place, axis in enumerate(axes))
    return tuple(total.params["axes"]) == (last,) and is_of_rows


def _without_shift(x: Var, made_by: Mapping[Var, Equation]) -> Var:
    """Returns what `x` shifts: a softmax stays the same if all numbers of a row are shifted by one number."""
    shift = None if is_literal(x) else made_by.get(x)
    if shift is None or shift.primitive.name != "sub":
        return x
    shifted, number = shift.invars
    _, axes, _ = moved_from(number, made_by, through_stops=True)
    is_shift = shifted.aval.shape == shift.outvars[0].aval.shape and (not axes or axes[-1] is None)
    return shifted if is_shift else x

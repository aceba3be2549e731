"""The axes of results, from those of operands: of operations that move data, and of products."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from .read import Equation

Labels: TypeAlias = tuple[Any, ...]
"""A name for each axis of an array, or None for an axis of size 1."""


def moved_axes(equation: Equation) -> Labels | None:
    """Returns for each axis of the result of a move that of the operand, or None for a new one.

    Returns None for an operation that is not such a move.
    """
    if not equation.invars or len(equation.outvars) != 1:
        return None
    operand, out, params = equation.invars[0].aval, equation.outvars[0].aval, equation.params
    match equation.primitive.name:
        case "transpose":
            return tuple(params["permutation"])
        case "squeeze":
            return tuple(axis for axis in range(operand.ndim) if axis not in params["dimensions"])
        case "broadcast_in_dim":
            return _broadcast_axes(operand.shape, out.shape, params["broadcast_dimensions"])
        case "reshape":
            return _reshaped_axes(operand.shape, out.shape)
        case "stop_gradient" | "copy" | "pvary" | "sharding_constraint":
            return tuple(range(out.ndim))
    return None


def _broadcast_axes(before: Sequence[int], after: Sequence[int], places: Sequence[int]) -> Labels:
    source = {to: axis for axis, to in enumerate(places)}

    def kept(to):
        return to in source and before[source[to]] == after[to]

    return tuple(source[to] if kept(to) else None for to in range(len(after)))


def _reshaped_axes(before: Sequence[int], after: Sequence[int]) -> Labels | None:
    """Returns the axes if the reshape only adds or drops axes of size 1."""
    # Other reshapes merge or split axes, so the result's axes are none of the operand's.
    held, kept = ([axis for axis, size in enumerate(shape) if size != 1] for shape in (before, after))
    if [before[axis] for axis in held] != [after[axis] for axis in kept]:
        return None
    return tuple(map(dict(zip(kept, held)).get, range(len(after))))


def labels_of_operands(product: Equation, result: Labels, summed: Any) -> tuple[Labels, Labels]:
    """Returns the labels of both operands of a `dot_general`.

    Args:
        product: the `dot_general`.
        result: the labels of its result.
        summed: the label of an axis that it sums over.
    """
    # The axes of the result are those of the batch, then the left operand's own, then the right one's.
    contracted, batches = product.params["dimension_numbers"]
    rest, labels = list(result[len(batches[0]) :]), []
    for var, sums, shares in zip(product.invars, contracted, batches):
        given = {**dict.fromkeys(sums, summed), **dict(zip(shares, result))}
        labels.append(tuple(given[n] if n in given else rest.pop(0) for n in range(var.aval.ndim)))
    return labels[0], labels[1]

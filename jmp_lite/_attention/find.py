"""Finds attentions in a jaxpr: a product of queries and keys, its softmax, and the product with values."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import numpy as np

from .._jaxpr import (
    CALLS,
    FULL_PRECISION_SCOPE,
    FUSED_SCOPE,
    Equation,
    Labels,
    Var,
    all_equations,
    inner_jaxprs,
    is_float32,
    is_literal,
    is_of_gradient,
    is_transposed,
    labels_of_operands,
    moved_axes,
    open_jaxpr,
    precisions,
    scope_of,
)
from .facts import MASKED, Fact, Facts, NotFused

DIFFERENTIATED = "its derivative is already taken: put jmp.fuse_attention inside of jax.grad"
FEATURES = "features"
"""The label of the features. All other labels are axes of the scores."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """A softmax between two products: an attention, or why it is none that can be fused."""

    # All of its operations. The first one is the product of queries and keys, the last one that with values.
    equations: tuple[Equation, ...]
    side: int  # Which operand of the second product the weights are.
    members: frozenset[int] = frozenset()  # The indexes of the other operations.
    inputs: tuple[Var, ...] = ()  # The variables that its operations read and do not compute.
    why_not: str = ""
    to_softmax: tuple[Equation, ...] = ()  # Those that compute the input of the softmax from the scores.
    operands: tuple[tuple[Var, Labels], ...] = ()  # Queries, keys, values, and the labels of their axes.
    output: Labels = ()
    groups: tuple[Labels, ...] = ()  # The axes of the batch, key heads, groups of heads, queries and keys.
    sizes: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    scale: float = 1.0
    kind: str = ""  # "none", "causal", "mask" or "bias".
    bias: Labels = ()  # The axes of the input of the softmax,
    given_along: frozenset[Any] = frozenset()  # and those along which the mask or bias is given.
    may_be_empty: bool = False  # Whether numbers may have replaced all scores of a query.


def find_attentions(facts: Facts) -> dict[int, Attention]:
    """Returns the softmaxes between two products in a jaxpr, by the index of the second product."""
    outputs = (var for var in open_jaxpr(facts.jaxpr).outvars if not is_literal(var))
    readers: dict[Var, set[int]] = {var: {-1} for var in outputs}  # -1 for the caller, who reads the outputs.
    for index, equation in enumerate(facts.equations):
        for var in equation.invars:
            if not is_literal(var):
                readers.setdefault(var, set()).add(index)
    found: dict[int, Attention] = {}
    for index, equation in enumerate(facts.equations):
        is_product = equation.primitive.name == "dot_general" and not is_transposed(equation)
        # The weights may be either operand, as in an `einsum` that names them second.
        for side in (0, 1) if is_product else ():
            try:
                attention = _find(index, side, facts, readers)
            except NotFused as reason:
                attention = Attention((equation,), side, why_not=str(reason))
            if attention is not None:
                found[index] = attention
    return found


def may_hold_attention(equation: Equation) -> bool:
    """Whether an operation runs jaxprs that may hold attentions which are not fused yet."""
    if equation.primitive.name not in CALLS:
        return False
    if any(name in scope_of(equation) for name in (FULL_PRECISION_SCOPE, FUSED_SCOPE)):
        return False
    # The operations of a softmax: without one of them, the facts of the jaxprs need not be asked.
    inside = (each for inner in inner_jaxprs(equation) for each in all_equations(inner.jaxpr))
    return {"dot_general", "exp", "div"} <= {each.primitive.name for each in inside}


def _find(index: int, side: int, facts: Facts, readers: Mapping[Var, set[int]]) -> Attention | None:
    """Returns the attention whose second product has the weights as its operand `side`."""
    # Backwards: from the second product through moves to a division, the softmax, and its input.
    product = facts.equations[index]
    _, weight_axes, division = _back(facts, product.invars[side])
    if division is None:
        return None
    inputs = _input_of_softmax(facts, division)
    if inputs is None:
        # Such as a dropout, which is a division and a selection.
        if _is_behind_softmax(facts, division, 3):
            name = division.params.get("name", division.primitive.name)
            raise NotFused(f"its weights pass through {name}")
        return None
    if FULL_PRECISION_SCOPE in scope_of(product):
        raise NotFused("inside full_precision")
    if is_of_gradient(product):
        raise NotFused(DIFFERENTIATED)
    # Then forwards: what stands between the scores and the weights, and whether anything else reads it.
    fact = facts.of(inputs)
    if fact.scores is None:
        raise NotFused("no matmul gives its scores")
    first = facts.made_by[fact.scores]
    between, dependent = _between(facts, fact.scores, index)
    chain = [number for number in between if number in facts.on_scores and number <= facts.made_by[inputs]]
    _check_readers(facts, (first, *chain), {*between, index}, dependent, readers)
    ours = [facts.equations[number] for number in (first, *between, index)]
    _check_products(ours[0], ours[-1])
    weights = tuple(None if axis is None else fact.axes[axis] for axis in weight_axes)
    return Attention(
        tuple(ours),
        side,
        frozenset({first, *between}),
        _read(ours, dependent),
        to_softmax=tuple(facts.equations[number] for number in chain),
        **_axes(ours[0], ours[-1], side, weights, fact),
    )


def _variables(equation: Equation) -> list[Var]:
    return [var for var in equation.invars if not is_literal(var)]


def _read(ours: Sequence[Equation], computed: Set[Var]) -> tuple[Var, ...]:
    read = dict.fromkeys(var for each in ours for var in _variables(each))
    return tuple(var for var in read if var not in computed)


def _between(facts: Facts, scores: Var, end: int) -> tuple[list[int], set[Var]]:
    """Returns the operations before `end` on what depends on the scores, and all that does."""
    between, dependent = [], {scores}
    for number in range(facts.made_by[scores] + 1, end):
        if not dependent.isdisjoint(_variables(facts.equations[number])):
            dependent.update(facts.equations[number].outvars)
            between.append(number)
    return between, dependent


def _check_readers(
    facts: Facts,
    chain: Collection[int],
    readers: Collection[int],
    dependent: Collection[Var],
    read_by: Mapping[Var, set[int]],
) -> None:
    """Raises `NotFused` unless `readers` alone read what depends on the scores, and `chain` only its own."""
    mixed = (var for number in chain for var in _variables(facts.equations[number]) if var in dependent)
    is_mixed = any(facts.made_by[var] not in chain for var in mixed)
    if is_mixed or any(not read_by.get(var, set()) <= set(readers) for var in dependent):
        raise NotFused("another operation reads its scores or weights")


def _check_products(first: Equation, second: Equation) -> None:
    """Raises `NotFused` if the program computes one of the products in half, or in a precision of its own."""
    if not all(is_float32(var) for each in (first, second) for var in (*each.invars, *each.outvars)):
        raise NotFused("the program does not compute it in float32")
    if precisions(first) | precisions(second):
        raise NotFused("the program asks for a precision of its matmuls")


def _back(facts: Facts, var: Var, through_stops: bool = False) -> tuple[Var, Labels, Equation | None]:
    """Follows a variable back through moves.

    Returns what was moved, for each axis of `var` that of what was moved, and the equation that made it.
    """
    # An axis of size 1 is none: moves drop and add such axes at will.
    shape = getattr(var.aval, "shape", ())
    axes: Labels = tuple(None if size == 1 else axis for axis, size in enumerate(shape))
    while not is_literal(var) and var in facts.made_by:
        equation = facts.equations[facts.made_by[var]]
        moved = moved_axes(equation)
        if moved is None or (equation.primitive.name == "stop_gradient" and not through_stops):
            return var, axes, equation
        var, axes = equation.invars[0], tuple(None if axis is None else moved[axis] for axis in axes)
    return var, axes, None


def _input_of_softmax(facts: Facts, division: Equation) -> Var | None:
    """Returns the input of the softmax over the last axis that a division computes; None if it is none."""
    exponential = _exponential(facts, division)
    if exponential is None:
        return None
    inputs, last = exponential.invars[0], division.outvars[0].aval.ndim - 1
    var, _, shift = _back(facts, inputs)
    if shift is None or shift.primitive.name != "sub" or var is not inputs:
        return inputs
    # A softmax stays the same if all numbers of a row are shifted by one number.
    shifted, shifts = shift.invars
    _, axes, _ = _back(facts, shifts, through_stops=True)
    is_shift = shifted.aval.shape == shift.outvars[0].aval.shape and (last >= len(axes) or axes[last] is None)
    return shifted if is_shift else inputs


def _exponential(facts: Facts, division: Equation) -> Equation | None:
    """Returns the `exp` that a division divides by its sums over the last axis; None if it is none."""
    # The exponentials themselves are summed and divided. The sums may be moved in between.
    if division.primitive.name != "div":
        return None
    exponentials, rows = division.invars
    last = division.outvars[0].aval.ndim - 1
    _, axes, total = _back(facts, rows)
    var, _, exponential = _back(facts, exponentials)
    if total is None or exponential is None or var is not exponentials:
        return None
    names = total.primitive.name, exponential.primitive.name
    if names != ("reduce_sum", "exp") or total.invars[0] is not exponentials:
        return None
    is_of_rows = all(axis is None or axis == place for place, axis in enumerate(axes)) and axes[last] is None
    return exponential if tuple(total.params["axes"]) == (last,) and is_of_rows else None


def _is_behind_softmax(facts: Facts, equation: Equation, most: int) -> bool:
    """Whether at most `most` operations, none of them a product, stand between a softmax and an operation."""
    if equation.primitive.name == "dot_general" or not most:
        return False
    before = (_back(facts, var)[2] for var in equation.invars)
    return any(
        _input_of_softmax(facts, each) is not None or _is_behind_softmax(facts, each, most - 1)
        for each in before
        if each is not None
    )


def _axes(first: Equation, product: Equation, side: int, weights: Labels, fact: Fact) -> dict[str, Any]:
    """Returns what an `Attention` says of axes. A label is the axis of the scores that an axis is."""
    sizes: dict[Any, int] = dict(enumerate(first.outvars[0].aval.shape))
    name = lambda axes: tuple(None if axis is None or sizes[axis] == 1 else axis for axis in axes)
    scores, weights = name(fact.axes), name(weights)
    # The softmax is over the last axis of its input. The keys are the operand that has this axis.
    keys = scores[-1]
    both = labels_of_operands(first, name(sizes), FEATURES)
    key = 1 if keys in both[1] else 0
    output, of_values = _labels_of_values(product, side, weights, keys)
    operands = (
        (first.invars[1 - key], both[1 - key]),
        (first.invars[key], both[key]),
        (product.invars[1 - side], of_values),
    )
    groups = _groups(scores, both[1 - key], both[key])
    _check_values(both[key], of_values, {*groups[0], *groups[1], keys, FEATURES})
    features = {var.aval.shape[labels.index(FEATURES)] for var, labels in operands}
    if len(features) != 1:
        raise NotFused("its values have other features than its keys")
    return {
        "operands": operands,
        "output": output,
        "groups": groups,
        "sizes": sizes | {FEATURES: features.pop()},
        "scale": fact.slope,
        "kind": _kind(fact, math.prod(sizes[label] for label in (*groups[3], keys))),
        "bias": scores,
        "given_along": _given_along(fact, scores, groups),
        "may_be_empty": fact.replaced and not _has_keys(fact),
    }


def _groups(scores: Labels, of_queries: Labels, of_keys: Labels) -> tuple[Labels, ...]:
    """Returns the axes of the batch, key heads, groups of heads, queries and keys."""
    # Axes of the queries alone are the groups of grouped-query attention, and the last of them the positions.
    keys = scores[-1]
    shared = [label for label in of_queries if label in of_keys and label not in (None, FEATURES)]
    rows = [label for label in scores if label in of_queries and label not in (None, *shared)]
    if keys is None or keys in of_queries or not shared or of_queries.count(FEATURES) != 1:
        raise NotFused("its first matmul is none of queries and keys with a batch or heads")
    # Of several shared axes the last one is the heads. A single one in front of the positions is the batch.
    is_batch = len(shared) == 1 and (not rows or of_queries.index(shared[0]) < of_queries.index(rows[-1]))
    split = len(shared) if is_batch else len(shared) - 1
    return tuple(map(tuple, (shared[:split], shared[split:], rows[:-1], rows[-1:], [keys])))


def _check_values(of_keys: Labels, of_values: Labels, axes: Collection[Any]) -> None:
    """Raises `NotFused` unless keys and values have the given axes."""
    if not {*of_keys} - {None} == {*of_values} - {None} == set(axes):
        raise NotFused("its values have other axes than its keys")
    if of_values.count(FEATURES) != 1:
        raise NotFused("its values have other features than its keys")


def _given_along(fact: Fact, scores: Labels, groups: Sequence[Labels]) -> frozenset[Any]:
    """Returns the axes of a mask or bias, which is given along a whole group of axes or not at all."""
    # cuDNN takes a mask for all examples or for each, and for all heads or for each.
    varying = {label for label, varies in zip(scores, fact.varies) if varies}
    outer = (each for each in (groups[0], groups[1] + groups[2]) if not varying.isdisjoint(each))
    return frozenset(label for each in (*outer, *groups[3:]) for label in each)


def _labels_of_values(product: Equation, side: int, weights: Labels, keys: Any) -> tuple[Labels, Labels]:
    """Returns the labels of the result of the product of weights and values, and those of the values."""
    # The operand that is not the weights: its axes that the product does not sum or share are the features.
    contracted, batches = product.params["dimension_numbers"]
    if [weights[axis] for axis in contracted[side]] != [keys]:
        raise NotFused("its second matmul sums over another axis than its softmax")
    shape = product.invars[1 - side].aval.shape
    used = [(*contracted[place], *batches[place]) for place in (0, 1)]
    free = [label for axis, label in enumerate(weights) if axis not in used[side]]
    own = [FEATURES if size != 1 else None for axis, size in enumerate(shape) if axis not in used[1 - side]]
    output = (*(weights[axis] for axis in batches[side]), *(own + free if side else free + own))
    return output, labels_of_operands(product, output, keys)[1 - side]


def _kind(fact: Fact, positions: int) -> str:
    """Returns how an attention masks its scores."""
    # Known only when the program runs, such as the mask of a padded batch.
    if fact.base is None:
        return "bias" if fact.added else "mask"
    if (fact.base == 0).all():
        return "none"
    # What is added to a whole row keeps the differences between its scores, so it is a bias and no mask.
    is_mask = ((fact.base == 0) | (fact.base <= MASKED)).all() and (not fact.added or _has_keys(fact))
    if not is_mask or fact.base.size != positions:
        return "mask" if is_mask else "bias"
    # cuDNN makes a causal mask itself.
    mask = np.squeeze(fact.base == 0)
    return "causal" if mask.ndim == 2 and np.array_equal(mask, np.tri(*mask.shape, dtype=bool)) else "mask"


def _has_keys(fact: Fact) -> bool:
    """Whether each query certainly has a key that is not masked."""
    return fact.base is not None and bool((fact.base == 0).any(axis=-1).all())

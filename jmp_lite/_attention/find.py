"""Finds attentions in a jaxpr: a product of queries and keys, its softmax, and the product with values."""

import dataclasses
import math
from collections.abc import Mapping
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

    equations: tuple[Equation, ...]  # All of its operations. The last one is the second product.
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
    readers: dict[Var, set[int]] = {var: {-1} for var in outputs}
    for index, equation in enumerate(facts.equations):
        for var in equation.invars:
            if not is_literal(var):
                readers.setdefault(var, set()).add(index)
    found: dict[int, Attention] = {}
    for index, equation in enumerate(facts.equations):
        is_product = equation.primitive.name == "dot_general" and not is_transposed(equation)
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
    inside = (each for inner in inner_jaxprs(equation) for each in all_equations(inner.jaxpr))
    return {"dot_general", "exp", "div"} <= {each.primitive.name for each in inside}


def _find(index: int, side: int, facts: Facts, readers: Mapping[Var, set[int]]) -> Attention | None:
    """Returns the attention whose second product has the weights as its operand `side`."""
    eqns = facts.equations
    _, weight_axes, division = _back(facts, eqns[index].invars[side])
    inputs = None if division is None else _input_of_softmax(facts, division)
    if division is None or inputs is None:
        if division is not None and _is_behind_softmax(facts, division, 3):
            name = division.params.get("name", division.primitive.name)
            raise NotFused(f"its weights pass through {name}")
        return None
    if FULL_PRECISION_SCOPE in scope_of(eqns[index]):
        raise NotFused("inside full_precision")
    if is_of_gradient(eqns[index]):
        raise NotFused(DIFFERENTIATED)
    fact = facts.of(inputs)
    if fact.scores is None:
        raise NotFused("no matmul gives its scores")
    # An attention computes all that depends on the scores, and nothing else may read it.
    first, dependent, between = facts.made_by[fact.scores], {fact.scores}, []
    for number in range(first + 1, index):
        if any(not is_literal(var) and var in dependent for var in eqns[number].invars):
            dependent.update(eqns[number].outvars)
            between.append(number)
    chain = [number for number in between if number in facts.on_scores and number <= facts.made_by[inputs]]
    mixed = (var for number in chain for var in eqns[number].invars if not is_literal(var))
    if any(var in dependent and facts.made_by[var] not in (first, *chain) for var in mixed) or any(
        not readers.get(var, set()) <= {*between, index} for var in dependent
    ):
        raise NotFused("another operation reads its scores or weights")
    ours = [eqns[number] for number in (first, *between, index)]
    if not all(is_float32(var) for each in (ours[0], ours[-1]) for var in (*each.invars, *each.outvars)):
        raise NotFused("the program does not compute it in float32")
    if precisions(ours[0]) | precisions(ours[-1]):
        raise NotFused("the program asks for a precision of its matmuls")
    weights = tuple(None if axis is None else fact.axes[axis] for axis in weight_axes)
    read = (var for each in ours for var in each.invars if not is_literal(var) and var not in dependent)
    return Attention(
        tuple(ours),
        side,
        frozenset({first, *between}),
        tuple(dict.fromkeys(read)),
        to_softmax=tuple(eqns[number] for number in chain),
        **_axes(ours[0], ours[-1], side, weights, fact),
    )


def _back(facts: Facts, var: Var, through_stops: bool = False) -> tuple[Var, Labels, Equation | None]:
    """Follows a variable back through moves.

    Returns what was moved, for each axis of `var` that of what was moved, and the equation that made it.
    """
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
    if tuple(total.params["axes"]) != (last,) or not is_of_rows:
        return None
    var, _, shift = _back(facts, exponential.invars[0])
    if shift is None or shift.primitive.name != "sub" or var is not exponential.invars[0]:
        return exponential.invars[0]
    # A softmax stays the same if all numbers of a row are shifted by one number.
    inputs, shifts = shift.invars
    _, axes, _ = _back(facts, shifts, through_stops=True)
    is_shift = inputs.aval.shape == shift.outvars[0].aval.shape and (last >= len(axes) or axes[last] is None)
    return inputs if is_shift else exponential.invars[0]


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
    keys = scores[-1]
    both = labels_of_operands(first, name(sizes), FEATURES)
    key = 1 if keys in both[1] else 0
    of_queries, of_keys = both[1 - key], both[key]
    output, of_values = _labels_of_values(product, side, weights, keys)
    shared = [label for label in of_queries if label in of_keys and label not in (None, FEATURES)]
    rows = [label for label in scores if label in of_queries and label not in (None, *shared)]
    if keys is None or keys in of_queries or not shared or of_queries.count(FEATURES) != 1:
        raise NotFused("its first matmul is none of queries and keys with a batch or heads")
    if not {*of_keys} - {None} == {*of_values} - {None} == {*shared, keys, FEATURES}:
        raise NotFused("its values have other axes than its keys")
    operands = (first.invars[1 - key], of_queries), (first.invars[key], of_keys)
    operands = (*operands, (product.invars[1 - side], of_values))
    features = {var.aval.shape[labels.index(FEATURES)] for var, labels in operands}
    if len(features) != 1 or of_values.count(FEATURES) != 1:
        raise NotFused("its values have other features than its keys")
    # Of several shared axes the last one is the heads. A single one in front of the positions is the batch.
    is_batch = len(shared) == 1 and (not rows or of_queries.index(shared[0]) < of_queries.index(rows[-1]))
    split = len(shared) if is_batch else len(shared) - 1
    groups = shared[:split], shared[split:], rows[:-1], rows[-1:], [keys]
    varying = {label for label, varies in zip(scores, fact.varies) if varies}
    # A mask is given along a whole group of axes or not at all.
    outer = (each for each in (groups[0], groups[1] + groups[2]) if not varying.isdisjoint(each))
    kind = _kind(fact, math.prod(sizes[label] for label in (*rows[-1:], keys)))
    return {
        "operands": operands,
        "output": output,
        "groups": tuple(map(tuple, groups)),
        "sizes": sizes | {FEATURES: features.pop()},
        "scale": fact.slope,
        "kind": kind,
        "bias": scores,
        "given_along": frozenset(label for each in (*outer, *groups[3:]) for label in each),
        "may_be_empty": fact.replaced and not _has_keys(fact),
    }


def _labels_of_values(product: Equation, side: int, weights: Labels, keys: Any) -> tuple[Labels, Labels]:
    """Returns the labels of the result of the product of weights and values, and those of the values."""
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
    if fact.base is None:
        return "bias" if fact.added else "mask"
    if (fact.base == 0).all():
        return "none"
    # What is added to a whole row keeps the differences between its scores, so it is a bias and no mask.
    is_mask = ((fact.base == 0) | (fact.base <= MASKED)).all() and (not fact.added or _has_keys(fact))
    if not is_mask or fact.base.size != positions:
        return "mask" if is_mask else "bias"
    mask = np.squeeze(fact.base == 0)
    return "causal" if mask.ndim == 2 and np.array_equal(mask, np.tri(*mask.shape, dtype=bool)) else "mask"


def _has_keys(fact: Fact) -> bool:
    """Whether each query certainly has a key that is not masked."""
    return fact.base is not None and bool((fact.base == 0).any(axis=-1).all())

"""Finds attentions in a jaxpr: a product of queries and keys, its softmax, and the product with values."""

import dataclasses
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
    is_recomputed,
    is_transposed,
    labels_of_operands,
    moved_axes,
    moved_from,
    precisions,
    scope_of,
    softmax_input,
)
from .facts import BELOW_BIASES, MASKED, Fact, Facts, NotFused

DIFFERENTIATED = "its derivative is already taken: put jmp.fuse_attention inside of jax.grad"
_EXPONENTIALS = {"exp", "exp2"}
FEATURES = "features"
"""The label of the features. All other labels are axes of the scores."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """What the axes of an attention are. A label is the axis of the scores that an axis is."""

    operands: tuple[tuple[Var, Labels], ...]  # Queries, keys, values, and the labels of their axes.
    output: Labels
    groups: tuple[Labels, ...]  # The axes of the batch, key heads, groups of heads, queries and keys.
    sizes: Mapping[Any, int]


@dataclasses.dataclass(frozen=True)
class Mask:
    """The mask and the bias of an attention."""

    kind: str  # "none", "causal" or "bias", which a mask is too.
    axes: Labels  # The axes of the input of the softmax,
    given_along: frozenset[Any]  # and those along which the mask or bias is given.


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
    axes: Axes = Axes((), (), (), {})
    mask: Mask = Mask("none", (), frozenset())
    scale: float = 1.0


def find_attentions(facts: Facts) -> dict[int, Attention]:
    """Returns the softmaxes between two products in a jaxpr, by the index of the second product."""
    found: dict[int, Attention] = {}
    behind_product: set[Var] = set()
    for index, equation in enumerate(facts.equations):
        is_behind = not behind_product.isdisjoint(_variables(equation))
        behind_product.update(equation.outvars if is_behind or _is_product(equation) else ())
        if is_behind and _is_softmax(facts, index) and (place := _second_product(facts, index)) is not None:
            try:
                found[place[0]] = _find(*place, facts)
            except NotFused as reason:
                product = facts.equations[place[0]]
                found.setdefault(place[0], Attention((product,), place[1], why_not=str(reason)))
    return found


def may_hold_attention(equation: Equation) -> bool:
    """Whether an operation runs jaxprs that may hold attentions which are not fused yet."""
    if any(name in scope_of(equation) for name in (FULL_PRECISION_SCOPE, FUSED_SCOPE)):
        return False
    return "dot_general" in (inside := _names_inside(equation)) and _is_exponential_sum(inside)


def _names_inside(equation: Equation) -> set[str]:
    """Returns the names of the operations that an equation runs in jaxprs of its own."""
    inners = inner_jaxprs(equation) if equation.primitive.name in CALLS else ()
    return {each.primitive.name for inner in inners for each in all_equations(inner.jaxpr)}


def _is_product(equation: Equation) -> bool:
    return equation.primitive.name == "dot_general" or "dot_general" in _names_inside(equation)


def _is_exponential_sum(names: Collection[str]) -> bool:
    return "reduce_sum" in names and not _EXPONENTIALS.isdisjoint(names)


def _is_softmax(facts: Facts, index: int) -> bool:
    """Whether an operation makes exponentials, perhaps inside of it, that are summed over some axes."""
    equation = facts.equations[index]
    if is_recomputed(equation):  # By a backward pass.
        return False
    if equation.primitive.name not in _EXPONENTIALS:
        inside = _names_inside(equation)
        return _is_exponential_sum(inside) and "dot_general" not in inside
    open_vars = [equation.outvars[0]]
    while open_vars:  # The exponentials may be masked, moved or cast in between.
        var = open_vars.pop()
        for each in (facts.equations[number] for number in facts.readers[var] if number >= 0):
            if each.primitive.name == "reduce_sum":
                return len(each.params["axes"]) < var.aval.ndim
            if each.primitive.name in ("select_n", "jit", "convert_element_type") or moved_axes(each):
                open_vars.extend(each.outvars)
    return False


def _second_product(facts: Facts, index: int) -> tuple[int, int] | None:
    """Returns the first product that depends on an operation, and by which operand."""
    dependent = set(facts.equations[index].outvars)
    for number, equation in enumerate(facts.equations[index + 1 :], index + 1):
        sides = [n for n, var in enumerate(equation.invars) if not is_literal(var) and var in dependent]
        if sides and _is_product(equation):
            is_forward = equation.primitive.name == "dot_general" and not is_transposed(equation)
            return (number, sides[0]) if is_forward else None
        dependent.update(equation.outvars if sides else ())
    return None


def _find(index: int, side: int, facts: Facts) -> Attention:
    """Returns the attention whose second product has the weights as its operand `side`."""
    # Backwards: from the second product to the input of the softmax.
    inputs, weight_axes = _input_of_softmax(facts, facts.equations[index], side)
    # Then forwards: what stands between the scores and the weights, and whether anything else reads it.
    fact = facts.of(inputs)
    if fact.scores is None:
        raise NotFused("no matmul gives its scores")
    first = facts.made_by[fact.scores]
    between, dependent = _between(facts, fact.scores, index)
    chain = [number for number in between if number in facts.on_scores and number <= facts.made_by[inputs]]
    _check_readers(facts, (first, *chain), {*between, index}, dependent)
    ours = [facts.equations[number] for number in (first, *between, index)]
    _check_product(ours[0])
    weights = tuple(None if axis is None else fact.axes[axis] for axis in weight_axes)
    axes = _axes(ours[0], ours[-1], side, weights, fact)
    return Attention(
        tuple(ours),
        side,
        frozenset({first, *between}),
        tuple(dict.fromkeys(var for each in ours for var in _variables(each) if var not in dependent)),
        to_softmax=tuple(facts.equations[number] for number in chain),
        axes=axes,
        mask=_mask(fact, _named(fact.axes, axes.sizes), axes.groups),
        scale=fact.slope,
    )


def _input_of_softmax(facts: Facts, product: Equation, side: int) -> tuple[Var, Labels]:
    """Returns the input of the softmax whose weights are an operand of a product.

    And for each axis of this operand that of the weights.
    """
    if FULL_PRECISION_SCOPE in scope_of(product):
        raise NotFused("inside full_precision")
    if is_of_gradient(product):
        raise NotFused(DIFFERENTIATED)
    _check_product(product)
    _, axes, division = moved_from(product.invars[side], facts.makers)
    inputs = None if division is None else softmax_input(division, facts.makers)
    if inputs is None:
        raise NotFused(_why_no_softmax(facts, division))
    return inputs, axes


def _why_no_softmax(facts: Facts, end: Equation | None) -> str:
    makers = [end, *(facts.makers.get(var) for var in _variables(end))] if end else []
    if end is None or any(each.primitive.name in _EXPONENTIALS for each in makers if each):
        return "its softmax is not written as exp(x) / sum(exp(x)) over the last axis"
    return f"its weights pass through {end.params.get('name', end.primitive.name)}"


def _variables(equation: Equation) -> list[Var]:
    return [var for var in equation.invars if not is_literal(var)]


def _between(facts: Facts, scores: Var, end: int) -> tuple[list[int], set[Var]]:
    """Returns the operations before `end` on what depends on the scores, and all that does."""
    between, dependent = [], {scores}
    for number in range(facts.made_by[scores] + 1, end):
        if not dependent.isdisjoint(_variables(facts.equations[number])):
            dependent.update(facts.equations[number].outvars)
            between.append(number)
    return between, dependent


def _check_readers(facts: Facts, chain: Collection[int], ours: Set[int], dependent: Set[Var]) -> None:
    """Raises `NotFused` unless `ours` alone read what depends on the scores, and `chain` only its own."""
    mixed = (var for number in chain for var in _variables(facts.equations[number]) if var in dependent)
    is_mixed = any(facts.made_by[var] not in chain for var in mixed)
    has_effects = any(facts.equations[number].effects for number in ours)  # Such as `jax.debug.print`.
    if is_mixed or has_effects or any(not facts.readers[var] <= ours for var in dependent):
        raise NotFused("another operation reads its scores or weights")


def _check_product(product: Equation) -> None:
    """Raises `NotFused` if the program computes a product in half, or in a precision of its own."""
    if not all(map(is_float32, (*product.invars, *product.outvars))):
        raise NotFused("the program does not compute it in float32")
    if precisions(product):
        raise NotFused("the program asks for a precision of its matmuls")


def _axes(first: Equation, product: Equation, side: int, weights: Labels, fact: Fact) -> Axes:
    sizes: dict[Any, int] = dict(enumerate(first.outvars[0].aval.shape))
    scores, weights = _named(fact.axes, sizes), _named(weights, sizes)
    # The softmax is over the last axis of its input. The keys are the operand that has this axis.
    keys = scores[-1]
    both = labels_of_operands(first, _named(tuple(sizes), sizes), FEATURES)
    key = 1 if keys in both[1] else 0
    output, of_values = _labels_of_values(product, side, weights, keys)
    operands = (
        (first.invars[1 - key], both[1 - key]),
        (first.invars[key], both[key]),
        (product.invars[1 - side], of_values),
    )
    groups = _groups(scores, both[1 - key], both[key])
    axes = {*groups[0], *groups[1], keys, FEATURES}
    if not {*both[key]} - {None} == {*of_values} - {None} == axes:
        raise NotFused("its values have other axes than its keys")
    features = {var.aval.shape[labels.index(FEATURES)] for var, labels in operands}
    if len(features) != 1 or of_values.count(FEATURES) != 1:
        raise NotFused("its values have other features than its keys")
    return Axes(operands, output, groups, sizes | {FEATURES: features.pop()})


def _mask(fact: Fact, scores: Labels, groups: Sequence[Labels]) -> Mask:
    return Mask(_kind(fact, scores, groups), scores, _given_along(fact, scores, groups))


def _named(axes: Labels, sizes: Mapping[Any, int]) -> Labels:
    """Returns axes without the names of those of size 1."""
    return tuple(None if axis is None or sizes[axis] == 1 else axis for axis in axes)


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


def _check_fill(fact: Fact, fill: float) -> None:
    """Raises `NotFused` if a score that is replaced may have a weight beside one that is not."""
    if fill > MASKED:
        raise NotFused(f"a mask replaces scores by numbers that may be above {MASKED:g}")
    if fact.added and fact.base is None and fill > BELOW_BIASES:
        raise NotFused(f"a mask replaces scores that have a bias by numbers above {BELOW_BIASES:g}")
    # Where both masks cover all keys of a query, gradients flow through the added one alone.
    if fact.base is None and fact.may_be_low:
        raise NotFused(
            "one mask is added to the scores and another one replaces them, both by lowest numbers"
        )
    if fact.added and fact.base is not None and (fact.base.max(axis=-1) < fill / 2).any():
        raise NotFused("a mask replaces scores by numbers like those of its bias")


def _kind(fact: Fact, scores: Labels, groups: Sequence[Labels]) -> str:
    """Returns how an attention masks its scores."""
    if fact.fill is not None:
        _check_fill(fact, fact.fill)
    # Known only when the program runs, such as the mask of a padded batch.
    if fact.base is None:
        return "bias"
    if (fact.base == 0).all():
        return "none"
    # cuDNN makes a causal mask itself. Such a mask varies along the positions of queries and keys alone.
    varying = [label for label, size in zip(scores, fact.base.shape) if size != 1]
    if len(varying) == 2 and set(varying) == {*groups[3], *groups[4]}:
        mask = np.squeeze(fact.base)  # The keys are the last axis of the input of a softmax.
        triangle = np.tri(*mask.shape, dtype=bool)
        if np.array_equal(mask == 0, triangle) and (mask[~triangle] <= MASKED).all():
            return "causal"
    return "bias"

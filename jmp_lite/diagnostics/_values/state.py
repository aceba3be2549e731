"""The state of a step: the results that a training loop passes on as arguments of the next step."""

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from ..._dtypes import HALF_DTYPES
from ..._jaxpr import Jaxpr, dependence


class Trees(NamedTuple):
    """The arguments and results of a call as trees, and where a jaxpr has their leaves."""

    arguments: Any
    inputs: list[int | None]  # For each leaf of the arguments its index among the inputs of the jaxpr.
    results: Any
    outputs: list[int | None]  # For each leaf of the results its index among the outputs of the jaxpr.


def state_of(trees: Trees, jaxpr: Jaxpr) -> dict[int, int]:
    """Returns for each output of a jaxpr that is the new value of an input the index of that input.

    These are the largest subtrees of the results with the structure, the shapes and the dtypes of a subtree
    of the arguments that they depend on. A scalar that is returned alone is a metric; one in half may be a
    counter.
    """
    depends = dependence(jaxpr)
    candidates: dict[Any, list[range]] = collections.defaultdict(list)
    for tree, leaves in _subtrees(trees.arguments):
        candidates[_kind(tree)].append(leaves)
    pairs: dict[
        int, int
    ] = {}  # The leaves of the results that are new values, each with that of its argument.
    for tree, new in _subtrees(trees.results):
        for old in candidates[_kind(tree)] if new.start not in pairs and not _is_metric(tree) else ():
            outputs = [(trees.inputs[i], trees.outputs[n]) for i, n in zip(old, new)]
            depends_on_it = any(n is not None and number in depends[n] for number, n in outputs)
            if depends_on_it and set(pairs.values()).isdisjoint(old):
                pairs.update(zip(new, old))
                break
    state = ((trees.outputs[new], trees.inputs[old]) for new, old in pairs.items())
    return {output: number for output, number in state if output is not None and number is not None}


def _subtrees(tree: Any, first: int = 0) -> Iterator[tuple[Any, range]]:
    """Yields a tree, and then its subtrees: those with leaves, and the indexes of these among all leaves."""
    if count := len(jax.tree.leaves(tree)):
        yield tree, range(first, first + count)
    if not jax.tree_util.all_leaves([tree]):
        for child in jax.tree.leaves(tree, is_leaf=lambda node: node is not tree):
            yield from _subtrees(child, first)
            first += len(jax.tree.leaves(child))


def _kind(tree: Any) -> Any:
    """Returns the structure, and the shapes and dtypes of the leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves)


def _is_metric(tree: Any) -> bool:
    is_scalar = jax.tree_util.all_leaves([tree]) and getattr(tree, "shape", ()) == ()
    return is_scalar and getattr(tree, "dtype", None) not in HALF_DTYPES

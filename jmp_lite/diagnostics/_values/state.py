"""The state of a step: the results that a training loop passes on as arguments of the next step."""

import collections
from collections.abc import Iterator, Sequence
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


class _Node(NamedTuple):
    """A subtree of arguments or results."""

    tree: Any
    leaves: range  # The indexes of its leaves among all.

    def children(self) -> Iterator["_Node"]:
        start = self.leaves.start
        for child in jax.tree.leaves(self.tree, is_leaf=lambda node: node is not self.tree):
            count = len(jax.tree.leaves(child))
            yield _Node(child, range(start, start + count))
            start += count

    @property
    def is_leaf(self) -> bool:
        return jax.tree_util.all_leaves([self.tree])

    @property
    def is_scalar(self) -> bool:
        return self.is_leaf and getattr(self.tree, "shape", ()) == ()

    def kind(self) -> Any:
        """The structure, and the shapes and dtypes of the leaves."""
        leaves, structure = jax.tree.flatten(self.tree)
        return structure, tuple(
            (getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves
        )


def state_of(trees: Trees, jaxpr: Jaxpr) -> dict[int, int]:
    """Returns for each output of a jaxpr that is the new value of an input the index of that input.

    These are the largest subtrees of the results with the structure, the shapes and the dtypes of a subtree
    of the arguments that they depend on. A scalar that is returned alone is a metric; one in half may be a
    counter.
    """
    state = ((trees.outputs[new], trees.inputs[old]) for new, old in _pairs(trees, dependence(jaxpr)).items())
    return {output: number for output, number in state if output is not None and number is not None}


def _pairs(trees: Trees, depends: Sequence[frozenset[int]]) -> dict[int, int]:
    """Returns the leaves of the results that are new values of arguments, each with that of the arguments."""
    candidates: dict[Any, list[_Node]] = collections.defaultdict(list)
    for node in _subtrees(_Node(trees.arguments, range(len(trees.inputs)))):
        candidates[node.kind()].append(node)
    pairs: dict[int, int] = {}

    def is_new_value(node: _Node, old: _Node) -> bool:
        outputs = [trees.outputs[leaf] for leaf in node.leaves]
        known = (
            (trees.inputs[leaf], output) for leaf, output in zip(old.leaves, outputs) if output is not None
        )
        depends_on_it = any(number in depends[output] for number, output in known)
        return depends_on_it and set(pairs.values()).isdisjoint(old.leaves)

    todo = [_Node(trees.results, range(len(trees.outputs)))]
    while todo:
        node = todo.pop(0)
        is_metric = node.is_scalar and getattr(node.tree, "dtype", None) not in HALF_DTYPES
        of_kind = [] if is_metric else candidates[node.kind()]
        found = next((old for old in of_kind if is_new_value(node, old)), None)
        if found is not None:
            pairs.update(zip(node.leaves, found.leaves))
        elif not node.is_leaf:
            todo = [*node.children(), *todo]
    return pairs


def _subtrees(node: _Node) -> Iterator[_Node]:
    if not node.leaves:
        return
    yield node
    if not node.is_leaf:
        for child in node.children():
            yield from _subtrees(child)

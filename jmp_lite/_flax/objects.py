"""The adapter of NNX for `_jaxpr.arguments`: a call that changes modules, as a function of arrays."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from .._paths import argument_names

T = TypeVar("T")


def is_object(node: Any) -> bool:
    """Whether `node` is an NNX module, variable or other graph node, which a call may change in place."""
    return isinstance(node, (nnx.Pytree, nnx.Variable))


def has_modules(tree: Any) -> bool:
    """Whether a tree holds NNX objects outside of the states of `nnx.split`."""

    def is_leaf(node):
        return is_object(node) or isinstance(node, nnx.State)

    return any(map(is_object, jax.tree.leaves(tree, is_leaf=is_leaf)))


def split_objects(
    fun: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., tuple[T, Any]], tuple[Any, ...], Callable[[tuple[T, Any]], T]]:
    """Turns a call whose arguments hold NNX modules into a call of a function of arrays, for `autocast`.

    Returns a function that returns the output of `fun` and the new state of the modules, its arguments, and a
    function that takes its results, updates the modules and returns the output.
    """
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_object)
    named = dict(zip(argument_names(fun, args, kwargs, is_leaf=is_object), leaves, strict=True))
    # Split together, so that what two modules share stays shared.
    objects = {name: leaf for name, leaf in named.items() if is_object(leaf)}
    graph, state = nnx.split(objects)

    def pure(state: Any, others: dict[str, Any]) -> tuple[T, Any]:
        # Copies that belong to this trace: NNX refuses to change a module from another one.
        copies = nnx.merge(graph, state)
        before = {path: _value(leaf) for path, leaf in nnx.to_flat_state(nnx.state(copies))}
        args, kwargs = jax.tree.unflatten(structure, [(copies | others)[name] for name in named])
        output = fun(*args, **kwargs)
        # Only changed leaves are written back, since the modules may belong to an outer trace.
        after = nnx.to_flat_state(nnx.state(copies))
        changed = [(path, leaf) for path, leaf in after if before.get(path) is not _value(leaf)]
        return output, nnx.from_flat_state(changed)

    def update(returned: tuple[T, Any]) -> T:
        output, state = returned
        nnx.update(objects, state)
        return output

    return pure, (state, {name: leaf for name, leaf in named.items() if name not in objects}), update


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf

"""Maps over pytrees that know which leaves are floating: cast, select, and state classes."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._dtypes import DTypeLike, half_dtype, parse_dtype

T = TypeVar("T")
C = TypeVar("C", bound=type)

KEEP_FLOAT32_NAME = "jmp_lite.keep_float32"
"""The name of values that autocast keeps in float32. It survives every transform."""


def has_dtype(leaf: Any, kind: Any) -> bool:
    """Whether `leaf` is an array, NumPy scalar or `ShapeDtypeStruct` with a dtype of `kind`."""
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))
    return is_array and jnp.issubdtype(leaf.dtype, kind)


def is_half(leaf: Any) -> bool:
    """Whether `leaf` is an array of a floating dtype narrower than 32 bits."""
    return has_dtype(leaf, jnp.floating) and jnp.finfo(leaf.dtype).bits < 32


def cast_leaf(leaf: Any, dtype: np.dtype) -> Any:
    """Casts one leaf if it is floating; NumPy stays NumPy, a shape stays a shape."""
    if not has_dtype(leaf, jnp.floating):
        return leaf
    # A weak dtype gives way in arithmetic, so a weakly typed leaf does not have the dtype yet.
    if leaf.dtype == dtype and not getattr(leaf, "weak_type", False):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype, weak_type=False)
    return leaf.astype(dtype)


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Casts the floating leaves of `tree` to `dtype`.

    Args:
        tree: any pytree. Arrays, NumPy arrays, NumPy float scalars and `ShapeDtypeStruct`s of a
            floating dtype are cast; integers, booleans, complex numbers, PRNG keys, None, Python
            numbers and anything else come through untouched.
        dtype: a floating dtype, or its name.

    Returns:
        The same tree. A leaf that already has the dtype is returned as it is.

    Raises:
        ValueError, TypeError: `dtype` is no floating dtype.

    Examples:
        >>> jax.tree.map(lambda x: x.dtype.name, cast_floating({"w": jnp.ones(2), "n": jnp.arange(2)}, "f16"))
        {'n': 'int32', 'w': 'float16'}
    """
    target = parse_dtype(dtype)
    return jax.tree.map(lambda leaf: cast_leaf(leaf, target), tree)


def cast_to_full(tree: T) -> T:
    """Casts the floating leaves of `tree` to float32.

    Args:
        tree: any pytree. Leaves that are not floating pass through.

    Examples:
        >>> jmp.cast_to_full(jnp.ones(2, jnp.float16)).dtype
        dtype('float32')
    """
    return cast_floating(tree, jnp.float32)


def cast_to_half(tree: T) -> T:
    """Casts the floating leaves of `tree` to `half_dtype()`.

    Args:
        tree: any pytree. Leaves that are not floating pass through.

    Examples:
        >>> jmp.cast_to_half(jnp.ones(2)).dtype == jmp.half_dtype()
        True
    """
    return cast_floating(tree, half_dtype())


def at_least_float32(tree: T) -> T:
    """Casts floating leaves narrower than 32 bits to float32; float64 stays float64."""
    return jax.tree.map(lambda leaf: cast_leaf(leaf, np.dtype(np.float32)) if is_half(leaf) else leaf, tree)


@jax.custom_jvp
def reuse_cast(x: jax.Array, cast: jax.Array) -> jax.Array:
    """Returns `cast`, the half of `x`, in a way that the gradients of all its uses are summed in x's dtype.

    Without it a weight that is cast once and used many times, as in a loop or by a lookup, has its gradients
    summed in half. Nothing reads the value of `x`: what computes it is dropped.
    """
    del x
    return cast


@reuse_cast.defjvp
def _reuse_cast_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    cast = primals[1]
    return cast, lax.convert_element_type(tangents[0], cast.dtype)


def select_tree(pred: Any, a: T, b: T) -> T:
    """Returns `a` where `pred` is true and `b` where it is not, leaf by leaf.

    Both trees are computed; nothing branches, so a chosen leaf is bit-identical to its source, a
    NaN in the other tree does not reach it, and donated buffers stay in place. Use it with
    `grads_finite` to keep batch statistics or moving averages of a skipped step.

    Args:
        pred: a boolean scalar, shape `()`.
        a: a tree of arrays.
        b: a tree of the same structure, whose leaves have the shapes and dtypes of those of `a`.

    Raises:
        AssertionError: `pred` is not a boolean scalar (as in jmp).
        ValueError, TypeError: the trees differ in structure, or two leaves in shape or dtype.

    Examples:
        >>> jmp.select_tree(jnp.bool_(False), {"x": jnp.float32(1)}, {"x": jnp.float32(2)})
        {'x': Array(2., dtype=float32)}
    """
    is_flag = jnp.ndim(pred) == 0 and jnp.result_type(pred) == jnp.bool_
    assert is_flag, "expected boolean scalar"
    pred = jnp.asarray(pred)
    # Not `jnp.where`, which promotes: state keeps its dtype, or there is an error.
    return jax.tree.map(lambda x, y: lax.select(pred, jnp.asarray(x), jnp.asarray(y)), a, b)


def unwrap(tree: Any) -> Any:
    """Takes the arrays out of the variables in which Flax NNX keeps parameters and optimizer state."""
    # By its method: this package does not import Flax.
    is_variable = lambda node: hasattr(node, "get_value")
    return jax.tree.map(lambda v: v.get_value() if is_variable(v) else v, tree, is_leaf=is_variable)


STATIC = {"static": True}
"""The metadata of a dataclass field that is part of the tree's structure instead of a leaf."""


def register_state(cls: C) -> C:
    """Registers a frozen dataclass as a pytree: every field a child, a `STATIC` field structure.

    The flattening is derived from the fields, so none can be forgotten. `jax.tree_util`'s own
    `register_dataclass` rebuilds through `__init__`, whose checks would then turn down the trees
    that JAX and its users make of anything but numbers: axes, shapes, shardings, zeros.
    """
    fields = dataclasses.fields(cls)
    children = [f.name for f in fields if not f.metadata.get("static")]
    static = [f.name for f in fields if f.metadata.get("static")]

    def flatten_with_keys(state: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        keyed = [(jax.tree_util.GetAttrKey(name), getattr(state, name)) for name in children]
        return keyed, tuple(getattr(state, name) for name in static)

    def unflatten(structure: tuple[Any, ...], values: Any) -> Any:
        state = object.__new__(cls)
        for name, value in (*zip(children, values), *zip(static, structure)):
            object.__setattr__(state, name, value)
        return state

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    return cls


def replace_leaves(state: T, **changes: Any) -> T:
    """Returns `state` with some fields replaced and no check run: `dataclasses.replace` for loops."""
    copy = object.__new__(type(state))
    for field in dataclasses.fields(state):  # type: ignore[arg-type]
        value = changes[field.name] if field.name in changes else getattr(state, field.name)
        object.__setattr__(copy, field.name, value)
    return copy

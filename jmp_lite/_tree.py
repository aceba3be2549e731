"""Casts and selections over pytrees, predicates of leaves, and state classes."""

import copy
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
"""The `checkpoint_name` of values that autocast keeps in float32. It survives every transform."""


def has_dtype(leaf: Any, kind: Any) -> bool:
    """Whether `leaf` is an array, NumPy scalar or `ShapeDtypeStruct` with a dtype of `kind`."""
    # Python numbers have no dtype of their own: they take that of the array that they meet.
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))
    return is_array and jnp.issubdtype(leaf.dtype, kind)


def is_floating(value: Any) -> bool:
    """Whether a number, an array or the type of an array is floating or complex."""
    dtype = None if isinstance(value, type) else getattr(value, "dtype", None)
    has_floats = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.inexact)
    return has_floats or isinstance(value, (float, complex))


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is an array of PRNG keys, which have a dtype of their own."""
    return has_dtype(leaf, jax.dtypes.prng_key)


def is_traced(leaf: Any) -> bool:
    """Whether `leaf` is an array that has no value yet: only an array with a value is on devices."""
    try:
        return isinstance(leaf, jax.Array) and not leaf.devices()
    # A tracer has no devices: https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/core.py#L1217.
    except jax.errors.ConcretizationTypeError:
        return True


def is_half(leaf: Any) -> bool:
    """Whether `leaf` is an array of a floating dtype narrower than 32 bits."""
    return has_dtype(leaf, jnp.floating) and jnp.finfo(leaf.dtype).bits < 32


def cast_leaf(leaf: Any, dtype: np.dtype) -> Any:
    """Casts a floating leaf; an array of NumPy stays one of NumPy, and a `ShapeDtypeStruct` stays one."""
    if not has_dtype(leaf, jnp.floating):
        return leaf
    # A weakly typed leaf takes the dtype of the other operand, so it does not have its dtype yet:
    # https://github.com/jax-ml/jax/pull/7666.
    if leaf.dtype == dtype and not getattr(leaf, "weak_type", False):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype, weak_type=False)
    return leaf.astype(dtype)


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Casts the floating arrays, NumPy scalars and shapes of `tree`; Python numbers and all else stay."""
    target = parse_dtype(dtype)
    return jax.tree.map(lambda leaf: cast_leaf(leaf, target), tree)


def cast_to_full(tree: T) -> T:
    """Casts the floating leaves of `tree` to float32.

    Args:
        tree: any pytree. Its other leaves stay as they are.

    Examples:
        >>> jmp.cast_to_full(jnp.ones(2, jnp.float16)).dtype
        dtype('float32')
    """
    return cast_floating(tree, jnp.float32)


def cast_to_half(tree: T) -> T:
    """Casts the floating leaves of `tree` to `half_dtype()`.

    Args:
        tree: any pytree. Its other leaves stay as they are.

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
    """Returns `cast`, which is `x` in half. The gradients of all its uses are summed in the dtype of `x`."""
    # Nothing reads the value of `x`, so XLA removes what computes it.
    del x
    return cast


@reuse_cast.defjvp
def _reuse_cast_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    # The tangent is that of `x`, cast. Its transpose casts the cotangent of each use to the dtype of `x`, in
    # which JAX then adds them up.
    cast = primals[1]
    return cast, lax.convert_element_type(tangents[0], cast.dtype)


def select_tree(pred: Any, a: T, b: T) -> T:
    """Returns `a` where `pred` is true and `b` where it is not, leaf by leaf.

    Both trees are computed and nothing branches. The chosen leaves are bit-identical to their source,
    whatever the other tree holds, and donated buffers stay in place. Use it with `grads_finite` to keep
    the batch statistics or moving averages from before a skipped step.

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
    if jnp.ndim(pred) != 0 or jnp.result_type(pred) != jnp.bool_:
        kind = f"{jnp.result_type(pred)} of shape {jnp.shape(pred)}"
        # An `assert` would be gone under `python -O`.
        raise AssertionError(
            f"expected boolean scalar, got {kind}. For one predicate for each member: jax.vmap(select_tree)."
        )
    pred = jnp.asarray(pred)
    # Not `jnp.where`, which promotes: state keeps its dtype, or there is an error.
    return jax.tree.map(lambda x, y: lax.select(pred, jnp.asarray(x), jnp.asarray(y)), a, b)


def nodes_of(tree: Any, *classes: type[Any]) -> list[Any]:
    """Returns the nodes of these classes in a tree, at any depth, but not those inside of one another."""

    def is_node(node):
        return isinstance(node, classes)

    return list(filter(is_node, jax.tree.leaves(tree, is_leaf=is_node)))


def is_nnx_variable(node: Any) -> bool:
    """Whether `node` is a variable of Flax NNX, known by its method: this package does not import Flax."""
    return hasattr(node, "get_value")


def without_nnx_variables(tree: Any) -> Any:
    """Returns `tree` with the arrays of Flax NNX's variables in place of the variables."""

    def value(node):
        return node.get_value() if is_nnx_variable(node) else node

    return jax.tree.map(value, tree, is_leaf=is_nnx_variable)


STATIC = {"static": True}
"""The metadata of a dataclass field that is part of the tree's structure instead of a leaf."""


def register_state(cls: C) -> C:
    """Registers a frozen dataclass as a pytree: `STATIC` fields are structure, all others are children."""
    # `jax.tree_util.register_dataclass` would call `__init__` to unflatten. Its checks accept numbers only,
    # and JAX and its users also make trees of axes, shapes and shardings. JAX's own example does the same:
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/tree_util.py#L314.
    fields = dataclasses.fields(cls)
    children = [f.name for f in fields if not f.metadata.get("static")]
    static = [f.name for f in fields if f.metadata.get("static")]

    def flatten_with_keys(state: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        keyed = [(jax.tree_util.GetAttrKey(name), getattr(state, name)) for name in children]
        return keyed, tuple(getattr(state, name) for name in static)

    def unflatten(structure: tuple[Any, ...], values: Any) -> Any:
        state = object.__new__(cls)
        for name, value in (*zip(children, values), *zip(static, structure)):
            # The dataclass is frozen.
            object.__setattr__(state, name, value)
        return state

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    return cls


def replace_leaves(state: T, **changes: Any) -> T:
    """As `dataclasses.replace`, without `__init__` and its checks."""
    new = copy.copy(state)
    for name, value in changes.items():
        object.__setattr__(new, name, value)
    return new

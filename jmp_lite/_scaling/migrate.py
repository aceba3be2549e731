"""Going on from an old optimizer state, under the settings and dtypes of another script: `migrate_state`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._memory.half_params import MasterParamsState, StochasticRoundingState
from .._memory.half_state import HalfState
from .._memory.placing import misfit, placed_like
from .._memory.wrapper import as_transform
from .._paths import path_name
from .._tree import replace_leaves, without_nnx_variables
from .accumulation import check_accumulation, restart_accumulation
from .loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from .state import SkipNonfiniteState

# The states of our wrappers. One saved as a dict is known by its `inner_state` and this field.
_WRAPPERS = {
    SkipNonfiniteState: "loss_scale",
    MasterParamsState: "masters",
    StochasticRoundingState: "key",
    HalfState: "key",
}
# The fields of wrappers and of dynamic scales that `tx` may lack, and those that the old state may lack.
_MAY_GO = {"loss_scale", "key", "grad_norm", "hysteresis_left"}
_MAY_START = {*_MAY_GO, "masters", "leaf_finite", "counts", "counter"}


def migrate_state(
    tx: optax.GradientTransformation | optax.MultiSteps, params: Any, old_state: Any
) -> optax.OptState:
    """Returns a state of `tx` with the values of an old optimizer state, to continue from a checkpoint.

    The old state is that of the plain optimizer, or of the same wrappers of this package with other settings;
    `tx` may add wrappers. Settings and dtypes come from `tx`: the period of a loss scale, the number of a
    static scale, `clip_norm`, the dtypes of `with_half_state`. Values come from `old_state`: moments, counts,
    the number of a dynamic scale, masters, keys of stochastic rounding. What `tx` adds comes from
    `tx.init(params)`, such as masters, which are then made from `params`. A dynamic scale outside the new
    limits starts again, and so does an `optax.MultiSteps` inside `with_loss_scale` or `skip_nonfinite` that
    has accumulated inf or NaN.

    Args:
        tx: the optimizer of the script, an optax transform with wrappers or without.
        params: the parameters from which the run goes on.
        old_state: a live or unpickled state, or the nested dicts and lists that Orbax or `flax.serialization`
            restored without a target. Of an `nnx.Optimizer`, its `opt_state`.

    Returns:
        A state with the structure and the devices of `tx.init(params)`, of copies. Values that `tx` keeps in
        half precision are rounded to nearest. With the old settings, all values are bit for bit the old ones.

    Raises:
        ValueError: the old state lacks an array, or has an array, a master or a wrapper that `tx` lacks; an
            array has another shape or kind, or 64 bits where `tx` has 32; a live state has another class or
            `name=`; or an `optax.MultiSteps` takes fewer micro-batches than were accumulated, or sums them.
        TypeError: `tx` is not an optax transform, or the parameters or the old state are shapes.

    Examples:
        >>> params, adam = {"w": jnp.ones(2)}, optax.adam(1e-3)
        >>> _, old_state = adam.update(params, adam.init(params))
        >>> tx = jmp.with_loss_scale(jmp.with_half_state(adam, keep_float32="nu"))
        >>> opt_state = jmp.migrate_state(tx, params, old_state)
        >>> moments = opt_state.inner_state.inner_state[0]
        >>> int(moments.count), moments.mu["w"].dtype.name, moments.nu["w"].dtype.name
        (1, 'bfloat16', 'float32')
    """
    transform = as_transform("migrate_state", tx)
    new, old = without_nnx_variables(transform.init(params)), without_nnx_variables(old_state)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(old)):
        raise TypeError("migrate_state: old_state holds arrays. Got shapes: restore the arrays first.")
    state = _carry("", new, old)
    check_accumulation(transform, params, state)
    return state


def _carry(path: str, new: Any, old: Any) -> Any:
    """Returns `new`, the part of the new state at `path`, with the values of `old`."""
    # Both are walked together. Children are matched by name: a field, a key or an index, which is the same in
    # a live state and in the dicts of a checkpoint.
    if isinstance(new, (StaticLossScale, NoOpLossScale)):
        return new  # Its number is a setting of the script.
    if type(new) in _WRAPPERS and not _is_state_of(type(new), old):
        old = {"inner_state": old}  # The old state is that of what the wrapper wraps.
    parts, olds = _children(new), _children(old)
    if parts.keys() == {""}:  # An array. NNX saves one as a `value`.
        old = olds["value"] if olds.keys() == {"value"} else old
        if problem := misfit(old, new):
            raise _refused(path, problem)
        return placed_like(old, new)
    _check_class(path, new, old)
    both = _check_names(path, new, parts, olds)
    carried = [_carry(f"{path}/{n}", parts[n], olds[n]) if n in both else parts[n] for n in parts]
    # One level deep, so that classes and settings of the node come from `tx`.
    structure = jax.tree.structure(new, is_leaf=lambda node: node is not new)
    return _restart(new, structure.unflatten(carried))


def _restart(new: Any, carried: Any) -> Any:
    """Returns the node `carried`, in which values that the settings of `new` exclude start again."""
    if isinstance(new, SkipNonfiniteState):
        inner_state = restart_accumulation(new.inner_state, carried.inner_state)
        return replace_leaves(carried, inner_state=inner_state)
    if not isinstance(new, DynamicLossScale):
        return carried
    scale, start, left = carried.loss_scale, jnp.asarray(new.loss_scale), carried.hysteresis_left
    # A scale that starts below its minimum, as jmp allows, fits from there on.
    fits = (scale >= jnp.minimum(start, new.min_loss_scale)) & (scale <= new.max_loss_scale)
    left = None if left is None else jnp.minimum(left, new.hysteresis)
    return replace_leaves(carried, loss_scale=jnp.where(fits, scale, start), hysteresis_left=left)


def _check_class(path: str, new: Any, old: Any) -> None:
    """Raises a ValueError if `tx` has no wrapper there, or one of another name, or another optimizer."""
    if type(new) not in _WRAPPERS and any(_is_state_of(wrapper, old) for wrapper in _WRAPPERS):
        raise _refused(path, "is the state of a wrapper that tx lacks there")
    # A dict of a checkpoint has no name: names are structure, which is not saved.
    if isinstance(new, SkipNonfiniteState) and getattr(old, "name", new.name) != new.name:
        renamed = f"dataclasses.replace(old_state, name={new.name!r})"
        raise _refused(path, f"has the name {old.name!r} there and {new.name!r} in tx: {renamed} renames it")
    # Named tuples are the states of optax. Dicts and lists may be those of a checkpoint.
    kinds = [type(node).__name__ for node in (old, new) if hasattr(node, "_fields")]
    if len({*kinds}) == 2:
        raise _refused(path, f"is a {kinds[0]} there and a {kinds[1]} in tx")


def _check_names(path: str, new: Any, parts: dict[str, Any], olds: dict[str, Any]) -> set[str]:
    """Returns the names of the children that have arrays in both nodes; a ValueError if others matter."""
    # Only nodes with arrays count: an `EmptyState` of optax has nothing to carry over.
    wanted, given = ({name for name in nodes if jax.tree.leaves(nodes[name])} for nodes in (parts, olds))
    if type(new) in _WRAPPERS:  # A stateless optimizer may get wrappers that have a state.
        given |= wanted & olds.keys() & {"inner_state"}
    depends_on_settings = type(new) in {*_WRAPPERS, DynamicLossScale}
    lacking = wanted - given - (_MAY_START if depends_on_settings else set())
    unknown = given - wanted - (_MAY_GO if depends_on_settings else set())
    if lacking or unknown:
        raise _refused(path, f"has the parts {sorted(unknown)[:4]} there and {sorted(lacking)[:4]} in tx")
    return wanted & given


def _is_state_of(wrapper: type, old: Any) -> bool:
    """Whether `old` is a state of the class `wrapper`, live or saved as the dict of its fields."""
    if type(old) in _WRAPPERS:
        return type(old) is wrapper
    return {"inner_state", _WRAPPERS[wrapper]} <= _children(old).keys()


def _children(node: Any) -> dict[str, Any]:
    """Returns the children of a node by their names. A leaf is its own child."""
    found, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda other: other is not node)
    return {path_name(path): child for path, child in found}


def _refused(path: str, problem: str) -> ValueError:
    place = repr(path[1:]) if path else "the old state"
    return ValueError(
        f"migrate_state(tx, params, old_state): {place} {problem}. Give tx the optimizer and the parameters "
        "of the old state. To take off a wrapper, give what is inside it, such as old_state.inner_state, and "
        "for with_master_params the parameters of jmp.get_master_params(old_state, params). Or begin anew "
        "with tx.init(params)."
    )

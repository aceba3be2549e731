"""Going on from an old optimizer state, under the settings and dtypes of another script: `resume`.

The wanted state is that of the script's own `tx.init(params)`. The states of our wrappers are taken off it
and off the old state. The rest is matched by the names of fields, keys and indices, so that a state of live
objects and one of plain dicts and lists look alike. Only the links of an optax chain have no names, so they
are matched by their order. Then the wrappers are put back, with their old values.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._memory.cast_state import CastStateState
from .._memory.half_params import MasterWeightsState, StochasticRoundingState
from .._memory.master_params import placed_like
from .._memory.wrapper import as_transform
from .._paths import path_name
from .._tree import is_half, is_traced, replace_leaves, without_nnx_variables
from .accumulation import carried_accumulation, check_accumulation
from .loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from .state import SkipNonfiniteState

_OURS = (SkipNonfiniteState, MasterWeightsState, StochasticRoundingState, CastStateState)
Name = tuple[str, ...]  # The names of the keys on a path. A name may hold a slash.


def resume(
    tx: optax.GradientTransformation | optax.MultiSteps, params: Any, old_state: Any
) -> optax.OptState:
    """Returns a state of `tx` with the values of an old optimizer state, to continue from a checkpoint.

    The settings and dtypes are those of `tx`: the period of a loss scale, the number of a static scale, the
    dtypes of `cast_state`, stochastic rounding. The values are those of `old_state`: moments, counts, the
    number of a dynamic scale, masters, keys of stochastic rounding.

    The old state may be that of the plain optimizer, of other wrappers of this package around the same
    optimizer, or of `optax.apply_if_finite`. Values are matched by the names of fields and parameters, scales
    by their `name=`, and the links of a chain by their order, so that a transform without arrays, such as a
    clip, may be added or removed.

    Missing values come from `tx.init(params)`: the counts of a new scale, and new masters, which are made
    from `params`. Old wrappers that `tx` does not have are dropped. Masters are only dropped if the
    parameters have their values, as those of `jmp.master_params` do. A dynamic scale beyond the limits of the
    new one begins anew. So do the keys, if `tx` rounds in other places, and gradients with inf or NaN that
    `optax.MultiSteps` has accumulated, in a wrapper around it.

    Args:
        tx: the optimizer of the script, an optax transform with wrappers or without.
        params: the parameters from which the run goes on.
        old_state: a live or unpickled state, or the nested dicts and lists that Orbax or `flax.serialization`
            restored without a target. Of an `nnx.Optimizer`, its `opt_state`.

    Returns:
        A state with the structure of `tx.init(params)`. Its arrays are copies, on the same devices as those
        of `tx.init(params)`. Values that rest in half precision in `tx` are rounded to nearest. With the old
        settings, all values are bit for bit the old ones.

    Raises:
        ValueError: the old state lacks an array that `tx` needs, has one that `tx` does not know, or has one
            of another shape or kind, or of 64 bits where `tx` has 32; or a live state is that of another
            optimizer; or masters would be lost. The message names them. Or an `optax.MultiSteps` of `tx`
            takes fewer micro-batches for a step than have been accumulated.
        TypeError: `tx` is not an optax transform, or the parameters are shapes.

    Examples:
        >>> params = {"w": jnp.ones(2)}
        >>> adam = optax.adam(1e-3)
        >>> _, old_state = adam.update(params, adam.init(params))
        >>> tx = jmp.with_loss_scale(jmp.cast_state(adam, keep_float32="nu"))
        >>> opt_state = jmp.resume(tx, params, old_state)
        >>> moments = opt_state.inner_state.inner_state[0]
        >>> int(moments.count), moments.mu["w"].dtype.name, moments.nu["w"].dtype.name
        (1, 'bfloat16', 'float32')
    """
    new_state = as_transform("resume", tx).init(params)
    new, old = without_nnx_variables(new_state), without_nnx_variables(old_state)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(old)):
        raise TypeError(
            "resume: old_state holds arrays. Got shapes, as from jax.eval_shape: restore it first."
        )
    wrappers = ([node for node in _nodes(state) if _is_ours(_fields(node))] for state in (new, old))
    carrying = _Carrying(without_nnx_variables(params), *wrappers)
    # `with_loss_scale` replaces `optax.apply_if_finite`, so its level is taken off, unless `tx` has one too.
    stays = any(isinstance(node, optax.ApplyIfFiniteState) for node in _nodes(new))
    is_if_finite = lambda fields: not stays and fields.keys() == set(optax.ApplyIfFiniteState._fields)
    is_level = lambda fields: _is_ours(fields) or is_if_finite(fields)
    state = carrying.wrapped(new, carrying.values((), _plain(new, is_level), _plain(old, is_level)))
    carrying.check_dropped_masters()
    carrying.raise_problems()
    check_accumulation(as_transform("resume", tx), params, state)
    return state


@dataclasses.dataclass
class _Carrying:
    """Carries the values of one old state over."""

    params: Any
    new_wrappers: list[Any]  # The states of our wrappers, from the outermost to the innermost.
    old_wrappers: list[Any]
    missing: list[str] = dataclasses.field(default_factory=list)  # The paths that only the new state has.
    unknown: list[str] = dataclasses.field(default_factory=list)  # The paths that only the old state has.
    others: list[str] = dataclasses.field(default_factory=list)  # Sentences about all else.

    def __post_init__(self) -> None:
        self.in_params = {optax.MaskedNode, *map(type, _nodes(self.params))}

    def values(self, path: Name, new: Any, old: Any) -> Any:
        """Returns `new` with the values of `old`, both without our wrappers. Errors name `path`."""
        below, structure = _children(new)
        if structure is None:
            return self.leaf(path, new, old)
        wanted, given = _filled(below), _filled(_children(old)[0])
        if wanted.keys() != given.keys():
            links, chain = _named(new, lambda node: type(node) is not tuple)
            may_be_chain = self.is_state(new) and (type(new) is tuple or _is_numbered(old))
            if may_be_chain and len(names := _filled(links)) == len(olds := _links(old)):
                return self.each(path, links, chain, dict(zip(names, olds, strict=True)))
            self.missing += ["/".join(path + name) for name in wanted if name not in given]
            self.unknown += ["/".join(path + name) for name in given if name not in wanted]
        elif self.is_state(new) and _is_record(old) and type(old).__name__ != type(new).__name__:
            kinds = f"a {type(old).__name__} there and a {type(new).__name__} in tx"
            self.others.append(f"{'/'.join(path)!r} is {kinds}")
        return self.each(path, below, structure, {name: given[name] for name in wanted if name in given})

    def each(self, path: Name, parts: list[tuple[Name, Any]], structure: Any, olds: dict[Name, Any]) -> Any:
        """Returns a tree of `parts`, with the old values of those that `olds` has."""
        return structure.unflatten(
            [self.values(path + name, part, olds[name]) if name in olds else part for name, part in parts]
        )

    def is_state(self, new: Any) -> bool:
        """Whether a node is the state of a transform or chain, whose class no node of the parameters has."""
        if type(new) is tuple or isinstance(new, dict):  # A dict is the state of `optax.named_chain`.
            return bool(new) and all(map(self.is_state, _fields(new).values()))
        return _is_record(new) and type(new) not in self.in_params

    def leaf(self, path: Name, new: Any, old: Any) -> Any:
        """Returns the value of `old` with the dtype and the devices of `new`."""
        name = "/".join(path)
        if (fields := _fields(old)).keys() == {"value"}:  # A variable of NNX, saved.
            old = fields["value"]
        if not (hasattr(old, "dtype") or isinstance(old, (bool, int, float))):
            self.others.append(f"it has {type(old).__name__} for {name!r}")
        elif np.shape(old) != np.shape(new):
            self.others.append(f"{name!r} has the shape {np.shape(old)} there and {np.shape(new)} in tx")
        elif not hasattr(new, "dtype"):  # A Python number.
            return old
        elif not _holds(new.dtype, dtype := getattr(old, "dtype", None) or np.min_scalar_type(old)):
            self.others.append(f"{name!r} is {dtype} there and {new.dtype} in tx")
        elif jnp.issubdtype(new.dtype, jax.dtypes.extended):
            return jnp.array(old, copy=True)
        else:
            return placed_like(old, new)
        return new

    def wrapped(self, new: Any, inner: Any) -> Any:
        """Returns `inner` inside the wrappers of `new`, which get their old values."""
        is_wrapper = lambda node: isinstance(node, _OURS)
        put = lambda node, part: self.wrapper(node, part) if is_wrapper(node) else part
        return jax.tree.map(put, new, inner, is_leaf=is_wrapper)

    def wrapper(self, new: Any, inner: Any) -> Any:
        """Returns the state `new` of a wrapper with its old values, around the state `inner`."""
        inner = self.wrapped(new.inner_state, inner)
        if isinstance(new, MasterWeightsState):
            return MasterWeightsState(self.masters(new.masters), inner)
        if isinstance(new, SkipNonfiniteState):
            is_multi_steps = lambda node: isinstance(node, optax.MultiStepsState)
            inner = jax.tree.map(carried_accumulation, new.inner_state, inner, is_leaf=is_multi_steps)
            return replace_leaves(new, inner_state=inner, **self.skipping(new))
        old = self.same(new, "key")
        key = new.key if old is None else self.values(("key",), new.key, old["key"])
        return new._replace(inner_state=inner, key=key)

    def same(self, new: Any, field: str) -> dict[str, Any] | None:
        """Returns the fields of the old wrapper with `field` that has the name of `new`."""
        # No saved form keeps the names. Then it is the old wrapper at the position of `new` among its kind.
        news, olds = (_with_field(nodes, field) for nodes in (self.new_wrappers, self.old_wrappers))
        names, old_names = ([getattr(node, "name", None) for node in nodes] for nodes in (news, olds))
        if len(olds) > 1 and any(old_names) and names != old_names:
            found = [old for old, name in zip(olds, old_names, strict=True) if name == new.name]
        else:
            found = [old for node, old in zip(news, olds) if node is new and len(news) == len(olds)]
        if len(found) != 1 and olds and field == "loss_scale":
            self.others.append(f"its loss scales or skips named {old_names} lack that of {new.name!r}")
        return _fields(found[0]) if len(found) == 1 else None

    def masters(self, new: Any) -> Any:
        """Returns the masters `new` with the values of the old ones, by the names of the parameters."""
        old = {k: v for node in self.old_wrappers for k, v in _saved(_fields(node).get("masters"))[0]}
        known = {k for node in self.new_wrappers for k, _ in _saved(getattr(node, "masters", None))[0]}
        # A parameter that is no longer in half precision needs no master.
        known |= {name for name, param in _saved(self.params)[0] if not is_half(param)}
        self.unknown += ["/".join(("masters", *name)) for name in old if name not in known]
        return self.each(("masters",), *_saved(new), old)

    def check_dropped_masters(self) -> None:
        """Notes the old masters that `tx` does not keep, unless the parameters have their values."""
        kept = {k for node in self.new_wrappers for k, _ in _saved(getattr(node, "masters", None))[0]}
        params = dict(_saved(self.params)[0])
        lost = [
            "/".join(name)
            for node in self.old_wrappers
            for name, master in _saved(_fields(node).get("masters"))[0]
            if name in params and name not in kept and not _is_same(params[name], master)
        ]
        if lost:
            self.others.append(
                f"tx would drop the float32 masters of {_some(lost)}, from which the parameters differ. Cast "
                "these back to their old dtypes, or give jmp.master_params(old_state, params) for float32"
            )

    def skipping(self, new: SkipNonfiniteState) -> dict[str, Any]:
        """Returns the values of the fields of `new`, but for the inner state."""
        if (old := self.same(new, "loss_scale")) is None:
            return {}
        values = {"loss_scale": self.loss_scale(new.loss_scale, old.get("loss_scale"))}
        for name in ("leaf_finite", "grad_norm", "counts"):
            value, before = getattr(new, name), jax.tree.leaves(old.get(name))
            # The old flags are of no use if the wrapper now has other parameters.
            if value is not None and before and (name != "leaf_finite" or before[0].shape == value.shape):
                values[name] = self.leaf((name,), value, before[0])
        return values

    def loss_scale(self, new: Any, old: Any) -> Any:
        """Returns the loss scale `new`, with the values of `old` if it is a dynamic one."""
        values, _ = _saved(old)
        if isinstance(new, (StaticLossScale, NoOpLossScale)) or not values:
            return new  # The number of a static scale is a setting of the script.
        carried = self.each(("loss_scale",), *_saved(new), dict(values))
        if not isinstance(carried, DynamicLossScale):
            return carried
        scale, start = carried.loss_scale, jnp.asarray(new.loss_scale)
        least = jnp.minimum(start, np.float32(new.min_loss_scale))
        fits = (scale >= least) & (scale <= np.float32(new.max_loss_scale))
        left = carried.hysteresis_left
        return replace_leaves(
            carried,
            loss_scale=jnp.where(fits, scale, start),
            hysteresis_left=None if left is None else jnp.minimum(left, jnp.int32(new.hysteresis)),
        )

    def raise_problems(self) -> None:
        """Raises a ValueError that names what could not be carried over, if there is anything."""
        kinds = (("it lacks", self.missing), ("tx does not know its", self.unknown))
        problems = [f"{said} {_some(names)}" for said, names in kinds if names]
        if problems := problems + self.others[:4]:
            raise ValueError(
                "resume(tx, params, old_state): the values of the old state do not fit the optimizer: "
                f"{'; '.join(problems)}. Give tx the optimizer and the parameters of the old state, cast its "
                "arrays of 64 bits yourself, or begin anew with tx.init(params)."
            )


def _some(names: list[str]) -> str:
    return f"{', '.join(map(repr, names[:6]))}{f' and {len(names) - 6} more' if len(names) > 6 else ''}"


def _is_same(param: Any, master: Any) -> bool:
    """Whether a parameter has the values of its master. Inside `jit`, where values are not known, it has."""
    same = (jnp.asarray(param, jnp.float32) == jnp.asarray(master)).all()
    return is_traced(same) or bool(same)


def _holds(new: Any, old: Any) -> bool:
    """Whether numbers of the dtype `old` may become `new`: only half precision is asked for, and rounds."""
    if jnp.issubdtype(new, jax.dtypes.extended) or jnp.issubdtype(old, jax.dtypes.extended):
        return new == old
    for kind in (jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(new, kind):
            bits = jnp.finfo(new).bits
            return jnp.issubdtype(old, kind) and (bits < 32 or bits >= jnp.finfo(old).bits)
    return (new == jnp.bool_) == (old == jnp.bool_) and np.can_cast(old, new)


def _nodes(tree: Any) -> Iterator[Any]:
    """Yields the nodes and leaves of `tree`, each before those below it."""
    yield tree
    for _, child in _children(tree)[0]:
        yield from _nodes(child)


def _plain(state: Any, is_level: Callable[[dict[str, Any]], bool]) -> Any:
    """Returns `state` with each level of a kind replaced by its inner state."""
    while is_level(fields := _fields(state)):
        state = fields["inner_state"]
    below, structure = _children(state)
    return state if structure is None else structure.unflatten([_plain(c, is_level) for _, c in below])


def _is_record(node: Any) -> bool:
    return hasattr(node, "_fields") or dataclasses.is_dataclass(node)


def _links(old: Any) -> list[Any]:
    """Returns the links of an old chain, or chain of chains, that have arrays, in their order."""
    if not _is_numbered(old):
        return [old] if jax.tree.leaves(old) else []
    below = sorted(_fields(old).items(), key=lambda child: int(child[0]))  # A dict has "10" before "2".
    return [link for _, child in below for link in _links(child)]


def _is_numbered(state: Any) -> bool:
    """Whether an old state looks like that of a chain: a tuple, or the list or dict that it was saved as."""
    below = _fields(state)
    # A tuple with None is one of parameters. A chain would have `optax.EmptyState()`.
    has_none = type(state) is tuple and any(child is None for child in state)
    return bool(below) and all(map(str.isdigit, below)) and not has_none


def _saved(tree: Any) -> tuple[list[tuple[Name, Any]], Any]:
    """As `_named`, for a tree that NNX may have saved with each array as the `value` of a variable."""
    leaves, structure = _named(tree)
    return [(name[:-1] if name[-1:] == ("value",) else name, leaf) for name, leaf in leaves], structure


def _is_ours(fields: dict[str, Any]) -> bool:
    """Whether fields are those of the state of a wrapper, maybe from an older version of it."""
    rounds = ({"inner_state", "masters"}, {"inner_state", "key"})
    return fields.keys() >= {"inner_state", "loss_scale"} or fields.keys() in rounds


def _with_field(nodes: list[Any], field: str) -> list[Any]:
    """Returns the wrappers that have a field: with `key`, those that round stochastically."""
    is_used = lambda node: field == "loss_scale" or jax.tree.leaves(_fields(node)[field])
    return [node for node in nodes if field in _fields(node) and is_used(node)]


def _fields(node: Any) -> dict[str, Any]:
    """Returns the children of a node by their names."""
    return {name: child for (name,), child in _children(node)[0]}


def _filled(parts: list[tuple[Name, Any]]) -> dict[Name, Any]:
    """Returns the parts that have arrays, by their names."""
    return {name: part for name, part in parts if jax.tree.leaves(part)}


def _children(node: Any) -> tuple[list[tuple[Name, Any]], Any]:
    """Returns the children of a node with their names, and its structure, which is None for a leaf."""
    below, structure = _named(node, lambda other: other is not node)
    return ([], None) if below and not below[0][0] else (below, structure)


def _named(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[tuple[Name, Any]], Any]:
    """Returns the leaves of `tree` with the names of the keys on their paths, and the structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(tuple(path_name((key,)) for key in path), leaf) for path, leaf in leaves], structure

"""Going on from an old optimizer state, under the settings and dtypes of another script: `resume`.

The script's own `tx.init(params)` gives the wanted state. The old state is read by the names of its fields,
so that a state of live objects and one of plain dicts and lists look alike. The levels of our wrappers are
taken off both, and the values below them are matched by name.
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
from .._memory.master_params import like
from .._memory.wrapper import as_transform, check_init
from .._paths import join, named_leaves, path_name
from .._tree import replace_leaves, unwrap
from .loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from .state import SkipNonfiniteState

_OURS = (SkipNonfiniteState, MasterWeightsState, StochasticRoundingState, CastStateState)
_KINDS = (jnp.floating, jnp.complexfloating, jnp.integer, jnp.bool_)


def resume(
    tx: optax.GradientTransformation | optax.MultiSteps, params: Any, old_state: Any
) -> optax.OptState:
    """Returns a state of `tx` with the values of an old optimizer state, to go on from a checkpoint.

    The settings and dtypes are those of `tx`: the period of a loss scale, the number of a static scale, the
    dtypes of `cast_state`, stochastic rounding. The values are those of `old_state`: moments, counts, the
    number of a dynamic scale, masters, keys of stochastic rounding.

    The old state may be that of the plain optimizer, or of other wrappers of this package around the same
    optimizer. What the old state does not have is as in `tx.init(params)`: counts of a scale that was not
    there, and masters, which come from `params`. The old wrappers that `tx` does not have are dropped; the
    masters too, so take float32 parameters from `jmp.master_params` before. A dynamic scale beyond the limits
    of the new one begins anew. If `tx` rounds in other places than the old optimizer, its keys begin anew.

    Args:
        tx: the optimizer of the script, an optax transform with wrappers or without.
        params: the parameters from which the run goes on.
        old_state: a state that is live or was unpickled; or what Orbax or `flax.serialization` restored
            without a target, nested dicts and lists. Of an `nnx.Optimizer` its `opt_state`.

    Returns:
        A state as of `tx.init(params)`. Its arrays are copies, on the devices of those of `tx.init(params)`.
        A value that becomes narrower is rounded to nearest. With the settings of before the values are those
        of before, bit for bit.

    Raises:
        ValueError: the old state lacks an array that `tx` needs, has one that `tx` does not know, or has one
            of another shape or kind. All are named.
        TypeError: `tx` is no optax transform, or the parameters are shapes.

    Examples:
        >>> params = {"w": jnp.ones(2)}
        >>> adam = optax.adam(1e-3)
        >>> _, old_state = adam.update(params, adam.init(params))
        >>> tx = jmp.with_loss_scale(jmp.cast_state(adam, keep_float32="nu"))
        >>> opt_state = jmp.resume(tx, params, old_state)
        >>> moments = opt_state.inner_state.inner_state[0]
        >>> int(moments.count), moments.mu["w"].dtype.name, moments.nu["w"].dtype.name
        (1, 'bfloat16', 'float32')

    Guide: docs/loss-scaling.md.
    """
    transform = as_transform("resume", tx)
    check_init("resume", params)
    new, old = unwrap(transform.init(params)), unwrap(old_state)
    carried = _Carrying(list(_wrappers(new)), list(_wrappers(old)))
    state = carried.node("", new, _plain(old))
    carried.raise_problems()
    return state


@dataclasses.dataclass
class _Carrying:
    """Carries the values of one old state over.

    Attributes:
        new_wrappers, old_wrappers: the fields of each state of our wrappers, from the outermost on.
        missing, unknown: the paths that only one of the two has.
        others: what else could not be carried over.
    """

    new_wrappers: list[dict[str, Any]]
    old_wrappers: list[dict[str, Any]]
    missing: list[str] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    others: list[str] = dataclasses.field(default_factory=list)

    def node(self, path: str, new: Any, old: Any) -> Any:
        """Returns `new` with the values of `old`. `path` is for errors."""
        if isinstance(new, _OURS):
            inner = self.node(path, new.inner_state, old)
            return self.wrapper(new)(inner)
        below, structure = _children(new)
        if structure is None:
            return self.leaf(path, new, old)
        pairs = self.pairs(path, dict(below), new, old)
        return structure.unflatten(
            [
                self.node(join(path, name), child, pairs[name]) if name in pairs else child
                for name, child in below
            ]
        )

    def pairs(self, path: str, below: dict[str, Any], new: Any, old: Any) -> dict[str, Any]:
        """Returns the part of `old` for each child of `new`, None for one without arrays."""
        wanted, given = _filled(below), _filled(_fields(old) or {})
        empty = dict.fromkeys(below.keys() - wanted.keys())
        if wanted.keys() == given.keys():
            return empty | given
        # Transforms without state, such as a clip, may come and go. The places in a masked tree may not.
        is_chain = type(new) is tuple and not any(isinstance(n, optax.MaskedNode) for n in below.values())
        are_numbered = all(name.isdigit() for name in given)
        if is_chain and given and are_numbered and len(wanted) == len(given):
            return empty | dict(zip(wanted, given.values(), strict=True))
        # One level more on one side, such as that of a chain.
        if is_chain and len(wanted) == 1 and _is_one_level_more(wanted, given):
            return empty | dict.fromkeys(wanted, old)
        if len(given) == 1 and (are_numbered or "inner_state" in given) and _is_one_level_more(given, wanted):
            return self.pairs(path, below, new, *given.values())
        self.missing += [join(path, name) for name in wanted if name not in given]
        self.unknown += [join(path, name) for name in given if name not in wanted]
        return empty | {name: given[name] for name in wanted.keys() & given.keys()}

    def leaf(self, path: str, new: Any, old: Any) -> Any:
        """Returns the value of `old` with the dtype of `new`, on its devices."""
        while len(fields := _filled(_fields(old) or {})) == 1:
            (old,) = fields.values()
        if _fields(old) is not None or not (hasattr(old, "dtype") or isinstance(old, (bool, int, float))):
            self.others.append(f"it has {type(old).__name__} for {path!r}")
        elif np.shape(old) != np.shape(new):
            self.others.append(f"{path!r} has the shape {np.shape(old)} there and {np.shape(new)} in tx")
        elif not hasattr(new, "dtype"):  # A Python number.
            return old
        elif jnp.issubdtype(new.dtype, jax.dtypes.extended) and new.dtype == getattr(old, "dtype", None):
            return jnp.array(old, copy=True)
        elif not any(
            jnp.issubdtype(new.dtype, kind) and jnp.issubdtype(jnp.result_type(old), kind) for kind in _KINDS
        ):
            self.others.append(f"{path!r} is {jnp.result_type(old)} there and {new.dtype} in tx")
        else:
            return like(new, old)
        return new

    def wrapper(self, new: Any) -> Any:
        """Returns a function that puts an inner state and the old values of its own into `new`."""
        if isinstance(new, MasterWeightsState):
            return lambda inner: MasterWeightsState(self.masters(new.masters), inner)
        if isinstance(new, SkipNonfiniteState):
            return lambda inner: replace_leaves(new, inner_state=inner, **self.skipping(new))
        old = self.same(new, lambda fields: bool(jax.tree.leaves(fields.get("key"))))
        key = new.key if old is None else self.node("key", new.key, old["key"])
        return lambda inner: new._replace(inner_state=inner, key=key)

    def same(self, new: Any, is_kind: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        """Returns the old state that stands where `new` stands among the wrappers of one kind."""
        news, olds = (list(filter(is_kind, ws)) for ws in (self.new_wrappers, self.old_wrappers))
        indices = [index for index, fields in enumerate(news) if fields["inner_state"] is new.inner_state]
        return olds[indices[0]] if indices and len(news) == len(olds) else None

    def masters(self, new: Any) -> Any:
        """Returns the masters `new` with the values of all old masters, by the paths of the parameters."""
        by_path = {k: v for fields in self.old_wrappers for k, v in _named(fields.get("masters")).items()}
        return self.by_name("masters", new, by_path)

    def by_name(self, field: str, new: Any, values: dict[str, Any]) -> Any:
        """Returns `new` with those of its leaves that `values` has."""
        carried = [
            self.leaf(join(field, name), leaf, values[name]) if name in values else leaf
            for name, leaf in _named(new).items()
        ]
        return jax.tree.unflatten(jax.tree.structure(new), carried)

    def skipping(self, new: SkipNonfiniteState) -> dict[str, Any]:
        """Returns the values of the fields of `new`, but for the inner state."""
        old = self.same(new, _skips)
        if old is None:
            if any(map(_skips, self.old_wrappers)):
                self.others.append("it has another number of with_loss_scale and skip_nonfinite than tx")
            return {}
        values = {"loss_scale": self.loss_scale(new.loss_scale, old.get("loss_scale"))}
        for name in ("leaf_finite", "grad_norm", "counts"):
            if getattr(new, name) is not None and old.get(name) is not None:
                values[name] = self.leaf(name, getattr(new, name), old[name])
        return values

    def loss_scale(self, new: Any, old: Any) -> Any:
        """Returns the loss scale `new`, with the values of `old` if it is one that changes."""
        values = _named(old)
        if isinstance(new, (StaticLossScale, NoOpLossScale)) or not values:
            return new  # The number of a static scale is a setting.
        carried = self.by_name("loss_scale", new, values)
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
        """Raises a ValueError that names what could not be carried over, if there is such a thing."""
        problems = [
            f"{sentence} {', '.join(map(repr, names[:6]))}{' and others' if len(names) > 6 else ''}"
            for sentence, names in (("it lacks", self.missing), ("tx does not know its", self.unknown))
            if names
        ]
        if problems := problems + self.others[:4]:
            raise ValueError(
                "resume(tx, params, old_state): the values of the old state do not fit the optimizer: "
                f"{'; '.join(problems)}. Give tx the optimizer and the parameters of the old state, or begin "
                "anew with tx.init(params)."
            )


def _wrappers(state: Any) -> Iterator[dict[str, Any]]:
    """Yields the states of our wrappers in `state` by their fields, from the outermost on."""
    fields = _fields(state)
    if fields is None:
        return
    if _is_ours(fields):
        yield fields
        yield from _wrappers(fields["inner_state"])
        return
    for child in fields.values():
        yield from _wrappers(child)


def _plain(state: Any) -> Any:
    """Returns `state` without the levels of our wrappers."""
    while (fields := _fields(state)) and _is_ours(fields):
        state = fields["inner_state"]
    below, structure = _children(state)
    return state if structure is None else structure.unflatten([_plain(child) for _, child in below])


def _is_one_level_more(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    """Whether `inner` may be what the only child of `outer` has."""
    (child,) = outer.values()
    return not outer.keys() & inner.keys() or _filled(_fields(_plain(child)) or {}).keys() == inner.keys()


def _named(tree: Any) -> dict[str, Any]:
    """Returns the leaves of `tree` by their names. NNX saves each array as the `value` of a variable."""
    return {name.removesuffix("/value"): leaf for name, leaf in named_leaves(tree)}


def _is_ours(fields: dict[str, Any]) -> bool:
    """Whether fields are those of a wrapper's state."""
    return _skips(fields) or set(fields) in ({"inner_state", "masters"}, {"inner_state", "key"})


def _skips(fields: dict[str, Any]) -> bool:
    """Whether fields are those of a `SkipNonfiniteState`, which may be of an older version."""
    return fields.keys() >= {"inner_state", "loss_scale"}


def _fields(node: Any) -> dict[str, Any] | None:
    """Returns the children of a tree's node by their names; None of a leaf."""
    below, structure = _children(node)
    return None if structure is None else dict(below)


def _children(node: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Returns the children of a tree's node with their names, and its structure, which is None for a leaf."""
    below, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda other: other is not node)
    if below and not below[0][0]:
        return [], None
    return [(path_name(path), child) for path, child in below], structure


def _filled(children: dict[str, Any]) -> dict[str, Any]:
    """Returns the children that have arrays, apart from those of our wrappers."""
    return {name: child for name, child in children.items() if jax.tree.leaves(_plain(child))}

"""An optimizer whose moments rest in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._dtypes import DTypeLike, parse_dtype
from .._jaxpr import dependence
from .._paths import as_patterns, matches, named_leaves, nearest_paths, path_name
from .._tree import at_least_float32, cast_leaf, has_dtype, is_half, nodes_of
from .half_params import MasterParamsState
from .rounding import AxisName, first_key, key_of_shard, next_key, round_leaf
from .wrapper import MIGRATE, Transform, as_transform, check_same_structure, check_update


class HalfState(NamedTuple):
    """The state of `with_half_state`."""

    inner_state: Any  # That of the wrapped transform, with arrays in half precision.
    key: Any  # The `RoundingKey` of the next step; None without stochastic rounding.


def with_half_state(
    inner: optax.GradientTransformation | optax.MultiSteps,
    dtype: DTypeLike = "bfloat16",
    *,
    keep_float32: str | Iterable[str] = (),
    stochastic_rounding: bool = True,
    key: int | jax.Array | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Keeps an optimizer's floating state in bfloat16: widened for the update, then rounded stochastically.

    AdamW's two moments then need 4 bytes for each parameter instead of 8. Only float32 arrays rest in
    bfloat16. Scalars stay float32, and so do arrays whose shape does not follow that of the parameters, such
    as the coefficients of `optax.contrib.muon`, and arrays that `init` makes of the values of the parameters
    (`optax.contrib.mechanize`, `prodigy`, `schedule_free`): bfloat16 would round away how far the parameters
    have moved from them.

    The state is rounded back with `stochastic_round`, so that means are right on average. Rounded to nearest,
    Adam's second moment would not decay: 0.999 times a bfloat16 number rounds to the same number. After one
    gradient of 1 and 2,000 of 0 it would be 9.99e-4, where float32 and stochastic rounding have 1.35e-4.

    Master weights must stay float32, so `with_half_state` goes inside:

        tx = jmp.with_master_params(jmp.with_half_state(optax.adamw(3e-4)))

    Args:
        inner: an optax transform, or an `optax.MultiSteps`.
        dtype: `bfloat16`; or `float32`, which casts nothing, so that one script can do both.
        keep_float32: patterns for the paths in the state of `inner` that stay float32, as in the rules of a
            policy. `"nu"` selects Adam's second moment, `"embedding"` both moments of an embedding, and
            `"nu/**/embedding"` one of them.
        stochastic_rounding: False rounds to nearest, for states whose changes are large, such as momentum.
        key: an integer or a PRNG key for stochastic rounding, as in `with_stochastic_rounding`; None is 0.
        axis_name: as in `with_stochastic_rounding`.

    Returns:
        A transform. `inner` gets its state, gradients and parameters in float32.

    Raises:
        ValueError: `dtype` is another dtype, or `key` was given with `stochastic_rounding=False`; from
            `init`, a pattern of `keep_float32` matches no array, or `inner` holds master weights; from
            `update`, the state is that of other settings, or a gradient has another shape than its parameter.
        TypeError: `inner` is not an optax transform, `dtype` is not a dtype, `key` is not a key, or
            `keep_float32` has something that is not a string; from `init`, the parameters are shapes; from
            `update`, the state is not that of this transform.

    Examples:
        >>> tx = jmp.with_half_state(optax.adam(1e-3), "bfloat16", keep_float32="nu")
        >>> state = tx.init({"w": jnp.ones(2)}).inner_state[0]
        >>> state.mu["w"].dtype.name, state.nu["w"].dtype.name, state.count.dtype.name
        ('bfloat16', 'float32', 'int32')
    """
    made_by = "with_half_state"
    transform = as_transform(made_by, inner)
    target = _checked_dtype(dtype)
    patterns = as_patterns(
        keep_float32, f'{made_by}: keep_float32 takes patterns such as "nu" or "nu/**/head"'
    )
    if key is not None and not stochastic_rounding:
        raise ValueError(f"{made_by}: key= is for stochastic rounding, which is off. Got {key!r:.200}.")
    key = 0 if key is None else key

    def rests(path: tuple[Any, ...], may_rest: bool) -> bool:
        """Whether a leaf rests in `target`. `may_rest` is from `_read_init`."""
        kept = any(matches(pattern, path_name(path)) for pattern in patterns)
        return may_rest and target != jnp.float32 and not kept

    def init(params: Any) -> Any:
        state = transform.init(at_least_float32(params))
        if nodes_of(state, MasterParamsState):
            raise ValueError(
                "with_half_state(inner): inner holds float32 master weights, which are of no use in "
                "bfloat16. Put with_half_state inside: "
                "jmp.with_master_params(jmp.with_half_state(optax.adamw(3e-4)))."
            )
        _check_patterns_match(patterns, state)
        _, may_rest = _read_init(transform.init, params)

        def cast(path, leaf, may_rest):
            return cast_leaf(leaf, target) if rests(path, may_rest) else leaf

        cast_inner = jax.tree_util.tree_map_with_path(cast, state, may_rest)
        return HalfState(cast_inner, first_key(made_by, key) if stochastic_rounding else None)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        check_update(made_by, HalfState, state, params)
        # An optimizer that needs no parameters may be called without them. Gradients have the same shapes.
        shapes, may_rest = _read_init(transform.init, updates if params is None else params)
        resting = jax.tree_util.tree_map_with_path(rests, may_rest)
        _check_settings(state, shapes, resting, target, stochastic_rounding)

        def widen(leaf, rest):
            return leaf.astype(jnp.float32) if rest else leaf

        wide = jax.tree.map(widen, state.inner_state, resting)
        # Adafactor rounds its moments to the dtype of the parameters, so these are widened, too:
        # https://github.com/google-deepmind/optax/blob/v0.2.8/optax/_src/factorized.py#L187.
        updates, params = at_least_float32((updates, params))
        updates, new = transform.update(updates, wide, params, **extra_args)
        check_same_structure(new, wide)
        new_key = None if state.key is None else next_key(state.key)
        return updates, HalfState(_rounded(new, resting, target, state.key, axis_name), new_key)

    return Transform(init, update)


def _rounded(state: Any, resting: Any, target: np.dtype, key: Any, axis_name: Any) -> Any:
    """Returns a state with the leaves that rest in `target` rounded to it."""
    leaves, structure = jax.tree.flatten(state)
    for index, rest in enumerate(structure.flatten_up_to(resting)):
        if rest:
            leaf, leaf_key = leaves[index], key_of_shard(key, axis_name, leaves[index])
            # `round_leaf` gives numbers that `target` holds, so that the cast after it is exact.
            leaves[index] = round_leaf(leaf, target, leaf_key, index).astype(target)
    return structure.unflatten(leaves)


def _read_init(init: Callable[[Any], Any], params: Any) -> tuple[Any, Any]:
    """Returns the shapes of the state that `init` makes, and whether each leaf may rest in half."""
    params = at_least_float32(params)
    traced, shapes = jax.make_jaxpr(init, return_shape=True)(params)
    # The jaxpr shows which arrays are made from the values of the parameters. The values cannot show it: a
    # bias of zeros equals its moment, and there are no values inside `jit`.
    # A moment is as large as its parameter, and grows with the parameters. Scalars and coefficients do not.
    larger = jax.eval_shape(init, jax.tree.map(_twice_as_large, params))
    shape_of = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(larger)}
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    may_rest = [
        has_dtype(leaf, jnp.float32) and not params_read and leaf.shape != shape_of.get(path)
        for (path, leaf), params_read in zip(leaves, dependence(traced), strict=True)
    ]
    return shapes, jax.tree.unflatten(jax.tree.structure(shapes), may_rest)


def _twice_as_large(leaf: Any) -> Any:
    """Returns the shape of an array that is twice as long along each axis, which no `reshape` minds."""
    shape = tuple(2 * size for size in np.shape(leaf))
    return jax.ShapeDtypeStruct(shape, jnp.result_type(leaf))


def _check_settings(
    state: HalfState, shapes: Any, resting: Any, target: np.dtype, stochastic_rounding: bool
) -> None:
    """Raises a ValueError if `state` was made with other settings of `with_half_state`.

    `shapes` is the state that the wrapped transform's `init` makes, and `resting` a tree like it of booleans.
    """
    made, asked = ("with" if flag else "without" for flag in (state.key is not None, stochastic_rounding))
    if made != asked:
        raise ValueError(
            f"with_half_state: this optimizer is {asked} stochastic rounding. Got a state that was made "
            f"{made} it. {MIGRATE}"
        )
    if jax.tree.structure(state.inner_state) != jax.tree.structure(shapes):
        raise ValueError(
            "with_half_state: the state does not belong to these gradients and this optimizer. Give a "
            f"gradient for each parameter. {MIGRATE}"
        )
    # An optimizer may keep half arrays of its own, as `optax.adam(1e-3, mu_dtype="bfloat16")` does. `shapes`
    # has these in half too.
    expected = zip(jax.tree.leaves(shapes), jax.tree.leaves(resting), strict=True)
    for (name, leaf), (shape, rest) in zip(named_leaves(state.inner_state), expected, strict=True):
        if is_half(leaf) != (rest or is_half(shape)):
            dtype = target if rest else shape.dtype
            raise ValueError(
                f"with_half_state: the array {name!r} of the state rests in {dtype.name} under these "
                f"settings. Got {leaf.dtype.name}. {MIGRATE}"
            )


def _checked_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype in which the state rests: bfloat16 or float32; others raise an error."""
    target = parse_dtype(dtype)
    if target == jnp.float16:
        raise ValueError(
            "with_half_state: dtype is bfloat16 or float32. Got float16. Adam divides by the root of a mean "
            "of squares. The squares of gradients 2**20 apart are 2**40 apart, the whole range of float16: "
            "squares become zero, even with a scale for each array. bfloat16 has the range of float32."
        )
    if target not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"with_half_state: dtype is bfloat16 or float32. Got {target.name}.")
    return target


def _check_patterns_match(patterns: tuple[str, ...], state: Any) -> None:
    """Raises a ValueError if a pattern matches no leaf of `state` that could rest in half precision."""
    names = [name for name, leaf in named_leaves(state) if has_dtype(leaf, jnp.floating) and leaf.ndim]
    # `optax.tree_map_params` calls `init` with a placeholder that has no arrays:
    # https://github.com/google-deepmind/optax/blob/v0.2.8/optax/tree_utils/_state_utils.py#L144.
    if not names:
        return
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise ValueError(
                f"with_half_state: the pattern {pattern!r} of keep_float32 matches no array of the state. "
                f"Nearest: {nearest_paths(pattern, names)}."
            )

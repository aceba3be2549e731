"""An optimizer whose moments rest in bfloat16."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._dtypes import DTypeLike, parse_dtype
from .._paths import as_patterns, matches, named_leaves, nearest_paths, path_name
from .._tree import at_least_float32, cast_leaf, has_dtype, is_half
from .half_params import master_states
from .rounding import first_key, next_key, round_leaf
from .wrapper import as_transform, check_update


class CastStateState(NamedTuple):
    """The state of `cast_state`.

    Attributes:
        inner_state: the state of the wrapped transform, with arrays in half precision.
        key: the `RoundingKey` of the next step, two scalars, uint32; None without stochastic rounding.

    Guide: docs/memory.md.
    """

    inner_state: Any
    key: Any


def cast_state(
    inner: optax.GradientTransformation | optax.MultiSteps,
    dtype: DTypeLike = "bfloat16",
    *,
    keep_float32: str | Iterable[str] = (),
    stochastic_rounding: bool = False,
    key: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    """Keeps an optimizer's floating state in bfloat16: it is widened for the update and rounded back.

    AdamW's two moments need 4 bytes a parameter, not 8. The scalars of the state stay as they are, such as a
    learning rate or a loss scale.

    With rounding to nearest, Adam's second moment does not decay: 0.999 of a bfloat16 number, rounded, is
    the number. `stochastic_rounding=True` rounds by `stochastic_round`, so that the mean decays.

    Master weights are no state to cast. Put `cast_state` inside:

        tx = jmp.with_master_weights(jmp.cast_state(optax.adamw(3e-4), stochastic_rounding=True))

    Args:
        inner: an optax transform, or an `optax.MultiSteps`.
        dtype: `bfloat16`; or `float32`, with which nothing is cast, for one script with both.
        keep_float32: patterns of the paths in the state of `inner` that stay float32, as in the rules of a
            policy. `"nu"` names Adam's second moment, `"embedding"` both moments of an embedding, and
            `"nu/**/embedding"` one of them.
        stochastic_rounding: whether to round stochastically.
        key: an integer or a PRNG key for stochastic rounding. The same key gives the same run. The state
            holds the key of the next step. A step that `with_loss_scale` skips leaves the key as it was.

    Returns:
        A transform. `inner` gets float32 gradients, and its state in float32.

    Raises:
        ValueError: `dtype` is another dtype; from `init`, a pattern of `keep_float32` matches nothing, or
            `inner` holds master weights.
        TypeError: `inner` is no optax transform, `dtype` is no dtype, `key` is no key, or `keep_float32` has
            something that is no string; from `update`, the state is not that of this transform.

    >>> tx = cast_state(optax.adam(1e-3), "bfloat16", keep_float32="nu")
    >>> state = tx.init({"w": jnp.ones(2)}).inner_state[0]
    >>> state.mu["w"].dtype.name, state.nu["w"].dtype.name, state.count.dtype.name
    ('bfloat16', 'float32', 'int32')

    Guide: docs/memory.md.
    """
    made_by = "cast_state"
    transform = as_transform(made_by, inner)
    target = _checked_dtype(dtype)
    patterns = as_patterns(
        keep_float32, 'cast_state: keep_float32 takes patterns such as "nu" or "nu/**/head"'
    )

    def rests(path: tuple[Any, ...], leaf: Any) -> bool:
        """Whether a leaf of the state rests in `target`."""
        if target == jnp.float32 or not _is_floating_array(leaf):
            return False
        return not any(matches(pattern, path_name(path)) for pattern in patterns)

    def init(params: Any) -> Any:
        state = transform.init(at_least_float32(params))
        if master_states(state):
            raise ValueError(
                "cast_state(inner): inner holds float32 master weights, which are of no use in bfloat16. "
                "Put cast_state inside: jmp.with_master_weights(jmp.cast_state(optax.adamw(3e-4)))."
            )
        _check_patterns_match(patterns, state)
        cast = lambda path, leaf: cast_leaf(leaf, target) if rests(path, leaf) else leaf
        cast_inner = jax.tree_util.tree_map_with_path(cast, state)
        return CastStateState(cast_inner, first_key(made_by, key) if stochastic_rounding else None)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        check_update(made_by, CastStateState, state, params)
        widen = lambda path, leaf: leaf.astype(jnp.float32) if rests(path, leaf) and is_half(leaf) else leaf
        wide = jax.tree_util.tree_map_with_path(widen, state.inner_state)
        updates, new = transform.update(at_least_float32(updates), wide, params, **extra_args)
        leaves, structure = jax.tree_util.tree_flatten_with_path(new)
        # `round_leaf` gives numbers that `target` holds, so that the cast after it is exact.
        narrowed = [
            round_leaf(leaf, target, state.key, index).astype(target) if rests(path, leaf) else leaf
            for index, (path, leaf) in enumerate(leaves)
        ]
        new_key = None if state.key is None else next_key(state.key)
        return updates, CastStateState(structure.unflatten(narrowed), new_key)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_floating_array(leaf: Any) -> bool:
    """Whether `leaf` could rest in half precision. Scalars, such as a loss scale, could not."""
    return has_dtype(leaf, jnp.floating) and np.ndim(leaf) > 0


def _checked_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype in which the state rests.

    Raises:
        ValueError, TypeError: it is neither bfloat16 nor float32.
    """
    target = parse_dtype(dtype)
    if target == jnp.float16:
        raise ValueError(
            "cast_state: dtype is bfloat16 or float32. Got float16. Adam divides by the root of a mean "
            "of squares. Gradients 2**20 apart have squares 2**40 apart, all that float16 has. "
            "So squares become zero, also with a scale for each array. bfloat16 has float32's range."
        )
    if target not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"cast_state: dtype is bfloat16 or float32. Got {target.name}.")
    return target


def _check_patterns_match(patterns: tuple[str, ...], state: Any) -> None:
    """Raises a ValueError if a pattern matches no leaf of `state` that could rest in half precision."""
    names = [name for name, leaf in named_leaves(state) if _is_floating_array(leaf)]
    if not names:  # The placeholder of `optax.tree_map_params` has no arrays.
        return
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise ValueError(
                f"cast_state: the pattern {pattern!r} of keep_float32 matches no array of the state. "
                f"Nearest: {nearest_paths(pattern, names)}."
            )

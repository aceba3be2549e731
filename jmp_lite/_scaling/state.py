"""The state of `skip_nonfinite` and `with_loss_scale`, and how to read it from any optimizer state."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._tree import STATIC, nodes_of, register_state, replace_leaves, without_nnx_variables
from .loss_scale import LossScale
from .order import check_order
from .scalars import LARGEST
from .serialization import Saved


@dataclasses.dataclass(frozen=True, eq=False)
class LeafNames:
    """The paths of the parameters, in the order of `jax.tree.leaves`, as a part of a state's structure."""

    paths: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LeafNames):
            return False
        # By value: `jax.jit` reuses a program for equal structures, and would otherwise give the state of one
        # model the names of another. No names equal any names, so that equality is not transitive, on
        # purpose: `optax.tree_map_params` compares with the state of a placeholder, which has no names
        # (https://github.com/google-deepmind/optax/blob/v0.2.8/optax/tree_utils/_state_utils.py#L144).
        return self.paths == other.paths or not (self.paths and other.paths)

    def __hash__(self) -> int:
        # Every call of a jitted step hashes the structure. The hash of a tuple would read all names.
        return hash(LeafNames)


@register_state
@dataclasses.dataclass(frozen=True)
class SkipNonfiniteState(Saved):
    """The state of `skip_nonfinite` and `with_loss_scale`, which `get_loss_scale` and `get_metrics` read.

    Attributes:
        inner_state: the state of the wrapped transform.
        loss_scale: the loss scale; None for `skip_nonfinite`.
        leaf_finite: whether each gradient of the last step was finite, shape `(len(leaf_names),)`, bool.
        grad_norm: the global norm of the last step's gradients before the clip, shape `()`, float32; the
            largest number if it is not finite; None without `clip_norm`.
        counts: shape `(3,)`, int32: all steps, the skipped steps, and the steps skipped since the last step
            that was taken. They end at `2**31 - 1`, and are one array because a GPU needs a kernel for each.
        leaf_names: the paths of the parameters, in the order of `leaf_finite`.
        name: the name that tells this optimizer from others in the same tree, or None.

    Examples:
        >>> state = jmp.skip_nonfinite(optax.sgd(1.0)).init({"w": jnp.ones(2)})
        >>> state.leaf_names.paths, state.leaf_finite, state.counts
        (('w',), Array([ True], dtype=bool), Array([0, 0, 0], dtype=int32))
    """

    inner_state: Any
    loss_scale: Any
    leaf_finite: Any
    grad_norm: Any
    counts: Any
    leaf_names: LeafNames = dataclasses.field(metadata=STATIC)
    name: str | None = dataclasses.field(metadata=STATIC)


def count(counts: jax.Array, finite: jax.Array) -> jax.Array:
    """Returns the `counts` of a `SkipNonfiniteState` after one more step, taken if `finite`."""
    # As `optax.safe_increment`: a count that wrapped around would be negative.
    one_more = counts + (counts < np.int32(2**31 - 1)).astype(np.int32)
    # A step that is taken counts in the first number, keeps the second and clears the third.
    kept = jnp.where(np.array([True, False, False]), one_more, counts) * np.array([1, 1, 0], np.int32)
    return jnp.where(finite, kept, one_more)


def get_loss_scale(opt_state: Any, name: str | None = None) -> LossScale:
    """Returns the loss scale that `with_loss_scale` holds.

    Args:
        opt_state: an optimizer state, or a tree with one at any depth: a chain, `optax.masked`,
            `optax.inject_hyperparams`, `optax.multi_transform`, a Flax `TrainState`, an `nnx.Optimizer`.
        name: the name given to `with_loss_scale`, which is needed if the tree has more than one.

    Returns:
        The scale for this step's loss.

    Raises:
        ValueError: the tree has no loss scale, or more than one to choose from; or a transform around
            `with_loss_scale` or in front of it, such as `optax.MultiSteps`, hides an overflow from it.

    Examples:
        >>> opt_state = jmp.with_loss_scale(optax.adamw(3e-4)).init(jnp.ones(2))
        >>> float(jmp.get_loss_scale(opt_state).loss_scale)
        32768.0
    """
    check_order(opt_state, SkipNonfiniteState)
    states = [state for state in nodes_of(opt_state, SkipNonfiniteState) if state.loss_scale is not None]
    return without_nnx_variables(_choose(states, name, "with_loss_scale").loss_scale)


def grads_finite(opt_state: Any, name: str | None = None) -> jax.Array:
    """Returns whether the last step was taken, because its gradients and its update were finite.

    Args:
        opt_state: as in `get_loss_scale`.
        name: as in `get_loss_scale`.

    Returns:
        A boolean, shape `()`, or one for each member of a batched state; true before the first step.

    Raises:
        ValueError: as in `get_loss_scale`.

    Examples:
        >>> opt_state = jmp.with_loss_scale(optax.adamw(3e-4)).init(jnp.ones(2))
        >>> bool(jmp.grads_finite(opt_state))
        True
    """
    return get_metrics(opt_state, name)["grads_finite"]


def get_metrics(opt_state: Any, name: str | None = None) -> dict[str, jax.Array]:
    """Returns the numbers to log from `skip_nonfinite` or `with_loss_scale`, inside `jit` and outside.

    Args:
        opt_state: as in `get_loss_scale`.
        name: as in `get_loss_scale`.

    Returns:
        Scalars of shape `()`, or one for each member of a batched state.

        - `loss_scale`: the scale of the next step, float32; absent with `skip_nonfinite`;
        - `grads_finite`: whether the last step was taken, bool;
        - `skipped_steps`: how many steps were skipped since the optimizer was initialized, int32;
        - `consecutive_skipped_steps`: how many of them since the last step that was taken, int32;
        - `grad_norm`: the global norm of the last step's gradients before the clip, float32, inf if it is
          not finite; absent without `clip_norm`.

    Raises:
        ValueError: as in `get_loss_scale`.

    Examples:
        >>> opt_state = jmp.with_loss_scale(optax.adamw(3e-4)).init(jnp.ones(2))
        >>> {key: value.item() for key, value in jmp.get_metrics(opt_state).items()}
        {'loss_scale': 32768.0, 'grads_finite': True, 'skipped_steps': 0, 'consecutive_skipped_steps': 0}
    """
    state = find_state(opt_state, name)
    values = {} if state.loss_scale is None else {"loss_scale": _on_device(state.loss_scale.loss_scale)}
    names = ("grads_finite", "skipped_steps", "consecutive_skipped_steps")
    values |= dict(zip(names, _read_counts(_on_device(state.counts)), strict=True))
    norm = {} if state.grad_norm is None else {"grad_norm": _read_norm(_on_device(state.grad_norm))}
    return values | norm


def _on_device(value: Any) -> jax.Array:
    """Returns a JAX array."""
    # A number of NumPy is moved explicitly, which `jax.transfer_guard("disallow")` allows:
    # https://github.com/google/jax/commit/beaa00c460ca6c36d38cc671856d05912dfc42df.
    return value if isinstance(value, jax.Array) else jax.device_put(value)


# Compiled, because eager indices would be moved to the device one by one, implicitly.
@functools.partial(jax.jit, inline=True)
def _read_counts(counts: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns whether the last step was taken, how many were skipped, and how many of them in a row."""
    return counts[..., 2] == 0, counts[..., 1], counts[..., 2]


@functools.partial(jax.jit, inline=True)
def _read_norm(norm: jax.Array) -> jax.Array:
    """Returns a norm, for which the state holds the largest number if it is not finite."""
    return jnp.where(norm < LARGEST, norm, jnp.inf)


def find_state(opt_state: Any, name: str | None = None) -> SkipNonfiniteState:
    """Returns the one state in `opt_state`, or the one called `name`, whose own leaves are arrays."""
    check_order(opt_state, SkipNonfiniteState)
    state = _choose(nodes_of(opt_state, SkipNonfiniteState), name, "skip_nonfinite or with_loss_scale")
    arrays = without_nnx_variables(replace_leaves(state, inner_state=None))
    return replace_leaves(arrays, inner_state=state.inner_state)


def _choose(states: list[SkipNonfiniteState], name: str | None, wrapper: str) -> SkipNonfiniteState:
    named = [state for state in states if name is None or state.name == name]
    if len(named) == 1:
        return named[0]
    names = [state.name for state in states]
    if not states:
        raise ValueError(
            f"No optimizer wrapped in {wrapper} was found in this state. Wrap yours, for example "
            "tx = jmp.with_loss_scale(optax.adamw(3e-4)), and give the state that tx.init returned. For "
            "float32 or bfloat16 without a scale: jmp.with_loss_scale(tx, jmp.NoOpLossScale()). The state of "
            "a plain optimizer, from an older checkpoint: jmp.migrate_state(tx, params, old_state). A "
            "checkpoint that was restored as plain dicts: restore it with a target, tx.init(params)."
        )
    if not named:
        raise ValueError(f"No optimizer is named {name!r}. The names here are {names}.")
    raise ValueError(
        f"{len(named)} optimizers wrapped in {wrapper} were found, named {names}. Name them apart, "
        "with_loss_scale(..., name='generator'), and ask for one by its name."
    )

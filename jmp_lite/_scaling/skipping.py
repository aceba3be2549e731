"""The optax transform behind `with_loss_scale` and `skip_nonfinite`: what happens on a step."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._memory.half_params import init_for_masters
from .._memory.wrapper import (
    MIGRATE,
    Transform,
    as_transform,
    check_same_structure,
    check_update,
    differentiated,
)
from .._paths import leaf_names, named_leaves
from .._tree import (
    at_least_float32,
    has_dtype,
    is_floating,
    is_traced,
    nodes_of,
    select_tree,
    without_nnx_variables,
)
from .finite import agree, all_finite, leaves_finite
from .loss_scale import DynamicLossScale, LossScale, NoOpLossScale, as_loss_scale
from .norm import clip, squared_norms
from .scalars import LARGEST, number
from .state import LeafNames, SkipNonfiniteState, count


class UnscaleState(NamedTuple):
    """The empty state of `unscale`, which shows that a chain divides by the loss scale."""


@dataclasses.dataclass(frozen=True)
class Skipping:
    """The `init` and `update` of `skip_nonfinite` and `with_loss_scale`, and their settings."""

    made_by: str
    inner: Any
    loss_scale: LossScale | None
    clip_norm: float | None
    axis_name: Any
    name: str | None

    def transform(self) -> Transform:
        """Returns the optax transform, after a check of the settings."""
        clip_norm = None if self.clip_norm is None else number("clip_norm", self.clip_norm)
        if clip_norm is not None and not 0 < clip_norm < math.inf:
            raise ValueError(f"clip_norm should be above 0 and finite. Got {clip_norm}.")
        inner = as_transform(self.made_by, self.inner)
        settings = dataclasses.replace(self, inner=inner, clip_norm=clip_norm)
        update: Any = settings.update  # With types of its own, which optax's protocol does not have.
        return Transform(settings.init, update)

    def init(self, params: Any) -> Any:
        names = leaf_names(without_nnx_variables(differentiated(params)))
        inner_state = init_for_masters(self.inner, params)
        self._check_inner(inner_state)
        if self.clip_norm is not None and nodes_of(inner_state, optax.MultiStepsState):
            raise ValueError(
                f"{self.made_by}: clip_norm={self.clip_norm:g} around optax.MultiSteps would clip each "
                "micro-batch. Leave clip_norm out, and clip the accumulated gradients: "
                f"optax.MultiSteps(optax.chain(optax.clip_by_global_norm({self.clip_norm:g}), "
                "optax.adamw(3e-4)), every_k_schedule=4)."
            )
        return SkipNonfiniteState(
            inner_state=inner_state,
            # Copied, so that donating the state does not delete the caller's scale.
            loss_scale=jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), self.loss_scale),
            leaf_finite=jnp.ones(len(names), jnp.bool_),
            grad_norm=None if self.clip_norm is None else jnp.float32(0),
            counts=jnp.zeros(3, jnp.int32),
            leaf_names=LeafNames(names),
            name=self.name,
        )

    def update(
        self, updates: Any, state: SkipNonfiniteState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, SkipNonfiniteState]:
        """Returns the updates, which are minus zero if the step is skipped, and the new state."""
        self._check_state(state, params)
        self._check_loss_scale(state, extra_args)
        paths = leaf_names(without_nnx_variables(updates))
        names = state.leaf_names.paths
        # `optax.tree_map_params` returns a state with the structure of a placeholder's, which has no names:
        # https://github.com/google-deepmind/optax/blob/v0.2.8/optax/tree_utils/_state_utils.py#L144.
        if len(names) != state.leaf_finite.shape[-1]:
            names = paths
        # The check comes first: a clip inside of `inner` turns inf into a finite number.
        grads, flags, finite, norm = self._check(at_least_float32(updates), extra_args.get("loss_scale"))
        flags = _in_order(flags, paths, names)
        inner_update = functools.partial(self._checked_update, extra_args)
        new_updates, new_inner, finite = _update_where(finite, inner_update, grads, state.inner_state, params)
        new_state = SkipNonfiniteState(
            inner_state=new_inner,
            loss_scale=None if self.loss_scale is None else state.loss_scale.adjust(finite),
            leaf_finite=flags,
            # Of float64 gradients too. Finite, so that a skipped step does not raise under JAX_DEBUG_NANS.
            grad_norm=None if norm is None else jnp.nan_to_num(norm.astype(jnp.float32), nan=LARGEST),
            counts=count(state.counts, finite),
            leaf_names=LeafNames(names),
            name=state.name,
        )
        return new_updates, new_state

    def _check_inner(self, inner_state: Any) -> None:
        """Raises a ValueError if the wrapped optimizer has a loss scale of its own, or divides by one."""
        inside = nodes_of(inner_state, SkipNonfiniteState, UnscaleState)
        if self.loss_scale is None or not inside:
            return
        if any(isinstance(node, UnscaleState) for node in inside):
            raise ValueError(
                "with_loss_scale(inner): inner holds jmp.unscale(), and the gradients of jmp.value_and_grad "
                "are unscaled already. Leave unscale out."
            )
        raise ValueError(
            "with_loss_scale(inner): inner is wrapped in with_loss_scale or skip_nonfinite already. One of "
            "them checks the gradients: wrap the optimizer itself, jmp.with_loss_scale(optax.adamw(3e-4))."
        )

    def _check_state(self, state: Any, params: Any) -> None:
        """Raises an error if `state` is not one of this transform and its settings."""
        check_update(self.made_by, SkipNonfiniteState, state, params)
        theirs = _described(state.loss_scale, state.grad_norm is not None, state.name)
        if theirs != (mine := _described(self.loss_scale, self.clip_norm is not None, self.name)):
            raise ValueError(
                f"{self.made_by}: update was given a state of {theirs}. This optimizer is {mine}. {MIGRATE}"
            )

    def _check_loss_scale(self, state: SkipNonfiniteState, extra_args: dict[str, Any]) -> None:
        """Raises a TypeError if `update` was given a loss scale by which nothing divides."""
        if "loss_scale" not in extra_args:
            return
        if self.loss_scale is not None:
            raise TypeError(
                "update was given loss_scale=, but this optimizer holds its own. Leave it out and give "
                "true gradients, from jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state)); or "
                "thread the scale yourself with jmp.skip_nonfinite and jmp.unscale."
            )
        if not nodes_of(state.inner_state, UnscaleState) and not isinstance(
            extra_args["loss_scale"], NoOpLossScale
        ):
            raise TypeError(
                "skip_nonfinite: update was given loss_scale=, but nothing divides the gradients by it. Put "
                "jmp.unscale() first: jmp.skip_nonfinite(optax.chain(jmp.unscale(), optax.adamw(3e-4)))."
            )

    def _check(self, grads: Any, loss_scale: Any) -> tuple[Any, jax.Array, jax.Array, jax.Array | None]:
        """Returns the (clipped) gradients, the flags of the leaves, whether all are finite, and the norm."""
        norm = None
        if self.clip_norm is None:
            flags = leaves_finite(grads)
            finite = flags.all()
        else:
            squares = squared_norms(grads)
            flags = jnp.isfinite(squares)
            norm = jnp.sqrt(squares.sum())
            if (scale := as_loss_scale(loss_scale)) is not None:
                norm = norm / scale.loss_scale  # `unscale` will divide the gradients inside of `inner`.
            finite = jnp.isfinite(norm)
            grads = clip(grads, norm, self.clip_norm)
        if self.axis_name is not None:
            # One collective for all flags, since devices wait for each other in each.
            agreed = agree(jnp.append(flags, finite), self.axis_name)
            flags, finite = agreed[:-1], agreed[-1]
        return grads, flags, finite, norm

    def _checked_update(
        self, extra_args: dict[str, Any], grads: Any, state: Any, params: Any
    ) -> tuple[Any, Any, jax.Array | None]:
        """Returns the updates and the new state of `inner`, and whether they may be applied.

        The third result is None if only the gradients decide.
        """
        updates, new = self.inner.update(grads, state, params, **extra_args)
        _check_structure(new, state)
        # An optimizer with extra arguments may evaluate the loss again, where its gradients overflow, as SAM
        # does, or read a loss that is not finite. One without them only gets gradients that were checked, and
        # nothing is read twice.
        given = {name: value for name, value in extra_args.items() if name != "loss_scale"}
        if not given:
            return updates, new, None
        scalars = [leaf for leaf in jax.tree.leaves(given) if is_floating(leaf) and jnp.ndim(leaf) == 0]
        appeared = jax.tree.map(_newly_nonfinite, new, state)
        return updates, new, all_finite((updates, appeared, scalars), self.axis_name)


def _newly_nonfinite(new: Any, old: Any) -> Any:
    """Returns `new` with zeros where it has not changed."""
    if not is_floating(new):
        return 0.0
    # Line searches begin with a loss of inf in their state, which is no fault of this step:
    # https://github.com/google-deepmind/optax/blob/v0.2.8/optax/_src/linesearch.py#L266.
    old = jnp.asarray(old, jnp.result_type(new))
    return jnp.where((new == old) | (jnp.isnan(new) & jnp.isnan(old)), jnp.zeros_like(new), new)


def _update_where(
    finite: jax.Array, update: Callable[..., tuple[Any, Any, Any]], grads: Any, state: Any, params: Any
) -> tuple[Any, Any, jax.Array]:
    """Returns the updates, the new state and True; minus zeros, the old state and False if it is skipped.

    `update` returns the updates, the new state, and whether they are finite, which is None if only the
    gradients decide.
    """

    def select(finite: jax.Array, grads: Any, state: Any, params: Any) -> tuple[Any, Any, jax.Array]:
        updates, new, is_finite = update(grads, state, params)
        taken = finite if is_finite is None else finite & is_finite
        if is_traced(taken):
            kept = jax.tree.map(lambda update: select_tree(taken, update, _minus_zero(update)), updates)
            return kept, _select_state(taken, new, state), taken
        # Outside of `jit`, Python can branch. JAX would compile a condition again on each call, and a select
        # of each leaf takes longer than the update itself.
        return (updates, new, taken) if taken else (jax.tree.map(_minus_zero, updates), state, taken)

    if not is_traced(finite):
        return select(finite, grads, state, params)
    # `jit` traces the function once for all branches. XLA removes a select by a constant.
    select = jax.jit(select, inline=True)
    taken, skipped = (functools.partial(select, jnp.bool_(flag)) for flag in (True, False))

    def branch(finite, *args):
        return lax.cond(finite, taken, skipped, *args)

    # On a CPU, XLA runs a selected update in many passes and copies most of the donated buffers, so that a
    # branch is faster. On a GPU a select is free, and a branch would make the host wait. JAX knows the
    # platform only when it lowers the step, since a step may be compiled for another one:
    # https://docs.jax.dev/en/latest/_autosummary/jax.lax.platform_dependent.html.
    return lax.platform_dependent(finite, grads, state, params, cpu=branch, default=select)


def _minus_zero(update: Any) -> Any:
    """Returns an update like `update` that changes no parameter."""
    if not has_dtype(update, jnp.number):  # A key, float0 or boolean, which is added to no parameter.
        return update
    # Only minus zero leaves every parameter as it is: an update of 0.0 turns -0.0 into 0.0.
    return -jnp.zeros_like(update)


def _check_structure(new: Any, old: Any) -> None:
    """Raises a ValueError if `update` has changed the structure of a state, or the shape of an array."""
    check_same_structure(new, old)
    for (name, leaf), given in zip(named_leaves(new), jax.tree.leaves(old), strict=True):
        if jnp.shape(leaf) != jnp.shape(given):
            raise ValueError(
                f"The array {name} has the shape {jnp.shape(given)} in the state and {jnp.shape(leaf)} after "
                "the update. Give the state of these parameters, tx.init(params)."
            )


def _select_state(finite: jax.Array, new: Any, old: Any) -> Any:
    """Returns the state `new` if `finite`, and else `old`, bit for bit."""

    def select(new: Any, old: Any) -> Any:
        # Some states of optax change their dtype on the first step, and `lax.select` needs one dtype.
        # `jnp.asarray` cannot cast to the extended dtypes of PRNG keys.
        if new is not old and not jnp.issubdtype(jnp.result_type(new), jax.dtypes.extended):
            dtype = jnp.result_type(new, old)
            new, old = jnp.asarray(new, dtype), jnp.asarray(old, dtype)
        # A leaf that the optimizer returns unchanged needs no select and keeps its buffer.
        return old if new is old else select_tree(finite, new, old)

    return jax.tree.map(select, new, old)


def _in_order(flags: jax.Array, paths: tuple[str, ...], names: tuple[str, ...]) -> jax.Array:
    """Returns the flags of the gradients at `paths` in the order of `names`, true if there is none."""
    if paths == names:
        return flags
    if unknown := sorted(set(paths) - set(names)):
        raise ValueError(
            f"The gradients have leaves that the optimizer was not initialized with: {unknown[:4]}. "
            f"It knows {list(names[:4])}{'...' if len(names) > 4 else ''}."
        )
    by_name: dict[str, jax.Array] = {}
    for path, flag in zip(paths, flags, strict=True):
        # Two leaves may have one name, as in {"a": {"b": x}, "a/b": y}.
        by_name[path] = by_name[path] & flag if path in by_name else flag
    return jnp.stack([by_name.get(name, jnp.asarray(True)) for name in names])


def _described(scale: Any, clips: bool, name: str | None) -> str:
    """Returns a wrapper with its settings that are not the default; of a user's own scale, the class."""
    fields = dataclasses.fields(scale) if isinstance(scale, DynamicLossScale) else ()
    settings = [(f, getattr(scale, f.name)) for f in fields if f.metadata.get("static")]
    changed = ", ".join(f"{f.name}={value}" for f, value in settings if value != f.default)
    wrapper = "skip_nonfinite" if scale is None else f"with_loss_scale, {type(scale).__name__}({changed}),"
    named = "" if name is None else f", named {name!r}"
    return f"{wrapper} {'with' if clips else 'without'} clip_norm{named}"

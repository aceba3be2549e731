"""optax transforms that unscale gradients and skip the steps whose gradients are not finite."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._memory.half_params import init_for_masters
from .._memory.wrapper import RESUME, as_transform, check_init, check_update, differentiated, update_inner
from .._paths import leaf_names
from .._tree import at_least_float32, has_dtype, select_tree, unwrap
from .finite import agree, leaves_finite
from .loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    describe_settings,
    is_loss_scale,
    same_settings,
)
from .norm import clip, squared_norms
from .scalars import number
from .state import LeafNames, SkipNonfiniteState, count


class UnscaleState(NamedTuple):
    """The state of `unscale`, which holds nothing: it shows that a chain divides by the loss scale."""


def unscale() -> optax.GradientTransformationExtraArgs:
    """Divides gradients by the loss scale given to `update`, for a step that threads the scale itself.

    Put it first, before every transform that depends on the size of a gradient:

        tx = optax.chain(jmp.unscale(), optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
        tx = jmp.skip_nonfinite(tx)
        updates, opt_state = tx.update(scaled_grads, opt_state, params, loss_scale=loss_scale)

    Returns:
        A transform whose `update` needs `loss_scale=`: the `LossScale` that scaled these gradients,
        before it is adjusted. The gradients come out as `LossScale.unscale` gives them, float32.

    Raises:
        TypeError: from `update`, if `loss_scale=` was left out or is no loss scale.

    Gradients from `jmp.value_and_grad` and `jmp.grad` are divided already; `unscale` would divide twice.

    >>> from jmp_lite import StaticLossScale
    >>> tx = unscale()
    >>> tx.update(jnp.float16(8), tx.init(jnp.float16(0)), loss_scale=StaticLossScale(4))[0]
    Array(2., dtype=float32)

    Guide: docs/loss-scaling.md.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, loss_scale: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        del params, extra_args
        if not is_loss_scale(loss_scale):
            given = "no loss_scale=" if loss_scale is None else type(loss_scale).__name__
            raise TypeError(
                f"jmp.unscale() divides by the loss scale that scaled these gradients. Got {given}. "
                "Pass it on: tx.update(grads, opt_state, params, loss_scale=loss_scale). "
                "Gradients from jmp.value_and_grad are unscaled already: for those, leave unscale out."
            )
        return at_least_float32(loss_scale.unscale(updates)), state

    def init(params: Any) -> Any:
        del params
        return UnscaleState()

    return optax.GradientTransformationExtraArgs(init, update)


def skip_nonfinite(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    clip_norm: float | None = None,
    axis_name: Any = None,
    name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Skips the steps whose gradients hold inf or NaN.

    The check comes before everything else, since a clip turns inf into a number. A skipped step
    leaves the parameters and the state of `inner` bit for bit as they were: moments, counts,
    schedules, weight decay. A step that is not finite is never applied, however many came in a row;
    `raise_if_stuck` tells the host. This holds for what is inside. A transform that is chained after this one
    gets updates of minus zero on a skipped step, and acts on them: weight decay moves the parameters. Put it
    inside, or select: docs/loss-scaling.md. Nothing branches: `inner` is called as it is, its results are
    selected, and donated buffers stay in place. The check reads the gradients: an infinite update
    that `inner` makes of finite gradients is applied.

    Args:
        inner: an optax transform, or an `optax.MultiSteps`, which then drops a non-finite micro-batch
            and goes on with the others. Gradients narrower than 32 bits reach it as float32. Its state
            is made for parameters of at least float32, so that moments do not rest in half precision.
        clip_norm: clips the gradients to this global norm before `inner`, with the numbers of
            `optax.clip_by_global_norm`. The norm is then the check, so that gradients are read once for
            both, and `metrics` reports the norm. Finite gradients above 1.8e19 have squares that float32
            cannot hold: their norm is inf, and the step is skipped. With `loss_scale=` given to `update`
            the norm is that of the unscaled gradients. It is an error around `optax.MultiSteps`, where it
            would clip each micro-batch: put `optax.clip_by_global_norm` into the `MultiSteps`.
        axis_name: under `shard_map` or `pmap`, the axis name or names over which all devices agree to
            skip. Not needed under `jit`, nor for gradients that were summed over the axis before.
        name: tells two optimizers in one tree apart, as `grads_finite(opt_state, name)`.

    Returns:
        A transform. Extra arguments of `update` reach `inner`. For state that the optimizer does not
        hold, such as batch statistics, use `select_tree(grads_finite(opt_state), new, old)`.

    Raises:
        ValueError, TypeError: `inner` is no optax transform, `clip_norm` is no number above 0, or `inner`
            holds `optax.MultiSteps` and `clip_norm` was given; from `init`, the parameters are shapes; from
            `update`, the state is not that of this transform and its settings, a gradient belongs to no
            parameter or has another shape, or `loss_scale=` was given and no `unscale()` divides by it.

    >>> from jmp_lite import metrics
    >>> tx = skip_nonfinite(optax.sgd(1.0))
    >>> params = jnp.float32(1)
    >>> updates, opt_state = tx.update(jnp.float32(jnp.inf), tx.init(params), params)
    >>> optax.apply_updates(params, updates), metrics(opt_state)["skipped_steps"]
    (Array(1., dtype=float32), Array(1, dtype=int32))

    Guide: docs/loss-scaling.md.
    """
    return _Skipping("skip_nonfinite", inner, None, clip_norm, axis_name, name).transform()


def with_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScale | None = None,
    *,
    clip_norm: float | None = None,
    axis_name: Any = None,
    name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`skip_nonfinite` with a loss scale in its state, adjusted after every step.

    The gradients given to `update` are true ones, from `jmp.value_and_grad` with the scale that
    `get_loss_scale(opt_state)` returns. Transforms that are chained after this one run on skipped steps too:
    put weight decay, schedules and clips inside.

    Args:
        inner: as in `skip_nonfinite`.
        loss_scale: the scale to begin with; `DynamicLossScale()` if None.
        clip_norm, axis_name, name: as in `skip_nonfinite`.

    Raises:
        TypeError: `loss_scale` is no loss scale, or `update` was given one.
        ValueError: as in `skip_nonfinite`.

    >>> tx = with_loss_scale(optax.sgd(1.0), DynamicLossScale(1024.0))
    >>> _, opt_state = tx.update(jnp.float32(jnp.nan), tx.init(jnp.float32(1)))
    >>> from jmp_lite import get_loss_scale
    >>> float(get_loss_scale(opt_state).loss_scale)
    512.0

    Guide: docs/loss-scaling.md.
    """
    loss_scale = DynamicLossScale() if loss_scale is None else loss_scale
    if not is_loss_scale(loss_scale):
        raise TypeError(
            "with_loss_scale(inner, loss_scale): expected a loss scale such as "
            f"jmp.DynamicLossScale(). Got {type(loss_scale).__name__}."
        )
    return _Skipping("with_loss_scale", inner, loss_scale, clip_norm, axis_name, name).transform()


@dataclasses.dataclass(frozen=True)
class _Skipping:
    """The `init` and `update` of `skip_nonfinite` and `with_loss_scale`, and their settings."""

    made_by: str
    inner: Any
    loss_scale: LossScale | None
    clip_norm: float | None
    axis_name: Any
    name: str | None

    def transform(self) -> optax.GradientTransformationExtraArgs:
        """Returns the optax transform, having checked the settings."""
        clip_norm = None if self.clip_norm is None else number("clip_norm", self.clip_norm)
        if clip_norm is not None and not 0 < clip_norm < math.inf:
            raise ValueError(f"clip_norm should be above 0 and finite. Got {clip_norm}.")
        inner = as_transform(self.made_by, self.inner)
        if clip_norm is not None and isinstance(self.inner, optax.MultiSteps):
            raise self._clips_micro_batches()
        settings = dataclasses.replace(self, inner=inner, clip_norm=clip_norm)
        update: Any = settings.update  # With types of its own, which optax's protocol does not have.
        return optax.GradientTransformationExtraArgs(settings.init, update)

    def init(self, params: Any) -> Any:
        """Returns the state for `params`."""
        check_init(self.made_by, params)
        names = leaf_names(unwrap(differentiated(params)))
        inner_state = init_for_masters(self.inner, params)
        accumulates = lambda node: isinstance(node, optax.MultiStepsState)
        if self.clip_norm is not None and any(
            map(accumulates, jax.tree.leaves(inner_state, is_leaf=accumulates))
        ):
            raise self._clips_micro_batches()
        return SkipNonfiniteState(
            inner_state=inner_state,
            # A copy: a donated state must not take the caller's scale, or that of another state, along.
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
        """Returns the updates, all minus zero if the step is skipped, and the new state."""
        self._check_state(state, params)
        self._check_loss_scale(state, extra_args)
        paths = leaf_names(unwrap(updates))
        names = state.leaf_names.paths
        if len(names) != state.leaf_finite.shape[-1]:  # `optax.tree_map_params` has lost the names.
            names = paths
        grads, flags, finite, norm = self._check(at_least_float32(updates), extra_args.get("loss_scale"))
        flags = _in_order(flags, paths, names)
        new_updates, new_inner = update_inner(
            self.made_by, self.inner, grads, state.inner_state, params, extra_args, names=names
        )
        new_state = SkipNonfiniteState(
            inner_state=_select_state(finite, new_inner, state.inner_state),
            loss_scale=None if self.loss_scale is None else state.loss_scale.adjust(finite),
            leaf_finite=flags,
            grad_norm=norm,
            counts=count(state.counts, finite),
            leaf_names=LeafNames(names),
            name=state.name,
        )
        return jax.tree.map(lambda update: _or_minus_zero(finite, update), new_updates), new_state

    def _check_state(self, state: Any, params: Any) -> None:
        """Raises an error if `state` is not that of this transform."""
        check_update(self.made_by, SkipNonfiniteState, state, params)
        if (state.loss_scale is None) != (self.loss_scale is None):
            other = "skip_nonfinite" if state.loss_scale is None else "with_loss_scale"
            raise ValueError(f"{self.made_by}: update was given a state of {other}. {RESUME}")
        if not same_settings(state.loss_scale, self.loss_scale):
            raise ValueError(
                f"{self.made_by}: this optimizer has the loss scale {describe_settings(self.loss_scale)}. "
                f"Got a state of {describe_settings(state.loss_scale)}. {RESUME}"
            )
        if (state.grad_norm is None) != (self.clip_norm is None):
            made, asked = (
                "without clip_norm" if norm is None else "with clip_norm"
                for norm in (state.grad_norm, self.clip_norm)
            )
            raise ValueError(
                f"{self.made_by}: this optimizer is {asked}. Got a state that was made {made}. {RESUME}"
            )

    def _clips_micro_batches(self) -> ValueError:
        """Returns the error of a clip around an accumulation, which is another algorithm than one inside."""
        return ValueError(
            f"{self.made_by}: clip_norm={self.clip_norm:g} around optax.MultiSteps would clip each "
            "micro-batch. Leave clip_norm out, and clip the accumulated gradients: "
            f"optax.MultiSteps(optax.chain(optax.clip_by_global_norm({self.clip_norm:g}), "
            "optax.adamw(3e-4)), every_k_schedule=4)."
        )

    def _check_loss_scale(self, state: SkipNonfiniteState, extra_args: dict[str, Any]) -> None:
        """Raises a TypeError if `update` was given a loss scale that the transform does not use."""
        if "loss_scale" not in extra_args:
            return
        if self.loss_scale is not None:
            raise TypeError(
                "update was given loss_scale=, but this optimizer holds its own. Leave it out and give "
                "true gradients, from jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state)); or "
                "thread the scale yourself with jmp.skip_nonfinite and jmp.unscale."
            )
        nodes = jax.tree.leaves(state.inner_state, is_leaf=lambda node: isinstance(node, UnscaleState))
        divides = any(isinstance(node, UnscaleState) for node in nodes)
        if not divides and not isinstance(extra_args["loss_scale"], NoOpLossScale):
            raise TypeError(
                "skip_nonfinite: update was given loss_scale=, but nothing divides the gradients by it. Put "
                "jmp.unscale() first: jmp.skip_nonfinite(optax.chain(jmp.unscale(), optax.adamw(3e-4)))."
            )

    def _check(self, grads: Any, loss_scale: Any) -> tuple[Any, jax.Array, jax.Array, jax.Array | None]:
        """Returns the gradients, clipped if asked; a flag for each leaf; whether all are finite; the norm."""
        norm = None
        if self.clip_norm is None:
            flags = leaves_finite(grads)
            finite = flags.all()
        else:
            squares = squared_norms(grads)
            flags = jnp.isfinite(squares)
            norm = jnp.sqrt(squares.sum())
            if is_loss_scale(loss_scale):  # `unscale` inside divides the gradients later.
                norm = norm / loss_scale.loss_scale
            finite = jnp.isfinite(norm)
            grads = clip(grads, norm, self.clip_norm)
        if self.axis_name is not None:
            # One collective for all flags. Devices wait for each other in every collective.
            agreed = agree(jnp.append(flags, finite), self.axis_name)
            flags, finite = agreed[:-1], agreed[-1]
        return grads, flags, finite, norm


def _or_minus_zero(finite: jax.Array, update: Any) -> Any:
    """Returns an update where `finite`, and elsewhere one that changes no parameter."""
    if not has_dtype(update, jnp.number):  # A key, float0 or boolean, which no parameter is added to.
        return update
    # Minus zero is the one number that leaves every parameter as it is: an update of 0.0 turns -0.0 into 0.0.
    return select_tree(finite, update, -jnp.zeros_like(update))


def _select_state(finite: jax.Array, new: Any, old: Any) -> Any:
    """Returns the state `new` where `finite`, and elsewhere `old`, bit for bit."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            "The optimizer's update returned a state of another structure than it was given: "
            f"{jax.tree.structure(new)}, not {jax.tree.structure(old)}."
        )

    def select(new: Any, old: Any) -> Any:
        # Some optax states change their dtype on the first step, and `lax.select` takes arrays of one dtype.
        # PRNG keys have extended dtypes, to which `jnp.asarray` does not cast.
        if new is not old and not jnp.issubdtype(jnp.result_type(new), jax.dtypes.extended):
            dtype = jnp.result_type(new, old)
            new, old = jnp.asarray(new, dtype), jnp.asarray(old, dtype)
        # A leaf that the optimizer hands on as it is needs no select, and its buffer stays.
        return old if new is old else select_tree(finite, new, old)

    return jax.tree.map(select, new, old)


def _in_order(flags: jax.Array, paths: tuple[str, ...], names: tuple[str, ...]) -> jax.Array:
    """Sorts the flags of the gradients at `paths` by `names`, the parameters that the optimizer knows.

    A parameter without a gradient counts as finite.
    """
    if paths == names:
        return flags
    if unknown := sorted(set(paths) - set(names)):
        raise ValueError(
            f"The gradients have leaves that the optimizer was not initialised with: {unknown[:4]}. "
            f"It knows {list(names[:4])}{'...' if len(names) > 4 else ''}."
        )
    by_name: dict[str, jax.Array] = {}
    for path, flag in zip(paths, flags, strict=True):
        # The two leaves of {"a": {"b": x}, "a/b": y} have one name.
        by_name[path] = by_name[path] & flag if path in by_name else flag
    return jnp.stack([by_name.get(name, jnp.asarray(True)) for name in names])

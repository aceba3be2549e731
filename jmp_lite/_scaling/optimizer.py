"""optax transforms that unscale gradients and skip the steps whose gradients are not finite."""

from typing import Any

import optax

from .._tree import at_least_float32
from .loss_scale import DynamicLossScale, LossScaleLike, as_loss_scale
from .skipping import Skipping, UnscaleState


def unscale() -> optax.GradientTransformationExtraArgs:
    """Divides gradients by the loss scale that `update` is given, for a step that holds the scale itself.

    Put it before every transform that depends on the size of a gradient:

        tx = optax.chain(jmp.unscale(), optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
        tx = jmp.skip_nonfinite(tx)
        updates, opt_state = tx.update(scaled_grads, opt_state, params, loss_scale=loss_scale)

    Gradients from `jmp.value_and_grad` and `jmp.grad` are unscaled already, so leave `unscale` out for them.
    Arrays do not show that they were divided, so nothing can notice that they are divided twice.

    Returns:
        A transform whose `update` needs the argument `loss_scale`, the scale that scaled these gradients,
        before it is adjusted, or its number. Its updates are float32, as from `LossScale.unscale`.

    Raises:
        TypeError: from `update`, `loss_scale=` is missing or is not a loss scale.

    Examples:
        >>> tx = jmp.unscale()
        >>> tx.update(jnp.float16(8), tx.init(jnp.float16(0)), loss_scale=jmp.StaticLossScale(4))[0]
        Array(2., dtype=float32)
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, loss_scale: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        del params, extra_args
        scale = as_loss_scale(loss_scale)
        if scale is None:
            given = "no loss_scale=" if loss_scale is None else type(loss_scale).__name__
            raise TypeError(
                f"jmp.unscale() divides by the loss scale that scaled these gradients. Got {given}. "
                "Pass it on: tx.update(grads, opt_state, params, loss_scale=loss_scale). "
                "Gradients from jmp.value_and_grad are unscaled already: for those, leave unscale out."
            )
        return at_least_float32(scale.unscale(updates)), state

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

    The gradients are checked before everything else, since a clip turns inf into a number. A skipped step
    leaves the parameters and the state of `inner` bit for bit as they were: moments, counts, schedules,
    weight decay. However many steps are skipped in a row, none is applied; `raise_if_stuck` tells the host.

    If `update` gets extra arguments, such as `grad_fn=` of SAM or `value=` of `optax.polyak_sgd`, `inner` may
    evaluate the loss again, or read it. Then a step is also skipped if an update, a scalar among the extra
    arguments, or a number that `inner` changed in its state is inf or NaN. Without extra arguments, an
    infinite update that `inner` makes of finite gradients is applied.

    Put other transforms inside. One that is chained after this one runs on skipped steps too, with updates of
    minus zero. Donated buffers stay in place.

    Args:
        inner: an optax transform, or an `optax.MultiSteps`, which then drops a non-finite micro-batch and
            goes on with the others. It gets half gradients as float32, and is initialized with parameters of
            at least float32, so that moments do not rest in half precision.
        clip_norm: the global norm to which gradients are clipped before `inner`, with the numbers of
            `optax.clip_by_global_norm`. The norm also serves as the check, so that gradients are read once,
            and `get_metrics` reports it. It is inf for finite gradients above 1.8e19. With `loss_scale=`
            given to `update`, it is that of the unscaled gradients. Around `optax.MultiSteps` it would clip
            each micro-batch, and is an error: put `optax.clip_by_global_norm` into the `MultiSteps`.
        axis_name: under `shard_map` or `pmap`, the axis name or names over which all devices agree to skip.
            It is not needed under `jit`, or for gradients that were summed over the axis before. It is needed
            if `inner` has a collective: on a CPU a device that skips a step does not run `inner`.
        name: a name for this optimizer, if a tree holds several: `grads_finite(opt_state, name)`.

    Returns:
        A transform. `update` passes extra arguments on to `inner`. For state outside of the optimizer, such
        as batch statistics, use `select_tree(grads_finite(opt_state), new, old)`.

    Raises:
        ValueError, TypeError: `inner` is not an optax transform, `clip_norm` is not a number above 0; from
            `init`, the parameters are shapes, or `clip_norm` was given and `inner` holds `optax.MultiSteps`;
            from `update`, the state is not that of this transform and its settings, a gradient belongs to no
            parameter or has another shape, or `loss_scale=` was given and no `unscale()` divides by it.

    Examples:
        >>> tx = jmp.skip_nonfinite(optax.sgd(1.0))
        >>> params = jnp.float32(1)
        >>> updates, opt_state = tx.update(jnp.float32(jnp.inf), tx.init(params), params)
        >>> optax.apply_updates(params, updates), jmp.get_metrics(opt_state)["skipped_steps"]
        (Array(1., dtype=float32), Array(1, dtype=int32))
    """
    return Skipping("skip_nonfinite", inner, None, clip_norm, axis_name, name).transform()


def with_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScaleLike | None = None,
    *,
    clip_norm: float | None = None,
    axis_name: Any = None,
    name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Holds a loss scale in the optimizer state, adjusts it after every step, and skips non-finite steps.

    `update` takes true gradients, from `jmp.value_and_grad` with the scale that `get_loss_scale(opt_state)`
    returns. Steps are skipped as by `skip_nonfinite`: put weight decay, schedules and clips inside.

    Args:
        inner: as in `skip_nonfinite`.
        loss_scale: the scale to begin with; None for `DynamicLossScale()`. A number is a `StaticLossScale`,
            which never changes, as in Apex; a `DynamicLossScale` of the number begins with it.
        clip_norm: as in `skip_nonfinite`.
        axis_name: as in `skip_nonfinite`.
        name: as in `skip_nonfinite`.

    Returns:
        A transform. Its state is a `SkipNonfiniteState`.

    Raises:
        TypeError: `loss_scale` is not a loss scale, or `update` was given one.
        ValueError: as in `skip_nonfinite`.

    Examples:
        >>> tx = jmp.with_loss_scale(optax.adamw(3e-4))
        >>> params = jnp.ones(2)
        >>> updates, opt_state = tx.update(jnp.full(2, jnp.nan), tx.init(params), params)
        >>> float(jmp.get_loss_scale(opt_state).loss_scale)
        16384.0
    """
    scale = DynamicLossScale() if loss_scale is None else as_loss_scale(loss_scale)
    if scale is None:
        raise TypeError(
            "with_loss_scale(inner, loss_scale): expected a loss scale such as jmp.DynamicLossScale(), or a "
            f"number for a constant one. Got {type(loss_scale).__name__}."
        )
    return Skipping("with_loss_scale", inner, scale, clip_norm, axis_name, name).transform()

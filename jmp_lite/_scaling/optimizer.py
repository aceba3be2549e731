"""optax transforms that unscale gradients and leave out steps whose gradients are not finite."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._paths import leaf_names
from .._tree import at_least_float32, select_tree
from .early_select import TracedUpdate
from .finite import agree
from .loss_scale import DynamicLossScale, LossScale, is_loss_scale
from .state import SkipNonfiniteState, unwrap

_MISSING: Any = object()


def unscale() -> optax.GradientTransformationExtraArgs:
    """Divides gradients by the loss scale given to `update`, for those who thread it themselves.

    Put it first, before whatever looks at the size of a gradient:

        tx = optax.chain(jmp.unscale(), optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
        tx = jmp.skip_nonfinite(tx)
        updates, opt_state = tx.update(scaled_grads, opt_state, params, loss_scale=loss_scale)

    Returns:
        A transform whose `update` needs `loss_scale=`: the `LossScale` that scaled these gradients,
        before it is adjusted. The gradients come out as `LossScale.unscale` gives them, float32.

    Raises:
        TypeError: from `update`, if `loss_scale=` was left out or is no loss scale.

    >>> from jmp_lite import StaticLossScale
    >>> tx = unscale()
    >>> tx.update(jnp.float16(8), tx.init(jnp.float16(0)), loss_scale=StaticLossScale(4))[0]
    Array(2., dtype=float32)
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, loss_scale: Any = _MISSING, **extra_args: Any
    ) -> tuple[Any, Any]:
        del params, extra_args
        if not is_loss_scale(loss_scale):
            given = "nothing" if loss_scale is _MISSING else type(loss_scale).__name__
            raise TypeError(
                "jmp.unscale() divides by the loss scale that scaled these gradients and was given "
                f"{given}. Pass it on: tx.update(grads, opt_state, params, loss_scale=loss_scale). "
                "Gradients from jmp.value_and_grad are unscaled already: for those, leave unscale out."
            )
        return at_least_float32(loss_scale.unscale(updates)), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def skip_nonfinite(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    axis_name: Any = None,
    name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Leaves out the steps whose gradients hold inf or NaN.

    The check comes before everything else, since a clip turns inf into a number. A skipped step
    leaves the parameters and the state of `inner` bit for bit as they were: moments, counts,
    schedules, weight decay. Such a step is never applied, however many came in a row;
    `raise_if_stuck` tells the host. Nothing branches: donated buffers stay in place. What is checked
    are the gradients: an update that `inner` makes infinite out of finite ones is applied. If the
    updates depend on a sum of the squares of all gradients, as behind a clip by global norm, that sum is
    the check; gradients beyond 1.8e19, whose squares float32 cannot hold, then count as non-finite.

    Args:
        inner: an optax transform, or an `optax.MultiSteps`, which then drops a non-finite micro-batch
            and goes on with the others. Its state is made for parameters of at least float32, so that
            moments do not rest in half precision.
        axis_name: under `shard_map` or `pmap`, the axis name or names over which all devices agree to
            skip. Not needed under `jit`, nor where gradients were summed over the axis before.
        name: tells two optimizers in one tree apart, as `grads_finite(opt_state, name)`.

    Returns:
        A transform. Extra arguments of `update` reach `inner`. For state that the optimizer does not
        hold, such as batch statistics, use `select_tree(grads_finite(opt_state), new, old)`.

    >>> from jmp_lite import skipped_steps
    >>> tx = skip_nonfinite(optax.sgd(1.0))
    >>> params = jnp.float32(1)
    >>> updates, opt_state = tx.update(jnp.float32(jnp.inf), tx.init(params), params)
    >>> optax.apply_updates(params, updates), skipped_steps(opt_state)
    (Array(1., dtype=float32), Array(1, dtype=int32))
    """
    return _skip_nonfinite(inner, None, axis_name, name)


def with_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScale | None = None,
    *,
    axis_name: Any = None,
    name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`skip_nonfinite` with a loss scale in its state, adjusted after every step.

    The gradients given to `update` are true ones, from `jmp.value_and_grad` with the scale that
    `get_loss_scale(opt_state)` returns.

    Args:
        inner: as in `skip_nonfinite`.
        loss_scale: the scale to begin with; `DynamicLossScale()` if None.
        axis_name, name: as in `skip_nonfinite`.

    Raises:
        TypeError: `loss_scale` is no loss scale, or `update` was given one.

    >>> tx = with_loss_scale(optax.sgd(1.0), DynamicLossScale(1024.0))
    >>> _, opt_state = tx.update(jnp.float32(jnp.nan), tx.init(jnp.float32(1)))
    >>> from jmp_lite import get_loss_scale
    >>> float(get_loss_scale(opt_state).loss_scale)
    512.0
    """
    # Not a default argument: a value made when this file is imported would be shared by all.
    loss_scale = DynamicLossScale() if loss_scale is None else loss_scale
    if not is_loss_scale(loss_scale):
        raise TypeError(
            "with_loss_scale(inner, loss_scale): expected a loss scale such as "
            f"jmp.DynamicLossScale(), got {type(loss_scale).__name__}."
        )
    return _skip_nonfinite(inner, loss_scale, axis_name, name)


def _skip_nonfinite(
    inner: Any, loss_scale: LossScale | None, axis_name: Any, name: str | None
) -> optax.GradientTransformationExtraArgs:
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        differentiated = params.fast if isinstance(params, optax.LookaheadParams) else params
        names = leaf_names(unwrap(differentiated))
        return SkipNonfiniteState(
            inner_state=inner.init(at_least_float32(params)),
            loss_scale=jax.tree.map(jnp.asarray, loss_scale),
            leaf_finite=jnp.ones(len(names), jnp.bool_),
            skipped_steps=jnp.int32(0),
            consecutive_skipped_steps=jnp.int32(0),
            leaf_names=names,
            name=name,
        )

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if loss_scale is not None and "loss_scale" in extra_args:
            raise TypeError(
                "update was given loss_scale=, but this optimizer holds its own. Leave it out and give "
                "true gradients, from jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state)); or "
                "thread the scale yourself with jmp.skip_nonfinite and jmp.unscale."
            )
        paths = _checked_paths(updates, state.leaf_names)
        inner_update = functools.partial(inner.update, **extra_args)
        factor = getattr(extra_args.get("loss_scale"), "loss_scale", None)
        traced = TracedUpdate(inner_update, updates, state.inner_state, params, factor)
        flags, finite = traced.leaves_finite()
        if axis_name is not None:
            agreed = agree(jnp.append(flags, finite), axis_name)
            flags, finite = agreed[:-1], agreed[-1]
        skipped = (~finite).astype(jnp.int32)
        new_updates, new_inner = traced.run(finite)
        # Minus zero is the one number that leaves every parameter as it is: -0.0 + 0.0 is 0.0.
        nothing = jax.tree.map(lambda update: -jnp.zeros_like(update), new_updates)
        new_state = SkipNonfiniteState(
            inner_state=new_inner,
            loss_scale=None if loss_scale is None else state.loss_scale.adjust(finite),
            leaf_finite=_in_order(flags, paths, state.leaf_names),
            skipped_steps=state.skipped_steps + skipped,
            consecutive_skipped_steps=(state.consecutive_skipped_steps + 1) * skipped,
            leaf_names=state.leaf_names,
            name=state.name,
        )
        return select_tree(finite, new_updates, nothing), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _checked_paths(updates: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """The paths of the gradients, which should be among the names that the optimizer knows."""
    paths = leaf_names(unwrap(updates))
    if unknown := sorted(set(paths) - set(names)):
        raise ValueError(
            f"The gradients have leaves that the optimizer was not initialised with: {unknown[:4]}. "
            f"It knows {list(names[:4])}{'...' if len(names) > 4 else ''}."
        )
    return paths


def _in_order(flags: jax.Array, paths: tuple[str, ...], names: tuple[str, ...]) -> jax.Array:
    """Sorts the flags of the gradients at `paths` by `names`; a gradient that is not there is finite."""
    if paths == names:
        return flags
    found: dict[str, jax.Array] = {}
    for path, flag in zip(paths, flags, strict=True):
        found[path] = found[path] & flag if path in found else flag  # {"a": {"b": x}, "a/b": y}
    return jnp.stack([found.get(name, jnp.asarray(True)) for name in names])

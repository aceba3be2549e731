"""optax transforms that unscale gradients and leave out steps whose gradients are not finite."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._loss_scale import DynamicLossScale, LossScale
from ._path import leaf_names
from ._tree import agree, at_least_float32, leaves_finite, register_state, select_tree, static_field

_MISSING: Any = object()


@register_state
@dataclasses.dataclass(frozen=True)
class SkipNonfiniteState:
    """The state of `skip_nonfinite` and `with_loss_scale`; read it with the functions below.

    Attributes:
        inner_state: the state of the wrapped transform.
        loss_scale: the loss scale, or None if the caller threads it.
        leaf_finite: which gradients of the last step were finite, shape `(len(leaf_names),)`, bool.
        skipped_steps: how many steps were left out, shape `()`, int32.
        consecutive_skipped_steps: how many of them since the last one taken, shape `()`, int32.
        leaf_names: the paths of the parameters.
        name: what tells this optimizer from another in the same tree.
    """

    inner_state: Any
    loss_scale: Any
    leaf_finite: Any
    skipped_steps: Any
    consecutive_skipped_steps: Any
    leaf_names: tuple[str, ...] = static_field()
    name: str | None = static_field()


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
        if not isinstance(loss_scale, LossScale):
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
    schedules, weight decay. A non-finite update is never applied, however many came in a row;
    `raise_if_stuck` tells the host. Nothing branches: donated buffers stay in place.

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
    >>> float(get_loss_scale(opt_state).loss_scale)
    512.0
    """
    # Not a default argument: a value made when this file is imported would be shared by all.
    loss_scale = DynamicLossScale() if loss_scale is None else loss_scale
    if not isinstance(loss_scale, LossScale):
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
        names = leaf_names(_unwrap(params))
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
        flags = _leaf_finite(updates, state.leaf_names, axis_name)
        finite = flags.all()
        new_updates, new_inner = inner.update(updates, state.inner_state, params, **extra_args)
        # Minus zero is the one number that leaves every parameter as it is: -0.0 + 0.0 is 0.0.
        nothing = jax.tree.map(lambda u: jnp.full_like(u, -0.0), new_updates)
        new_state = SkipNonfiniteState(
            inner_state=_select(finite, new_inner, state.inner_state),
            loss_scale=None if loss_scale is None else state.loss_scale.adjust(finite),
            leaf_finite=flags,
            skipped_steps=state.skipped_steps + ~finite,
            consecutive_skipped_steps=(state.consecutive_skipped_steps + 1) * ~finite,
            leaf_names=state.leaf_names,
            name=state.name,
        )
        return _select(finite, new_updates, nothing), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _leaf_finite(updates: Any, names: tuple[str, ...], axis_name: Any) -> jax.Array:
    """Which of the named gradients are finite, shape `(len(names),)`; one that is not there is."""
    paths = leaf_names(_unwrap(updates))
    found = dict(zip(paths, leaves_finite(updates), strict=True))
    if unknown := [path for path in paths if path not in names]:
        raise ValueError(
            f"The gradients have leaves that the optimizer was not initialised with: {unknown[:4]}. "
            f"It knows {list(names[:4])}{'...' if len(names) > 4 else ''}."
        )
    flags = [found.get(name, jnp.asarray(True)) for name in names]
    stacked = jnp.stack(flags) if flags else jnp.ones(0, jnp.bool_)
    return stacked if axis_name is None else agree(stacked, axis_name)


def _select(finite: jax.Array, new: Any, old: Any) -> Any:
    """`select_tree` for a state that may change dtype on its first step, as optax's states do."""

    def widest(x: Any, y: Any) -> Any:
        return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x.astype(jnp.result_type(x, y))

    new, old = jax.tree.map(jnp.asarray, (new, old))
    return select_tree(finite, jax.tree.map(widest, new, old), jax.tree.map(widest, old, new))


def get_loss_scale(opt_state: Any, name: str | None = None) -> Any:
    """Returns the loss scale that `with_loss_scale` holds.

    Args:
        opt_state: an optimizer state, or whatever holds it at any depth: a chain, `optax.masked`,
            `optax.MultiSteps`, `optax.inject_hyperparams`, `optax.multi_transform`, a Flax
            `TrainState`, an `nnx.Optimizer`.
        name: the name given to `with_loss_scale`, needed where the tree holds more than one.

    Returns:
        The `LossScale`, to be used for this step's loss.

    Raises:
        ValueError: there is none, or more than one to choose from.

    >>> float(get_loss_scale(with_loss_scale(optax.sgd(1.0)).init(jnp.ones(2))).loss_scale)
    32768.0
    """
    states = [state for state in _find_states(opt_state) if state.loss_scale is not None]
    return _unwrap(_choose(states, name, "with_loss_scale").loss_scale)


def grads_finite(opt_state: Any, name: str | None = None) -> jax.Array:
    """Returns whether the last step's gradients were finite, and the step was taken.

    Args:
        opt_state, name: as in `get_loss_scale`.

    Returns:
        A boolean scalar, shape `()`; true before the first step.

    Raises:
        ValueError: as in `get_loss_scale`.

    >>> bool(grads_finite(skip_nonfinite(optax.sgd(1.0)).init(jnp.ones(2))))
    True
    """
    return jnp.asarray(_unwrap(_skip_state(opt_state, name).leaf_finite)).all()


def skipped_steps(opt_state: Any, name: str | None = None) -> jax.Array:
    """Returns how many steps were skipped since the optimizer was initialised.

    Args:
        opt_state, name: as in `get_loss_scale`.

    Returns:
        A count, shape `()`, int32.

    Raises:
        ValueError: as in `get_loss_scale`.

    >>> int(skipped_steps(skip_nonfinite(optax.sgd(1.0)).init(jnp.ones(2))))
    0
    """
    return _unwrap(_skip_state(opt_state, name).skipped_steps)


def consecutive_skipped_steps(opt_state: Any, name: str | None = None) -> jax.Array:
    """Returns how many steps were skipped since the last one that was taken.

    Args:
        opt_state, name: as in `get_loss_scale`.

    Returns:
        A count, shape `()`, int32.

    Raises:
        ValueError: as in `get_loss_scale`.

    >>> int(consecutive_skipped_steps(skip_nonfinite(optax.sgd(1.0)).init(jnp.ones(2))))
    0
    """
    return _unwrap(_skip_state(opt_state, name).consecutive_skipped_steps)


def raise_if_stuck(opt_state: Any, max_consecutive_skips: int = 50, name: str | None = None) -> None:
    """Raises on the host if too many steps in a row were skipped.

    Call it outside `jit`, every few steps: it waits for the device. A dynamic scale that starts at
    2**15 may rightly skip 15 steps before it has found its place.

    Args:
        opt_state, name: as in `get_loss_scale`.
        max_consecutive_skips: how many skips in a row are too many.

    Raises:
        FloatingPointError: as many steps in a row, or more, were skipped. The message names the
            parameters whose gradients were not finite on the last one.
        TypeError: `opt_state` is traced.
        ValueError: as in `get_loss_scale`, or `max_consecutive_skips` is below 1.

    >>> raise_if_stuck(skip_nonfinite(optax.sgd(1.0)).init(jnp.ones(2)))
    """
    if max_consecutive_skips < 1:
        raise ValueError(f"max_consecutive_skips should be 1 or above, got {max_consecutive_skips}.")
    state = _skip_state(opt_state, name)
    try:
        skips = int(_unwrap(state.consecutive_skipped_steps))
    except jax.errors.ConcretizationTypeError:
        raise TypeError("raise_if_stuck reads values: call it on the host, outside jit.") from None
    if skips < max_consecutive_skips:
        return
    flags = np.asarray(_unwrap(state.leaf_finite))
    bad = [path or "(the only parameter)" for path, ok in zip(state.leaf_names, flags) if not ok]
    scale = (
        ""
        if state.loss_scale is None
        else f" The loss scale is {float(_unwrap(state.loss_scale).loss_scale)}."
    )
    raise FloatingPointError(
        f"The last {skips} steps were skipped: inf or NaN in the gradients of {', '.join(bad)} "
        f"({len(bad)} of {len(flags)} parameters).{scale}\n"
        "At a small loss scale the cause is the model or the data: an inf or NaN in a batch, a learning "
        "rate too large, log or division of zero, an activation beyond 65504 in float16. Look at the "
        "first of these layers in float32 (jax_debug_nans), or keep it in float32 with a policy rule."
    )


def _find_states(tree: Any) -> list[SkipNonfiniteState]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, SkipNonfiniteState))
    return [leaf for leaf in leaves if isinstance(leaf, SkipNonfiniteState)]


def _skip_state(opt_state: Any, name: str | None) -> SkipNonfiniteState:
    return _choose(_find_states(opt_state), name, "skip_nonfinite or with_loss_scale")


def _choose(states: list[SkipNonfiniteState], name: str | None, wrapper: str) -> SkipNonfiniteState:
    found = [state for state in states if name is None or state.name == name]
    if len(found) == 1:
        return found[0]
    names = [state.name for state in states]
    if not states:
        raise ValueError(
            f"No optimizer wrapped in {wrapper} was found in this state. Wrap yours, for example "
            "tx = jmp.with_loss_scale(optax.adamw(3e-4)), and give the state that tx.init returned."
        )
    if not found:
        raise ValueError(f"No optimizer is named {name!r}. The names here are {names}.")
    raise ValueError(
        f"{len(found)} optimizers wrapped in {wrapper} were found, named {names}. Name them apart, "
        "with_loss_scale(..., name='generator'), and ask for one by its name."
    )


def _unwrap(tree: Any) -> Any:
    """Takes the arrays out of the variables in which Flax NNX keeps parameters and optimizer state."""
    is_variable = lambda node: hasattr(node, "get_value")
    return jax.tree.map(lambda v: v.get_value() if is_variable(v) else v, tree, is_leaf=is_variable)

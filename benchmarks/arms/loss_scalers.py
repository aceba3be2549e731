"""Ways to scale a loss: jmp_lite's and those of its peers, each written as in its own documentation.

Each is a function of an optimizer and of the global norm to which gradients are clipped, or None. To add one,
write it and add it to `SCALERS`; one whose package the extra [h100] lacks to `PEERS`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

import jmp_lite

Loss = Callable[[Any], tuple[jax.Array, Any]]
SCALE = 2.0**15


@dataclasses.dataclass(frozen=True)
class Scaler:
    """An optimizer with a loss scale.

    Attributes:
        init: takes parameters and an initial scale, and returns the state of the optimizer and of the scale.
        step: takes a loss, parameters, the state and statistics (such as batch statistics, `()` for none). It
            returns new parameters, a new state, new statistics and the value of the loss. The loss returns
            its value and new statistics. A step that is skipped keeps the old statistics.
        scale: takes the state and returns the scale.
    """

    init: Callable[[Any, float], Any]
    step: Callable[[Loss, Any, Any, Any], tuple[Any, Any, Any, jax.Array]]
    scale: Callable[[Any], Any]


def plain(tx: Any, clip_norm: float | None = None) -> Scaler:
    """No loss scale."""
    tx = _clipped(tx, clip_norm)

    def step(loss: Loss, params: Any, state: Any, statistics: Any) -> Any:
        del statistics
        (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = tx.update(_wide(grads), state, params)
        return optax.apply_updates(params, updates), state, statistics, value

    return Scaler(lambda params, _: tx.init(params), step, lambda _: 1.0)


def ours(tx: Any, clip_norm: float | None = None) -> Scaler:
    """jmp_lite, as in its README."""
    with_scale = lambda scale: jmp_lite.with_loss_scale(
        tx, jmp_lite.DynamicLossScale(scale), clip_norm=clip_norm
    )
    update = with_scale(SCALE).update

    def step(loss: Loss, params: Any, state: Any, statistics: Any) -> Any:
        scaled = jmp_lite.value_and_grad(loss, jmp_lite.get_loss_scale(state), has_aux=True)
        (value, new_statistics), grads = scaled(params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        statistics = jmp_lite.select_tree(jmp_lite.grads_finite(state), new_statistics, statistics)
        return params, state, statistics, value

    init = lambda params, scale: with_scale(scale).init(params)
    return Scaler(init, step, lambda state: jmp_lite.get_loss_scale(state).loss_scale)  # type: ignore[attr-defined]


def deepmind_jmp(tx: Any, clip_norm: float | None = None) -> Scaler:
    """DeepMind's jmp, as in its README. The state holds arrays: JAX cannot lower jmp's object."""
    import jmp  # Here, because it is an optional dependency.

    tx = _clipped(tx, clip_norm)

    def init(params: Any, scale: float) -> Any:
        return tx.init(params), (jnp.float32(scale), jnp.int32(0))

    def step(loss: Loss, params: Any, state: Any, statistics: Any) -> Any:
        inner, (scale, counter) = state
        loss_scale = jmp.DynamicLossScale(scale, counter)

        def scaled(params: Any) -> Any:
            value, new_statistics = loss(params)
            return loss_scale.scale(value), (value, new_statistics)

        grads, (value, new_statistics) = jax.grad(scaled, has_aux=True)(params)
        grads = loss_scale.unscale(_wide(grads))
        updates, new_inner = tx.update(grads, inner, params)
        new_params = optax.apply_updates(params, updates)
        finite = jmp.all_finite(grads)
        params, inner, statistics = jmp.select_tree(
            finite, (new_params, new_inner, new_statistics), (params, inner, statistics)
        )
        adjusted = loss_scale.adjust(finite)
        return params, (inner, (adjusted.loss_scale, adjusted.counter)), statistics, value

    return Scaler(init, step, lambda state: state[1][0])


def flax_dynamic_scale(tx: Any, clip_norm: float | None = None) -> Scaler:
    """Flax's DynamicScale, as in Flax's ImageNet example."""
    tx = _clipped(tx, clip_norm)

    def init(params: Any, scale: float) -> Any:
        initial: Any = jnp.float32(scale)
        return tx.init(params), DynamicScale(scale=initial)

    def step(loss: Loss, params: Any, state: Any, statistics: Any) -> Any:
        inner, dynamic_scale = state
        dynamic_scale, finite, (value, new_statistics), grads = dynamic_scale.value_and_grad(
            loss, has_aux=True
        )(params)
        updates, new_inner = tx.update(_wide(grads), inner, params)
        new_params = optax.apply_updates(params, updates)
        choose = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
        params, inner = choose(new_params, params), choose(new_inner, inner)
        return params, (inner, dynamic_scale), choose(new_statistics, statistics), value

    return Scaler(init, step, lambda state: state[1].scale)


def optax_apply_if_finite(tx: Any, clip_norm: float | None = None) -> Scaler:
    """optax.apply_if_finite, with a static scale by hand. It does not keep the old statistics."""
    tx = optax.apply_if_finite(_clipped(tx, clip_norm), max_consecutive_errors=10)

    def step(loss: Loss, params: Any, state: Any, statistics: Any) -> Any:
        del statistics

        def scaled(params: Any) -> Any:
            value, statistics = loss(params)
            return value * 1024.0, (value, statistics)

        grads, (value, statistics) = jax.grad(scaled, has_aux=True)(params)
        grads = jax.tree.map(lambda grad: grad / 1024.0, _wide(grads))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, statistics, value

    return Scaler(lambda params, _: tx.init(params), step, lambda _: 1024.0)


def of_mpx(tx: Any, clip_norm: float | None = None) -> Scaler:
    """mpx, as in its README. On a step on which the scale changes it unscales by the new scale."""
    import mpx  # Here, because it is an optional dependency.

    tx = _clipped(tx, clip_norm)

    def init(params: Any, scale: float) -> Any:
        return tx.init(params), mpx.DynamicLossScaling(jnp.float32(scale), jnp.float32(1))

    def step(loss: Loss, params: Any, state: Any, statistics: Any) -> Any:
        inner, scaling = state
        (value, new_statistics), scaling, finite, grads = mpx.filter_value_and_grad(
            loss, scaling, has_aux=True
        )(params)
        params, inner = mpx.optimizer_update(params, tx, inner, _wide(grads), finite)
        statistics = mpx.select_tree(finite, new_statistics, statistics)
        return params, (inner, scaling), statistics, value

    return Scaler(init, step, lambda state: state[1].loss_scaling)


SCALERS: dict[str, Callable[..., Scaler]] = {
    "plain": plain,
    "jmp 0.0.4": deepmind_jmp,
    "Flax DynamicScale": flax_dynamic_scale,
    "optax.apply_if_finite": optax_apply_if_finite,
    "jmp_lite": ours,
}
PEERS = {**SCALERS, "mpx 0.1.8": of_mpx}


def _clipped(tx: Any, clip_norm: float | None) -> Any:
    return tx if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), tx)


def _wide(grads: Any) -> Any:
    return jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)


def step_of(scaler: Scaler, loss: Callable[..., jax.Array]) -> Callable[..., tuple[Any, Any]]:
    """Returns a step: a function of parameters, state and a batch that returns the new ones."""

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        params, state, *_ = scaler.step(lambda params: (loss(params, batch), ()), params, state, ())
        return params, state

    return step


@jax.custom_vjp
def with_gradients(params: Any, grads: Any) -> jax.Array:
    """A float32 loss whose gradients are `grads`, in their own dtype."""
    del params, grads
    return jnp.float32(0)


def _forward(params: Any, grads: Any) -> tuple[jax.Array, Any]:
    return with_gradients(params, grads), grads


def _backward(grads: Any, cotangent: jax.Array) -> tuple[Any, None]:
    return jax.tree.map(lambda grad: grad.astype(jnp.float32) * cotangent, grads), None


with_gradients.defvjp(_forward, _backward)

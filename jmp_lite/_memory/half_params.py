"""Parameters that rest in half precision and still learn: from float32 masters, or by stochastic rounding."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._paths import path_name, shown_difference
from .._tree import at_least_float32, is_half, nodes_of
from . import rounding
from .rounding import AxisName, RoundingKey
from .wrapper import ChangedDtype, Transform, as_transform, check_update


class MasterParamsState(NamedTuple):
    """The state of `with_master_params`."""

    # A tree like the parameters: float32 masters, and `optax.MaskedNode()` where none is needed.
    masters: Any
    inner_state: Any  # That of the wrapped transform.


def with_master_params(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Keeps a float32 master of every parameter stored in half precision, and optimizes the masters.

    A float16 parameter of 1 loses every update below `2**-11`. Its master keeps them, and the parameter is
    the master rounded to nearest (Micikevicius et al., Mixed Precision Training, section 3.1; O2 of Apex,
    `multi_precision=True` of MXNet). Parameters of float32 or float64 have no master.

    `inner` runs as in a float32 program: it is initialized with the float32 parameters, and its `update` gets
    float32 gradients and parameters. Put `with_loss_scale` outside:

        tx = jmp.with_loss_scale(jmp.with_master_params(optax.adamw(3e-4)))

    If a parameter differs from its rounded master, because you have loaded, averaged or clipped weights, the
    optimizer goes on from the parameter. While a master is beyond the largest number of the half dtype, 65504
    in float16, the parameter is this number.

    Args:
        inner: an optax transform, or an `optax.MultiSteps`, which then accumulates in float32.

    Returns:
        A transform, whose `update` needs the parameters. Its updates of half parameters are float32, and
        `optax.apply_updates(params, updates)` gives the masters, rounded. The sum is exact unless a parameter
        shrinks in one step to less than `2**-13` of its old value (`2**-16` in bfloat16). Then it is off by
        at most `2**-24` of the old value, as in float32, and the optimizer goes on from the parameter.

    Raises:
        TypeError: `inner` is not an optax transform; from `init`, the parameters are shapes; from `update`,
            the state is not that of this transform.
        ValueError: from `init`, `inner` rounds half parameters too; from `update`, there are no parameters,
            or one has another dtype than in `init`, or a gradient has another shape than its parameter.

    Examples:
        >>> params = jnp.ones((), jnp.float16)
        >>> tx = jmp.with_master_params(optax.sgd(1.0))
        >>> state = tx.init(params)
        >>> for _ in range(3):
        ...     updates, state = tx.update(jnp.float32(2**-12), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> 1 - params, 1 - state.masters  # 3 * 2**-12, rounded to 2**-10; without masters it would be 0.
        (Array(0.000977, dtype=float16), Array(0.00073242, dtype=float32))
    """
    made_by = "with_master_params"
    transform = as_transform(made_by, inner, needs_all=True)

    def init(params: Any) -> Any:
        inner_state = _init_in_float32(made_by, transform, params)
        masters = jax.tree.map(lambda p: p.astype(jnp.float32) if is_half(p) else optax.MaskedNode(), params)
        return MasterParamsState(masters, inner_state)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        check_update(made_by, MasterParamsState, state, params, needs_params=True)
        full = full_params(params, state.masters)
        grads = at_least_float32(updates)
        # The step of a float32 program: `inner` sees float32 parameters, and the new ones are float32.
        changes, inner_state = transform.update(grads, state.inner_state, full, **extra_args)
        new = optax.apply_updates(full, changes)
        # The new value of a parameter without a master is in `changes` already.
        masters = jax.tree.map(lambda p, master: master if is_half(p) else optax.MaskedNode(), params, new)
        return _rounding_updates(params, changes, new), MasterParamsState(masters, inner_state)

    return Transform(init, update)


class StochasticRoundingState(NamedTuple):
    """The state of `with_stochastic_rounding`."""

    inner_state: Any  # That of the wrapped transform.
    key: Any  # The `RoundingKey` of the next step.


def with_stochastic_rounding(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    key: int | jax.Array = 0,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Rounds the new parameters of half precision stochastically, so that they learn without masters.

    Rounding to nearest never changes a bfloat16 parameter of 1 by updates of `-2**-12`. Stochastic rounding
    subtracts `2**-8` on one step in 16, which is right on average. A parameter needs 2 bytes instead of the 6
    of `with_master_params`, and training is noisier: the guide on memory compares their accuracy (Zamirai
    et al., Revisiting BFloat16 Training, 2020).

    `inner` runs as in a float32 program: it is initialized with float32 parameters, and its `update` gets
    float32 gradients and parameters. Its state can rest in bfloat16 as well:

        inner = jmp.with_half_state(optax.adamw(3e-4))
        tx = jmp.with_loss_scale(jmp.with_stochastic_rounding(inner))

    Args:
        inner: an optax transform, or an `optax.MultiSteps`.
        key: an integer or a PRNG key. The same key gives the same run. The state holds the key of the next
            step, and a step that `with_loss_scale` skips does not change it.
        axis_name: under `shard_map`, the axis name or names over which parameters are sharded; under `vmap`,
            the axis of an ensemble. Without it all shards or members use the same random bits. Replicated
            parameters use the same bits on all devices, unless `shard_map` has `check_vma=False`. Not needed
            under `jit`.

    Returns:
        A transform, whose `update` needs the parameters. Its updates of half parameters are float32, and
        `optax.apply_updates(params, updates)` gives the sum of parameter and inner update, rounded by
        `stochastic_round`, and at most the largest number of its dtype. Parameters of float32 and float64
        are not rounded.

    Raises:
        TypeError: `inner` is not an optax transform, or `key` is not a key; from `init`, the parameters are
            shapes; from `update`, the state is not that of this transform.
        ValueError: from `init`, `inner` rounds half parameters too; from `update`, there are no parameters,
            or a gradient has another shape than its parameter.

    Examples:
        >>> params = jnp.ones(4000, jnp.bfloat16)
        >>> tx = jmp.with_stochastic_rounding(optax.sgd(1.0))
        >>> updates, state = tx.update(jnp.full(4000, 2**-12), tx.init(params), params)
        >>> params = optax.apply_updates(params, updates)
        >>> params.dtype.name, round(float(jnp.mean(params < 1)), 2)  # 1 / 16 of them.
        ('bfloat16', 0.06)
    """
    made_by = "with_stochastic_rounding"
    transform = as_transform(made_by, inner, needs_all=True)

    def init(params: Any) -> Any:
        return StochasticRoundingState(
            _init_in_float32(made_by, transform, params), rounding.first_key(made_by, key)
        )

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        check_update(made_by, StochasticRoundingState, state, params, needs_params=True)
        # Without masters, the sum of parameter and update is float32 within this step only.
        full = at_least_float32(params)
        grads = at_least_float32(updates)
        changes, inner_state = transform.update(grads, state.inner_state, full, **extra_args)

        def key_of(param):
            return rounding.key_of_shard(state.key, axis_name, param)

        updates = _rounding_updates(params, changes, optax.apply_updates(full, changes), key_of)
        return updates, StochasticRoundingState(inner_state, rounding.next_key(state.key))

    return Transform(init, update)


def _init_in_float32(made_by: str, transform: Transform, params: Any) -> Any:
    """Returns the state of the wrapped transform for float32 parameters. It may not round any itself."""
    state = transform.init(at_least_float32(params))
    if nodes_of(state, MasterParamsState, StochasticRoundingState):
        raise ValueError(
            f"{made_by}(inner): inner holds with_master_params or with_stochastic_rounding. It would see "
            "float32 parameters, and so do nothing. Use one of the two."
        )
    return state


def _rounding_updates(
    params: Any, changes: Any, new: Any, key_of: Callable[[jax.Array], RoundingKey | None] = lambda _: None
) -> Any:
    """Returns `changes` with updates that make half parameters those of `new`, rounded.

    `key_of` returns the key that rounds a parameter stochastically, or None to round to nearest.
    """
    # The index of a leaf is a part of its random bits: leaves of one shape would be rounded alike.
    leaves, structure = jax.tree.flatten(params)
    updates = structure.flatten_up_to(changes)
    for index, (param, new_param) in enumerate(zip(leaves, structure.flatten_up_to(new))):
        if is_half(param):
            # From inf no update leads back to a number.
            new_param = rounding.within(new_param, param.dtype)
            rounded = rounding.round_leaf(new_param, param.dtype, key_of(param), index)
            updates[index] = rounding.update_to(param, rounded)
    return structure.unflatten(updates)


def full_params(params: Any, masters: Any) -> Any:
    """Returns the parameters in float32: their masters, or themselves if they are not the rounded master."""

    def widen(path: tuple[Any, ...], param: Any, master: Any) -> Any:
        has_master = not isinstance(master, optax.MaskedNode)
        if has_master != is_half(param):
            raise _changed_dtype(path_name(path), jnp.result_type(param), has_master)
        if not has_master:
            return param
        # Not a cast: XLA may drop a cast to half and back (https://github.com/jax-ml/jax/issues/6283), as it
        # does on GPUs (https://github.com/openxla/xla/issues/41605). Every parameter would then look changed.
        rounded = rounding.round_to(rounding.within(master, param.dtype), param.dtype)
        unchanged = rounded == param.astype(jnp.float32)
        # By element, since a user may have clipped or averaged some of them.
        return jnp.where(unchanged, master, param.astype(jnp.float32))

    # JAX sees no leaf in `optax.MaskedNode`, which stands for a parameter without a master.
    def is_masked(node):
        return isinstance(node, optax.MaskedNode)

    given, known = (jax.tree.structure(tree, is_leaf=is_masked) for tree in (params, masters))
    if given != known:
        raise ValueError(
            "with_master_params: the parameters have another structure than those that the optimizer was "
            f"initialized with. Of these two trees: {shown_difference(params, masters)}."
        )
    return jax.tree_util.tree_map_with_path(widen, params, masters)


def _changed_dtype(name: str, dtype: Any, has_master: bool) -> ChangedDtype:
    """Returns the error about a parameter that was in half precision or in float32, and now is in `dtype`."""
    if not has_master:
        return ChangedDtype(
            f"with_master_params: the parameter {name!r} is {dtype.name}, and had no master when the "
            "optimizer was initialized: it was float32. Keep it float32, or make new masters from the "
            "parameters: jmp.migrate_state(tx, params, old_state), of the state inside with_master_params."
        )
    return ChangedDtype(
        f"with_master_params: the parameter {name!r} is {dtype.name}, and was in half precision when the "
        "optimizer was initialized. optax.apply_updates keeps the dtypes of the parameters; "
        "equinox.apply_updates and a plain sum with the float32 updates do not. Cast this parameter back, "
        "for example p.astype(jnp.bfloat16), and its master goes on; jmp.get_master_params(opt_state, "
        "params) then gives the float32 parameters."
    )


def init_for_masters(inner: optax.GradientTransformation, params: Any) -> Any:
    """Returns a state of `inner` for float32 parameters; only `with_master_params` sees the half ones."""
    # `with_loss_scale` is outside of `with_master_params`, with any transforms between them. It initializes
    # all of them with float32 parameters, so that `with_master_params` makes no masters. So `init` runs again
    # with the parameters as they are, and the states of `with_master_params` are taken from that run.
    wide = at_least_float32(params)
    state = inner.init(wide)
    if not any(map(is_half, jax.tree.leaves(params))) or not nodes_of(state, MasterParamsState):
        return state

    def choose(wide, narrow):
        return narrow if is_master_state(wide) else wide

    return jax.tree.map(choose, state, inner.init(params), is_leaf=is_master_state)


def is_master_state(node: Any) -> bool:
    return isinstance(node, MasterParamsState)

"""Reading and writing the float32 master weights of any optimizer state: for checkpoints and evaluation."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._paths import named_leaves, path_name
from .._tree import cast_leaf, has_dtype, is_half, unwrap
from .half_params import MasterWeightsState, full_params, is_master_state, master_states
from .rounding import round_to
from .wrapper import shapes

S = TypeVar("S")
T = TypeVar("T")


def master_params(opt_state: Any, params: T) -> T:
    """Returns the parameters in float32, as the optimizer has them, for checkpoints and evaluation.

    As Apex's `master_params(optimizer)`. The way back from a checkpoint is `set_master_params`.

    Args:
        opt_state: an optimizer state with a state of `with_master_weights` at any depth: under
            `with_loss_scale`, in a chain, in `optax.masked`, in several parts of `optax.multi_transform`; a
            Flax `TrainState`, an `nnx.Optimizer`.
        params: the parameters that belong to it.

    Returns:
        A tree like `params`. A parameter in half precision is its master, bit for bit. One without a master,
        or one that was changed since the last step, is cast. Other parameters are as they are. All arrays are
        those of the state where possible: copy them before a step that donates the state.

    Raises:
        ValueError: there is no state of `with_master_weights`, or one of other parameters.

    Examples:
        >>> params = {"w": jnp.ones((), jnp.float16)}
        >>> tx = jmp.with_master_weights(optax.sgd(2**-12))
        >>> updates, opt_state = tx.update({"w": jnp.ones(())}, tx.init(params), params)
        >>> jmp.master_params(opt_state, optax.apply_updates(params, updates))
        {'w': Array(0.99975586, dtype=float32)}
    """
    params = unwrap(params)
    masters = _masters_by_path(opt_state, params)

    def widen(path: tuple[Any, ...], param: Any) -> Any:
        if not is_half(param):
            return param
        name = path_name(path)
        if name not in masters:  # For example frozen, by `optax.multi_transform`.
            return cast_leaf(param, np.dtype(np.float32))
        return full_params(param, masters[name])

    return jax.tree_util.tree_map_with_path(widen, params)


def set_master_params(opt_state: S, params: T, values: Any) -> tuple[T, S]:
    """Puts float32 parameters, such as those of a checkpoint, into half parameters and their masters.

    Args:
        opt_state: as in `master_params`; of an `nnx.Optimizer` its `opt_state`.
        params: the parameters that belong to it. Their dtypes are kept.
        values: a tree like `params`, of any floating dtype, with the new values.

    Returns:
        The new parameters and the new optimizer state. A parameter in half precision is its master rounded to
        nearest. All else in the optimizer state is as it was: moments, counts, the loss scale. Arrays are
        placed on the devices of those that they replace. Of NNX's variables come the arrays, which
        `nnx.update` puts into the model and into `optimizer.opt_state`.

    Raises:
        ValueError: as in `master_params`; or `values` has other leaves or shapes than `params`.

    Examples:
        >>> params = {"w": jnp.zeros((), jnp.float16)}
        >>> opt_state = jmp.with_master_weights(optax.sgd(1.0)).init(params)
        >>> params, opt_state = jmp.set_master_params(opt_state, params, {"w": 0.1})
        >>> params, opt_state.masters
        ({'w': Array(0.1, dtype=float16)}, {'w': Array(0.1, dtype=float32)})
    """
    opt_state, params, values = unwrap(opt_state), unwrap(params), unwrap(values)
    _masters_by_path(opt_state, params)  # Raises an error if they do not belong together.
    _check_values(params, values)
    by_path = dict(named_leaves(values))

    def param(old: Any, value: Any) -> Any:
        if not has_dtype(old, jnp.floating):
            return value
        value = jnp.asarray(value)
        return like(old, round_to(value, old.dtype) if is_half(old) else value)

    def with_values(state: Any) -> Any:
        if not is_master_state(state):
            return state
        new = jax.tree_util.tree_map_with_path(
            lambda path, old: like(old, by_path[path_name(path)]), state.masters
        )
        return MasterWeightsState(new, state.inner_state)

    new_state = jax.tree.map(with_values, opt_state, is_leaf=is_master_state)
    return jax.tree.map(param, params, values), new_state


def like(old: Any, value: Any) -> jax.Array:
    """Returns a copy of `value` with the dtype of `old`, on its devices."""
    if _is_committed(value) and len(value.sharding.device_set) == 1 and not _is_committed(old):
        # The old array goes with arrays on any devices. One that Orbax put on a device would not.
        value = np.asarray(value)
    value = jnp.array(value, old.dtype, copy=True)
    # An array that is not committed to a device stays uncommitted: `jax.device_put` commits, and a jitted
    # step would compile again.
    return jax.device_put(value, old.sharding) if _is_committed(old) else value


def _is_committed(array: Any) -> bool:
    """Whether an array is bound to its devices. A traced or NumPy array has no sharding."""
    return getattr(array, "sharding", None) is not None and array.committed


def _masters_by_path(opt_state: Any, params: Any) -> dict[str, jax.Array]:
    """Returns the masters in `opt_state` by the paths of their parameters.

    Raises:
        ValueError: there are none, two for one parameter, or masters of other parameters.
    """
    states = master_states(opt_state)
    if not states:
        raise ValueError(
            "No optimizer wrapped in with_master_weights was found in this state. Wrap yours, "
            "tx = jmp.with_loss_scale(jmp.with_master_weights(optax.adamw(3e-4))), and give the state that "
            "tx.init returned. A checkpoint that was restored as plain dicts: restore it with a target, "
            "tx.init(params)."
        )
    by_path: dict[str, jax.Array] = {}
    known = shapes(params)
    for state in states:
        for name, master in named_leaves(unwrap(state.masters)):
            if known.get(name) != jnp.shape(master):
                raise ValueError(
                    f"The optimizer has a master {name!r} of shape {jnp.shape(master)}, the parameters have "
                    f"{known.get(name, 'none of this name')}. Give the parameters that belong to the state."
                )
            if name in by_path:
                raise ValueError(
                    f"The state has two masters of the parameter {name!r}. Give the state of one optimizer."
                )
            by_path[name] = master
    return by_path


def _check_values(params: Any, values: Any) -> None:
    """Raises a ValueError if `values` has other leaves or shapes than `params`."""
    expected, given = shapes(params), shapes(values)
    if given != expected:
        differ = sorted(name for name in {*expected, *given} if expected.get(name) != given.get(name))
        name = differ[0]
        in_values, in_params = (leaves.get(name, "not there") for leaves in (given, expected))
        raise ValueError(
            f"set_master_params(opt_state, params, values): {len(differ)} leaves differ in name or shape, "
            f"first {name!r}: {in_values} in values, {in_params} in params."
        )

"""Reading and writing the float32 master weights of any optimizer state: for checkpoints and evaluation."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._paths import named_leaves, path_name
from .._tree import cast_leaf, has_dtype, is_half, is_traced, nodes_of, without_nnx_variables
from .half_params import MasterParamsState, full_params, is_master_state
from .placing import placed_like
from .rounding import round_to
from .wrapper import shapes

S = TypeVar("S")
T = TypeVar("T")


def get_master_params(opt_state: Any, params: T) -> T:
    """Returns the parameters in float32, as the optimizer has them, for checkpoints and evaluation.

    It is Apex's `master_params(optimizer)`. `set_master_params` puts them back from a checkpoint.

    Args:
        opt_state: an optimizer state with a state of `with_master_params` at any depth: under
            `with_loss_scale`, in a chain, in `optax.masked`, in several parts of `optax.multi_transform`, in
            a Flax `TrainState` or an `nnx.Optimizer`.
        params: the parameters that belong to it.

    Returns:
        A tree like `params`, with the master of each half parameter, bit for bit. One without a master, or
        changed since the last step, is cast to float32. The arrays may be those of the state: copy them
        before a step that donates it.

    Raises:
        ValueError: there is no state of `with_master_params`, or one of other parameters.

    Examples:
        >>> params = {"w": jnp.ones((), jnp.float16)}
        >>> tx = jmp.with_master_params(optax.sgd(2**-12))
        >>> updates, opt_state = tx.update({"w": jnp.ones(())}, tx.init(params), params)
        >>> jmp.get_master_params(opt_state, optax.apply_updates(params, updates))
        {'w': Array(0.99975586, dtype=float32)}
    """
    params = without_nnx_variables(params)
    masters = _masters_by_path(opt_state, params)

    def widen(path: tuple[Any, ...], param: Any) -> Any:
        if not is_half(param):
            return param
        name = path_name(path)
        if name not in masters:  # For example frozen, by `optax.multi_transform`.
            return cast_leaf(param, np.dtype(np.float32))
        return full_params(param, masters[name])

    return jax.tree_util.tree_map_with_path(widen, params)


def set_master_params(opt_state: S, params: T, values: Any) -> tuple[S, T]:
    """Puts float32 parameters, such as those of a checkpoint, into half parameters and their masters.

    Args:
        opt_state: as in `get_master_params`; of an `nnx.Optimizer` its `opt_state`.
        params: the parameters that belong to it. Their dtypes are kept.
        values: a tree like `params`, of any floating dtype, with the new values.

    Returns:
        The new optimizer state and the new parameters. A half parameter is its new master, rounded to
        nearest. Moments, counts and the loss scale stay as they were. New arrays are on the devices of those
        that they replace. For NNX variables, the arrays are returned: put them into the model and into
        `optimizer.opt_state` with `nnx.update`.

    Raises:
        ValueError: as in `get_master_params`; the leaves or shapes of `values` are not those of `params`; or,
            outside of `jax.jit`, a half parameter would get NaN or a number beyond the largest of its dtype.

    Examples:
        >>> params = {"w": jnp.zeros((), jnp.float16)}
        >>> opt_state = jmp.with_master_params(optax.sgd(1.0)).init(params)
        >>> opt_state, params = jmp.set_master_params(opt_state, params, {"w": 0.1})
        >>> params, opt_state.masters
        ({'w': Array(0.1, dtype=float16)}, {'w': Array(0.1, dtype=float32)})
    """
    opt_state, params, values = map(without_nnx_variables, (opt_state, params, values))
    _masters_by_path(opt_state, params)  # Checks that they belong together.
    _check_values(params, values)
    by_path = dict(named_leaves(values))

    def param(old: Any, value: Any) -> Any:
        if not has_dtype(old, jnp.floating):
            return value
        value = jnp.asarray(value)
        return placed_like(round_to(value, old.dtype) if is_half(old) else value, old)

    new_params = jax.tree.map(param, params, values)
    for name, new in named_leaves(new_params):
        if is_half(new) and not is_traced(new) and not jnp.isfinite(new).all():
            raise ValueError(
                f"set_master_params: the value of {name!r} has NaN or a number beyond "
                f"{float(jnp.finfo(new.dtype).max):.6g}, the largest number of {new.dtype}. Keep this "
                "parameter in float32, with a rule of the policy."
            )

    def with_values(state: Any) -> Any:
        if not is_master_state(state):
            return state

        # `masters` has the paths of the parameters, and no leaf where a parameter has no master.
        def place(path, old):
            return placed_like(by_path[path_name(path)], old)

        return MasterParamsState(jax.tree_util.tree_map_with_path(place, state.masters), state.inner_state)

    new_state = jax.tree.map(with_values, opt_state, is_leaf=is_master_state)
    return new_state, new_params


def _masters_by_path(opt_state: Any, params: Any) -> dict[str, jax.Array]:
    """Returns the masters in `opt_state` by the paths of their parameters, having checked that they fit."""
    states = nodes_of(opt_state, MasterParamsState)
    if not states:
        raise ValueError(
            "No optimizer wrapped in with_master_params was found in this state. Wrap yours, and give the "
            "state of its init: tx = jmp.with_loss_scale(jmp.with_master_params(optax.adamw(3e-4))). "
            "Restore a checkpoint with a target, tx.init(params)."
        )
    by_path: dict[str, jax.Array] = {}
    known = shapes(params)
    # `optax.multi_transform` has a state for each of its labels, with the masters of these parameters only.
    for state in states:
        for name, master in named_leaves(without_nnx_variables(state.masters)):
            if known.get(name) != jnp.shape(master):
                raise ValueError(
                    f"The optimizer has a master {name!r} of shape {jnp.shape(master)}, the parameters have "
                    f"{known.get(name, 'none of this name')}. Give the parameters that belong to the state."
                )
            if name in by_path:
                two = f"The state has two masters of the parameter {name!r}"
                raise ValueError(f"{two}. Give the state of one optimizer.")
            by_path[name] = master
    return by_path


def _check_values(params: Any, values: Any) -> None:
    """Raises a ValueError if the leaves or shapes of `values` are not those of `params`."""
    expected, given = shapes(params), shapes(values)
    if given != expected:
        differ = sorted(name for name in {*expected, *given} if expected.get(name) != given.get(name))
        name = differ[0]
        in_values, in_params = (leaves.get(name, "not there") for leaves in (given, expected))
        raise ValueError(
            f"set_master_params(opt_state, params, values): {len(differ)} leaves differ in name or shape, "
            f"first {name!r}: {in_values} in values, {in_params} in params."
        )

"""Float32 master weights in the optimizer, for parameters that rest in half precision."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._paths import path_name
from .._tree import at_least_float32, is_half
from .rounding import round_to, update_to
from .transforms import as_transform, check_params, check_state


class MasterWeightsState(NamedTuple):
    """The state of `with_master_weights`.

    Attributes:
        masters: a tree like the parameters. Where these are narrower than float32 it has float32 masters of
            the same shape, elsewhere `optax.MaskedNode()`, which has no arrays.
        inner_state: the state of the wrapped transform.

    Guide: docs/memory.md.
    """

    masters: Any
    inner_state: Any


def with_master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Keeps a float32 master of every parameter that rests in half precision, and optimizes the masters.

    A float16 parameter of 1 does not change by an update below 2**-11. Its master does, and the parameter is
    the master rounded to nearest (Micikevicius et al., Mixed Precision Training, section 3.1; O2 of Apex,
    `multi_precision=True` of MXNet). Parameters of float32 or float64 have no master.

    `inner` runs as in a float32 program: its state is made for the float32 parameters, and its `update` gets
    float32 gradients and the float32 parameters. Put `with_loss_scale` outside:

        tx = jmp.with_loss_scale(jmp.with_master_weights(optax.adamw(3e-4)))

    The parameters decide. Where a parameter is not its master rounded, because you changed it (another
    checkpoint, a moving average, a clip of the weights), the optimizer goes on from the parameter.

    Args:
        inner: an optax transform, or an `optax.MultiSteps`, which then accumulates in float32.

    Returns:
        A transform, whose `update` needs the parameters. Its updates of half parameters are float32:
        `optax.apply_updates(params, updates)` gives the masters, rounded. The sum is exact unless a parameter
        shrinks in one step to less than 2**-13 of its old value (2**-16 in bfloat16). The sum is then off
        by at most 2**-24 of the old value, as in float32, and the optimizer goes on from the parameter.

    Raises:
        TypeError: `inner` is no optax transform; from `update`, the state is not that of this transform.
        ValueError: from `update`, there are no parameters, or one has another dtype than in `init`.

    >>> params = jnp.ones((), jnp.float16)
    >>> tx = with_master_weights(optax.sgd(1.0))
    >>> state = tx.init(params)
    >>> for _ in range(3):
    ...     updates, state = tx.update(jnp.float32(2**-12), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> 1 - params, 1 - state.masters  # 3 * 2**-12, rounded to 2**-10; without masters it would be 0.
    (Array(0.000977, dtype=float16), Array(0.00073242, dtype=float32))

    Guide: docs/memory.md.
    """
    made_by = "with_master_weights"
    transform = as_transform(made_by, inner)

    def init(params: Any) -> Any:
        masters = jax.tree.map(lambda p: p.astype(jnp.float32) if is_half(p) else optax.MaskedNode(), params)
        return MasterWeightsState(masters, transform.init(at_least_float32(params)))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        check_state(made_by, state, MasterWeightsState, params)
        check_params(made_by, params)
        full = full_params(params, state.masters)
        changes, inner_state = transform.update(
            at_least_float32(updates), state.inner_state, full, **extra_args
        )
        new = optax.apply_updates(full, changes)
        new_updates = jax.tree.map(
            lambda p, master, change: update_to(p, round_to(master, p.dtype)) if is_half(p) else change,
            *(params, new, changes),
        )
        masters = jax.tree.map(lambda p, master: master if is_half(p) else optax.MaskedNode(), params, new)
        return new_updates, MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def full_params(params: Any, masters: Any) -> Any:
    """Returns the parameters in float32: the masters, and the parameters that are not their master rounded.

    Raises:
        ValueError: the trees differ in structure, a parameter in half has no master, or one in float32 has.
    """

    def full(path: tuple[Any, ...], param: Any, master: Any) -> Any:
        has_master = not isinstance(master, optax.MaskedNode)
        if has_master != is_half(param):
            now, before = ("float32", "half precision") if has_master else ("half precision", "float32")
            raise ValueError(
                f"with_master_weights: the parameter {path_name(path)!r} is in {now}, "
                f"{jnp.result_type(param)}, and was in {before} when the optimizer was initialised. "
                "optax.apply_updates keeps the dtypes of the parameters. "
                "After a change of dtypes make a new state with tx.init(params)."
            )
        if not has_master:
            return param
        unchanged = round_to(master, param.dtype) == param.astype(jnp.float32)
        return jnp.where(unchanged, master, param.astype(jnp.float32))

    is_none = lambda node: isinstance(node, optax.MaskedNode)
    given, known = (jax.tree.structure(tree, is_leaf=is_none) for tree in (params, masters))
    if given != known:
        raise ValueError(
            "with_master_weights: the parameters have another structure than those that the optimizer was "
            f"initialised with: {given}, not {known}."
        )
    return jax.tree_util.tree_map_with_path(full, params, masters)


def init_for_masters(inner: optax.GradientTransformation, params: Any) -> Any:
    """Returns a state of `inner` made for float32 parameters. Only master weights see the half ones.

    So `with_loss_scale` may be outside of `with_master_weights`, with any transforms between them.
    """
    wide = at_least_float32(params)
    state = inner.init(wide)
    if not any(map(is_half, jax.tree.leaves(params))) or not master_states(state):
        return state
    return jax.tree.map(
        lambda wide, narrow: narrow if is_master_state(wide) else wide,
        *(state, inner.init(params)),
        is_leaf=is_master_state,
    )


def is_master_state(node: Any) -> bool:
    """Whether `node` is a state of `with_master_weights`."""
    return isinstance(node, MasterWeightsState)


def master_states(tree: Any) -> list[MasterWeightsState]:
    """Returns the states of `with_master_weights` in `tree`, at any depth."""
    return [node for node in jax.tree.leaves(tree, is_leaf=is_master_state) if is_master_state(node)]

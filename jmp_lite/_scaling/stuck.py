"""`raise_if_stuck`, which tells the host that too many steps are skipped, or that the gradients are zero."""

import math
import warnings
from typing import Any

import jax
import numpy as np
import optax

from .._paths import subtrees
from .._tree import is_floating, nodes_of, without_nnx_variables
from .loss_scale import DynamicLossScale
from .scalars import LARGEST
from .state import SkipNonfiniteState, find_state

_ADVICE = (
    "At a small loss scale the cause is the model or the data: an inf or NaN in a batch, a learning rate too "
    "large, log or division of zero, or a value beyond 65504 in float16. To find the operation, give a batch "
    "that is skipped to jmp_lite.diagnostics.find_nonfinite(loss_fn, loss_scale=loss_scale)(params, batch) "
    "and print the report. help(jmp_lite.diagnostics.doctor) describes a tool that also tries remedies."
)
LINE = "loss, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state))(params, ...)"
"""The line of a step that scales the loss."""
# As a power of two. A scale grows until float16 overflows: so far only if every gradient is below 2**-24.
_FAR_TOO_LARGE = 40


def raise_if_stuck(
    opt_state: Any,
    max_consecutive_skips: int = 50,
    max_skip_rate: float = 0.1,
    name: str | None = None,
) -> None:
    """Raises on the host if too many steps were skipped.

    Call it outside `jit`, every few steps, since it waits for the device. A dynamic scale that starts at
    `2**15` may skip 15 steps until it has found its value, and then one step in `period`.

    A run can also go wrong without a skipped step, most often because `jax.value_and_grad` was left in place
    of `jmp.value_and_grad`. If the moments of the optimizer (`mu` or `trace` of optax; plain `optax.sgd` has
    none) show that all gradients so far were zero, it raises an error. It warns if a dynamic scale has grown
    to `2**40` without one skipped step, since then the loss is not scaled, or the run is not in float16 and
    needs no scale.

    Args:
        opt_state: as in `get_loss_scale`. Each member of a batched or replicated state is checked.
        max_consecutive_skips: how many skipped steps in a row are too many.
        max_skip_rate: the share of all steps so far above which skipped steps are too many; 1 switches this
            off. It is checked after `max_consecutive_skips` skipped steps in all, or as many steps in all if
            the last one was skipped and the dynamic scale is at its minimum.
        name: as in `get_loss_scale`.

    Raises:
        FloatingPointError: too many steps were skipped. The message says how many, and names the loss scale
            and the modules whose gradients were not finite on the last skipped step. Or at least
            `max_consecutive_skips` steps were taken, and the gradients of all of them were zero.
        TypeError: `opt_state` is traced, or a limit is not a number.
        ValueError: as in `get_loss_scale`, or a limit is out of range.

    Examples:
        >>> tx = jmp.with_loss_scale(optax.adamw(3e-4))
        >>> params = {"head": jnp.ones(2)}
        >>> _, opt_state = tx.update({"head": jnp.full(2, jnp.nan)}, tx.init(params), params)
        >>> jmp.raise_if_stuck(opt_state)  # One skipped step is no fault.
        >>> jmp.raise_if_stuck(opt_state, max_consecutive_skips=1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        FloatingPointError: The last step was skipped: inf or NaN in the gradients of ...
    """
    for limit, value in (("max_consecutive_skips", max_consecutive_skips), ("max_skip_rate", max_skip_rate)):
        if not isinstance(value, (int, float, np.number)):
            raise TypeError(f"raise_if_stuck: {limit} should be a number. Got {value!r:.200}.")
    if max_consecutive_skips < 1:
        raise ValueError(f"max_consecutive_skips should be 1 or above. Got {max_consecutive_skips}.")
    if not 0 <= max_skip_rate <= 1:
        raise ValueError(f"max_skip_rate should lie between 0 and 1. Got {max_skip_rate}.")
    _check(find_state(opt_state, name), max_consecutive_skips, max_skip_rate)


def _check(state: SkipNonfiniteState, max_consecutive_skips: int, max_skip_rate: float) -> None:
    """Raises an error for the first member of a state that is stuck."""
    with jax.transfer_guard("allow"):  # Reading values is what it is for.
        try:
            counts = np.asarray(state.counts)
        except jax.errors.TracerArrayConversionError:
            raise TypeError("raise_if_stuck reads values: call it on the host, outside jit.") from None
        batch = counts.shape[:-1]
        took_enough = counts[..., 0] - counts[..., 1] >= max_consecutive_skips
        had_zeros = _have_zero_moments(state.inner_state, took_enough)
        for member in np.ndindex(batch):
            complaint = _complaint(state, member, max_consecutive_skips, max_skip_rate)
            if complaint:
                raise FloatingPointError(f"{_prefix(member, batch)}{complaint}\n{_ADVICE}")
            _check_gradients(state, member, batch, bool(had_zeros[member]))


def _prefix(member: tuple[int, ...], batch: tuple[int, ...]) -> str:
    return f"Member {list(member)} of {list(batch)}: " if batch else ""


def _check_gradients(
    state: SkipNonfiniteState, member: tuple[int, ...], batch: tuple[int, ...], had_zeros: bool
) -> None:
    """Raises an error if all gradients so far were zero; warns if the scale has grown far too large."""
    steps, skipped, _ = map(int, np.asarray(state.counts)[member])
    prefix = _prefix(member, batch)
    if had_zeros:
        raise FloatingPointError(
            f"{prefix}The gradients of all {steps - skipped} steps were zero. In float16 they underflow if "
            f"the loss is not scaled: {LINE} scales it, and jax.value_and_grad does not. Otherwise the loss "
            "does not depend on the parameters: look for stop_gradient, argmax, a cast to integers, or a "
            "wrong argnums."
        )
    if not isinstance(state.loss_scale, DynamicLossScale) or skipped:
        return
    scale = float(_member(state.loss_scale.loss_scale, member))
    if _has_grown(state.loss_scale, scale, steps):
        message = (
            f"{prefix}The loss scale has grown to {scale:g} and no step was skipped. In float16, "
            "gradients that are scaled by it would overflow. Either the loss is not scaled, because "
            f"jax.value_and_grad was left in the step: write {LINE}. Or the run is in bfloat16 or float32, "
            "which need no loss scale: jmp.with_loss_scale(tx, jmp.NoOpLossScale())."
        )
        warnings.warn(message, UserWarning, stacklevel=4)


def _has_grown(settings: DynamicLossScale, scale: float, steps: int) -> bool:
    """Whether a scale has grown far too large in steps of which none was skipped, and did not start there."""
    exponent = math.log2(scale)
    # No step was skipped, so the scale has grown once in each period.
    start = exponent - steps // settings.period * math.log2(settings.factor)
    return exponent >= _FAR_TOO_LARGE > start


def _have_zero_moments(inner_state: Any, asked: np.ndarray) -> np.ndarray:
    """Returns which members of a state keep means of their gradients, the moments, that are all zero.

    `asked` says which members to look at: one flag for each, in the shape of the batch, `()` without one.
    """
    if not asked.any():
        return asked
    moments = _moments(inner_state, asked.ndim)
    are_zero = asked if moments else np.zeros_like(asked)
    # The smallest moment comes first. In a run that learns, the host needs no other one.
    for moment in moments:
        if not are_zero.any():
            break
        are_zero = are_zero & ~_are_nonzero(moment, asked.ndim)
    return are_zero


def _moments(inner_state: Any, batch_ndim: int) -> list[Any]:
    """Returns the moments in the state of an optimizer, from the smallest to the largest."""
    if nodes_of(inner_state, optax.MultiStepsState):  # Its optimizer has maybe not been called yet.
        return []

    # `ScaleByAdamState.mu` and `TraceState.trace`, the names that optax uses for means of gradients.
    def is_moment(path, leaf):
        is_named = any(getattr(key, "name", None) in ("mu", "trace") for key in path)
        return is_named and is_floating(leaf) and np.ndim(leaf) > batch_ndim

    leaves = jax.tree_util.tree_leaves_with_path(without_nnx_variables(inner_state))
    return sorted((leaf for path, leaf in leaves if is_moment(path, leaf)), key=np.size)


def _are_nonzero(moment: Any, batch_ndim: int) -> np.ndarray:
    """Returns which members of a moment are not zero, as far as the devices of this process hold them."""
    # Each process reads its own part: a reduction over a global array would wait for the others, and one over
    # a part would not run in the context of a mesh of more devices.
    if isinstance(moment, jax.Array) and not (batch_ndim and moment.is_fully_addressable):
        return np.asarray(any(jax.device_get(shard.data).any() for shard in moment.addressable_shards))
    array = jax.device_get(moment)
    return array.any(axis=tuple(range(batch_ndim, array.ndim)))


def _complaint(
    state: SkipNonfiniteState, member: tuple[int, ...], max_consecutive_skips: int, max_skip_rate: float
) -> str:
    """Returns the complaint about one member of a state, or an empty string."""
    steps, skipped, in_a_row = map(int, np.asarray(state.counts)[member])
    scale = None if state.loss_scale is None else float(_member(state.loss_scale.loss_scale, member))
    at_minimum = _is_at_minimum(state.loss_scale, scale)
    # At its minimum a scale falls no more, so that skipped steps have another cause than its size.
    low = at_minimum and in_a_row > 0 and steps >= max_consecutive_skips
    if in_a_row >= max_consecutive_skips:
        said = f"The last {in_a_row} steps were skipped" if in_a_row > 1 else "The last step was skipped"
    elif (low or skipped >= max_consecutive_skips) and skipped > max_skip_rate * steps:
        said = f"{skipped} of {steps} steps were skipped ({skipped / steps:.0%})"
    else:
        return ""
    cause = f": {_cause(state, member)}" if in_a_row else ""
    size = "" if scale is None else f" The loss scale is {scale:g}{', its minimum' if at_minimum else ''}."
    closed = f" If the step closes over another scale, which never falls, write {LINE}." if at_minimum else ""
    return f"{said}{cause}.{size}{closed}"


def _is_at_minimum(loss_scale: Any, scale: float | None) -> bool:
    """Whether backing off does not change a loss scale any more."""
    return isinstance(loss_scale, DynamicLossScale) and bool(loss_scale.backed_off(scale) == scale)


def _cause(state: SkipNonfiniteState, member: tuple[int, ...]) -> str:
    """Returns what was not finite on the last step, which was skipped."""
    flags = _member(state.leaf_finite, member)
    if not flags.all():
        finite = dict(zip(state.leaf_names.paths, flags.tolist()))
        return f"inf or NaN in the gradients of {describe(finite)}"
    if state.grad_norm is None or _member(state.grad_norm, member) < LARGEST:
        return (
            "the gradients were finite, and an update of the optimizer, its new state, or an extra argument "
            "such as value= was not"
        )
    return "the norm of the gradients is inf"


def _member(values: Any, member: tuple[int, ...]) -> Any:
    """Returns one member of a batched array, or the array itself if it is not batched."""
    array = np.asarray(values)
    return array[member] if array.ndim >= len(member) else array


def describe(finite: dict[str, bool], most: int = 6) -> str:
    """Returns which leaves are not finite, such as `2 of 4 parameters: a`, by at most `most` names."""
    bad, good = ([name for name in finite if finite[name] is flag] for flag in (False, True))
    if not good:
        return f"all {len(finite)} parameters" if len(finite) > 1 else "the only parameter"
    bad_modules, good_modules = _modules(bad, good), _modules(good, bad)
    # The shorter of the two lists.
    all_but = len(good_modules) < len(bad_modules)
    modules, words = (good_modules, ", all but ") if all_but else (bad_modules, ": ")
    more = f" and {len(modules) - most} more" if len(modules) > most else ""
    return f"{len(bad)} of {len(finite)} parameters{words}{', '.join(modules[:most])}{more}"


def _modules(chosen: list[str], others: list[str]) -> list[str]:
    """Returns the outermost subtrees that hold leaves of `chosen` and none of `others`."""
    taken = {subtree for name in others for subtree in subtrees(name)}
    outermost = (next((s for s in subtrees(name) if s not in taken), name) for name in chosen)
    return list(dict.fromkeys(outermost))

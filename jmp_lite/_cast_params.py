"""`cast_params`: trained parameters in half, and the check that they survive."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._paths import named_leaves, shown
from ._policy import Policy
from ._tree import is_nnx_variable, without_nnx_variables

T = TypeVar("T")


def cast_params(params: T, policy: Policy, *, max_flushed: float = 0.01) -> T:
    """Casts trained parameters to the policy's parameter dtype, and checks that they survive.

    `policy.cast_to_param` does not look at the values. This function does, so call it outside of `jax.jit`,
    before a model is exported or saved in half.

    Args:
        params: a pytree of arrays of any shape, or an `nnx.State`. Leaves that are not floating stay as they
            are, and so do NNX variables that are no `nnx.Param`, such as batch statistics.
        policy: its `param_dtype` and its rules give the dtype of each leaf.
        max_flushed: the share, from 0 to 1, of the non-zero numbers of one leaf that may become zero.

    Returns:
        The tree in the new dtypes.

    Raises:
        ValueError: a leaf has NaN or a number beyond the largest of its new dtype (65504 in float16), or too
            many of its numbers become zero; a rule matches no leaf; or `max_flushed` is not between 0 and 1.
        TypeError: `policy` is not a policy, or the call is under `jax.jit`.

    Examples:
        >>> jmp.cast_params({"head": {"kernel": jnp.array([1.0, 7e4])}}, jmp.get_policy("float16"))
        Traceback (most recent call last):
        ...
        ValueError: These parameters do not survive the cast:
          head/kernel: 70000 is beyond 65504, the largest number of float16.
        Keep them in float32: policy.with_rules({'head': 'float32'}).
    """
    if not isinstance(policy, Policy):
        raise TypeError(
            "cast_params(params, policy) takes a policy, such as jmp.get_policy('bfloat16'). "
            f"Got {shown(policy)} as the policy."
        )
    if not 0 <= max_flushed <= 1:
        raise ValueError(f"cast_params: max_flushed is a share from 0 to 1. Got {max_flushed!r}.")
    with np.errstate(over="ignore"):  # NumPy warns if a number becomes inf, which is an error below.
        cast = policy.cast_to_param(params)

    # Flax NNX keeps batch statistics, caches and random keys in the same tree, as variables of other classes.
    def keep(before, after):
        return before if is_nnx_variable(before) and not _is_nnx_param(before) else after

    cast = jax.tree.map(keep, params, cast, is_leaf=is_nnx_variable)
    lost = {}
    named, leaves = named_leaves(without_nnx_variables(params)), jax.tree.leaves(without_nnx_variables(cast))
    for (name, before), after in zip(named, leaves, strict=True):
        try:
            # A leaf that keeps its dtype is not copied by the cast, and loses nothing.
            fault = "" if after is before else _fault(np.asarray(before), np.asarray(after), max_flushed)
        except jax.errors.TracerArrayConversionError:
            raise TypeError("cast_params reads values: call it outside of jax.jit.") from None
        if fault:
            lost[name] = fault
    if lost:
        lines = "".join(f"\n  {name}: {fault}" for name, fault in lost.items())
        # Rules for whole layers: a layer of Flax computes in one dtype.
        rules = dict.fromkeys((name.rpartition("/")[0] or name for name in lost), "float32")
        raise ValueError(
            f"These parameters do not survive the cast:{lines}\n"
            f"Keep them in float32: policy.with_rules({rules})."
        )
    return cast


def _is_nnx_param(variable: Any) -> bool:
    """Whether a variable of Flax NNX is an `nnx.Param`. This package does not import Flax."""
    # By its name, since a policy may be used without Flax.
    classes = type(variable).__mro__
    return any(cls.__name__ == "Param" and cls.__module__.startswith("flax.") for cls in classes)


def _fault(before: np.ndarray, after: np.ndarray, max_flushed: float) -> str:
    """Returns what a cast did to the numbers of an array, or an empty string if it did no harm."""
    # NumPy's maximum keeps a NaN.
    largest, limit = float(np.max(np.abs(before), initial=0)), float(jnp.finfo(after.dtype).max)
    if np.isnan(largest):
        return "it has NaN."
    if np.isinf(after).any():
        return f"{largest:.6g} is beyond {limit:.6g}, the largest number of {after.dtype}."
    flushed = np.count_nonzero((before != 0) & (after == 0))
    share = flushed / max(1, np.count_nonzero(before))
    return f"{share:.1%} of its non-zero numbers become zero in {after.dtype}." if share > max_flushed else ""

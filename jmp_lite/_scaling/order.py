"""Transforms that may not be around `with_loss_scale` or in front of it, since they hide an overflow."""

from typing import Any

import jax
import optax
from optax import contrib

from .._tree import nodes_of

# By the states that they make. They drop inf and NaN before the check, or keep them for all later steps.
_HIDES = {
    optax.ApplyIfFiniteState: "optax.apply_if_finite(tx, ...)",
    optax.MultiStepsState: "optax.MultiSteps(tx, ...)",
    contrib.MechanicState: "optax.contrib.mechanize(tx, ...)",
    contrib.SAMState: "optax.contrib.sam(tx, ...)",
    optax.ZeroNansState: "optax.chain(optax.zero_nans(), tx)",
    optax.EmaState: "optax.chain(optax.ema(...), tx)",
    optax.TraceState: "optax.chain(optax.trace(...), tx)",
    optax.ApplyEvery: "optax.chain(optax.apply_every(...), tx)",
    optax.ScaleByAdamState: "optax.chain(optax.scale_by_adam(...), tx)",
}


def check_order(opt_state: Any, wrapper: type[Any]) -> None:
    """Raises a ValueError if a transform hides an overflow from a state of the class `wrapper`."""

    # With `opaque_mode=True` SAM has no cache, and gives each gradient to the optimizer inside.
    def hides(node):
        return type(node) in _HIDES and getattr(node, "cache", ()) is not None

    def is_leaf(node):
        return isinstance(node, wrapper) or hides(node)

    in_front: list[tuple[Any, str]] = []
    for path, node in jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_leaf):
        outside = [_HIDES[type(node)]] if hides(node) else []
        if inside := nodes_of(node, wrapper):
            outside += [text for chain, text in in_front if path[: len(chain)] == chain]
            if outside:
                made_by = "skip_nonfinite" if inside[0].loss_scale is None else "with_loss_scale"
                raise ValueError(
                    f"A transform outside of {made_by} hides an overflow from it, or keeps the NaN for all "
                    f"later steps. Put {made_by} outside: jmp.{made_by}({outside[0]})."
                )
        # The state of `optax.chain` is a tuple of those of its links. Other trees have no order.
        elif outside and path and isinstance(path[-1], jax.tree_util.SequenceKey):
            in_front.append((path[:-1], outside[0]))

"""Transforms that may not stand around `with_loss_scale` or in front of it, since they hide an overflow."""

from typing import Any

import jax
import optax
from optax import contrib

from .._tree import nodes_of

# By the states that they make. They skip the step before the check, or keep inf and NaN for all later steps.
_AROUND = {
    optax.ApplyIfFiniteState: "apply_if_finite",
    optax.MultiStepsState: "MultiSteps",
    contrib.MechanicState: "contrib.mechanize",
    contrib.SAMState: "contrib.sam",
}
_IN_FRONT = {
    optax.EmaState: "ema",
    optax.TraceState: "trace",
    optax.ApplyEvery: "apply_every",
    optax.ScaleByAdamState: "scale_by_adam",
}


def check_order(opt_state: Any, wrapper: type[Any]) -> None:
    """Raises a ValueError if an optimizer hides an overflow from a state of the class `wrapper`."""
    for node in filter(_is_around, jax.tree.leaves(opt_state, is_leaf=_is_around)):
        if inside := nodes_of(node, wrapper):
            name = _AROUND[type(node)]
            # What `apply_if_finite` does is done by the wrapper itself.
            inner = "tx" if name == "apply_if_finite" else f"optax.{name}(tx, ...)"
            raise _hides(f"optax.{name} stands around", inside[0], inner)
    is_link = lambda node: isinstance(node, (wrapper, *_IN_FRONT))
    in_front: list[tuple[Any, str]] = []
    for path, node in jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_link):
        # The state of `optax.chain` is a tuple of those of its links. Other trees have no order.
        if type(node) in _IN_FRONT and path and isinstance(path[-1], jax.tree_util.SequenceKey):
            in_front.append((path[:-1], _IN_FRONT[type(node)]))
        elif isinstance(node, wrapper):
            for name in (name for chain, name in in_front if path[: len(chain)] == chain):
                raise _hides(f"optax.{name} stands in front of", node, f"optax.chain(optax.{name}(...), tx)")


def _is_around(node: Any) -> bool:
    # With `opaque_mode=True` SAM has no cache, and gives each gradient to the optimizer inside.
    return type(node) in _AROUND and not (isinstance(node, contrib.SAMState) and node.cache is None)


def _hides(stands: str, state: Any, inner: str) -> ValueError:
    wrapper = "skip_nonfinite" if state.loss_scale is None else "with_loss_scale"
    return ValueError(
        f"{stands} {wrapper}, and hides an overflow from it, or keeps the NaN for all later steps. Put "
        f"{wrapper} outside: jmp.{wrapper}({inner})."
    )

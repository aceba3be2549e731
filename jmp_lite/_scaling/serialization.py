"""Registers the state classes of this package with `flax.serialization`, if Flax is installed."""

import dataclasses
import functools
import importlib
from typing import Any, Self

import numpy as np

from .._tree import is_floating, is_traced, replace_leaves


class Saved:
    """The base class of states that `flax.serialization` saves."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        del args, kwargs
        # Flax saves containers, its own classes, and registered classes: without this, the bytes of a train
        # state would lack the loss scale. Python calls it for a new state and for one that is unpickled.
        _register(cls)
        return super().__new__(cls)


@functools.cache
def _register(cls: type) -> None:
    """Registers a state class with `flax.serialization`."""
    # Flax is imported with the first state, not with this package, which does not need it.
    try:
        serialization: Any = importlib.import_module("flax.serialization")
    except Exception:  # It is not installed, or does not run with this JAX.
        return
    names = [field.name for field in dataclasses.fields(cls) if not field.metadata.get("static")]

    def to_state_dict(state: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(state, name)) for name in names}

    def from_state_dict(state: Any, saved: Any) -> Any:
        _check(state, saved, names)
        changes = {}
        for name in names:
            # None on either side is a field that the settings of one run do not have, such as `grad_norm`.
            target, value = getattr(state, name), saved.get(name)
            if target is not None and value is not None:
                changes[name] = serialization.from_state_dict(target, value, name=name)
        return replace_leaves(state, **changes)

    serialization.register_serialization_state(cls, to_state_dict, from_state_dict)


def _check(state: Any, saved: Any, names: list[str]) -> None:
    """Raises a ValueError if a saved state cannot be restored into `state`; it may lack a field."""
    kind = type(state).__name__
    if not isinstance(saved, dict) or ("inner_state" in names and "inner_state" not in saved):
        keys = sorted(saved) if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(
            f"The saved state is no {kind}: it has {keys}. To go on from the state of the plain optimizer "
            "or of other settings, restore it without a target, then opt_state = jmp.migrate_state(tx, "
            "params, old_state)."
        )
    if "counter" in saved and names == ["loss_scale"]:
        raise ValueError(
            f"The saved loss scale is dynamic and is restored into a {kind}. Restore it into a "
            "DynamicLossScale, and make a new optimizer state if the scale should not change any more."
        )
    if "leaf_finite" in names:
        _check_skipping(state, saved)
    elif "loss_scale" in names:  # A loss scale. That of `SkipNonfiniteState` is checked when it is restored.
        _check_scale(kind, saved.get("loss_scale"))


def _check_skipping(state: Any, saved: Any) -> None:
    """Raises a ValueError if a saved state of `skip_nonfinite` is one of other settings or parameters."""
    if state.loss_scale is None and saved["loss_scale"]:
        raise ValueError(
            "The saved state holds a loss scale, and the optimizer is skip_nonfinite, which holds none. "
            "Restore it into the state of with_loss_scale."
        )
    if np.shape(saved["leaf_finite"]) != np.shape(state.leaf_finite):
        raise ValueError(
            f"The saved state is that of {np.shape(saved['leaf_finite'])[-1]} parameters, and the model has "
            f"{np.shape(state.leaf_finite)[-1]}."
        )


def _check_scale(kind: str, saved: Any) -> None:
    """Raises a ValueError if no step could be taken with a saved scale. A traced one is not read."""
    if is_floating(saved) and not is_traced(saved):
        values = np.asarray(saved, np.float32)
        if not (np.isfinite(values) & (values >= np.finfo(np.float32).tiny)).all():
            raise ValueError(
                f"The saved {kind} has the scale {values.tolist()}, with which every step would be skipped "
                "or wrong. Restore an earlier checkpoint, or begin with a new scale: jmp.migrate_state(tx, "
                "params, old_state) takes all else from this one."
            )

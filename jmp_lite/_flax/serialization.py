"""Registers the states of jmp_lite with `flax.serialization`, when this module is imported.

Then `flax.serialization.to_bytes(train_state)` and Flax's own checkpoints hold the loss scale.
"""

import dataclasses
from typing import Any

from flax import serialization

from .._scaling.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from .._scaling.state import SkipNonfiniteState
from .._tree import replace_leaves


def _register(cls: type) -> None:
    """Lets `flax.serialization` save the leaves of a state class by the names of its fields."""
    names = [field.name for field in dataclasses.fields(cls) if not field.metadata.get("static")]

    def to_state_dict(state: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(state, name)) for name in names}

    def from_state_dict(state: Any, saved: dict[str, Any]) -> Any:
        changes = {
            name: serialization.from_state_dict(getattr(state, name), saved[name], name=name)
            for name in names
        }
        return replace_leaves(state, **changes)

    serialization.register_serialization_state(cls, to_state_dict, from_state_dict)


for _cls in (NoOpLossScale, StaticLossScale, DynamicLossScale, SkipNonfiniteState):
    _register(_cls)

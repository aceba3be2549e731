"""The ways to hold parameters and AdamW's moments in fewer bytes, from 14 bytes a parameter to 6."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

import jmp_lite as jmp

Wrap = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class MemoryArm:
    """A way to hold parameters and moments.

    Attributes:
        policy: the policy of the model, as `get_policy` reads it.
        wrap: what is put around AdamW, inside `with_loss_scale`.
        scaled: whether float16 needs a loss scale.
    """

    policy: str
    wrap: Wrap = lambda tx: tx
    scaled: bool = False

    def optimizer(self, inner: Any, period: int = 2000) -> optax.GradientTransformationExtraArgs:
        """Returns the whole optimizer of the arm.

        Args:
            inner: AdamW, alone or in a chain.
            period: after how many finite steps the loss scale doubles.
        """
        scale = jmp.DynamicLossScale(2.0**15, period=period) if self.scaled else jmp.NoOpLossScale()
        return jmp.with_loss_scale(self.wrap(inner), scale)


def _to_nearest(tx: Any) -> Any:
    return jmp.with_half_state(tx, stochastic_rounding=False)


# float32 has no half precision at all. The others have the products of their models in half.
ARMS = {
    "float32": MemoryArm("float32"),
    "float32 parameters": MemoryArm("p=f32,c=bf16,o=f32"),
    "O2, masters": MemoryArm("O2", jmp.with_master_params, scaled=True),
    "O2, masters, bf16 moments": MemoryArm(
        "O2", lambda tx: jmp.with_master_params(jmp.with_half_state(tx)), scaled=True
    ),
    "bf16 moments": MemoryArm("p=f32,c=bf16,o=f32", jmp.with_half_state),
    "bf16 moments, to nearest": MemoryArm("p=f32,c=bf16,o=f32", _to_nearest),
    "all bf16": MemoryArm(
        "p=bf16,c=bf16,o=f32", lambda tx: jmp.with_stochastic_rounding(jmp.with_half_state(tx))
    ),
    "all bf16, to nearest": MemoryArm("p=bf16,c=bf16,o=f32", _to_nearest),
}

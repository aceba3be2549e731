"""The loss of a GPT-2 in half precision: with casts by hand, under a policy, or by autocast."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jmp_lite as jmp
from examples.models.gpt2 import GPT2, loss
from jmp_lite.linen import with_policy

CASTS = ("none", "by hand", "policy", "autocast")
Loss = Callable[[Any, jax.Array], jax.Array]


def gpt(vocabulary: int = 50304, length: int = 1024, width: int = 768, layers: int = 12) -> GPT2:
    """Returns a GPT-2 with heads of 64 features and JAX's own attention."""
    return GPT2(vocabulary, length, width, layers, width // 64, jax.nn.dot_product_attention)


def gpt_loss(model: GPT2, casts: str, dtype: Any, reduce_dtype: Any = None) -> Loss:
    """Returns the loss of a GPT-2 whose products take `dtype`, a function of parameters and tokens.

    Args:
        model: the transformer, in float32.
        casts: one of `CASTS`: the way to half precision.
        dtype: the half dtype.
        reduce_dtype: for `policy`, as in `with_policy`.
    """
    policy = jmp.Policy(jnp.float32, dtype, jnp.float32)

    def loss_of(apply: Callable[..., Any]) -> Loss:
        return lambda params, tokens: loss(apply(params, tokens)[:, :-1].astype(jnp.float32), tokens[:, 1:])

    if casts == "by hand":
        apply: Any = model.apply
        return loss_of(lambda p, tokens: policy.cast_to_output(apply(policy.cast_to_compute(p), tokens)))
    if casts == "policy":
        return loss_of(with_policy(model, policy, reduce_dtype=reduce_dtype).apply)
    return jmp.autocast(loss_of(model.apply), dtype) if casts == "autocast" else loss_of(model.apply)

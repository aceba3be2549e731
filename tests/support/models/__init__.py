"""Models with a batch each, in float32 and without a cast, for the tests of autocast.

Some are small versions of models in `examples.models`. The others have a structure that those do not have.
`cases` says what a case is. `in_linen`, `in_nnx` and `in_jax` hold models. `CASES` lists all cases.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from examples.models.attention import attention
from examples.models.resnet import Basic, ResNet

from .cases import IMAGES, NEXT_TOKEN, ROWS, SEQUENCES, Case, equinox_case, linen_case, nnx_case
from .cases import VOCABULARY as VOCABULARY
from .in_jax import EquinoxTransformer, haiku_case, plain_case
from .in_linen import LinenLSTM, LinenTransformer
from .in_nnx import NnxExperts, NnxResNet, NnxTransformer

LinenResNet = functools.partial(ResNet, classes=5, stages=(1, 1), block=Basic, features=8, stem=3)


def _mlp() -> nn.Module:
    return nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(16), nn.relu, nn.Dense(4)])


def _linen_resnet() -> Case:
    case = linen_case(LinenResNet(), IMAGES)
    # The last scale of each block starts at zero, which would hide the gradients of the block.
    return dataclasses.replace(case, params=jax.tree.map(lambda x: x + 0.1, case.params))


def _attention(hand_dtype: Any) -> Any:
    return attention if hand_dtype == jnp.float16 else jax.nn.dot_product_attention


def _linen_transformer(hand_dtype: Any, **options: Any) -> Case:
    model = LinenTransformer(_attention(hand_dtype), **options)
    return linen_case(model, *NEXT_TOKEN)


CASES: dict[str, Callable[[Any], Case]] = {
    "Linen MLP": lambda _: linen_case(_mlp(), ROWS),
    "Linen ResNet": lambda _: _linen_resnet(),
    "NNX ResNet": lambda _: nnx_case(NnxResNet, IMAGES),
    "Linen transformer, tied": lambda dtype: _linen_transformer(dtype, tied=True),
    "Linen transformer, scanned and rematerialized": lambda dtype: _linen_transformer(
        dtype, scanned=True, remat=True, layers=3
    ),
    "NNX transformer": lambda dtype: nnx_case(
        lambda rngs: NnxTransformer(rngs, _attention(dtype)), *NEXT_TOKEN
    ),
    "JAX transformer, scanned and rematerialized": lambda dtype: plain_case(_attention(dtype)),
    "Linen LSTM": lambda dtype: linen_case(LinenLSTM(dtype=dtype), SEQUENCES),
    "NNX experts": lambda _: nnx_case(NnxExperts, ROWS),
    "Equinox transformer": lambda _: equinox_case(EquinoxTransformer(jax.random.key(0)), *NEXT_TOKEN),
    "Haiku network": lambda _: haiku_case(),
}

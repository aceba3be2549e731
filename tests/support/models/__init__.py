"""Models with a batch each, in float32 and without a cast, for the tests of autocast.

Some are small versions of models in `examples.models`. The others have a structure that those do not have.
`cases` says what a case is. `in_linen`, `in_nnx` and `in_jax` hold models. `CASES` lists all cases.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from examples.models.attention import attention
from examples.models.resnet import Basic, ResNet
from examples.models.unet import UNet
from tests.support.arrays import normal

from .cases import IMAGES, NEXT_TOKEN, ROWS, SEQUENCES, Case, equinox_case, linen_case, nnx_case
from .cases import TEXT as TEXT
from .cases import VOCABULARY as VOCABULARY
from .cases import next_token_loss as next_token_loss
from .cases import weighted_mean as weighted_mean
from .in_jax import EquinoxTransformer, haiku_case, plain_case
from .in_linen import LinenExperts, LinenLSTM, LinenTransformer
from .in_nnx import NnxExperts, NnxLSTM, NnxMLP, NnxResNet, NnxTransformer, NnxUNet

LARGE_IMAGES = normal(6, 4, 20, 20, 3)
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


def _nnx_transformer(hand_dtype: Any, **options: Any) -> Case:
    return nnx_case(lambda rngs: NnxTransformer(rngs, _attention(hand_dtype), **options), *NEXT_TOKEN)


CASES: dict[str, Callable[[Any], Case]] = {
    "Linen MLP": lambda _: linen_case(_mlp(), ROWS),
    "NNX MLP": lambda _: nnx_case(NnxMLP, ROWS),
    "Linen ResNet": lambda _: _linen_resnet(),
    "NNX ResNet": lambda _: nnx_case(NnxResNet, IMAGES),
    "Linen transformer, tied": lambda dtype: _linen_transformer(dtype, tied=True),
    "Linen transformer, rematerialized": lambda dtype: _linen_transformer(dtype, tied=False, remat=True),
    "Linen transformer, scanned": lambda dtype: _linen_transformer(dtype, scanned=True, layers=3),
    "Linen transformer, scanned and rematerialized": lambda dtype: _linen_transformer(
        dtype, scanned=True, remat=True, layers=3
    ),
    "NNX transformer": lambda dtype: _nnx_transformer(dtype),
    "NNX transformer, tied and rematerialized": lambda dtype: _nnx_transformer(dtype, tied=True, remat=True),
    "JAX transformer, scanned": lambda dtype: plain_case(_attention(dtype), remat=False),
    "JAX transformer, scanned and rematerialized": lambda dtype: plain_case(_attention(dtype)),
    "Linen LSTM": lambda dtype: linen_case(LinenLSTM(dtype=dtype), SEQUENCES),
    "Linen optimized LSTM": lambda dtype: linen_case(LinenLSTM(nn.OptimizedLSTMCell, dtype), SEQUENCES),
    "NNX LSTM": lambda _: nnx_case(NnxLSTM, SEQUENCES),
    "NNX optimized LSTM": lambda _: nnx_case(lambda rngs: NnxLSTM(rngs, nnx.OptimizedLSTMCell), SEQUENCES),
    "Linen U-Net": lambda _: linen_case(UNet(features=6, depth=1), LARGE_IMAGES),
    "NNX U-Net": lambda _: nnx_case(NnxUNet, IMAGES),
    "Linen experts": lambda _: linen_case(LinenExperts(), ROWS),
    "NNX experts": lambda _: nnx_case(NnxExperts, ROWS),
    "Equinox MLP": lambda _: equinox_case(eqx.nn.MLP(6, 4, 16, 2, key=jax.random.key(0)), ROWS),
    "Equinox transformer": lambda _: equinox_case(EquinoxTransformer(jax.random.key(0)), *NEXT_TOKEN),
    "Haiku network": lambda _: haiku_case(),
}

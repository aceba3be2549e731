"""ResNet (He et al., 2015), with the stride in the 3 x 3 convolution ("v1.5")."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.nn.initializers import variance_scaling

from . import data
from .workload import Batch, Optimizer, Workload

he_normal = variance_scaling(2.0, "fan_out", "normal")


def conv(features: int, kernel: int, stride: int, name: str) -> nn.Conv:
    """A convolution without a bias, with even padding."""
    return nn.Conv(
        features, (kernel, kernel), stride, kernel // 2, use_bias=False, kernel_init=he_normal, name=name
    )


def norm(name: str, train: bool, scale: float = 1.0) -> nn.BatchNorm:
    """A batch normalization."""
    return nn.BatchNorm(
        use_running_average=not train, momentum=0.9, scale_init=nn.initializers.constant(scale), name=name
    )


def pool(x: jax.Array) -> jax.Array:
    """The largest of each 3 x 3, at half the size."""
    edges: Any = ((1, 1), (1, 1))  # Flax accepts this; its annotation does not.
    return nn.max_pool(x, (3, 3), (2, 2), edges)


class Basic(nn.Module):
    """Two 3 x 3 convolutions around a skip connection (ResNet-18 and -34)."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.relu(norm("norm_1", train)(conv(self.features, 3, self.stride, "conv_1")(x)))
        y = norm("norm_2", train, scale=0.0)(conv(self.features, 3, 1, "conv_2")(y))
        if x.shape != y.shape:
            x = norm("skip_norm", train)(conv(y.shape[-1], 1, self.stride, "skip")(x))
        return nn.relu(x + y)


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two 1 x 1, around a skip connection (ResNet-50 and deeper)."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.relu(norm("norm_1", train)(conv(self.features, 1, 1, "conv_1")(x)))
        y = nn.relu(norm("norm_2", train)(conv(self.features, 3, self.stride, "conv_2")(y)))
        y = norm("norm_3", train, scale=0.0)(conv(4 * self.features, 1, 1, "conv_3")(y))
        if x.shape != y.shape:
            x = norm("skip_norm", train)(conv(y.shape[-1], 1, self.stride, "skip")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images to the logits of their classes.

    Attributes:
        classes: the number of classes.
        stages: the number of blocks in each stage. From stage to stage the width doubles and the size halves.
        block: `Basic` or `Bottleneck`.
        features: the features of the stem and of the first stage.
        stem: the kernel of the first convolution. With 7 it has a stride of 2 and a pool.
    """

    classes: int = 1000
    stages: Sequence[int] = (3, 4, 6, 3)
    block: Callable[..., nn.Module] = Bottleneck
    features: int = 64
    stem: int = 7

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = True) -> jax.Array:
        """Maps images `(batch, height, width, channels)` to logits `(batch, classes)`."""
        large = self.stem == 7
        x = nn.relu(norm("stem_norm", train)(conv(self.features, self.stem, 1 + large, "stem")(images)))
        if large:
            x = pool(x)
        for stage, blocks in enumerate(self.stages):
            for index in range(blocks):
                stride = 2 if stage and not index else 1
                name = f"stages_{stage}_{index}"
                x = self.block(self.features * 2**stage, stride, name=name)(x, train)
        return nn.Dense(self.classes, name="head")(x.mean((1, 2)))


def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy of the labels, shape `(batch,)`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def full() -> Workload:
    """ResNet-50 on noise of 224 x 224."""

    def batch(rng: np.random.Generator, size: int) -> Batch:
        images = rng.standard_normal((size, 224, 224, 3), np.float32)
        return (images,), rng.integers(0, 1000, size, dtype=np.int32)

    return Workload(ResNet(), loss, Optimizer("sgd", 0.05), 128, batch)


def small(batch_size: int = 64, features: int = 16, part: tuple[float, float] = (0.0, 1.0)) -> Workload:
    """Two stages on scanned digits.

    Args:
        batch_size: the number of scans.
        features: the features of the stem and of the first stage.
        part: the part of the scans, as two shares of their number.
    """
    model = ResNet(classes=10, stages=(1, 1), features=features, stem=3)

    def batch(rng: np.random.Generator, size: int) -> Batch:
        images, labels = data.digits()
        first, last = (int(edge * len(images)) for edge in part)
        rows = rng.integers(first, last, size)
        return (images[rows, ..., None],), labels[rows]

    return Workload(model, loss, Optimizer("sgd", 0.05), batch_size, batch)

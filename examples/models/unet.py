"""U-Net (Ronneberger et al., 2015), with unpadded convolutions as in the paper: 572 in, 388 out."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data
from .workload import Batch, Optimizer, Workload


class TwoConvs(nn.Module):
    """Two 3 x 3 convolutions. Each one removes a pixel from every edge."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        he_normal = nn.initializers.he_normal()
        for index in (1, 2):
            conv = nn.Conv(
                self.features, (3, 3), padding="VALID", kernel_init=he_normal, name=f"conv_{index}"
            )
            x = nn.relu(conv(x))
        return x


def crop(x: jax.Array, size: int) -> jax.Array:
    """Returns the middle, `size` by `size`, of images."""
    edge = (x.shape[1] - size) // 2
    return x[:, edge : edge + size, edge : edge + size]


class UNet(nn.Module):
    """Images to the logits of the classes of their inner pixels.

    Attributes:
        classes: the number of classes.
        features: the features of the first level. Each level below has twice as many.
        depth: the number of times that the size is halved.
    """

    classes: int = 2
    features: int = 64
    depth: int = 4

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits, shape `(batch, inner height, inner width, classes)`.

        Args:
            images: square, shape `(batch, height, width, channels)`.
        """
        x, skips = images, []
        for level in range(self.depth):
            x = TwoConvs(self.features * 2**level, name=f"down_{level}")(x)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = TwoConvs(self.features * 2**self.depth, name="bottom")(x)
        for level in reversed(range(self.depth)):
            features = self.features * 2**level
            x = nn.ConvTranspose(features, (2, 2), (2, 2), padding="VALID", name=f"widen_{level}")(x)
            x = jnp.concatenate([crop(skips[level], x.shape[1]), x], axis=-1)
            x = TwoConvs(features, name=f"up_{level}")(x)
        return nn.Conv(self.classes, (1, 1), name="head")(x)


def loss(logits: jax.Array, classes: jax.Array) -> jax.Array:
    """The mean cross entropy of the classes of pixels, shape `(batch, inner height, inner width)`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean()


def full() -> Workload:
    """The paper's network on noise of 572 x 572."""

    def batch(rng: np.random.Generator, size: int) -> Batch:
        images = rng.standard_normal((size, 572, 572, 1), np.float32)
        return (images,), rng.integers(0, 2, (size, 388, 388), dtype=np.int32)

    return Workload(UNet(), loss, Optimizer("sgd", 0.01), 4, batch)


def small(
    tile: int = 60, batch_size: int = 8, features: int = 8, part: tuple[float, float] = (0.0, 1.0)
) -> Workload:
    """Two levels that find coins in a photograph.

    Args:
        tile: the height and width of the inputs, a multiple of 4. The outputs are 40 pixels smaller.
        batch_size: the number of tiles.
        features: the features of the first level.
        part: the part of the photograph's width, as two shares of it.
    """
    model = UNet(features=features, depth=2)

    def batch(rng: np.random.Generator, size: int) -> Batch:
        whole, all_coins = data.coins()
        columns = slice(*(int(edge * whole.shape[1]) for edge in part))
        picture, coins = whole[:, columns], all_coins[:, columns]
        height, width = picture.shape
        corners = zip(rng.integers(0, height - tile, size), rng.integers(0, width - tile, size))
        tiles = [
            (picture[y : y + tile, x : x + tile], coins[y + 20 : y + tile - 20, x + 20 : x + tile - 20])
            for y, x in corners
        ]
        images, classes = map(np.stack, zip(*tiles))
        return (images[..., None],), classes

    return Workload(model, loss, Optimizer("adam", 3e-3), batch_size, batch)

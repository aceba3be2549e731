"""SSD (Liu et al., 2015) on a ResNet-34, as in MLPerf: 300 x 300 pixels, 8,732 default boxes."""

import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data
from .resnet import Basic, conv, norm, pool
from .workload import Batch, Optimizer, Workload

WIDE = (2.0, 3.0)  # Aspect ratios beside 1, each way up.


class SSD(nn.Module):
    """Images to the object in each default box.

    Attributes:
        classes: the number of classes. Class 0 is the background.
        image: the height and width of the images.
        stages: the number of blocks in each stage of the ResNet. The last stage keeps its size.
        features: the features of the stem.
        extras: the features, kernel, stride and padding of each map behind the ResNet.
        ratios: for each map, the number of aspect ratios of `WIDE` that its boxes have.
    """

    classes: int = 81
    image: int = 300
    stages: Sequence[int] = (3, 4, 6)
    features: int = 64
    extras: Sequence[tuple[int, int, int, int]] = (
        (512, 3, 2, 1),
        (512, 3, 2, 1),
        (256, 3, 2, 1),
        (256, 3, 1, 0),
        (256, 3, 1, 0),
    )
    ratios: Sequence[int] = (1, 2, 2, 2, 1, 1)

    def grids(self) -> list[int]:
        """Returns the height and width of each map."""
        halved = lambda size: -(-size // 2)
        sizes = [functools.reduce(lambda size, _: halved(size), range(3), self.image)]
        for _, kernel, stride, padding in self.extras:
            sizes.append((sizes[-1] + 2 * padding - kernel) // stride + 1)
        return sizes

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = True) -> tuple[jax.Array, jax.Array]:
        """Looks for objects.

        Args:
            images: shape `(batch, image, image, channels)`.
            train: whether batch normalization uses the batch.

        Returns:
            The offsets of the boxes, shape `(batch, boxes, 4)`, and the logits of their classes, shape
            `(batch, boxes, classes)`.
        """
        x = nn.relu(norm("stem_norm", train)(conv(self.features, 7, 2, "stem")(images)))
        x = pool(x)
        for stage, blocks in enumerate(self.stages):
            for index in range(blocks):
                stride = 2 if stage == 1 and not index else 1
                x = Basic(self.features * 2**stage, stride, name=f"stages_{stage}_{index}")(x, train)
        maps = [x]
        for index, (features, kernel, stride, padding) in enumerate(self.extras):
            x = nn.relu(nn.Conv(features // 2, (1, 1), name=f"extras_{index}_narrow")(x))
            x = nn.Conv(features, (kernel, kernel), stride, padding, name=f"extras_{index}_conv")(x)
            x = nn.relu(x)
            maps.append(x)
        offsets, logits = [], []
        for index, (x, ratios) in enumerate(zip(maps, self.ratios)):
            boxes = 2 + 2 * ratios
            for width, name, found in ((4, "offsets", offsets), (self.classes, "logits", logits)):
                y = nn.Conv(boxes * width, (3, 3), padding=1, name=f"{name}_{index}")(x)
                found.append(y.reshape(len(y), -1, width))
        return jnp.concatenate(offsets, axis=1), jnp.concatenate(logits, axis=1)


def default_boxes(model: SSD) -> np.ndarray:
    """Returns the boxes of a model, shape `(boxes, 4)`, float32: middle, width and height (section 2.2)."""
    grids = model.grids()
    scales = np.linspace(0.1, 1.05, len(grids) + 1)
    boxes = []
    for grid, scale, larger, ratios in zip(grids, scales, scales[1:], model.ratios):
        shapes = [(scale, scale), (np.sqrt(scale * larger), np.sqrt(scale * larger))]
        for ratio in np.sqrt(WIDE[:ratios]):
            shapes += [(scale * ratio, scale / ratio), (scale / ratio, scale * ratio)]
        middles = (np.arange(grid) + 0.5) / grid
        boxes += [(x, y, width, height) for y in middles for x in middles for width, height in shapes]
    return np.array(boxes, np.float32)


def match(boxes: np.ndarray, objects: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Assigns an object to each default box that it covers by half, and to its best box.

    Args:
        boxes: of `default_boxes`.
        objects: the boxes of the objects, shape `(objects, 4)`.
        classes: shape `(objects,)`, int32, 1 or more.

    Returns:
        The targets of offsets, shape `(boxes, 4)`, float32, and of classes, shape `(boxes,)`, int32.
    """
    low = np.maximum(*(part[..., :2] - part[..., 2:] / 2 for part in (boxes[:, None], objects)))
    high = np.minimum(*(part[..., :2] + part[..., 2:] / 2 for part in (boxes[:, None], objects)))
    common = np.prod(np.maximum(high - low, 0), axis=-1)
    share = common / (np.prod(boxes[:, None, 2:], axis=-1) + np.prod(objects[:, 2:], axis=-1) - common)
    share[share.argmax(0), np.arange(len(objects))] = 2.0
    chosen = share.argmax(1)
    middle = (objects[chosen, :2] - boxes[:, :2]) / boxes[:, 2:] / 0.1
    size = np.log(objects[chosen, 2:] / boxes[:, 2:]) / 0.2
    found = np.where(share.max(1) > 0.5, classes[chosen], 0)
    return np.concatenate([middle, size], axis=1).astype(np.float32), found.astype(np.int32)


def loss(outputs: tuple[jax.Array, jax.Array], targets: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The distance of the boxes of objects, and the cross entropy of these boxes and of the hardest others.

    There are three other boxes for each object: section 2.2, "hard negative mining".

    Args:
        outputs: offsets and logits of `SSD`.
        targets: offsets and classes of `match`, batched.
    """
    (offsets, logits), (true_offsets, classes) = outputs, targets
    positive = classes > 0
    count = positive.sum(1)
    entropies = optax.softmax_cross_entropy_with_integer_labels(logits, classes)
    background = jax.lax.stop_gradient(jnp.where(positive, 0, entropies))
    hardest_first = jnp.sort(background, axis=1, descending=True)
    limit = jnp.take_along_axis(hardest_first, jnp.minimum(3 * count, classes.shape[1] - 1)[:, None], axis=1)
    chosen = positive | (background > limit)
    distances = optax.huber_loss(offsets, true_offsets).sum(-1)
    total = jnp.sum(distances, 1, where=positive) + jnp.sum(entropies, 1, where=chosen)
    return (total / jnp.maximum(count, 1)).mean()


def _targets(
    boxes: np.ndarray, objects: list[np.ndarray], classes: list[np.ndarray]
) -> tuple[np.ndarray, ...]:
    matched = [match(boxes, *each) for each in zip(objects, classes)]
    return tuple(np.stack(part) for part in zip(*matched))


def full() -> Workload:
    """Noise of 300 x 300 with eight random objects."""
    model = SSD()
    boxes = default_boxes(model)

    def batch(rng: np.random.Generator, size: int) -> Batch:
        images = rng.standard_normal((size, 300, 300, 3), np.float32)
        objects = [
            np.concatenate([rng.random((8, 2)), rng.uniform(0.05, 0.5, (8, 2))], axis=1) for _ in images
        ]
        classes = [rng.integers(1, model.classes, 8) for _ in images]
        return (images,), _targets(boxes, objects, classes)

    return Workload(model, loss, Optimizer("sgd", 1e-3), 32, batch)


def small() -> Workload:
    """Finds three scanned digits, of one to three times their size, in an empty picture."""
    model = SSD(11, 64, (1, 1, 1), 16, ((32, 3, 2, 1), (32, 3, 2, 1)), ratios=(1, 1, 1))
    boxes = default_boxes(model)

    def batch(rng: np.random.Generator, size: int) -> Batch:
        scans, labels = data.digits()
        images, objects, classes = np.zeros((size, 64, 64, 1), np.float32), [], []
        for image in images:
            rows, zooms = rng.integers(0, len(scans), 3), rng.integers(1, 4, 3)
            corners = [rng.integers(0, 64 - 8 * zoom, 2) for zoom in zooms]
            for row, zoom, (x, y) in zip(rows, zooms, corners):
                digit = np.kron(scans[row], np.ones((zoom, zoom), np.float32))
                window = image[y : y + 8 * zoom, x : x + 8 * zoom, 0]
                np.maximum(window, digit, out=window)
            objects.append(
                np.array(
                    [(*(corner / 64 + zoom / 16), zoom / 8, zoom / 8) for corner, zoom in zip(corners, zooms)]
                )
            )
            classes.append(labels[rows] + 1)
        return (images,), _targets(boxes, objects, classes)

    return Workload(model, loss, Optimizer("adam", 2e-3), 8, batch)

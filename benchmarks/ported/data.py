"""Data for tiny runs that every machine has: bytes of the standard library, and scanned digits."""

import pathlib
import string
from collections.abc import Iterator

import numpy as np


def byte_batches(steps: int, batch_size: int, length: int) -> Iterator[np.ndarray]:
    """Yields batches of sequences of bytes from the standard library, shape (batch_size, length), uint8."""
    text = np.frombuffer(pathlib.Path(string.__file__).read_bytes(), np.uint8)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - length, batch_size)
        yield np.stack([text[start : start + length] for start in starts])


def digit_batches(steps: int, batch_size: int, size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of scikit-learn's scanned digits, enlarged to `size`.

    `image` has the shape (batch_size, size, size, 3), float32 from -1 to 1; `label` (batch_size,), int32.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.kron(pixels.reshape(-1, 8, 8) / 8 - 1, np.ones((size // 8, size // 8))).astype(np.float32)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        index = rng.integers(0, len(images), batch_size)
        image = np.repeat(images[index][..., None], 3, axis=-1)
        yield {"image": image, "label": labels[index].astype(np.int32)}

"""What training needs to know of a model: its loss, its optimizer and its batches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

Batch = tuple[tuple[Any, ...], Any]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model of one size, and how it is trained.

    Attributes:
        model: a Linen module, in float32, with no word of precision.
        loss: of what the model returns and the targets, a float32 scalar.
        optimizer: makes the optimizer.
        batch_size: how many examples a step takes.
        make_batch: of a random generator and a batch size, the arguments of the model and the targets, as
            NumPy arrays.
    """

    model: nn.Module
    loss: Callable[[Any, Any], jax.Array]
    optimizer: Callable[[], optax.GradientTransformation]
    batch_size: int
    make_batch: Callable[[np.random.Generator, int], Batch]

    def batch(self, seed: int, batch_size: int | None = None) -> Batch:
        """Returns the arguments of the model and the targets; the same for the same seed."""
        return self.make_batch(np.random.default_rng(seed), batch_size or self.batch_size)

    def init(self, seed: int) -> Any:
        """Returns the initial variables: `params`, and `batch_stats` if the model has any."""
        inputs, _ = self.batch(0, 1)
        return jax.jit(self.model.init)(jax.random.key(seed), *inputs)

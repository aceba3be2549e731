"""A workload: a model with its loss, its optimizer and its batches."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import numpy as np
import optax

Batch = tuple[tuple[Any, ...], Any]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The settings of an optimizer, for any framework.

    Attributes:
        kind: stochastic gradient descent with momentum, Adam (Kingma and Ba, 2014), or Adam with decoupled
            weight decay (Loshchilov and Hutter, 2017).
        learning_rate: a constant.
        momentum: for `sgd`.
        betas, epsilon: for `adam` and `adamw`.
        weight_decay: for `adamw`, on every parameter.
    """

    kind: Literal["sgd", "adam", "adamw"]
    learning_rate: float
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 1e-4

    def __call__(self) -> optax.GradientTransformation:
        """Returns the optax transformation."""
        adam = (self.learning_rate, *self.betas, self.epsilon)
        match self.kind:
            case "sgd":
                return optax.sgd(self.learning_rate, self.momentum)
            case "adam":
                return optax.adam(*adam)
            case "adamw":
                return optax.adamw(*adam, weight_decay=self.weight_decay)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model of one size, and its training.

    Attributes:
        model: a Linen module in float32 that knows nothing of precision.
        loss: takes the outputs of the model and the targets, and returns a float32 scalar.
        optimizer: the settings of the optimizer. A call of it returns the optax transformation.
        batch_size: the number of examples in a step.
        make_batch: takes a random generator and a batch size, and returns the arguments of the model and the
            targets as NumPy arrays.
    """

    model: nn.Module
    loss: Callable[[Any, Any], jax.Array]
    optimizer: Optimizer
    batch_size: int
    make_batch: Callable[[np.random.Generator, int], Batch]

    def batch(self, seed: int, batch_size: int | None = None) -> Batch:
        """Returns the arguments of the model and the targets; the same for the same seed."""
        return self.make_batch(np.random.default_rng(seed), batch_size or self.batch_size)

    def init(self, seed: int) -> Any:
        """Returns the initial variables: `params`, and `batch_stats` if the model has any."""
        inputs, _ = self.batch(0, 1)
        return self._init(jax.random.key(seed), *inputs)

    @functools.cached_property
    def _init(self) -> Callable[..., Any]:
        return jax.jit(self.model.init)

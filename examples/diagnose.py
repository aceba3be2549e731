"""Three faults of half precision, from the run that failed to their causes by name.

    python examples/diagnose.py

A small attention model, written by hand in float16, reads scans of handwritten digits (scikit-learn's), one
row of pixels at a time. It has three faults that people make: a mask of -1e9, which is -inf in float16; a
float32 table that promotes the matmul behind it; and a loss whose gradients float16 rounds to zero.

In the first run every step is skipped, and `jmp.raise_if_stuck` stops it. `doctor` names the mask, and its
list of operations the table. With both fixed nothing is skipped, but all gradients are zero, which stops the
second run. `doctor` names a scale that saves them. With it the loss falls to a tenth. Takes less than a
minute on two CPU cores.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp_lite as jmp
from jmp_lite.diagnostics import Diagnosis, doctor

HALF = jmp.get_policy("params=float32,compute=float16,output=float32")
CHANNELS = np.linspace(0.5, 1.5, 32, dtype=np.float32)
Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Model:
    """The model, with or without its faults.

    Attributes:
        mask: what hides an empty row of an image from the attention.
        channels: a table of shape `(32,)`.
    """

    mask: float
    channels: Any

    def loss(self, params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns the squared error of the probabilities, divided by 1e5 as by the pixels of an image."""
        params, x = HALF.cast_to_compute((params, images))
        with jax.named_scope("embed"):
            h = jnp.tanh(x @ params["embed"])
        with jax.named_scope("attention"):
            scores = (h @ params["query"]) @ (h @ params["key"]).swapaxes(1, 2) / 32**0.5
            # Row i sees the rows before it that are not empty. If there is none, all of its scores are -inf.
            seen = jnp.tril(jnp.ones((8, 8), bool), -1) & (images.sum(-1) > 0)[:, None, :]
            hidden = jnp.where(seen, 0.0, self.mask).astype(scores.dtype)
            scores = jnp.where(seen, scores, hidden)
            h = h + jax.nn.softmax(scores) @ h
        with jax.named_scope("head"):
            logits = ((h * self.channels).reshape(-1, 256) @ params["head"]).astype(jnp.float32)
        return jnp.mean((jax.nn.softmax(logits) - jax.nn.one_hot(labels, 10)) ** 2) / 1e5


def initial() -> Params:
    """Returns the parameters, float32."""
    shapes = {"embed": (8, 32), "query": (32, 32), "key": (32, 32), "head": (256, 10)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape) / np.sqrt(shape[0])
        for key, (name, shape) in zip(keys, shapes.items())
    }


def train(loss_fn: Callable[..., Any], loss_scale: Any, data: Any, steps: int) -> tuple[np.ndarray, str]:
    """Trains on batches of 64. Returns the losses, and why the run was stopped if it was stuck."""
    params, tx = initial(), jmp.with_loss_scale(optax.adam(1e-2, eps=1e-12), loss_scale)
    opt_state = tx.init(params)

    @jax.jit
    def step(params: Params, opt_state: Any, images: jax.Array, labels: jax.Array) -> Any:
        loss, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state))(params, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for number in range(steps):
        params, opt_state, loss = step(params, opt_state, *batch(data, number))
        losses.append(float(loss))
        try:
            jmp.raise_if_stuck(opt_state)
        except FloatingPointError as error:
            return np.array(losses), str(error)
    return np.array(losses), ""


def batch(data: Any, number: int) -> tuple[jax.Array, jax.Array]:
    images, labels = data
    chosen = np.arange(64 * number, 64 * number + 64) % len(labels)
    return jnp.asarray(images[chosen]), jnp.asarray(labels[chosen])


def show(title: str, diagnosis: Diagnosis) -> None:
    print(f"\n=== {title}\n{diagnosis}")


@dataclasses.dataclass
class Story:
    """What is kept.

    Attributes:
        stuck, zero: what `raise_if_stuck` says of the first and of the second run.
        promoted: why a matmul of the first run is not in half.
        first, second: what `doctor` says of the two runs that failed.
        flat, learned: the losses of the second run and of the last one.
        scale: the loss scale of the last run.
    """

    stuck: str
    zero: str
    promoted: str
    first: Diagnosis
    second: Diagnosis
    flat: np.ndarray
    learned: np.ndarray
    scale: float


def main(arguments: list[str] | None = None) -> Story:
    """Runs the story, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=300, help="steps of each training run (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps must be at least 1.")
    images, labels = load_digits(return_X_y=True)
    data = ((images / 16).reshape(-1, 8, 8).astype(np.float32), labels.astype(np.int32))
    # 1. All steps are skipped.
    broken = Model(mask=-1e9, channels=jnp.asarray(CHANNELS))
    _, stuck = train(broken.loss, jmp.DynamicLossScale(2.0**15), data, options.steps)
    print(f"=== The first run stops: {stuck}")
    first = doctor(broken.loss, "float16", device=None)(initial(), *batch(data, 0))
    show("The doctor on the first run", first)
    assert first.operations is not None
    (promoted,) = first.operations.in_float32()
    reason = promoted.reason.replace(f"{Path(__file__).parent}/", "")
    print(f"\nThe matmul that is not in half is in {promoted.module}: {reason}")
    # 2. The mask and the table are fixed. Nothing is skipped, but the loss does not move.
    fixed = Model(mask=float(jnp.finfo(jnp.float16).min), channels=jnp.asarray(CHANNELS, jnp.float16))
    flat, zero = train(fixed.loss, jmp.NoOpLossScale(), data, options.steps)
    print(
        f"\n=== The second run: the loss goes from {flat[:10].mean():.3e} to {flat[-10:].mean():.3e}. {zero}"
    )
    second = doctor(fixed.loss, "float16", device=None)(initial(), *batch(data, 0))
    show("The doctor on the second run", second)
    # 3. With the loss scale that `doctor` has tried.
    assert second.precision is not None
    scale = jmp.DynamicLossScale(second.precision.loss_scale)
    learned, _ = train(fixed.loss, scale, data, options.steps)
    start, end = learned[:10].mean(), learned[-10:].mean()
    print(f"\n=== The third run: the loss goes from {start:.3e} to {end:.3e}, {end / start:.0%} of the start")
    scale_found = second.precision.loss_scale
    return Story(stuck, zero, promoted.reason, first, second, flat, learned, scale_found)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Stopped.") from None

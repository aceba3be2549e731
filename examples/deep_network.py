"""A network of 60 layers for which no global loss scale works, and `with_layer_loss_scale`, which does.

    python examples/deep_network.py

Each layer halves the gradient that passes through it, so the gradients of the first and of the last layer are
60 powers of two apart, while float16 covers 40. The optimizer, Lion, takes the sign of the gradients, so in
float32 the network learns as well as one whose gradients all have the same size. The first layer keeps 3
numbers of each image of a digit: a network that cannot train this layer sees a random projection.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp_lite as jmp
from jmp_lite.diagnostics import profile_ranges

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LAYERS, WIDTH, KEPT, BATCH = 60, 32, 3, 128
ARMS: dict[str, jmp.LossScale] = {
    "float32": jmp.NoOpLossScale(),
    "float16, scale per layer": jmp.NoOpLossScale(),
    "float16, no scale": jmp.NoOpLossScale(),
    "float16, static 2**10": jmp.StaticLossScale(2.0**10),
    "float16, static 2**20": jmp.StaticLossScale(2.0**20),
    "float16, static 2**40": jmp.StaticLossScale(2.0**40),
    "float16, dynamic": jmp.DynamicLossScale(2.0**15, period=20),
}


def dense(w: jax.Array, x: jax.Array) -> jax.Array:
    """A layer: its input, shape `(batch, features)`, times its weight, and a tanh."""
    return jnp.tanh(x @ w)


def half_backward(x: jax.Array) -> jax.Array:
    """Returns `x`, and passes on half of its gradient."""
    return jax.lax.stop_gradient(x / 2) + x / 2


def init(seed: int) -> dict[str, jax.Array]:
    """Returns the weights, float32. Those of the layers between the second and the head are one array."""
    first, second, between, head = jax.random.split(jax.random.key(seed), 4)
    normal = lambda key, *shape: jax.random.normal(key, shape) / shape[-2] ** 0.5
    return {
        "first": normal(first, 64, KEPT) / 2,
        "second": normal(second, KEPT, WIDTH),
        "between": normal(between, LAYERS - 2, WIDTH, WIDTH) / 8,
        "head": normal(head, WIDTH, 10),
    }


def make_loss(arm: str) -> Callable[..., jax.Array]:
    """Returns the loss of an arm, a function of weights, images `(batch, 64)` and labels."""
    layer = dense if arm == "float32" else jmp.autocast(dense, jnp.float16)
    return loss_with(jmp.with_layer_loss_scale(layer) if "per layer" in arm else layer)


def loss_with(layer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns the loss of a network whose layers are `layer`."""

    def loss_fn(params: dict[str, jax.Array], x: jax.Array, labels: jax.Array) -> jax.Array:
        x = half_backward(layer(params["first"], x))
        x = half_backward(layer(params["second"], x))
        x, _ = jax.lax.scan(lambda x, w: (half_backward(x + layer(w, x)), None), x, params["between"])
        logits = x @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss_fn


@functools.cache
def data() -> tuple[jax.Array, jax.Array]:
    """Returns the scans of digits that come with scikit-learn, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return jnp.asarray(images / 8 - 1, jnp.float32), jnp.asarray(labels)


def train(arm: str, seed: int, steps: int) -> tuple[np.ndarray, int]:
    """Returns the loss of each step, and how many steps were skipped."""
    loss_fn = make_loss(arm)
    tx = jmp.with_loss_scale(optax.lion(1e-3), ARMS[arm])
    params = init(seed)
    opt_state = tx.init(params)
    images, labels = data()

    def step(carry: Any, batch: jax.Array) -> Any:
        params, opt_state = carry
        scale: Any = jmp.get_loss_scale(opt_state)
        loss, grads = jmp.value_and_grad(loss_fn, scale)(params, images[batch], labels[batch])
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    batches = np.random.default_rng(seed).integers(0, len(labels), (steps, BATCH))
    run = jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches))
    (_, opt_state), losses = run((params, opt_state), jnp.asarray(batches))
    return np.asarray(losses), int(jmp.get_metrics(opt_state)["skipped_steps"])


def main(arguments: list[str] | None = None) -> dict[str, list[np.ndarray]]:
    """Trains all arms, prints a table and draws the losses. Returns the losses of each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=400, help="steps of training of each arm (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="how many times to train each arm (default: %(default)s)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("out/deep_network.png"),
        help="the picture of the losses (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if min(options.steps, options.seeds) < 1:
        parser.error("--steps and --seeds must be at least 1.")
    try:  # Before the training, not after it.
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.open("ab").close()
    except OSError as error:
        parser.error(f"--output: cannot write {options.output}: {error.strerror}.")

    found: dict[str, list[np.ndarray]] = {}
    few = max(1, options.steps // 10)
    print(f"{'':24}{'last losses':>14}{'(lowest-highest)':>20}{'skipped':>9}")
    for arm in ARMS:
        runs = [train(arm, seed, options.steps) for seed in range(options.seeds)]
        found[arm] = [losses for losses, _ in runs]
        last = [losses[-few:].mean() for losses in found[arm]]
        spread = f"({min(last):.3f}-{max(last):.3f})"
        print(f"{arm:24}{np.mean(last):14.3f}{spread:>20}{max(skipped for _, skipped in runs):9}")
    draw(found, options.output)
    images, labels = data()
    ranges = profile_ranges(make_loss("float32"), jnp.float16)(init(0), images[:BATCH], labels[:BATCH])
    print(f"\n{ranges}\n\nMeans over the last tenth of {options.steps} steps. Wrote {options.output}.")
    return found


def draw(found: dict[str, list[np.ndarray]], path: Path) -> None:
    """Draws the mean loss of each arm over the steps."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for arm, runs in found.items():
        smooth = np.convolve(np.mean(runs, axis=0), np.ones(10) / 10, mode="valid")
        axes.plot(smooth, label=arm, linewidth=2.5 if "per layer" in arm else 1.2)
    axes.set(xlabel="step", ylabel="training loss", title="60 layers, gradients 60 powers of two apart")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Stopped.") from None

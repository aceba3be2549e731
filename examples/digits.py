"""Scanned digits in float32, bfloat16 and float16: what a loss scale is for, in a table and a picture.

    python examples/digits.py

A small convolutional network (Flax Linen, BatchNorm) learns scikit-learn's 1,797 real scans of digits
in four precisions, from the same initialization and on the same batches. float16 with a dynamic loss
scale matches float32, at 98% of the test images; float16 without one stays near 20%, because its
gradients underflow. The table goes to the terminal, the loss curves and the scale over time to
out/digits.png. Takes about a minute on two CPU cores; `--size large` gives a GPU something to do.
"""

import argparse
import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jmp_lite as jmp

# What tells the arms apart: a policy and a loss scale. The scale doubles every 8 steps because these
# runs are short; over thousands of steps leave the default period of 2000.
HALF = "params=float32,compute={},output=float32"
ARMS = {
    "float32": (jmp.get_policy("float32"), jmp.NoOpLossScale()),
    "bfloat16": (jmp.get_policy(HALF.format("bfloat16")), jmp.NoOpLossScale()),
    "float16, dynamic scale": (
        jmp.get_policy(HALF.format("float16")),
        jmp.DynamicLossScale(2.0**15, period=8),
    ),
    "float16, no scale": (jmp.get_policy(HALF.format("float16")), jmp.NoOpLossScale()),
}
# The channels of the convolutions, and the images in a batch.
SIZES = {"small": ((8, 8), 448), "default": ((16, 16, 16, 16), 448), "large": ((256, 256, 256, 256), 448)}


class PixelClassifier(nn.Module):
    """Says for every pixel which digit it belongs to, as a segmentation network does."""

    features: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features in self.features:
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        # N(0, 0.01), as new layers of a detector are initialised (Lin et al., Focal Loss for Dense Object
        # Detection, section 4.1): the network begins undecided.
        return nn.Conv(10, (1, 1), kernel_init=nn.initializers.normal(0.01))(x)


def squared_error(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean squared error of the probabilities (the Brier score), over images, pixels and classes.

    Here float16 begins to matter. The mean is over 448 * 8 * 8 * 10 = 286,720 numbers. At the start no
    logit has a gradient above 7e-7, and no activation below the small head one above 2e-8. float16 rounds
    numbers below 3e-8 to zero, so only the head learns. float32 and bfloat16 do not lose them, since
    Adam divides by the size of the gradients. Nothing is out of the ordinary: a segmentation of one
    512 x 512 image into 20 classes is a mean over 5 million numbers.
    """
    targets = jax.nn.one_hot(labels, 10)[:, None, None, :]
    return jnp.mean((jax.nn.softmax(logits) - targets) ** 2)


def make_train_step(model: Any, policy: jmp.Policy, tx: optax.GradientTransformationExtraArgs) -> Any:
    def loss_fn(params: Any, batch_stats: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        params, x = policy.cast_to_compute((params, x))
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = model.apply(variables, x, train=True, mutable=["batch_stats"])
        return squared_error(policy.cast_to_output(logits), y), updated["batch_stats"]

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def train_step(params: Any, batch_stats: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss_scale = jmp.get_loss_scale(opt_state)
        value_and_grad = jmp.value_and_grad(loss_fn, loss_scale, has_aux=True)
        (loss, new_stats), grads = value_and_grad(params, batch_stats, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        # A skipped step leaves the optimizer as it was; batch statistics are outside it.
        batch_stats = jmp.select_tree(jmp.grads_finite(opt_state), new_stats, batch_stats)
        return optax.apply_updates(params, updates), batch_stats, opt_state, (loss, loss_scale.loss_scale)

    return train_step


def make_evaluate(model: Any, policy: jmp.Policy) -> Any:
    @jax.jit
    def evaluate(params: Any, batch_stats: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        params, x = policy.cast_to_compute((params, x))
        logits = model.apply({"params": params, "batch_stats": batch_stats}, x, train=False)
        logits = policy.cast_to_output(logits)
        votes = jax.nn.softmax(logits).mean((1, 2))  # Every pixel has a vote.
        return jnp.mean(votes.argmax(-1) == y), squared_error(logits, y)

    return evaluate


@dataclasses.dataclass
class Run:
    """What is kept of one arm trained from one seed."""

    accuracy: float
    test_loss: float
    losses: np.ndarray  # One a step.
    scales: np.ndarray  # One a step.
    skipped_steps: int
    milliseconds: float  # A step of the fastest epoch: what else runs on the machine adds to the others.
    temporary_bytes: int


def load_data() -> list[Any]:
    """Returns training images `(1347, 8, 8, 1)`, test images `(450, 8, 8, 1)`, and the labels of both."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32)
    return train_test_split(images, labels.astype(np.int32), test_size=450, random_state=0, stratify=labels)


def train_arm(arm: str, size: str, epochs: int, seeds: int, data: Any, progress: Any) -> list[Run]:
    """Trains one arm from every seed; the step is compiled once."""
    policy, loss_scale = ARMS[arm]
    features, batch_size = SIZES[size]
    train_x, test_x, train_y, test_y = data
    steps_an_epoch = len(train_x) // batch_size

    model = PixelClassifier(features)
    schedule = optax.cosine_decay_schedule(1e-2, epochs * steps_an_epoch)
    tx = jmp.with_loss_scale(optax.adam(schedule), loss_scale)
    train_step, evaluate = make_train_step(model, policy, tx), make_evaluate(model, policy)
    compiled, runs = None, []
    for seed in range(seeds):
        variables = model.init(jax.random.key(seed), train_x[:1], train=False)
        params, batch_stats = variables["params"], variables["batch_stats"]
        opt_state = tx.init(params)
        if compiled is None:
            x, y = train_x[:batch_size], train_y[:batch_size]
            compiled = train_step.lower(params, batch_stats, opt_state, x, y).compile()
        order = np.random.default_rng(seed)  # The same batches for every arm.
        history, seconds = [], []
        for _ in range(epochs):
            start = time.perf_counter()
            shuffled = order.permutation(len(train_x))[: steps_an_epoch * batch_size]
            for batch in shuffled.reshape(steps_an_epoch, batch_size):
                x, y = train_x[batch], train_y[batch]
                params, batch_stats, opt_state, metrics = compiled(params, batch_stats, opt_state, x, y)
                history.append(metrics)
            jmp.raise_if_stuck(opt_state)  # Waits for the device.
            seconds.append((time.perf_counter() - start) / steps_an_epoch)
            progress.update(steps_an_epoch)
        accuracy, test_loss = evaluate(params, batch_stats, test_x, test_y)
        history = np.asarray(history)
        runs.append(
            Run(
                accuracy=float(accuracy),
                test_loss=float(test_loss),
                losses=history[:, 0],
                scales=history[:, 1],
                skipped_steps=int(jmp.get_metrics(opt_state)["skipped_steps"]),
                milliseconds=1e3 * min(seconds),
                temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
            )
        )
    return runs


def table(results: dict[str, list[Run]], times: bool) -> str:
    """Returns a line of numbers for each arm. `times` adds the milliseconds of a step."""
    lines = [f"{'':23}{'test accuracy':>17}{'loss':>9}{'skipped':>9}{'final scale':>13}{'activations':>13}"]
    lines[0] += f"{'ms/step':>9}{'/float32':>9}" * times
    baseline = min(run.milliseconds for run in results["float32"])
    for arm, runs in results.items():
        accuracies = [100 * run.accuracy for run in runs]
        spread = f"{np.mean(accuracies):.1f} ({min(accuracies):.1f}-{max(accuracies):.1f})"
        milliseconds = min(run.milliseconds for run in runs)
        lines.append(
            f"{arm:23}{spread:>17}{np.mean([run.test_loss for run in runs]):9.4f}"
            f"{np.mean([run.skipped_steps for run in runs]):9.1f}{runs[-1].scales[-1]:13,.0f}"
            f"{runs[0].temporary_bytes / 2**20:9.1f} MiB"
            + f"{milliseconds:9.1f}{milliseconds / baseline:9.2f}"
            * times
        )
    return "\n".join(lines)


NOTE = """
Accuracy in percent of the test images, mean (lowest-highest) of the seeds; loss on the test images.
Activations: temporary memory of the compiled step. Device: {device}.
On a CPU, XLA computes half precision by way of float32, which saves neither time nor memory:
only a GPU's Tensor Cores show the speed."""


def draw(results: dict[str, list[Run]], path: Path) -> None:
    """Draws the loss curves and the loss scales: the median of the seeds, and their range.

    The file holds the table too, as its description: the picture and the table of a page are of one run.
    """
    steps = np.arange(1, len(results["float32"][0].losses) + 1)
    figure = Figure(figsize=(8, 7), layout="constrained")
    losses, scales = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    styles = {"float32": ("0.6", "-", 5), "bfloat16": ("tab:blue", "--", 2)}
    styles |= {"float16, dynamic scale": ("tab:green", "-", 1.5), "float16, no scale": ("tab:red", "-", 2)}
    for arm, runs in results.items():
        color, line, width = styles[arm]
        label = f"{100 * np.mean([run.accuracy for run in runs]):.1f}%  {arm}"
        curves = np.stack([run.losses for run in runs])
        losses.fill_between(steps, curves.min(0), curves.max(0), color=color, alpha=0.15, linewidth=0)
        losses.plot(steps, np.median(curves, 0), line, color=color, linewidth=width, label=label)
    losses.set(yscale="log", ylabel="training loss: median and range of the seeds")
    losses.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_locator(NullLocator())
    losses.set_title("The same start, the same batches, four precisions", loc="left", weight="bold")
    title = f"test images right, mean of {len(results['float32'])} seeds"
    losses.legend(frameon=False, loc="lower left", title=title, alignment="left")

    for run in results["float16, dynamic scale"]:
        scales.step(steps, run.scales, where="post", color="tab:green", alpha=0.6)
        skipped = np.flatnonzero(run.scales[1:] < run.scales[:-1])
        scales.plot(steps[skipped], run.scales[skipped], "x", color="tab:red", markersize=7)
    scales.plot([], [], "x", color="tab:red", label="overflow: step skipped, scale halved")
    scales.set(ylabel="loss scale", xlabel="step", xlim=(1, len(steps)))
    scales.set_yscale("log", base=2)
    scales.set_title("The dynamic loss scale of each seed", loc="left", weight="bold")
    scales.legend(frameon=False, loc="lower right")
    for axes in (losses, scales):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=150, metadata={"Description": table(results, times=False)})


def main(arguments: list[str] | None = None) -> dict[str, list[Run]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--size",
        choices=SIZES,
        default="default",
        help="of the network and the batches (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs", type=int, default=40, help="passes over the training images (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="how many times to train each arm (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("out/digits.png"), help="the picture (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if min(options.epochs, options.seeds) < 1:
        parser.error("--epochs and --seeds must be at least 1.")
    if options.output.suffix != ".png":
        parser.error("--output must end in .png.")
    try:  # Before the training, not after it.
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.open("ab").close()
    except OSError as error:
        parser.error(f"--output: cannot write {options.output}: {error.strerror}.")

    data = load_data()
    results: dict[str, list[Run]] = {}
    steps = options.epochs * (len(data[0]) // SIZES[options.size][1])
    with tqdm(
        total=steps * options.seeds * len(ARMS), unit="step", disable=None, mininterval=0.5
    ) as progress:
        for arm in ARMS:
            progress.set_description(arm)
            results[arm] = train_arm(arm, options.size, options.epochs, options.seeds, data, progress)
    print(table(results, times=True))
    print(NOTE.format(device=jax.devices()[0].device_kind))
    draw(results, options.output)
    print(f"Wrote {options.output}.")
    return results


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Stopped.") from None

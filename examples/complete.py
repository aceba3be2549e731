"""A whole training program in one file, to copy into a project of your own. Flax Linen or NNX, any precision.

    python examples/complete.py
    python examples/complete.py --flax nnx --precision bfloat16
    python examples/complete.py --checkpoint out/complete.msgpack --tensorboard out/events

A small network with BatchNorm and dropout learns scikit-learn's scans of digits. Gradients of several
micro-batches are accumulated, and then clipped. The learning rate follows a schedule. A moving average (EMA)
of the parameters is evaluated after each epoch. With `--checkpoint` a run that was stopped goes on bit for
bit: start it again with the same command.

The same code runs in float32, bfloat16 and float16. The lines for it have a comment that begins with
"Precision:". All others are a float32 program. A micro-batch whose gradients hold inf or NaN is skipped: it
leaves the parameters, the optimizer, the batch statistics and the average as they were.
"""

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, serialization
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jmp_lite as jmp

# 1. The model, once for each API of Flax. Keep one of the two. Both know nothing of precision.
#
# A builder returns the parameters, the batch statistics, and a function
#     forward(params, batch_stats, images, key) -> logits, new batch_stats
# that trains with a key for dropout, and evaluates with None. So one train step serves both APIs.

Tree = Any  # A tree of arrays.
Forward = Callable[[Tree, Tree, jax.Array, jax.Array | None], tuple[jax.Array, Tree]]


class LinenNet(nn.Module):
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(32, (3, 3), use_bias=False, name="conv1")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm1")(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.Conv(64, (3, 3), use_bias=False, name="conv2")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm2")(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x.mean((1, 2)))
        return nn.Dense(10, name="head")(x)


def build_linen(dropout: float, seed: int) -> tuple[Tree, Tree, Forward]:
    net = LinenNet(dropout)
    variables = net.init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)), train=False)

    def forward(params: Tree, batch_stats: Tree, x: jax.Array, key: jax.Array | None) -> Any:
        variables = {"params": params, "batch_stats": batch_stats}
        if key is None:
            return net.apply(variables, x, train=False), batch_stats
        logits, new = net.apply(variables, x, train=True, mutable=["batch_stats"], rngs={"dropout": key})
        return logits, new["batch_stats"]

    return variables["params"], variables["batch_stats"], forward


class NnxNet(nnx.Module):
    def __init__(self, dropout: float, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, (3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(dropout)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        x = nnx.relu(self.norm1(self.conv1(x), use_running_average=key is None))
        x = nnx.avg_pool(x, (2, 2), (2, 2))
        x = nnx.relu(self.norm2(self.conv2(x), use_running_average=key is None))
        x = self.dropout(x.mean((1, 2)), deterministic=key is None, rngs=key)
        return self.head(x)


def build_nnx(dropout: float, seed: int) -> tuple[Tree, Tree, Forward]:
    graph, params, batch_stats = nnx.split(NnxNet(dropout, nnx.Rngs(seed)), nnx.Param, nnx.BatchStat)

    def forward(params: Tree, batch_stats: Tree, x: jax.Array, key: jax.Array | None) -> Any:
        # A module whose state changes must be made inside of the function that autocast sees.
        net = nnx.merge(graph, params, batch_stats)
        return net(x, key), nnx.to_pure_dict(nnx.state(net, nnx.BatchStat))

    return nnx.to_pure_dict(params), nnx.to_pure_dict(batch_stats), forward


BUILDERS = {"linen": build_linen, "nnx": build_nnx}

# 2. The data.


def load_data() -> Any:
    """Returns training images `(1347, 8, 8, 1)`, test images `(450, 8, 8, 1)`, and the labels of both."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32)
    return train_test_split(images, labels.astype(np.int32), test_size=450, random_state=0, stratify=labels)


def batches(
    x: np.ndarray, y: np.ndarray, options: argparse.Namespace, epoch: int, skip: int
) -> Iterator[Any]:
    """Yields the micro-batches of an epoch, from number `skip` on.

    Their order depends on the seed and the epoch alone, so a resumed run goes on with the next one.
    """
    order = np.random.default_rng((options.seed, epoch)).permutation(len(x))
    for begin in range(skip * options.batch_size, len(x) - options.batch_size + 1, options.batch_size):
        chosen = order[begin : begin + options.batch_size]
        yield x[chosen], y[chosen]


# 3. The optimizer and the train step.

# Precision: float16 needs a loss scale. The range of bfloat16 is that of float32.
LOSS_SCALES: dict[str, jmp.LossScale] = {
    "float32": jmp.NoOpLossScale(),
    "bfloat16": jmp.NoOpLossScale(),
    "float16": jmp.DynamicLossScale(2.0**15),
}


class State(NamedTuple):
    """All that training changes. A checkpoint holds it."""

    step: jax.Array  # Micro-batches so far, skipped ones too: int32, shape ().
    params: Tree
    batch_stats: Tree
    opt_state: Tree  # Also the loss scale, its counters, and the accumulated gradients.
    ema: Tree  # The moving average of the parameters.


def make_schedule(options: argparse.Namespace, updates: int) -> optax.Schedule:
    rate = options.learning_rate
    return optax.warmup_cosine_decay_schedule(0.1 * rate, rate, updates // 10, updates)


def make_optimizer(options: argparse.Namespace, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The clip is inside of `MultiSteps`, where it sees the accumulated gradient."""
    tx = optax.chain(optax.clip_by_global_norm(options.clip_norm), optax.adamw(schedule, weight_decay=1e-4))
    accumulating = optax.MultiSteps(tx, options.accumulate)
    # Precision: holds and adapts the scale, and drops micro-batches with inf or NaN. It is the outermost.
    return jmp.with_loss_scale(accumulating, LOSS_SCALES[options.precision])


def updates_done(opt_state: Tree) -> Any:
    """Returns how many updates `MultiSteps` has made: int32, shape ()."""
    return optax.tree.get(opt_state, "gradient_step")


def make_train_step(forward: Forward, tx: optax.GradientTransformation, options: argparse.Namespace) -> Any:
    def loss_fn(params: Tree, batch_stats: Tree, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
        logits, batch_stats = forward(params, batch_stats, x, key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), batch_stats

    # Precision: products in half. In float32 the function stays as it is.
    loss_fn = jmp.autocast(loss_fn, options.precision)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        key = jax.random.fold_in(jax.random.key(options.seed), state.step)
        # Precision: the loss is not scaled, the gradients are unscaled and float32.
        value_and_grad = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(state.opt_state), has_aux=True)
        (loss, new_stats), grads = value_and_grad(state.params, state.batch_stats, x, y, key)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        # The optimizer is as it was after a skipped micro-batch. State outside of it is selected here.
        batch_stats = jmp.select_tree(jmp.grads_finite(opt_state), new_stats, state.batch_stats)
        # The average waits for an update. Micro-batches that are skipped or accumulated do not move it.
        new_ema = optax.incremental_update(params, state.ema, 1 - options.ema_decay)
        updated = updates_done(opt_state) > updates_done(state.opt_state)
        ema = jmp.select_tree(updated, new_ema, state.ema)
        return State(state.step + 1, params, batch_stats, opt_state, ema), loss

    return train_step


def make_evaluate(forward: Forward, options: argparse.Namespace) -> Any:
    predict = jmp.autocast(forward, options.precision)

    @jax.jit
    def evaluate(state: State, x: jax.Array, y: jax.Array) -> jax.Array:
        logits, _ = predict(state.ema, state.batch_stats, x, None)
        return jnp.mean(logits.argmax(-1) == y)

    return evaluate


# 4. Checkpoints: a file, for one machine. For many machines use Orbax, as examples/data_parallel.py does.


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that a run must keep."""
    free = ("checkpoint", "save_every", "log_every", "tensorboard")
    return {name: value for name, value in vars(options).items() if name not in free}


def save(state: State, options: argparse.Namespace) -> None:
    """Writes the checkpoint. A run that is killed while it writes leaves the file of before."""
    if options.checkpoint is not None:
        options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        unfinished = options.checkpoint.with_name(options.checkpoint.name + ".unfinished")
        unfinished.write_bytes(serialization.to_bytes({"settings": settings_of(options), "state": state}))
        os.replace(unfinished, options.checkpoint)


def restore(state: State, options: argparse.Namespace) -> State:
    """Returns the state of the checkpoint. `state`, the start of the run, gives the structure."""
    try:
        saved: Any = serialization.msgpack_restore(options.checkpoint.read_bytes())
        old, new = saved["settings"], settings_of(options)
        changed = [f"{name} {old[name]}, now {new[name]}" for name in new if old[name] != new[name]]
        if not changed:
            return serialization.from_state_dict(state, saved["state"])  # pyright: ignore[reportReturnType]
    except (ValueError, TypeError, KeyError, IndexError) as error:
        sys.exit(f"{options.checkpoint} is no checkpoint of this program ({type(error).__name__}: {error}).")
    # To go on with another precision or optimizer: jmp.resume, docs/loss-scaling.md.
    sys.exit(f"{options.checkpoint} was written with other settings: {'; '.join(changed)}.")


# 5. The run.


def progress(micro_batches: Iterator[Any], description: str, total: int, done: int) -> Any:
    """Shows a progress bar where tqdm is installed. Without it there is a line after each epoch."""
    if importlib.util.find_spec("tqdm") is None:
        return micro_batches
    from tqdm import tqdm

    return tqdm(micro_batches, description, total, initial=done, leave=False, mininterval=0.5)


def open_events(folder: Path | None) -> Any:
    if folder is None:
        return None
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(folder))


def write(events: Any, step: int, scalars: dict[str, Any]) -> None:
    if events is not None:
        for name, value in scalars.items():
            events.add_scalar(name, float(value), step)


def mean_loss(losses: list[Any], taken: list[Any]) -> float:
    """Returns the mean loss of the micro-batches that were not skipped. A NaN ends the program."""
    of_taken = np.array(losses)[np.array(taken)]
    if wrong := np.count_nonzero(~np.isfinite(of_taken)):
        sys.exit(
            f"{wrong} of the last {len(of_taken)} losses are inf or NaN although their gradients are finite. "
            "No loss scale mends that. jmp_lite.diagnostics.find_nonfinite names the operation."
        )
    return float(of_taken.mean()) if of_taken.size else float("nan")


def train(options: argparse.Namespace) -> tuple[State, float]:
    """Returns the last state, and the accuracy of its average on the test images."""
    train_x, test_x, train_y, test_y = load_data()
    steps_an_epoch = len(train_x) // options.batch_size
    schedule = make_schedule(options, options.epochs * steps_an_epoch // options.accumulate)
    tx = make_optimizer(options, schedule)
    params, batch_stats, forward = BUILDERS[options.flax](options.dropout, options.seed)
    # The step donates the state, and no buffer can be donated twice: the average begins as a copy.
    ema = jax.tree.map(jnp.copy, params)
    state = State(jnp.int32(0), params, batch_stats, tx.init(params), ema)
    if options.checkpoint is not None and options.checkpoint.exists():
        state = restore(state, options)
        print(f"Goes on from micro-batch {int(state.step)}.")
    train_step, evaluate = make_train_step(forward, tx, options), make_evaluate(forward, options)
    events, step = open_events(options.tensorboard), int(state.step)

    for epoch in range(step // steps_an_epoch, options.epochs):
        losses, taken, done = [], [], step % steps_an_epoch
        micro_batches = batches(train_x, train_y, options, epoch, done)
        for x, y in progress(micro_batches, f"epoch {epoch + 1}", steps_an_epoch, done):
            state, loss = train_step(state, x, y)
            losses.append(loss)  # Not `float(loss)`: it would wait for the device.
            taken.append(jmp.grads_finite(state.opt_state))
            step += 1
            if step % options.log_every == 0:
                rate = schedule(updates_done(state.opt_state))
                write(events, step, {"loss": loss, "learning_rate": rate, **jmp.metrics(state.opt_state)})
            if step % options.save_every == 0:
                mean_loss(losses, taken)
                save(state, options)
        jmp.raise_if_stuck(state.opt_state)
        mean = mean_loss(losses, taken)
        save(state, options)
        accuracy, metrics = float(evaluate(state, test_x, test_y)), jmp.metrics(state.opt_state)
        write(events, step, {"test_accuracy": accuracy})
        print(
            f"epoch {epoch + 1:3}   loss {mean:.4f}   test accuracy {accuracy:.1%}   "
            f"loss scale {metrics['loss_scale']:g}   skipped {metrics['skipped_steps']}"
        )
    if events is not None:
        events.close()
    return state, float(evaluate(state, test_x, test_y))


# 6. The command line.


def number(kind: type, low: float, high: float = float("inf")) -> Callable[[str], Any]:
    """Returns a type of argparse: a number from `low` to `high`."""

    def parse_number(text: str) -> Any:
        value = kind(text)  # argparse makes a message of a ValueError.
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"should be from {low:g} to {high:g}. Got {text}.")
        return value

    parse_number.__name__ = kind.__name__  # argparse names the type in its message.
    return parse_number


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add, count, share = parser.add_argument, number(int, 1), number(float, 0, 1)
    add("--flax", choices=BUILDERS, default="linen", help="the API of Flax")
    add("--precision", choices=LOSS_SCALES, default="float16", help="of matrix products and convolutions")
    add("--epochs", type=count, default=12, help="how often all training images are seen")
    add("--batch-size", type=number(int, 1, 1347), default=32, help="images in a micro-batch")
    add("--accumulate", type=count, default=2, help="micro-batches for one update")
    add("--learning-rate", type=number(float, 0), default=1e-2, help="the highest of the schedule")
    add("--clip-norm", type=number(float, 1e-9), default=1.0, help="largest norm of the accumulated gradient")
    add("--dropout", type=share, default=0.1, help="share of the features that dropout sets to zero")
    add("--ema-decay", type=share, default=0.95, help="share of the average that an update keeps")
    add("--seed", type=number(int, 0), default=0, help="of the first parameters, the order and dropout")
    add("--checkpoint", type=Path, metavar="FILE", help="to save to, and to go on from if it is there")
    add("--save-every", type=count, default=100, help="micro-batches between two checkpoints")
    add("--log-every", type=count, default=10, help="micro-batches between two entries for TensorBoard")
    add(
        "--tensorboard",
        type=Path,
        metavar="FOLDER",
        help="for the loss, the accuracy, the loss scale and skips",
    )
    options = parser.parse_args(arguments)
    if options.epochs * (1347 // options.batch_size) < options.accumulate:
        parser.error("the run has fewer micro-batches than --accumulate. Give more --epochs.")
    if options.tensorboard is not None and importlib.util.find_spec("tensorboardX") is None:
        parser.error("--tensorboard needs a package: pip install tensorboardX")
    return options


def main(arguments: list[str] | None = None) -> tuple[State, float]:
    options = parse(arguments)
    try:
        return train(options)
    except KeyboardInterrupt:
        sys.exit("\nStopped. With --checkpoint, the same command goes on from the last checkpoint.")
    except (FloatingPointError, OSError) as error:  # Too many skipped steps; a file.
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()

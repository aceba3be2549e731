"""A whole training program in one file, to copy into a project of your own: Flax Linen, any precision.

    python examples/complete_linen.py
    python examples/complete_linen.py --precision bfloat16
    python examples/complete_linen.py --checkpoint out/complete --tensorboard out/events

A small network with BatchNorm and dropout learns scikit-learn's scans of digits. Each batch is split over all
devices of this machine. The gradients of several micro-batches are accumulated and then clipped, the learning
rate follows a schedule, and biases and norms have no weight decay. A moving average (EMA) of the parameters
is evaluated after each epoch, in the precision of the training. With `--checkpoint` the best average is kept,
and a run that was stopped continues bit for bit: start it again with the same command.

The same code runs in float32, bfloat16 and float16. Comments that begin with "Precision:" mark the lines that
this takes; everything else is a float32 program. A micro-batch whose gradients hold inf or NaN is skipped: it
leaves the parameters, the optimizer, the batch statistics and the average as they were.

`complete_nnx.py` is the same program for Flax NNX. For several machines see `data_parallel.py`.
"""

import argparse
import contextlib
import functools
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jmp_lite as jmp

# 1. The model. It is written in float32 and knows nothing of precision.


class Net(nn.Module):
    dropout: float

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(32, (3, 3), use_bias=False, name="conv1")(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm1")(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.Conv(64, (3, 3), use_bias=False, name="conv2")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm2")(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x.mean((1, 2)))
        return nn.Dense(10, name="head")(x)


# 2. The data, on all devices of this machine.


def load_data() -> Any:
    """Returns 1,347 training and 450 validation images, `(n, 8, 8, 1)`, and then the labels of both."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32)
    return train_test_split(images, labels.astype(np.int32), test_size=450, random_state=0, stratify=labels)


def batches(
    x: np.ndarray, y: np.ndarray, options: argparse.Namespace, epoch: int, skip: int
) -> Iterator[Any]:
    """Yields the micro-batches of an epoch, from number `skip` on.

    Their order depends only on the seed and the epoch, so a resumed run continues with the next one.
    """
    order = np.random.default_rng((options.seed, epoch)).permutation(len(x))
    for begin in range(skip * options.batch_size, len(x) - options.batch_size + 1, options.batch_size):
        chosen = order[begin : begin + options.batch_size]
        yield x[chosen], y[chosen]


@functools.cache
def shardings() -> tuple[NamedSharding, NamedSharding]:
    """Returns the sharding of a batch, split over the devices, and of the state, copied to each of them."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, P("data")), NamedSharding(mesh, P())


# 3. The optimizer, the state and the train step.

# Precision: float16 needs a loss scale. bfloat16 has the range of float32 and needs none.
LOSS_SCALES: dict[str, jmp.LossScale] = {
    "float32": jmp.NoOpLossScale(),
    "bfloat16": jmp.NoOpLossScale(),
    "float16": jmp.DynamicLossScale(2.0**15),
}


def make_schedule(options: argparse.Namespace, updates: int) -> optax.Schedule:
    rate = options.learning_rate
    return optax.warmup_cosine_decay_schedule(0.1 * rate, rate, updates // 10, updates)


def make_optimizer(options: argparse.Namespace, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The clip is inside of `MultiSteps`, where it sees the accumulated gradient."""
    matrices = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # Neither biases nor norms.
    adamw = optax.adamw(schedule, weight_decay=options.weight_decay, mask=matrices)
    tx = optax.chain(optax.clip_by_global_norm(options.clip_norm), adamw)
    # Precision: holds and adapts the scale, and drops micro-batches with inf or NaN. It goes outermost.
    return jmp.with_loss_scale(optax.MultiSteps(tx, options.accumulate), LOSS_SCALES[options.precision])


class TrainState(train_state.TrainState):
    """All that training changes. `step` counts micro-batches, skipped ones included."""

    batch_stats: Any
    ema_params: Any


def create_state(options: argparse.Namespace, schedule: optax.Schedule) -> TrainState:
    net = Net(options.dropout)
    variables = net.init(jax.random.key(options.seed), jnp.zeros((1, 8, 8, 1)), train=False)
    state = TrainState.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=make_optimizer(options, schedule),
        batch_stats=variables["batch_stats"],
        # A copy: the train step donates the state, and no buffer can be donated twice.
        ema_params=jax.tree.map(jnp.copy, variables["params"]),
    )
    return jax.device_put(state.replace(step=jnp.int32(0)), shardings()[1])


def updates_done(state: TrainState) -> Any:
    """Returns how many updates `MultiSteps` has made: int32, shape ()."""
    return optax.tree.get(state.opt_state, "gradient_step")


def make_train_step(options: argparse.Namespace) -> Callable[..., tuple[TrainState, jax.Array]]:
    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
        key = jax.random.fold_in(jax.random.key(options.seed), state.step)

        # Precision: matmuls and convolutions in half. "float32" leaves the function as it is.
        @jmp.autocast(dtype=options.precision)
        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updated = state.apply_fn(
                variables, images, train=True, mutable=["batch_stats"], rngs={"dropout": key}
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            return loss, updated["batch_stats"]

        # Precision: in place of `jax.value_and_grad`. The loss and the gradients are unscaled, in float32.
        value_and_grad = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(state), has_aux=True)
        (loss, batch_stats), grads = value_and_grad(state.params)
        new_state = state.apply_gradients(grads=grads)

        # Precision: a skipped micro-batch leaves the optimizer as it was. State outside of it is selected.
        batch_stats = jmp.select_tree(jmp.grads_finite(new_state), batch_stats, state.batch_stats)
        # The average moves with an update, not with a micro-batch that is accumulated or skipped.
        average = optax.incremental_update(new_state.params, state.ema_params, 1 - options.ema_decay)
        updated = updates_done(new_state) > updates_done(state)
        ema_params = jmp.select_tree(updated, average, state.ema_params)
        return new_state.replace(batch_stats=batch_stats, ema_params=ema_params), loss

    return train_step


def make_evaluate(options: argparse.Namespace) -> Callable[..., float]:
    @jax.jit
    def count_right(state: TrainState, images: jax.Array, labels: jax.Array) -> jax.Array:
        # Precision: evaluation in half, from the float32 average.
        predict = jmp.autocast(functools.partial(state.apply_fn, train=False), options.precision)
        logits = predict({"params": state.ema_params, "batch_stats": state.batch_stats}, images)
        return jnp.sum(logits.argmax(-1) == labels)

    def evaluate(state: TrainState, images: np.ndarray, labels: np.ndarray) -> float:
        """Returns the accuracy of the average. The last batch is padded with label -1, which no image has."""
        right = 0
        for begin in range(0, len(images), options.batch_size):
            x, y = (array[begin : begin + options.batch_size] for array in (images, labels))
            missing = options.batch_size - len(x)
            x = np.pad(x, [(0, missing), (0, 0), (0, 0), (0, 0)])
            y = np.pad(y, (0, missing), constant_values=-1)
            right += int(count_right(state, *jax.device_put((x, y), shardings()[0])))
        return right / len(images)

    return evaluate


# 4. Checkpoints: `last`, from which a run continues, and `best`, the average with the highest accuracy.


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that a run must keep."""
    free = ("checkpoint", "save_every", "log_every", "tensorboard", "profile", "evaluate")
    return {name: value for name, value in vars(options).items() if name not in free}


class Checkpoints:
    """The two folders of checkpoints. Without `--checkpoint` nothing is saved."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.last, self.best = options, None, None
        if options.checkpoint is not None:
            folder = options.checkpoint.absolute()
            newest = ocp.CheckpointManagerOptions(max_to_keep=1)
            highest = ocp.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda metrics: metrics["accuracy"])
            self.last = ocp.CheckpointManager(folder / "last", options=newest)
            self.best = ocp.CheckpointManager(folder / "best", options=highest)

    def save(self, step: int, state: TrainState) -> None:
        """Copies the state to the host, and writes it in the background."""
        if self.last is not None:
            settings = ocp.args.JsonSave(settings_of(self.options))
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), settings=settings)
            self.last.save(step, args=args)

    def save_if_best(self, step: int, state: TrainState, accuracy: float) -> None:
        """Orbax keeps the checkpoint with the highest accuracy."""
        if self.best is not None:
            average = {"params": state.ema_params, "batch_stats": state.batch_stats}
            self.best.save(step, args=ocp.args.StandardSave(average), metrics={"accuracy": accuracy})

    def restore(self, state: TrainState) -> TrainState:
        """Returns the last state, or `state`, the start of the run, where there is none."""
        if self.last is None or (step := self.last.latest_step()) is None:
            return state
        saved = ocp.args.Composite(settings=ocp.args.JsonRestore(), state=ocp.args.StandardRestore(state))
        try:
            found = self.last.restore(step, args=ocp.args.Composite(settings=ocp.args.JsonRestore()))
            old, new = found["settings"], settings_of(self.options)
            changed = [f"{name} {old[name]}, now {new[name]}" for name in new if old[name] != new[name]]
            if not changed:
                print(f"Continues from micro-batch {step}.")
                return self.last.restore(step, args=saved)["state"]
        except (ValueError, TypeError, KeyError, OSError) as error:
            sys.exit(f"{self.options.checkpoint} holds no checkpoint of this program: {error}")
        # To continue with another precision or optimizer: jmp.migrate_state, docs/saving.md.
        sys.exit(f"{self.options.checkpoint} was written with other settings: {'; '.join(changed)}.")

    def restore_best(self, state: TrainState) -> TrainState:
        """Returns `state` with the best average and its batch statistics."""
        if self.best is None or (step := self.best.best_step()) is None:
            sys.exit("--evaluate needs --checkpoint with the folder of a run that was evaluated.")
        target = {"params": state.ema_params, "batch_stats": state.batch_stats}
        found = self.best.restore(step, args=ocp.args.StandardRestore(target))
        return state.replace(ema_params=found["params"], batch_stats=found["batch_stats"])

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        for manager in (self.last, self.best):
            if manager is not None:
                manager.close()


# 5. The run.


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
            "No loss scale can fix that. jmp_lite.diagnostics.find_nonfinite names the operation."
        )
    return float(of_taken.mean()) if of_taken.size else float("nan")


def train(options: argparse.Namespace, checkpoints: Checkpoints) -> tuple[TrainState, float]:
    """Returns the last state, and the accuracy of its average."""
    train_x, valid_x, train_y, valid_y = load_data()
    steps_an_epoch = len(train_x) // options.batch_size
    schedule = make_schedule(options, options.epochs * steps_an_epoch // options.accumulate)
    state = create_state(options, schedule)
    train_step, evaluate = make_train_step(options), make_evaluate(options)
    if options.evaluate:
        accuracy = evaluate(checkpoints.restore_best(state), valid_x, valid_y)
        print(f"best average: accuracy {accuracy:.1%} in {options.precision}")
        return state, accuracy
    state = checkpoints.restore(state)
    events, step = open_events(options.tensorboard), int(state.step)
    if events is not None:
        events.add_text("settings", str(settings_of(options)), step)
    trace_at = (step + 10, step + 15) if options.profile is not None else ()

    for epoch in range(step // steps_an_epoch, options.epochs):
        losses, taken, done, began, seconds = [], [], step % steps_an_epoch, 0.0, math.nan
        micro_batches = batches(train_x, train_y, options, epoch, done)
        bar = tqdm(
            micro_batches, f"epoch {epoch + 1}", steps_an_epoch, leave=False, initial=done, disable=None
        )
        for batch in bar:
            if trace_at and step == trace_at[0]:  # The steps before it may compile.
                jax.profiler.start_trace(str(options.profile))
            state, loss = train_step(state, *jax.device_put(batch, shardings()[0]))
            if not losses:  # The clock starts when the first step, which may compile, is done.
                jax.block_until_ready(loss)
                began = time.perf_counter()
            losses.append(loss)  # Not `float(loss)`, which would wait for the device.
            taken.append(jmp.grads_finite(state))
            step += 1
            if trace_at and step == trace_at[1]:
                jax.block_until_ready(loss)
                jax.profiler.stop_trace()
            if step % options.log_every == 0 and len(losses) > 1:
                now = float(loss)  # Waits.
                seconds = (time.perf_counter() - began) / (len(losses) - 1)
                bar.set_postfix_str(f"loss {now:.4f}, {speed(seconds, options)}", refresh=False)
                rate = schedule(updates_done(state))
                scalars = {"loss": now, "learning_rate": rate, "seconds_a_step": seconds}
                write(events, step, {**scalars, **jmp.get_metrics(state)})
            if step % options.save_every == 0:
                mean_loss(losses, taken)
                checkpoints.save(step, state)
        jmp.raise_if_stuck(state)
        mean, accuracy = mean_loss(losses, taken), evaluate(state, valid_x, valid_y)
        checkpoints.save_if_best(step, state, accuracy)
        checkpoints.save(step, state)
        write(events, step, {"accuracy": accuracy})
        metrics = jmp.get_metrics(state)
        print(
            f"epoch {epoch + 1:3}   loss {mean:.4f}   accuracy {accuracy:.1%}   loss scale "
            f"{metrics['loss_scale']:g}   skipped {metrics['skipped_steps']}   {speed(seconds, options)}"
        )
    if events is not None:
        events.close()
    return state, evaluate(state, valid_x, valid_y)


def speed(seconds: float, options: argparse.Namespace) -> str:
    if math.isnan(seconds):  # No step after the first one was timed.
        return ""
    return f"{1000 * seconds:.1f} ms/step, {options.batch_size / seconds:,.0f} images/s"


# 6. The command line.


def number(kind: type, accepts: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """Returns a type for argparse that takes the numbers that `accepts` says are right."""

    def parse_number(text: str) -> Any:
        value = kind(text)  # argparse turns a ValueError into a message.
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"should be {wanted}. Got {text}.")
        return value

    parse_number.__name__ = kind.__name__  # argparse names the type in its message.
    return parse_number


def parse(arguments: list[str] | None) -> argparse.Namespace:
    class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    count = number(int, lambda value: value >= 1, "1 or more")
    positive = number(float, lambda value: 0 < value < math.inf, "above 0 and finite")
    share = number(float, lambda value: 0 <= value < 1, "at least 0 and below 1")
    add = functools.partial(parser.add_argument, default=argparse.SUPPRESS)
    add("--precision", choices=LOSS_SCALES, default="float16", help="of matmuls and convolutions")
    add("--epochs", type=count, default=12, help="passes over the training images")
    add("--batch-size", type=count, default=32, help="images in a micro-batch, on all devices together")
    add("--accumulate", type=count, default=2, help="micro-batches in one update")
    add("--learning-rate", type=positive, default=1e-2, help="the highest of the schedule")
    add("--weight-decay", type=share, default=1e-4, help="of matrices and kernels")
    add("--clip-norm", type=positive, default=1.0, help="largest norm of the accumulated gradient")
    add("--dropout", type=share, default=0.1, help="share of the features that dropout sets to zero")
    add("--ema-decay", type=share, default=0.95, help="share of the average that an update keeps")
    seed = number(int, lambda value: value >= 0, "0 or more")
    add("--seed", type=seed, default=0, help="of the first parameters, the order and dropout")
    add("--checkpoint", type=Path, metavar="FOLDER", help="a folder to save to, and to continue from")
    add("--save-every", type=count, default=100, help="micro-batches between two checkpoints")
    add("--log-every", type=count, default=10, help="micro-batches between two looks at the loss")
    add(
        "--tensorboard", type=Path, metavar="FOLDER", help="a folder for the loss, the accuracy and the scale"
    )
    add("--profile", type=Path, metavar="FOLDER", help="a folder for a trace of five steps, for XProf")
    add("--evaluate", action="store_true", help="evaluate the best checkpoint, and do not train")
    absent = argparse.Namespace(checkpoint=None, tensorboard=None, profile=None, evaluate=False)
    options = parser.parse_args(arguments, absent)

    devices = jax.device_count()
    if options.batch_size > 1347 or options.batch_size % devices:
        parser.error(f"--batch-size should be at most 1347, and divisible among {devices} devices.")
    if options.epochs * (1347 // options.batch_size) < options.accumulate:
        parser.error("the run has fewer micro-batches than --accumulate. Give more --epochs.")
    if options.tensorboard is not None and importlib.util.find_spec("tensorboardX") is None:
        parser.error("--tensorboard needs a package: pip install tensorboardX")
    for folder in filter(None, (options.checkpoint, options.tensorboard, options.profile)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"cannot make the folder {folder}: {error.strerror}.")
    return options


def main(arguments: list[str] | None = None) -> tuple[TrainState, float]:
    options = parse(arguments)
    try:
        with contextlib.closing(Checkpoints(options)) as checkpoints:
            return train(options, checkpoints)
    except KeyboardInterrupt:
        sys.exit("\nStopped. With --checkpoint, the same command continues from the last checkpoint.")
    except (FloatingPointError, OSError) as error:  # Too many skipped steps; a file.
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()

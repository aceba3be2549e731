"""A small transformer on Python's own sources, in float32 and in float16, with checkpoints.

    python examples/language_model.py
    python examples/language_model.py --checkpoint out/language_model

A decoder-only transformer (Flax NNX) learns the standard library byte by byte, once in float32 and once in
float16 with a dynamic loss scale, from the same initialization and on the same batches. With `--checkpoint`
it saves as it goes; kill it, start it again, and it continues bit for bit, loss scale and counters
included. Takes about a minute on two CPU cores; `--size large` gives a GPU something to do.
"""

import argparse
import dataclasses
import functools
import sysconfig
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tensorboardX import SummaryWriter
from tqdm import tqdm

import jmp_lite as jmp
from jmp_lite.nnx import with_policy

# The scale doubles every 20 steps because these runs are short; over thousands of steps leave the
# default period of 2000.
ARMS = {
    "float32": (jmp.get_policy("float32"), jmp.NoOpLossScale()),
    "float16": (
        jmp.get_policy("params=float32,compute=float16,output=float32"),
        jmp.DynamicLossScale(2.0**15, period=20),
    ),
}


@dataclasses.dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int
    context: int
    batch: int


SIZES = {
    "small": Size(width=32, layers=1, heads=2, context=32, batch=8),
    "default": Size(width=128, layers=2, heads=4, context=64, batch=32),
    "large": Size(width=1024, layers=12, heads=16, context=512, batch=32),
}


class Attention(nnx.Module):
    """Causal self-attention. The matrix products run in the compute dtype, the softmax in float32.

    Written out: `nnx.MultiHeadAttention` calls `jax.nn.dot_product_attention`, which JAX (0.12) cannot
    compile in float16 for a CPU.
    """

    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.heads = size.heads
        self.project = nnx.Linear(size.width, 3 * size.width, rngs=rngs)
        self.merge = nnx.Linear(size.width, size.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        heads = self.project(x).reshape(batch, length, self.heads, -1)
        query, key, value = jnp.split(heads, 3, axis=-1)
        query = query * query.shape[-1] ** -0.5  # Before the product, which float16 could not hold.
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
        causal = jnp.tri(length, dtype=jnp.bool_)
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(value.dtype)
        return self.merge(jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, length, width))


class Block(nnx.Module):
    """Attention to what came before, then a small network for each position."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(size.width, rngs=rngs)
        self.attention = Attention(size, rngs)
        self.norm = nnx.LayerNorm(size.width, rngs=rngs)
        self.expand = nnx.Linear(size.width, 4 * size.width, rngs=rngs)
        self.contract = nnx.Linear(4 * size.width, size.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.contract(nnx.gelu(self.expand(self.norm(x))))


class LanguageModel(nnx.Module):
    """Bytes `(batch, length)` to logits of the next byte `(batch, length, 256)`."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.bytes = nnx.Embed(256, size.width, rngs=rngs)
        self.positions = nnx.Embed(size.context, size.width, rngs=rngs)
        self.blocks = nnx.List([Block(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, rngs=rngs)
        self.head = nnx.Linear(size.width, 256, use_bias=False, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        x = self.bytes(text) + self.positions(jnp.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: nnx.Module, text: jax.Array) -> jax.Array:
    logits = model(text[:, :-1])  # float32: the policy's output dtype.
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, text: jax.Array) -> jax.Array:
    loss_scale = jmp.get_loss_scale(optimizer)
    value_and_grad = jmp.value_and_grad(loss_fn, loss_scale, value_and_grad_fn=nnx.value_and_grad)
    loss, grads = value_and_grad(model, text)
    optimizer.update(model, grads)
    return loss


evaluate = nnx.jit(loss_fn)


def load_text(megabytes: float = 4.0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of the standard library's modules to learn from, and of every tenth file to test."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
    train = np.concatenate([text for i, text in enumerate(texts) if i % 10])
    return train[: int(megabytes * 2**20)], np.concatenate(texts[::10])


def get_batch(text: np.ndarray, size: Size, step: int) -> jax.Array:
    """Returns the batch of a step, `(batch, context + 1)`: it depends on the number alone, so a resumed
    run reads what the killed one would have read."""
    starts = np.random.default_rng(step).integers(0, len(text) - size.context - 1, size.batch)
    return jnp.asarray(text[starts[:, None] + np.arange(size.context + 1)], jnp.int32)


@dataclasses.dataclass
class Run:
    """The results of one arm."""

    model: Any
    bits_per_byte: float
    skipped_steps: int
    scale: float
    tokens_per_second: float


def train(arm: str, size: Size, options: argparse.Namespace, text: np.ndarray, test: np.ndarray) -> Run:
    policy, loss_scale = ARMS[arm]
    model = with_policy(LanguageModel(size, nnx.Rngs(0)), policy)
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, options.steps // 10, options.steps)
    tx = jmp.with_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), loss_scale)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    checkpoints, start = None, 0
    if options.checkpoint is not None:
        checkpoints = ocp.CheckpointManager(
            options.checkpoint.absolute() / arm,
            options=ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=options.save_every),
        )
        if (saved := checkpoints.latest_step()) is not None:
            state = nnx.state((model, optimizer))
            nnx.update((model, optimizer), checkpoints.restore(saved, args=ocp.args.StandardRestore(state)))
            start = saved
            print(f"{arm}: continues from step {start}.")

    events = None if options.tensorboard is None else SummaryWriter(str(options.tensorboard / arm))
    seconds = []
    progress = tqdm(range(start, options.steps), arm, options.steps, initial=start, unit="step", disable=None)
    for step in progress:
        began = time.perf_counter()
        loss = train_step(model, optimizer, get_batch(text, size, step))
        if step % 10 == 0:
            progress.set_postfix(bits_per_byte=f"{float(loss) / np.log(2):.2f}")
            jmp.raise_if_stuck(optimizer)
            if events is not None:
                for name, value in {"loss": loss, **jmp.get_metrics(optimizer)}.items():
                    events.add_scalar(name, float(value), step)
        jax.block_until_ready(loss)
        seconds.append(time.perf_counter() - began)
        if checkpoints is not None:
            state = ocp.args.StandardSave(nnx.state((model, optimizer)))
            checkpoints.save(step + 1, args=state, force=step + 1 == options.steps)
    if checkpoints is not None:
        checkpoints.close()  # Waits for the last one.
    if events is not None:
        events.close()

    held_out = [float(evaluate(model, get_batch(test, size, step))) for step in range(20)]
    return Run(
        model=model,
        bits_per_byte=float(np.mean(held_out) / np.log(2)),
        skipped_steps=int(jmp.get_metrics(optimizer)["skipped_steps"]),
        scale=float(jmp.get_loss_scale(optimizer).loss_scale),
        tokens_per_second=size.batch * size.context / min(seconds) if seconds else 0.0,
    )


def print_table(runs: dict[str, Run]) -> None:
    print(f"{'':10}{'bits per byte':>14}{'skipped':>9}{'final scale':>13}{'tokens/s':>11}{'x float32':>11}")
    for arm, run in runs.items():
        ratio = run.tokens_per_second / max(1.0, runs["float32"].tokens_per_second)
        print(
            f"{arm:10}{run.bits_per_byte:14.3f}{run.skipped_steps:9}{run.scale:13,.0f}"
            f"{run.tokens_per_second:11,.0f}{ratio:11.2f}"
        )
    print(
        "\nBits per byte of held-out files. Tokens a second: the fastest step, on "
        f"{jax.devices()[0].device_kind}.\nXLA computes float16 on a CPU by way of float32: only a GPU's "
        "Tensor Cores show the speed."
    )


@nnx.jit
def sample_byte(model: nnx.Module, text: jax.Array, key: jax.Array) -> jax.Array:
    return jax.random.categorical(key, model(text[None])[0, -1] / 0.7)


def write(model: nnx.Module, prompt: np.ndarray, length: int = 200) -> str:
    """Returns what the model writes after a prompt as long as its context.

    A dot stands for each character that a terminal would not print: the model may write any byte.
    """
    text, written = jnp.asarray(prompt, jnp.int32), bytearray()
    for i in range(length):
        byte = sample_byte(model, text, jax.random.key(i))
        text = jnp.append(text[1:], byte)
        written.append(int(byte))
    text_written = written.decode(errors="replace")
    return "".join(each if each.isprintable() or each in "\n\t" else "." for each in text_written)


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--size",
        choices=SIZES,
        default="default",
        help="of the network and the batches (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=300, help="steps of training of each arm (default: %(default)s)"
    )
    parser.add_argument("--checkpoint", type=Path, help="a folder to save to, and to continue from")
    parser.add_argument("--tensorboard", type=Path, help="a folder for the loss, the scale and skipped steps")
    parser.add_argument(
        "--save-every", type=int, default=100, help="steps between checkpoints (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if min(options.steps, options.save_every) < 1:
        parser.error("--steps and --save-every must be at least 1.")
    for folder in filter(None, (options.checkpoint, options.tensorboard)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"cannot make the folder {folder}: {error.strerror}.")

    size = SIZES[options.size]
    text, test = load_text()
    runs = {arm: train(arm, size, options, text, test) for arm in ARMS}
    print_table(runs)
    print("\nThe float16 model writes:\n" + write(runs["float16"].model, text[: size.context]))
    return runs


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Stopped.") from None

"""Autocast on a transformer: one line around the loss, beside a policy on the model and float32.

    python examples/autocast.py

The language model of `language_model.py` is trained on Python's own sources three times, from the same
initialization and on the same batches: in float32; in float16 with a policy on the model; and in float16 by
`jmp.autocast(loss_fn, jnp.float16)`, with the model and the loss unchanged. Both float16 runs scale their
loss. Then it prints what autocast did to every operation, by module. Takes about a minute on two
CPU cores; `--size large` gives a GPU something to do.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from language_model import SIZES, LanguageModel, Size, get_batch, load_text, loss_fn
from tqdm import tqdm

import jmp_lite as jmp
from jmp_lite.nnx import with_policy

Loss = Callable[[nnx.Module, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Arm:
    """How one run gets its precision: from a policy on the model, from the loss, or not at all."""

    policy: jmp.Policy | None
    loss_fn: Loss
    loss_scale: jmp.LossScale


# The scale doubles every 20 steps because these runs are short.
SCALED = jmp.DynamicLossScale(2.0**15, period=20)
ARMS = {
    "float32": Arm(None, loss_fn, jmp.NoOpLossScale()),
    "policy": Arm(jmp.get_policy("params=float32,compute=float16,output=float32"), loss_fn, SCALED),
    "autocast": Arm(None, jmp.autocast(loss_fn, jnp.float16), SCALED),
}


@functools.partial(nnx.jit, static_argnames="loss_fn", donate_argnames=("model", "optimizer"))
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, text: jax.Array, loss_fn: Loss) -> jax.Array:
    loss_scale = jmp.get_loss_scale(optimizer)
    value_and_grad = jmp.value_and_grad(loss_fn, loss_scale, value_and_grad_fn=nnx.value_and_grad)
    loss, grads = value_and_grad(model, text)
    optimizer.update(model, grads)
    return loss


@dataclasses.dataclass
class Run:
    """What is kept of one arm."""

    bits_per_byte: float
    skipped_steps: int
    tokens_per_second: float


def train(name: str, size: Size, steps: int, text: np.ndarray, test: np.ndarray) -> Run:
    arm = ARMS[name]
    model = LanguageModel(size, nnx.Rngs(0))
    if arm.policy is not None:
        model = with_policy(model, arm.policy)
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, steps // 10, steps)
    tx = jmp.with_loss_scale(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), arm.loss_scale
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    seconds = []
    for step in tqdm(range(steps), name, unit="step", disable=None):
        began = time.perf_counter()
        loss = train_step(model, optimizer, get_batch(text, size, step), loss_fn=arm.loss_fn)
        jax.block_until_ready(loss)
        seconds.append(time.perf_counter() - began)
    evaluate = nnx.jit(arm.loss_fn)
    held_out = [float(evaluate(model, get_batch(test, size, step))) for step in range(20)]
    return Run(
        bits_per_byte=float(np.mean(held_out) / np.log(2)),
        skipped_steps=int(jmp.get_metrics(optimizer)["skipped_steps"]),
        tokens_per_second=size.batch * size.context / min(seconds),
    )


def print_table(runs: dict[str, Run]) -> None:
    print(f"{'':10}{'bits per byte':>14}{'skipped':>9}{'tokens/s':>11}{'x float32':>11}")
    for name, run in runs.items():
        ratio = run.tokens_per_second / runs["float32"].tokens_per_second
        print(
            f"{name:10}{run.bits_per_byte:14.3f}{run.skipped_steps:9}{run.tokens_per_second:11,.0f}{ratio:11.2f}"
        )
    print(
        f"\nBits per byte of held-out files. Tokens a second: the fastest step, on "
        f"{jax.devices()[0].device_kind}.\nXLA computes float16 on a CPU by way of float32: only a GPU's "
        "Tensor Cores show the speed."
    )


def print_report(size: Size, text: np.ndarray) -> None:
    """What autocast does to the forward pass of a model of this size; nothing is computed."""
    model = LanguageModel(size, nnx.Rngs(0))
    print(f"\n{jmp.explain(ARMS['autocast'].loss_fn)(model, get_batch(text, size, 0))}")


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--size",
        choices=SIZES,
        default="default",
        help="of the network and the batches (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="steps of training of each arm (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps must be at least 1.")

    size = SIZES[options.size]
    text, test = load_text()
    runs = {name: train(name, size, options.steps, text, test) for name in ARMS}
    print_table(runs)
    print_report(size, text)
    return runs


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Stopped.") from None

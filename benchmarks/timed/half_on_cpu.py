"""What bfloat16 gains in a training step on a CPU: by hand, by policy, by autocast, and in PyTorch.

    taskset -c 0 python -m benchmarks.timed.half_on_cpu          # Two minutes.

Steps of AdamW of an MLP, a GPT and a CNN. The arms take turns, and their times are the CPU time of the
process. The table gives how many times as fast as XLA's float32 each arm is. PyTorch runs eagerly.
"""

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_lite as jmp
from benchmarks.arms.loss_scalers import SCALERS
from benchmarks.command import make_parser
from benchmarks.device import versions
from benchmarks.timed.interleaved import machine, milliseconds
from examples.models import gpt2, resnet
from examples.models.workload import Batch, Optimizer, Workload
from jmp_lite.linen import with_policy

BFLOAT16 = jmp.Policy(jnp.float32, jnp.bfloat16, jnp.float32)


class MLP(nn.Module):
    """Dense layers of one width with ReLU."""

    width: int
    layers: int = 3

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index in range(self.layers):
            x = nn.relu(nn.Dense(self.width, name=f"layers_{index}")(x))
        return nn.Dense(10, name="head")(x)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def mlp(width: int, batch_size: int) -> Workload:
    """An MLP on random vectors of its width."""

    def batch(rng: np.random.Generator, size: int) -> Batch:
        return (rng.normal(size=(size, width)).astype(np.float32),), rng.integers(0, 10, size)

    return Workload(MLP(width), _cross_entropy, Optimizer("adamw", 1e-3), batch_size, batch)


def gpt(width: int, length: int, batch_size: int) -> Workload:
    """A GPT-2 of two layers that reads random bytes."""
    model = gpt2.GPT2(vocabulary=256, length=length, width=width, layers=2, heads=max(1, width // 64))

    def batch(rng: np.random.Generator, size: int) -> Batch:
        tokens = rng.integers(0, 256, (size, length + 1)).astype(np.int32)
        return (tokens[:, :-1],), tokens[:, 1:]

    return Workload(model, gpt2.loss, Optimizer("adamw", 1e-3), batch_size, batch)


def cnn(features: int, batch_size: int) -> Workload:
    """A ResNet of two stages on scanned digits."""
    return dataclasses.replace(resnet.small(batch_size, features), optimizer=Optimizer("adamw", 1e-3))


WORKLOADS: dict[str, dict[str, Callable[[], Workload]]] = {
    "small": {"MLP": lambda: mlp(16, 4), "GPT": lambda: gpt(16, 8, 2), "CNN": lambda: cnn(4, 4)},
    "full": {"MLP": lambda: mlp(1024, 256), "GPT": lambda: gpt(256, 128, 8), "CNN": lambda: cnn(64, 64)},
}
JAX_ARMS = ("float32", "by hand", "policy", "autocast")
TORCH_ARMS = ("torch float32", "torch bfloat16") if importlib.util.find_spec("torch") else ()


def loss_of(arm: str, workload: Workload) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns the loss of an arm as a function of parameters, statistics and a batch."""
    model = with_policy(workload.model, BFLOAT16) if arm == "policy" else workload.model
    cast = (lambda tree: BFLOAT16.cast_to_compute(tree)) if arm == "by hand" else (lambda tree: tree)

    def loss(params: Any, statistics: Any, batch: Batch) -> tuple[jax.Array, Any]:
        inputs, targets = batch
        variables = {"params": cast(params), **statistics}
        outputs, new = model.apply(variables, *cast(inputs), mutable=list(statistics))
        return workload.loss(jmp.cast_to_full(outputs), targets), new

    return jmp.autocast(loss, jnp.bfloat16) if arm == "autocast" else loss


def jax_step(arm: str, workload: Workload) -> Callable[[], object]:
    """Returns a function that takes a training step and waits for it."""
    scaler, loss, batch = SCALERS["plain"](workload.optimizer()), loss_of(arm, workload), workload.batch(0)
    statistics = workload.init(0)
    params = statistics.pop("params")

    def step(params: Any, state: Any, statistics: Any) -> Any:
        return scaler.step(lambda params: loss(params, statistics, batch), params, state, statistics)[:3]

    step = jax.jit(step, donate_argnums=(0, 1, 2))
    carry = [params, scaler.init(params, 1.0), statistics]

    def take() -> None:
        carry[:] = step(*carry)
        jax.block_until_ready(carry)

    return take


def torch_step(arm: str, workload: Workload) -> Callable[[], object]:
    """Returns a function that takes the same step in PyTorch."""
    import torch  # Here, because it is an optional dependency.

    from benchmarks.arms import torch_models
    from benchmarks.arms.torch_arms import TorchArm

    class TorchMLP(torch.nn.Module):
        def __init__(self, model: Any, x: Any):
            super().__init__()
            sizes = [x.shape[-1]] + [model.width] * model.layers
            self.layers = torch.nn.ModuleList(torch.nn.Linear(n, m) for n, m in itertools.pairwise(sizes))
            self.head = torch.nn.Linear(model.width, 10)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return self.head(x)

    cross_entropy = lambda logits, labels: torch.nn.functional.cross_entropy(logits.float(), labels)
    torch_models.TWINS[MLP] = torch_models.Twin(TorchMLP, cross_entropy)
    torch.set_num_threads(1)
    made = TorchArm(arm, workload, workload.batch_size, quick=True, device="cpu")
    return lambda: made.step(made.forward)


def measure(workload: Workload, arms: Sequence[str], blocks: int, count: int) -> dict[str, float]:
    """Returns the milliseconds of a step of each arm."""
    steps = {arm: (jax_step if arm in JAX_ARMS else torch_step)(arm, workload) for arm in arms}
    return milliseconds(steps, blocks, count)


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=WORKLOADS, default="full")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="in a block")
    options = parser.parse_args(arguments)
    arms = (*JAX_ARMS, *TORCH_ARMS)
    print(f"{'':6}{'float32 ms':>12}" + "".join(f"{arm:>16}" for arm in arms[1:]))
    for name, make in WORKLOADS[options.size].items():
        times = measure(make(), arms, options.blocks, options.steps)
        gains = "".join(f"{times['float32'] / times[arm]:>16.2f}" for arm in arms[1:])
        print(f"{name:6}{times['float32']:>12.1f}{gains}", flush=True)
    named = ", ".join(
        f"{package} {versions()[package]}" for package in ("jax", "torch") if package in versions()
    )
    print(f"{machine()}; {named}")


if __name__ == "__main__":
    main()

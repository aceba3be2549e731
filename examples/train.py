"""One of the models of NVIDIA's table, on real data, in float32 and in half precision.

    python examples/train.py unet
    python examples/train.py gpt2-small --steps 300 --size full

The model (Flax Linen, `examples/models/`) is written in float32 and knows nothing of precision: a policy
brings the half precision in, the optimizer holds the loss scale. All arms start from the same values and see
the same batches. `small` is for a CPU, on data that comes with Python, scikit-learn and scikit-image; `full`
is as published, on random data, for a GPU.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from models import FAMILIES
from models.workload import Workload

import jmp_lite as jmp
from jmp_lite.linen import with_policy

ARMS: dict[str, tuple[jmp.Policy, jmp.LossScale]] = {
    "float32": (jmp.get_policy("float32"), jmp.NoOpLossScale()),
    "bfloat16": (jmp.get_policy("params=float32,compute=bfloat16,output=float32"), jmp.NoOpLossScale()),
    "float16": (
        jmp.get_policy("params=float32,compute=float16,output=float32"),
        jmp.DynamicLossScale(2.0**15),
    ),
}


def make_train_step(
    workload: Workload, policy: jmp.Policy, tx: optax.GradientTransformation
) -> Callable[..., Any]:
    """Returns a jitted step: of parameters, batch statistics, optimizer state and a batch, the first three
    anew and the loss. The buffers of the first three are given away."""
    model = with_policy(workload.model, policy)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def train_step(params: Any, statistics: Any, opt_state: Any, batch: Any) -> Any:
        inputs, targets = batch

        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, **statistics}
            outputs, new_statistics = model.apply(variables, *inputs, mutable=list(statistics))
            return workload.loss(outputs, targets), new_statistics

        loss_scale = jmp.get_loss_scale(opt_state)
        (loss, new_statistics), grads = jmp.value_and_grad(loss_fn, loss_scale, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        # A skipped step leaves the parameters as they were, and should leave the statistics so.
        new_statistics = jmp.select_tree(jmp.grads_finite(opt_state), new_statistics, statistics)
        return optax.apply_updates(params, updates), new_statistics, opt_state, loss

    return train_step


@dataclasses.dataclass
class Run:
    """What is kept of one arm.

    Attributes:
        losses: of each step, float32.
        skipped_steps: how many steps had gradients that were not finite.
        milliseconds: of the fastest step.
        opt_state: at the end.
    """

    losses: np.ndarray
    skipped_steps: int
    milliseconds: float
    opt_state: Any


def train(workload: Workload, arm: str, steps: int) -> Run:
    """Trains from the workload's initial values on batches 1, 2, ..."""
    policy, loss_scale = ARMS[arm]
    tx = jmp.with_loss_scale(workload.optimizer(), loss_scale)
    train_step = make_train_step(workload, policy, tx)
    statistics = workload.init(0)
    params = statistics.pop("params")
    opt_state = tx.init(params)
    losses, seconds = [], []
    for step in range(1, steps + 1):
        batch = workload.batch(step)
        began = time.perf_counter()
        params, statistics, opt_state, loss = train_step(params, statistics, opt_state, batch)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - began)
    return Run(
        np.array(losses, np.float32), int(jmp.skipped_steps(opt_state)), 1000 * min(seconds), opt_state
    )


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    """Trains a model in every arm and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--size", choices=["small", "full"], default="small")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args(arguments)

    workload = getattr(FAMILIES[options.family], options.size)()
    runs = {}
    print(f"{options.family:12}{'first loss':>12}{'last loss':>12}{'skipped':>9}{'ms a step':>11}")
    for arm in ARMS:
        run = runs[arm] = train(workload, arm, options.steps)
        few = max(1, options.steps // 10)
        print(
            f"{arm:12}{run.losses[:few].mean():12.4f}{run.losses[-few:].mean():12.4f}{run.skipped_steps:9}"
            f"{run.milliseconds:11.2f}"
        )
    print(
        f"\nMeans over the first and last tenth of {options.steps} steps, on {jax.devices()[0].device_kind}."
        "\nXLA computes float16 on a CPU by way of float32: only a GPU's Tensor Cores show the speed."
    )
    return runs


if __name__ == "__main__":
    main()

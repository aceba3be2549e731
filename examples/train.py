"""One of the models of NVIDIA's table, on real data, in float32 and in half precision.

    python examples/train.py unet
    python examples/train.py gpt2-small --steps 300 --size full

The model (Flax Linen, `examples/models/`) is written in float32. A policy adds the half precision, and the
optimizer holds the loss scale (`models/training.py`). All runs have the same initialization and the same
batches. `small` is for a CPU, on data that comes with Python, scikit-learn and scikit-image; `full` is as
published, on random data, for a GPU.
"""

import argparse
import dataclasses
import time

import jax
import numpy as np
from models import FAMILIES
from models.training import make_train_step
from models.workload import Workload

import jmp_lite as jmp

ARMS: dict[str, tuple[jmp.Policy, jmp.LossScale]] = {
    "float32": (jmp.get_policy("float32"), jmp.NoOpLossScale()),
    "bfloat16": (jmp.get_policy("params=float32,compute=bfloat16,output=float32"), jmp.NoOpLossScale()),
    "float16": (
        jmp.get_policy("params=float32,compute=float16,output=float32"),
        jmp.DynamicLossScale(2.0**15),
    ),
}


@dataclasses.dataclass
class Run:
    """What is kept of one arm.

    Attributes:
        losses: of each step, float32.
        skipped_steps: how many steps had gradients that were not finite.
        milliseconds: of the fastest step.
    """

    losses: np.ndarray
    skipped_steps: int
    milliseconds: float


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
        batch = jax.block_until_ready(jax.device_put(workload.batch(step)))
        began = time.perf_counter()
        # Else a GPU's float32 products are TF32.
        with jax.default_matmul_precision("highest" if arm == "float32" else None):
            params, statistics, opt_state, (loss, _) = train_step(params, statistics, opt_state, batch)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - began)
    skipped = int(jmp.get_metrics(opt_state)["skipped_steps"])
    return Run(np.array(losses, np.float32), skipped, 1000 * min(seconds))


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    """Trains a model in every arm and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("family", choices=FAMILIES, help="the model")
    parser.add_argument(
        "--size", choices=["small", "full"], default="small", help="of the model (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=150, help="steps of training of each arm (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps must be at least 1.")

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
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Stopped.") from None

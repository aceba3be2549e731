"""How well a model learns whose parameters and moments rest in fewer bytes, beside the spread of float32.

    python -m benchmarks.timed.memory                    # Half an hour of CPU time.
    python -m benchmarks.timed.memory --tasks digits --seeds 1 --json out/memory.json

Each arm of `benchmarks.arms.memory_arms` trains the network of `examples/digits.py` on real scans and the
language model of `examples/language_model.py` on Python's own sources. A seed has the same first parameters
and the same batches in every arm. Nothing is tuned for an arm.
"""

import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jmp_lite as jmp
from benchmarks.arms.memory_arms import ARMS, MemoryArm
from benchmarks.command import make_parser, write_json
from benchmarks.device import device_name, versions
from examples import digits, language_model
from jmp_lite.nnx import with_policy


def train_digits(
    arm: MemoryArm, seeds: int, epochs: int = 40, batch_size: int = 448
) -> list[dict[str, float]]:
    """Trains the network of the digits; returns the accuracy in percent and the loss of the test images."""
    train_x, test_x, train_y, test_y = digits.load_data()
    policy, model = jmp.get_policy(arm.policy), digits.PixelClassifier(digits.SIZES["default"][0])
    steps = len(train_x) // batch_size
    schedule = optax.cosine_decay_schedule(1e-2, epochs * steps)
    tx = arm.optimizer(optax.adamw(schedule), period=8)
    step, evaluate = digits.make_train_step(model, policy, tx), digits.make_evaluate(model, policy)
    runs = []
    for seed in range(seeds):
        variables = model.init(jax.random.key(seed), train_x[:1], train=False)
        params, stats = policy.cast_to_param(variables["params"]), variables["batch_stats"]
        opt_state, order = tx.init(params), np.random.default_rng(seed)
        for _ in range(epochs):
            for batch in order.permutation(len(train_x))[: steps * batch_size].reshape(steps, batch_size):
                params, stats, opt_state, _ = step(params, stats, opt_state, train_x[batch], train_y[batch])
        accuracy, loss = evaluate(params, stats, test_x, test_y)
        runs.append({"accuracy": round(100 * float(accuracy), 2), "loss": round(float(loss), 5)})
    return runs


def train_language_model(arm: MemoryArm, seeds: int, steps: int = 300) -> list[dict[str, float]]:
    """Trains the language model; returns the bits per byte of held-out files."""
    size = language_model.Size(width=64, layers=2, heads=2, context=64, batch=16)
    text, test = language_model.load_text()
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, steps // 10, steps)
    tx = arm.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), period=20)
    runs = []
    for seed in range(seeds):
        plain = language_model.LanguageModel(size, nnx.Rngs(seed))
        model: Any = with_policy(plain, jmp.get_policy(arm.policy))
        optimizer: Any = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for step in range(steps):
            batch = language_model.get_batch(text, size, 1_000_000 * seed + step)
            language_model.train_step(model, optimizer, batch)
        held_out = [
            language_model.evaluate(model, language_model.get_batch(test, size, step)) for step in range(40)
        ]
        runs.append({"bits_per_byte": round(float(jnp.mean(jnp.stack(held_out)) / np.log(2)), 4)})
    return runs


TASKS: dict[str, Callable[..., list[dict[str, float]]]] = {
    "digits": train_digits,
    "language model": train_language_model,
}


def main() -> None:
    """Trains the arms asked for and writes their results as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    path = pathlib.Path("benchmarks/results") / device_name() / "memory.json"
    parser.add_argument("--json", type=pathlib.Path, default=path)
    options = parser.parse_args()
    found: dict[str, Any] = {"versions": versions(), "seeds": options.seeds, "tasks": {}}
    if options.json.exists():  # The arms that are not asked for are kept, if they compare with the others.
        old = json.loads(options.json.read_text())
        found["tasks"] = old["tasks"] if {**old, "tasks": {}} == found else {}
    for task in options.tasks:
        arms = found["tasks"].setdefault(task, {})
        for arm in options.arms:
            began = time.process_time()
            arms[arm] = TASKS[task](ARMS[arm], options.seeds)
            print(
                f"{task}, {arm}: {arms[arm]}, {time.process_time() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            write_json(options.json, found)


if __name__ == "__main__":
    main()

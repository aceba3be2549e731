"""Half precision learns as float32 does: three models in four precisions, with the same starts and batches.

    python -m benchmarks.timed.convergence                   # 14 minutes of CPU time.
    python -m benchmarks.timed.convergence --size large      # For a GPU.
    python -m benchmarks.timed.convergence --draw-only       # Draws the table and the picture again.

float16 with a loss scale should lie within the spread of float32's seeds. This means: the run is cut into ten
equal parts. In each part the mean training loss of the arm, averaged over its seeds, lies between the lowest
and the highest float32 seed. The loss on held-out data lies between them as well. Nothing is added to the
spread. A seed has the same first parameters and the same batches in every arm.

float16 without a scale shows the purpose of the scale, as in Figure 1 of NVIDIA's guide to mixed precision
training. `language_model` explains it.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmp_lite as jmp
from benchmarks.command import make_parser, write_json
from benchmarks.device import device_name, versions
from benchmarks.timed.spread import draw, table
from examples.models import data, gpt2, resnet, unet
from examples.models.training import make_train_step
from examples.models.workload import Batch, Optimizer, Workload
from jmp_lite.linen import with_policy

# The scale may double every 50 steps because these runs are short; over thousands of steps leave the
# default period of 2000.
_HALF = "params=float32,compute={},output=float32"
ARMS = {
    "float32": (jmp.get_policy("float32"), jmp.NoOpLossScale()),
    "bfloat16": (jmp.get_policy(_HALF.format("bfloat16")), jmp.NoOpLossScale()),
    "float16, scaled": (jmp.get_policy(_HALF.format("float16")), jmp.DynamicLossScale(2.0**15, period=50)),
    "float16, unscaled": (jmp.get_policy(_HALF.format("float16")), jmp.NoOpLossScale()),
}
POINTS = 40  # The points of a curve in the JSON. Each is the mean of several steps.
HELD_OUT_BATCHES = 4
TRAIN, HELD_OUT = (0.0, 0.7), (0.7, 1.0)  # Parts of the data.


# The tasks.


@dataclasses.dataclass(frozen=True)
class Task:
    """A family at one size.

    Attributes:
        title: the model, and the number of values in the mean of its loss.
        train, held_out: the same workload on two disjoint parts of the data.
        steps: the number of steps.
    """

    title: str
    train: Workload
    held_out: Workload
    steps: int


def _task(title: str, make: Callable[..., Workload], steps: int, optimizer: Optimizer | None = None) -> Task:
    train, held_out = make(part=TRAIN), make(part=HELD_OUT)
    if optimizer is not None:
        train = dataclasses.replace(train, optimizer=optimizer)
    return Task(title, train, held_out, steps)


@functools.cache
def words(vocabulary: int) -> np.ndarray:
    """Returns the text of the standard library as words, spaces and signs, int32. 0 is the most frequent.

    Args:
        vocabulary: the number of different words. All rarer words get the last number.
    """
    text = data.source_text().tobytes().decode(errors="replace")
    found, indices, counts = np.unique(
        re.findall(r"\w+|\s+|[^\w\s]", text), return_inverse=True, return_counts=True
    )
    rank = np.empty(len(found), np.int32)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(found))
    return np.minimum(rank, vocabulary - 1)[indices]


def language_model(
    vocabulary: int, length: int, batch_size: int, width: int, layers: int, part: tuple[float, float]
) -> Workload:
    """A GPT-2 that reads the standard library word by word. It shows why float16 needs a loss scale.

    The loss is the mean over all tokens of a batch. So the gradient of the logit of a wrong word is the
    probability of the word, divided by the number of tokens. For 8,192 equally likely words and 8,192 tokens
    this is 1.5e-8, and float16 rounds it to zero. Then the logits of wrong words do not fall; only the logit
    of the right word rises. The loss stays above float32's from the first steps to the last. With GPT-2's own
    vocabulary and 8 x 1,024 tokens such gradients are six times smaller.

    Args:
        vocabulary: the number of different words.
        length, batch_size: the shape of a batch of tokens.
        width, layers: the size of the transformer. A head has 32 features.
        part: the part of the text, as two shares of its length.
    """
    model = gpt2.GPT2(vocabulary, length, width, layers, heads=width // 32)

    def batch(rng: np.random.Generator, size: int) -> Batch:
        text = words(vocabulary)
        first, last = (int(edge * len(text)) for edge in part)
        starts = rng.integers(first, last - length, size)
        tokens = text[starts[:, None] + np.arange(length + 1)]
        return (tokens[:, :-1],), tokens[:, 1:]

    return Workload(model, gpt2.loss, Optimizer("adamw", 3e-3), batch_size, batch)


def tasks(size: str) -> dict[str, Task]:
    """Returns the families at a size, `small` for two CPU cores or `large` for a GPU."""
    if size == "small":
        words_small = functools.partial(language_model, 8192, 32, 256, 32, 1)
        return {
            "gpt2": _task("GPT-2, a mean over 8,192 tokens", words_small, 40, Optimizer("adamw", 1e-2)),
            "unet": _task(
                "U-Net, a mean over 28,800 pixels",
                functools.partial(unet.small, tile=100),
                100,
                Optimizer("adam", 1e-3),
            ),
            "resnet": _task("ResNet, a mean over 64 images", resnet.small, 120),
        }
    words_large = functools.partial(language_model, 16384, 256, 64, 512, 6)
    unet_large = functools.partial(unet.small, tile=112, batch_size=64, features=64)
    resnet_large = functools.partial(resnet.small, batch_size=512, features=128)
    return {
        "gpt2": _task("GPT-2, a mean over 16,384 tokens", words_large, 1000, Optimizer("adamw", 1e-3)),
        "unet": _task("U-Net, a mean over 331,776 pixels", unet_large, 400, Optimizer("adam", 1e-3)),
        "resnet": _task("ResNet, a mean over 512 images", resnet_large, 400),
    }


# Training.


def make_step(workload: Workload, arm: str) -> tuple[Any, Any]:
    """Returns the optimizer of an arm and its train step."""
    policy, loss_scale = ARMS[arm]
    tx = jmp.with_loss_scale(workload.optimizer(), loss_scale)
    return tx, make_train_step(workload, policy, tx)


def make_evaluate(workload: Workload, arm: str) -> Any:
    """Returns a jitted function of parameters, other variables, inputs and targets. It gives the loss."""
    model = with_policy(workload.model, ARMS[arm][0])

    @jax.jit
    def evaluate(params: Any, state: Any, inputs: Any, targets: Any) -> jax.Array:
        settings: dict[str, Any] = {"train": False} if state else {}  # Models with batch statistics.
        return workload.loss(model.apply({"params": params, **state}, *inputs, **settings), targets)

    return evaluate


def share_lost(workload: Workload, params: Any, state: Any, batch: Batch) -> float:
    """Returns the share of the gradients of a model's outputs that float16 rounds to zero, 0 to 1."""
    inputs, targets = batch

    @jax.jit
    def lost(params: Any, state: Any, inputs: Any, targets: Any) -> jax.Array:
        outputs, _ = workload.model.apply({"params": params, **state}, *inputs, mutable=list(state))
        grads = jax.grad(workload.loss)(outputs, targets)
        return jnp.mean((grads != 0) & (jnp.abs(grads) <= 2.0**-25))

    return float(lost(params, state, inputs, targets))


def train_arm(task: Task, arm: str, starts: list[Any], steps: int) -> list[dict[str, Any]]:
    """Trains one arm from every seed; the step is compiled once.

    Args:
        task: the model, its data and its optimizer.
        arm: one of `ARMS`.
        starts: the initial variables of each seed, float32, as NumPy arrays: a step donates its buffers.
        steps: the number of steps.

    Returns:
        For each seed the entry of the JSON: curves of at most `POINTS` points, the number of skipped steps,
        and the loss on held-out data. For the first float32 seed also `share_lost` at the start and the end.
    """
    tx, train_step = make_step(task.train, arm)
    evaluate = make_evaluate(task.held_out, arm)
    runs = []
    for seed, start in enumerate(starts):
        began = time.perf_counter()
        measured = arm == "float32" and seed == 0
        state = jax.tree.map(jnp.array, dict(start))
        params = state.pop("params")
        opt_state = tx.init(params)
        first = task.train.batch(_batch_seed(seed, 0))
        lost = [share_lost(task.train, params, state, first)] if measured else []
        history = []
        for step in range(steps):
            batch = task.train.batch(_batch_seed(seed, step))
            params, state, opt_state, metrics = train_step(params, state, opt_state, batch)
            history.append(metrics)
        measured_steps = np.asarray(history, np.float64)
        lost += [share_lost(task.train, params, state, first)] if measured else []
        held_out = [evaluate(params, state, *task.held_out.batch(seed)) for seed in range(HELD_OUT_BATCHES)]
        run = {
            "seed": seed,
            "losses": _curve(measured_steps[:, 0], np.mean),
            "scales": _curve(measured_steps[:, 1], lambda part: part[-1]),
            "skipped_steps": int(jmp.get_metrics(opt_state)["skipped_steps"]),
            "held_out_loss": _number(np.mean(held_out)),
        }
        runs.append(run | ({"share_lost": lost} if lost else {}))
        print(f"{arm}, seed {seed}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return runs


def _batch_seed(seed: int, step: int) -> int:
    return 1_000_000 * (seed + 1) + step


def _curve(values: np.ndarray, point: Callable[[np.ndarray], Any]) -> list[float | None]:
    return [_number(point(part)) for part in np.array_split(values, min(POINTS, len(values)))]


def _number(value: Any) -> float | None:
    """Rounds to six digits. Returns None for NaN and inf, which JSON does not have."""
    return float(f"{value:.6g}") if np.isfinite(value) else None


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Trains the families asked for, writes the JSON, prints the tables and draws the picture."""
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=("small", "large"), default="small")
    parser.add_argument("--families", nargs="+", choices=tasks("small"), default=list(tasks("small")))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="with --json: add them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of each family's own number")
    parser.add_argument("--json", type=pathlib.Path, help="of a whole run, benchmarks/results/<device>/")
    parser.add_argument("--output", type=pathlib.Path, help="of a whole run on a CPU, docs/convergence.png")
    parser.add_argument("--draw-only", action="store_true", help="nothing is trained")
    options = parser.parse_args(arguments)
    whole = (options.families, options.arms, options.seeds, options.steps) == (
        list(tasks("small")),
        list(ARMS),
        3,
        None,
    )
    folder = f"benchmarks/results/{device_name()}" if whole or options.draw_only else "out"
    name = "convergence.json" if options.size == "small" else f"convergence-{options.size}.json"
    path = options.json or pathlib.Path(folder) / name
    found = json.loads(path.read_text()) if options.draw_only else _train(options, path)
    if any("float32" not in family["arms"] for family in found["families"].values()):
        print(f"Wrote {path}. There is nothing to compare without the arm float32.")
        return found
    print("\n\n".join(table(family) for family in found["families"].values()))
    print(
        f"\nThe mean (lowest-highest) of {found['seeds']} seeds; training loss: of the run's last tenth.\n"
        "Within float32: in how many tenths of the run, and whether on held-out data, the mean of the seeds\n"
        f"lies between the lowest and the highest of float32. {found['device']}, {found['date']}, "
        f"jax {found['versions']['jax']}, {found['seconds']:.0f} s."
    )
    kept = folder == "benchmarks/results/cpu" and path.parts[-1] == "convergence.json" and not options.json
    output = options.output or pathlib.Path("docs" if kept else "out") / "convergence.png"
    draw(found, output)
    print(f"Wrote {output} from {path}.")
    return found


def _train(options: argparse.Namespace, path: pathlib.Path) -> dict[str, Any]:
    began = time.perf_counter()
    found: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "size": options.size,
        "seeds": options.seeds,
        "families": {},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.arms != list(ARMS) and path.exists():  # The other arms were trained before.
        earlier = json.loads(path.read_text())
        found["families"] = earlier["families"]
        began -= earlier["seconds"]
    for name in options.families:
        task = tasks(options.size)[name]
        steps = options.steps or task.steps
        print(task.title, file=sys.stderr)
        starts = [jax.device_get(task.train.init(seed)) for seed in range(options.seeds)]
        arms = found["families"].get(name, {}).get("arms", {})
        for arm in options.arms:
            # Without this, the float32 products of a GPU are TF32.
            with jax.default_matmul_precision("highest" if arm == "float32" else None):
                arms[arm] = train_arm(task, arm, starts, steps)
        arms = {arm: arms[arm] for arm in ARMS if arm in arms}
        found["families"][name] = {"title": task.title, "steps": steps, "arms": arms}
        found["seconds"] = round(time.perf_counter() - began)
        write_json(path, found)
    return found


if __name__ == "__main__":
    main()

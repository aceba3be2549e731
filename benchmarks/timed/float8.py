"""fp8 learns as bfloat16 does: a GPT of 10.8 million parameters in three precisions.

    python -m benchmarks.timed.float8
    python -m benchmarks.timed.float8 --table      # Prints the table of an earlier run.

The model reads the standard library byte by byte. A seed has the same first parameters and the same batches
in every arm. By itself autocast leaves products of this size in bfloat16, because fp8 would not make them
faster. Here a rule asks for fp8 in all of them. The products of attention have batch axes: they stay in
bfloat16.

A CPU has no fp8 arithmetic. It computes the same numbers with conversions, so nothing is timed here.
"""

import argparse
import dataclasses
import datetime
import functools
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

import jmp_lite as jmp
from benchmarks.command import make_parser, write_json
from benchmarks.device import device_name, versions
from examples.models import data, gpt2
from jmp_lite._float8.quantize import BACKWARD, FORWARD
from jmp_lite._jaxpr.bind import bind
from jmp_lite._jaxpr.read import Array, Equation, Jaxpr, constants
from jmp_lite._jaxpr.replay import replay

ARMS: dict[str, Callable[..., Any]] = {
    "float32": lambda fun: fun,
    "bfloat16": functools.partial(jmp.autocast, dtype="bfloat16"),
    "float8": functools.partial(jmp.autocast, dtype="float8", rules={"**": "float8"}),
}
PARTS = 10  # The points of a curve. Each is the mean of a tenth of the steps.
HELD_OUT_BATCHES = 32
TRAIN, HELD_OUT = (0.0, 0.7), (0.7, 1.0)  # Parts of the text.


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a run.

    Attributes:
        width, layers: the size of the transformer. A head has 64 features.
        length, batch_size: the shape of a batch of bytes.
        steps: the number of steps.
        learning_rate: the largest one. It rises for a tenth of the steps, and falls to zero by a cosine.
    """

    width: int = 384
    layers: int = 6
    length: int = 128
    batch_size: int = 4
    steps: int = 250
    learning_rate: float = 1e-3

    @property
    def model(self) -> gpt2.GPT2:
        """The model, in float32."""
        return gpt2.GPT2(256, self.length, self.width, self.layers, max(1, self.width // 64))

    def optimizer(self) -> optax.GradientTransformation:
        """Returns AdamW, which leaves out a step with inf or NaN."""
        rate = optax.warmup_cosine_decay_schedule(0, self.learning_rate, self.steps // 10, self.steps)
        return jmp.with_loss_scale(optax.adamw(rate), jmp.NoOpLossScale())

    def batch(self, part: tuple[float, float], seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns bytes and the bytes after them, int32, from a part of the text."""
        text = data.source_text()
        first, last = (int(edge * len(text)) for edge in part)
        starts = np.random.default_rng(seed).integers(first, last - self.length, self.batch_size)
        tokens = text[starts[:, None] + np.arange(self.length + 1)].astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]


def flushed(fun: Callable[..., Any]) -> Callable[..., dict[str, float]]:
    """Returns a function that runs `fun`, and gives the share of the values that fp8 flushes to zero.

    Args:
        fun: a function under autocast to fp8, or its gradient.

    Returns:
        A function of the same arguments. It looks at all values that are cast to an fp8 dtype. For each of
        these dtypes it returns the share, 0 to 1, that is not zero before the cast and zero after it.
    """

    @jax.jit
    def counts(*args: Any) -> dict[str, tuple[Array, int]]:
        found: dict[str, tuple[Any, int]] = {}

        def run(jaxpr: Jaxpr, values: Any) -> list[Array]:
            return replay(jaxpr, [*constants(jaxpr), *values], lambda var: var.val, action)

        def action(index: int, equation: Equation, read: Callable[[Any], Array]) -> list[Array]:
            del index
            operands = [read(var) for var in equation.invars]
            if equation.primitive.name in ("jit", "pjit"):
                return run(equation.params["jaxpr"], operands)
            results = bind(equation, operands)
            dtype = equation.params.get("new_dtype")
            if equation.primitive.name == "convert_element_type" and dtype in (FORWARD, BACKWARD):
                (before,), (after,) = operands, results
                lost, total = found.get(dtype.name, (0, 0))
                lost += jnp.sum((before != 0) & (after.astype(before.dtype) == 0))
                found[dtype.name] = lost, total + before.size
            return results

        run(jax.make_jaxpr(fun)(*args), jax.tree.leaves(args))
        return found

    def shares(*args: Any) -> dict[str, float]:
        return {name: float(lost / total) for name, (lost, total) in jax.device_get(counts(*args)).items()}

    return shares


def products(fun: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Returns how many products of a function run in each precision."""
    found = [operation for operation in jmp.explain(fun)(*args).operations if operation.is_product]
    fp8 = sum(operation.in_fp8 for operation in found)
    half = sum(operation.in_half for operation in found) - fp8
    return {"float8": fp8, "bfloat16": half, "float32": len(found) - fp8 - half}


def make_train(arm: str, size: Size) -> Callable[[int, Any], dict[str, Any]]:
    """Returns a function that trains one arm. It compiles the step once for all seeds.

    Args:
        arm: one of `ARMS`.
        size: the size of the run.

    Returns:
        A function of a seed and of its first parameters. It returns the curve of the training loss, the loss
        on held-out text, the number of skipped steps, and how many products of the forward pass run in each
        precision. Losses are in nats a byte. In fp8 also the share of the values that the casts flush to zero
        at the start and at the end, 0 to 1.
    """
    model, tx = size.model, size.optimizer()

    def plain(params: Any, tokens: Any, targets: Any) -> jax.Array:
        return gpt2.loss(model.apply({"params": params}, tokens), targets)  # type: ignore[arg-type]

    loss_fn = ARMS[arm](plain)
    evaluate, shares = jax.jit(loss_fn), flushed(jax.grad(loss_fn))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def train(seed: int, start: Any) -> dict[str, Any]:
        params = jax.tree.map(jnp.array, start)  # A copy: a step donates its buffers.
        opt_state = tx.init(params)
        batches = [size.batch(TRAIN, 1_000_000 * (seed + 1) + step) for step in range(size.steps)]
        run: dict[str, Any] = {}
        if arm != "float32":
            run["products"] = products(loss_fn, params, *batches[0])
        if arm == "float8":
            run["flushed"] = [shares(params, *batches[0])]
        losses = []
        for batch in batches:
            params, opt_state, loss = train_step(params, opt_state, batch)
            losses.append(loss)
        if arm == "float8":
            run["flushed"].append(shares(params, *batches[0]))
        held_out = [evaluate(params, *size.batch(HELD_OUT, index)) for index in range(HELD_OUT_BATCHES)]
        parts = np.array_split(np.asarray(losses, np.float64), min(PARTS, size.steps))
        return {
            "losses": [round(float(part.mean()), 5) for part in parts],
            "held_out_loss": round(float(np.mean(held_out)), 5),
            "skipped_steps": int(jmp.get_metrics(opt_state)["skipped_steps"]),
            **run,
        }

    return train


def tables(found: dict[str, Any]) -> str:
    """Returns the tables of docs/accuracy.md: held-out losses, and what fp8 flushes to zero."""
    held_out = {arm: np.array([run["held_out_loss"] for run in runs]) for arm, runs in found["arms"].items()}
    differences = (("bfloat16", "float32"), ("float8", "float32"), ("float8", "bfloat16"))
    seeds = [f"seed {seed}" for seed in range(len(held_out["float32"]))]
    lines = [_row("held-out loss", *seeds, "mean"), _row(*["---"] * (len(seeds) + 2))]
    for arm, losses in held_out.items():
        lines.append(_row(arm, *(f"{loss:.4f}" for loss in (*losses, losses.mean()))))
    for arm, other in differences:
        losses = held_out[arm] - held_out[other]
        lines.append(_row(f"{arm} - {other}", *(f"{loss:+.4f}" for loss in (*losses, losses.mean()))))
    runs = found["arms"]["float8"]
    lines += ["", _row("flushed to zero", "at the start", "at the end"), _row("---", "---", "---")]
    for dtype, values in ((FORWARD, "activations and weights"), (BACKWARD, "cotangents")):
        shares = [[run["flushed"][moment][dtype.name] for run in runs] for moment in (0, 1)]
        lines.append(_row(f"{values}, {dtype.name}", *(f"{max(share):.4%}" for share in shares)))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: list[str] | None = None, size: Size | None = None) -> dict[str, Any]:
    """Trains all arms from each seed, writes the JSON after each run, and prints the tables.

    Args:
        arguments: those of the command line.
        size: another size than that of the documentation.
    """
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="nothing is trained")
    path = pathlib.Path("benchmarks/results") / device_name() / "float8.json"
    parser.add_argument("--json", type=pathlib.Path, default=path)
    options = parser.parse_args(arguments)
    found = json.loads(options.json.read_text()) if options.table else _train(options, size or Size())
    print(tables(found))
    return found


def _train(options: argparse.Namespace, size: Size) -> dict[str, Any]:
    init = jax.jit(size.model.init)
    starts = [
        jax.device_get(init(jax.random.key(seed), size.batch(TRAIN, 0)[0])["params"])
        for seed in range(options.seeds)
    ]
    found: dict[str, Any] = {
        "device": device_name(),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "size": dataclasses.asdict(size),
        "parameters": sum(x.size for x in jax.tree.leaves(starts[0])),
        "arms": {arm: [] for arm in ARMS},
    }
    trains = {arm: make_train(arm, size) for arm in ARMS}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for seed, start in enumerate(starts):
        for arm, train in trains.items():
            began = time.process_time()
            run = train(seed, start)
            found["arms"][arm].append(run)
            found["cpu_seconds"] = round(time.process_time())
            write_json(options.json, found)
            seconds = time.process_time() - began
            print(f"{arm}, seed {seed}: {run}, {seconds:.0f} s", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()

"""Exports a trained model in half precision, and runs it in a process that has only JAX.

    python examples/export.py

Trains the small ResNet of `models/resnet.py` on scanned digits in float16, and casts its parameters to
float16; a parameter that float16 cannot hold is an error. Then exports the model with its parameters, in
float32 and in float16, for any batch size, for a CPU and for a CUDA machine (`jax.export`). A fresh process
that can import neither Flax nor jmp_lite loads both files and classifies held-out scans. docs/export.md
explains it. Takes about a minute on two CPU cores.
"""

import argparse
import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from models import resnet
from models.training import make_train_step

import jmp_lite as jmp
from jmp_lite.linen import with_policy

FLOAT32 = jmp.get_policy("float32")
HALF = jmp.get_policy("params=float16,compute=float16,output=float32")  # Float32 logits.
PLATFORMS = ("cpu", "cuda")
# Runs a script as `python` does, in a process where these packages cannot be imported.
ONLY_JAX = """
import runpy, sys
sys.modules.update(dict.fromkeys(["flax", "jmp_lite", "optax", "orbax"]))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def train(steps: int) -> Any:
    """Trains on 80 % of the scans in float16. Returns float32 `params` and `batch_stats`."""
    workload = resnet.small(part=(0.0, 0.8))
    tx = jmp.with_loss_scale(workload.optimizer(), jmp.DynamicLossScale(2.0**15))
    train_step = make_train_step(
        workload, jmp.get_policy("params=float32,compute=float16,output=float32"), tx
    )
    statistics = workload.init(0)
    params = statistics.pop("params")
    opt_state = tx.init(params)
    for step in range(1, steps + 1):
        batch = workload.batch(step)
        params, statistics, opt_state, _ = train_step(params, statistics, opt_state, batch)
    return {"params": params, **statistics}


def make_predict(variables: Any, policy: jmp.Policy) -> Callable[[jax.Array], Any]:
    """Returns the whole model under a policy: scans `(batch, 8, 8, 1)` to float32 logits `(batch, 10)`."""
    model = with_policy(resnet.small().model, policy)
    held = {**variables, "params": jmp.cast_params(variables["params"], policy)}
    return lambda images: model.apply(held, images, train=False)


def export_predict(predict: Callable[[jax.Array], Any]) -> export.Exported:
    """Exports a model, with its parameters, for any batch size."""
    (batch,) = export.symbolic_shape("batch")
    images = jax.ShapeDtypeStruct((batch, 8, 8, 1), jnp.float32)
    return export.export(jax.jit(predict), platforms=PLATFORMS)(images)


def export_step(step: Callable[..., Any], state: tuple[Any, ...], batch: Any) -> export.Exported:
    """Exports a train step as a function of arrays, so that its reader needs none of our classes.

    Args:
        step: takes the parts of the state and a batch. It returns the new parts, and then the metrics.
        state: parameters, statistics, optimizer state with the loss scale, ...
        batch: a pytree of arrays.

    Returns:
        A function of the list of the leaves of the state, and of the list of the leaves of the batch. It
        returns the new leaves of the state and the leaves of the metrics.
    """
    state_leaves, state_tree = jax.tree.flatten(state)
    batch_leaves, batch_tree = jax.tree.flatten(batch)

    def flat(state_leaves: list[jax.Array], batch_leaves: list[jax.Array]) -> Any:
        *new, metrics = step(*state_tree.unflatten(state_leaves), batch_tree.unflatten(batch_leaves))
        return jax.tree.leaves(new), jax.tree.leaves(metrics)

    return export.export(jax.jit(flat), platforms=PLATFORMS)(state_leaves, batch_leaves)


def run_elsewhere(program: Path, *arrays: Any) -> list[np.ndarray]:
    """Runs an exported program in a fresh process that can import neither Flax nor jmp_lite."""
    inputs, outputs = program.with_suffix(".inputs.npz"), program.with_suffix(".outputs.npz")
    np.savez(inputs, *map(np.asarray, arrays))
    runner = Path(__file__).parent / "run_exported.py"
    subprocess.run([sys.executable, "-c", ONLY_JAX, runner, program, inputs, outputs], check=True)
    return list(np.load(outputs).values())


def product_dtypes(exported: export.Exported) -> dict[str, int]:
    """Counts the products of an exported program by the dtypes of their operands and results."""
    product = (
        r"stablehlo\.(?:dot_general|convolution)\b.*: \(tensor<(?:\S+x)?(\w+)>, tensor<(?:\S+x)?(\w+)>\)"
    )
    found: dict[str, int] = {}
    for dtypes in re.findall(product + r" -> tensor<(?:\S+x)?(\w+)>", exported.mlir_module()):
        name = " ".join(dict.fromkeys(dtypes))
        found[name] = found.get(name, 0) + 1
    return found


@dataclasses.dataclass
class Result:
    """What the fresh process says of one file.

    Attributes:
        size: bytes of the file.
        products: how many products there are, by dtypes.
        logits: of the held-out scans, `(scans, 10)`, float32.
        accuracy: the share of the scans that are classified right.
    """

    size: int
    products: dict[str, int]
    logits: np.ndarray
    accuracy: float


def main(arguments: list[str] | None = None) -> dict[str, Result]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps of training (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("out/export"), help="a folder (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps must be at least 1.")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output: cannot make the folder {options.output}: {error.strerror}.")

    variables = train(options.steps)
    (images,), labels = resnet.small(part=(0.8, 1.0)).batch(0, 512)
    results: dict[str, Result] = {}
    print(
        f"{'parameters':12}{'bytes':>9}  {'products':12}{'accuracy':>9}{'largest difference of a logit':>31}"
    )
    for name, policy in {"float32": FLOAT32, "float16": HALF}.items():
        exported = export_predict(make_predict(variables, policy))
        program = options.output / f"digits-{name}.bin"
        program.write_bytes(exported.serialize())
        (logits,) = run_elsewhere(program, images)
        found = Result(
            size=program.stat().st_size,
            products=product_dtypes(exported),
            logits=logits,
            accuracy=float(np.mean(logits.argmax(-1) == labels)),
        )
        results[name] = found
        products = ", ".join(f"{count} {dtypes}" for dtypes, count in found.products.items())
        difference = np.abs(logits - results["float32"].logits).max()
        print(f"{name:12}{found.size:9,}  {products:12}{found.accuracy:9.1%}{difference:31.4f}")
    print(f"\nRead by a process without Flax and jmp_lite. {len(labels)} held-out scans. The files are for")
    print(f"{' and '.join(PLATFORMS)}, with each product once for each of them, and for any batch size.")
    print(f"The largest float32 logit is {np.abs(results['float32'].logits).max():.1f}.")
    return results


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Stopped.") from None

"""What a dynamic loss scale costs in the program for an H100, beside the peers.

    python -m benchmarks.compiled.loss_scale_cost        # All cases, about five minutes on two cores.
    python -m benchmarks.compiled.loss_scale_cost --case adamw --json out/cost.json

Each case is a training step with donated state: the optimizer alone, fed with scaled gradients, or a whole
GPT step in float16. `plain` has no loss scale. Nothing is run: the figures are those of the compiled program,
from `jmp_lite.programs.read_program`.
"""

import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.arms.loss_scalers import SCALE, SCALERS, Scaler, step_of, with_gradients
from benchmarks.command import make_parser, write_json
from benchmarks.compiled.gpt import gpt, gpt_loss
from benchmarks.compiled.h100 import compile_for_gpu
from benchmarks.device import versions
from jmp_lite.programs import read_program


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of one compiled step.

    Attributes:
        arm: the name of the loss scale, from `SCALERS`.
        parameters: the number of parameters.
        bytes_moved, kernels, temporary_bytes, aliased_bytes, conditionals, host_syncs: as in `Program`.
        state_bytes: the bytes of parameters and optimizer state. All of them should be aliased.
        compile_seconds: on this machine. Compare them only within one run.
    """

    arm: str
    parameters: int
    bytes_moved: int
    kernels: int
    temporary_bytes: int
    aliased_bytes: int
    state_bytes: int
    conditionals: int
    host_syncs: int
    compile_seconds: float

    @property
    def bytes_a_parameter(self) -> float:
        """Bytes read and written for each parameter."""
        return self.bytes_moved / self.parameters


# The cases.


def many_leaves(width: int = 1024) -> Any:
    """124 leaves: 62 layers of `width` x 768 with a bias, by default 48.8 million parameters."""
    return {f"layer_{i}": {"kernel": _shape(width, 768), "bias": _shape(768)} for i in range(62)}


def small_leaves() -> Any:
    """1,000 leaves of 64 to 8,192 parameters."""
    shapes = [(64,), (128, 64), (64, 64), (3, 3, 16, 32)]
    return {f"leaf_{i}": _shape(*shapes[i % 4]) for i in range(1000)}


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def optimizer_case(arm: str, tx: Any, params: Any, grads_dtype: Any, clip_norm: float | None = None) -> Row:
    """Compiles the optimizer alone, which reads gradients of `grads_dtype` and may clip them."""
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, grads_dtype), params)
    return measure(arm, SCALERS[arm](tx, clip_norm), with_gradients, params, grads)


def gpt_case(arm: str, dtype: Any = jnp.float16, batch: int = 8, length: int = 1024, **sizes: int) -> Row:
    """Compiles a whole training step of a GPT under a policy."""
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    model = gpt(length=length, **sizes)
    loss = gpt_loss(model, "policy", dtype)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return measure(arm, SCALERS[arm](optax.adamw(3e-4)), loss, params, tokens)


def measure(arm: str, scaler: Scaler, loss: Callable[..., jax.Array], params: Any, batch: Any) -> Row:
    """Compiles a step that donates its parameters and state, and reads the program."""
    step = step_of(scaler, loss)
    state = jax.eval_shape(lambda params: scaler.init(params, SCALE), params)
    began = time.process_time()
    compiled = compile_for_gpu(step, params, state, batch, donate_argnums=(0, 1))
    seconds = time.process_time() - began
    program = read_program(compiled)
    size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    return Row(
        arm=arm,
        parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(params)),
        bytes_moved=program.bytes_moved,
        kernels=program.kernels,
        temporary_bytes=program.temporary_bytes,
        aliased_bytes=program.aliased_bytes,
        state_bytes=size((params, state)),
        conditionals=program.conditionals,
        host_syncs=len(program.host_syncs),
        compile_seconds=round(seconds, 1),
    )


CASES: dict[str, tuple[str, Callable[[str], Row]]] = {
    "adamw": (
        "AdamW, 48.8M parameters in 124 leaves, float16 gradients",
        lambda arm: optimizer_case(arm, optax.adamw(3e-4), many_leaves(), jnp.float16),
    ),
    "adamw-f32": (
        "AdamW, the same, float32 gradients",
        lambda arm: optimizer_case(arm, optax.adamw(3e-4), many_leaves(), jnp.float32),
    ),
    "clip": (
        "AdamW behind a clip by global norm, the same, float16 gradients",
        lambda arm: optimizer_case(arm, optax.adamw(3e-4), many_leaves(), jnp.float16, clip_norm=1.0),
    ),
    "sgd": (
        "SGD with momentum, the same, float16 gradients",
        lambda arm: optimizer_case(arm, optax.sgd(0.1, momentum=0.9), many_leaves(), jnp.float16),
    ),
    "small": (
        "AdamW, 1,000 leaves, 4.3M parameters, float16 gradients",
        lambda arm: optimizer_case(arm, optax.adamw(3e-4), small_leaves(), jnp.float16),
    ),
    "gpt": ("A GPT of GPT-2 small's sizes, batch 8 x 1024, float16, AdamW", gpt_case),
    "gpt-bf16": (
        "The same in bfloat16, which needs no scale",
        functools.partial(gpt_case, dtype=jnp.bfloat16),
    ),
}


def table(title: str, rows: list[Row]) -> str:
    """Returns the table of one case as text."""
    names = ("bytes/param", "kernels", "temp MB", "in place", "cond", "syncs", "compile")
    widths = (12, 9, 9, 10, 6, 6, 9)
    lines = [title, " " * 22 + "".join(map(str.rjust, names, widths))]
    for row in rows:
        in_place = row.aliased_bytes / row.state_bytes
        lines.append(
            f"{row.arm:22}{row.bytes_a_parameter:>12.3f}{row.kernels:>9,}{row.temporary_bytes / 1e6:>9.2f}"
            f"{in_place:>10.1%}{row.conditionals:>6}{row.host_syncs:>6}{row.compile_seconds:>8.1f}s"
        )
    return "\n".join(lines)


def main() -> None:
    """Compiles the cases asked for, prints their tables and writes them as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("out/loss_scale_cost.json"))
    arguments = parser.parse_args()
    belong_to = ("jax", "jaxlib", "flax", "optax", "jmp")
    found: dict[str, Any] = {"versions": {name: versions()[name] for name in belong_to}, "cases": {}}
    for name in arguments.case:
        title, case = CASES[name]
        arms = ["plain"] if name == "gpt-bf16" else list(SCALERS)
        rows = [case(arm) for arm in arms]
        print(table(title, rows), end="\n\n", flush=True)
        found["cases"][name] = {"title": title, "rows": [dataclasses.asdict(row) for row in rows]}
    write_json(arguments.json, found)
    print(f"{found['versions']}; written to {arguments.json}")


if __name__ == "__main__":
    main()

"""What master weights, moments in bfloat16 and stochastic rounding cost in the program for an H100.

    python -m benchmarks.compiled.memory                        # Twenty minutes of CPU time.
    python -m benchmarks.compiled.memory --json out/memory.json --cases optimizer

Two cases for each arm of `benchmarks.arms.memory_arms`, both with donated state. `optimizer`: the check of
the gradients and AdamW alone. `gpt`: a whole training step of GPT-2 small, with its casts. Nothing is run.
"""

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp
from benchmarks.arms.memory_arms import ARMS, MemoryArm
from benchmarks.command import make_parser, write_json
from benchmarks.compiled.gpt import gpt
from benchmarks.compiled.h100 import compile_for_gpu
from benchmarks.device import versions
from examples.models.gpt2 import loss
from jmp_lite.linen import with_policy
from jmp_lite.programs import Program, read_program


def sixteen_layers() -> Any:
    """Returns the shapes of 12.6 million parameters in 32 leaves: 16 layers of 1024 x 768 with a bias."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    return {f"layer_{i}": {"kernel": shape(1024, 768), "bias": shape(768)} for i in range(16)}


def optimizer_program(arm: MemoryArm, leaves: Any = None) -> tuple[Program, Any, Any]:
    """Compiles the check and the optimizer of an arm.

    Args:
        arm: from `ARMS`.
        leaves: the shapes of the parameters, float32; `sixteen_layers()` if None.

    Returns:
        The program, and the shapes of parameters and state.
    """
    policy = jmp.get_policy(arm.policy)
    params = policy.cast_to_param(sixteen_layers() if leaves is None else leaves)
    grads = policy.cast_to_compute(params)  # As the products give them.
    tx = arm.optimizer(optax.adamw(3e-4))
    state = jax.eval_shape(tx.init, params)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return read_program(compile_for_gpu(step, params, state, grads, donate_argnums=(0, 1))), params, state


def gpt_program(arm: MemoryArm, batch: int = 8, length: int = 1024, **sizes: int) -> tuple[Program, Any, Any]:
    """Compiles a whole training step of GPT-2 small under the policy of an arm.

    Returns:
        The program, and the shapes of parameters and state.
    """
    model = with_policy(gpt(length=length, **sizes), jmp.get_policy(arm.policy))
    tx = arm.optimizer(optax.adamw(3e-4))
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    state = jax.eval_shape(tx.init, params)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, tokens)
        return loss(logits[:, :-1].astype(jnp.float32), tokens[:, 1:])

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(state))(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return read_program(compile_for_gpu(step, params, state, tokens, donate_argnums=(0, 1))), params, state


def facts(program: Program, params: Any, state: Any) -> dict[str, float]:
    """Returns the figures of a program, those of bytes for each parameter."""
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    return {
        "parameters": count,
        "bytes_at_rest": round(size((params, state)) / count, 2),
        "bytes_moved": round(program.bytes_moved / count, 2),
        "kernels": program.kernels,
        "temporary_bytes": program.temporary_bytes,
        "in_place": round(program.aliased_bytes / size((params, state)), 4),
    }


def cost_table(found: dict[str, Any]) -> list[str]:
    """Returns the table of both cases in Markdown."""
    lines = [
        "| Configuration | bytes per parameter | optimizer: traffic | kernels | temporary KB "
        "| GPT-2 small: traffic | kernels | temporary GB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, alone in found["optimizer"].items():
        cells = (
            arm,
            f"{alone['bytes_at_rest']:.0f}",
            f"{alone['bytes_moved']:.1f}",
            f"{alone['kernels']}",
            f"{alone['temporary_bytes'] / 1e3:.0f}",
            *_whole_cells(found["gpt"][arm]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _whole_cells(whole: dict[str, float]) -> tuple[str, str, str]:
    """Returns the cells of a whole step."""
    temporary = f"{whole['temporary_bytes'] / 1e9:.2f}"
    return f"{whole['bytes_moved']:.1f}", f"{whole['kernels']:,}", temporary


def accuracy_table(found: dict[str, Any]) -> list[str]:
    """Returns the table of what `benchmarks.timed.memory` wrote, in Markdown."""

    def spread(runs: list[dict[str, float]], name: str, digits: int) -> str:
        values = [run[name] for run in runs]
        mean = sum(values) / len(values)
        return f"{mean:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

    lines = [
        "| Configuration | digits: accuracy in % | test loss | text: bits per byte |",
        "| --- | --- | --- | --- |",
    ]
    for arm in ARMS:
        digits, text = (found["tasks"][task][arm] for task in ("digits", "language model"))
        cells = (
            arm,
            spread(digits, "accuracy", 1),
            spread(digits, "loss", 4),
            spread(text, "bits_per_byte", 3),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


CASES: dict[str, Callable[[MemoryArm], tuple[Program, Any, Any]]] = {
    "optimizer": optimizer_program,
    "gpt": gpt_program,
}


def main() -> None:
    """Compiles the cases asked for and writes their figures as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("benchmarks/results/memory.json"))
    options = parser.parse_args()
    belong_to = ("jax", "jaxlib", "flax", "optax")
    found: dict[str, Any] = {"versions": {name: versions()[name] for name in belong_to}}
    if options.json.exists():  # The figures that are not asked for are kept, if they compare with the others.
        old = json.loads(options.json.read_text())
        found = old if old["versions"] == found["versions"] else found
    for case in options.cases:
        found.setdefault(case, {})
        for arm in options.arms:
            found[case][arm] = facts(*CASES[case](ARMS[arm]))
            print(f"{case:10} {arm:28} {found[case][arm]}", flush=True)
            write_json(options.json, found)


if __name__ == "__main__":
    main()

"""What a loss scale for each block costs in the program for an H100: the training step of GPT-2 small.

    python -m benchmarks.compiled.layer_scale       # Three minutes of CPU time.

Nothing is run.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp
from benchmarks.compiled.gpt import gpt, gpt_loss
from benchmarks.compiled.h100 import compile_for_gpu
from jmp_lite.diagnostics import Program, read_program


def program(layer_scale: str | tuple[str, ...], batch: int = 8, length: int = 1024, **sizes: int) -> Program:
    """Compiles a step of GPT-2 in float16 with a global scale, and one for each selected layer."""
    model, tx = gpt(length=length, **sizes), jmp.with_loss_scale(optax.adamw(3e-4))
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    state = jax.eval_shape(tx.init, params)
    half_loss = jmp.autocast(gpt_loss(model, "none", jnp.float16), jnp.float16, layer_scale=layer_scale)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jmp.value_and_grad(half_loss, jmp.get_loss_scale(state))(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return read_program(compile_for_gpu(step, params, state, tokens, donate_argnums=(0, 1)))


def main() -> None:
    """Prints a line without and a line with a scale for each block."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    for name, layer_scale in (("one scale", ()), ("a scale for each block", "blocks_*")):
        found = program(layer_scale)
        print(
            f"{name:24}{found.bytes_moved / 1e9:8.1f} GB moved{found.temporary_bytes / 1e9:8.1f} GB held"
            f"{found.kernels:8} kernels, {found.tensor_core_share:.1%} of the FLOPs on Tensor Cores",
            flush=True,
        )


if __name__ == "__main__":
    main()

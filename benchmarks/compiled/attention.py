"""What cuDNN's attention changes in GPT-2 small, as compiled for an H100.

    pip install nvidia-cudnn-cu13                       # 500 MB. XLA asks cuDNN for its kernels.
    python -m benchmarks.compiled.attention             # Six programs: four minutes.

cuDNN's attention takes half inputs only, and autocast traces the model in float32. So the model is given an
attention that casts its inputs to half. The program is the loss and its gradients. Nothing is run:
the figures are those of the compiled programs.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jmp_lite as jmp
from benchmarks.arms.jax_arms import cudnn_attention
from benchmarks.command import make_parser
from benchmarks.compiled.gpt import gpt, gpt_loss
from benchmarks.compiled.h100 import compile_for_gpu
from examples.models.gpt2 import GPT2
from jmp_lite.programs import Program, read_program

HAS_CUDNN = bool(importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn"))
"""Whether cuDNN is installed."""


def with_cudnn_attention(model: GPT2) -> GPT2:
    """Returns a GPT-2 whose attention is cuDNN's."""
    return model.clone(attention=functools.partial(cudnn_attention, jnp.bfloat16))


ORDERS: dict[str, Callable[..., Any]] = {
    "grad(autocast)": lambda loss: jax.value_and_grad(jmp.autocast(loss, jnp.bfloat16)),
    "autocast(grad)": lambda loss: jmp.autocast(jax.value_and_grad(loss), jnp.bfloat16),
}


def loss_and_gradients(model: GPT2, gradients: Callable[..., Any], batch: int = 8) -> Program:
    """Compiles a loss and its gradients for an H100."""
    tokens = jax.ShapeDtypeStruct((batch, model.length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return read_program(compile_for_gpu(gradients, params, tokens))


def main() -> None:
    """Prints a row for each attention and each order of `grad` and `autocast`."""
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args()
    if not HAS_CUDNN:
        parser.error("cuDNN is not installed: pip install nvidia-cudnn-cu13")
    model = gpt(length=options.length, layers=options.layers)
    cudnn = with_cudnn_attention(model)
    by_hand = lambda model: jax.value_and_grad(gpt_loss(model, "by hand", jnp.bfloat16))
    print("| attention | casts | kernels | GB moved | temporaries GB |")
    print("| --- | --- | ---: | ---: | ---: |")
    for name, each in (("XLA's", model), ("cuDNN's", cudnn)):
        ways = {order: wrap(gpt_loss(each, "none", jnp.bfloat16)) for order, wrap in ORDERS.items()}
        for way, gradients in {**ways, "by hand": by_hand(each)}.items():
            program = loss_and_gradients(each, gradients)
            moved, kept = program.bytes_moved / 1e9, program.temporary_bytes / 1e9
            print(f"| {name} | {way} | {program.kernels} | {moved:.1f} | {kept:.2f} |", flush=True)


if __name__ == "__main__":
    main()

"""The time of one block of a transformer, forward and backward, under autocast to bfloat16 and to float8.

    python -m benchmarks.gpu.float8_time --width 4096
    python -m benchmarks.gpu.float8_time --width 64 --tokens 128 --steps 2 --all    # Anywhere: it works.

It is the block of `benchmarks.compiled.float8`, which estimates the time. It reads 8,192 tokens. On a GPU
attention is that of cuDNN. Both arms are compiled with Triton's GEMMs and without. All programs are in one
process and take turns. If float8 is below 1.15 times as fast as bfloat16 at width 4096 on an H100, it is
dropped from autocast.
"""

import functools
import math
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jmp_lite as jmp
from benchmarks.arms.jax_arms import cudnn_attention
from benchmarks.command import make_parser, write_json
from benchmarks.compiled.float8 import ARMS, TOKENS, block, block_model
from benchmarks.device import HAS_GPU, clocks, device_name, versions
from benchmarks.gpu.turns import take_turns
from examples.models.attention import attention
from jmp_lite._dtypes import DTypeName
from jmp_lite.programs import read_program

LEAST, AT_WIDTH = 1.15, 4096  # The rule that decides about float8.
# Small ones too: autocast leaves them in bfloat16 by itself.
ALL_PRODUCTS: dict[str, DTypeName] = {"**": "float8"}


def arrays(width: int, tokens: int) -> tuple[Callable[..., jax.Array], Any]:
    """Returns the loss of a block, and its parameters, inputs and weights, at random."""
    attend = functools.partial(cudnn_attention, jnp.bfloat16) if HAS_GPU else attention
    loss, (_, shape, _) = block(width, tokens, attend=attend)
    keys = jax.random.split(jax.random.key(0))
    x, weights = jax.random.normal(keys[0], (2, *shape.shape))
    return loss, (jax.jit(block_model(width, attend).init)(keys[1], x), x, weights)


def measure(
    width: int, tokens: int, steps: int, blocks: int, rules: dict[str, DTypeName] | None = None
) -> dict[str, Any]:
    """Times forward and backward of a block in both dtypes, with Triton's GEMMs and without.

    Args:
        width, tokens: the size of the block, and of its input.
        steps: the number of steps in a measured time.
        blocks: the number of measured times of each arm.
        rules: the rules of autocast to float8.
    """
    loss, arguments = arrays(width, tokens)
    runs: dict[str, Any] = {}
    found: dict[str, Any] = {}
    grads = {}
    for dtype in ARMS:
        fun = jmp.autocast(loss, dtype, rules=rules if dtype == "float8" else None)
        lowered = jax.jit(jax.value_and_grad(fun, argnums=(0, 1))).lower(*arguments)
        for triton in (False, True):
            arm = f"{dtype}, Triton's GEMMs {'on' if triton else 'off'}"
            run = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": triton})
            program = read_program(run)
            products: dict[str, int] = {}
            for product in program.matmuls:
                kind = f"{product.target} {product.arithmetic}"
                products[kind] = products.get(kind, 0) + product.times
            found[arm] = {
                "kernels": program.kernels,
                "bytes_moved": program.bytes_moved,
                "products": products,
            }
            runs[arm] = functools.partial(run, *arguments)
            _, grads[dtype] = jax.block_until_ready(run(*arguments))
    for arm, milliseconds in take_turns(runs, steps, blocks).items():
        found[arm] |= {"ms_blocks": milliseconds, "ms": statistics.median(milliseconds)}
    return {"arms": found, **compared(found), "gradient_cosine": cosine(*grads.values())}


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """Returns how many times as fast float8 is as bfloat16, each with its faster kind of GEMM."""
    bfloat16, float8 = (
        min((figures for arm, figures in found.items() if arm.startswith(dtype)), key=lambda x: x["ms"])
        for dtype in ARMS
    )
    turns = [slow / fast for slow, fast in zip(bfloat16["ms_blocks"], float8["ms_blocks"])]
    return {"times_bfloat16": statistics.median(turns)}


def cosine(a: Any, b: Any) -> float:
    """Returns the cosine of the angle between two gradients."""
    dot = lambda a, b: sum(float(jnp.vdot(x, y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def main() -> None:
    """Measures one width, prints the times and writes them as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--width", type=int, default=AT_WIDTH)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--all", action="store_true", help="a rule asks for fp8 in small products too")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("out/float8_time.json"))
    options = parser.parse_args()
    rules = ALL_PRODUCTS if options.all else None
    found: dict[str, Any] = {
        "device": device_name(),
        "versions": versions(),
        "width": options.width,
        "tokens": options.tokens,
        "rules": rules,
        **measure(options.width, options.tokens, options.steps, options.blocks, rules),
        "clocks": clocks(),
    }
    write_json(options.json, found)
    for arm, figures in found["arms"].items():
        print(f"{arm:32}{figures['ms']:10.3f} ms {figures['kernels']:6} kernels  {figures['products']}")
    print(f"float8 is {found['times_bfloat16']:.3f} times as fast; cosine {found['gradient_cosine']:.4f}")
    if options.width == AT_WIDTH:
        kept = "is kept" if found["times_bfloat16"] >= LEAST else "is dropped"
        print(f"The rule is {LEAST} times at width {AT_WIDTH}: on this device float8 {kept}.")


if __name__ == "__main__":
    main()

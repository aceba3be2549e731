"""One block of a transformer in bfloat16 and in fp8, forward and backward, compiled for an H100.

    JAX_PLATFORMS=cpu python -m benchmarks.compiled.float8 --json benchmarks/results/float8.json

The block is that of GPT-2 and reads 8,192 tokens. Both arms are autocast. The table shows the kernels,
the products in fp8, the bytes that the products and all other kernels move, and an estimate of the time.
The estimate adds up:

- each product at 70 % of the peak in bfloat16, and at 60 % of the peak in fp8;
- the bytes of all other kernels at 85 % of the bandwidth of the memory;
- two microseconds for each kernel.

These shares are guesses: no GPU has run the programs. A row with a flash attention has none of attention's
products. The estimate has 0.6 ms for the attention at width 2048, in proportion to the width.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jmp_lite as jmp
from benchmarks.command import compiled_with, make_parser, write_json
from benchmarks.device import versions
from examples.models.attention import attention
from examples.models.gpt2 import Block
from jmp_lite._dtypes import DTypeName
from jmp_lite.programs import compile_for, mesh_for, read_program
from jmp_lite.programs._roofline import DEVICES

TOKENS, LENGTH = 8192, 2048
FP8_TIMES_BFLOAT16 = 2.0  # The ratio of their peaks on an H100: 1,978.9 and 989.4 TFLOPS.
BFLOAT16_SHARE, FP8_SHARE, MEMORY_SHARE, LAUNCH_SECONDS = 0.70, 0.60, 0.85, 2e-6
FLASH_SECONDS = 0.6e-3 / 2048  # Of one feature of the width.
ARMS = ("bfloat16", "float8")


def no_attention(query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool = False) -> jax.Array:
    """Stands for a flash attention, whose time the estimate adds: reads its operands once."""
    del is_causal
    return query + key + value


def block_model(width: int, attend: Callable[..., jax.Array] = attention) -> Block:
    """Returns a block of a GPT-2. Heads have 128 features, those of widths below 4096 have 64."""
    return Block(max(1, width // (128 if width >= 4096 else 64)), attend)


def block(
    width: int, tokens: int = TOKENS, length: int = LENGTH, attend: Callable[..., jax.Array] = attention
) -> tuple[Callable[..., jax.Array], Any]:
    """Returns the loss of a block of a GPT-2, and the shapes of its parameters, inputs and weights.

    The loss is the sum of the outputs, weighted at random, so that the cotangents are as random as in a deep
    model.
    """
    model = block_model(width, attend)
    x = jax.ShapeDtypeStruct((max(1, tokens // length), min(tokens, length), width), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(params: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.vdot(model.apply(params, x).astype(jnp.float32), weights)  # type: ignore[union-attr]

    return loss, (params, x, x)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one program for an H100 costs.

    Attributes:
        kernels: kernels and library calls.
        fp8: how many products run in fp8.
        products: how many products it has.
        product_bytes: the bytes that the products move.
        other_bytes: the bytes that all other kernels move.
        temporary_bytes: the memory beside arguments and outputs.
        seconds: the estimate.
    """

    kernels: int
    fp8: int
    products: int
    product_bytes: int
    other_bytes: int
    temporary_bytes: int
    seconds: float


def cost(compiled: Any, flash_seconds: float = 0.0) -> Cost:
    """Returns the cost of a program that was compiled for an H100."""
    program, h100 = read_program(compiled), DEVICES["h100"]
    peak = h100.flops["bfloat16"]
    seconds = flash_seconds + LAUNCH_SECONDS * program.kernels
    fp8 = 0
    for product in program.matmuls:
        in_fp8 = product.arithmetic.startswith("f8")
        fp8 += in_fp8 * product.times
        rate = peak * (FP8_SHARE * FP8_TIMES_BFLOAT16 if in_fp8 else BFLOAT16_SHARE)
        seconds += product.flops * product.times / rate
    moved = [(launch.bytes_moved * launch.times, launch.flops > 0) for launch in program.launches]
    product_bytes = sum(size for size, is_product in moved if is_product)
    other_bytes = sum(size for size, is_product in moved if not is_product)
    seconds += other_bytes / (MEMORY_SHARE * h100.bandwidth)
    count = sum(product.times for product in program.matmuls)
    return Cost(program.kernels, fp8, count, product_bytes, other_bytes, program.temporary_bytes, seconds)


def compile_block(
    arm: DTypeName, width: int, triton: bool = True, flash: bool = False, tokens: int = TOKENS, **options: Any
) -> Any:
    """Returns the program of a block and its gradients for an H100.

    Args:
        arm: `bfloat16` or `float8`.
        width: the width of the block.
        triton: whether XLA may write products as Triton's GEMMs, as it may by default.
        flash: whether to leave out attention's products.
        tokens: the number of tokens.
        options: further options of `autocast`.
    """
    attend = no_attention if flash else attention
    loss, arguments = block(width, tokens, min(tokens, LENGTH), attend)
    step = jax.jit(jax.value_and_grad(jmp.autocast(loss, arm, **options), (0, 1)))
    if not triton:
        return compile_for("h100", step, *arguments)
    here = jax.sharding.SingleDeviceSharding(mesh_for("h100", {"device": 1}).devices.item())
    there = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments)
    return step.lower(*there).compile()


def measure(width: int, triton: bool, flash: bool, tokens: int = TOKENS, **options: Any) -> dict[str, Cost]:
    """Returns the cost of each arm."""
    seconds = FLASH_SECONDS * width if flash else 0.0
    return {arm: cost(compile_block(arm, width, triton, flash, tokens, **options), seconds) for arm in ARMS}


def table(found: dict[str, Any]) -> list[str]:
    """Returns the results as lines of a page."""
    lines = [
        "| width | attention | kernels | matmuls in fp8 "
        "| MB in matmuls | MB elsewhere | peak MB | estimate |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        bfloat16, fp8 = (Cost(**row[arm]) for arm in ARMS)
        pair = lambda name, unit, pair=(bfloat16, fp8): " / ".join(
            f"{getattr(cost, name) / unit:,.0f}" for cost in pair
        )
        sizes = " | ".join(pair(f"{name}_bytes", 1e6) for name in ("product", "other", "temporary"))
        lines.append(
            f"| {row['width']:,} | {row['attention']} | {pair('kernels', 1)} | {fp8.fp8} of {fp8.products} "
            f"| {sizes} | {bfloat16.seconds / fp8.seconds:.2f} times |"
        )
    return [*lines, "", f"bfloat16 / fp8. {compiled_with(found)}"]


def main() -> None:
    """Compiles both arms, prints a table and writes the results."""
    parser = make_parser(__doc__)
    parser.add_argument("--width", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--triton", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=pathlib.Path, help="of a whole run, benchmarks/results/float8.json")
    options = parser.parse_args()
    rows = [
        {
            "width": width,
            "attention": "flash" if flash else "XLA",
            **{
                arm: dataclasses.asdict(row)
                for arm, row in measure(width, options.triton, flash, options.tokens).items()
            },
        }
        for flash in (False, True)
        for width in options.width
    ]
    found = {"versions": {name: versions()[name] for name in ("jax", "jaxlib")}, "rows": rows}
    print(*table(found), sep="\n")
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()

"""Writes the programs of this folder: steps compiled for an H100, as text, without what nobody reads.

    pip install -e ".[h100]"  # It needs no GPU.
    python -m tests.diagnostics.program.programs.make  # Run it once for each JAX version.

The tests beside this folder say what is in each program.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

HERE = pathlib.Path(__file__).parent


def x(shape, dtype=jnp.float16):
    return jax.ShapeDtypeStruct(shape, dtype)


def preset(name, x):
    return lax.dot(x, x.T, precision=lax.DotAlgorithmPreset[name], preferred_element_type=jnp.float32)


def products(half, full, exact, chosen, double, integers, eighths, stacked, groups):
    with jax.named_scope('a{b}"c'):
        gemm = half @ half.T
    return (
        gemm,
        stacked @ stacked.mT,
        full @ full.T,
        jnp.dot(exact, exact.T, precision="highest"),
        preset("F32_F32_F32", chosen),
        double @ double.T,
        lax.dot(integers, integers.T, preferred_element_type=jnp.int32),
        lax.dot(eighths, eighths.T, preferred_element_type=jnp.float32),
        lax.ragged_dot(stacked[0], stacked.mT, groups),
    )


def triton(a, b, c, half):
    return (
        preset("BF16_BF16_F32", a),
        preset("BF16_BF16_F32_X3", b),
        preset("TF32_TF32_F32", c),
        half @ half.T,
    )


def convolutions(images, kernel):
    def loss(images, kernel):
        axes = ("NHWC", "HWIO", "NHWC")
        precision = ("default", "highest") if images.dtype == jnp.float32 else None
        out = lax.conv_general_dilated(
            images, kernel, (2, 2), "SAME", dimension_numbers=axes, precision=precision
        )
        return (out.astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, (0, 1))(images, kernel)


def attention(q, k, v):
    attend = lambda *qkv: jax.nn.dot_product_attention(*qkv, implementation="cudnn")
    return jax.grad(lambda *qkv: attend(*qkv).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)


def scan(x, weights):
    return lax.scan(lambda x, w: (jnp.tanh(x), x @ w), x, weights)


def loops(x, limit):
    double = lambda x: jnp.tanh(x @ x)
    x = lax.fori_loop(0, 5, lambda _, x: lax.fori_loop(0, 3, lambda _, x: double(x), x), x)
    x = lax.while_loop(lambda x: x.sum() < limit, double, x)
    return lax.cond(limit > 0, double, jnp.sin, x)


def traffic(read, updated, added, copied, rows, places, where):
    return (
        read[places] * 2,
        lax.dynamic_update_slice(updated, rows[:1] * 2, (where, jnp.int32(0))),
        added.at[places].add(rows),
        jnp.copy(copied),
    )


def collectives(x):
    """On eight devices, of float32 and bfloat16."""
    step = lambda x, _: (lax.psum(jnp.tanh(x), "d"), None)
    return (
        lax.psum(x, "d"),
        lax.all_gather(x.astype(jnp.bfloat16), "d", tiled=True),
        lax.psum_scatter(jnp.sin(x), "d", tiled=True),
        lax.all_to_all(jnp.cos(x), "d", 1, 0, tiled=True),
        lax.ppermute(jnp.exp(x), "d", [(i, (i + 1) % 8) for i in range(8)]),
        lax.scan(step, x, length=5)[0],
    )


def trim(text):
    """Leaves out the tables of source lines."""
    return re.sub(r"(FileNames|FunctionNames|FileLocations|StackFrames)\n(\d+ .*\n)*\n*", "", text)


def main():
    from benchmarks.compiled.h100 import compile_for_gpu, gpu_mesh

    full, int8, float8 = x((64, 128), jnp.float32), x((64, 128), jnp.int8), x((64, 128), jnp.float8_e4m3fn)
    mesh = gpu_mesh({"d": 8})
    everywhere = jax.shard_map(collectives, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    sharded = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=jax.NamedSharding(mesh, P("d")))
    made = {
        "products": lambda: compile_for_gpu(
            products,
            x((64, 128)),
            full,
            full,
            full,
            x((64, 128), jnp.float64),
            int8,
            float8,
            x((4, 64, 128), jnp.bfloat16),
            x((4,), jnp.int32),
        ),
        "convolutions": lambda: compile_for_gpu(convolutions, x((8, 32, 32, 64)), x((3, 3, 64, 128))),
        "precise_convolution": lambda: compile_for_gpu(
            convolutions, x((8, 32, 32, 64), jnp.float32), x((3, 3, 64, 128), jnp.float32)
        ),
        "attention": lambda: compile_for_gpu(attention, *[x((2, 256, 4, 64), jnp.bfloat16)] * 3),
        "scan": lambda: compile_for_gpu(scan, x((64, 64)), x((6, 64, 64))),
        "loops": lambda: compile_for_gpu(loops, x((64, 64)), x(())),
        "traffic": lambda: compile_for_gpu(
            traffic,
            *[x((1000, 64), jnp.float32)] * 4,
            x((4, 64), jnp.float32),
            x((4,), jnp.int32),
            x((), jnp.int32),
            donate_argnums=(1, 2),
        ),
        "collectives": lambda: compile_for_gpu(everywhere, sharded, mesh=mesh),
        "triton": lambda: compile_with_triton(triton, full, full, full, x((64, 128))),
    }
    for name, compiled in made.items():
        with jax.enable_x64(name == "products"):
            try:
                text = trim(compiled().as_text())
            except RuntimeError as error:
                # JAX lowers the attention only where cuDNN is; XLA compiles it without.
                print(f"{name}: {error}")
                continue
        (HERE / f"{name}-{jax.__version__}.txt").write_text(text)


def compile_with_triton(fun, *args):
    """Compiles as XLA does where it can measure: with its own kernels for matrix products."""
    from benchmarks.compiled.h100 import gpu_mesh

    device = jax.sharding.SingleDeviceSharding(gpu_mesh({"device": 1}).devices.item())
    args = [jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=device) for arg in args]
    return jax.jit(fun).lower(*args).compile(compiler_options={"xla_gpu_autotune_level": 0})


if __name__ == "__main__":
    main()

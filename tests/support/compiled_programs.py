"""Programs compiled for this CPU, and programs for an H100 that are kept as text."""

import pathlib
import types

import jax
import jax.numpy as jnp

from jmp_lite.programs import read_program
from jmp_lite.programs._read import _read

H100 = types.SimpleNamespace(platform="cuda", device_kind="NVIDIA H100 80GB HBM3")
PROGRAMS = pathlib.Path(__file__).parent.parent / "programs" / "texts"
VERSIONS = ["0.10.2", "0.12.0.1"]
x = jax.ShapeDtypeStruct
f16, bf16, f32 = jnp.float16, jnp.bfloat16, jnp.float32


def compiled(fun, *args, **jit):
    return jax.jit(fun, **jit).lower(*args).compile()


def program(fun, *args, **jit):
    """Of the CPU."""
    return read_program(compiled(fun, *args, **jit))


def h100(name, version=VERSIONS[-1]):
    return _read((PROGRAMS / f"{name}-{version}.txt").read_text(), None, H100)


def entry(*lines):
    """A program of some lines that no small step on one device compiles to."""
    return _read("\n".join(["HloModule made_up", "", "ENTRY %main () -> f32[] {", *lines, "}"]), None, H100)


def row(product):
    """All that a product says, in words."""
    return (
        product.kind,
        product.target,
        " ".join(map(str, product.operands)),
        str(product.result),
        product.arithmetic,
        product.accumulation,
        product.on_tensor_cores,
        product.flops,
        product.times,
        product.operation,
    )


# A program of two modules.
def two_modules(w, x):
    with jax.named_scope("up"):
        h = jax.nn.relu(x @ w["up"])
    with jax.named_scope("down"):
        return jnp.mean((h @ w["down"]) ** 2)


TWO_WEIGHTS = {"up": jnp.ones((32, 64)), "down": jnp.ones((64, 16))}
ROWS = jnp.ones((8, 32))


LT = "__cublas$lt$matmul"

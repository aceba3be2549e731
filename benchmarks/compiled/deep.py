"""What a scanned, rematerialized stack of LLaMA's size keeps and moves at its true depth, on an H100.

    python -m benchmarks.compiled.deep                 # 7B on 8 GPUs and 70B on 256, five ways: six minutes.
    python -m benchmarks.compiled.deep --sizes 7B
    python -m benchmarks.compiled.deep --fused         # With cuDNN's attention: pip install nvidia-cudnn-cu13
    python -m benchmarks.compiled.deep --errors        # Of the gradient, run on this machine: a minute.

The arrays are abstract: nothing is run, and no array is made. `by hand` casts the parameters and the stream
to bfloat16, as Flax's layers with `dtype=bfloat16` do, and computes its norms in float32. The program is the
loss and its gradients, without an optimizer.
"""

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import jmp_lite as jmp
from benchmarks.compiled.attention import half_scores_attention
from benchmarks.compiled.h100 import compile_for_gpu, gpu_mesh, on_mesh
from jmp_lite.programs import Program, read_program, roofline

BF16 = jnp.bfloat16
HALF_SCORES = "by hand, scores in half"
WAYS: dict[str, dict[str, Any] | None] = {
    "by hand": None,
    "autocast": {},
    'autocast, `half_sums="**"`': {"half_sums": "**"},
    'autocast to float8, `half_sums="**"`': {"dtype": "float8", "half_sums": "**"},
    HALF_SCORES: None,
}


@dataclasses.dataclass(frozen=True)
class Size:
    """The shape of a stack and of its mesh: `data` devices for FSDP, `model` for tensor parallelism."""

    width: int
    hidden: int
    heads: int
    shared_heads: int
    layers: int
    data: int
    model: int
    sequence: int = 4096
    vocabulary: int = 32000


SIZES = {
    "7B": Size(4096, 11008, 32, 32, 32, data=8, model=1),
    "70B": Size(8192, 28672, 64, 8, 80, data=32, model=8),
}


def shapes(size: Size) -> dict[str, tuple[tuple[int, ...], PartitionSpec]]:
    """Returns the shape and the sharding of each parameter; those of the layers are stacked."""
    head = size.width // size.heads
    across, along = PartitionSpec(None, "data", "model"), PartitionSpec(None, "model", "data")
    layers, width, hidden = size.layers, size.width, size.hidden
    return {
        "embed": ((size.vocabulary, width), PartitionSpec("model", "data")),
        "head": ((width, size.vocabulary), PartitionSpec("data", "model")),
        "norm": ((width,), PartitionSpec()),
        "norm_1": ((layers, width), PartitionSpec()),
        "norm_2": ((layers, width), PartitionSpec()),
        "query": ((layers, width, size.heads * head), across),
        "key": ((layers, width, size.shared_heads * head), across),
        "value": ((layers, width, size.shared_heads * head), across),
        "out": ((layers, size.heads * head, width), along),
        "gate": ((layers, width, hidden), across),
        "up": ((layers, width, hidden), across),
        "down": ((layers, hidden, width), along),
    }


def loss_of(size: Size, mesh: Any, dtype: Any = None, attend: Any = jax.nn.dot_product_attention) -> Any:
    """Returns the loss; with a dtype, with casts by hand. The constraints are those of tensor parallelism.

    Args:
        size: the shape of the stack and of its mesh.
        mesh: the mesh.
        dtype: the dtype of casts by hand.
        attend: the attention, called as that of `jax.nn`.
    """
    cast = (lambda x: x) if dtype is None else (lambda x: x.astype(dtype))
    on = lambda x, *spec: jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, PartitionSpec("data", *spec))
    )

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return cast(wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5) * scale)

    def block(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        p = {name: leaf if name.startswith("norm") else cast(leaf) for name, leaf in p.items()}
        split = lambda y: on(y.reshape(*y.shape[:-1], -1, size.width // size.heads), None, "model", None)
        h = norm(x, p["norm_1"])
        query, key, value = (split(h @ p[name]) for name in ("query", "key", "value"))
        mixed = attend(query, key, value, is_causal=True)
        x = on(x + on(mixed.reshape(*x.shape[:-1], -1), None, "model") @ p["out"])
        h = norm(x, p["norm_2"])
        hidden = on(jax.nn.silu(h @ p["gate"]) * (h @ p["up"]), None, "model")
        return on(x + hidden @ p["down"]), None

    def loss(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        layers = {name: leaf for name, leaf in params.items() if name not in ("embed", "head", "norm")}
        x = on(cast(params["embed"])[tokens[:, :-1]])
        x = jax.lax.scan(jax.checkpoint(block), x, layers)[0]
        logits = on((norm(x, params["norm"]) @ cast(params["head"])).astype(jnp.float32), None, "model")
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    return loss


def program(size: Size, way: str, fused: bool = False) -> Program:
    """Compiles the loss and its gradients for the mesh of a size. `fused` means cuDNN's attention."""
    settings = WAYS[way]
    mesh = gpu_mesh({"data": size.data, "model": size.model})
    if settings is None:
        implementation = "cudnn" if fused else None
        own = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
        loss = loss_of(size, mesh, BF16, half_scores_attention if way == HALF_SCORES else own)
    else:
        loss = loss_of(size, mesh)
        loss = jmp.fuse_attention(loss, BF16) if fused else loss
        loss = jmp.autocast(loss, **{"dtype": BF16, **settings})
    params = {name: on_mesh(mesh, shape, jnp.float32, *spec) for name, (shape, spec) in shapes(size).items()}
    tokens = on_mesh(mesh, (size.data, size.sequence + 1), jnp.int32, "data")
    shardings = {name: leaf.sharding for name, leaf in params.items()}

    def step(params: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return value, jax.lax.with_sharding_constraint(grads, shardings)

    return read_program(compile_for_gpu(step, params, tokens, mesh=mesh))


def block_of(dtype: Any = None) -> tuple[Any, Any]:
    """Returns the cast to a dtype, if one is given, and a residual block with a norm, cast by hand."""
    cast = (lambda x: x) if dtype is None else (lambda x: x.astype(dtype))

    def block(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        inner, outer = map(cast, weights)
        wide = x.astype(jnp.float32)
        normed = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
        return x + jax.nn.gelu(cast(normed) @ inner) @ outer, None

    return cast, block


def stack_of(dtype: Any = None) -> Any:
    """Returns the loss of a small scanned stack of these blocks."""
    cast, block = block_of(dtype)

    def loss(stack: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        y = jax.lax.scan(jax.checkpoint(block), cast(x), stack)[0].astype(jnp.float32)
        return jnp.mean(jnp.square(jnp.tanh(y)))

    return loss


def errors(depth: int, seed: int, width: int = 64) -> dict[str, float]:
    """Returns the relative error of the gradient in bfloat16 for each way to cast a stack of some depth."""
    keys = jax.random.split(jax.random.key(seed), 3)
    inner = jax.random.normal(keys[0], (depth, width, 2 * width)) / width**0.5
    outer = jax.random.normal(keys[1], (depth, 2 * width, width)) / (2 * width * depth) ** 0.5
    x = jax.random.normal(keys[2], (128, width))
    gradient = lambda loss: jnp.concatenate(
        [leaf.ravel() for leaf in jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))((inner, outer), x))]
    )
    exact = gradient(stack_of())
    error = lambda loss: float(jnp.linalg.norm(gradient(loss) - exact) / jnp.linalg.norm(exact))
    return {
        "autocast": error(jmp.autocast(stack_of(), BF16)),
        "half_sums": error(jmp.autocast(stack_of(), BF16, half_sums="**")),
        "by hand": error(stack_of(BF16)),
    }


def main() -> None:
    """Prints a line of the table for each size and each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="which stacks")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which casts")
    parser.add_argument("--fused", action="store_true", help="with cuDNN's attention")
    parser.add_argument("--errors", action="store_true", help="the errors of the gradient instead")
    options = parser.parse_args()
    if options.errors:
        for depth in (8, 32, 80):
            found = [errors(depth, seed) for seed in range(3)]
            cells = (", ".join(f"{row[way]:.1e}" for row in found) for way in found[0])
            print(f"| {depth} | {' | '.join(cells)} |", flush=True)
        return
    print("| | | temporaries GB | GB moved | all-reduces GB | estimated ms |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for name in options.sizes:
        for way in options.ways:
            compiled = program(SIZES[name], way, options.fused)
            time = roofline(compiled, "h100").seconds["float16"]
            kept, moved = compiled.temporary_bytes / 1e9, compiled.bytes_moved / 1e9
            reduced = (c.size * c.times for c in compiled.collectives if c.kind == "all-reduce")
            cells = f"{kept:.2f} | {moved:,.0f} | {sum(reduced) / 1e9:.1f} | {1e3 * time:,.0f}"
            print(f"| {name} | {way} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

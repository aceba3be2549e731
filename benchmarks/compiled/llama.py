"""What crosses between devices in a sharded step of a LLaMA-like stack, by dtype.

    python -m benchmarks.compiled.llama                    # Three meshes, five ways: ten minutes.
    python -m benchmarks.compiled.llama --meshes "FSDP 8"

The stack has LLaMA's parts: RMS norms, attention, SwiGLU, no biases, and a head of its own. The arrays are
abstract: nothing is run, and no array is made. `autocast, gather` is `autocast(..., allow=["gather"])`.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jmp_lite as jmp
from benchmarks.command import make_parser
from benchmarks.compiled.h100 import compile_for_gpu, gpu_mesh
from benchmarks.compiled.step import moved
from jmp_lite.linen import with_policy
from jmp_lite.programs import Program, read_program

MESHES = {
    "FSDP 8": {"data": 8, "model": 1},
    "FSDP 2 x TP 4": {"data": 2, "model": 4},
    "FSDP 64": {"data": 64, "model": 1},
}
WAYS = ("float32", "by hand", "policy", "autocast", "autocast, gather")
POLICY = jmp.Policy(jnp.float32, jnp.float16, jnp.float32)


class Llama(nn.Module):
    """A decoder of `layers` blocks; heads have 128 features, or the width if it is less."""

    vocabulary: int = 32000
    width: int = 4096
    layers: int = 1

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        dense = lambda size, name: nn.Dense(size, use_bias=False, name=name)
        x = nn.Embed(self.vocabulary, self.width, name="embed")(tokens)
        size, hidden = min(128, self.width), self.width * 11 // 4
        for layer in range(self.layers):
            h = nn.RMSNorm(name=f"norm_{layer}")(x)
            heads = (dense(self.width, f"{name}_{layer}")(h) for name in ("query", "key", "value"))
            heads = (head.reshape(*head.shape[:-1], -1, size) for head in heads)
            mixed = jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
            x = x + dense(self.width, f"out_{layer}")(mixed)
            h = nn.RMSNorm(name=f"second_{layer}")(x)
            h = nn.silu(dense(hidden, f"gate_{layer}")(h)) * dense(hidden, f"up_{layer}")(h)
            x = x + dense(self.width, f"down_{layer}")(h)
        return dense(self.vocabulary, "head")(nn.RMSNorm(name="norm")(x))


def sharded_program(model: Llama, way: str, axes: Mapping[str, int], batch: int = 64) -> Program:
    """Compiles the loss and its gradients for many GPUs.

    Args:
        model: the stack, in float32.
        way: one of `WAYS`.
        axes: the sizes of the axes `data` and `model`.
        batch: the number of sequences of all devices, of 512 tokens each.
    """
    mesh = gpu_mesh(axes)

    def loss_of(apply: Any) -> Any:
        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            logits = apply(params, tokens)[:, :-1].astype(jnp.float32)
            labels = jax.nn.one_hot(tokens[:, 1:], model.vocabulary)
            return optax.softmax_cross_entropy(logits, labels).mean()

        return loss

    loss = loss_of(with_policy(model, POLICY).apply if way == "policy" else model.apply)
    if way == "by hand":
        loss = loss_of(lambda params, tokens: model.apply(POLICY.cast_to_compute(params), tokens))
    elif way.startswith("autocast"):
        loss = jmp.autocast(loss, jnp.float16, allow=["gather"] if way.endswith("gather") else [])

    def spec(path: Any, x: jax.ShapeDtypeStruct) -> NamedSharding:
        name = jax.tree_util.keystr(path)
        rows = any(part in name for part in ("out_", "down_"))
        axes = ("model", "data") if rows else ("data", "model")
        return NamedSharding(mesh, PartitionSpec(*axes) if len(x.shape) == 2 else PartitionSpec())

    tokens: Any = jax.ShapeDtypeStruct((batch, 512), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    shardings = jax.tree_util.tree_map_with_path(spec, params)
    on_mesh = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    params = jax.tree.map(on_mesh, params, shardings)
    tokens = on_mesh(tokens, NamedSharding(mesh, PartitionSpec("data")))

    def step(params: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return value, jax.lax.with_sharding_constraint(grads, shardings)

    return read_program(compile_for_gpu(step, params, tokens, mesh=mesh))


def sent(program: Program) -> dict[str, float]:
    """Returns the megabytes that a device sends into collectives, by floating dtype."""
    kinds = {collective.kind for collective in program.collectives}
    return {dtype: size / 1e6 for dtype, size in moved(program, *kinds).items() if dtype in ("f16", "f32")}


def main() -> None:
    """Prints a line of the table for each mesh and each way."""
    parser = make_parser(__doc__)
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    print("| | | MB in float32 | MB in half |\n| --- | --- | ---: | ---: |")
    for mesh in options.meshes:
        for way in options.ways:
            sizes = sent(sharded_program(Llama(), way, MESHES[mesh]))
            cells = f"{sizes.get('f32', 0):,.1f} | {sizes.get('f16', 0):,.1f}"
            print(f"| {mesh} | {way} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

"""What a mixture of experts moves on eight H100s: casts by hand, autocast, and autocast with two options.

    python -m benchmarks.compiled.moe          # Three programs: a minute.

Each device holds one expert. Tokens are sorted by expert, sent to the devices of their experts and back
(`all_to_all`), and multiplied there with `jax.lax.ragged_dot`. The program is the loss and its gradients, and
nothing is run. Autocast adds up the gradients of looked-up rows in float32. With `allow=["gather"]` it adds
them up in half, and `half_sums="**"` keeps the residual stream in half, as casts by hand do.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jmp_lite as jmp
from benchmarks.command import make_parser
from benchmarks.compiled.h100 import compile_for_gpu, gpu_mesh, on_mesh
from jmp_lite.programs import Program, read_program

BF16 = jnp.bfloat16
WAYS: dict[str, dict[str, Any] | None] = {
    "by hand": None,
    "autocast": {},
    'autocast, `allow=["gather"]`, `half_sums="**"`': {"allow": ["gather"], "half_sums": "**"},
}


@dataclasses.dataclass(frozen=True)
class Size:
    """The shape of a stack of experts; `tokens` are those of one device."""

    width: int = 4096
    hidden: int = 14336
    layers: int = 2
    tokens: int = 4096
    devices: int = 8

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], PartitionSpec]]:
        """The shape and the sharding of each parameter of a layer: one expert on each device."""
        split = PartitionSpec("data")
        return {
            "norm": ((self.width,), PartitionSpec()),
            "router": ((self.width, self.devices), PartitionSpec()),
            "gate": ((self.devices, self.width, self.hidden), split),
            "up": ((self.devices, self.width, self.hidden), split),
            "down": ((self.devices, self.hidden, self.width), split),
        }


def loss_of(size: Size, mesh: Mesh, dtype: Any = None) -> Any:
    """Returns the loss of a stack of experts; with a dtype, with casts by hand."""
    cast = (lambda x: x) if dtype is None else (lambda x: x.astype(dtype))

    def exchanged(x: jax.Array) -> jax.Array:
        """Sends a block of tokens to each device, and takes one from each."""
        blocks = x.reshape(size.devices, -1, size.width)
        return lax.all_to_all(blocks, "data", 0, 0).reshape(-1, size.width)

    def layer(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
        h = cast(wide * scale * p["norm"])
        scores = jax.nn.softmax((h @ cast(p["router"])).astype(jnp.float32))
        expert, weight = jnp.argmax(scores, -1), jnp.max(scores, -1)
        order = jnp.argsort(expert)
        sizes = jnp.full((1,), len(order), jnp.int32)  # As a router that balances its experts.
        sent = exchanged(h[order])
        hidden = jax.nn.silu(lax.ragged_dot(sent, cast(p["gate"]), sizes))
        hidden = hidden * lax.ragged_dot(sent, cast(p["up"]), sizes)
        back = exchanged(lax.ragged_dot(hidden, cast(p["down"]), sizes))
        return x + back[jnp.argsort(order)] * cast(weight)[:, None]

    def local(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        x = cast(x)
        for p in params:
            x = layer(p, x)
        return lax.pmean(jnp.mean(jnp.square(x.astype(jnp.float32))), "data")

    specs = [{name: spec for name, (_, spec) in size.shapes.items()}] * size.layers
    return jax.shard_map(local, mesh=mesh, in_specs=(specs, PartitionSpec("data")), out_specs=PartitionSpec())


def program(size: Size, way: str) -> Program:
    """Compiles the loss and its gradients for a mesh of H100s."""
    settings, mesh = WAYS[way], gpu_mesh({"data": size.devices})
    loss = loss_of(size, mesh, BF16 if settings is None else None)
    loss = loss if settings is None else jmp.autocast(loss, BF16, **settings)
    layer = {name: on_mesh(mesh, shape, jnp.float32, *spec) for name, (shape, spec) in size.shapes.items()}
    params = [layer] * size.layers
    x = on_mesh(mesh, (size.devices * size.tokens, size.width), jnp.float32, "data")
    return read_program(compile_for_gpu(jax.value_and_grad(loss), params, x, mesh=mesh))


def main() -> None:
    """Prints a row for each way."""
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    options = parser.parse_args()
    size = Size(options.width, options.width * 7 // 2, options.layers)
    print("| | GB moved | temporaries GB | sent between devices, MB |")
    print("| --- | ---: | ---: | ---: |")
    for way in WAYS:
        compiled = program(size, way)
        sent = sum(each.size * each.times for each in compiled.collectives)
        cells = (compiled.bytes_moved / 1e9, compiled.temporary_bytes / 1e9, sent / 1e6)
        print(f"| {way} | {cells[0]:.2f} | {cells[1]:.2f} | {cells[2]:,.0f} |", flush=True)


if __name__ == "__main__":
    main()

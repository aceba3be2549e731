"""What a GPT training step does in the program for an H100, or for many.

    python -m benchmarks.compiled.step                              # Every way to half precision.
    python -m benchmarks.compiled.step --casts policy --report      # One of them, with every product.
    python -m benchmarks.compiled.step --devices 8 --sharding full  # Fully sharded (FSDP) over a host.
    python -m benchmarks.compiled.step --devices 256 --sharding data --reduce-dtype float32

The step is loss, gradients, loss scale and AdamW, donated. `by hand` casts parameters and logits. `policy` is
`jmp_lite.linen.with_policy`. Nothing is run: the figures are those of the compiled program.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmp_lite as jmp
from benchmarks.command import make_parser, write_json
from benchmarks.compiled.gpt import CASTS, Loss, gpt, gpt_loss
from benchmarks.compiled.h100 import compile_for_gpu, gpu_mesh
from examples.models.gpt2 import GPT2
from jmp_lite.programs import Program, read_program


def fully_sharded(x: jax.ShapeDtypeStruct, devices: int) -> PartitionSpec:
    """Splits the longest axis over all devices, except for tiny arrays."""
    axis = max(range(len(x.shape)), key=lambda axis: x.shape[axis], default=0)
    fits = x.size >= 2**14 and x.shape[axis] % devices == 0
    return PartitionSpec(*(None,) * axis, "data") if fits else PartitionSpec()


def training_step(
    model: GPT2, loss: Loss, batch: int, length: int, mesh: Mesh | None = None, full: bool = False
) -> tuple[Program, Any]:
    """Compiles a loss-scaled AdamW step and reads the program.

    Args:
        model: the transformer.
        loss: from `gpt_loss`.
        batch, length: the shape of the tokens of all devices together.
        mesh: with an axis `data`, over which the batch is split; None for one device.
        full: whether parameters and optimizer state are split as well.

    Returns:
        The program and the shapes of the parameters.
    """
    tx = jmp.with_loss_scale(optax.adamw(3e-4))
    tokens: Any = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    state = (params, jax.eval_shape(tx.init, params))
    if mesh is not None:
        on_mesh = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        tokens = on_mesh(tokens, PartitionSpec("data"))
        if full:
            state = jax.tree.map(lambda x: on_mesh(x, fully_sharded(x, mesh.devices.size)), state)

    def step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jmp.value_and_grad(loss, jmp.get_loss_scale(opt_state))(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return read_program(compile_for_gpu(step, *state, tokens, donate_argnums=(0, 1), mesh=mesh)), params


def moved(program: Program, *kinds: str) -> dict[str, int]:
    """Returns the bytes that one device sends into collectives of the given kinds, by dtype."""
    found: dict[str, int] = {}
    for collective in program.collectives:
        for array in collective.arrays if collective.kind in kinds else ():
            found[array.dtype] = found.get(array.dtype, 0) + array.size * collective.times
    return found


def row(casts: str, program: Program) -> str:
    """Returns one line of the table."""
    gemms = sum(product.times for product in program.matmuls)
    collectives = "".join(
        f"  {kind} {size / 1e6:.2f} MB {dtype}"
        for kind in dict.fromkeys(each.kind for each in program.collectives)
        for dtype, size in moved(program, kind).items()
    )
    return (
        f"{casts:10}{gemms:>9}{program.tensor_core_share:>8.1%}{program.kernels:>9,}"
        f"{program.bytes_moved / 1e6:>12,.0f}{program.temporary_bytes / 1e6:>10,.0f}{collectives}"
    )


def main() -> None:
    """Compiles the steps asked for, prints a line or a report of each and writes them as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--casts", nargs="*", choices=CASTS, default=list(CASTS))
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--devices", type=int, default=1, help="how many GPUs: 1 to 8, or a multiple of 8")
    parser.add_argument("--sharding", choices=["data", "full"], default="data")
    parser.add_argument("--reduce-dtype", choices=["float32"], help="for policy")
    parser.add_argument("--batch", type=int, default=8, help="sequences a device")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--report", action="store_true", help="print every kind of product")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("out/step.json"))
    options = parser.parse_args()
    model = gpt(options.vocabulary, options.length, options.width, options.layers)
    mesh = gpu_mesh({"data": options.devices}) if options.devices > 1 else None
    found: dict[str, Any] = {"jax": jax.__version__, **{k: str(v) for k, v in vars(options).items()}}
    print(f"{'casts':10}{'matmuls':>9}{'half':>8}{'kernels':>9}{'MB moved':>12}{'MB temp':>10}  collectives")
    for casts in options.casts:
        loss = gpt_loss(model, casts, jnp.dtype(options.dtype), options.reduce_dtype)
        batch = options.batch * options.devices
        program, _ = training_step(model, loss, batch, options.length, mesh, options.sharding == "full")
        print(row(casts, program), flush=True)
        if options.report:
            print(program, end="\n\n")
        found[casts] = dataclasses.asdict(program) | {"tensor_core_share": program.tensor_core_share}
    write_json(options.json, found)
    print(f"jax {jax.__version__}; written to {options.json}")


if __name__ == "__main__":
    main()

"""The error of gradients with a residual stream in half, before training and at its end.

    python -m benchmarks.compiled.half_stream              # Three depths, two dtypes: two minutes.

Residual blocks with layer norms learn scanned digits in float32. Then the gradients of one batch are computed
in half precision, in three ways, and compared with those in float32. In float16 the loss is scaled.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp
from benchmarks.command import make_parser
from benchmarks.compiled.deep import block_of
from examples.models.data import digits

WIDTH, SCALE = 64, 2.0**12


def loss_of(dtype: Any = None) -> Any:
    """Returns the loss of a stack of blocks; with a dtype, cast by hand."""
    cast, block = block_of(dtype)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = jax.lax.scan(block, cast(images) @ cast(params["first"]), params["stack"])[0]
        logits = (x @ cast(params["head"])).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


def errors(depth: int, dtype: Any, steps: int) -> tuple[float, dict[str, float]]:
    """Trains a stack of some depth. Returns its loss, and the relative error of each way's gradients."""
    keys = jax.random.split(jax.random.key(depth), 4)
    normal = lambda key, *shape: jax.random.normal(key, shape)
    params = {
        "first": normal(keys[0], WIDTH, WIDTH) / 8,
        "stack": (
            normal(keys[1], depth, WIDTH, 2 * WIDTH) / WIDTH**0.5,
            normal(keys[2], depth, 2 * WIDTH, WIDTH) / (2 * WIDTH * depth) ** 0.5,
        ),
        "head": normal(keys[3], WIDTH, 10) / WIDTH**0.5,
    }
    images, labels = digits()
    batch = jnp.asarray(images[:512].reshape(-1, WIDTH)), jnp.asarray(labels[:512])
    tx = optax.adam(1e-3)

    @jax.jit
    def train(params: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            updates, state = tx.update(jax.grad(loss_of())(carry[0], *batch), carry[1])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), length=steps)[0][0]

    params = train(params)

    def gradient(loss: Any) -> jax.Array:
        scaled = lambda params: loss(params, *batch) * SCALE
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(jax.jit(jax.grad(scaled))(params))])

    exact = gradient(loss_of())
    ways = {
        "autocast": jmp.autocast(loss_of(), dtype),
        "half_sums": jmp.autocast(loss_of(), dtype, half_sums="**"),
        "by hand": loss_of(dtype),
    }
    norm = jnp.linalg.norm
    found = {way: float(norm(gradient(loss) - exact) / norm(exact)) for way, loss in ways.items()}
    return float(loss_of()(params, *batch)), found


def main() -> None:
    """Prints a row for each dtype, depth and length of training."""
    make_parser(__doc__).parse_args()
    print('| | layers | loss | autocast | `half_sums="**"` | by hand |')
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for dtype in (jnp.bfloat16, jnp.float16):
        for depth in (8, 32, 80):
            for steps in (0, 100):
                loss, found = errors(depth, dtype, steps)
                cells = " | ".join(f"{each:.1e}" for each in found.values())
                print(f"| {jnp.dtype(dtype).name} | {depth} | {loss:.1e} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

"""What a loss scale costs an optimizer step on a CPU, beside the peers.

    taskset -c 0 python -m benchmarks.timed.optimizer_step       # Half a minute.
    taskset -c 0 python -m benchmarks.timed.optimizer_step --eager --leaves 1000 --width 8
    taskset -c 0 python -m benchmarks.timed.optimizer_step --leaves 44 --width 4 --blocks 200  # The host.

Each arm unscales float16 gradients, checks them, takes a step of AdamW and adds the updates. Parameters and
state are donated. With `--eager` the step runs without `jax.jit`. The arms take turns, and their times are
the CPU time of the process.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.arms.loss_scalers import PEERS, SCALE, step_of, with_gradients
from benchmarks.command import make_parser
from benchmarks.device import versions
from benchmarks.timed.interleaved import machine, milliseconds


def arm(name: str, leaves: int, width: int, eager: bool) -> Callable[[], None]:
    """Returns a function that takes a step of one arm and waits for it."""
    shape = (width, width)
    params = {f"layer_{index}": jnp.full(shape, 0.01) for index in range(leaves)}
    grads = {
        name: SCALE * 1e-6 * jax.random.normal(jax.random.key(index), shape, jnp.float16)
        for index, name in enumerate(params)
    }
    scaler = PEERS[name](optax.adamw(3e-4))
    step = step_of(scaler, with_gradients)
    if not eager:
        step = jax.jit(step, donate_argnums=(0, 1))
    carry: list[Any] = [params, scaler.init(params, SCALE)]

    def take() -> None:
        carry[:] = step(*carry, grads)
        jax.block_until_ready(carry)

    return take


def table(times: dict[str, float]) -> str:
    """Returns the times as text."""
    lines = [f"{'':22}{'ms':>9}{'of plain':>10}{'of jmp':>9}"]
    for name, time in times.items():
        lines.append(f"{name:22}{time:>9.3g}{time / times['plain']:>10.2f}{time / times['jmp 0.0.4']:>9.2f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--leaves", type=int, default=10)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--eager", action="store_true", help="run each operation by itself, without jax.jit")
    options = parser.parse_args(arguments)
    steps = {name: arm(name, options.leaves, options.width, options.eager) for name in PEERS}
    print(f"AdamW, {options.leaves} leaves of {options.width} x {options.width}, float16 gradients")
    print(table(milliseconds(steps, options.blocks, 4)))
    print(f"{machine()}; jax {versions()['jax']}")


if __name__ == "__main__":
    main()

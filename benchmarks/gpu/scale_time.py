"""The time of an optimizer step with each library's loss scale: AdamW on 124 leaves, float16 gradients.

    python -m benchmarks.gpu.scale_time
    python -m benchmarks.gpu.scale_time --width 8 --steps 3     # Anywhere: shows that it works.

It is the case `adamw` of `benchmarks.compiled.loss_scale_cost`, which counts kernels and bytes. All arms are
in one process and take turns: a block of steps of one, a block of steps of the next. A ratio compares two
blocks of one turn.
"""

import importlib.util
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.arms.loss_scalers import SCALE, SCALERS, step_of, with_gradients
from benchmarks.command import make_parser, write_json
from benchmarks.compiled.loss_scale_cost import many_leaves
from benchmarks.device import clocks, device_name, versions
from benchmarks.gpu.turns import take_turns
from jmp_lite.programs import read_program


class Arm:
    """An optimizer step with the loss scale of one library.

    Args:
        name: one of `SCALERS`.
        shapes: the shapes of the parameters.
    """

    def __init__(self, name: str, shapes: Any):
        scaler = SCALERS[name](optax.adamw(3e-4))
        params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
        self.grads = jax.tree.map(lambda x: jnp.full(x.shape, 1e-3, jnp.float16), shapes)
        self.state = params, scaler.init(params, SCALE)
        step = jax.jit(step_of(scaler, with_gradients), donate_argnums=(0, 1))
        self.run = step.lower(*self.state, self.grads).compile()

    def step(self) -> Any:
        """Takes a step, and returns the new state."""
        self.state = self.run(*self.state, self.grads)
        return self.state


def measure(shapes: Any, steps: int, blocks: int) -> dict[str, Any]:
    """Times all arms in turn, and returns the figures of each; an error where a library is not installed."""
    found: dict[str, Any] = {}
    arms = {}
    for name in SCALERS:
        if name.startswith("jmp 0") and importlib.util.find_spec("jmp") is None:
            found[name] = {"error": "not installed: jmp"}
        else:
            arms[name] = Arm(name, shapes)
    timed = take_turns({name: arm.step for name, arm in arms.items()}, steps, blocks)
    for name, arm in arms.items():
        low, middle, high = statistics.quantiles(timed[name], n=4, method="inclusive")
        times = [ours / plain for ours, plain in zip(timed[name], timed["plain"])]
        program = read_program(arm.run)
        found[name] = {
            "ms": middle,
            "ms_quartiles": [low, high],
            "ms_blocks": timed[name],
            "times_plain": statistics.median(times),
            "kernels": program.kernels,
            "bytes_moved": program.bytes_moved,
        }
    return {name: found[name] for name in SCALERS}


def table(found: dict[str, Any]) -> str:
    """Returns the table of the arms as text."""
    lines = [f"{'':24}{'ms':>9}{'quartiles':>18}{'x plain':>9}{'kernels':>9}"]
    for name, each in found["arms"].items():
        if "error" in each:
            lines.append(f"{name:24}{each['error']}")
            continue
        low, high = each["ms_quartiles"]
        lines.append(
            f"{name:24}{each['ms']:>9.3f}{f'{low:.3f}-{high:.3f}':>18}"
            f"{each['times_plain']:>9.3f}{each['kernels']:>9}"
        )
    return "\n".join(lines)


def main() -> None:
    """Times the arms, prints the table and writes it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--width", type=int, default=1024, help="of the 62 matrices, which have 768 columns")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("out/scale_time.json"))
    options = parser.parse_args()
    shapes = many_leaves(options.width)
    found: dict[str, Any] = {"device": device_name(), "versions": versions(), "width": options.width}
    found["arms"] = measure(shapes, options.steps, options.blocks)
    found["clocks"] = clocks()
    write_json(options.json, found)
    print(table(found))


if __name__ == "__main__":
    main()

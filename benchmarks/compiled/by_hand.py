"""What a transformer's training step moves on an H100 beside casts by hand, in bfloat16.

    python -m benchmarks.compiled.by_hand                 # GPT-2 small and BERT base, four ways: 8 minutes.
    python -m benchmarks.compiled.by_hand gpt2-small

`by hand` casts the parameters and inputs before the model, and its outputs back to float32, as programs for
jmp do. It sums the gradients of biases and embeddings in half. The step is donated and has no loss scale.
Nothing is run: the figures are those of the compiled programs.
"""

from typing import Any

import jax
import jax.numpy as jnp

import jmp_lite as jmp
from benchmarks.arms.jax_arms import JaxArm
from benchmarks.command import make_parser
from benchmarks.compiled.h100 import compile_for_gpu
from examples.models import FAMILIES
from jmp_lite.linen import with_policy
from jmp_lite.programs import Program, read_program

POLICY = jmp.Policy(jnp.float32, jnp.bfloat16, jnp.float32)
WAYS: dict[str, dict[str, Any]] = {
    "by hand": {},
    "`with_policy`": {},
    "`autocast`": {},
    '`autocast`, `half_sums="**"`': {"half_sums": "**"},
}


class Step(JaxArm):
    """The training step of a family in bfloat16, with casts in one of `WAYS`."""

    def __init__(self, family: str, way: str) -> None:
        workload = FAMILIES[family].full()
        super().__init__("bfloat16", workload, workload.batch_size)
        self.way = way

    def loss(self, params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
        """Returns the loss, and new statistics."""
        model = self.workload.model
        model = with_policy(model, POLICY) if self.way == "`with_policy`" else model

        def plain(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
            inputs, targets = batch
            if self.way == "by hand":
                params, inputs = POLICY.cast_to_compute((params, inputs))
            outputs, new = model.apply({"params": params, **statistics}, *inputs, mutable=list(statistics))
            return self.workload.loss(POLICY.cast_to_output(outputs), targets), new

        is_autocast = "autocast" in self.way
        fun = jmp.autocast(plain, jnp.bfloat16, **WAYS[self.way]) if is_autocast else plain
        return fun(params, statistics, batch)


def program(family: str, way: str) -> Program:
    """Compiles the training step of a family for an H100."""
    step = Step(family, way)
    return read_program(compile_for_gpu(step.step, *step.shapes(), donate_argnums=0, pretend=True))


def main() -> None:
    """Prints a row for each family and way."""
    parser = make_parser(__doc__)
    parser.add_argument("families", nargs="*", default=["gpt2-small", "bert-base"], help="of examples/models")
    print("| | | GB moved | of casts by hand | temporaries GB |")
    print("| --- | --- | ---: | ---: | ---: |")
    for family in parser.parse_args().families:
        found = {way: program(family, way) for way in WAYS}
        for way, each in found.items():
            share = each.bytes_moved / found["by hand"].bytes_moved
            cells = f"{each.bytes_moved / 1e9:.1f} | {share:.3f} | {each.temporary_bytes / 1e9:.2f}"
            print(f"| {family} | {way} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

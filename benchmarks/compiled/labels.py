"""What the loss of a language model costs by how it reads its labels, on an H100.

    python -m benchmarks.compiled.labels                   # Three losses, three ways: four minutes.
    python -m benchmarks.compiled.labels "integer labels"

The program is the loss and the gradients of GPT-2 small in bfloat16, with an attention that stores half
scores. Nothing is run: the figures are those of the compiled programs. `by hand` casts the parameters, and
the logits to float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp
from benchmarks.command import make_parser
from benchmarks.compiled.attention import BF16, POLICY, half_scores_attention
from benchmarks.compiled.gpt import gpt
from benchmarks.compiled.h100 import compile_for_gpu
from jmp_lite.programs import Program, read_program


def one_hot(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1]))


def looked_up(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)


LOSSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "one-hot labels": one_hot,
    "integer labels": optax.softmax_cross_entropy_with_integer_labels,
    "`log_softmax` and `take_along_axis`": looked_up,
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "by hand": lambda loss: jax.value_and_grad(lambda p, tokens: loss(POLICY.cast_to_compute(p), tokens)),
    "`grad(autocast)`": lambda loss: jax.value_and_grad(jmp.autocast(loss, BF16)),
    "`autocast(grad)`": lambda loss: jmp.autocast(jax.value_and_grad(loss), BF16),
}


def program(loss: str, way: str, **sizes: int) -> Program:
    """Compiles the loss and gradients of a GPT-2 with one of `LOSSES`, in one of `WAYS`, for an H100."""
    model = gpt(**sizes).clone(attention=half_scores_attention)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, tokens)
        return LOSSES[loss](logits[:, :-1].astype(jnp.float32), tokens[:, 1:]).mean()

    tokens = jax.ShapeDtypeStruct((8, model.length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return read_program(compile_for_gpu(WAYS[way](loss_fn), params, tokens, pretend=True))


def main() -> None:
    """Prints a row for each loss and each way."""
    parser = make_parser(__doc__)
    parser.add_argument("losses", nargs="*", default=list(LOSSES), help="of the table's first column")
    print("| | | GB moved | temporaries GB |\n| --- | --- | ---: | ---: |")
    for loss in parser.parse_args().losses:
        for way in WAYS:
            found = program(loss, way)
            cells = f"{found.bytes_moved / 1e9:.1f} | {found.temporary_bytes / 1e9:.2f}"
            print(f"| {loss} | {way} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

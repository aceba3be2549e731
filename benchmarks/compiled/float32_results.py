"""The cost of float32 logits on an H100, and their accuracy: `autocast(..., float32_results="head")`.

    python -m benchmarks.compiled.float32_results

The head of a language model: 8,192 tokens, 1,024 channels, 32,768 words; the loss and both gradients. The
bytes and products are those of the program that XLA compiles for an H100. The errors of the log probabilities
are computed here, on 256 tokens: logits of a standard deviation of 16, beside float64.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_lite as jmp
from jmp_lite._dtypes import DTypeName
from jmp_lite.programs import Program, compile_for, read_program

TOKENS, CHANNELS, WORDS = 8192, 1024, 32768
ARMS = {
    "half logits": {},
    'float32_results="head"': {"float32_results": "head"},
    'rules={"head": "float32"}': {"rules": {"head": "float32"}},
}


def logits_of(params: jax.Array, hidden: jax.Array) -> jax.Array:
    """Returns the logits."""
    with jax.named_scope("head"):
        return hidden @ params


def loss_fn(params: jax.Array, hidden: jax.Array, words: jax.Array) -> jax.Array:
    """Returns the mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, hidden), words).mean()


@dataclasses.dataclass
class Row:
    """The result of one arm: its program, and the largest error of a log probability."""

    program: Program
    error: float


def measure(arm: str, half: DTypeName = "bfloat16") -> Row:
    """Compiles and computes one arm."""
    shapes = (
        jax.ShapeDtypeStruct((CHANNELS, WORDS), jnp.float32),
        jax.ShapeDtypeStruct((TOKENS, CHANNELS), jnp.float32),
        jax.ShapeDtypeStruct((TOKENS,), jnp.int32),
    )
    grads = jax.grad(jmp.autocast(loss_fn, half, **ARMS[arm]), (0, 1))
    return Row(read_program(compile_for("h100", jax.jit(grads), *shapes)), log_probability_error(arm, half))


def log_probability_error(arm: str, half: DTypeName) -> float:
    """Returns the largest error of a log probability, of operands that half holds."""
    rng = np.random.default_rng(0)
    rounded = lambda *shape: np.asarray(rng.normal(size=shape), half).astype(np.float64)
    params, hidden = rounded(CHANNELS, 1024) / 2, rounded(256, CHANNELS)
    found = jmp.autocast(lambda w, h: jax.nn.log_softmax(logits_of(w, h)), half, **ARMS[arm])(
        jnp.asarray(params, jnp.float32), jnp.asarray(hidden, jnp.float32)
    )
    logits = hidden @ params
    top = logits.max(-1, keepdims=True)
    exact = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return float(np.abs(np.asarray(found) - exact).max())


def table(rows: dict[str, Row]) -> str:
    """Returns the table of the arms."""
    lines = [f"{'':27}{'matmuls':>16}{'GB moved':>10}{'MB held':>9}{'error of log p':>16}"]
    for arm, row in rows.items():
        products = {product.arithmetic for product in row.program.matmuls}
        kinds = f"{len(row.program.matmuls)} {', '.join(sorted(products))}"
        held = row.program.temporary_bytes / 1e6
        lines.append(f"{arm:27}{kinds:>16}{row.program.bytes_moved / 1e9:10.2f}{held:9,.0f}{row.error:16.1e}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table({arm: measure(arm) for arm in ARMS}))

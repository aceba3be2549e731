"""What each pass of autocast adds: the table of docs/how-autocast-works.md.

    python -m benchmarks.compiled.passes                # About a minute; nothing needs a GPU.

The command compiles a transformer of 4 layers and width 512 for an H100. It reports the bytes that kernels
move and the memory beside the arguments, with and without a `jax.checkpoint` around each layer. The gradient
error is that of a classifier of scikit-learn's digits in float16 with a loss scale, relative to float32, at
parameters that were trained in float32 to a loss of 1e-4. The rows are the short autocast of the page, and
the library with the first passes of `PASSES`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits

import jmp_lite as jmp
from benchmarks.compiled.h100 import compile_for_gpu
from jmp_lite._autocast import planner
from jmp_lite._dtypes import DTypeName
from jmp_lite.programs import Program, read_program

PAGE = Path(__file__).parents[2] / "docs" / "how-autocast-works.md"
WIDTH, HEADS, LENGTH, BATCH, LAYERS, VOCABULARY = 512, 8, 512, 8, 4, 8192
TARGET, SCALE = 1e-4, 2.0**14

Autocast = Callable[[Callable[..., Any], DTypeName], Callable[..., Any]]


def short_autocast() -> Autocast:
    """Returns the autocast of the page."""
    namespace: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), namespace)
    return namespace["autocast"]


def first_passes(count: int) -> Autocast:
    """Returns the autocast of the library with the first passes only."""

    def cut(fun: Callable[..., Any], half: DTypeName) -> Callable[..., Any]:
        inside = jmp.autocast(fun, half)

        def run(*args: Any) -> Any:
            with mock.patch.object(planner, "PASSES", planner.PASSES[:count]):
                return inside(*args)

        return run

    return cut


def transformer(checkpointed: bool, layers: int = LAYERS) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the loss of a transformer, and abstract arguments for it."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    sizes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    sizes |= {"bias": (4 * WIDTH,), "gain": (WIDTH,), "gain2": (WIDTH,)}
    stack = [{name: array(*shape) for name, shape in sizes.items()} for _ in range(layers)]
    norm = lambda x, gain: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain

    def layer(x: jax.Array, p: Any) -> jax.Array:
        heads = lambda y: y.reshape(BATCH, LENGTH, HEADS, WIDTH // HEADS)
        q, k, v = map(heads, jnp.split(norm(x, p["gain"]) @ p["qkv"], 3, -1))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(WIDTH // HEADS)
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9))
        x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x, p["gain2"]) @ p["up"] + p["bias"]) @ p["down"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embedding"][tokens]
        for p in params["layers"]:
            x = (jax.checkpoint(layer) if checkpointed else layer)(x, p)
        logits = x @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    params = {"embedding": array(VOCABULARY, WIDTH), "layers": stack}
    return loss, (params, jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32))


def program(autocast: Autocast | None, checkpointed: bool, layers: int = LAYERS) -> Program:
    """Returns the program of the gradients of a transformer."""
    loss, args = transformer(checkpointed, layers)
    return read_program(compile_for_gpu(jax.grad(autocast(loss, "bfloat16") if autocast else loss), *args))


def megabytes(autocast: Autocast | None) -> tuple[float, float, float]:
    """Returns the bytes moved, the temporary bytes, and those with checkpoints, in megabytes."""
    plain, checkpointed = (program(autocast, each) for each in (False, True))
    return plain.bytes_moved / 1e6, plain.temporary_bytes / 1e6, checkpointed.temporary_bytes / 1e6


def fitted() -> tuple[Callable[[Any], jax.Array], Any]:
    """Returns the loss of a classifier of digits as a function of its parameters, and fitted parameters."""
    images, labels = (jnp.asarray(x) for x in load_digits(return_X_y=True))
    images, labels = images[:512].astype(jnp.float32) / 16, labels[:512]
    shapes = {"first": (64, 64), "second": (64, 10)}
    params = {name: 0.1 * jax.random.normal(jax.random.key(0), shape) for name, shape in shapes.items()}

    def loss(p: Any) -> jax.Array:
        logits = jnp.tanh(images @ p["first"]) @ p["second"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    tx = optax.adam(1e-2)

    def step(state: Any) -> Any:
        params, opt_state, _ = state
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    start = params, tx.init(params), jnp.float32(jnp.inf)
    return loss, jax.jit(lambda s: lax.while_loop(lambda s: s[2] > TARGET, step, s))(start)[0]


def gradient_error(autocast: Autocast, loss: Callable[[Any], jax.Array], params: Any) -> float:
    """Returns the relative error of the gradient in float16."""
    scaled = lambda p: loss(p) * SCALE
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    expected = flat(jax.grad(scaled)(params))
    found = flat(jax.grad(autocast(scaled, "float16"))(params))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def highest_matmuls(autocast: Autocast) -> int:
    """Returns how many of two float32 matmuls have the precision of `jax_default_matmul_precision`."""
    kept = jmp.full_precision(lambda w: w @ w @ w)
    with jax.default_matmul_precision("highest"):
        text = str(jax.make_jaxpr(autocast(lambda w: jnp.sum(kept(w) @ w), "bfloat16"))(jnp.eye(8)))
    return text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")


def rows() -> list[tuple[str, ...]]:
    """Returns the rows of the table, measured now."""
    names = [each.__name__ for each in planner.PASSES]
    ways: dict[str, Autocast | None] = {
        "float32": None,
        "this page": short_autocast(),
        "the decision": first_passes(0),
        **{f"with `{name}`": first_passes(count) for count, name in enumerate(names, 1)},
    }
    loss, params = fitted()
    found = []
    for name, autocast in ways.items():
        numbers = [f"{x:.0f}" for x in megabytes(autocast)]
        if autocast is None:
            numbers += ["0", "2"]
        else:
            numbers += [
                f"{100 * gradient_error(autocast, loss, params):.2f} %",
                f"{highest_matmuls(autocast)}",
            ]
        found.append((name, *numbers))
    return found


def main() -> None:
    """Prints the table."""
    head = ("", "MB moved", "MB held", "MB held, checkpoints", "gradient error", "matmuls at `highest`")
    for row in (head, ("---",) * len(head), *rows()):
        print("|", " | ".join(row), "|")


if __name__ == "__main__":
    main()

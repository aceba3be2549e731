"""The error of the gradient from the start of training to its end, in both orders and with casts by hand.

    python -m benchmarks.timed.fitted          # A minute.

A GPT of two layers with a tied head learns a few lines of the standard library by heart, in float32. Each
time its loss has fallen to the next power of ten, the gradient of the loss is computed in half precision and
compared with float32's. The number of predicted bytes is no power of two, since 1/N would be exact in half.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_lite as jmp
from jmp_lite._dtypes import DTypeName

WIDTH, LAYERS, LENGTH, LINES = 128, 2, 24, 7
TARGETS = (1.0, 0.1, 1e-2, 1e-3, 1e-4)
SCALE: dict[DTypeName, float] = {"float16": 2.0**12, "bfloat16": 1.0}
# XLA would keep the float32 results of some products that the program rounds, on a CPU alone.
OPTIONS = {"xla_allow_excess_precision": False}


def text() -> np.ndarray:
    """Returns lines of the standard library that begin with different bytes, shape `(LINES, LENGTH + 1)`."""
    source = Path(argparse.__file__).read_bytes().splitlines()
    first = {line.strip()[:1]: line.strip() for line in source if len(line.strip()) > LENGTH}
    return np.stack([np.frombuffer(line[: LENGTH + 1], np.uint8) for line in list(first.values())[:LINES]])


def init(key: jax.Array) -> Any:
    """Returns the parameters, float32."""
    keys = iter(jax.random.split(key, 2 + 6 * LAYERS))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * shape[0] ** -0.5
    square = ("query", "key", "value", "out")
    layers = [
        {name: normal(WIDTH, WIDTH) for name in square}
        | {"up": normal(WIDTH, 4 * WIDTH), "down": normal(4 * WIDTH, WIDTH)}
        for _ in range(LAYERS)
    ]
    return {"bytes": normal(256, WIDTH), "positions": normal(LENGTH, WIDTH), "layers": layers}


def loss(params: Any, tokens: jax.Array, half: Any = None) -> jax.Array:
    """Returns the mean cross entropy in nats.

    Args:
        params: the parameters.
        tokens: bytes, shape `(lines, LENGTH + 1)`.
        half: a dtype for casts by hand; None for the plain program.
    """
    cast = (lambda x: x) if half is None else (lambda x: x.astype(half))
    wide = lambda x: x.astype(jnp.float32)

    def norm(x: jax.Array) -> jax.Array:
        x = x - x.mean(-1, keepdims=True)
        return cast(x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5))

    x = params["bytes"][tokens[:, :-1]] + params["positions"]
    for layer in params["layers"]:
        layer = jax.tree.map(cast, layer)
        y = norm(x)
        query, key, value = y @ layer["query"], y @ layer["key"], y @ layer["value"]
        scores = wide(jnp.einsum("btd,bsd->bts", query, key)) * WIDTH**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
        weights = cast(jax.nn.softmax(scores))
        x = x + wide(jnp.einsum("bts,bsd->btd", weights, value) @ layer["out"])
        x = x + wide(cast(jax.nn.gelu(wide(norm(x) @ layer["up"]))) @ layer["down"])
    logits = wide(norm(x) @ cast(params["bytes"]).T)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def fitted(tokens: jax.Array) -> Iterator[tuple[float, Any]]:
    """Yields the loss and the parameters at the start and each time that the loss has reached a target."""
    params, tx = init(jax.random.key(0)), optax.adam(3e-3)
    opt_state = tx.init(params)

    @jax.jit
    def step(params: Any, opt_state: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state)
        return value, optax.apply_updates(params, updates), opt_state

    yield float(loss(params, tokens)), params
    targets = list(TARGETS)
    for _ in range(20_000):
        value, new_params, opt_state = step(params, opt_state)
        if value <= targets[0]:
            yield float(value), params
            targets.pop(0)
        if not targets:
            return
        params = new_params


def errors(params: Any, tokens: jax.Array, dtype: DTypeName) -> list[float]:
    """Returns the relative errors of the gradient: `grad(autocast)`, `autocast(grad)`, and casts by hand."""
    scale = SCALE[dtype]
    scaled = lambda params: loss(params, tokens) * scale
    arms: list[Callable[..., Any]] = [
        jax.grad(scaled),
        jax.grad(jmp.autocast(scaled, dtype)),
        jmp.autocast(jax.grad(scaled), dtype),
        jax.grad(lambda params: loss(params, tokens, dtype) * scale),
    ]
    runs = [jax.jit(arm, compiler_options=OPTIONS)(params) for arm in arms]
    exact, *found = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(run)]) for run in runs)
    return [float(np.linalg.norm(each - exact) / np.linalg.norm(exact)) for each in found]


def table() -> str:
    """Returns the table of docs/accuracy.md."""
    tokens = jnp.asarray(text(), jnp.int32)
    orders = ("`grad(autocast)`", "`autocast(grad)`", "by hand")
    names = [f"{dtype} {order}" for dtype in SCALE for order in orders]
    lines = [f"| float32 loss | {' | '.join(names)} |", "| --- " * (1 + len(names)) + "|"]
    for value, params in fitted(tokens):
        found = [error for dtype in SCALE for error in errors(params, tokens, dtype)]
        lines.append(f"| {value:.1e} | {' | '.join(f'{error:.1e}' for error in found)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

"""Writes a page with the source of a model, line by line, and the dtype in which each line runs.

    python examples/precision.py

The model is a transformer of 71 million parameters. Nothing is computed, so the command takes a few seconds
on a CPU. A rule keeps the scores of the attention in float32, to show what such a line looks like. With
`--pictures docs`, a headless Chromium draws the pictures of the README.
"""

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from PIL import Image

import jmp_lite as jmp


class Block(nn.Module):
    """Attention and two matmuls, each with a norm before it and a sum after it."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm()(x)
        y = nn.Dense(3 * self.width)(y)
        y = y.reshape(*x.shape[:2], self.heads, -1)
        q, k, v = jnp.split(y, 3, axis=-1)
        with jax.named_scope("scores"):
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        scores = jnp.where(jnp.tri(x.shape[1]), scores / q.shape[-1] ** 0.5, -jnp.inf)
        weights = jax.nn.softmax(scores)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + nn.Dense(self.width)(y.reshape(x.shape))
        y = nn.LayerNorm()(x)
        y = nn.gelu(nn.Dense(4 * self.width)(y))
        return x + nn.Dense(self.width)(y)


class Transformer(nn.Module):
    """A decoder-only transformer.

    Attributes:
        vocabulary: the number of tokens.
        width, layers, heads: the size of the transformer.
    """

    vocabulary: int = 16384
    width: int = 1024
    layers: int = 3
    heads: int = 16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        for _ in range(self.layers):
            x = Block(self.width, self.heads)(x)
        x = nn.LayerNorm()(x)
        return nn.Dense(self.vocabulary, name="head")(x)


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy of the next tokens."""
    logits = cast(jax.Array, Transformer().apply(params, tokens[:, :-1]))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def draw(page: Path, folder: Path) -> None:
    """Draws the top of the page, light and dark."""
    for name, scheme in (("precision.png", 1), ("precision_dark.png", 0)):
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=1.25"]
        options += [f"--blink-settings=preferredColorScheme={scheme}", "--window-size=960,724"]
        options.append(f"--screenshot={folder.resolve() / name}")
        subprocess.run(["chromium", *options, page.resolve().as_uri()], check=True, capture_output=True)
        Image.open(folder / name).convert("RGB").quantize(64).save(folder / name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("out/precision.html"), help="the page (default: %(default)s)"
    )
    parser.add_argument("--pictures", type=Path, help="a folder for the pictures of the page")
    options = parser.parse_args(arguments)
    tokens = jax.ShapeDtypeStruct((32, 129), jnp.int32)
    params = jax.eval_shape(Transformer().init, jax.random.key(0), tokens)
    step = jmp.autocast(jax.value_and_grad(loss_fn), "float16", rules={"scores": "float32"})
    report = jmp.explain(step)(params, tokens)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    report.save(options.output)
    size = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6
    print(f"{size:.0f} million parameters; {report.summary()}\n{options.output}")
    if options.pictures:
        draw(options.output, options.pictures)


if __name__ == "__main__":
    main()

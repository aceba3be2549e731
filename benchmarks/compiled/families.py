"""What families of models beside the nine move on an H100, beside casts by hand, in bfloat16.

    python -m benchmarks.compiled.families                 # Six families, four ways: ten minutes.
    python -m benchmarks.compiled.families ViT GNN
    python -m benchmarks.compiled.families --errors        # Errors of gradients: small batches run here.

The program is the loss and its gradients; `by hand` casts the parameters and the inputs. Flax's layers with
`dtype=bfloat16` move the same bytes. Without `--errors` nothing is run: the figures are those of the compiled
programs.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_lite as jmp
from benchmarks.command import make_parser
from benchmarks.compiled.attention import BF16, POLICY
from benchmarks.compiled.h100 import compile_for_gpu
from jmp_lite.programs import Program, read_program

F32, I32 = jnp.float32, jnp.int32


class Attention(nn.Module):
    """Self attention with an optional bias of the scores; the softmax is in float32."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        split = lambda y: y.reshape(*y.shape[:2], self.heads, -1)
        query, key, value = (split(nn.Dense(x.shape[-1])(x)) for _ in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query * query.shape[-1] ** -0.5, key)
        scores = scores if bias is None else scores + bias
        weights = jax.nn.softmax(scores.astype(F32)).astype(value.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.Dense(x.shape[-1])(mixed.reshape(x.shape))


def feed_forward(x: jax.Array, act: Callable[[jax.Array], jax.Array] = nn.gelu) -> jax.Array:
    return nn.Dense(x.shape[-1])(act(nn.Dense(4 * x.shape[-1])(x)))


class ViT(nn.Module):
    """ViT-B/16: 196 patches and a class token."""

    layers: int = 12

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(768, (16, 16), (16, 16))(images).reshape(len(images), -1, 768)
        token = self.param("token", nn.initializers.zeros, (1, 1, 768))
        x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, 768)).astype(x.dtype), x], axis=1)
        x = x + self.param("places", nn.initializers.normal(0.02), (1, x.shape[1], 768)).astype(x.dtype)
        for _ in range(self.layers):
            x = x + Attention(12)(nn.LayerNorm()(x))
            x = x + feed_forward(nn.LayerNorm()(x))
        return nn.Dense(1000)(nn.LayerNorm()(x)[:, 0])


class T5(nn.Module):
    """An encoder with T5's relative position bias, shared by its layers."""

    layers: int = 6

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x, places = nn.Embed(32128, 768)(tokens), jnp.arange(tokens.shape[1])
        distance = jnp.clip(places[None] - places[:, None], -16, 15) + 16
        bias = nn.Embed(32, 12)(distance).transpose(2, 0, 1)[None]
        for _ in range(self.layers):
            x = x + Attention(12)(nn.RMSNorm()(x), bias)
            x = x + feed_forward(nn.RMSNorm()(x))
        return nn.Dense(32128, use_bias=False)(nn.RMSNorm()(x))


class Conformer(nn.Module):
    """Gulati et al. (2020), with a layer norm in its convolutions; log mel features to letters."""

    layers: int = 8

    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        x = features[..., None]
        for _ in range(2):
            x = nn.relu(nn.Conv(64, (3, 3), (2, 2))(x))
        x = nn.Dense(512)(x.reshape(*x.shape[:2], -1))
        for _ in range(self.layers):
            x = x + 0.5 * feed_forward(nn.LayerNorm()(x), nn.silu)
            x = x + Attention(8)(nn.LayerNorm()(x))
            y = nn.Conv(512, (31,), feature_group_count=512)(nn.glu(nn.Dense(1024)(nn.LayerNorm()(x))))
            x = x + nn.Dense(512)(nn.silu(nn.LayerNorm()(y)))
            x = nn.LayerNorm()(x + 0.5 * feed_forward(nn.LayerNorm()(x), nn.silu))
        return nn.Dense(1024)(x)


class UNet(nn.Module):
    """The U-Net of a diffusion model (Ho et al., 2020) without its attention: group norms and SiLUs."""

    widths: tuple[int, ...] = (128, 256, 256, 512)  # One for each resolution.
    layers: int = 2

    @nn.compact
    def __call__(self, images: jax.Array, times: jax.Array) -> jax.Array:
        times = nn.silu(nn.Dense(512)(times))
        x = nn.Conv(self.widths[0], (3, 3))(images)
        skips = [x]
        for level, width in enumerate(self.widths):
            if level:
                x = nn.Conv(x.shape[-1], (3, 3), (2, 2))(x)
                skips.append(x)
            for _ in range(self.layers):
                x = self._block(x, times, width)
                skips.append(x)
        for level, width in reversed(list(enumerate(self.widths))):
            for _ in range(self.layers + 1):
                x = self._block(jnp.concatenate([x, skips.pop()], axis=-1), times, width)
            if level:
                batch, height, across, features = x.shape
                x = jax.image.resize(x, (batch, 2 * height, 2 * across, features), "nearest")
                x = nn.Conv(features, (3, 3))(x)
        return nn.Conv(images.shape[-1], (3, 3))(nn.silu(nn.GroupNorm()(x)))

    def _block(self, x: jax.Array, times: jax.Array, width: int) -> jax.Array:
        y = nn.Conv(width, (3, 3))(nn.silu(nn.GroupNorm()(x))) + nn.Dense(width)(times)[:, None, None]
        y = nn.Conv(width, (3, 3))(nn.silu(nn.GroupNorm()(y)))
        return y + (x if x.shape[-1] == width else nn.Conv(width, (1, 1))(x))


class GNN(nn.Module):
    """A graph network: messages of edges are summed at nodes. Eight edges a node."""

    layers: int = 4

    @nn.compact
    def __call__(self, nodes: jax.Array, edges: jax.Array, senders: jax.Array, to: jax.Array) -> jax.Array:
        mlp = lambda x: nn.Dense(256)(nn.relu(nn.Dense(256)(x)))
        x, edges = nn.Dense(256)(nodes), nn.Dense(256)(edges)
        for _ in range(self.layers):
            messages = mlp(jnp.concatenate([x[senders], x[to], edges], axis=-1))
            x = x + mlp(jnp.concatenate([x, jax.ops.segment_sum(messages, to, len(x))], axis=-1))
        return nn.Dense(40)(x)


class Mamba(nn.Module):
    """Gu and Dao (2023), with `lax.associative_scan`. The recursion is in float32 in every way."""

    layers: int = 2

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(8192, 768)(tokens)
        for layer in range(self.layers):
            x = x + self._mix(nn.RMSNorm()(x), layer)
        return nn.Dense(8192, use_bias=False)(nn.RMSNorm()(x))

    def _mix(self, x: jax.Array, layer: int) -> jax.Array:
        u, gate = jnp.split(nn.Dense(3072, use_bias=False)(x), 2, axis=-1)
        u = nn.silu(nn.Conv(1536, (4,), padding=[(3, 0)], feature_group_count=1536)(u))
        step, into, out = jnp.split(nn.Dense(80, use_bias=False)(u), [48, 64], axis=-1)
        step = nn.softplus(nn.Dense(1536)(step)).astype(F32)
        decay = self.param(f"decay_{layer}", nn.initializers.ones, (1536, 16)).astype(F32)
        factors = jnp.exp(-step[..., None] * jnp.exp(decay))
        terms = (step * u.astype(F32))[..., None] * into.astype(F32)[:, :, None]
        combine = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
        states = jax.lax.associative_scan(combine, (factors, terms), axis=1)[1]
        y = jnp.einsum("blds,bls->bld", states, out.astype(F32)).astype(u.dtype)
        return nn.Dense(x.shape[-1], use_bias=False)((y + u) * nn.silu(gate))


def _classes(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _letters(logits: jax.Array, labels: jax.Array) -> jax.Array:
    none = lambda x: jnp.zeros(x.shape[:2])
    return optax.ctc_loss(logits, none(logits), labels, none(labels)).mean()


_S = jax.ShapeDtypeStruct
_EDGES = 8 * 16384
FAMILIES: dict[str, tuple[nn.Module, tuple[Any, ...], Any, Any]] = {
    "ViT": (ViT(), (_S((64, 224, 224, 3), F32),), _S((64,), I32), _classes),
    "T5": (T5(), (_S((16, 512), I32),), _S((16, 512), I32), _classes),
    "Conformer": (Conformer(), (_S((16, 1600, 80), F32),), _S((16, 64), I32), _letters),
    "GNN": (
        GNN(),
        (_S((16384, 128), F32), _S((_EDGES, 16), F32), _S((_EDGES,), I32), _S((_EDGES,), I32)),
        _S((16384,), I32),
        _classes,
    ),
    "U-Net": (
        UNet(),
        (_S((32, 64, 64, 3), F32), _S((32, 128), F32)),
        _S((32, 64, 64, 3), F32),
        lambda outputs, noise: jnp.mean(jnp.square(outputs - noise)),
    ),
    "Mamba": (Mamba(), (_S((2, 1024), I32),), _S((2, 1024), I32), _classes),
}
"""For each family: the model, its inputs, the labels, and the loss of its outputs and the labels."""

WAYS: dict[str, Callable[[Any], Any]] = {
    "by hand": lambda loss: jax.value_and_grad(
        lambda params, inputs, labels: loss(*POLICY.cast_to_compute((params, inputs)), labels)
    ),
    "autocast": lambda loss: jax.value_and_grad(jmp.autocast(loss, BF16)),
    'autocast, `half_sums="**"`': lambda loss: jax.value_and_grad(jmp.autocast(loss, BF16, half_sums="**")),
    "`autocast(grad)`": lambda loss: jmp.autocast(jax.value_and_grad(loss), BF16),
}


def program(family: str, way: str, **sizes: Any) -> Program:
    """Compiles the loss and gradients of one of `FAMILIES` in one of `WAYS` for an H100."""
    model, inputs, labels, _ = FAMILIES[family]
    model = model.clone(**sizes)
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    gradients = WAYS[way](_loss(family, model))
    return read_program(compile_for_gpu(gradients, params, inputs, labels, pretend=True))


def _loss(family: str, model: nn.Module) -> Callable[..., jax.Array]:
    def loss_fn(params: Any, inputs: Any, labels: jax.Array) -> jax.Array:
        outputs: Any = model.apply(params, *inputs)
        return FAMILIES[family][3](outputs.astype(F32), labels)

    return loss_fn


SMALL: dict[str, tuple[tuple[int, ...], ...]] = {
    "ViT": ((4, 224, 224, 3), (4,)),
    "T5": ((2, 128), (2, 128)),
    "Conformer": ((2, 400, 80), (2, 16)),
    "GNN": ((1024, 128), (8192, 16), (8192,), (8192,), (1024,)),
    "U-Net": ((2, 32, 32, 3), (2, 128), (2, 32, 32, 3)),
    "Mamba": ((1, 256), (1, 256)),
}
"""For each family, the shapes of the inputs and the labels of a batch that a CPU computes in seconds."""


def errors(family: str) -> list[float]:
    """Returns the error of the gradients of a small batch for each of `WAYS`, relative to those of float32.

    The parameters are initial ones, the inputs random. A difference is that of all gradients as one vector.
    """
    model, specs, label, _ = FAMILIES[family]
    loss_fn, generator = _loss(family, model), np.random.default_rng(0)
    # Labels of a GNN are 40 classes; its indices of nodes may be as small.
    largest = 40 if family == "GNN" else 1000

    def drawn(spec: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.Array:
        if jnp.issubdtype(spec.dtype, jnp.integer):
            return jnp.asarray(generator.integers(1, largest, shape), spec.dtype)
        return jnp.asarray(generator.normal(size=shape), spec.dtype)

    *inputs, labels = map(drawn, (*specs, label), SMALL[family])
    params = jax.jit(model.init)(jax.random.key(0), *inputs)

    def gradients(way: Callable[[Any], Any]) -> np.ndarray:
        leaves = jax.tree.leaves(jax.jit(way(loss_fn))(params, inputs, labels)[1])
        return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in leaves])

    true = gradients(jax.value_and_grad)
    return [float(np.linalg.norm(gradients(way) - true) / np.linalg.norm(true)) for way in WAYS.values()]


def main() -> None:
    """Prints a row for each family."""
    parser = make_parser(__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help="of the first column")
    parser.add_argument("--errors", action="store_true", help="the errors of the gradients of a small batch")
    arguments = parser.parse_args()
    title = "error of the gradients" if arguments.errors else "GB moved, and of by hand"
    print(f"| {title} | {' | '.join(WAYS)} |\n|{' --- |' * (len(WAYS) + 1)}")
    for family in arguments.families:
        if arguments.errors:
            print(f"| {family} | {' | '.join(f'{error:.2%}' for error in errors(family))} |", flush=True)
            continue
        found = [program(family, way).bytes_moved for way in WAYS]
        cells = (f"{each / 1e9:.1f} ({each / found[0]:.2f})" for each in found)
        print(f"| {family} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

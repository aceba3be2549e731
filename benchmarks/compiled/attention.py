"""What cuDNN's attention changes in transformers, as compiled for an H100.

    pip install nvidia-cudnn-cu13                       # 500 MB. XLA asks cuDNN for its kernels.
    python -m benchmarks.compiled.attention             # Three models, eight ways: six minutes.
    python -m benchmarks.compiled.attention --models gpt2

`fused` is `jmp.fuse_attention`, which leaves the model as it is. `by hand` is a bfloat16 model that calls
cuDNN's attention itself. The program is the loss and its gradients. Nothing is run: the figures are those of
the compiled programs, without the workspace that cuDNN allocates when it runs.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp
from benchmarks.arms.jax_arms import cudnn_attention
from benchmarks.command import make_parser
from benchmarks.compiled.gpt import gpt, gpt_loss
from benchmarks.compiled.h100 import compile_for_gpu
from examples.models.attention import attention
from examples.models.bert import BERT
from jmp_lite.programs import Program, read_program

HAS_CUDNN = bool(importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn"))
"""Whether cuDNN is installed."""


BF16 = jnp.bfloat16
POLICY = jmp.Policy(jnp.float32, BF16, jnp.float32)
Loss = Callable[[Any, Any], jax.Array]


def xla_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any = None, **settings: Any) -> jax.Array:
    """Calls the attention of `jax.nn`; `mask` has the shape (batch, keys)."""
    mask = None if mask is None else mask[:, None, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, **settings)


def own_cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Any = None, **settings: Any
) -> jax.Array:
    """Calls cuDNN's attention as a program for it does: half inputs, and a mask with all of its axes."""
    if mask is None:
        return cudnn_attention(BF16, q, k, v, **settings)
    half = (x.astype(BF16) for x in (q, k, v))
    whole = jnp.broadcast_to(mask[:, None, None], (mask.shape[0], 1, q.shape[1], k.shape[1]))
    return jax.nn.dot_product_attention(*half, mask=whole, implementation="cudnn", **settings).astype(q.dtype)


def half_scores_attention(q: jax.Array, k: jax.Array, v: jax.Array, **settings: Any) -> jax.Array:
    """Attends with scores that are stored in the dtype of the inputs; the one of `jax.nn` stores float32."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    return attention(q, k, v, **settings)


class Decoder(nn.Module):
    """A decoder with RMS norms, SwiGLU, and four heads of queries for each head of keys."""

    attention: Callable[..., jax.Array]
    vocabulary: int = 32000
    width: int = 1024
    layers: int = 8
    heads: int = 16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        dense = lambda size: nn.Dense(size, use_bias=False)
        features = self.width // self.heads
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        for _ in range(self.layers):
            h = nn.RMSNorm()(x)
            sizes = (self.width, self.width // 4, self.width // 4)
            qkv = (dense(size)(h).reshape(*h.shape[:2], -1, features) for size in sizes)
            x = x + dense(self.width)(self.attention(*qkv, is_causal=True).reshape(x.shape))
            h = nn.RMSNorm()(x)
            x = x + dense(self.width)(nn.silu(dense(3 * self.width)(h)) * dense(3 * self.width)(h))
        return dense(self.vocabulary)(nn.RMSNorm()(x))


def gpt2_model(attention: Callable[..., jax.Array], **sizes: Any) -> tuple[Loss, Any]:
    """GPT-2 small: its loss, and the shapes of its parameters and its batch."""
    model = gpt(**sizes).clone(attention=attention)
    return gpt_loss(model, "none", BF16), _shapes(model, jax.ShapeDtypeStruct((8, model.length), jnp.int32))


def bert_model(attention: Callable[..., jax.Array], **sizes: Any) -> tuple[Loss, Any]:
    """BERT base with a mask of the padding."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        of_batch = lambda *qkv, **settings: attention(*qkv, mask=tokens != 0, **settings)
        places = jnp.broadcast_to(jnp.arange(0, model.length, 8), (len(tokens), model.length // 8))
        logits: Any = model.clone(attention=of_batch).apply(params, tokens, places)
        labels = jax.nn.one_hot(jnp.take_along_axis(tokens, places, axis=1), model.vocabulary)
        return optax.softmax_cross_entropy(logits.astype(jnp.float32), labels).mean()

    model = BERT(**sizes)
    tokens = jax.ShapeDtypeStruct((16, model.length), jnp.int32)
    shapes = _shapes(model, tokens, jax.ShapeDtypeStruct((16, 8), jnp.int32))
    return loss, shapes


def decoder_model(attention: Callable[..., jax.Array], length: int = 2048, **sizes: Any) -> tuple[Loss, Any]:
    """A decoder with shared heads of keys."""
    model = Decoder(attention, **sizes)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        labels = jax.nn.one_hot(tokens[:, 1:], model.vocabulary)
        logits: Any = model.apply(params, tokens)
        logits = logits[:, :-1].astype(jnp.float32)
        return optax.softmax_cross_entropy(logits, labels).mean()

    return loss, _shapes(model, jax.ShapeDtypeStruct((4, length), jnp.int32))


def _shapes(model: nn.Module, tokens: Any, *rest: Any) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0), tokens, *rest), tokens


MODELS = {"gpt2": gpt2_model, "bert": bert_model, "decoder": decoder_model}


def _by_hand(loss: Loss) -> Loss:
    return lambda params, tokens: loss(POLICY.cast_to_compute(params), tokens)


HALF_SCORES = "by hand, XLA's attention, half scores"
WAYS: dict[str, tuple[Callable[..., jax.Array], Callable[[Loss], Any]]] = {
    "autocast": (xla_attention, lambda loss: jax.value_and_grad(jmp.autocast(loss))),
    "`autocast(grad)`": (xla_attention, lambda loss: jmp.autocast(jax.value_and_grad(loss))),
    "by hand, XLA's attention": (xla_attention, lambda loss: jax.value_and_grad(_by_hand(loss))),
    HALF_SCORES: (half_scores_attention, lambda loss: jax.value_and_grad(_by_hand(loss))),
    "by hand": (own_cudnn_attention, lambda loss: jax.value_and_grad(_by_hand(loss))),
    "fused": (xla_attention, lambda loss: jax.value_and_grad(jmp.autocast(jmp.fuse_attention(loss)))),
    'fused, `half_sums="**"`': (
        xla_attention,
        lambda loss: jax.value_and_grad(jmp.autocast(jmp.fuse_attention(loss), half_sums="**")),
    ),
    "fused, `autocast(grad)`": (
        xla_attention,
        lambda loss: jmp.autocast(jax.value_and_grad(jmp.fuse_attention(loss))),
    ),
}
"""Ways to run a model: the attention of the model, and what runs its loss and its gradients."""


def program(model: str, way: str, **sizes: Any) -> Program:
    """Compiles the loss and gradients of one of `MODELS` in one of `WAYS`, of other sizes than its own."""
    attention, run = WAYS[way]
    loss, shapes = MODELS[model](attention, **sizes)
    return read_program(compile_for_gpu(run(loss), *shapes))


def main() -> None:
    """Prints a row for each model and each way."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    if not HAS_CUDNN:
        parser.error("cuDNN is not installed: pip install nvidia-cudnn-cu13")
    print("| | | kernels | GB moved | of by hand | temporaries GB |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for model in options.models:
        found = {way: program(model, way) for way in WAYS if way != HALF_SCORES or model == "gpt2"}
        for way, each in found.items():
            share = each.bytes_moved / found["by hand"].bytes_moved
            cells = f"{each.kernels} | {each.bytes_moved / 1e9:.1f} | {share:.2f}"
            print(f"| {model} | {way} | {cells} | {each.temporary_bytes / 1e9:.2f} |", flush=True)


if __name__ == "__main__":
    main()

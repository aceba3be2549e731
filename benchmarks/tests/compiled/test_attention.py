"""`fuse_attention` in programs for an H100: one call of cuDNN each way, and no more bytes than by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from benchmarks.compiled.attention import HAS_CUDNN, MODELS, WAYS, program
from benchmarks.compiled.deep import SIZES
from benchmarks.compiled.deep import WAYS as DEEP_WAYS
from benchmarks.compiled.deep import program as deep_program
from benchmarks.compiled.h100 import compile_for_gpu
from benchmarks.gpu.attention_time import KINDS, attend
from jmp_lite.programs import read_program

pytestmark = pytest.mark.skipif(not HAS_CUDNN, reason="needs pip install nvidia-cudnn-cu13")

SMALL = {
    "gpt2": {"vocabulary": 2048, "length": 512, "width": 256, "layers": 2},
    "bert": {"vocabulary": 2048, "length": 512, "width": 256, "layers": 2, "heads": 4},
    "decoder": {"vocabulary": 2048, "length": 512, "width": 256, "layers": 2, "heads": 4},
}
FUSED = [way for way in WAYS if way.startswith("fused")]


@functools.cache
def small(model, way):
    return program(model, way, **SMALL[model])


@pytest.mark.cases(fast=0, slow=9)
@pytest.mark.parametrize("way", FUSED)
@pytest.mark.parametrize("model", MODELS)
def test_attention_is_a_call_of_cudnn_forwards_and_backwards(model, way):
    kinds = [product.kind for product in small(model, way).matmuls for _ in range(product.times)]
    assert kinds.count("attention") == 2 * SMALL[model]["layers"]
    assert small(model, way).tensor_core_share == 1.0
    assert small(model, way).bytes_moved < 0.85 * small(model, "autocast").bytes_moved


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_model_moves_and_keeps_what_it_does_by_hand(model):
    """At its own width; with all its layers, the last one is 0.98 (BERT) to 1.00."""
    layers = {"layers": 2}
    by_hand, fused, half_sums = (
        program(model, way, **layers) for way in ("by hand", "fused", 'fused, `half_sums="**"`')
    )
    assert fused.bytes_moved <= 1.08 * by_hand.bytes_moved
    assert half_sums.bytes_moved <= 1.02 * by_hand.bytes_moved
    assert half_sums.temporary_bytes <= 1.05 * by_hand.temporary_bytes


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize("size", SIZES)
def test_a_deep_stack_moves_what_it_does_by_hand(size):
    by_hand, fused, half_sums = (deep_program(SIZES[size], way, fused=True) for way in list(DEEP_WAYS)[:3])
    # At 70B tensor parallelism halves the parts of a block that are in half, and not the float32 stream.
    assert fused.bytes_moved <= (1.13 if size == "70B" else 1.08) * by_hand.bytes_moved
    assert half_sums.bytes_moved <= 1.001 * by_hand.bytes_moved
    assert fused.temporary_bytes <= 1.05 * by_hand.temporary_bytes


BATCH, LENGTH, HEADS, FEATURES = 2, 256, 2, 64
BIASES = {
    "of each score": (BATCH, HEADS, LENGTH, LENGTH),
    "of an example": (BATCH, 1, LENGTH, LENGTH),
    "of all heads": (LENGTH, LENGTH),
}
CHANGES = {
    **{kind: (change, (HEADS, LENGTH, LENGTH)) for kind, change in KINDS.items()},
    **{f"a bias {kind}": (lambda s, _, bias: s + bias, shape) for kind, shape in BIASES.items()},
}


def program_of(change, bias, length=LENGTH, fuse=jmp.fuse_attention):
    fun = jmp.autocast(fuse(functools.partial(attend, change)))
    gradient = jax.grad(lambda qkv, lengths, bias: (fun(qkv, lengths, bias) ** 2).sum(), (0, 2))
    shape = jax.ShapeDtypeStruct((BATCH, length, HEADS, FEATURES), jnp.float32)
    lengths = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    return gradient, ((shape,) * 3, lengths, jax.ShapeDtypeStruct(bias, jnp.float32))


@pytest.mark.cases(fast=0, slow=4)
@pytest.mark.parametrize("name", list(reversed(CHANGES)))
def test_cudnn_has_a_kernel_for_each_kind_of_mask_that_moves_less(name):
    """With the gradient of a bias, whatever its axes are. No bias costs more than it saves."""
    change, bias = CHANGES[name]
    ours, plain = (
        read_program(compile_for_gpu(gradient, *shapes))
        for gradient, shapes in (program_of(change, bias), program_of(change, bias, fuse=lambda fun: fun))
    )
    assert [product.kind for product in ours.matmuls].count("attention") == 2
    assert ours.bytes_moved < 0.7 * plain.bytes_moved


def test_what_cudnn_does_not_take_has_the_reason_of_jax():
    gradient, shapes = program_of(KINDS["no mask"], (HEADS, 197, 197), 197)
    fun = jmp.autocast(jmp.fuse_attention(functools.partial(attend, KINDS["no mask"])))
    (attention,) = jmp.explain(fun)(*shapes).attentions
    assert attention.why_not == "JAX says: Unsupported sequence length Q 197, KV 197."
    assert "cond" not in str(jax.make_jaxpr(gradient)(*shapes))


def test_a_second_derivative_is_refused_in_words_of_ours():
    gradient, shapes = program_of(KINDS["no mask"], (HEADS, LENGTH, LENGTH))
    twice = jax.grad(lambda *arrays: gradient(*arrays)[0][0].sum())
    with pytest.raises(TypeError, match="cuDNN's attention has no second derivative"):
        jax.make_jaxpr(twice)(*shapes)

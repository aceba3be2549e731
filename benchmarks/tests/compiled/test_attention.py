"""`fuse_attention` in programs for an H100: one call of cuDNN each way, and no more bytes than by hand."""

import functools

import pytest

from benchmarks.compiled.attention import HAS_CUDNN, MODELS, WAYS, program
from benchmarks.compiled.deep import SIZES
from benchmarks.compiled.deep import WAYS as DEEP_WAYS
from benchmarks.compiled.deep import program as deep_program

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
    kinds = [product.kind for product in small(model, way).products for _ in range(product.times)]
    assert kinds.count("attention") == 2 * SMALL[model]["layers"]
    assert small(model, way).tensor_core_share == 1.0
    assert small(model, way).bytes_moved < 0.85 * small(model, "autocast").bytes_moved


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_model_moves_and_keeps_what_it_does_by_hand(model):
    """At its own width, since what casts of parameters move counts less there."""
    layers = {"layers": 2}
    by_hand, fused, half_sums = (
        program(model, way, **layers) for way in ("by hand", "fused", 'fused, `half_sums="**"`')
    )
    assert fused.bytes_moved <= 1.08 * by_hand.bytes_moved
    assert half_sums.bytes_moved <= 1.01 * by_hand.bytes_moved
    assert half_sums.temporary_bytes <= 1.05 * by_hand.temporary_bytes


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize("size", SIZES)
def test_a_deep_stack_moves_what_it_does_by_hand(size):
    by_hand, fused, half_sums = (deep_program(SIZES[size], way, fused=True) for way in list(DEEP_WAYS)[:3])
    # At 70B tensor parallelism halves the parts of a block that are in half, and not the float32 stream.
    assert fused.bytes_moved <= (1.13 if size == "70B" else 1.08) * by_hand.bytes_moved
    assert half_sums.bytes_moved <= 1.001 * by_hand.bytes_moved
    assert fused.temporary_bytes <= 1.05 * by_hand.temporary_bytes

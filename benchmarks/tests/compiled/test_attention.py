"""cuDNN's attention under autocast: one call each way, in both orders, and fewer bytes than XLA's."""

import functools

import jax.numpy as jnp
import pytest

from benchmarks.compiled.attention import HAS_CUDNN, ORDERS, loss_and_gradients, with_cudnn_attention
from benchmarks.compiled.gpt import gpt, gpt_loss

pytestmark = pytest.mark.skipif(not HAS_CUDNN, reason="needs pip install nvidia-cudnn-cu13")

MODEL = gpt(vocabulary=2048, length=512, width=256, layers=2)


@functools.cache
def program(cudnn, order):
    model = with_cudnn_attention(MODEL) if cudnn else MODEL
    return loss_and_gradients(model, ORDERS[order](gpt_loss(model, "none", jnp.bfloat16)))


@pytest.mark.parametrize("order", ORDERS)
def test_attention_is_a_call_of_cudnn_forwards_and_backwards(order):
    kinds = [product.kind for product in program(True, order).products for _ in range(product.times)]
    assert kinds.count("attention") == 2 * MODEL.layers
    assert program(True, order).tensor_core_share == 1.0


@pytest.mark.parametrize("order", ORDERS)
def test_it_moves_and_keeps_a_quarter_less(order):
    ours, xla = (program(cudnn, order) for cudnn in (True, False))
    assert ours.bytes_moved < 0.75 * xla.bytes_moved
    assert ours.temporary_bytes < 0.75 * xla.temporary_bytes

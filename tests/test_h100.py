"""What the loss scale costs in the program that an H100 would run; needs `pip install -e ".[h100]"`."""

import importlib.util
import os
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_lite as jmp
from benchmarks.h100 import compile_for_h100
from benchmarks.program import bytes_moved, library_calls
from jmp_lite.linen import with_policy

has_plugin = importlib.util.find_spec("jax_cuda13_plugin") is not None
pytestmark = pytest.mark.skipif(
    not has_plugin or os.environ.get("JAX_PLATFORMS") != "cpu",
    reason='needs pip install -e ".[h100]" and JAX_PLATFORMS=cpu in the environment',
)

PARAMS = {f"layer_{i}": {"kernel": (256, 384), "bias": (384,)} for i in range(20)}
SHAPES = jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), PARAMS, is_leaf=lambda x: isinstance(x, tuple)
)
PARAM_BYTES = 20 * (256 * 384 + 384) * 4


def memory(tx, grads_dtype=jnp.float32, **extra):
    """The memory analysis of one donated optimizer step, and its text."""

    def step(grads, params, opt_state, extra):
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    opt_state = jax.eval_shape(tx.init, SHAPES)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, grads_dtype), SHAPES)
    compiled = compile_for_h100(step, grads, SHAPES, opt_state, extra, donate_argnums=(1, 2))
    return compiled.memory_analysis(), compiled.as_text()


@pytest.mark.parametrize("grads_dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize(
    ("tx", "extra"),
    [
        (jmp.with_loss_scale(optax.adamw(1e-3)), {}),
        (jmp.with_loss_scale(optax.adamw(1e-3), jmp.StaticLossScale(1024)), {}),
        (
            jmp.skip_nonfinite(optax.chain(jmp.unscale(), optax.adamw(1e-3))),
            {"loss_scale": jmp.DynamicLossScale()},
        ),
    ],
    ids=["dynamic", "static", "threaded"],
)
def test_a_donated_step_has_no_parameter_sized_buffer_more_than_the_plain_one(tx, extra, grads_dtype):
    plain, _ = memory(optax.adamw(1e-3), grads_dtype)
    scaled, text = memory(tx, grads_dtype, **extra)
    largest = 256 * 384 * 4
    assert scaled.alias_size_in_bytes >= 3 * PARAM_BYTES  # Parameters and both moments, in place.
    assert scaled.alias_size_in_bytes >= plain.alias_size_in_bytes
    assert scaled.temp_size_in_bytes - plain.temp_size_in_bytes < largest // 8
    assert scaled.output_size_in_bytes - plain.output_size_in_bytes < largest // 8
    assert " conditional(" not in text


def test_with_policy_sums_bias_gradients_in_float32_at_no_cost():
    """Beside the same layers with their own dtype: the same library calls, no kernel more."""

    class Network(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(64, (3, 3), dtype=self.dtype)(x)).mean((1, 2))
            return nn.Dense(256, dtype=self.dtype)(nn.relu(nn.Dense(512, dtype=self.dtype)(x)))

    x = jax.ShapeDtypeStruct((64, 32, 32, 64), jnp.float16)
    programs = []
    for model in (Network(jnp.float16), with_policy(Network(), jmp.get_policy("c=f16,o=f32"))):
        params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
        loss_fn = lambda params, x, model=model: model.apply({"params": params}, x).astype(jnp.float32).mean()
        programs.append(compile_for_h100(jax.grad(loss_fn), params, x))
    own_dtype, policy = (program.as_text() for program in programs)
    assert "f16[512]{0} reduce(" in own_dtype
    assert not re.findall(r" f16\[[\d,]*\]\S* reduce\(", policy)
    calls = r"__cublas\$\w+|__cudnn\$\w+|\"epilogue\":\"\w+\""
    assert re.findall(calls, policy) == re.findall(calls, own_dtype)
    assert policy.count(" fusion(") <= own_dtype.count(" fusion(")
    memory = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert memory[1] <= 1.01 * memory[0]  # The partial sums are wider.


def test_a_step_that_keeps_its_old_state_aside_would_be_found_out():
    """The measure works: without donation the same step needs every buffer twice."""
    tx = jmp.with_loss_scale(optax.adamw(1e-3))
    step = lambda grads, params, opt_state: tx.update(grads, opt_state, params)
    compiled = compile_for_h100(step, SHAPES, SHAPES, jax.eval_shape(tx.init, SHAPES))
    assert compiled.memory_analysis().alias_size_in_bytes == 0


class Block(nn.Module):
    """A pre-norm transformer block, written in float32."""

    @nn.compact
    def __call__(self, x):
        batch, length, width = x.shape
        heads = nn.Dense(3 * width)(nn.LayerNorm()(x)).reshape(batch, length, 3, -1, 64)
        query, key, value = (heads[:, :, place] for place in range(3))
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + nn.Dense(width)(attended.reshape(x.shape))
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        positions = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], 256))
        x = nn.Embed(2048, 256)(tokens) + positions
        for _ in range(3):
            x = Block()(x)
        return nn.Dense(2048)(nn.LayerNorm()(x))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_autocast_calls_the_gemms_of_casts_by_hand_and_moves_no_more_bytes(dtype):
    model, policy = Transformer(), jmp.Policy(jnp.float32, dtype, jnp.float32)
    tokens = jax.ShapeDtypeStruct((8, 256), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss_fn(params, tokens, apply=model.apply):
        logits = apply(params, tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    by_hand = lambda params, tokens: policy.cast_to_output(
        model.apply(policy.cast_to_compute(params), tokens)
    )
    hand = lambda params, tokens: loss_fn(params, tokens, by_hand)
    auto = jmp.autocast(loss_fn, dtype)
    texts = [compile_for_h100(jax.value_and_grad(f), params, tokens).as_text() for f in (hand, auto, loss_fn)]
    hand_calls, auto_calls, full_calls = map(library_calls, texts)
    assert len(auto_calls) == len(hand_calls) == len(full_calls) == 3 * (3 * 3 * 2) + 3
    half = "bf16" if dtype == jnp.bfloat16 else "f16"
    assert {operands for _, operands, _ in auto_calls} == {(half, half)}
    hand_bytes, auto_bytes, full_bytes = map(bytes_moved, texts)
    assert auto_bytes <= 1.01 * hand_bytes < full_bytes

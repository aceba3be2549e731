"""`doctor` is silent on healthy models, at a loss scale of 1 and of 2**10."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from jmp_lite.diagnostics import doctor
from tests.support.arrays import integers, normal

KEY = jax.random.key(0)
LABELS = jnp.arange(16) % 8


class Transformer(nn.Module):
    """A block with attention, between an embedding and a head."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 32, name="embed")(tokens)
        h = nn.LayerNorm(name="norm")(x)
        x = x + nn.MultiHeadDotProductAttention(4, name="attention")(h, h)
        h = nn.gelu(nn.Dense(64, name="up")(nn.LayerNorm(name="second")(x)))
        x = x + nn.Dense(32, name="down")(h)
        return nn.Dense(8, name="head")(x.mean(1))


class Convolutions(nn.Module):
    """Two convolutions with norms."""

    @nn.compact
    def __call__(self, x):
        for layer in range(2):
            x = nn.relu(nn.GroupNorm(4, name=f"norm_{layer}")(nn.Conv(16, (3, 3), name=f"conv_{layer}")(x)))
        return nn.Dense(8, name="head")(x.mean((1, 2)))


class Recurrent(nn.Module):
    """An LSTM."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="head")(nn.RNN(nn.OptimizedLSTMCell(16), name="rnn")(x)[:, -1])


class Gates(nn.Module):
    """A gated layer (GLU)."""

    @nn.compact
    def __call__(self, x):
        gate, value = nn.Dense(32, name="gate")(x), nn.Dense(32, name="value")(x)
        return nn.Dense(8, name="out")(nn.sigmoid(gate) * value)


MODELS = {
    "cnn": (Convolutions(), normal(0, 16, 8, 8, 8)),
    "rnn": (Recurrent(), normal(0, 16, 8, 16)),
    "gates": (Gates(), normal(0, 16, 16)),
    "transformer": (Transformer(), integers(0, 32, 16, 8)),
}


# Each model once, then in the other dtype and at the other scale.
ONE, OTHER = ("float16", None), ("bfloat16", 2.0**10)
CASES = [
    *((name, *how) for name, how in zip(MODELS, (ONE, OTHER, ONE, OTHER))),
    *((name, *how) for name, how in zip(MODELS, (OTHER, ONE, OTHER, ONE))),
    *((name, dtype, scale) for name in MODELS for dtype, scale in (("float16", 2.0**10), ("bfloat16", None))),
]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("name", "dtype", "scale"), CASES)
def test_a_healthy_model_has_no_finding_of_its_values(name, dtype, scale):
    model, x = MODELS[name]
    params = jax.jit(model.init)(KEY, x)

    def loss(params, x):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), LABELS).mean()

    diagnosis = doctor(loss, dtype, loss_scale=scale, device=None)(params, x)
    assert [str(finding) for finding in diagnosis.findings if finding.severity != "speed"] == []
    assert diagnosis.precision.half.cosine > 0.999

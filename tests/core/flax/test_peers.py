"""Small versions of public models under `with_policy`, beside the same models with Flax's own `dtype`.

Each computes with float inputs before its first layer: timesteps, coordinates, distances, decays.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from jmp_lite.linen import with_policy
from tests.support.arrays import integers, normal


class Diffusion(nn.Module):
    """The noise predictor of Ho et al. (2020), an MLP with the sinusoidal timesteps of its U-Net."""

    dtype_by_hand: Any = None

    @nn.compact
    def __call__(self, x, t):
        dense = functools.partial(nn.Dense, dtype=self.dtype_by_hand)
        frequencies = jnp.exp(-jnp.log(10_000.0) * jnp.arange(16) / 16)
        angles = t[:, None] * frequencies
        time = dense(32)(nn.silu(dense(32)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))))
        h = dense(32)(x)
        for _ in range(2):
            y = nn.LayerNorm(dtype=self.dtype_by_hand)(h)
            h += dense(32)(nn.silu(dense(32)(y) + dense(32)(nn.silu(time))))
        return dense(x.shape[-1])(h)


class NeRF(nn.Module):
    """Mildenhall et al. (2020): positional encoding of coordinates, an MLP with a skip, and densities."""

    dtype_by_hand: Any = None

    @nn.compact
    def __call__(self, points):
        dense = functools.partial(nn.Dense, dtype=self.dtype_by_hand)
        angles = (points[..., None] * 2.0 ** jnp.arange(10)).reshape(*points.shape[:-1], -1)
        encoded = jnp.concatenate([points, jnp.sin(angles), jnp.cos(angles)], -1)
        h = encoded
        for layer in range(4):
            h = nn.relu(dense(32)(jnp.concatenate([h, encoded], -1) if layer == 2 else h))
        density = nn.softplus(dense(1)(h)[..., 0].astype(jnp.float32))
        alpha = 1 - jnp.exp(-density * 0.1)
        transmitted = jnp.cumprod(1 - alpha + 1e-10, axis=-1)
        color = nn.sigmoid(dense(3)(h).astype(jnp.float32))
        return jnp.sum((alpha * transmitted)[..., None] * color, axis=-2)


class SchNet(nn.Module):
    """Schutt et al. (2017): energies of atoms from continuous filters of their distances."""

    dtype_by_hand: Any = None

    @nn.compact
    def __call__(self, positions, numbers):
        dense = functools.partial(nn.Dense, dtype=self.dtype_by_hand)
        difference = positions[:, None] - positions[None]
        distance = jnp.sqrt(jnp.sum(difference**2, -1) + 1e-6)
        basis = jnp.exp(-10.0 * (distance[..., None] - jnp.linspace(0.0, 5.0, 16)) ** 2)
        cutoff = jnp.where(distance < 5, 0.5 * (jnp.cos(jnp.pi * distance / 5) + 1), 0)[..., None]
        h = nn.Embed(10, 32, dtype=self.dtype_by_hand)(numbers)
        for _ in range(2):
            filters = dense(32)(nn.softplus(dense(32)(basis))) * cutoff
            message = jnp.sum(filters * dense(32)(h)[None], axis=1)
            h += dense(32)(nn.softplus(dense(32)(message)))
        return jnp.sum(dense(1)(nn.softplus(dense(16)(h))).astype(jnp.float32))


class Mamba(nn.Module):
    """Gu and Dao (2023): a selective state space, whose decay is the exponent of an exponent."""

    dtype_by_hand: Any = None

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, dtype=self.dtype_by_hand)
        size, width = 4, 16
        u, gate = jnp.split(dense(2 * width)(x), 2, -1)
        u = nn.silu(nn.Conv(width, (4,), padding="CAUSAL", dtype=self.dtype_by_hand)(u))
        b, c = jnp.split(dense(2 * size)(u), 2, -1)
        step = nn.softplus((dense(width)(u) - 3).astype(jnp.float32))
        start = lambda _: jnp.log(jnp.broadcast_to(jnp.arange(1.0, size + 1), (width, size)))
        decay = jnp.exp(step[..., None] * -jnp.exp(self.param("A_log", start)))
        drive = (step * u)[..., None] * b[..., None, :]
        h = jax.lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (decay, drive), axis=1)[
            1
        ]
        y = jnp.sum(h * c[..., None, :], -1) + self.param("D", nn.initializers.ones, (width,)) * u
        return dense(x.shape[-1])(y * nn.silu(gate))


class LRU(nn.Module):
    """Orvieto et al. (2023): a linear recurrence with complex eigenvalues near the unit circle."""

    dtype_by_hand: Any = None

    @nn.compact
    def __call__(self, x):
        dense, size = functools.partial(nn.Dense, dtype=self.dtype_by_hand), 16
        log_nu = self.param("nu_log", lambda _: jnp.log(-jnp.log(jnp.linspace(0.99, 0.9999, size))))
        log_theta = self.param("theta_log", lambda _: jnp.log(jnp.linspace(0.01, 3.0, size)))
        eigenvalues = jnp.exp(-jnp.exp(log_nu) + 1j * jnp.exp(log_theta))
        gamma = jnp.sqrt(1 - jnp.abs(eigenvalues) ** 2)
        drive = gamma * (dense(size)(x).astype(jnp.float32) + 0j)
        step = lambda h, u: (eigenvalues * h + u,) * 2
        _, h = jax.lax.scan(step, jnp.zeros((x.shape[0], size), jnp.complex64), drive.swapaxes(0, 1))
        h = h.swapaxes(0, 1)
        return dense(x.shape[-1])(nn.gelu(dense(32)(jnp.concatenate([h.real, h.imag], -1))))


SEEDS = 8
SEQUENCE = normal(5, 2, 200, 4)
POSITIONS = 100 + normal(6, 12, 3)
MODELS = {
    "diffusion": (Diffusion, (normal(1, 4, 8), jnp.array([999.3, 937.1, 833.7, 625.2])), {}),
    "NeRF": (NeRF, (jnp.sin(normal(2, 4, 16, 3)),), {}),
    "SchNet": (SchNet, (POSITIONS, integers(3, 10, 12)), {}),
    "Mamba": (Mamba, (SEQUENCE,), {"A_log": "float32", "D": "float32"}),
    "LRU": (LRU, (SEQUENCE,), {"*_log": "float32"}),
}


def errors(name, *models):
    """Returns the relative errors of results and gradients of each model: geometric means over seeds."""
    cls, inputs, _ = MODELS[name]

    def run(model, params):
        loss = lambda params: jnp.sum(jnp.sin(model.apply(params, *inputs).astype(jnp.float32)))
        return model.apply(params, *inputs), jax.grad(loss)(params)

    keys = jax.random.split(jax.random.key(0), SEEDS)
    params = jax.jit(jax.vmap(lambda key: cls().init(key, *inputs)))(keys)
    run_all = jax.jit(jax.vmap(lambda params: [run(model, params) for model in (cls(), *models)]))
    exact, *found = run_all(params)

    def error(tree, exact):
        norms = lambda tree: sum(jnp.sum(leaf.reshape(SEEDS, -1) ** 2, 1) for leaf in jax.tree.leaves(tree))
        difference = jax.tree.map(lambda a, b: a.astype(jnp.float32) - b, tree, exact)
        return float(jnp.exp(jnp.mean(jnp.log(norms(difference) / norms(exact)))) ** 0.5)

    return [[error(*pair) for pair in zip(each, exact)] for each in found]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_a_model_is_as_near_to_float32_as_with_the_dtype_of_its_layers(name, half):
    cls, _, rules = MODELS[name]
    policy = jmp.get_policy(f"params=float32,compute={half},output=float32").with_rules(rules)
    by_hand, under = errors(name, cls(dtype_by_hand=jnp.dtype(half)), with_policy(cls(), policy))
    assert all(error <= 1.2 * limit for error, limit in zip(under, by_hand, strict=True))

"""The numbers of docs/choosing.md."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from jmp_lite.diagnostics import profile_ranges


def to_tf32(x):
    bits = x.view(np.uint32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)).view(np.float32)


def test_the_error_of_a_matmul_of_1024_terms():
    """The inputs are rounded and the sums are exact; only the float32 matmul also rounds its sums."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(256, 1024)).astype(np.float32)
    b = rng.normal(size=(1024, 256)).astype(np.float32)
    exact = np.float64(a) @ np.float64(b)
    error = lambda product: np.linalg.norm(np.float64(product) - exact) / np.linalg.norm(exact)
    rounded = lambda to: error(np.float64(to(a)) @ np.float64(to(b)))
    assert error(a @ b) < 1e-6
    assert abs(rounded(to_tf32) / rounded(np.float16) - 1) < 1e-6
    assert round(rounded(np.float16) * 1e4, 1) == 2.9
    assert round(rounded(lambda x: np.asarray(x, jnp.bfloat16)) * 1e3, 1) == 2.3


def test_what_is_lost_in_half():
    f16, bf16 = jnp.float16, jnp.bfloat16
    assert (f16(1) + f16(2**-11), bf16(1) + bf16(2**-8)) == (1, 1)
    assert (f16(2048) + f16(1), bf16(256) + bf16(1)) == (2048, 256)
    assert jnp.isinf(jnp.exp(f16(12)))
    assert jnp.isinf(f16(300) ** 2)
    assert jnp.isinf(f16(2) * f16(2.0**15))
    assert jnp.log(f16(1e-8)) == -jnp.inf


def test_autocast_keeps_that_in_float32():
    def block(w, x):
        h = jax.nn.softmax(x @ w)
        variance = jnp.mean((h - jnp.mean(h)) ** 2)
        return -jnp.mean(jnp.log(h @ w + variance))

    report = jmp.explain(block, jnp.float16)(jnp.ones((8, 8)), jnp.ones((8, 8)))
    names = {each.name: each.in_half for each in report.operations}
    assert names["dot_general"]
    assert not any(names[name] for name in ("exp", "log", "reduce_sum", "integer_pow"))


@pytest.mark.slow
def test_the_gradients_of_the_digits_that_are_zero_in_float16():
    from examples import digits  # Here, since scikit-learn takes a second to import.

    images, _, labels, _ = digits.load_data()
    x, y = images[:448], labels[:448]
    model = digits.PixelClassifier(digits.SIZES["small"][0])
    variables = model.init(jax.random.key(0), x[:1], train=False)

    def loss_fn(params):
        logits, _ = model.apply({**variables, "params": params}, x, train=True, mutable=["batch_stats"])
        return digits.squared_error(logits, y)

    report = profile_ranges(loss_fn, jnp.float16)(variables["params"])
    assert round(report.pooled.fates(0).lost, 2) == 0.78
    assert (report.largest_safe_scale, report.static_scale) == (2.0**27, 2.0**23)
    fates = report.pooled.fates(23)
    assert fates.flushed < 10
    assert round((fates.flushed + fates.subnormal + fates.normal) / 1e6, 1) == 1.4


@pytest.mark.slow
def test_a_pinn_in_float16_ends_nearer_to_float32_than_in_bfloat16():
    """-u'' = pi**2 * sin(pi * x) on [-1, 1]. docs/questions.md has longer runs."""
    x, right = jnp.linspace(-1, 1, 64), lambda x: jnp.sin(jnp.pi * x)

    def solution(params, x):
        (first, _), (second, _), (last, _) = params
        hidden = jnp.tanh(jnp.tanh(x[None] @ first + params[0][1]) @ second + params[1][1])
        return (1 - x**2) * (hidden @ last)[0]

    def residual(params, x):
        second = jax.vmap(jax.grad(jax.grad(solution, 1), 1), (None, 0))(params, x)
        return jnp.mean((second + jnp.pi**2 * right(x)) ** 2)

    def error(dtype):
        shapes = ((1, 64), (64, 64), (64, 1))
        keys = jax.random.split(jax.random.key(0), 4)
        params = [
            (jax.random.normal(key, shape) / shape[0] ** 0.5, jnp.zeros(shape[1]))
            for key, shape in zip(keys, shapes)
        ]
        tx = jmp.with_loss_scale(optax.adam(optax.cosine_decay_schedule(2e-3, 1500)))
        loss_fn = jmp.autocast(residual, dtype)

        def step(carry, _):
            params, opt_state = carry
            grads = jmp.grad(loss_fn, jmp.get_loss_scale(opt_state))(params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        run = jax.jit(lambda start: jax.lax.scan(step, start, length=1500)[0])
        params, _ = run((params, tx.init(params)))
        found = jax.vmap(solution, (None, 0))(params, x)
        return jnp.linalg.norm(found - right(x)) / jnp.linalg.norm(right(x))

    full, half, coarse = map(error, ("float32", "float16", "bfloat16"))
    assert full < 6e-4
    assert half < 6e-4
    assert coarse > 2 * max(full, half)

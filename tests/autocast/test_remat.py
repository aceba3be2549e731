"""Rematerialization under `autocast`."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jmp_lite as jmp
from tests.support.halves import each_half
from tests.support.jaxprs import primitives, products
from tests.support.small_programs import HALVES, B, W, X


def saved_by(fun, *args):
    """What is saved for the backward pass beyond the arguments: how many arrays of each shape."""
    _, pullback = jax.vjp(fun, *args)
    leaves = [leaf for leaf in jax.tree.leaves(pullback) if getattr(leaf, "ndim", 0) == 2]
    return collections.Counter(leaf.shape for leaf in leaves)


def deep(x, w, b):
    for _ in range(3):
        x = jnp.sin(checkpoint_name(jnp.tanh(x @ w + b), "kept"))
    return x


POLICIES = jax.checkpoint_policies
REMATS = {
    "none": None,
    "nothing": POLICIES.nothing_saveable,
    "everything": POLICIES.everything_saveable,
    "dots": POLICIES.dots_saveable,
    "dots without batch": POLICIES.dots_with_no_batch_dims_saveable,
    "names": POLICIES.save_only_these_names("kept"),
    "all but names": POLICIES.save_anything_except_these_names("kept"),
}


@pytest.mark.cases(fast=4, slow=9)
@pytest.mark.parametrize("policy", REMATS)
def test_what_is_recomputed_and_saved_is_that_of_the_float32_program(policy):
    fun = jax.checkpoint(deep, policy=REMATS[policy])
    loss = lambda x, w, b: jnp.sum(fun(x, w, b) @ w)

    def count(grad):
        return collections.Counter(
            name for name in primitives(grad, X, W, B) if name in ("dot_general", "tanh", "sin", "cos")
        )

    plain = count(jax.grad(loss, 1))
    assert count(jax.grad(jmp.autocast(loss), 1)) == plain
    assert count(jmp.autocast(jax.grad(loss, 1))) == plain
    assert set(products(jax.grad(jmp.autocast(loss), 1), X, W, B)) == {("bfloat16", "bfloat16")}
    plain, ours = saved_by(fun, X, W, B), saved_by(jmp.autocast(fun), X, W, B)
    assert ours[(4, 8)] == plain[(4, 8)]
    assert ours[(8, 8)] <= plain[(8, 8)] + 1  # The weight, and its cast where it is kept for later.


def test_values_saved_by_name_are_half():
    fun = jax.checkpoint(deep, policy=REMATS["names"])
    _, pullback = jax.vjp(jmp.autocast(lambda x, w, b: fun(x @ w, w, b) @ w), X, W, B)
    kept = [leaf.dtype.name for leaf in jax.tree.leaves(pullback) if getattr(leaf, "shape", 0) == (4, 8)]
    assert kept.count("bfloat16") >= 3


@pytest.mark.parametrize("half_sums", [(), ("**",)])
def test_a_loop_keeps_no_mask_of_the_size_of_the_scores(half_sums):
    """JAX would fill the masked scores in front of the loop, in float32: 8 % of the bytes of LLaMA-7B."""

    def layer(x, w):
        scores = jnp.where(jnp.tri(16, dtype=bool), (x @ w) @ x.mT, -1e9)
        return x + jax.nn.softmax(scores) @ (x @ w), None

    def loss(weights, x):
        return jnp.sum(lax.scan(jax.checkpoint(layer), x, weights)[0])

    grad = jax.grad(jmp.autocast(loss, "bfloat16", half_sums=half_sums))
    jaxpr = jax.make_jaxpr(grad)(jnp.ones((3, 8, 8)), jnp.ones((5, 16, 8)))
    scans = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert len(scans) == 2
    assert not any(var.aval.shape == (5, 16, 16) for scan in scans for var in scan.invars)


# What is computed again is the value that was stored


def attention(w):
    return lambda c: jax.nn.softmax((c @ w) @ c.T) @ c


def single(w, x):
    attend = attention(w)
    rows = jnp.stack([x, x * 0.5, x * 0.3])
    return jnp.mean(jnp.sin(lax.scan(lambda c, t: (attend(c + t) * 0.5, None), x @ w, rows)[0]))


def nested(inner=lambda step: step, outer=lambda step: step):
    def loss(w, x):
        attend = attention(w)

        def steps(c, _):
            rows = jnp.stack([c, c * 0.5])
            return lax.scan(inner(lambda c, t: (attend(c + t) * 0.5, None)), c, rows)[0] * 0.5, None

        return jnp.mean(jnp.sin(lax.scan(outer(steps), x @ w, None, length=2)[0]))

    return loss


LOSSES = {
    "nested": nested(),
    "single": single,
    "remat inside": nested(inner=jax.checkpoint),
    "remat outside": nested(outer=jax.checkpoint),
}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("half", "name"), [(half, name) for half in HALVES[::-1] for name in LOSSES])
def test_gradients_of_loops_are_as_close_as_casts_by_hand(half, name):
    """By the median error of a gradient."""
    loss = LOSSES[name]
    by_hand = lambda w, x: loss(w.astype(half), x.astype(half)).astype(jnp.float32)
    ours = jax.grad(jmp.autocast(loss, half)), jmp.autocast(jax.grad(loss), half)
    grads = jax.grad(loss), jax.grad(by_hand), *ours
    # As users run it: with all passes of XLA, which may leave out a cast down and up again.
    run = jax.jit(
        lambda w, x: [grad(w, x) for grad in grads],
        compiler_options={"xla_backend_optimization_level": 3},
    )
    errors = []
    for seed in range(16):
        w = jax.random.normal(jax.random.key(seed), (8, 8)) * 0.35
        expected, *found = run(w, jax.random.normal(jax.random.key(100 + seed), (4, 8)))
        errors.append([jnp.linalg.norm(each - expected) / jnp.linalg.norm(expected) for each in found])
    allowed, *errors = np.median(errors, axis=0)
    assert all(0 < error <= allowed for error in errors)


@pytest.mark.slow
@each_half
def test_rounding_again_changes_no_half_value_and_no_gradient(half):
    """Subnormal, largest and odd numbers, and a gradient that half cannot hold."""
    info = jnp.finfo(half)
    values = jnp.array([info.smallest_subnormal * 3, info.tiny, 1 / 3, float(info.max), 0.0], half)
    read = lambda y: jnp.exp2(-y) * jnp.exp(y * 0)  # Two float32 readers: the value is rounded again.

    def fun(w, x):
        return lax.scan(lambda c, row: (c, read(row[None] @ w)), 0, x)[1]

    rows = jnp.diag(values.astype(jnp.float32))
    result = jmp.autocast(fun, half)(jnp.eye(5), rows)
    np.testing.assert_array_equal(result, jnp.exp2(-rows)[:, None])
    scale = 1e-6
    grad = jax.grad(lambda x: jnp.sum(jmp.autocast(fun, half)(jnp.eye(5), x)) * scale)(rows * 0)
    np.testing.assert_allclose(grad, -scale * np.log(2) * np.ones((5, 5)), rtol=0.05)

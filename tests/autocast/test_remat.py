"""Rematerialization under `autocast`."""

import collections

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jmp_lite as jmp
from tests.support.jaxprs import primitives, products
from tests.support.small_programs import B, W, X


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


@pytest.mark.parametrize("policy", REMATS)
def test_recomputation_is_that_of_the_float32_program(policy):
    fun = jax.checkpoint(deep, policy=REMATS[policy])
    loss = lambda x, w, b: jnp.sum(fun(x, w, b) @ w)
    count = lambda grad: collections.Counter(
        name for name in primitives(grad, X, W, B) if name in ("dot_general", "tanh", "sin", "cos")
    )
    plain = count(jax.grad(loss, 1))
    assert count(jax.grad(jmp.autocast(loss), 1)) == plain
    assert count(jmp.autocast(jax.grad(loss, 1))) == plain
    assert set(products(jax.grad(jmp.autocast(loss), 1), X, W, B)) == {("bfloat16", "bfloat16")}


@pytest.mark.parametrize("policy", REMATS)
def test_at_most_the_arrays_of_the_float32_program_are_saved(policy):
    fun = jax.checkpoint(deep, policy=REMATS[policy])
    plain, ours = saved_by(fun, X, W, B), saved_by(jmp.autocast(fun), X, W, B)
    assert ours[(4, 8)] == plain[(4, 8)]
    assert ours[(8, 8)] <= plain[(8, 8)] + 1  # The weight, and its cast where it is kept for later.


def test_values_saved_by_name_are_half():
    fun = jax.checkpoint(deep, policy=REMATS["names"])
    _, pullback = jax.vjp(jmp.autocast(lambda x, w, b: fun(x @ w, w, b) @ w), X, W, B)
    kept = [leaf.dtype.name for leaf in jax.tree.leaves(pullback) if getattr(leaf, "shape", 0) == (4, 8)]
    assert kept.count("bfloat16") >= 3

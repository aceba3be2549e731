"""Remedies for a train step with an autocast inside: rules for its scopes."""

import ast
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from jmp_lite.diagnostics import find_nonfinite

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.

F16, F32 = jnp.float16, jnp.float32
X = jax.random.normal(jax.random.key(0), (8, 16))
W = {
    "stem": jax.random.normal(jax.random.key(1), (16, 16)),
    "head": 3e4 * jax.random.normal(jax.random.key(2), (16, 4)),
}


def step_of(loss, rules=None):
    def step(w, x):
        value, grads = jax.value_and_grad(jmp.autocast(loss, F16, rules=rules))(w, x)
        return jax.tree.map(lambda w, g: w - 1e-9 * g, w, grads), value

    return step


def tried(loss):
    return find_nonfinite(step_of(loss), value_and_grad_fn=None)(W, X).tried


def mean_square(y):
    return jnp.mean(y.astype(F32) ** 2) * 1e-9


def test_a_rule_selects_the_scopes_inside_of_its_own():
    def loss(w, x):
        with jax.named_scope("block"):
            with jax.named_scope("inner"):
                h = 300 * jnp.tanh(x @ w["stem"])
            return mean_square(h @ w["head"])

    (trial, *_) = tried(loss)
    assert trial.helps
    (rules,) = re.findall(r"rules=(\{.*?\}) in the autocast inside", trial.change)
    new, _ = step_of(loss, ast.literal_eval(rules))(W, X)  # A rule that selects nothing more is an error.
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(new))


def test_a_product_is_in_half_whatever_a_rule_in_front_of_it_keeps():
    def loss(w, x):
        with jax.named_scope("a"):
            h = x @ w["stem"]
        with jax.named_scope("b"):
            return mean_square(h @ w["head"])

    assert not np.isfinite(step_of(loss, {"/a": "float32"})(W, X)[1])
    assert tried(loss)[0].change == "rules={'/b': 'float32'} in the autocast inside"


def test_no_rule_selects_a_product_outside_of_all_scopes():
    def loss(w, x):
        with jax.named_scope("stem"):
            h = x @ w["stem"]
        return mean_square(h @ w["head"])

    assert not np.isfinite(step_of(loss, {"/stem": "float32"})(W, X)[1])
    assert [trial.dtype for trial in tried(loss) if trial.helps] == ["bfloat16"]


def test_a_product_whose_own_casts_are_left_out_needs_a_rule():
    def loss(w, x, dtype=F16):
        with jax.named_scope("head"):
            return mean_square(x.astype(jnp.float16) @ (0.01 * w["head"]).astype(dtype) * 300)

    def in_float32(w, x):
        return loss(w, x, F32)

    (trial, *_) = tried(loss)
    assert trial.helps
    assert "rules={'/head': 'float32'} in the autocast inside" in trial.change
    assert np.isfinite(step_of(in_float32, {"/head": "float32"})(W, X)[1])


def test_a_cast_to_float32_by_another_name_is_no_cast_to_half():
    def loss(w, x, dtype=F32):
        with jax.named_scope("head"):
            h = 100 * x @ w["head"]
        h = jnp.maximum(h, 0).astype(dtype)  # In half by autocast.
        with jax.named_scope("last"):
            return mean_square(jnp.tanh(h) @ w["stem"][:4])

    (trial, *_) = tried(loss)
    assert trial.helps
    assert trial.lines == ()

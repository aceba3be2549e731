"""What `explain` says of the softmaxes between two matmuls."""

import pickle

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from jmp_lite._attention.find import DIFFERENTIATED
from tests.attention.cases import BATCH, FUSED, HEADS, LEFT, LENGTH

SCORES = 2 * BATCH * HEADS * LENGTH**2


def gradient(fun):
    return jax.grad(lambda *arrays: fun(*arrays).sum())


@pytest.mark.parametrize(("name", "runs"), [("a mask of numbers", 1), ("scan", 3)])
def test_an_attention_is_listed_once_with_its_line_in_both_orders(name, runs):
    case = FUSED[name]
    fused = jmp.fuse_attention(case.fun, implementation="xla")
    for fun in (jmp.autocast(fused), jmp.autocast(gradient(fused))):
        (attention,) = jmp.explain(fun)(*case.arrays).attentions
        assert attention.fused
        assert not attention.why_not
        assert attention.scores == runs * SCORES
        assert "cases.py" in attention.source


@pytest.mark.parametrize("name", ["a mask of numbers", "scan"])
def test_what_is_not_fused_has_a_reason(name, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **options: q)
    case = FUSED[name]
    (attention,) = jmp.explain(case.fun)(*case.arrays).attentions
    assert (attention.fused, attention.why_not) == (False, "jmp.fuse_attention would fuse it")
    (attention,) = jmp.explain(gradient(case.fun))(*case.arrays).attentions
    assert (attention.fused, attention.why_not) == (False, DIFFERENTIATED)


def test_a_report_shows_the_reason_and_what_fusing_would_save():
    case = LEFT["dropout"]
    report = jmp.explain(case.fun)(*(jnp.tile(x, (100, 1, 1, 1)) for x in case.arrays))
    line = "1: not fused, which would save 0.4 MB of scores: its weights pass through _where; "
    assert f"Softmaxes between two matmuls: {line}" in " ".join(str(report).split()) + " "
    assert pickle.loads(pickle.dumps(report)).attentions == report.attentions
    assert not jmp.explain(jnp.dot)(jnp.ones((2, 2)), jnp.ones((2, 2))).attentions

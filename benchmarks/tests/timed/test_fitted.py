"""The table of gradients from the start of training to its end."""

import jax.numpy as jnp
import pytest

from benchmarks.timed import fitted


def test_the_errors_of_autocast_are_those_of_casts_by_hand_where_the_loss_is_small(monkeypatch):
    monkeypatch.setattr(fitted, "TARGETS", (0.01,))
    tokens = jnp.asarray(fitted.text(), jnp.int32)
    assert tokens.shape == (fitted.LINES, fitted.LENGTH + 1)
    (start, _), (end, params) = fitted.fitted(tokens)
    assert end <= 0.01 < 1 < start
    inside, outside, by_hand = fitted.errors(params, tokens, "float16")
    assert inside == pytest.approx(by_hand, rel=0.3)
    assert outside == pytest.approx(by_hand, rel=0.3)
    assert by_hand < 0.05

"""The program of a loss function, and what its arguments and gradients are called."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jmp_lite.diagnostics._values.trace import LossCall, trace


def test_a_leaf_that_a_user_calls_value_keeps_its_name():
    params = {"attn": {"value": jnp.ones(2), "key": jnp.ones(2)}}
    loss = lambda params: sum(map(jnp.sum, jax.tree.leaves(params)))
    program = trace(LossCall(loss, 0, False, jax.value_and_grad), (params,), {})
    assert program.gradients == ("attn/key", "attn/value")


def test_it_keeps_its_name_beside_an_nnx_module_whose_variables_have_none():
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    loss = lambda layer, params: layer(params["attn"]["value"]).sum()
    call = LossCall(loss, (0, 1), False, nnx.value_and_grad)
    program = trace(call, (layer, {"attn": {"value": jnp.ones(2)}}), {})
    assert set(program.names) >= {"layer/bias", "layer/kernel", "params/attn/value"}
    assert program.gradients == ("0/bias", "0/kernel", "1/attn/value")


def test_the_new_values_of_nnx_variables_are_the_state_of_a_step():
    state = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    step = lambda state, x: jax.tree.map(lambda leaf: leaf - x.mean(), state)
    program = trace(LossCall(step, 0, False, None), (state, jnp.ones(2)), {})
    assert program.named_outputs == ("state/bias", "state/kernel")


@pytest.mark.parametrize(("flags", "level"), [("", 1), ("--xla_backend_optimization_level=3", None)])
def test_the_optimization_level_of_the_user_counts(monkeypatch, flags, level):
    monkeypatch.setenv("XLA_FLAGS", flags)
    spec = importlib.util.find_spec(trace.__module__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.EVERY_CAST.get("xla_backend_optimization_level") == level
    assert module.EVERY_CAST["xla_allow_excess_precision"] is False

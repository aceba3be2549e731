"""`flax.serialization` saves and restores the states of jmp_lite, whichever adapter was imported."""

import subprocess
import sys

import pytest

SCRIPT = """
import jax.numpy as jnp
import optax
from flax import serialization

import jmp_lite as jmp
import jmp_lite.{adapter}

tx = jmp.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(2.0**10))
params = {{"w": jnp.ones(3)}}
state = tx.init(params)
_, after = tx.update({{"w": jnp.full(3, jnp.inf)}}, state, params)
restored = serialization.from_bytes(state, serialization.to_bytes(after))
print(jmp.get_loss_scale(restored).loss_scale, jmp.grads_finite(restored))
"""


@pytest.mark.parametrize("adapter", ["linen", "nnx"])
def test_a_state_is_saved_when_only_one_adapter_was_imported(adapter):
    script = SCRIPT.format(adapter=adapter)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["512.0", "False"]

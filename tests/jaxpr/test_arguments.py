"""Objects among the arguments that a call may change are split by the adapter of their library."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jmp_lite as jmp

PROGRAM = """
import sys, jax, jax.numpy as jnp
from flax import nnx
import jmp_lite as jmp
model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
assert "jmp_lite._flax.objects" not in sys.modules
jmp.autocast(lambda model, x: model(x))(model, jnp.ones((3, 2)))
assert "jmp_lite._flax.objects" in sys.modules
print(model.mean[...])
"""


@pytest.mark.slow
def test_a_module_is_updated_though_the_program_has_not_imported_the_adapter():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[0.01 0.01]"


def test_variables_in_containers_are_updated():
    count = nnx.Variable(jnp.float32(0))

    def fun(tree, x):
        tree["count"].set_value(tree["count"].get_value() + x.sum())
        return x @ x

    jmp.autocast(fun)({"count": count}, jnp.ones((2, 2)))
    assert float(count.get_value()) == 4.0


def test_arrays_of_a_state_are_no_objects():
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    total = jmp.autocast(lambda state: sum(leaf.sum() for leaf in jax.tree.leaves(state)))(state)
    assert total.dtype == jnp.float32

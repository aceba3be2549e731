"""A training step has one key in JAX's persistent compilation cache, in every process."""

import json
import os
import subprocess
import sys

import pytest

# The step has what could differ from process to process: names, orders of sets, state, a plan of casts.
STEP = """
import collections, json, sys
import jax, jax.numpy as jnp, optax
import jmp_lite as jmp

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))

tx = jmp.with_loss_scale(optax.adamw(1e-2), clip_norm=1.0)
params = {name: jax.ShapeDtypeStruct((8, 8), jnp.float32) for name in ("query", "key", "value", "out")}


def loss_fn(params, x):
    scores = jax.nn.softmax((x @ params["query"]) @ (x @ params["key"]).T)
    with jax.named_scope("out"):
        return jnp.mean((scores @ (x @ params["value"]) @ params["out"]) ** 2)


@jax.jit
def step(params, state, x):
    half = jmp.autocast(loss_fn, jnp.float16, rules={"out": "float32"})
    loss, grads = jmp.value_and_grad(half, jmp.get_loss_scale(state))(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


state = jax.eval_shape(tx.init, params)
step.lower(params, state, jax.ShapeDtypeStruct((4, 8), jnp.float32)).compile()
prefix = "/jax/compilation_cache/"
print(json.dumps([events[prefix + "cache_hits"], events[prefix + "cache_misses"]]))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    def run(seed):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", STEP, str(tmp_path)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return json.loads(run.stdout)

    hits, misses = run("1")
    assert hits == 0
    assert misses > 0
    entries = {path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")}
    assert run("2") == [misses, 0]
    assert {path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")} == entries

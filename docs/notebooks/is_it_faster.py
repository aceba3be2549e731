# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Is it faster?
#
# Measure it on your own step. Half precision does **not** pay
#
# - on a CPU, where XLA mostly converts to float32 and back;
# - if the GPU waits: for data, for Python, or for hundreds of small kernels.
#   Matmuls of width 256 may end before the next kernel is launched;
# - if most of the time goes to the optimizer, to embeddings or to other
#   operations that stay float32;
# - in bfloat16 on a V100 or a T4, which have no bfloat16: use float16;
# - as much as expected where TF32 is on, as it is by default from the A100 on:
#   by the data sheets half precision is then at most twice as fast;
# - for sizes that are no multiples of 8, such as a vocabulary of 50,257.
#
# It pays for large matmuls and convolutions, and for large activations: they
# take half the memory and half the memory traffic. This page times a step in
# float32 and in half precision in plain JAX. Put your own step in its place.

# %%
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_lite as jmp

WIDTH, BATCH = 256, 4096  # On a GPU: 4096 and 8192.
x = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
keys = jax.random.split(jax.random.key(1), 4)
params = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]


def loss_fn(params, x):
    for w in params:
        x = jax.nn.relu(x @ w)
    return jnp.mean(x**2)


tx = jmp.with_loss_scale(optax.adamw(1e-3), jmp.NoOpLossScale())


def make_step(dtype):
    half_loss = jmp.autocast(loss_fn, dtype)

    @jax.jit
    def train_step(params, opt_state, x):
        scale = jmp.get_loss_scale(opt_state)
        loss, grads = jmp.value_and_grad(half_loss, scale)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


# %% [markdown]
# ## Time
#
# - **Compile first**, so that no call measures the compiler.
# - **Block**: JAX returns before the device is done.
# - **Take turns**: a clock that rises, a neighbour on the machine or a warm GPU
#   then change both steps alike.
# - **Median and spread**: the spread is the range of the middle half of the
#   calls.


# %%
def compare(steps, *arguments, rounds=30):
    compiled, times = {}, {name: [] for name in steps}
    for name, step in steps.items():
        compiled[name] = step.lower(*arguments).compile()
        jax.block_until_ready(compiled[name](*arguments))
    for _ in range(rounds):
        for name, step in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(step(*arguments))
            times[name].append(1e3 * (time.perf_counter() - start))
    low, middle, high = np.percentile([*times.values()], [25, 50, 75], axis=1)
    for name, median, spread in zip(times, middle, high - low):
        print(f"{name:10}{median:8.2f} ms, spread {spread:.2f} ms")
    if abs(middle[0] - middle[1]) < max(high - low):
        print("The medians differ by less than the spread: no difference.")
    return compiled


steps = {"bfloat16": make_step("bfloat16"), "float32": make_step("float32")}
compiled = compare(steps, params, tx.init(params), x)

# %% [markdown]
# A step that donates its state cannot be called twice with the same arguments:
# time it without `donate_argnums`, or carry the state from call to call.
#
# ## Memory
#
# `memory_analysis` is what XLA has planned, on any machine. On a GPU
# `memory_stats` has the peak of the whole process, which never falls: look at
# it after the smaller step has run, and again after the larger one.

# %%
for name, step in compiled.items():
    plan = step.memory_analysis()
    temporary, held = plan.temp_size_in_bytes, plan.argument_size_in_bytes
    peak = temporary + held + plan.output_size_in_bytes
    peak -= plan.alias_size_in_bytes
    print(f"{name:10}{temporary / 1e6:8.1f} MB temporary", end=", ")
    print(f"{peak / 1e6:.1f} MB peak")
statistics = jax.local_devices()[0].memory_stats() or {}
print(
    "measured peak:", statistics.get("peak_bytes_in_use", "not on this device")
)

# %% [markdown]
# On a GPU activations take half the memory; on a CPU XLA converts most of them
# to float32 again. Parameters and optimizer state stay float32
# ([Memory](../memory.md) has wrappers for them).
#
# ## It is no faster: why?

# %%
report = jmp.explain(steps["bfloat16"], "float32")
print(report(params, tx.init(params), x).summary())

# %% [markdown]
# - The summary says how many matmuls of the whole step are in half precision,
#   and [Debugging](../diagnosis.md) names what promoted the others.
# - `jmp.programs.read_program(compiled["bfloat16"])` shows on a GPU whether
#   Tensor Cores run them, and `roofline` estimates each module.
# - If both are as they should be, the time is spent elsewhere: see
#   `jax.profiler.trace`.
# - [Performance](../performance.md) has the memory traffic of nine models.

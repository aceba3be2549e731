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
# # float16 in ten minutes
#
# Three lines turn a float32 train step into a float16 one. This page also shows
# how training fails without one of them. The data are scikit-learn's 1,797
# scanned digits, and everything runs on a CPU in about a minute.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp_lite as jmp

images, labels = load_digits(return_X_y=True)
images = jnp.asarray((images / 16).reshape(-1, 8, 8, 1), jnp.float32)
labels = jnp.asarray(labels, jnp.int32)

figure, axes = plt.subplots(1, 8, figsize=(8, 1.2))
for axis, image in zip(axes, images):
    axis.imshow(image[..., 0], cmap="gray_r")
    axis.axis("off")

# %% [markdown]
# ## A float32 program
#
# The network predicts for each pixel the digit that it belongs to. Its loss is
# a mean over 256 x 8 x 8 x 10 = 163,840 numbers, so each gradient is small.


# %%
class PixelClassifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.relu(nn.LayerNorm()(nn.Conv(16, (3, 3))(x)))
        return nn.Conv(10, (1, 1), kernel_init=nn.initializers.normal(0.01))(x)


model = PixelClassifier()
params = model.init(jax.random.key(0), images[:1])["params"]


def loss_fn(params, x, y):
    logits = model.apply({"params": params}, x)
    targets = jax.nn.one_hot(y, 10)[:, None, None, :]
    return jnp.mean((jax.nn.softmax(logits) - targets) ** 2)


# %% [markdown]
# ## Three lines
#
# `train` takes the loss function and the optimizer. With `loss_fn` and a scale
# of 1 it is the float32 program.
#
# 1. `jmp.with_loss_scale` wraps the optimizer and keeps the loss scale in its
#    state.
# 2. `jmp.autocast` runs the matmuls and convolutions of the loss function in
#    float16. The model code stays as it is.
# 3. `jmp.value_and_grad` multiplies the loss by the scale before the backward
#    pass, and divides the gradients by it afterwards.


# %%
def train(loss_fn, tx, steps=120):
    opt_state, new_params, losses, scales = tx.init(params), params, [], []

    @jax.jit
    def train_step(params, opt_state, x, y):
        loss_scale = jmp.get_loss_scale(opt_state)
        loss, grads = jmp.value_and_grad(loss_fn, loss_scale)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for step in range(steps):
        batch = np.random.default_rng(step).integers(0, 1500, 256)
        scales.append(float(jmp.get_loss_scale(opt_state).loss_scale))
        new_params, opt_state, loss = train_step(
            new_params, opt_state, images[batch], labels[batch]
        )
        losses.append(float(loss))
    return np.array(losses), np.array(scales), jmp.get_metrics(opt_state)


adam = optax.adam(1e-2)
half_loss = jmp.autocast(loss_fn, jnp.float16)
# The default period is 2,000 steps; this run is short.
dynamic = jmp.DynamicLossScale(2.0**15, period=10)

runs = {
    "float32": train(loss_fn, jmp.with_loss_scale(adam, jmp.NoOpLossScale())),
    "float16, no scale": train(
        half_loss, jmp.with_loss_scale(adam, jmp.NoOpLossScale())
    ),
    "float16, dynamic scale": train(
        half_loss, jmp.with_loss_scale(adam, dynamic)
    ),
}

# %%
figure, (above, below) = plt.subplots(
    2, 1, figsize=(8, 5), sharex=True, layout="constrained"
)
for name, (losses, _, _) in runs.items():
    above.plot(losses, label=name)
above.set(ylabel="training loss")
above.legend(frameon=False)
below.semilogy(runs["float16, dynamic scale"][1], base=2)
_ = below.set(ylabel="loss scale", xlabel="step")
# %% [markdown]
# Without a scale, float16 does not learn like float32: it rounds every number
# up to 2**-25 to zero, and most of these gradients are smaller. The scale moves
# them into the range of float16. It doubles after 10 finite steps in a row.
# When it gets too large, a gradient becomes inf, the step is skipped, and the
# scale is halved.

# %%
{
    name: float(value)
    for name, value in runs["float16, dynamic scale"][2].items()
}

# %% [markdown]
# ## What ran in float16?
#
# `explain` lists the operations and why each of them runs in its dtype.
# Convolutions run in float16; the softmax, the norms and the loss stay float32.

# %%
half_grad = jmp.autocast(jax.value_and_grad(loss_fn), jnp.float16)
jmp.explain(half_grad)(params, images[:256], labels[:256])

# %% [markdown]
# A line of the source opens to show its operations and the reasons. `save` on
# the report writes this page into a file. Notebooks display policies and loss
# scales as tables:

# %%
jmp.get_policy("mixed_float16")

# %%
dynamic

# %% [markdown]
# ## Next
#
# - [Getting started](../getting-started.md): the same lines for Flax NNX and
#   Equinox.
# - [Choosing a precision](../choosing.md): float16 or bfloat16, and which
#   scale.
# - [Why is my run NaN?](why_is_my_run_nan.py): the other way in which a run can
#   fail.

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
# # Why is my run NaN?
#
# An attention model with manual casts to float16 has two faults. The run stops,
# and the diagnostic tools find both of them. The data are scikit-learn's
# scanned digits, with a row of pixels as a token. It runs on a CPU in about a
# minute.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp_lite as jmp
from jmp_lite import diagnostics

images, labels = load_digits(return_X_y=True)
images = jnp.asarray((images / 16).reshape(-1, 8, 8), jnp.float32)
labels = jnp.asarray(labels, jnp.int32)

shapes = {
    "embed": (8, 32),
    "query": (32, 32),
    "key": (32, 32),
    "head": (256, 10),
}
keys = jax.random.split(jax.random.key(0), len(shapes))
params = {
    name: jax.random.normal(key, shape) / np.sqrt(shape[0])
    for key, (name, shape) in zip(keys, shapes.items())
}


# %%
def make_loss(mask_value):
    def loss_fn(params, images, labels):
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
        with jax.named_scope("embed"):
            h = jnp.tanh(images.astype(jnp.float16) @ half["embed"])
        with jax.named_scope("attention"):
            keys = (h @ half["key"]).swapaxes(1, 2)
            scores = (h @ half["query"]) @ keys / 32**0.5
            filled = images.sum(-1)[:, None, :] > 0
            # A row sees the rows above it. The first row sees nothing.
            seen = jnp.tril(jnp.ones((8, 8), bool), -1) & filled
            mask = jnp.where(seen, 0.0, mask_value).astype(jnp.float16)
            h = h + jax.nn.softmax(scores + mask) @ h
        with jax.named_scope("head"):
            h = h.reshape(-1, 256)
            logits = (h @ half["head"]).astype(jnp.float32)
        targets = jax.nn.one_hot(labels, 10)
        return jnp.mean((jax.nn.softmax(logits) - targets) ** 2) / 1e5

    return loss_fn


def train(loss_fn, loss_scale, steps=200):
    tx = jmp.with_loss_scale(optax.adam(1e-2, eps=1e-12), loss_scale)
    new_params, opt_state, losses = params, tx.init(params), []

    @jax.jit
    def train_step(params, opt_state, x, y):
        scale = jmp.get_loss_scale(opt_state)
        loss, grads = jmp.value_and_grad(loss_fn, scale)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for step in range(steps):
        chosen = np.random.default_rng(step).integers(0, 1797, 64)
        new_params, opt_state, loss = train_step(
            new_params, opt_state, images[chosen], labels[chosen]
        )
        losses.append(float(loss))
        jmp.raise_if_stuck(opt_state)
    return np.array(losses)


# %% [markdown]
# ## The run stops
#
# Every step has NaN in its gradients, so every step is skipped and the scale
# falls. `raise_if_stuck` ends such a run and names the parameters whose
# gradients were not finite.

# %%
broken = make_loss(mask_value=-1e9)
try:
    train(broken, jmp.DynamicLossScale())
except FloatingPointError as error:
    print(error)

# %% [markdown]
# ## Which operation came first?
#
# `find_nonfinite` runs the loss and its gradients once and measures every
# value.

# %%
diagnostics.find_nonfinite(broken, loss_scale=jmp.StaticLossScale(1.0))(
    params, images[:64], labels[:64]
)

# %% [markdown]
# -1e9 is beyond the range of float16, so the mask is -inf. The first row of an
# image sees no other row: all its scores are -inf, and its softmax is NaN. The
# report lists the remedies that it has tried. Here we give the mask a number
# that float16 can hold.
#
# ## The run continues, but does not learn

# %%
fixed = make_loss(mask_value=float(jnp.finfo(jnp.float16).min) / 2)
try:
    train(fixed, jmp.NoOpLossScale())
except FloatingPointError as error:
    print(error)

# %% [markdown]
# Nothing is inf, so no step is skipped, and tools that look for NaN find
# nothing. `raise_if_stuck` sees that all gradients were zero.
# `profile_ranges` counts the gradients that float16 rounds to zero at
# each loss scale.

# %%
ranges = diagnostics.profile_ranges(fixed, loss_scale=jmp.NoOpLossScale())(
    params, images[:64], labels[:64]
)
ranges

# %%
ranges.dynamic_scale

# %% [markdown]
# With the recommended scale the model learns:

# %%
losses = train(fixed, ranges.dynamic_scale)
start, end = losses[:10].mean(), losses[-10:].mean()
print(f"the loss goes from {start:.3e} to {end:.3e}")

# %% [markdown]
# `diagnostics.doctor` runs all of these tools at once: see
# [Diagnosis](../diagnosis.md).

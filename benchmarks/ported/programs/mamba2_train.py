"""Trains bonsai's Mamba2. This file is ours: bonsai has the model and no train step. The port changes it."""

# pyright: reportMissingImports=false

import optax
from bonsai.models.mamba2.modeling import Mamba2ForCausalLM, ModelConfig
from flax import nnx

model = Mamba2ForCausalLM(ModelConfig.tiny(), rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)


def loss_fn(model, tokens):
    return model(tokens, labels=tokens)["loss"]


@nnx.jit
def train_step(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss

"""nanoGPT in JAX, by jenkspt: its train step, on bytes of the standard library."""

# pyright: reportMissingImports=false

import types

import numpy as np

from benchmarks.ported.data import byte_batches
from benchmarks.ported.port import Edit, Port
from benchmarks.ported.record import Recorder
from benchmarks.ported.stand_ins import stand_in

PORT = Port(
    title="nanoGPT in JAX",
    repository="jenkspt/gpt-jax",
    revision="f22a46e81e72fd44c8115f8b63dcfa53eb0a6d14",
    file="train.py",
    edits=(
        Edit("import optax\n", "import optax\nimport jmp_lite as jmp\n"),
        Edit("    def loss_fn(", '    @jmp.autocast(dtype="float16")\n    def loss_fn('),
        Edit(
            "jax.value_and_grad(loss_fn, has_aux=False)(",
            "jmp.value_and_grad(loss_fn, jmp.get_loss_scale(state))(",
        ),
        Edit("tx=optimizer)", "tx=jmp.with_loss_scale(optimizer))"),
    ),
    size="The program's train step, on bytes of text: 2 blocks of width 64, 8 sequences of 64",
    note="With today's Flax, its mask for weight decay has to be a dict.",
)
OTHERS = ()


def run(steps: int) -> Recorder:
    """Trains for some steps. Returns the recorded step."""
    stand_in("tensorflow", "wandb", "tyro")
    import jax
    import optax
    import train
    from flax.jax_utils import replicate
    from model import GPTConfig

    # Today's Flax has parameters in a dict, and optax wants the mask in a dict as well.
    train.frozen_dict = types.SimpleNamespace(freeze=lambda tree: tree)
    model = GPTConfig(
        block_size=64, vocab_size=256, num_layers=2, num_heads=4, num_embeds=64, dtype="float32"
    )
    config = train.TrainConfig(model=model)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 5, steps, 1e-4)
    state = replicate(train.init_train_state(jax.random.PRNGKey(0), config, schedule))
    keys = jax.random.split(jax.random.PRNGKey(1), 1)
    recorder = Recorder(
        train.train_step,
        loss=lambda result: result[0],
        params=lambda args: args[0].params,
        new_params=lambda args, result: result[1].params,
    )
    for tokens in byte_batches(steps, 8, 65):
        _, state = recorder(state, tokens[None].astype(np.int32), keys)
    return recorder

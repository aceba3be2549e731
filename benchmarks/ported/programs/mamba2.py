"""Mamba2 in NNX, of JAX's bonsai, on bytes of the standard library."""

# pyright: reportMissingImports=false

import pathlib

import numpy as np

from benchmarks.ported.data import byte_batches
from benchmarks.ported.port import Edit, Port
from benchmarks.ported.record import Recorder

PORT = Port(
    title="bonsai, Mamba2 in NNX",
    repository="jax-ml/bonsai",
    revision="36284254cf738d99c1c5d1e3a292d27656a0a365",
    file="mamba2_train.py",
    own=(pathlib.Path(__file__).parent / "mamba2_train.py").read_text(),
    edits=(
        Edit("import optax\n", "import jmp_lite as jmp\nimport optax\n"),
        Edit("optax.adamw(3e-3)", "jmp.with_loss_scale(optax.adamw(3e-3))"),
        Edit("def loss_fn(", '@jmp.autocast(dtype="float16")\ndef loss_fn('),
        Edit(
            "    loss, grads = nnx.value_and_grad(loss_fn)(",
            "    loss_scale = jmp.get_loss_scale(optimizer)\n"
            "    grad_fn = jmp.value_and_grad(loss_fn, loss_scale, value_and_grad_fn=nnx.value_and_grad)\n"
            "    loss, grads = grad_fn(",
        ),
    ),
    size="Its tiny configuration, on bytes of text: 2 blocks of width 64, 8 sequences of 64",
    note="The repository has no train step; ours is `benchmarks/ported/programs/mamba2_train.py`. The "
    "0.7 % in float32 are einsums without a sum, which are element-wise products.",
)
OTHERS = ()


def run(steps: int) -> Recorder:
    """Trains for some steps. Returns the recorded step."""
    import mamba2_train
    from flax import nnx

    params = lambda args: nnx.state(args[0], nnx.Param)
    recorder = Recorder(
        mamba2_train.train_step,
        loss=lambda result: result,
        params=params,
        new_params=lambda args, result: params(args),
    )
    for tokens in byte_batches(steps, 8, 64):
        recorder(mamba2_train.model, mamba2_train.optimizer, tokens.astype(np.int32))
    return recorder

"""A program of ours and its port, for a run from end to end."""

import numpy as np

from benchmarks.ported.port import Edit, Port
from benchmarks.ported.record import Recorder, with_inf

TEXT = """
import jax
import jax.numpy as jnp
import optax

tx = optax.adam(1e-2)


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - 1) ** 2)


@jax.jit
def train_step(params, opt_state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss
"""
PORT = Port(
    title="Small",
    repository="someone/small",
    revision="0" * 40,
    file="small.py",
    edits=(
        Edit("import optax\n", "import optax\nimport jmp_lite as jmp\n"),
        Edit("optax.adam(1e-2)", "jmp.with_loss_scale(optax.adam(1e-2))"),
        Edit("def loss_fn(", '@jmp.autocast(dtype="float16")\ndef loss_fn('),
        Edit("jax.value_and_grad(loss_fn)(", "jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state))("),
    ),
    size="tiny",
)


def run(steps: int) -> Recorder:
    import small  # pyright: ignore[reportMissingImports]

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(8, 16)), "v": rng.normal(size=(16, 1))}
    params = {name: 0.1 * value.astype(np.float32) for name, value in params.items()}
    opt_state = small.tx.init(params)
    recorder = Recorder(
        small.train_step,
        loss=lambda result: result[2],
        spoil=lambda args: (*args[:2], with_inf(args[2])),
    )
    for _ in range(steps):
        params, opt_state, _ = recorder(params, opt_state, rng.uniform(size=(32, 8)).astype(np.float32))
    return recorder

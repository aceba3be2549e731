"""big_vision's ViT: its train.py from start to end, on scanned digits."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import types

import jax
import numpy as np

from benchmarks.ported.data import digit_batches
from benchmarks.ported.port import Edit, Port
from benchmarks.ported.record import Recorder, recorded, with_inf
from benchmarks.ported.stand_ins import stand_in

PORT = Port(
    title="big_vision, ViT",
    repository="google-research/big_vision",
    revision="0127fb6b337ee2a27bf4e54dea79cff176527356",
    file="big_vision/train.py",
    edits=(
        Edit("import optax\n", "import optax\nimport jmp_lite as jmp\n"),
        Edit("  opt_shape =", "  tx = jmp.with_loss_scale(tx)\n  opt_shape ="),
        Edit("    def loss_fn(params):", '    @jmp.autocast(dtype="float16")\n    def loss_fn(params):'),
        Edit("jax.value_and_grad(loss_fn)(", "jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt))("),
    ),
    size="The program's main, on scanned digits: 2 blocks of width 64, 16 images of 32 x 32",
    packages="clu einops ml_collections",
    note=(
        "The program stops with an error if a step that it logs has a gradient that is not finite. In "
        "float16 that can be a skipped step."
    ),
)
OTHERS = ()


def run(steps: int) -> Recorder:
    """Trains for some steps with the program's own main. Returns the recorded step."""
    stand_in("tensorflow", "big_vision.input_pipeline", "big_vision.evaluators.common")
    from big_vision import train
    from ml_collections import ConfigDict

    config = ConfigDict(
        {
            "num_classes": 10,
            "total_steps": steps,
            "input": {"batch_size": 16},
            "model_name": "vit",
            "model": {"width": 64, "depth": 2, "mlp_dim": 128, "num_heads": 4, "patch_size": (8, 8)},
            "loss": "softmax_xent",
            "optax_name": "scale_by_adam",
            "lr": 1e-2,
            "schedule": {"warmup_steps": 5, "decay_type": "cosine"},
            "pp_modules": (),
            "log_training_steps": 10,
            "evals": {},
        }
    )
    batches = [
        {"image": batch["image"], "labels": np.eye(10, dtype=np.float32)[batch["label"]]}
        for batch in digit_batches(steps, 16, 32)
    ]
    dtype = types.SimpleNamespace(as_numpy_dtype=np.float32)  # As TensorFlow's.
    spec = {"image": types.SimpleNamespace(shape=(16, 32, 32, 3), dtype=dtype)}
    train.flags = types.SimpleNamespace(
        FLAGS=types.SimpleNamespace(config=config, workdir=None, cleanup=False)
    )
    train.eval_common.from_config = lambda *args: ()
    train.u.sync = lambda: None  # JAX has removed PositionalSharding.
    train.u.startstop_prof = lambda *args, **kwargs: None  # The program would write a profile.
    train.input_pipeline.training = lambda config: (types.SimpleNamespace(element_spec=spec), 1000)
    train.input_pipeline.start_global = lambda *args: jax.device_put(batches)
    recorder = Recorder(
        None,
        loss=lambda result: result[1]["training_loss"],
        params=lambda args: args[0]["params"],
        new_params=lambda args, result: result[0]["params"],
        spoil=lambda args: (*args[:2], with_inf(args[2])),
    )
    with recorded(jax, "jit", "update_fn", recorder):
        train.main(None)
    return recorder

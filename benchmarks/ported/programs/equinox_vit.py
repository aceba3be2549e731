"""Equinox's ViT, a notebook: its own train function, on scanned digits."""

# pyright: reportMissingImports=false

import types

import numpy as np

from benchmarks.ported.data import digit_batches
from benchmarks.ported.port import Edit, Lines, Port, cells
from benchmarks.ported.record import Recorder, with_inf
from benchmarks.ported.stand_ins import stand_in

PORT = Port(
    title="Equinox, ViT",
    repository="patrick-kidger/equinox",
    revision="9336d820b2ef66b360fc6cb3611b3da5cefbb14d",
    file="docs/examples/vision_transformer.ipynb",
    folder="docs/examples",
    edits=(
        Edit("import optax ", "import jmp_lite as jmp\nimport optax "),
        Edit("@eqx.filter_value_and_grad\n", '@jmp.autocast(dtype="float16")\n'),
        Edit(
            "    loss, grads = compute_grads(",
            "    grad_fn = jmp.value_and_grad(\n"
            "        compute_grads, jmp.get_loss_scale(state), value_and_grad_fn=eqx.filter_value_and_grad\n"
            "    )\n"
            "    loss, grads = grad_fn(",
        ),
        Edit(
            "state = optimizer.init(", "optimizer = jmp.with_loss_scale(optimizer)\nstate = optimizer.init("
        ),
    ),
    size="The train function of the notebook, on scanned digits: 2 blocks of width 64, 16 images of 32 x 32",
    packages="einops",
)
OTHERS = (
    Lines(
        "mpx",
        "its own ViT example",
        "Data-Science-in-Mechanical-Engineering/mixed_precision_for_JAX",
        "8b5262c2af80480540ce39aca0436e6b638be0d3",
        "examples/train_vit.py",
        (
            (24, 24),
            (56, 57),
            (79, 79),
            (91, 93),
            (134, 134),
            (137, 137),
            (147, 147),
            (165, 165),
            (171, 171),
            (194, 194),
            (276, 277),
            (326, 326),
            (333, 333),
        ),
    ),
)


def run(steps: int) -> Recorder:
    """Trains for some steps. Returns the recorded step."""
    stand_in("torch", "torchvision")
    names = cells("vision_transformer.py", "", "key = jr.PRNGKey(2003)")
    names |= {"embedding_dim": 64, "hidden_dim": 128, "num_heads": 4, "num_layers": 2}
    names |= {"batch_size": 16, "lr": 3e-3, "num_steps": steps}
    recorder = names["step_model"] = Recorder(
        names["step_model"],
        loss=lambda result: result[2],
        spoil=lambda args: (*args[:3], with_inf(args[3]), *args[4:]),
    )
    tensor = lambda array: types.SimpleNamespace(numpy=lambda: array)  # As torch's.
    names["trainloader"] = [
        (tensor(np.moveaxis(batch["image"], -1, 1)), tensor(batch["label"]))
        for batch in digit_batches(steps, 16, 32)
    ]
    cells("vision_transformer.py", "key = jr.PRNGKey(2003)", "accuracies =", names)
    return recorder

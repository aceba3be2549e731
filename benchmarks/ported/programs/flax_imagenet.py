"""Flax's ImageNet example: its train step under pmap, on scanned digits."""

# pyright: reportMissingImports=false

import functools

import jax

from benchmarks.ported.data import digit_batches
from benchmarks.ported.port import Edit, Lines, Port
from benchmarks.ported.record import Recorder, with_inf
from benchmarks.ported.stand_ins import stand_in

PORT = Port(
    title="Flax, ImageNet",
    repository="google/flax",
    revision="18f8f311c275d57f46d95e41b15aa97b454754c0",
    file="examples/imagenet/train.py",
    folder="examples/imagenet",
    edits=(
        Edit("import jax\n", "import jax\nimport jmp_lite as jmp\n"),
        Edit("  def loss_fn(params):", '  @jmp.autocast(dtype="float16")\n  def loss_fn(params):'),
        Edit(
            "jax.value_and_grad(loss_fn, has_aux=True)",
            "jmp.value_and_grad(loss_fn, jmp.get_loss_scale(state), has_aux=True)",
        ),
        Edit(
            "  if dynamic_scale:\n    # if",
            "  new_state = new_state.replace(\n"
            "      batch_stats=jmp.select_tree(\n"
            "          jmp.grads_finite(new_state), new_state.batch_stats, state.batch_stats))\n"
            "  if dynamic_scale:\n    # if",
        ),
        Edit("  state = TrainState.create(", "  tx = jmp.with_loss_scale(tx)\n  state = TrainState.create("),
    ),
    size="Its train step under pmap, on scanned digits: a ResNet of 2 blocks, 16 images of 32 x 32",
    packages="ml_collections",
    note=(
        "Three of the lines keep the old batch statistics after a skipped step, which the program's own "
        "DynamicScale does not do. It is off here, as always on a CPU."
    ),
)
OTHERS = (
    Lines(
        "DynamicScale",
        "the same program, without the switches between precisions and without the batch statistics",
        "google/flax",
        "18f8f311c275d57f46d95e41b15aa97b454754c0",
        "examples/imagenet/train.py",
        ((31, 31), (59, 59), (133, 133), (137, 140), (157, 168), (222, 222), (250, 250), (263, 263)),
    ),
)


def run(steps: int) -> Recorder:
    """Trains for some steps. Returns the recorded step."""
    stand_in("tensorflow", "tensorflow_datasets", "clu", "input_pipeline")
    import ml_collections
    import models
    import train

    train.NUM_CLASSES = 10
    resnet = functools.partial(
        models.ResNet, stage_sizes=[1, 1], block_cls=models.ResNetBlock, num_filters=16
    )
    model = train.create_model(model_cls=resnet, half_precision=False)
    config = ml_collections.ConfigDict(
        {"half_precision": False, "momentum": 0.9, "warmup_epochs": 0, "num_epochs": 1}
    )
    schedule = train.create_learning_rate_fn(config, 0.05, steps)
    state = train.create_train_state(jax.random.key(0), config, model, 32, schedule)
    # The next five lines are those of the program's main.
    step = jax.pmap(
        functools.partial(train.train_step, learning_rate_fn=schedule),
        in_axes=(None, 0),
        out_axes=(None, 0),
        axis_name="batch",
    )
    held = lambda state: (state.params, state.batch_stats)
    recorder = Recorder(
        step,
        loss=lambda result: result[1]["loss"],
        params=lambda args: held(args[0]),
        new_params=lambda args, result: held(result[0]),
        spoil=lambda args: (args[0], with_inf(args[1])),
    )
    for batch in digit_batches(steps, 16, 32):
        state, _ = recorder(state, jax.tree.map(lambda x: x[None], batch))
    return recorder

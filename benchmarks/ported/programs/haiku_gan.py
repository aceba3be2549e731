"""Haiku's GAN, a notebook: the class and its two optimizers, on scanned digits."""

# pyright: reportMissingImports=false

import numpy as np

from benchmarks.ported.data import digit_batches
from benchmarks.ported.port import Edit, Lines, Port, cells
from benchmarks.ported.record import Recorder, with_inf
from benchmarks.ported.stand_ins import stand_in

PORT = Port(
    title="Haiku, GAN",
    repository="google-deepmind/dm-haiku",
    revision="f4d858a5cbb29140855d68f81f5fd625e078a5ae",
    file="examples/mnist_gan.ipynb",
    folder="examples",
    edits=(
        Edit("import optax\n", "import optax\nimport jmp_lite as jmp\n"),
        Edit(
            "gen=optax.adam(1e-4, b1=0.5, b2=0.9),",
            "gen=jmp.with_loss_scale(optax.adam(1e-4, b1=0.5, b2=0.9)),",
        ),
        Edit(
            "disc=optax.adam(1e-4, b1=0.5, b2=0.9))",
            "disc=jmp.with_loss_scale(optax.adam(1e-4, b1=0.5, b2=0.9)))",
        ),
        Edit(
            "disc_loss, disc_grads = jax.value_and_grad(self.disc_loss)(",
            "disc_loss, disc_grads = jmp.value_and_grad(\n"
            "        jmp.autocast(self.disc_loss, jnp.float16),\n"
            "        jmp.get_loss_scale(gan_state.opt_state.disc))(",
        ),
        Edit(
            "gen_loss, gen_grads = jax.value_and_grad(self.gen_loss)(",
            "gen_loss, gen_grads = jmp.value_and_grad(\n"
            "        jmp.autocast(self.gen_loss, jnp.float16),\n"
            "        jmp.get_loss_scale(gan_state.opt_state.gen))(",
        ),
    ),
    size="The class of the notebook, on scanned digits: 32 images of 28 x 28",
    note=(
        "There are two optimizers and two loss scales, and the table shows the loss of the discriminator. "
        "The inf is in an image, so the discriminator skips the step; the generator, which sees no image, "
        "does not."
    ),
)
OTHERS = (
    Lines(
        "jmp",
        "Haiku's own ImageNet example",
        "google-deepmind/dm-haiku",
        "f4d858a5cbb29140855d68f81f5fd625e078a5ae",
        "examples/imagenet/train.py",
        (
            (30, 30),
            (70, 70),
            (72, 73),
            (133, 133),
            (145, 145),
            (154, 154),
            (156, 156),
            (161, 163),
            (170, 170),
            (177, 182),
            (188, 188),
            (190, 190),
            (198, 199),
            (275, 275),
            (282, 283),
            (287, 288),
        ),
    ),
)


def run(steps: int) -> Recorder:
    """Trains for some steps. Returns the recorded step. The loss is the loss of the discriminator."""
    stand_in("seaborn", "tensorflow", "tensorflow_datasets", "matplotlib")
    import jax

    names = cells("mnist_gan.py", "", "num_steps =")
    gan = names["GAN"](num_latents=20)
    batches = [batch["image"][..., :1] for batch in digit_batches(steps, 32, 24)]
    batches = [np.pad(batch, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=-1) for batch in batches]
    state = gan.initial_state(jax.random.PRNGKey(0), batches[0])
    recorder = Recorder(
        gan.update,
        loss=lambda result: result[2]["disc_loss"],
        params=lambda args: args[1].params.disc,  # The generator does not see the images.
        new_params=lambda args, result: result[1].params.disc,
        spoil=lambda args: (*args[:2], with_inf(args[2])),
    )
    rng = jax.random.PRNGKey(1729)
    for batch in batches:
        rng, state, _ = recorder(rng, state, batch)
    return recorder

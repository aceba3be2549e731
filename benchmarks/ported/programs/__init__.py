"""The ported programs: each file has a `PORT`, `OTHERS`, and `run(steps)`, which returns a `Recorder`.

`run` is called in the folder of the program, with the changed or the unchanged file. It imports the program's
own modules, makes a model of a tiny size, and trains it.
"""

NAMES = (
    "big_vision",
    "gpt_jax",
    "easylm",
    "purejaxrl",
    "haiku_gan",
    "equinox_vit",
    "flax_imagenet",
    "mamba2",
)

"""A Keras 3 model, trained in float16 on JAX with optax. The model code stays the same.

    pip install keras
    python examples/keras_model.py
    python examples/keras_model.py --precision bfloat16 --save out/digits.keras

A small network with BatchNormalization and Dropout learns scikit-learn's scans of digits. `autocast` goes
around `model.stateless_call`, the model as a function of its variables. `model.fit` is not used: it brings
the train step and the optimizer of Keras (docs/migrating/tensorflow.md shows how it runs in half precision).
The trained values are put back into the model, so `predict`, `evaluate` and `save` work as usual.
"""

import argparse
import functools
import os
import sys
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads it when it is imported.

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jmp_lite as jmp

Precision = Literal["float32", "bfloat16", "float16"]
LOSS_SCALES: dict[Precision, jmp.LossScale] = {
    "float32": jmp.NoOpLossScale(),
    "bfloat16": jmp.NoOpLossScale(),
    "float16": jmp.DynamicLossScale(2.0**15),
}
Values = list[jax.Array]  # Of the variables of a model, in their order.


def build_model() -> keras.Model:
    """Keep Keras's own policy at float32, its default: autocast brings the half precision in."""
    layers = keras.layers
    stages: list[Any] = [keras.Input((8, 8, 1))]
    for features in (32, 64):
        stages += [layers.Conv2D(features, 3, padding="same", use_bias=False)]
        stages += [layers.BatchNormalization(momentum=0.9), layers.ReLU()]
    stages += [layers.GlobalAveragePooling2D(), layers.Dropout(0.1), layers.Dense(10)]
    return keras.Sequential(stages)


# Values are copied on the way out and on the way back. The train step donates its arguments, and Keras's
# `predict` and `evaluate` donate the arrays of the model. An array that both have would be deleted.


def values_of(variables: list[Any]) -> Values:
    return [jnp.copy(variable.value) for variable in variables]


def put_back(variables: list[Any], values: Values) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(jnp.copy(value))


def make_train_step(model: Any, tx: optax.GradientTransformation, precision: Precision) -> Any:
    def loss_fn(trainable: Values, others: Values, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Values]:
        logits, others, losses = model.stateless_call(trainable, others, x, training=True, return_losses=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss + sum(losses), others  # `losses` are those of regularizers and of `add_loss`.

    loss_fn = jmp.autocast(loss_fn, precision)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def train_step(trainable: Values, others: Values, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        value_and_grad = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state), has_aux=True)
        (loss, new_others), grads = value_and_grad(trainable, others, x, y)
        updates, opt_state = tx.update(grads, opt_state, trainable)
        # The variables that are not trained, moving statistics and seeds, stay on a skipped step.
        others = jmp.select_tree(jmp.grads_finite(opt_state), new_others, others)
        return optax.apply_updates(trainable, updates), others, opt_state, loss

    return train_step


def load_data() -> Any:
    """Returns training images `(1347, 8, 8, 1)`, test images `(450, 8, 8, 1)`, and the labels of both."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32)
    return train_test_split(images, labels.astype(np.int32), test_size=450, random_state=0, stratify=labels)


def train(precision: Precision, epochs: int, batch_size: int = 64) -> tuple[keras.Model, Any]:
    """Returns the trained model and the state of the optimizer."""
    keras.utils.set_random_seed(0)
    train_x, test_x, train_y, test_y = load_data()
    steps = len(train_x) // batch_size
    model: Any = build_model()
    schedule = optax.cosine_decay_schedule(1e-2, epochs * steps)
    tx = jmp.with_loss_scale(optax.adamw(schedule), LOSS_SCALES[precision], clip_norm=1.0)
    train_step = make_train_step(model, tx, precision)

    trainable, others = values_of(model.trainable_variables), values_of(model.non_trainable_variables)
    opt_state = tx.init(trainable)
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(train_x))[: steps * batch_size]
        losses = []
        for batch in order.reshape(steps, batch_size):
            trainable, others, opt_state, loss = train_step(
                trainable, others, opt_state, train_x[batch], train_y[batch]
            )
            losses.append(loss)
        jmp.raise_if_stuck(opt_state)
        put_back(model.trainable_variables, trainable)
        put_back(model.non_trainable_variables, others)
        # From here on the model is an ordinary trained model of Keras, in float32.
        accuracy = np.mean(model.predict(test_x, verbose=0).argmax(-1) == test_y)
        metrics = jmp.get_metrics(opt_state)
        print(
            f"epoch {epoch + 1:3}   loss {np.ma.masked_invalid(np.array(losses)).mean():.4f}   "
            f"test accuracy {accuracy:.1%}   loss scale {metrics['loss_scale']:g}   "
            f"skipped {metrics['skipped_steps']}"
        )
    return model, opt_state


def main(arguments: list[str] | None = None) -> tuple[keras.Model, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--precision",
        choices=LOSS_SCALES,
        default="float16",
        help="of matmuls and convolutions (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs", type=int, default=10, help="passes over the training images (default: %(default)s)"
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE.keras",
        help="a file for the trained model; without it nothing is saved",
    )
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error(f"--epochs should be 1 or above. Got {options.epochs}.")
    if options.save is not None and options.save.suffix != ".keras":
        parser.error(f"--save should end in .keras. Got {options.save}.")
    if options.save is not None:
        try:  # Before the training, not after it.
            options.save.parent.mkdir(parents=True, exist_ok=True)
            options.save.open("ab").close()
        except OSError as error:
            parser.error(f"--save: cannot write {options.save}: {error.strerror}.")
    if keras.backend.backend() != "jax":
        parser.error(
            f"Keras runs on {keras.backend.backend()}. Set the environment variable KERAS_BACKEND=jax."
        )
    try:
        model, opt_state = train(options.precision, options.epochs)
    except KeyboardInterrupt:
        sys.exit("\nStopped.")
    if options.save is not None:
        model.save(options.save)
        print(f"Wrote {options.save}.")
    return model, opt_state


if __name__ == "__main__":
    main()

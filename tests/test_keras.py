"""`examples/keras_model.py`: a Keras model on JAX under autocast, with a skipped step, and put back."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
import jmp_lite.linen
import jmp_lite.nnx

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # What it says on import is not ours to mend.
    keras = pytest.importorskip("keras")
if keras.backend.backend() != "jax":
    pytest.skip("Keras was configured for another backend", allow_module_level=True)

from examples import keras_model

# Keras calls `np.array` on its variables in the way of NumPy 1.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


class Start:
    """A model, its step in float16, and the first state."""

    def __init__(self, model):
        self.model = model
        self.tx = jmp.with_loss_scale(optax.adamw(1e-2))
        self.step = keras_model.make_train_step(model, self.tx, "float16")

    def state(self):
        trainable = keras_model.values_of(self.model.trainable_variables)
        others = keras_model.values_of(self.model.non_trainable_variables)
        return trainable, others, self.tx.init(trainable)


@pytest.fixture(scope="module")
def start():
    keras.utils.set_random_seed(0)
    return Start(keras_model.build_model())


@pytest.fixture(scope="module")
def batch():
    images, _, labels, _ = keras_model.load_data()
    return images[:16], labels[:16]


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def names(model):
    return [variable.path.split("/")[-1] for variable in model.non_trainable_variables]


@pytest.mark.slow
def test_a_step_trains_and_moves_statistics_and_seeds(start, batch):
    first = jax.device_get(start.state())
    trainable, others, opt_state, loss = start.step(*start.state(), *batch)
    assert all(np.any(new != old) for new, old in zip(trainable, first[0], strict=True))
    assert all(np.any(new != old) for new, old in zip(others, first[1], strict=True))
    assert names(start.model) == ["moving_mean", "moving_variance"] * 2 + ["seed_generator_state"]
    assert {value.dtype.name for value in trainable} == {"float32"}
    assert jmp.grads_finite(opt_state)
    assert 2 < float(loss) < 3


@pytest.mark.slow
def test_a_skipped_step_leaves_every_bit(start, batch):
    images, labels = batch
    state = start.step(*start.state(), images, labels)[:3]
    before = jax.device_get(state)
    images = images.copy()
    images[0, 0, 0, 0] = np.inf
    trainable, others, opt_state, _ = start.step(*state, images, labels)
    assert bits(trainable) == bits(before[0])
    assert bits(others) == bits(before[1])
    assert bits(opt_state.inner_state) == bits(before[2].inner_state)
    assert jmp.get_loss_scale(opt_state).loss_scale == before[2].loss_scale.loss_scale / 2
    assert jmp.get_metrics(opt_state)["skipped_steps"] == 1


def test_the_products_are_half_and_the_rest_is_not(start, batch):
    def loss_fn(trainable, others, x):
        return jnp.mean(start.model.stateless_call(trainable, others, x, training=True)[0] ** 2)

    trainable, others, _ = start.state()
    report = jmp.explain(jmp.autocast(loss_fn, jnp.float16))(trainable, others, batch[0])
    dtypes = {operation.name: operation.in_half for operation in report.operations}
    assert dtypes["conv_general_dilated"]
    assert dtypes["dot_general"]
    assert not dtypes["rsqrt"]  # Of BatchNormalization.


@pytest.mark.slow
def test_the_model_has_the_trained_values_and_can_be_saved(tmp_path, capsys):
    path = tmp_path / "new" / "digits.keras"
    model, opt_state = keras_model.main(["--epochs", "1", "--save", str(path)])
    assert "epoch   1   loss 1." in capsys.readouterr().out
    assert int(opt_state.counts[0]) == 21  # 1347 images in batches of 64.
    _, test_x, _, _ = keras_model.load_data()
    values = [keras_model.values_of(v) for v in (model.trainable_variables, model.non_trainable_variables)]
    expected, _ = model.stateless_call(*values, test_x, training=False)
    np.testing.assert_allclose(model.predict(test_x, verbose=0), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(
        keras.models.load_model(path).predict(test_x, verbose=0), model.predict(test_x, verbose=0)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", [*keras_model.LOSS_SCALES][::-1])
def test_each_precision_learns_the_digits(precision):
    model, _ = keras_model.main(["--precision", precision])
    _, test_x, _, test_y = keras_model.load_data()
    assert np.mean(model.predict(test_x, verbose=0).argmax(-1) == test_y) > 0.97


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--epochs", "0"], "--epochs should be 1 or above. Got 0."),
        (["--precision", "float8"], "invalid choice: 'float8'"),
        (["--save", "out/digits.h5"], "--save should end in .keras. Got out/digits.h5."),
    ],
)
def test_a_wrong_option_is_a_message(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        keras_model.main(arguments)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("flax", [jmp_lite.linen, jmp_lite.nnx], ids=["linen", "nnx"])
def test_with_policy_takes_no_keras_model(flax):
    with pytest.raises(TypeError, match=r"takes a flax\.(linen|nnx)\.Module\. Got Sequential\."):
        flax.with_policy(keras_model.build_model(), jmp.get_policy("mixed_float16"))


def fitted(dtype):
    """Losses of `model.fit` with the method of docs/migrating/tensorflow.md, the model, and its optimizer."""

    class HalfModel(keras.Model):
        def compute_loss_and_updates(self, *args, **kwargs):
            return jmp.autocast(super().compute_loss_and_updates, dtype)(*args, **kwargs)

    keras.utils.set_random_seed(0)
    layers, inputs = keras.layers, keras.Input((16,))
    hidden = layers.ReLU()(layers.BatchNormalization(momentum=0.8)(layers.Dense(32)(inputs)))
    model = HalfModel(inputs, layers.Dense(4)(layers.Dropout(0.1)(hidden)))
    optimizer = keras.optimizers.Adam(1e-2)
    if dtype == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).normal(size=(256, 16)).astype(np.float32)
    y = ((x[:, 0] > 0) + 2 * (x[:, 1] > 0)).astype(np.int32)
    return model.fit(x, y, batch_size=32, epochs=3, verbose=0).history["loss"], model, optimizer


@pytest.mark.slow
def test_fit_trains_in_half_if_the_model_overrides_one_method():
    expected, _, _ = fitted("float32")
    assert expected[-1] < expected[0] * 0.6
    for dtype in ("bfloat16", "float16"):
        losses, model, optimizer = fitted(dtype)
        assert losses != expected
        np.testing.assert_allclose(losses, expected, rtol=5e-3)
        assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
        assert np.any(model.layers[2].moving_mean.value)
    assert float(optimizer.dynamic_scale) == 2.0**15

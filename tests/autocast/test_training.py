"""Training under `autocast` in float16 with a loss scale: where float32 ends, float16 ends."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_lite as jmp
from tests.support import models
from tests.support.jaxprs import products
from tests.support.steps import bits

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.

# The scale doubles every 10 steps because these runs are short.
SCALES = {
    "float32": jmp.NoOpLossScale(),
    "float16": jmp.DynamicLossScale(2.0**15, period=10),
}
SEEDS = range(3)


def precision(arm, loss):
    return loss if arm == "float32" else jmp.autocast(loss, "float16")


class PixelClassifier(nn.Module):
    """Says for every pixel which digit it belongs to. The head begins undecided, as those of detectors do."""

    @nn.compact
    def __call__(self, x):
        for features in (8, 8):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
        return nn.Conv(10, (1, 1), kernel_init=nn.initializers.normal(0.01))(x)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for features in (64, 64):
            x = nn.Dense(features, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10)(x)


def digits():
    """Training and test images `(batch, 64)` and their labels."""
    import sklearn.datasets

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images, labels = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
    return (images[:1344], labels[:1344]), (images[1344:], labels[1344:])


def squared_error(logits, labels):
    return jnp.mean((jax.nn.softmax(logits) - jax.nn.one_hot(labels, 10)) ** 2)


def test_a_loss_scale_brings_the_gradients_of_autocast_in_float16_back_into_range():
    (x, y), _ = digits()
    x, y = x.reshape(-1, 8, 8, 1), jnp.broadcast_to(y[:, None, None], (len(y), 8, 8))
    model = PixelClassifier()
    params = model.init(jax.random.key(0), x[:1])
    loss_fn = lambda params: squared_error(model.apply(params, x), y)
    half = jmp.autocast(loss_fn, "float16")
    with_a_gradient = {}
    for name, (loss, scale) in {
        "float32": (loss_fn, jmp.NoOpLossScale()),
        "float16": (half, jmp.NoOpLossScale()),
        "float16, scaled": (half, jmp.StaticLossScale(2.0**15)),
    }.items():
        grads = jax.jit(jmp.grad(loss, scale))(params)["params"]
        with_a_gradient[name] = [layer for layer in grads if (grads[layer]["kernel"] != 0).any()]
    assert with_a_gradient["float32"] == with_a_gradient["float16, scaled"] == ["Conv_0", "Conv_1", "Conv_2"]
    assert with_a_gradient["float16"] == ["Conv_2"]  # The head; its input has no gradient in float16.


def train_digits(arm, steps=100, batch=64):
    """Returns, for each seed, the accuracy on the test images, the losses, and the optimizer's last state."""
    (train_x, train_y), (test_x, test_y) = digits()
    model = Classifier()
    tx = jmp.with_loss_scale(optax.adam(optax.cosine_decay_schedule(1e-2, steps)), SCALES[arm])

    def loss_fn(params, stats, x, y):
        variables = {"params": params, "batch_stats": stats}
        logits, updated = model.apply(variables, x, train=True, mutable=["batch_stats"])
        return squared_error(logits, y), updated["batch_stats"]

    def step(carry, batch):
        params, stats, opt_state = carry
        scaled = jmp.value_and_grad(precision(arm, loss_fn), jmp.get_loss_scale(opt_state), has_aux=True)
        (loss, new_stats), grads = scaled(params, stats, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        stats = jmp.select_tree(jmp.grads_finite(opt_state), new_stats, stats)
        return (optax.apply_updates(params, updates), stats, opt_state), loss

    @jax.jit
    def run(variables, x, y):
        params, stats = variables["params"], variables["batch_stats"]
        (params, stats, opt_state), losses = jax.lax.scan(step, (params, stats, tx.init(params)), (x, y))
        logits = model.apply({"params": params, "batch_stats": stats}, test_x, train=False)
        return jnp.mean(logits.argmax(-1) == test_y), losses, opt_state

    first = model.init(jax.random.key(0), test_x[:1], train=False)
    operands = products(
        jax.grad(precision(arm, loss_fn), has_aux=True), first["params"], first["batch_stats"], test_x, test_y
    )
    assert set(operands) == {(arm, arm)}

    results = []
    for seed in SEEDS:
        chosen = np.random.default_rng(seed).integers(0, len(train_x), (steps, batch))
        variables = model.init(jax.random.key(seed), test_x[:1], train=False)
        results.append(run(variables, train_x[chosen], train_y[chosen]))
    return results


def test_a_linen_model_with_batch_statistics_trains_in_float16_to_the_accuracy_of_float32():
    runs = {arm: train_digits(arm) for arm in SCALES}
    full, half = ([float(accuracy) for accuracy, *_ in each] for each in runs.values())
    spread = max(full) - min(full)
    assert min(full) > 0.88
    assert 0 < spread < 0.05
    assert np.mean(half) >= np.mean(full) - spread
    for (_, losses, _), (_, half_losses, opt_state) in zip(*runs.values(), strict=True):
        np.testing.assert_allclose(half_losses[0], losses[0], rtol=1e-3)
        assert not np.array_equal(half_losses, losses)
        assert float(jmp.get_loss_scale(opt_state).loss_scale) > 2.0**15
        assert int(jmp.metrics(opt_state)["skipped_steps"]) < 15


def linen_steps(batches, note_trace):
    """Yields, after each step on one of `batches`, all that the step holds."""
    case = models.linen_case(models.LinenResNet(), models.IMAGES)
    tx = jmp.with_loss_scale(optax.adam(1e-2), jmp.DynamicLossScale(2.0**10, period=1000))

    @jax.jit
    def step(params, state, opt_state, x):
        note_trace()

        def loss_fn(params, state):
            y, new_state = case.forward(params, state, x)
            return case.criterion(y, None), new_state

        loss_scale = jmp.get_loss_scale(opt_state)
        scaled = jmp.value_and_grad(jmp.autocast(loss_fn, "float16"), loss_scale, has_aux=True)
        (_, new_state), grads = scaled(params, state)
        updates, opt_state = tx.update(grads, opt_state, params)
        state = jmp.select_tree(jmp.grads_finite(opt_state), new_state, state)
        return optax.apply_updates(params, updates), state, opt_state

    params, state, opt_state = case.params, case.state, tx.init(case.params)
    for x in batches:
        params, state, opt_state = step(params, state, opt_state, x)
        yield bits((params, state, opt_state.inner_state)), opt_state


def nnx_steps(batches, note_trace):
    """The same for NNX. A step changes batch statistics in place; the optimizer does not hold them."""
    model = models.NnxMLP(nnx.Rngs(0))
    tx = jmp.with_loss_scale(optax.adam(1e-2), jmp.DynamicLossScale(2.0**10, period=1000))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        note_trace()
        loss_fn = lambda model, x: models.weighted_mean(model(x), None)
        loss_scale = jmp.get_loss_scale(optimizer)
        half = jmp.autocast(loss_fn, "float16")
        _, grads = jmp.value_and_grad(half, loss_scale, transform=nnx.value_and_grad)(model, x)
        optimizer.update(model, grads)

    for x in batches:
        step(model, optimizer, x)
        inner_state = nnx.as_pure(nnx.state(optimizer))["opt_state"]["inner_state"]
        yield bits((nnx.as_pure(nnx.state(model, nnx.Param)), inner_state)), optimizer


@pytest.mark.parametrize(
    ("steps", "x"), [(linen_steps, models.IMAGES), (nnx_steps, models.ROWS)], ids=["Linen", "NNX"]
)
def test_the_step_compiles_once_and_one_that_is_skipped_changes_no_bit(steps, x):
    traces = []
    batches = [x, x.at[0].set(1e6), x]  # The second overflows float16, but not float32.
    (first, _), (second, _), (third, state) = steps(batches, lambda: traces.append(1))
    assert first == second
    assert third != second
    assert len(traces) == 1
    assert int(jmp.metrics(state)["skipped_steps"]) == 1
    assert float(jmp.get_loss_scale(state).loss_scale) == 2.0**9

"""What the peers get wrong, each shown by running the peer, next to the number that is right here.

Versions: jmp 0.0.4, Flax 0.12, optax 0.2.8, Keras 3.15, mpx 0.1.8. A test that fails here says that a peer
has been mended: take its line out of the table of docs/differences.md.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jmp_lite

jmp = pytest.importorskip("jmp", reason="needs the extra [peers]")
OVERFLOW, FINE = jnp.bool_(False), jnp.bool_(True)


def count_compilations(step, state, steps=3):
    """How often `step` is compiled when its output is fed back."""
    traces = []

    @jax.jit
    def counted(state):
        traces.append(1)
        return step(state)

    for _ in range(steps):
        state = counted(state)
    return len(traces)


def apply_all(tx, grads, params):
    """The parameters after each gradient."""
    opt_state, update, trajectory = tx.init(params), jax.jit(tx.update), []
    for grad in grads:
        updates, opt_state = update(jnp.float32(grad), opt_state, params)
        params = optax.apply_updates(params, updates)
        trajectory.append(float(params))
    return trajectory, opt_state


# jmp


@pytest.mark.parametrize(
    "passage", [lambda s: jax.tree.map(lambda x: x, s), jax.jit(lambda s: s)], ids=["map", "jit"]
)
def test_jmp_forgets_the_minimum_on_flatten(passage):
    settings = dict(loss_scale=np.float32(8), min_loss_scale=np.float32(8))  # noqa: C408
    theirs, ours = jmp.DynamicLossScale(**settings), jmp_lite.DynamicLossScale(**settings)
    assert float(theirs.adjust(OVERFLOW).loss_scale) == 8.0  # Right, as long as nothing flattens it.
    assert float(passage(theirs).adjust(OVERFLOW).loss_scale) == 4.0
    assert float(passage(ours).adjust(OVERFLOW).loss_scale) == 8.0


@pytest.mark.parametrize("number", [2.0**16, jnp.asarray(2.0**16)], ids=["float", "asarray"])
def test_jmp_scales_a_float16_loss_to_inf(number):
    loss = jnp.float16(1)
    assert float(jmp.DynamicLossScale(number).scale(loss)) == np.inf
    assert float(jmp_lite.DynamicLossScale(number).scale(loss)) == 65536.0


def test_jmp_compiles_its_readme_step_twice():
    step = lambda scale: scale.adjust(FINE)
    assert count_compilations(step, jmp.DynamicLossScale(jnp.asarray(2.0**15))) == 2
    assert count_compilations(step, jmp_lite.DynamicLossScale(jnp.asarray(2.0**15))) == 1


def test_jmp_loses_the_gradients_at_a_large_scale():
    # It multiplies by 1 / 2**127, which is subnormal and flushed to zero. Growth can reach 2**127.
    unscale = jax.jit(lambda cls, number: cls(number).unscale(number), static_argnums=0)
    assert float(unscale(jmp.StaticLossScale, jnp.float32(2.0**127))) == 0.0
    assert float(unscale(jmp_lite.StaticLossScale, jnp.float32(2.0**127))) == 1.0


# Flax


def test_flax_grows_one_step_late():
    fun, w = (lambda w: w * w), jnp.float32(1)
    theirs, ours = DynamicScale(growth_interval=3), jmp_lite.DynamicLossScale(2.0**16, period=3)
    scales = []
    for _ in range(4):
        theirs, *_ = theirs.value_and_grad(fun)(w)
        ours = ours.adjust(jmp_lite.all_finite(jmp_lite.grad(fun, ours)(w)))
        scales.append((float(theirs.scale), float(ours.loss_scale)))
    assert scales == [(2.0**16, 2.0**16), (2.0**16, 2.0**16), (2.0**16, 2.0**17), (2.0**17, 2.0**17)]


def test_flax_compiles_twice():
    def theirs(scale):
        return scale.value_and_grad(lambda w: w * w)(jnp.float32(1))[0]

    def ours(scale):
        return scale.adjust(jmp_lite.all_finite(jmp_lite.grad(lambda w: w * w, scale)(jnp.float32(1))))

    assert count_compilations(theirs, DynamicScale()) == 2
    assert count_compilations(ours, jmp_lite.DynamicLossScale(2.0**16)) == 1


def test_flax_overflows_on_the_first_step_of_a_float16_loss():
    # A loss of 2**-10 at the point: both it and its gradient fit float16 with room to spare.
    fun, w = lambda w: (w * w).astype(jnp.float16), jnp.float32(2.0**-5)
    scale, finite, loss, grads = DynamicScale().value_and_grad(fun)(w)
    assert (bool(finite), float(scale.scale)) == (False, 2.0**15)
    assert np.isnan(float(loss))
    assert float(grads) == np.inf
    loss, grads = jmp_lite.value_and_grad(fun, jmp_lite.DynamicLossScale(2.0**15))(w)
    assert (float(loss), float(grads)) == (2.0**-10, 2.0**-4)


def test_flax_gives_back_a_nan_for_a_float16_loss():
    fun = lambda w: w * w
    _, _, loss, _ = DynamicScale().value_and_grad(fun)(jnp.float16(1))
    assert np.isnan(float(loss))
    loss, _ = jmp_lite.value_and_grad(fun, jmp_lite.DynamicLossScale(2.0**16))(jnp.float16(1))
    assert float(loss) == 1.0


# optax


def test_optax_applies_the_nan_after_n_errors():
    params = jnp.float32(1)
    theirs, _ = apply_all(optax.apply_if_finite(optax.sgd(0.1), 2), [np.nan] * 3, params)
    ours, _ = apply_all(jmp_lite.skip_nonfinite(optax.sgd(0.1)), [np.nan] * 3, params)
    np.testing.assert_array_equal(theirs, [1.0, 1.0, np.nan])
    assert ours == [1.0, 1.0, 1.0]


def test_optax_looks_only_after_what_came_before_it_in_the_chain():
    # Put at the end of a chain it counts an infinite gradient, clipped to 1, as finite.
    params = jnp.float32(1)
    theirs, state = apply_all(
        optax.chain(optax.clip(1.0), optax.apply_if_finite(optax.sgd(0.5), 2)), [np.inf], params
    )
    assert (theirs, int(state[1].total_notfinite)) == ([0.5], 0)
    ours, state = apply_all(
        jmp_lite.skip_nonfinite(optax.chain(optax.clip(1.0), optax.sgd(0.5))), [np.inf], params
    )
    assert (ours, int(jmp_lite.get_metrics(state)["skipped_steps"])) == ([1.0], 1)


def test_optax_turns_down_gradients_of_another_dtype():
    params, grads = jnp.float32(1), jnp.float16(1)
    inner = optax.sgd(0.5, momentum=0.9)
    theirs = optax.apply_if_finite(inner, 2)
    with pytest.raises(TypeError, match="branches must have equal output types"):
        theirs.update(grads, theirs.init(params), params)
    ours = jmp_lite.skip_nonfinite(inner)
    updates, _ = ours.update(grads, ours.init(params), params)
    assert float(optax.apply_updates(params, updates)) == 0.5


MICRO_BATCHES = [1.0, np.inf, 1.0, 1.0, 1.0, 1.0]


def test_optax_multi_steps_applies_an_inf_and_is_nan_for_ever_after():
    theirs, state = apply_all(optax.MultiSteps(optax.sgd(1.0), 2), MICRO_BATCHES, jnp.float32(0))
    np.testing.assert_array_equal(theirs, [0.0, -np.inf, -np.inf, np.nan, np.nan, np.nan])
    assert np.isnan(float(state.acc_grads))
    ours, _ = apply_all(
        jmp_lite.skip_nonfinite(optax.MultiSteps(optax.sgd(1.0), 2)), MICRO_BATCHES, jnp.float32(0)
    )
    # Five finite micro-batches are two whole steps and a half.
    assert ours == [0.0, 0.0, -1.0, -1.0, -2.0, -2.0]


# Keras


@pytest.fixture(scope="module")
def keras():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # What it says on import is not ours to mend.
        keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras was configured for another backend")
    return keras


def keras_scales(keras, grad, steps):
    """The scale of Keras after each of `steps` equal gradients, by its own stateless way."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), dynamic_growth_steps=1)
    variable = keras.Variable(np.float32(1))
    optimizer.build([variable])
    index = [v is optimizer.dynamic_scale for v in optimizer.variables].index(True)
    values = [v.value for v in optimizer.variables]
    apply = jax.jit(lambda values, trained: optimizer.stateless_apply(values, [jnp.float32(grad)], trained))
    trained, scales = [variable.value], []
    for _ in range(steps):
        trained, values = apply(values, trained)
        scales.append(float(values[index]))
    return scales


def our_scales(flag, steps):
    scale = jmp_lite.DynamicLossScale(2.0**15, period=1)
    scales = jax.lax.scan(lambda s, _: (s.adjust(flag), s.loss_scale), scale, None, length=steps + 1)[1]
    return scales[1:].tolist()


@pytest.mark.slow
def test_keras_lets_the_scale_reach_zero_and_inf(keras):
    theirs, ours = keras_scales(keras, np.inf, 150), our_scales(OVERFLOW, 150)
    assert theirs[0] == ours[0] == 2.0**14
    assert theirs.index(0.0) + 1 == 142  # 2**15 / 2**142 is 2**-127, flushed to zero.
    assert ours[-1] == min(ours) == 1.0
    theirs, ours = keras_scales(keras, 1e-30, 150), our_scales(FINE, 150)
    assert theirs[0] == ours[0] == 2.0**16
    assert theirs.index(np.inf) + 1 == 113  # 2**15 * 2**113 is 2**128.
    assert ours[-1] == max(ours) == 2.0**127


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_keras_fit_leaves_nan_in_moving_statistics(keras):
    """`fit` skips the update of the weights, and not that of the statistics. `predict` stays NaN."""
    from examples import keras_model

    def build():
        norm = keras.layers.BatchNormalization(dtype="mixed_float16")
        return keras.Sequential([keras.Input((3,)), norm, keras.layers.Dense(2, dtype="mixed_float16")])

    x, y = np.ones((8, 3), np.float32), np.zeros(8, np.int32)
    x[0, 0] = np.inf
    theirs, ours = build(), build()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    theirs.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    theirs.fit(x, y, epochs=1, verbose=0)
    assert float(optimizer.dynamic_scale.value) == 2.0**14
    assert all(np.isfinite(variable.value).all() for variable in theirs.trainable_variables)
    assert not any(np.isfinite(variable.value).all() for variable in theirs.non_trainable_variables)
    theirs.fit(np.ones_like(x), y, epochs=3, verbose=0)
    assert np.isnan(theirs.predict(np.ones_like(x), verbose=0)).all()

    tx = jmp_lite.with_loss_scale(optax.sgd(0.1))
    trainable = keras_model.values_of(ours.trainable_variables)
    others = keras_model.values_of(ours.non_trainable_variables)
    before = jax.device_get(others)
    step = keras_model.make_train_step(ours, tx, "float16")
    _, others, opt_state, _ = step(trainable, others, tx.init(trainable), x, y)
    assert not jmp_lite.grads_finite(opt_state)
    np.testing.assert_array_equal(np.concatenate(others), np.concatenate(before))


# mpx


def test_mpx_unscales_with_the_scale_of_the_next_step():
    mpx = pytest.importorskip("mpx", reason="needs the extra [peers]")
    fun, w = (lambda w: w * jnp.asarray(3, w.dtype)), jnp.float32(2)
    theirs = mpx.DynamicLossScaling(jnp.float32(8), jnp.float32(1), period=2)
    ours = jmp_lite.DynamicLossScale(8.0, period=2)
    their_gradients, our_gradients = [], []
    for _ in range(4):
        result = mpx.filter_grad(fun, theirs)(w)
        theirs, gradient = result[-3], result[-1]
        their_gradients.append(float(gradient))
        gradient = jmp_lite.grad(fun, ours)(w)
        ours = ours.adjust(jmp_lite.all_finite(gradient))
        our_gradients.append(float(gradient))
    assert their_gradients == [3.0, 1.5, 3.0, 1.5]
    assert our_gradients == [3.0] * 4
    assert float(theirs.loss_scaling) == float(ours.loss_scale) == 32.0

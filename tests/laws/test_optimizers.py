"""The laws of the optimizer's wrappers, over the optimizers of optax, wrappers, options and bad gradients.

(g) A step that is skipped changes nothing, whatever the optimizer: parameters and state keep their bits,
    except what counts the skips, and the loss scale backs off.
(h) A step that is not skipped is that of the optimizer without the wrapper.

tests/core/scaling/test_looking_again.py has the optimizers that evaluate the loss again. A new option of
`with_loss_scale` gets its row in `OPTIONS`.
"""

import inspect

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from optax import contrib

import jmp_lite as jmp
from tests.support.steps import bits, make_grads, make_params, spoil

OPTIMIZERS = {
    "adabelief": optax.adabelief(1e-2),
    "adadelta": optax.adadelta(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "adagrad": optax.adagrad(1e-2),
    "adam": optax.adam(optax.cosine_decay_schedule(1e-2, 20)),
    "adamax": optax.adamax(1e-2),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "amsgrad": optax.amsgrad(1e-2),
    "fromage": optax.fromage(1e-2),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "lion": optax.lion(1e-2),
    "nadamw": optax.nadamw(1e-2),
    "noisy_sgd": optax.noisy_sgd(1e-2, key=jax.random.key(0)),
    "novograd": optax.novograd(1e-2),
    "optimistic": optax.optimistic_gradient_descent(1e-2),
    "radam": optax.radam(1e-2),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9),
    "sgd": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "sign_sgd": optax.sign_sgd(1e-2),
    "yogi": optax.yogi(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "accumulated": optax.MultiSteps(optax.adam(1e-2), 2),
    "masked": optax.masked(optax.adam(1e-2), {"dense": {"kernel": True, "bias": False}, "gain": True}),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "adopt": contrib.adopt(1e-2),
    "dadapt_adamw": contrib.dadapt_adamw(1e-2),
    "muon": contrib.muon(1e-2),
    "prodigy": contrib.prodigy(1e-2),
    "schedule_free": contrib.schedule_free_adamw(1e-2),
}
WRAPPERS = {
    "plain": lambda tx: tx,
    "with_half_state": lambda tx: jmp.with_half_state(tx, "bfloat16", stochastic_rounding=False),
    "with_half_state at random": jmp.with_half_state,
    "with_master_params": jmp.with_master_params,
    "with_stochastic_rounding": jmp.with_stochastic_rounding,
}
# For each parameter of `with_loss_scale`, the values that cases draw.
OPTIONS = {
    "inner": [],
    "loss_scale": [
        None,
        jmp.DynamicLossScale(2.0**10),
        jmp.DynamicLossScale(2.0**10, period=1),
        jmp.StaticLossScale(2.0**7),
        jmp.NoOpLossScale(),
    ],
    "clip_norm": [None, 1e-2, 1e3],
    "axis_name": [None],  # tests/test_data_parallel.py has the axes of devices.
    "name": [None, "generator"],
}


def test_every_parameter_of_with_loss_scale_has_a_row():
    assert set(OPTIONS) == set(inspect.signature(jmp.with_loss_scale).parameters)


@st.composite
def drawn(draw, name):
    """A wrapped optimizer, the same one without the loss scale, parameters, and whether they are half."""
    wrapper = draw(st.sampled_from(list(WRAPPERS)))
    options = {key: draw(st.sampled_from(values)) for key, values in OPTIONS.items() if values}
    if name == "accumulated":  # Our own error: a clip goes inside of MultiSteps.
        options["clip_norm"] = None
    dtype = draw(st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]))
    try:
        inner = WRAPPERS[wrapper](OPTIMIZERS[name])
        inner.init(make_params(dtype))
    except (TypeError, ValueError) as error:  # Such as state in half that an optimizer has none of.
        if wrapper.split()[0] not in str(error):
            raise
        hypothesis.reject()
    return inner, options, dtype


def steps(tx, params, gradients):
    """The parameters and the state after each step."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for grads in gradients:
        params, state = step(params, state, grads)
        yield params, state


@pytest.mark.cases(slow=len(OPTIMIZERS) // 4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=2)
def test_a_skipped_step_changes_nothing(name, data):
    inner, options, dtype = data.draw(drawn(name))
    bad = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    where = data.draw(st.sampled_from([("dense", "kernel"), ("dense", "bias")]))
    tx = jmp.with_loss_scale(inner, **options)
    gradients = [make_grads(0), make_grads(1), spoil(make_grads(2), bad, where)]
    _, (params, state), (after, skipped) = steps(tx, make_params(dtype), gradients)
    assert bits(after) == bits(params)
    assert bits(skipped.inner_state) == bits(state.inner_state)
    assert not jmp.grads_finite(skipped)
    before, now = (float(jmp.get_loss_scale(each).loss_scale) for each in (state, skipped))
    assert now <= before if options["loss_scale"] != jmp.DynamicLossScale(2.0**10) else now < before


@pytest.mark.cases(slow=len(OPTIMIZERS) // 4)
@pytest.mark.parametrize("name", [*OPTIMIZERS][::-1])  # Those that the test above leaves out first.
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=2)
def test_a_step_that_is_taken_is_that_of_the_optimizer(name, data):
    """With float32 parameters: gradients of half ones are widened before the optimizer gets them."""
    inner, options, _ = data.draw(drawn(name))
    tx = jmp.with_loss_scale(inner, **(options | {"clip_norm": None}))
    gradients = [make_grads(number) for number in range(3)]
    both = zip(steps(tx, make_params(), gradients), steps(inner, make_params(), gradients), strict=True)
    for (found, _), (expected, _) in both:
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)

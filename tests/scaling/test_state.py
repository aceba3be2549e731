"""What an optimizer state says, at whatever depth it lies."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import strategies as st

import jmp_lite as jmp
from tests.support.steps import bits, make_grads, make_params, make_step, spoil


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_counts_follow_the_events(events):
    _, opt_state = run_events(events)
    trailing = next((n for n, finite in enumerate(reversed(events)) if finite), len(events))
    assert int(jmp.metrics(opt_state)["skipped_steps"]) == events.count(False)
    assert int(jmp.metrics(opt_state)["consecutive_skipped_steps"]) == trailing
    assert bool(jmp.grads_finite(opt_state)) == events[-1]
    assert int(opt_state.inner_state[0].count) == events.count(True)
    for count in ("skipped_steps", "consecutive_skipped_steps"):
        values = jmp.metrics(opt_state)[count]
        assert (values.dtype, values.shape, values.weak_type) == (np.int32, (), False)


# What goes into a logger


def test_metrics_are_scalars_inside_jit_and_outside():
    tx = jmp.with_loss_scale(optax.adam(1e-2), clip_norm=1.0)
    names = ["loss_scale", "grads_finite", "skipped_steps", "consecutive_skipped_steps", "grad_norm"]
    step = make_step(tx)
    state = tx.init(make_params())
    for grads, expected in [(make_grads(0), (2.0**15, 1, 0, 0)), (spoil(make_grads(1)), (2.0**14, 0, 1, 1))]:
        _, state = step(make_params(), state, grads)
        values = jmp.metrics(state)
        assert list(values) == names
        assert jax.tree.map(lambda x: x.shape, values) == dict.fromkeys(names, ())
        assert tuple(float(values[name]) for name in names[:4]) == expected
        inside = jax.jit(jmp.metrics)(state)
        assert {name: float(inside[name]) for name in names[:4]} == dict(zip(names, expected))
    assert np.isnan(values["grad_norm"])


def test_metrics_have_only_known_values():
    threaded = jmp.metrics(jmp.skip_nonfinite(optax.sgd(1.0)).init(make_params()))
    assert list(threaded) == ["grads_finite", "skipped_steps", "consecutive_skipped_steps"]
    none = jmp.metrics(jmp.with_loss_scale(optax.sgd(1.0), jmp.NoOpLossScale()).init(make_params()))
    assert (float(none["loss_scale"]), none["loss_scale"].dtype) == (1.0, np.float32)


COUNTED = jmp.with_loss_scale(optax.adam(1e-2))
COUNTED_STEP = make_step(COUNTED)


def run_events(events):
    params = make_params()
    opt_state = COUNTED.init(params)
    for step, finite in enumerate(events):
        params, opt_state = COUNTED_STEP(
            params, opt_state, make_grads(step) if finite else spoil(make_grads(step))
        )
    return params, opt_state


# Where the state is found


def find_in_chain():
    tx = optax.chain(jmp.with_loss_scale(optax.adam(1e-2)), optax.scale(1.0))
    return tx.init(make_params()), lambda state, g: tx.update(g, state, make_params())[1]


def find_in_masked():
    mask = {"dense": True, "gain": False}
    tx = optax.masked(jmp.with_loss_scale(optax.adam(1e-2)), mask)
    return tx.init(make_params()), lambda state, g: tx.update(g, state, make_params())[1]


def find_in_multi_steps():
    tx = optax.MultiSteps(jmp.with_loss_scale(optax.adam(1e-2)), every_k_schedule=1)
    return tx.init(make_params()), lambda state, g: tx.update(g, state, make_params())[1]


def find_around_multi_steps():
    tx = jmp.with_loss_scale(optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2))
    return tx.init(make_params()), lambda state, g: tx.update(g, state, make_params())[1]


def find_in_inject_hyperparams():
    tx = optax.inject_hyperparams(lambda learning_rate: jmp.with_loss_scale(optax.adam(learning_rate)))(
        learning_rate=1e-2
    )
    return tx.init(make_params()), lambda state, g: tx.update(g, state, make_params())[1]


def find_in_multi_transform():
    labels = {"dense": "trained", "gain": "frozen"}
    tx = optax.multi_transform(
        {"trained": jmp.with_loss_scale(optax.adam(1e-2)), "frozen": optax.set_to_zero()}, labels
    )
    return tx.init(make_params()), lambda state, g: tx.update(g, state, make_params())[1]


def find_in_train_state():
    state = TrainState.create(
        apply_fn=None, params=make_params(), tx=optax.chain(jmp.with_loss_scale(optax.adam(1e-2)))
    )
    return state, lambda state, g: state.apply_gradients(grads=g)


def find_in_dict_of_states():
    tx = jmp.with_loss_scale(optax.adam(1e-2))
    return {"step": jnp.int32(0), "opt": [tx.init(make_params())]}, lambda state, g: {
        "step": state["step"],
        "opt": [tx.update(g, state["opt"][0], make_params())[1]],
    }


@pytest.mark.cases(fast=3)
@pytest.mark.parametrize(
    "find",
    [
        find_in_chain,
        find_in_masked,
        find_in_multi_steps,
        find_around_multi_steps,
        find_in_inject_hyperparams,
        find_in_multi_transform,
        find_in_train_state,
        find_in_dict_of_states,
    ],
)
def test_the_state_is_found_at_any_depth(find):
    state, update = find()
    update = jax.jit(update)
    assert float(jmp.get_loss_scale(state).loss_scale) == 2.0**15
    assert bool(jmp.grads_finite(state))
    state = update(update(state, make_grads(0)), spoil(make_grads(1), np.nan))
    assert float(jmp.get_loss_scale(state).loss_scale) == 2.0**14
    assert not jmp.grads_finite(state)
    state = update(state, spoil(make_grads(1), np.inf))
    assert (
        int(jmp.metrics(state)["skipped_steps"]) == int(jmp.metrics(state)["consecutive_skipped_steps"]) == 2
    )
    with pytest.raises(FloatingPointError, match="dense/kernel"):
        jmp.raise_if_stuck(state, 2)
    if find is find_in_multi_steps:
        return  # Its accumulator holds the NaN now, for good: see test_peers.
    state = update(state, make_grads(2))
    assert int(jmp.metrics(state)["skipped_steps"]) == 2
    assert int(jmp.metrics(state)["consecutive_skipped_steps"]) == 0
    assert float(jmp.get_loss_scale(state).loss_scale) == 2.0**13


@pytest.mark.slow
def test_the_state_is_found_in_an_nnx_optimizer():
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1)))
    optimizer = nnx.Optimizer(model, jmp.with_loss_scale(optax.adamw(1e-2)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss_fn = lambda model: jnp.mean(model(x) ** 2)
        loss_scale = jmp.get_loss_scale(optimizer)
        loss, grads = jmp.value_and_grad(loss_fn, loss_scale, transform=nnx.value_and_grad)(model)
        optimizer.update(model, grads)
        return loss

    x = jnp.ones((4, 2))
    first = float(step(model, optimizer, x))
    before = bits(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert float(jmp.get_loss_scale(optimizer).loss_scale) == 2.0**15
    step(model, optimizer, x.at[0, 0].set(np.inf))
    step(model, optimizer, x.at[0, 0].set(np.nan))
    assert bits(nnx.to_pure_dict(nnx.state(model, nnx.Param))) == before
    assert float(jmp.get_loss_scale(optimizer).loss_scale) == 2.0**13
    assert not jmp.grads_finite(optimizer)
    assert (
        int(jmp.metrics(optimizer)["skipped_steps"])
        == int(jmp.metrics(optimizer)["consecutive_skipped_steps"])
        == 2
    )
    with pytest.raises(FloatingPointError, match="gradients of all 4 parameters"):
        jmp.raise_if_stuck(optimizer, 2)
    assert float(step(model, optimizer, x)) < first
    assert int(jmp.metrics(optimizer)["consecutive_skipped_steps"]) == 0
    assert bits(nnx.to_pure_dict(nnx.state(model, nnx.Param))) != before


def test_a_state_without_a_wrapper_is_an_error_that_says_what_to_do():
    state = optax.adam(1e-3).init(make_params())
    with pytest.raises(ValueError, match=r"No optimizer wrapped in with_loss_scale was found.*Wrap yours"):
        jmp.get_loss_scale(state)
    for read in (jmp.grads_finite, jmp.metrics, jmp.raise_if_stuck):
        with pytest.raises(ValueError, match="No optimizer wrapped in skip_nonfinite or with_loss_scale"):
            read(state)
    with pytest.raises(ValueError, match="No optimizer wrapped in with_loss_scale"):
        jmp.get_loss_scale(jmp.skip_nonfinite(optax.adam(1e-3)).init(make_params()))


def test_two_states_are_told_apart_by_name_or_are_an_error():
    named = {
        name: jmp.with_loss_scale(optax.adam(1e-3), jmp.DynamicLossScale(scale), name=name).init(
            make_params()
        )
        for name, scale in (("generator", 8.0), ("critic", 16.0))
    }
    assert float(jmp.get_loss_scale(named, "generator").loss_scale) == 8.0
    assert float(jmp.get_loss_scale(named, "critic").loss_scale) == 16.0
    assert bool(jmp.grads_finite(named, "critic"))
    for read in (jmp.get_loss_scale, jmp.grads_finite, jmp.metrics):
        with pytest.raises(
            ValueError, match=r"2 optimizers .* named \['critic', 'generator'\]. Name them apart"
        ):
            read(named)
        with pytest.raises(ValueError, match=r"No optimizer is named 'other'. The names here are"):
            read(named, "other")
    with pytest.raises(ValueError, match="2 optimizers"):
        jmp.raise_if_stuck(named)
    jmp.raise_if_stuck(named, name="critic")


def test_a_gan_trains_with_a_scale_for_each_of_two_optimizers():
    half = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float16), tree)

    def generate(params, noise):
        shift, width = half((params["shift"], params["width"]))
        return (noise.astype(jnp.float16) * width + shift).astype(jnp.float32)

    def judge(params, x):
        w, b = half((params["w"], params["b"]))
        features = jnp.stack([x, x * x / 4], -1).astype(jnp.float16)
        return (features @ w + b).astype(jnp.float32)

    # A loss weight of 64 makes the critic's scaled gradients overflow long before the generator's.
    def critic_loss(critic, generator, noise, real):
        wrong = jax.nn.softplus(judge(critic, generate(generator, noise)))
        return 64 * jnp.mean(wrong + jax.nn.softplus(-judge(critic, real)))

    def generator_loss(generator, critic, noise):
        return jnp.mean(jax.nn.softplus(-judge(critic, generate(generator, noise))))

    txs = {
        "generator": jmp.with_loss_scale(
            optax.adam(0.02), jmp.DynamicLossScale(2.0**20, period=50), name="generator"
        ),
        "critic": jmp.with_loss_scale(
            optax.adam(0.02), jmp.DynamicLossScale(2.0**20, period=50), name="critic"
        ),
    }
    params = {
        "generator": {"shift": jnp.float32(0), "width": jnp.float32(1)},
        "critic": {"w": jnp.zeros(2), "b": jnp.float32(0)},
    }
    opt_state = {name: txs[name].init(params[name]) for name in txs}

    def step(carry, key):
        params, opt_state = carry
        noise, real = jax.random.normal(key, (2, 64))
        real = 2.0 + 0.5 * real
        losses = {
            "critic": (critic_loss, (params["critic"], params["generator"], noise, real)),
            "generator": (generator_loss, (params["generator"], params["critic"], noise)),
        }
        params, opt_state = dict(params), dict(opt_state)
        for name, (loss_fn, arguments) in losses.items():
            grads = jmp.grad(loss_fn, jmp.get_loss_scale(opt_state, name))(*arguments)
            updates, opt_state[name] = txs[name].update(grads, opt_state[name], params[name])
            params[name] = optax.apply_updates(params[name], updates)
        scale = jmp.get_loss_scale(opt_state, "critic").loss_scale
        return (params, opt_state), (scale, params["generator"]["shift"])

    keys = jax.random.split(jax.random.key(0), 600)
    (params, opt_state), (scales, shifts) = jax.jit(lambda carry: jax.lax.scan(step, carry, keys))(
        (params, opt_state)
    )
    # The two circle around the true mean, 2, from a start at 0.
    assert abs(float(shifts[300:].mean()) - 2.0) < 0.5
    scale = {name: float(jmp.get_loss_scale(opt_state, name).loss_scale) for name in txs}
    skipped = {name: int(jmp.metrics(opt_state, name)["skipped_steps"]) for name in txs}
    assert scale["critic"] < scale["generator"]
    assert skipped["critic"] > skipped["generator"]
    assert int(opt_state["critic"].inner_state[0].count) == 600 - skipped["critic"]
    assert int(opt_state["generator"].inner_state[0].count) == 600 - skipped["generator"]
    assert float(scales.min()) >= 1.0


def test_a_batched_state_has_a_flag_for_each_member():
    tx = jmp.skip_nonfinite(optax.sgd(1.0))
    params = jnp.ones((2, 3))
    _, state = jax.vmap(tx.update)(params.at[1, 0].set(np.nan), jax.vmap(tx.init)(params), params)
    assert jmp.grads_finite(state).tolist() == [True, False]

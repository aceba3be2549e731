"""What an optimizer state says, at whatever depth it lies."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import strategies as st

import jmp_lite as jmp
from jmp_lite._paths import leaf_names
from jmp_lite._scaling.stuck import describe
from tests.support.steps import make_grads, make_params, make_step, run, spoil


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_counts_follow_the_events(events):
    _, opt_state = run_events(events)
    trailing = next((n for n, finite in enumerate(reversed(events)) if finite), len(events))
    assert int(jmp.get_metrics(opt_state)["skipped_steps"]) == events.count(False)
    assert int(jmp.get_metrics(opt_state)["consecutive_skipped_steps"]) == trailing
    assert bool(jmp.grads_finite(opt_state)) == events[-1]
    assert int(opt_state.inner_state[0].count) == events.count(True)
    for count in ("skipped_steps", "consecutive_skipped_steps"):
        values = jmp.get_metrics(opt_state)[count]
        assert (values.dtype, values.shape, values.weak_type) == (np.int32, (), False)


# What goes into a logger


def test_metrics_are_scalars_inside_jit_and_outside():
    tx = jmp.with_loss_scale(optax.adam(1e-2), clip_norm=1.0)
    names = ["loss_scale", "grads_finite", "skipped_steps", "consecutive_skipped_steps", "grad_norm"]
    step = make_step(tx)
    state = tx.init(make_params())
    for grads, expected in [(make_grads(0), (2.0**15, 1, 0, 0)), (spoil(make_grads(1)), (2.0**14, 0, 1, 1))]:
        _, state = step(make_params(), state, grads)
        values = jmp.get_metrics(state)
        assert list(values) == names
        assert jax.tree.map(lambda x: x.shape, values) == dict.fromkeys(names, ())
        assert tuple(float(values[name]) for name in names[:4]) == expected
        inside = jax.jit(jmp.get_metrics)(state)
        assert {name: float(inside[name]) for name in names[:4]} == dict(zip(names, expected))
    assert values["grad_norm"] == inside["grad_norm"] == np.inf


def test_metrics_have_only_known_values():
    threaded = jmp.get_metrics(jmp.skip_nonfinite(optax.sgd(1.0)).init(make_params()))
    assert list(threaded) == ["grads_finite", "skipped_steps", "consecutive_skipped_steps"]
    none = jmp.get_metrics(jmp.with_loss_scale(optax.sgd(1.0), jmp.NoOpLossScale()).init(make_params()))
    assert (float(none["loss_scale"]), none["loss_scale"].dtype) == (1.0, np.float32)


COUNTED_STEP = make_step(jmp.with_loss_scale(optax.adam(1e-2)))


def run_events(events):
    params = make_params()
    opt_state = jmp.with_loss_scale(optax.adam(1e-2)).init(params)
    for step, finite in enumerate(events):
        params, opt_state = COUNTED_STEP(
            params, opt_state, make_grads(step) if finite else spoil(make_grads(step))
        )
    return params, opt_state


# Where the state is found


ADAM = optax.adam(1e-2)
SCALED = jmp.with_loss_scale(ADAM)
PARTS = {"trained": SCALED, "frozen": optax.set_to_zero()}
PLACES = {
    "chain": optax.chain(SCALED, optax.scale(1.0)),
    "masked": optax.masked(SCALED, {"dense": True, "gain": False}),
    "around MultiSteps": jmp.with_loss_scale(optax.MultiSteps(ADAM, every_k_schedule=2)),
    "hyperparams": optax.inject_hyperparams(lambda rate: jmp.with_loss_scale(optax.adam(rate)))(rate=1e-2),
    "multi_transform": optax.multi_transform(PARTS, {"dense": "trained", "gain": "frozen"}),
}


def state_in(place):
    """A state that holds that of `with_loss_scale` in a place, and the function that updates it."""
    if place == "TrainState":
        state = TrainState.create(apply_fn=None, params=make_params(), tx=optax.chain(SCALED))
        return state, lambda state, grads: state.apply_gradients(grads=grads)
    tx = PLACES.get(place, SCALED)
    update = lambda state, grads: tx.update(grads, state, make_params())[1]
    if place == "tree":
        within = lambda state, grads: {"step": state["step"], "opt": [update(state["opt"][0], grads)]}
        return {"step": jnp.int32(0), "opt": [tx.init(make_params())]}, within
    return tx.init(make_params()), update


@pytest.mark.cases(fast=2, slow=0)
@pytest.mark.parametrize("place", [*PLACES, "TrainState", "tree"])
def test_the_state_is_found_at_any_depth(place):
    state, update = state_in(place)
    update = jax.jit(update)
    counts = lambda: [int(jmp.get_metrics(state)[f"{name}skipped_steps"]) for name in ("", "consecutive_")]
    assert float(jmp.get_loss_scale(state).loss_scale) == 2.0**15
    assert bool(jmp.grads_finite(state))
    state = update(update(state, make_grads(0)), spoil(make_grads(1), np.nan))
    assert float(jmp.get_loss_scale(state).loss_scale) == 2.0**14
    assert not jmp.grads_finite(state)
    state = update(state, spoil(make_grads(1), np.inf))
    assert counts() == [2, 2]
    with pytest.raises(FloatingPointError, match="dense/kernel"):
        jmp.raise_if_stuck(state, 2)
    state = update(state, make_grads(2))
    assert counts() == [2, 0]
    assert float(jmp.get_loss_scale(state).loss_scale) == 2.0**13


def test_a_state_without_a_wrapper_is_an_error_that_says_what_to_do():
    state = optax.adam(1e-3).init(make_params())
    with pytest.raises(ValueError, match=r"No optimizer wrapped in with_loss_scale was found.*Wrap yours"):
        jmp.get_loss_scale(state)
    for read in (jmp.grads_finite, jmp.get_metrics, jmp.raise_if_stuck):
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
    for read in (jmp.get_loss_scale, jmp.grads_finite, jmp.get_metrics):
        with pytest.raises(
            ValueError, match=r"2 optimizers .* named \['critic', 'generator'\]. Name them apart"
        ):
            read(named)
        with pytest.raises(ValueError, match=r"No optimizer is named 'other'. The names here are"):
            read(named, "other")
    with pytest.raises(ValueError, match="2 optimizers"):
        jmp.raise_if_stuck(named)
    jmp.raise_if_stuck(named, name="critic")


# `raise_if_stuck`


GOOD, BAD = make_grads(0), spoil(make_grads(1))


def after(events, tx=None):
    """The state after steps that are finite (1) or not (0)."""
    return run(tx or jmp.with_loss_scale(optax.sgd(1e-2)), [GOOD if event else BAD for event in events])[1]


def complaint(state, *args, **kwargs):
    with pytest.raises(FloatingPointError) as error:
        jmp.raise_if_stuck(state, *args, **kwargs)
    return str(error.value)


def test_it_counts_the_last_steps_and_names_parameters_and_scale():
    state = after([1, 0, 0], jmp.with_loss_scale(optax.adam(1e-2), jmp.DynamicLossScale(8.0)))
    jmp.raise_if_stuck(state, 3)
    jmp.raise_if_stuck(state)
    assert complaint(state, 2).startswith(
        "The last 2 steps were skipped: inf or NaN in the gradients of 1 of 3 parameters: dense/kernel. "
        "The loss scale is 2.\nAt a small loss scale"
    )


def test_the_message_names_the_call_that_finds_the_cause():
    """The words of the message run, but for the print."""
    from jmp_lite import diagnostics

    said = complaint(after([0]), 1)
    call = "jmp_lite.diagnostics.find_nonfinite(loss_fn, loss_scale=loss_scale)(params, batch)"
    assert call in said
    assert "help(jmp_lite.diagnostics.doctor)" in said  # A wheel has no pages.
    loss_fn = lambda params, batch: jnp.sum(jnp.log(params * batch))
    namespace = {"jmp_lite": jmp, "loss_fn": loss_fn, "loss_scale": jmp.NoOpLossScale()}
    report = eval(call, namespace | {"params": jnp.ones(2), "batch": jnp.zeros(2)})
    assert isinstance(report, diagnostics.NonfiniteReport)
    assert report.cause.operation == "log"


def test_it_forgets_skips_in_a_row_after_a_step_that_was_taken():
    assert "The loss scale is" not in complaint(after([0] * 3, jmp.skip_nonfinite(optax.sgd(1.0))), 1)
    jmp.raise_if_stuck(after([0, 1]), 1, max_skip_rate=1)


def test_one_bad_batch_in_five_is_a_stuck_run():
    """The scale falls from 2**15 to 1, though no two steps in a row are skipped."""
    state = after([1, 1, 1, 1, 0] * 5)
    jmp.raise_if_stuck(state)
    said = complaint(state, max_consecutive_skips=5)
    assert said.startswith("5 of 25 steps were skipped (20%): inf or NaN in the gradients of 1 of 3")
    assert "The loss scale is 1024." in said
    jmp.raise_if_stuck(state, max_consecutive_skips=6)
    jmp.raise_if_stuck(state, max_consecutive_skips=5, max_skip_rate=0.2)
    # A step that was taken has no bad gradients to name.
    assert complaint(after([0, 1, 0, 1]), 2).startswith("2 of 4 steps were skipped (50%). The loss scale is")


@pytest.mark.slow
def test_a_scale_at_its_minimum_is_judged_after_fewer_skips():
    low = jmp.with_loss_scale(optax.sgd(1e-2), jmp.DynamicLossScale(8.0, min_loss_scale=4.0))
    events = [1, 1, 1, 0]
    jmp.raise_if_stuck(after(events, low), max_consecutive_skips=5)  # Too early: four steps.
    jmp.raise_if_stuck(after([*events, 1], low), max_consecutive_skips=5)  # The last step was taken.
    said = complaint(after([1, *events], low), max_consecutive_skips=5)
    assert said.startswith("1 of 5 steps were skipped (20%): inf or NaN in the gradients of 1 of 3 ")
    assert "The loss scale is 4, its minimum." in said
    above = jmp.with_loss_scale(optax.sgd(1e-2), jmp.DynamicLossScale(16.0, min_loss_scale=4.0))
    jmp.raise_if_stuck(after([1, *events], above), max_consecutive_skips=5)
    # A minimum that no power of two meets is reached one power above.
    odd = jmp.with_loss_scale(optax.sgd(1e-2), jmp.DynamicLossScale(8.0, min_loss_scale=3.0))
    assert "The loss scale is 4, its minimum." in complaint(after([1, *events], odd), 5)
    static = jmp.with_loss_scale(optax.sgd(1e-2), jmp.StaticLossScale(1.0))
    jmp.raise_if_stuck(after([1, *events], static), max_consecutive_skips=5)


def test_a_start_that_looks_for_the_scale_is_no_stuck_run():
    jmp.raise_if_stuck(after([0] * 15 + [1] * 40))
    assert "16 of 57 steps were skipped (28%)" in complaint(after([0] * 15 + [1] * 41 + [0]))


def test_a_single_parameter_has_no_name():
    tx = jmp.skip_nonfinite(optax.sgd(1.0))
    _, state = tx.update(jnp.float32(np.nan), tx.init(jnp.float32(0)))
    assert "gradients of the only parameter." in complaint(state, 1)


def test_it_belongs_on_the_host():
    state = after([1])
    with pytest.raises(TypeError, match="call it on the host, outside jit"):
        jax.jit(lambda state: jmp.raise_if_stuck(state))(state)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_consecutive_skips": 0}, r"max_consecutive_skips should be 1 or above\. Got 0"),
        ({"max_skip_rate": 1.5}, r"max_skip_rate should lie between 0 and 1\. Got 1\.5"),
        ({"max_skip_rate": -0.1}, "max_skip_rate should lie between 0 and 1"),
    ],
)
def test_limits_out_of_range_are_an_error(limits, message):
    with pytest.raises(ValueError, match=message):
        jmp.raise_if_stuck(after([1]), **limits)


@pytest.mark.slow
def test_each_member_of_a_batched_state_is_judged():
    tx = jmp.with_loss_scale(optax.sgd(1.0))
    params = jnp.ones((2, 3))
    _, state = jax.vmap(tx.update)(params.at[1, 0].set(np.nan), jax.vmap(tx.init)(params), params)
    jmp.raise_if_stuck(state, 2)
    said = complaint(state, 1)
    assert said.startswith("Member [1] of [2]: The last step was skipped: inf or NaN in the gradients of")
    assert "The loss scale is 16384." in said
    assert jmp.get_metrics(state)["skipped_steps"].tolist() == [0, 1]


# The names


MODEL = {f"block_{i}": {"attention": {"kernel": 0, "bias": 1}, "mlp": {"kernel": 2}} for i in range(2, 10)}
MODEL = {"embedding": 0, **MODEL, "head": {"kernel": 3, "bias": 4}}


def flagged(is_bad):
    return describe({name: not is_bad(name) for name in leaf_names(MODEL)})


def test_names_are_those_of_modules():
    assert flagged(lambda name: True) == "all 27 parameters"
    assert flagged(lambda name: "head" not in name) == "25 of 27 parameters, all but head"
    assert flagged(lambda name: name.startswith(("block_2/", "block_9/"))) == (
        "6 of 27 parameters: block_2, block_9"
    )
    assert flagged(lambda name: name in ("embedding", "block_3/mlp/kernel")) == (
        "2 of 27 parameters: block_3/mlp, embedding"
    )
    assert flagged(lambda name: name.endswith("mlp/kernel")) == (
        "8 of 27 parameters: block_2/mlp, block_3/mlp, block_4/mlp, block_5/mlp, block_6/mlp, block_7/mlp "
        "and 2 more"
    )


def test_leaves_with_one_name_are_named_once():
    params = {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2), "c": jnp.ones(2)}
    tx = jmp.skip_nonfinite(optax.sgd(1.0))
    _, state = tx.update({**params, "a/b": jnp.full(2, np.inf)}, tx.init(params), params)
    assert "1 of 2 parameters: a." in complaint(state, 1)

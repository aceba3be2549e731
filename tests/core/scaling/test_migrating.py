"""The rules of other libraries, written out, beside ours: what the pages of docs/migrating/ say of them."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import jmp_lite as jmp

PAGES = Path(__file__).parents[3] / "docs/migrating"


def scales_of(loss_scale, finite):
    adjust, scales = jax.jit(lambda scale, finite: scale.adjust(finite)), []
    for each in finite:
        loss_scale = adjust(loss_scale, jnp.asarray(each))
        scales.append(float(loss_scale.loss_scale))
    return scales


def steps(share=0.8, count=240):
    """Whether the gradients of each step are finite; mostly not in the second quarter."""
    return np.random.default_rng(0).random(count) < np.repeat([0.9, 0.2, 0.9, share], count // 4)


def apex(finite, window, scale=2.0**16, largest=2.0**24):
    unskipped = 0
    for each in finite:
        scale, unskipped = (scale, unskipped + 1) if each else (scale / 2, 0)
        if unskipped == window:
            scale, unskipped = min(largest, 2 * scale), 0
        yield scale


def test_apex_falls_without_a_minimum_and_stops_at_its_maximum():
    finite = np.r_[np.zeros(20, bool), np.random.default_rng(0).random(300) < 0.95]
    ours = jmp.DynamicLossScale(2.0**16, period=4, min_loss_scale=0.0, max_loss_scale=2.0**24)
    found = scales_of(ours, finite)
    assert found == list(apex(finite, window=4))
    assert (min(found), max(found)) == (2.0**-4, 2.0**24)


def tensorflow(finite, scale, period, multiplier=2.0):
    good = 0
    for each in finite:
        if not each:
            good, scale = 0, max(scale / multiplier, 1.0)
        elif good + 1 >= period:
            good, scale = 0, scale * multiplier
        else:
            good += 1
        yield scale


def test_tensorflow_has_the_same_rule():
    found = scales_of(jmp.DynamicLossScale(2.0**15, period=4), steps())
    assert found == list(tensorflow(steps(), 2.0**15, 4))


def megatron(finite, scale, window, hysteresis, minimum):
    good, left = 0, hysteresis
    for each in finite:
        if each:
            good += 1
            if good == window:
                good, left, scale = 0, hysteresis, 2 * scale
        else:
            good, left = 0, left - 1
            if left <= 0:
                scale = max(scale / 2, minimum)
        yield scale


@pytest.mark.parametrize("hysteresis", [1, 3])
def test_megatron_counts_the_step_that_lowers_the_scale_too(hysteresis):
    ours = jmp.DynamicLossScale(2.0**16, period=4, hysteresis=hysteresis - 1, min_loss_scale=4.0)
    found = scales_of(ours, steps(0.7))
    assert found == list(megatron(steps(0.7), 2.0**16, 4, hysteresis, 4.0))
    assert min(found) == 4
    assert max(found) > 2.0**16


def deepspeed(finite, scale, window, hysteresis):
    good, left = 0, hysteresis
    for each in finite:
        if not each:
            good = 0
            if left == 1:
                scale /= 2
            else:
                left -= 1
        else:
            good += 1
            if good > 1 and (good - 1) % window == 0:
                left, scale = hysteresis, 2 * scale
        yield scale


def test_deepspeed_does_not_count_the_first_finite_step():
    short = [True] * 7 + [False] * 2 + [True] * 4
    theirs = [8, 8, 8, 16, 16, 16, 32, 32, 16, 16, 16, 16, 32]
    assert list(deepspeed(short, 8.0, 3, 2)) == theirs
    ours = scales_of(jmp.DynamicLossScale(8.0, period=3, hysteresis=1), short)
    assert ours == [8, 8, 16, 16, 16, 32, 32, 32, 16, 16, 16, 32, 32]


class HalvingLossScale(NamedTuple):
    """The simplest loss scale of a user: it only falls."""

    loss_scale: Any

    def scale(self, tree):
        return jmp.StaticLossScale(self.loss_scale).scale(tree)

    def unscale(self, tree):
        return jmp.StaticLossScale(self.loss_scale).unscale(tree)

    def adjust(self, grads_finite):
        return HalvingLossScale(jnp.where(grads_finite, self.loss_scale, self.loss_scale / 2))


def test_with_loss_scale_holds_a_loss_scale_of_a_user():
    tx = jmp.with_loss_scale(optax.sgd(0.1), HalvingLossScale(jnp.float32(2.0**16)))
    params = jnp.float32(1)
    opt_state = tx.init(params)
    for x in (1.0, jnp.inf, 1.0):
        grads = jmp.grad(lambda params, x: params * x, jmp.get_loss_scale(opt_state))(params, jnp.float32(x))
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert jmp.get_loss_scale(opt_state).loss_scale == 2.0**15
    assert jnp.allclose(params, 0.8)


def test_a_run_that_starts_at_megatrons_scale_skips_until_it_fits():
    loss_fn = jmp.autocast(lambda w: jnp.sum(w @ jnp.ones((8, 8))), jnp.float16)

    @jax.jit
    def next_scale(loss_scale):
        finite = jmp.all_finite(jmp.grad(loss_fn, loss_scale)(jnp.ones((8, 8))))
        return finite, loss_scale.adjust(finite)

    megatrons = jmp.DynamicLossScale(2.0**32, hysteresis=1)
    for loss_scale, skipped in ((megatrons, 21), (jmp.DynamicLossScale(), 3)):
        found = [next_scale(loss_scale)]
        while not found[-1][0]:
            found.append(next_scale(found[-1][1]))
        assert len(found) - 1 == skipped


def run_page(name):
    """What the code of a page leaves behind."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (PAGES / f"{name}.md").read_text(), re.DOTALL):
        exec(compile(block, f"{name}.md", "exec"), names)
    return names


def finite_step(tx, scaled_loss):
    """A step with the scale and the selection by hand."""

    @jax.jit
    def step(params, opt_state, loss_scale, x):
        grads = loss_scale.unscale(jax.grad(scaled_loss)(params, loss_scale, x))
        finite = jmp.all_finite(grads)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        return *jmp.select_tree(finite, new, (params, opt_state)), loss_scale.adjust(finite)

    return step


def assert_close(ours, theirs, start, share=0.02):
    assert jnp.abs(ours - theirs).max() < share * jnp.abs(theirs - start).max()


@pytest.mark.slow
def test_a_program_with_flaxs_dynamic_scale_and_dtypes_trains_as_one_with_autocast():
    page = run_page("flax")
    saved, loss_scale = page["saved"], page["loss_scale"]
    for _ in range(9):
        saved, *_ = saved.value_and_grad(lambda w: w**2)(jnp.float32(1))
        loss_scale = loss_scale.adjust(jnp.bool_(True))
        assert saved.scale == loss_scale.loss_scale

    class Network(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(16, dtype=self.dtype)(x))
            return nn.Dense(4, dtype=self.dtype)(x).astype(jnp.float32)

    batches = np.random.default_rng(0).normal(size=(16, 8, 16)).astype(np.float32)
    batches[5, 0, 0] = np.inf

    @jax.jit
    def our_step(state, x):
        loss_fn = jmp.autocast(lambda params: jnp.mean((state.apply_fn(params, x) - 1) ** 2), jnp.float16)
        _, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(state))(state.params)
        return state.apply_gradients(grads=grads)

    start = Network().init(jax.random.key(0), batches[0])
    tx = jmp.with_loss_scale(optax.adam(1e-2), jmp.DynamicLossScale(1024.0, period=4))
    ours, our_scales = TrainState.create(apply_fn=Network().apply, params=start, tx=tx), []
    for x in batches:
        ours = our_step(ours, x)
        our_scales.append(float(jmp.get_loss_scale(ours).loss_scale))
    assert (our_scales[4], our_scales[5]) == (2048, 1024)

    class ScaledState(TrainState):
        dynamic_scale: Any = None

    @jax.jit
    def flax_step(state, x):
        loss_fn = lambda params: jnp.mean((state.apply_fn(params, x) - 1) ** 2)
        dynamic_scale, is_finite, _, grads = state.dynamic_scale.value_and_grad(loss_fn)(state.params)
        new = state.apply_gradients(grads=grads)
        keep = lambda new, old: jnp.where(is_finite, new, old)
        return new.replace(
            params=jax.tree.map(keep, new.params, state.params),
            opt_state=jax.tree.map(keep, new.opt_state, state.opt_state),
            dynamic_scale=dynamic_scale,
        )

    state = ScaledState.create(
        apply_fn=Network(jnp.float16).apply,
        params=start,
        tx=optax.adam(1e-2),
        dynamic_scale=DynamicScale(scale=1024.0, growth_interval=3),
    )
    scales = []
    for x in batches:
        state = flax_step(state, x)
        scales.append(float(state.dynamic_scale.scale))
    assert scales == our_scales
    kernel = lambda params: params["params"]["Dense_0"]["kernel"]
    assert_close(kernel(ours.params), kernel(state.params), kernel(start))


@pytest.mark.exhaustive
def test_a_program_with_haikus_policies_trains_as_one_with_autocast():
    hk = pytest.importorskip("haiku")

    class Network(hk.Module):
        def __call__(self, x):
            return hk.Linear(4, name="head")(jnp.tanh(hk.Linear(16, name="body")(x)))

    batches = np.random.default_rng(0).normal(size=(16, 8, 16)).astype(np.float32)
    batches[5, 0, 0] = np.inf
    network = hk.without_apply_rng(hk.transform(lambda x: Network(name="network")(x)))
    start, tx = network.init(jax.random.key(0), batches[0]), optax.adam(1e-2)
    our_tx = jmp.with_loss_scale(tx, jmp.DynamicLossScale(2.0**10, period=4))

    @jax.jit
    def our_step(params, opt_state, x):
        half_loss = jmp.autocast(lambda params: jnp.mean((network.apply(params, x) - 1) ** 2), jnp.float16)
        grads = jmp.grad(half_loss, jmp.get_loss_scale(opt_state))(params)
        updates, opt_state = our_tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    ours, opt_state, our_scales = start, our_tx.init(start), []
    for x in batches:
        ours, opt_state = our_step(ours, opt_state, x)
        our_scales.append(float(jmp.get_loss_scale(opt_state).loss_scale))
    assert (our_scales[4], our_scales[5]) == (2048, 1024)
    loss_fn = lambda params, scale, x: scale.scale(jnp.mean((network.apply(params, x) - 1) ** 2))
    step, loss_scale = finite_step(tx, loss_fn), jmp.DynamicLossScale(2.0**10, period=4)
    params, opt_state, scales = start, tx.init(start), []
    hk.mixed_precision.set_policy(Network, jmp.get_policy("p=f32,c=f16,o=f32"))
    for x in batches:
        params, opt_state, loss_scale = step(params, opt_state, loss_scale, x)
        scales.append(float(loss_scale.loss_scale))
    hk.mixed_precision.clear_policy(Network)
    assert scales == our_scales
    weight = lambda params: params["network/body"]["w"]
    assert_close(weight(ours), weight(params), weight(start))


@pytest.mark.exhaustive
def test_an_equinox_program_by_hand_trains_as_the_one_of_the_page():
    page, tx = run_page("equinox"), optax.adam(1e-2)
    arrays, static = page["eqx"].partition(page["start"], page["eqx"].is_array)

    def to_half(tree):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), tree)

    def scaled_loss(arrays, scale, x):
        half_model = page["eqx"].combine(to_half(arrays), static)
        output = jax.vmap(half_model)(x.astype(jnp.float16)).astype(jnp.float32)
        return scale.scale(jnp.mean((output - 1) ** 2))

    step, loss_scale, params, opt_state = (
        finite_step(tx, scaled_loss),
        jmp.StaticLossScale(1024.0),
        arrays,
        tx.init(arrays),
    )
    for x in page["batches"]:
        params, opt_state, _ = step(params, opt_state, loss_scale, x)
    weight = lambda model: model.layers[0].weight
    assert_close(weight(page["model"]), weight(params), weight(arrays), 0.05)


@pytest.mark.slow
def test_a_program_for_jmp_computes_the_same_numbers_with_both():
    theirs = pytest.importorskip("jmp")
    batches = np.random.default_rng(0).normal(size=(16, 8, 16)).astype(np.float32)
    batches[5, 0, 0] = np.inf
    start, tx = jnp.full((16, 4), 0.1), optax.adam(1e-2)

    def train(jmp):
        policy = jmp.get_policy("params=float32,compute=float16,output=float32")
        loss_scale = jmp.DynamicLossScale(jnp.asarray(2.0**10), period=4)

        @jax.jit
        def train_step(params, opt_state, loss_scale, x):
            def loss_fn(params):
                half_params, half_x = policy.cast_to_compute((params, x))
                output = policy.cast_to_output(half_x @ half_params)
                return loss_scale.scale(jnp.mean((output - 1) ** 2))

            grads = loss_scale.unscale(jax.grad(loss_fn)(params))
            finite = jmp.all_finite(grads)
            updates, new_state = tx.update(grads, opt_state, params)
            new_params = optax.apply_updates(params, updates)
            params, opt_state = jmp.select_tree(finite, (new_params, new_state), (params, opt_state))
            return params, opt_state, loss_scale.adjust(finite)

        params, opt_state, scales = start, tx.init(start), []
        for x in batches:
            params, opt_state, loss_scale = train_step(params, opt_state, loss_scale, x)
            scales.append(float(loss_scale.loss_scale))
        return params, scales

    (params, scales), (their_params, their_scales) = train(jmp), train(theirs)
    assert scales == their_scales
    assert len(set(scales)) > 1
    np.testing.assert_array_equal(params, their_params)

"""`migrate_state`: the settings and dtypes of the script, the values of an old optimizer state."""

import functools
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

import jmp_lite as jmp
from tests.support.steps import bits, make_grads, make_params, make_step, run, spoil

BF16 = jnp.dtype("bfloat16")
PARAMS = {"w": jnp.linspace(-1, 1, 12).reshape(3, 4), "layers": [jnp.zeros(4), jnp.full(4, 0.3, jnp.float32)]}
SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 10)
ADAM = optax.adamw(SCHEDULE)
NEAREST = jmp.with_half_state(ADAM, stochastic_rounding=False)
SCALE = jmp.DynamicLossScale(2.0**10, period=2, hysteresis=1)


def grads(step):
    return jax.tree.map(lambda p: jnp.asarray(np.cos(step + 3 * np.asarray(p)) / 4), PARAMS)


def train(tx, steps=3, params=PARAMS, state=None):
    state = tx.init(params) if state is None else state
    step = make_step(tx)
    for index in range(steps):
        params, state = step(params, state, grads(index))
    return params, state


def orbax(state, path):
    import orbax.checkpoint

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state")


FORMS = {
    "live": lambda state, path: state,
    "numpy": lambda state, path: jax.tree.map(np.asarray, state),
    "pickled": lambda state, path: pickle.loads(pickle.dumps(state)),
    "flax": lambda state, path: serialization.msgpack_restore(serialization.to_bytes(state)),
    "orbax": orbax,
}
WRAPPED = {
    "plain": lambda tx: tx,
    "scale": lambda tx: jmp.with_loss_scale(tx, SCALE, clip_norm=1.0),
    "skip": jmp.skip_nonfinite,
    "cast": lambda tx: jmp.with_loss_scale(jmp.with_half_state(tx)),
    "stochastic": lambda tx: jmp.with_half_state(tx, key=3),
    "masters": lambda tx: jmp.with_loss_scale(
        jmp.with_master_params(jmp.with_half_state(tx, keep_float32="nu"))
    ),
    "rounding": lambda tx: jmp.with_loss_scale(
        jmp.with_stochastic_rounding(jmp.with_half_state(tx)), jmp.NoOpLossScale()
    ),
}


@functools.cache
def trained(wrapped):
    """An optimizer of `WRAPPED`, its jitted step, and parameters and a state after three steps."""
    tx = WRAPPED[wrapped](ADAM)
    step, params, state = make_step(tx), PARAMS, tx.init(PARAMS)
    for index in range(3):
        params, state = step(params, state, grads(index))
    return tx, step, params, state


ORBAX = pytest.mark.filterwarnings("ignore::UserWarning:orbax", "ignore::DeprecationWarning:orbax")
pytestmark = [ORBAX, pytest.mark.filterwarnings("ignore:.*sharding info not provided.*")]


@functools.cache
def stateless(index):
    """A wrapper of a transform without state, and its state after three steps."""
    sgd = optax.sgd(0.1)
    tx = [
        lambda: optax.chain(optax.clip(1.0), jmp.with_loss_scale(sgd, SCALE)),
        lambda: optax.chain(jmp.skip_nonfinite(sgd), optax.trace(0.9)),
        lambda: optax.chain(jmp.with_stochastic_rounding(sgd)),
        lambda: jmp.with_loss_scale(optax.masked(jmp.with_stochastic_rounding(sgd), True), SCALE),
        lambda: jmp.with_loss_scale(optax.set_to_zero()),
    ][index]()
    return tx, *train(tx)


EACH = [*WRAPPED, *range(5)]


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize("wrapped", EACH)
@pytest.mark.parametrize("form", ["flax", "orbax", "live", "numpy", "pickled"])
def test_the_same_settings_give_the_same_bits(form, wrapped, tmp_path):
    tx, *_, params, state = trained(wrapped) if isinstance(wrapped, str) else stateless(wrapped)
    resumed = jmp.migrate_state(tx, params, FORMS[form](state, tmp_path))
    assert jax.tree.structure(resumed) == jax.tree.structure(state)
    assert bits(resumed) == bits(state) != bits(tx.init(params))


def moments(state):
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)
    (adam,) = [node for node in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(node)]
    return adam


# The wrappers of each by their first letters, the outermost first. `skip_nonfinite` is that of a scale.
LAYERS = {
    **{"plain": "", "scale": "s", "skip": "s", "cast": "sc", "stochastic": "c"},
    **{"masters": "smc", "rounding": "src"},
}


def has_all(before, after):
    """Whether `after` has all wrappers of `before`, in their order."""
    letters = iter(LAYERS[after])
    return all(letter in letters for letter in LAYERS[before])


# Each wrapper is on both sides, beside the optimizer without one and beside its neighbours.
NAMES = [*WRAPPED]
CHANGES = [*(("plain", name) for name in NAMES), *((name, "plain") for name in NAMES[1:])]
CHANGES += [change for pair in itertools.pairwise(NAMES[1:]) for change in (pair, pair[::-1])]
CHANGES += [pair for pair in itertools.product(NAMES, NAMES) if pair not in CHANGES]


@pytest.mark.cases(fast=8, slow=18)
@pytest.mark.parametrize(("before", "after"), CHANGES)
@pytest.mark.parametrize("form", ["live", "flax", "orbax"])
def test_further_wrappers_give_their_dtypes_to_the_old_values_and_others_are_refused(
    before, after, form, tmp_path
):
    params, old = trained(before)[2:]
    tx, step, _, _ = trained(after)
    saved = FORMS[form](old, tmp_path)
    if not has_all(before, after):
        with pytest.raises(ValueError, match=r"is the state of a wrapper that tx lacks there.*take off"):
            jmp.migrate_state(tx, params, saved)
        return
    resumed = jmp.migrate_state(tx, params, saved)
    fresh = tx.init(params)
    assert jax.tree.structure(resumed) == jax.tree.structure(fresh)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), resumed) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), fresh
    )
    theirs, ours = moments(old), moments(resumed)
    assert int(ours.count) == 3
    for name in ("mu", "nu"):
        for value, expected in zip(
            jax.tree.leaves(getattr(ours, name)), jax.tree.leaves(getattr(theirs, name)), strict=True
        ):
            np.testing.assert_array_equal(value, expected.astype(value.dtype))
    step(params, resumed, grads(3))  # Nothing is missing.
    assert step._cache_size() == 1


@pytest.mark.slow
def test_half_of_an_optimizer_may_have_wrappers_of_its_own():
    labels = {"w": "a", "layers": ["b", "b"]}
    plain = optax.multi_transform({"a": ADAM, "b": optax.sgd(0.1, momentum=0.9)}, labels)
    tx = jmp.with_loss_scale(
        optax.multi_transform(
            {"a": jmp.with_half_state(ADAM), "b": jmp.with_stochastic_rounding(optax.sgd(0.1, momentum=0.9))},
            labels,
        )
    )
    _, old = train(plain)
    resumed = jmp.migrate_state(tx, PARAMS, old)
    assert moments(resumed).mu["w"].dtype == BF16
    unwrapped = lambda state: getattr(state, "inner_state", state).inner_states["b"].inner_state.inner_state
    assert bits(unwrapped(resumed)) == bits(old.inner_states["b"].inner_state)
    train(tx, state=resumed)


@pytest.mark.parametrize("form", ["live", "flax", "orbax"])
def test_an_optimizer_without_a_state_gets_wrappers_that_have_one(form, tmp_path):
    sgd, params = optax.sgd(0.1), jmp.cast_to_half(PARAMS)
    tx = jmp.with_loss_scale(jmp.with_master_params(sgd), SCALE)
    resumed = jmp.migrate_state(tx, params, FORMS[form](sgd.init(params), tmp_path))
    assert bits(resumed) == bits(tx.init(params))


def test_masters_come_from_the_old_state_or_from_the_parameters():
    halves = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    tx = jmp.with_loss_scale(jmp.with_master_params(ADAM))
    params, old = train(tx, params=halves)
    again = jmp.with_loss_scale(jmp.with_master_params(jmp.with_half_state(ADAM)))
    full = jmp.get_master_params(old, params)
    assert (
        bits(jmp.get_master_params(jmp.migrate_state(again, params, old), params))
        == bits(full)
        != bits(params)
    )
    # To drop the masters: their values, and the state inside of them, as the error says.
    with pytest.raises(ValueError, match="'inner_state' is the state of a wrapper that tx lacks"):
        jmp.migrate_state(jmp.with_loss_scale(ADAM), params, old)
    inside = jmp.migrate_state(jmp.with_loss_scale(ADAM), full, old.inner_state.inner_state)
    assert bits(inside.inner_state) == bits(old.inner_state.inner_state)
    _, plain = train(ADAM)
    fresh = jmp.migrate_state(tx, params, plain)
    assert bits(fresh.inner_state.masters) == bits(jax.tree.map(lambda p: p.astype(jnp.float32), params))


# Settings


@pytest.mark.cases(fast=2, slow=0)
@pytest.mark.parametrize("form", FORMS)
def test_the_settings_of_a_dynamic_scale_are_those_of_the_script(form, tmp_path):
    old_tx = jmp.with_loss_scale(ADAM, jmp.DynamicLossScale(8.0, period=100, hysteresis=3))
    _, old = run(old_tx, [spoil(make_grads(0)), make_grads(1)])
    script = jmp.DynamicLossScale(64.0, period=2, hysteresis=1)
    tx = jmp.with_loss_scale(ADAM, script)
    state = jmp.migrate_state(tx, make_params(), FORMS[form](old, tmp_path))
    scale = jmp.get_loss_scale(state)
    assert (scale.period, scale.hysteresis) == (2, 1)
    assert [float(x) for x in (scale.loss_scale, scale.counter, scale.hysteresis_left)] == [8.0, 1.0, 1.0]
    assert jmp.get_metrics(state)["skipped_steps"] == 1
    _, state = make_step(tx)(make_params(), state, make_grads(2))
    assert float(jmp.get_loss_scale(state).loss_scale) == 16.0


@pytest.mark.cases(fast=8, slow=2)
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (jmp.StaticLossScale(8.0), jmp.StaticLossScale(16.0), 16.0),
        (jmp.DynamicLossScale(8.0), jmp.StaticLossScale(16.0), 16.0),
        (jmp.StaticLossScale(8.0), jmp.DynamicLossScale(16.0), 8.0),
        (jmp.NoOpLossScale(), jmp.DynamicLossScale(16.0), 16.0),
        (jmp.DynamicLossScale(8.0), jmp.NoOpLossScale(), 1.0),
        (jmp.DynamicLossScale(2.0**20), jmp.DynamicLossScale(16.0, max_loss_scale=2.0**16), 16.0),
        (jmp.DynamicLossScale(2.0), jmp.DynamicLossScale(16.0, min_loss_scale=4.0), 16.0),
        (jmp.DynamicLossScale(0.5), jmp.DynamicLossScale(0.25), 0.5),
    ],
)
@pytest.mark.parametrize("form", ["live", "flax", "orbax"])
def test_the_number_of_a_dynamic_scale_is_a_value_and_that_of_a_static_one_a_setting(
    before, after, expected, form, tmp_path
):
    sgd = optax.sgd(0.1)
    _, old = train(jmp.with_loss_scale(sgd, before), steps=1)
    state = jmp.migrate_state(jmp.with_loss_scale(sgd, after), PARAMS, FORMS[form](old, tmp_path))
    scale = jmp.get_loss_scale(state)
    assert type(scale) is type(after)
    assert float(scale.loss_scale) == expected


def test_a_rounding_key_goes_on_and_a_new_one_is_the_scripts():
    _, old = train(jmp.with_half_state(ADAM, key=7))
    same = jmp.migrate_state(jmp.with_loss_scale(jmp.with_half_state(ADAM)), PARAMS, old)
    assert bits(same.inner_state.key) == bits(old.key)
    both = jmp.with_stochastic_rounding(jmp.with_half_state(ADAM))
    assert bits(jmp.migrate_state(both, PARAMS, old).key) == bits(both.init(PARAMS).key)


@pytest.mark.slow
def test_an_nnx_optimizer_goes_on():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jmp.with_loss_scale(ADAM), wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    tx = jmp.with_loss_scale(jmp.with_half_state(ADAM), SCALE)
    state = jmp.migrate_state(tx, nnx.state(model, nnx.Param), optimizer.opt_state)
    resumed = nnx.Optimizer(model, tx, wrt=nnx.Param)
    nnx.update(resumed.opt_state, nnx.state(state))
    assert int(resumed.opt_state.inner_state.inner_state[0].count[...]) == 1
    assert float(jmp.get_loss_scale(resumed).loss_scale) == 2.0**15
    resumed.update(model, grads)


# Arrays


@pytest.mark.slow
def test_arrays_are_copies_on_the_devices_of_the_parameters():
    tx = jmp.with_loss_scale(ADAM)
    _, old = train(tx)
    resumed = jmp.migrate_state(tx, PARAMS, old)
    jax.block_until_ready(
        jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)(resumed)
    )
    assert np.isfinite(np.asarray(moments(old).mu["w"])).all()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    params = {**PARAMS, "w": jax.device_put(PARAMS["w"], sharding)}
    on_one = jax.device_put(old, jax.devices()[0])
    state = jmp.migrate_state(tx, params, on_one)
    assert moments(state).mu["w"].sharding == sharding
    make_step(tx)(params, state, grads(3))  # Arrays that are committed to one device would not go with these.


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_goes_on_with_fewer_devices(devices):
    on = lambda count: jax.sharding.NamedSharding(
        jax.make_mesh((count,), ("data",), devices=jax.devices()[:count]), jax.sharding.PartitionSpec()
    )
    noise = optax.add_noise(0.1, 0.1, jax.random.key(0))  # A typed key in the state.
    tx = jmp.with_loss_scale(optax.chain(noise, ADAM))
    old, params = jax.device_put(tx.init(PARAMS), on(4)), jax.device_put(PARAMS, on(devices))
    state = jmp.migrate_state(tx, params, old)
    for resumed, fresh in zip(jax.tree.leaves(state), jax.tree.leaves(tx.init(params)), strict=True):
        assert (resumed.sharding, resumed.committed) == (fresh.sharding, fresh.committed)
    make_step(tx)(params, state, grads(3))


@pytest.mark.slow
def test_it_works_inside_jit_and_vmap():
    tx = jmp.with_loss_scale(jmp.with_half_state(ADAM), SCALE)
    _, old = train(ADAM)
    inside = jax.jit(lambda params, old: jmp.migrate_state(tx, params, old))(PARAMS, old)
    assert bits(inside) == bits(jmp.migrate_state(tx, PARAMS, old))

    def stack(tree):
        return jax.tree.map(lambda x: jnp.stack([x, x]), tree)

    members = jax.vmap(lambda params, old: jmp.migrate_state(tx, params, old))(stack(PARAMS), stack(old))
    assert bits(jax.tree.map(lambda x: x[1], members)) == bits(inside)


# What does not fit


@pytest.mark.cases(fast=4, slow=2)
@pytest.mark.parametrize(
    ("tx", "old", "says"),
    [
        (
            ADAM,
            optax.sgd(0.1, momentum=0.9),
            r"has the parts \[\] there and \['2'\] in tx",
        ),
        (
            optax.sgd(0.1, momentum=0.9),
            optax.adam(1e-3),
            "ScaleByAdamState there and a TraceState|0' has the parts",
        ),
        (ADAM, optax.adamw(1e-3), r"has the parts \[\] there and \['2'\] in tx"),
        (
            optax.adamw(1e-3),
            optax.MultiSteps(optax.adamw(1e-3), 2),
            r"\['acc_grads', .* there and \['0'\] in tx",
        ),
    ],
)
@pytest.mark.parametrize("form", ["live", "flax", "orbax"])
@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: jmp.with_loss_scale(jmp.with_half_state(tx))])
def test_another_optimizer_is_named(tx, old, says, form, wrap, tmp_path):
    state = FORMS[form](wrap(old).init(PARAMS), tmp_path)
    with pytest.raises(ValueError, match=rf"migrate_state\(tx, params, old_state\): .*{says}.*begin anew"):
        jmp.migrate_state(wrap(tx), PARAMS, state)


def test_other_parameters_are_named():
    old = ADAM.init(PARAMS)
    with pytest.raises(ValueError, match=r"'0/mu/w' has the shape \(3, 4\) there and \(5,\) in tx"):
        jmp.migrate_state(ADAM, {**PARAMS, "w": jnp.ones(5)}, old)
    with pytest.raises(ValueError, match=r"'0/mu' has the parts \['w'\] there and \['v'\] in tx"):
        jmp.migrate_state(ADAM, {"v": PARAMS["w"], "layers": PARAMS["layers"]}, old)
    with pytest.raises(ValueError, match=r"'0/count' is float32 there and int32 in tx"):
        jmp.migrate_state(ADAM, PARAMS, (old[0]._replace(count=jnp.float32(3)), *old[1:]))
    with pytest.raises(TypeError, match="wraps an optax transform such as"):
        jmp.migrate_state(3, PARAMS, old)
    with pytest.raises(ValueError, match="'0' is a ScaleByAdamState there and a ScaleByBeliefState in tx"):
        jmp.migrate_state(optax.adabelief(1e-3), PARAMS, optax.adam(1e-3).init(PARAMS))
    for nothing in (None, {}, jnp.ones(3)):
        with pytest.raises(ValueError, match=r"the old state has the parts .* there and \['0', '2'\] in tx"):
            jmp.migrate_state(ADAM, PARAMS, nothing)
    with pytest.raises(ValueError, match="the old state has the parts"):
        jmp.migrate_state(optax.sgd(0.1), PARAMS, jnp.ones(3))
    with pytest.raises(ValueError, match="'0/mu/w' is a dict there and an array in tx"):
        jmp.migrate_state(
            ADAM, PARAMS, (old[0]._replace(mu={**old[0].mu, "w": {"value": 1.0, "key": 2.0}}), *old[1:])
        )


def test_a_masked_tuple_does_not_take_the_moments_of_its_neighbour():
    params = (jnp.ones(2), jnp.ones(2))
    old = optax.masked(ADAM, (True, False)).init(params)
    with pytest.raises(ValueError, match=r"mu' has the parts \['0'\] there and \['1'\] in tx"):
        jmp.migrate_state(optax.masked(ADAM, (False, True)), params, old)


# A live state of other settings


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (jmp.with_loss_scale(ADAM, SCALE), jmp.with_loss_scale(ADAM), r"hysteresis=1"),
        (jmp.with_loss_scale(ADAM, jmp.StaticLossScale(8.0)), jmp.with_loss_scale(ADAM), "StaticLossScale"),
        (jmp.with_loss_scale(ADAM), jmp.with_loss_scale(ADAM, clip_norm=1.0), "without clip_norm"),
        (jmp.skip_nonfinite(ADAM), jmp.with_loss_scale(ADAM), "a state of skip_nonfinite"),
        (ADAM, jmp.with_loss_scale(ADAM), "Got tuple"),
        (ADAM, jmp.with_master_params(ADAM), "Got tuple"),
        (jmp.with_loss_scale(ADAM), jmp.with_loss_scale(jmp.with_half_state(ADAM)), "of another optimizer"),
        (
            jmp.with_loss_scale(jmp.with_half_state(ADAM)),
            jmp.with_loss_scale(ADAM),
            "of another optimizer or",
        ),
        (
            jmp.with_half_state(ADAM),
            jmp.with_half_state(ADAM, keep_float32="nu"),
            r"'0/nu/.*float32.*Got bfloat16",
        ),
        (jmp.with_half_state(ADAM, "float32"), jmp.with_half_state(ADAM), r"'0/mu/.*bfloat16.*Got float32"),
        (NEAREST, jmp.with_half_state(ADAM), "made without it"),
        (jmp.with_half_state(ADAM), NEAREST, "made with it"),
        (jmp.with_half_state(optax.lion(1e-3)), jmp.with_half_state(ADAM), "does not belong"),
    ],
)
@pytest.mark.cases(fast=13, slow=0)
@pytest.mark.parametrize("jit", [False, True])
def test_a_live_state_of_other_settings_is_named_with_resume(before, after, says, jit):
    state = before.init(PARAMS)
    update = jax.jit(after.update) if jit else after.update
    with pytest.raises(
        (ValueError, TypeError), match=rf"(?s){says}.*jmp\.migrate_state\(tx, params, opt_state\)"
    ):
        update(grads(0), state, PARAMS)
    if says not in ("does not belong", "of another optimizer or"):  # These are refused.
        jax.eval_shape(after.update, grads(0), jmp.migrate_state(after, PARAMS, state), PARAMS)

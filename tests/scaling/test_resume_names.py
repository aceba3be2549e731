"""`resume` matches by names: every parameter gets its own moments, every name its own scale."""

from collections import OrderedDict
from typing import NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from hypothesis import strategies as st

import jmp_lite as jmp
from tests.support.steps import bits

SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 10)
PLAIN = "adam lion adafactor amsgrad adabelief adagrad adamax lamb novograd radam rprop sm3 yogi"
OPTIMIZERS = {
    **{name: getattr(optax, name)(1e-3) for name in PLAIN.split()},
    "adafactor": optax.adafactor(1e-3, momentum=0.9),
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(SCHEDULE, weight_decay=0.1),
    "nadam": optax.nadam(SCHEDULE),
    "rmsprop": optax.rmsprop(SCHEDULE, momentum=0.9, centered=True),
    "two averages": optax.chain(optax.trace(0.9), optax.ema(0.9), optax.scale(-1.0)),
    # Saved by Flax the links are a dict, which sorts "10" before "2".
    "many links": optax.chain(*(optax.trace(0.1 * n) for n in range(12))),
    "not finite": optax.apply_if_finite(optax.adam(1e-3), 5),
    "named chain": optax.named_chain(("first", optax.trace(0.9)), ("second", optax.trace(0.5))),
    "hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
    "multi steps": optax.MultiSteps(optax.adam(1e-3), 3).gradient_transformation(),
    "masked": optax.masked(optax.adam(1e-3), lambda params: jax.tree.map(lambda p: p.ndim > 0, params)),
    "partition": optax.partition(
        {"a": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.9)},
        lambda params: jax.tree.map(lambda p: "ab"[p.ndim % 2], params),
    ),
    "schedule free": optax.contrib.schedule_free_adamw(1e-2),
    "prodigy": optax.contrib.prodigy(),
    "mechanize": optax.contrib.mechanize(optax.adam(1e-2)),
    "split": optax.contrib.split_real_and_imaginary(optax.adam(1e-3)),
}
CLIP, SCALE = optax.clip(1.0), jmp.StaticLossScale(8.0)
WRAPPED = {
    "plain": (lambda tx: tx, lambda state: state),
    "scale": (lambda tx: jmp.with_loss_scale(tx), lambda state: state.inner_state),
    "apply if finite": (lambda tx: optax.apply_if_finite(tx, 5), lambda state: state.inner_state),
    "clip before": (lambda tx: optax.chain(CLIP, tx), lambda state: state[1]),
    "clip after": (lambda tx: jmp.skip_nonfinite(optax.chain(tx, CLIP)), lambda state: state.inner_state[0]),
    "chain of chains": (
        lambda tx: optax.chain(CLIP, optax.chain(CLIP, jmp.with_loss_scale(tx, SCALE), CLIP), CLIP),
        lambda state: state[1][1].inner_state,
    ),
    "masters": (
        lambda tx: jmp.with_loss_scale(jmp.with_master_weights(jmp.cast_state(tx, "float32"))),
        lambda state: state.inner_state.inner_state.inner_state,
    ),
}


def saved_by_flax(state):
    # Flax cannot save the `OrderedDict` of `optax.named_chain`.
    is_ordered = lambda node: isinstance(node, OrderedDict)
    as_dict = lambda node: {k: as_dict(v) for k, v in node.items()} if is_ordered(node) else node
    state = jax.tree.map(as_dict, state, is_leaf=is_ordered)
    return serialization.msgpack_restore(serialization.to_bytes(state))


FORMS = {"live": lambda state: state, "flax": saved_by_flax}


class Layer(NamedTuple):
    w: object
    b: object


def array(*shape):
    return jnp.zeros(shape, jnp.float32)


TREES = [
    array(2),
    (None, array(2)),
    (array(2), None, array(2), array(2)),
    [None, array(), (None, array())],
    {"a": {"b": array(2)}, "a/b": array(2)},
    {"0": array(), "1": {"value": array(2), "0/1": array(2)}},
    {"layers": (None, {"w": array(2, 2), "b": None}, (array(2), array(2)))},
    (Layer(array(2, 2), array(2)), Layer(array(2, 2), None), None),
    {"net": (Layer(array(2), None), Layer((None, array()), array(2)))},
]
# Trees of arrays of a few shapes, so that an array often fits in the place of another.
random_trees = st.recursive(
    st.sampled_from([None, array(), array(2), array(2, 2)]),
    lambda tree: (
        st.lists(tree, min_size=1, max_size=3)
        | st.lists(tree, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", "a/b", "0", "1", "value"]), tree, min_size=1, max_size=3)
        | st.builds(Layer, tree, tree)
    ),
    max_leaves=6,
).filter(lambda tree: len(jax.tree.leaves(tree)) > 1)
trees = st.sampled_from(TREES) | random_trees


def distinct(state):
    """The state with another number in each array, so that no two can be mixed up unseen."""
    leaves, structure = jax.tree.flatten(state)
    number = lambda index, leaf: jnp.full(
        leaf.shape, index % 2 if leaf.dtype == bool else index + 1, leaf.dtype
    )
    return structure.unflatten([number(index, jnp.asarray(leaf)) for index, leaf in enumerate(leaves)])


@pytest.mark.cases(slow=5)
@pytest.mark.parametrize("name", OPTIMIZERS)
@hypothesis.given(
    before=st.sampled_from(sorted(WRAPPED)),
    after=st.sampled_from(sorted({*WRAPPED} - {"apply if finite"})),
    form=st.sampled_from(sorted(FORMS)),
    params=trees,
)
def test_every_parameter_gets_its_own_moments(name, before, after, form, params):
    # One `optax.apply_if_finite` in another: which of them `tx` has is not clear, and `resume` raises.
    hypothesis.assume(not (name == "not finite" and before == "apply if finite"))
    old_tx, old_inner = (part if n else part(OPTIMIZERS[name]) for n, part in enumerate(WRAPPED[before]))
    tx, inner = (part if n else part(OPTIMIZERS[name]) for n, part in enumerate(WRAPPED[after]))
    old = distinct(old_tx.init(params))
    resumed = jmp.resume(tx, params, FORMS[form](old))
    assert jax.tree.structure(resumed) == jax.tree.structure(tx.init(params))
    assert jax.tree.structure(inner(resumed)) == jax.tree.structure(old_inner(old))
    assert bits(inner(resumed)) == bits(old_inner(old))


@hypothesis.given(
    name=st.sampled_from(sorted({*OPTIMIZERS} - {"masked", "partition"})),
    wrap=st.sampled_from(sorted({*WRAPPED} - {"apply if finite"})),
    form=st.sampled_from(sorted(FORMS)),
    params=random_trees,
    lost=st.integers(0, 5),
)
def test_a_parameter_that_one_of_the_two_lacks_is_an_error(name, wrap, form, params, lost):
    hypothesis.assume(not (name == "split" and form == "flax"))
    leaves, structure = jax.tree.flatten(params)
    leaves[lost % len(leaves)] = None
    fewer, plain, tx = structure.unflatten(leaves), OPTIMIZERS[name], WRAPPED[wrap][0](OPTIMIZERS[name])
    for before, after in ((params, fewer), (fewer, params)):
        with pytest.raises(ValueError, match=r"it lacks|tx does not know its"):
            jmp.resume(tx, after, FORMS[form](plain.init(before)))


# Masters


HALF = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.float16)}


def stepped(tx, params=HALF):
    """The state after a step by which the masters differ from their parameters."""
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-14, jnp.float32), params)
    updates, state = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("form", FORMS)
def test_the_masters_of_a_renamed_parameter_are_an_error(form):
    tx = jmp.with_master_weights(optax.sgd(1.0))
    params, state = stepped(tx)
    with pytest.raises(ValueError, match="tx does not know its 'masters/w'"):
        jmp.resume(tx, {"v": params["w"], "b": params["b"]}, FORMS[form](state))
    resumed = jmp.resume(tx, params, FORMS[form](state))
    np.testing.assert_array_equal(resumed.masters["w"], np.full(2, 1 - 2.0**-14, np.float32))


def test_masters_of_other_forms_are_an_error():
    inside = optax.flatten(jmp.with_master_weights(optax.adam(1e-3)))
    outside = jmp.with_master_weights(optax.flatten(optax.adam(1e-3)))
    with pytest.raises(ValueError, match="tx does not know its 'masters'"):
        jmp.resume(outside, HALF, stepped(inside)[1])
    with pytest.raises(ValueError, match="tx does not know its 'masters/b', 'masters/w'"):
        jmp.resume(inside, HALF, stepped(outside)[1])


def test_a_parameter_that_left_half_precision_needs_no_master():
    tx = jmp.with_master_weights(optax.sgd(1.0))
    params, state = stepped(tx)
    wide = {**params, "w": jmp.master_params(state, params)["w"]}
    resumed = jmp.resume(tx, wide, state)
    assert resumed.masters["w"] == optax.MaskedNode()
    assert float(resumed.masters["b"][0]) == 1 - 2.0**-14


@pytest.mark.parametrize("form", FORMS)
def test_names_with_slashes_have_masters_of_their_own(form):
    params = {"a": {"b": jnp.ones((), jnp.float16)}, "a/b": jnp.full((), 2, jnp.float16)}
    tx = jmp.with_loss_scale(jmp.with_master_weights(optax.adam(1e-3)))
    _, state = stepped(tx, params)
    resumed = jmp.resume(tx, params, FORMS[form](state))
    assert bits(resumed) == bits(state)
    masters = resumed.inner_state.masters
    assert float(masters["a"]["b"]) < 1.001 < 1.99 < float(masters["a/b"])


# Scales


def two_scales(*names):
    of = {"generator": {"g": True, "d": False}, "discriminator": {"g": False, "d": True}}
    scale = lambda name: jmp.with_loss_scale(optax.sgd(0.1), jmp.DynamicLossScale(2.0**10), name=name)
    return optax.chain(*(optax.masked(scale(name), of[name]) for name in names))


def test_scales_are_matched_by_their_names():
    params = {"g": jnp.ones(2), "d": jnp.ones(3)}
    tx = two_scales("generator", "discriminator")
    _, old = tx.update({"g": jnp.full(2, jnp.inf), "d": jnp.ones(3)}, tx.init(params), params)
    resumed = jmp.resume(two_scales("discriminator", "generator"), params, old)
    for name, number in (("generator", 2.0**9), ("discriminator", 2.0**10)):
        assert float(jmp.get_loss_scale(resumed, name).loss_scale) == number
        assert int(jmp.metrics(resumed, name)["skipped_steps"]) == (number == 2.0**9)
    assert bits(jmp.resume(tx, params, FORMS["flax"](old))) == bits(old)
    one = jmp.resume(two_scales("generator"), params, old)
    assert float(jmp.get_loss_scale(one).loss_scale) == 2.0**9
    other = jmp.with_loss_scale(optax.sgd(0.1), name="critic")
    with pytest.raises(ValueError, match=r"\['generator', 'discriminator'\] lack that of 'critic'"):
        jmp.resume(other, params, old)


def test_two_scales_of_one_name_are_no_guess():
    params = {"g": jnp.ones(2), "d": jnp.ones(3)}
    scale = lambda name: jmp.with_loss_scale(optax.sgd(0.1), name=name)
    before = optax.chain(scale(None), scale(None), scale("critic"))
    assert bits(jmp.resume(before, params, before.init(params))) == bits(before.init(params))
    with pytest.raises(ValueError, match=r"named \[None, None, 'critic'\] lack that of None"):
        jmp.resume(optax.chain(scale("critic"), scale(None), scale(None)), params, before.init(params))


@pytest.mark.parametrize("form", FORMS)
def test_a_scale_may_move_from_a_part_to_the_whole(form):
    params, mask = {"g": jnp.ones(2), "d": jnp.ones(3)}, {"g": True, "d": False}
    adam = optax.adam(1e-3)
    part = optax.masked(jmp.with_loss_scale(adam), mask)
    _, old = part.update({"g": jnp.full(2, jnp.inf), "d": jnp.ones(3)}, distinct(part.init(params)), params)
    resumed = jmp.resume(jmp.with_loss_scale(optax.masked(adam, mask)), params, FORMS[form](old))
    assert bits(resumed.inner_state.inner_state) == bits(old.inner_state.inner_state)
    assert bits(resumed.loss_scale) == bits(old.inner_state.loss_scale)
    assert bits(resumed.counts) == bits(old.inner_state.counts)
    assert resumed.leaf_finite.tolist() == [True, True]


# Dtypes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda adam: adam._replace(count=np.int64(2**40)), "'0/count' is int64 there and int32 in tx"),
        (lambda adam: adam._replace(count=2**40), "'0/count' is .*int64 there and int32 in tx"),
        (lambda adam: adam._replace(count=np.uint32(2**31)), "'0/count' is uint32 there and int32 in tx"),
        (lambda adam: adam._replace(mu=np.full(2, 1e300)), "'0/mu' is float64 there and float32 in tx"),
        (lambda adam: adam._replace(count=True), "'0/count' is bool there and int32 in tx"),
    ],
)
def test_only_half_precision_rounds(change, says):
    tx = optax.adam(1e-3)
    adam, *rest = tx.init(array(2))
    with pytest.raises(ValueError, match=says):
        jmp.resume(tx, array(2), (change(adam), *rest))
    assert int(jmp.resume(tx, array(2), (adam._replace(count=7), *rest))[0].count) == 7
    wide = adam._replace(mu=jnp.full(2, 1 / 3), nu=jnp.full(2, 1 / 3, jnp.bfloat16))
    moments = jmp.resume(jmp.cast_state(tx), array(2), (wide, *rest)).inner_state[0]
    assert moments.mu.dtype == moments.nu.dtype == jnp.bfloat16
    np.testing.assert_array_equal(moments.mu, jnp.full(2, 1 / 3, jnp.bfloat16))


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(("form", "jit"), [("flax", True), ("live", False)])
def test_an_accumulator_with_inf_begins_anew_under_a_scale_outside(form, jit):
    adam, params = optax.adam(0.1), {"w": array(2)}
    before = optax.MultiSteps(jmp.with_loss_scale(adam, SCALE), 2).gradient_transformation()
    after = jmp.with_loss_scale(optax.MultiSteps(adam, 2), SCALE)
    resume = lambda tx, state: (jax.jit if jit else lambda f: f)(lambda p, s: jmp.resume(tx, p, s))(
        params, state
    )
    update_before, update_after = jax.jit(before.update), jax.jit(after.update)
    for value in (jnp.inf, 0.5):
        _, old = update_before({"w": jnp.full(2, value)}, before.init(params), params)
        saved = FORMS[form](old)
        assert bits(resume(before, saved)) == bits(old)
        state = resume(after, saved)
        is_finite = value == 0.5
        assert int(state.inner_state.mini_step) == is_finite
        np.testing.assert_array_equal(state.inner_state.acc_grads["w"], np.full(2, value if is_finite else 0))
        new = params
        for _ in range(2):
            updates, state = update_after({"w": jnp.ones(2)}, state, new)
            new = optax.apply_updates(new, updates)
        np.testing.assert_allclose(new["w"], -0.1, rtol=1e-5)


def inject(state, adam, old):
    return state._replace(count=adam.count, inner_state=old)


def accumulate(state, adam, old):
    return state._replace(gradient_step=adam.count, inner_opt_state=old)


@pytest.mark.parametrize(
    ("tx", "place"),
    [
        (optax.adamw(SCHEDULE), lambda state, adam, old: (*old[:-1], optax.ScaleByScheduleState(adam.count))),
        (optax.inject_hyperparams(optax.adamw)(learning_rate=3e-4), inject),
        (optax.MultiSteps(optax.adamw(3e-4), 4).gradient_transformation(), accumulate),
    ],
    ids=["schedule", "inject_hyperparams", "MultiSteps"],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_transform_with_a_state_is_added_as_the_guide_says(tx, place, form):
    params = (None, array(2), array(2))
    old = distinct(optax.adamw(3e-4).init(params))
    with pytest.raises(ValueError, match="it lacks"):
        jmp.resume(jmp.with_loss_scale(tx), params, old)
    partly = FORMS[form](place(tx.init(params), old[0], old))
    resumed = jmp.resume(jmp.with_loss_scale(tx), params, partly).inner_state
    assert jax.tree.structure(resumed) == jax.tree.structure(tx.init(params))
    assert bits(optax.tree.get(resumed, "mu")) == bits(old[0].mu)
    assert bits(optax.tree.get(resumed, "nu")) == bits(old[0].nu)
    counts = [int(count) for _, count in optax.tree.get_all_with_path(resumed, "count")]
    assert set(counts) == {int(old[0].count)}

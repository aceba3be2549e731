"""`migrate_state` is exact or refuses: every parameter gets its own moments, every name its own scale."""

import dataclasses
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
        lambda tx: jmp.with_loss_scale(jmp.with_master_params(jmp.with_half_state(tx, "float32"))),
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

    def number(index, leaf):
        return jnp.full(leaf.shape, index % 2 if leaf.dtype == bool else index + 1, leaf.dtype)

    return structure.unflatten([number(index, jnp.asarray(leaf)) for index, leaf in enumerate(leaves)])


# What is carried over: the same wrappers, and further ones around them. Not here: `distinct` gives a
# `MultiSteps` in `apply_if_finite` more micro-batches than it takes.
GOING = [
    ("plain", "scale"),
    ("plain", "masters"),
    ("scale", "masters"),
    *((name, name) for name in WRAPPED if name != "apply if finite"),
]


@pytest.mark.cases(slow=5)
@pytest.mark.parametrize("name", OPTIMIZERS)
@hypothesis.given(
    change=st.sampled_from(GOING) | st.tuples(*[st.sampled_from(sorted(WRAPPED))] * 2),
    form=st.sampled_from(sorted(FORMS)),
    params=trees,
)
def test_every_parameter_gets_its_own_moments_or_the_state_is_refused(name, change, form, params):
    (wrap, old_inner), (wrap_again, inner) = (WRAPPED[wrapped] for wrapped in change)
    tx, old = wrap_again(OPTIMIZERS[name]), distinct(wrap(OPTIMIZERS[name]).init(params))
    try:
        resumed = jmp.migrate_state(tx, params, FORMS[form](old))
    except ValueError:
        assert change not in GOING
        return
    assert jax.tree.structure(resumed) == jax.tree.structure(tx.init(params))
    assert jax.tree.structure(inner(resumed)) == jax.tree.structure(old_inner(old))
    assert bits(inner(resumed)) == bits(old_inner(old))


@hypothesis.given(
    name=st.sampled_from(sorted({*OPTIMIZERS} - {"masked", "partition"})),
    wrap=st.sampled_from([after for before, after in GOING if before == "plain"]),
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
        with pytest.raises(ValueError, match="has the parts"):
            jmp.migrate_state(tx, after, FORMS[form](plain.init(before)))


# Masters


HALF = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.float16)}


def stepped(tx, params=HALF):
    """The state after a step by which the masters differ from their parameters."""
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-14, jnp.float32), params)
    updates, state = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("form", FORMS)
def test_the_masters_of_a_renamed_parameter_are_an_error(form):
    tx = jmp.with_master_params(optax.sgd(1.0))
    params, state = stepped(tx)
    with pytest.raises(ValueError, match=r"'masters' has the parts \['w'\] there and \['v'\] in tx"):
        jmp.migrate_state(tx, {"v": params["w"], "b": params["b"]}, FORMS[form](state))
    resumed = jmp.migrate_state(tx, params, FORMS[form](state))
    np.testing.assert_array_equal(resumed.masters["w"], np.full(2, 1 - 2.0**-14, np.float32))


def test_masters_of_other_forms_are_an_error():
    inside = optax.flatten(jmp.with_master_params(optax.adam(1e-3)))
    outside = jmp.with_master_params(optax.flatten(optax.adam(1e-3)))
    with pytest.raises(ValueError, match=r"'masters' has the parts \[''\] there and \['b', 'w'\] in tx"):
        jmp.migrate_state(outside, HALF, stepped(inside)[1])
    with pytest.raises(ValueError, match="'masters' is a dict there and an array in tx"):
        jmp.migrate_state(inside, HALF, stepped(outside)[1])


def test_a_master_is_dropped_by_hand_only():
    tx = jmp.with_master_params(optax.sgd(1.0))
    params, state = stepped(tx)
    wide = {**params, "w": jmp.get_master_params(state, params)["w"]}
    with pytest.raises(ValueError, match=r"'masters' has the parts \['w'\] there and \[\] in tx"):
        jmp.migrate_state(tx, wide, state)
    all_wide = jmp.get_master_params(state, params)
    with pytest.raises(ValueError, match=r"has the parts \['masters'\] there and \[\] in tx"):
        jmp.migrate_state(tx, all_wide, state)
    # A parameter that is in half now has no master yet, and no half of the masters would be made anew.
    with pytest.raises(ValueError, match=r"'masters' has the parts \[\] there and \['w'\] in tx"):
        jmp.migrate_state(tx, params, stepped(tx, {**params, "w": jnp.ones(2)})[1])
    resumed = jmp.migrate_state(tx, wide, state._replace(masters={**state.masters, "w": optax.MaskedNode()}))
    assert resumed.masters["w"] == optax.MaskedNode()
    assert float(resumed.masters["b"][0]) == 1 - 2.0**-14


@pytest.mark.parametrize("form", FORMS)
def test_names_with_slashes_have_masters_of_their_own(form):
    params = {"a": {"b": jnp.ones((), jnp.float16)}, "a/b": jnp.full((), 2, jnp.float16)}
    tx = jmp.with_loss_scale(jmp.with_master_params(optax.adam(1e-3)))
    _, state = stepped(tx, params)
    resumed = jmp.migrate_state(tx, params, FORMS[form](state))
    assert bits(resumed) == bits(state)
    masters = resumed.inner_state.masters
    assert float(masters["a"]["b"]) < 1.001 < 1.99 < float(masters["a/b"])


# Scales


def two_scales(*names):
    of = {"generator": {"g": True, "d": False}, "discriminator": {"g": False, "d": True}}
    scale = lambda name: jmp.with_loss_scale(optax.sgd(0.1), jmp.DynamicLossScale(2.0**10), name=name)
    return optax.chain(*(optax.masked(scale(name), of[name]) for name in names))


def test_scales_of_one_tree_are_not_confused():
    params = {"g": jnp.ones(2), "d": jnp.ones(3)}
    tx = two_scales("generator", "discriminator")
    _, old = tx.update({"g": jnp.full(2, jnp.inf), "d": jnp.ones(3)}, tx.init(params), params)
    for form in FORMS.values():
        assert bits(jmp.migrate_state(tx, params, form(old))) == bits(old)
    with pytest.raises(ValueError, match="has the name 'generator' there and 'discriminator' in tx"):
        jmp.migrate_state(two_scales("discriminator", "generator"), params, old)
    with pytest.raises(ValueError, match=r"has the parts \['1'\] there and \[\] in tx"):
        jmp.migrate_state(two_scales("generator"), params, old)


def test_a_scale_with_another_name_is_renamed_as_the_error_says():
    params = {"g": jnp.ones(2)}
    before = jmp.with_loss_scale(optax.sgd(0.1), jmp.DynamicLossScale(2.0**10))
    after, state = jmp.with_loss_scale(optax.sgd(0.1), name="critic"), before.init(params)
    with pytest.raises(
        ValueError, match=r"None there and 'critic' in tx: dataclasses\.replace\(old_state, name="
    ):
        jmp.migrate_state(after, params, state)
    resumed = jmp.migrate_state(after, params, dataclasses.replace(state, name="critic"))
    assert float(jmp.get_loss_scale(resumed, "critic").loss_scale) == 2.0**10


@pytest.mark.parametrize("form", FORMS)
def test_a_scale_of_a_part_does_not_become_one_of_the_whole(form):
    params, mask = {"g": jnp.ones(2), "d": jnp.ones(3)}, {"g": True, "d": False}
    adam = optax.adam(1e-3)
    part = optax.masked(jmp.with_loss_scale(adam), mask)
    _, old = part.update({"g": jnp.full(2, jnp.inf), "d": jnp.ones(3)}, distinct(part.init(params)), params)
    whole = jmp.with_loss_scale(optax.masked(adam, mask))
    with pytest.raises(ValueError, match="'inner_state/inner_state' is the state of a wrapper that tx lacks"):
        jmp.migrate_state(whole, params, FORMS[form](old))
    inside = old._replace(inner_state=old.inner_state.inner_state)
    resumed = jmp.migrate_state(whole, params, FORMS[form](inside))
    assert bits(resumed.inner_state) == bits(inside)


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
        jmp.migrate_state(tx, array(2), (change(adam), *rest))
    assert int(jmp.migrate_state(tx, array(2), (adam._replace(count=7), *rest))[0].count) == 7
    wide = adam._replace(mu=jnp.full(2, 1 / 3), nu=jnp.full(2, 1 / 3, jnp.bfloat16))
    moments = jmp.migrate_state(jmp.with_half_state(tx), array(2), (wide, *rest)).inner_state[0]
    assert moments.mu.dtype == moments.nu.dtype == jnp.bfloat16
    np.testing.assert_array_equal(moments.mu, jnp.full(2, 1 / 3, jnp.bfloat16))


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(("form", "jit"), [("flax", True), ("live", False)])
def test_an_accumulator_with_inf_begins_anew_under_a_scale_outside(form, jit):
    adam, params = optax.adam(0.1), {"w": array(2)}
    before = optax.MultiSteps(adam, 2).gradient_transformation()
    after = jmp.with_loss_scale(optax.MultiSteps(adam, 2), SCALE)

    def migrate(tx, state):
        return (jax.jit if jit else lambda f: f)(lambda p, s: jmp.migrate_state(tx, p, s))(params, state)

    update_before, update_after = jax.jit(before.update), jax.jit(after.update)
    for value in (jnp.inf, 0.5):
        _, old = update_before({"w": jnp.full(2, value)}, before.init(params), params)
        saved = FORMS[form](old)
        assert bits(migrate(before, saved)) == bits(old)
        state = migrate(after, saved)
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
    with pytest.raises(ValueError, match="has the parts"):
        jmp.migrate_state(jmp.with_loss_scale(tx), params, old)
    partly = FORMS[form](place(tx.init(params), old[0], old))
    resumed = jmp.migrate_state(jmp.with_loss_scale(tx), params, partly).inner_state
    assert jax.tree.structure(resumed) == jax.tree.structure(tx.init(params))
    assert bits(optax.tree.get(resumed, "mu")) == bits(old[0].mu)
    assert bits(optax.tree.get(resumed, "nu")) == bits(old[0].nu)
    counts = [int(count) for _, count in optax.tree.get_all_with_path(resumed, "count")]
    assert set(counts) == {int(old[0].count)}

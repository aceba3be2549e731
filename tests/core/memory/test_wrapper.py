"""What all wrappers of an optimizer check: gradients, arrays and states; and the names of leaves."""

import pickle
import timeit
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import jmp_lite as jmp
from jmp_lite._scaling.state import LeafNames
from tests.support.steps import bits

PARAMS = {"head": {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}, "gain": jnp.ones(())}
HALVES = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
WRAPPERS = {
    "with_loss_scale": jmp.with_loss_scale,
    "skip_nonfinite": jmp.skip_nonfinite,
    "with_master_params": jmp.with_master_params,
    "with_half_state": lambda tx: jmp.with_half_state(tx),
    "with_stochastic_rounding": jmp.with_stochastic_rounding,
    "nested": lambda tx: jmp.with_loss_scale(jmp.with_stochastic_rounding(jmp.with_half_state(tx))),
    "masters": lambda tx: jmp.with_loss_scale(jmp.with_master_params(jmp.with_half_state(tx))),
}
OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "sgd": optax.sgd(1e-3),
    "chain": optax.chain(optax.clip(1.0), optax.adamw(optax.constant_schedule(1e-3))),
    "multi_steps": optax.MultiSteps(optax.lion(1e-3), 2),
    "prodigy": optax.contrib.prodigy(),
}


EACH_WRAPPER_AND_OPTIMIZER = [
    *((wrap, "adam") for wrap in WRAPPERS),
    *(("with_loss_scale", optimizer) for optimizer in OPTIMIZERS if optimizer != "adam"),
]


@pytest.mark.parametrize(("wrap", "optimizer"), EACH_WRAPPER_AND_OPTIMIZER)
def test_a_gradient_that_does_not_fit_its_parameter_is_named(wrap, optimizer):
    """JAX would broadcast the first shape and refuse the second."""
    tx, head = WRAPPERS[wrap](OPTIMIZERS[optimizer]), PARAMS["head"]
    state = jax.eval_shape(tx.init, HALVES)
    said = r"The gradient 'head/w' has the shape \({}\), and its parameter has \(2, 3\)"
    cases = [({**head, "w": jnp.ones((3,))}, said.format("3,"))]
    cases += [({**head, "w": jnp.ones((4, 3))}, said.format("4, 3"))]
    if optimizer != "sgd":  # optax.sgd has no state, and takes a part of the gradients.
        lacks = r"The gradients lack the parameters \['head/b'\]"
        cases += [({"w": head["w"]}, lacks), ({"w": head["w"], "b": None}, lacks)]
        cases += [({**head, "tail": jnp.ones(2)}, r"The gradients have leaves that .*: \['head/tail'\]")]
    for grads, said in cases:
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(tx.update, {**PARAMS, "head": grads}, state, HALVES)


def test_the_only_gradient_is_named_if_it_does_not_fit():
    tx, params = jmp.with_half_state(optax.trace(0.9)), {"w": jnp.ones((2, 3))}
    with pytest.raises(
        ValueError, match=r"The gradient 'w' has the shape \(3,\), and its parameter has \(2, 3\)"
    ):
        tx.update({"w": jnp.ones(3)}, tx.init(params), params)


def test_masters_need_a_gradient_of_each_parameter():
    tx = jmp.with_master_params(optax.sgd(1e-3))
    with pytest.raises(ValueError, match=r"The gradients lack the parameters \['head/b'"):
        tx.update({**PARAMS, "head": {"w": PARAMS["head"]["w"], "b": None}}, tx.init(HALVES), HALVES)


def test_errors_of_the_optimizer_itself_come_through():
    def update(updates, state, params=None):
        raise KeyError("mine")

    inner = optax.GradientTransformation(lambda params: (), update)
    for wrap in WRAPPERS.values():
        tx = wrap(inner)
        with pytest.raises(KeyError, match="mine"):
            tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_the_parameters_may_be_left_out():
    tx = jmp.with_half_state(optax.trace(0.5))
    updates, _ = tx.update(PARAMS, tx.init(PARAMS))
    assert bits(updates) == bits(PARAMS)


@pytest.mark.slow
def test_gradients_of_each_example_have_an_axis_more():
    private = optax.contrib.differentially_private_aggregate(1.0, 0.0, key=jax.random.key(0))
    grads = jax.tree.map(lambda p: jnp.stack([p, -2 * p]) / 8, PARAMS)
    expected, _ = jax.jit(private.update)(grads, private.init(PARAMS))
    tx = jmp.skip_nonfinite(jmp.with_half_state(private))
    updates, _ = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
    for one, other in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_init_of_shapes_names_eval_shape():
    shapes = jax.eval_shape(lambda: HALVES)
    for wrap in WRAPPERS.values():
        tx = wrap(optax.adam(1e-3))
        said = r"init takes arrays\. Got jax\.ShapeDtypeStruct\..*jax\.eval_shape\(tx"
        with pytest.raises(TypeError, match=said):
            tx.init(shapes)
        assert jax.tree.structure(jax.eval_shape(tx.init, shapes)) == jax.tree.structure(tx.init(HALVES))


@pytest.mark.parametrize(
    "build",
    [
        lambda tx: jmp.with_stochastic_rounding(jmp.with_master_params(tx)),
        lambda tx: jmp.with_master_params(jmp.with_stochastic_rounding(tx)),
        lambda tx: jmp.with_master_params(jmp.with_master_params(tx)),
        lambda tx: jmp.with_master_params(optax.chain(jmp.with_stochastic_rounding(tx))),
        lambda tx: jmp.with_loss_scale(
            jmp.with_master_params(optax.masked(jmp.with_stochastic_rounding(tx), True))
        ),
    ],
    ids=["rounding outside", "rounding inside", "twice", "in a chain", "masked, under a loss scale"],
)
def test_two_wrappers_for_half_parameters_are_an_error(build):
    for params in (PARAMS, HALVES):
        with pytest.raises(ValueError, match=r"It would see float32 parameters, .* Use one of the two\."):
            build(optax.adam(1e-3)).init(params)


# Messages


def test_stochastic_round_takes_one_array():
    for x in (PARAMS, [1.0, 2.0], None, "x"):
        said = rf"rounds one array\. Got x of type {type(x).__name__}\..*each array"
        with pytest.raises(TypeError, match=said):
            jmp.stochastic_round(x, "bfloat16", jax.random.key(0))
    assert jmp.stochastic_round(np.float32(1), "bfloat16", jax.random.key(0)) == 1


def test_a_key_without_rounding_is_an_error():
    for key in (0, 3, jax.random.key(0)):
        with pytest.raises(ValueError, match=r"key= is for stochastic rounding, which is off\. Got"):
            jmp.with_half_state(optax.adam(1e-3), stochastic_rounding=False, key=key)


@pytest.mark.cases(fast=3, slow=0)
@pytest.mark.parametrize(
    "build", [WRAPPERS["with_half_state"], WRAPPERS["with_stochastic_rounding"], WRAPPERS["nested"]]
)
@pytest.mark.parametrize(
    "save",
    [lambda s: serialization.from_bytes(s, serialization.to_bytes(s)), lambda s: jax.tree.map(np.asarray, s)],
)
def test_an_eager_update_of_a_restored_state_does_not_warn(build, save):
    tx = build(optax.adam(1e-3))
    state = save(tx.init(HALVES))
    state = jax.tree.map(lambda leaf: leaf if leaf.ndim else leaf.dtype.type(leaf), state)  # NumPy scalars.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            updates, state = tx.update(PARAMS, state, HALVES)
    fresh = tx.init(HALVES)
    for _ in range(3):
        expected, fresh = tx.update(PARAMS, fresh, HALVES)
    assert bits(updates) == bits(expected)


# Names of leaves


COPY = jax.jit(lambda state: jax.tree.map(jnp.copy, state))


def test_a_jitted_function_of_two_states_keeps_the_names_of_each():
    tx = jmp.with_loss_scale(optax.sgd(1.0, momentum=0.9))
    models = [{"bias": jnp.ones(2), name: jnp.ones(2)} for name in ("generator", "critic")]
    for params in models + models[::-1]:
        state = COPY(tx.init(params))
        assert state.leaf_names.paths == tuple(sorted(params))
        last = list(params)[-1]
        _, state = tx.update({**params, last: params[last] * jnp.inf}, state, params)
        with pytest.raises(FloatingPointError, match=f"1 of 2 parameters: {last}"):
            jmp.raise_if_stuck(state, 1)
    one, other = (tx.init(params) for params in models)
    assert jax.tree.structure(one) != jax.tree.structure(other)
    assert jax.tree.structure(one) == jax.tree.structure(tx.init(models[0]))
    assert jax.tree.structure(pickle.loads(pickle.dumps(one))) == jax.tree.structure(one)


def test_hashing_names_reads_none_of_them():
    names = LeafNames(tuple(f"layers/{index}/kernel" for index in range(100_000)))
    assert hash(names) == hash(LeafNames(()))
    assert min(timeit.repeat(lambda: hash(names), number=100, repeat=5)) < 1e-3  # 100 tuples would be 50 ms.
    assert names == LeafNames(())  # The placeholder of `optax.tree_map_params`.
    assert names != LeafNames(names.paths[:-1])

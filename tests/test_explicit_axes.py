"""Each public transform on a mesh of explicit axes, the default of `jax.make_mesh`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from tests.support.arrays import normal
from tests.support.jaxprs import equations, products
from tests.support.small_programs import ORDERS

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
SPECS = {"w1": P(None, "model"), "w2": P("model"), "b": P()}
WHOLE = {"w1": normal(0, 16, 32, scale=0.1), "w2": normal(1, 32, 16, scale=0.1), "b": jnp.zeros(16)}
X = normal(2, 32, 16)


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(MESH):
        yield


def sharded(dtype=jnp.float32):
    """The parameters and the batch, split over both axes."""
    put = lambda leaf, spec: jax.device_put(leaf.astype(dtype), NamedSharding(MESH, spec))
    return jax.tree.map(put, WHOLE, SPECS), jax.device_put(X, NamedSharding(MESH, P("data")))


def loss(params, x):
    split = functools.partial(jnp.einsum, "bi,ij->bj")
    hidden = jnp.tanh(split(x, params["w1"], out_sharding=P("data", "model")))
    return jnp.mean((split(hidden, params["w2"], out_sharding=P("data")) + params["b"] - x) ** 2)


def plain(params, x):
    """The same loss on one device."""
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] + params["b"] - x) ** 2)


def assert_split(tree):
    for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(SPECS), strict=True):
        assert leaf.sharding.is_equivalent_to(NamedSharding(MESH, spec), leaf.ndim)


OPTIONS = {
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "reduce_dtype": {"dtype": "bfloat16", "reduce_dtype": "float32"},
    "float32_results": {"dtype": "bfloat16", "float32_results": "**"},
    "float8": {"dtype": "float8", "rules": {"**": "float8"}},
    "float8 and reduce_dtype": {"dtype": "float8", "rules": {"**": "float8"}, "reduce_dtype": "float32"},
}


@pytest.mark.cases(slow=1)
@pytest.mark.filterwarnings("ignore:autocast.*'float8'")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("order", ORDERS)
def test_autocast_has_the_gradients_of_one_device(order, name):
    options = OPTIONS[name]
    if order == "inside":
        grad = jax.grad(jmp.autocast(loss, **options))
    else:
        grad = jmp.autocast(jax.grad(loss), **options)
    params, x = sharded()
    kinds = {dtype for pair in products(grad, params, x) for dtype in pair}
    assert kinds == ({"float8_e4m3fn", "float8_e5m2"} if "float8" in name else {options["dtype"]})
    found = jax.jit(grad)(params, x)
    assert_split(found)
    expected = jax.grad(plain)(WHOLE, X)
    tolerance = 0.1 if "float8" in name else 0.02
    for leaf, true in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        error = np.linalg.norm(np.asarray(leaf) - true) / np.linalg.norm(true)
        assert error < tolerance


def gathering(cast):
    """A loss that gathers each weight by `reshard` (FSDP), after a cast by hand."""

    def loss(params, x):
        gathered = {name: jax.sharding.reshard(cast(leaf), P()) for name, leaf in params.items()}
        hidden = jnp.tanh(cast(x) @ gathered["w1"])
        return jnp.mean((hidden @ gathered["w2"]).astype(jnp.float32) ** 2)

    return loss


def resharded(fun, params, x):
    """The dtype and the sharding of each matrix that a function moves between devices by `reshard`."""
    found = [
        e.outvars[0].aval for e in equations(jax.make_jaxpr(fun)(params, x)) if e.primitive.name == "reshard"
    ]
    return sorted((aval.dtype.name, str(aval.sharding.spec)) for aval in found if aval.ndim == 2)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("order", ORDERS)
def test_a_weight_is_cast_before_reshard_gathers_it_and_its_gradient_after(order):
    params = {name: jax.device_put(leaf, NamedSharding(MESH, P("data"))) for name, leaf in WHOLE.items()}
    del params["b"]
    x = jax.device_put(X, NamedSharding(MESH, P("data")))

    def grad(**options):
        cast = functools.partial(jmp.autocast, dtype="bfloat16", **options)
        loss = gathering(lambda leaf: leaf)
        return jax.grad(cast(loss)) if order == "inside" else cast(jax.grad(loss))

    by_hand = jax.grad(gathering(lambda leaf: leaf.astype(jnp.bfloat16)))
    expected = resharded(by_hand, params, x)
    assert [dtype for dtype, _ in expected] == ["bfloat16"] * 4
    assert resharded(grad(), params, x) == expected
    compiled = jax.jit(grad()).lower(params, x).compile().as_text()
    assert compiled.count(" all-gather(") == 2
    # With `reduce_dtype` the gradients move in float32, and the weights still in half.
    wide = grad(reduce_dtype="float32")
    moved = resharded(wide, params, x)
    assert moved.count(("float32", str(P("data", None)))) == 2
    assert moved.count(("bfloat16", str(P(None, None)))) == 2
    assert jax.jit(wide).lower(params, x).compile().as_text().count(" all-gather(") == 2


def test_a_weight_that_float32_operations_read_too_is_gathered_once_in_float32():
    def loss(w, x):
        w = jax.sharding.reshard(w, P())
        return jnp.mean((x @ w) ** 2) + 1e-4 * jnp.sum(jnp.exp(w))

    w, x = jax.device_put((WHOLE["w1"], X), NamedSharding(MESH, P("data")))
    assert [dtype for dtype, _ in resharded(jmp.autocast(loss, "bfloat16"), w, x)] == ["float32"]


def trained(tx, params, x, fun, jit, steps=3):
    """The parameters and the last loss after a few steps, on whatever devices the parameters are."""
    state = tx.init(params)
    has_scale = getattr(state, "loss_scale", None) is not None

    def step(params, state):
        scale = jmp.get_loss_scale(state) if has_scale else jmp.NoOpLossScale()
        value, grads = jmp.value_and_grad(jmp.autocast(fun), scale)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    step = jax.jit(step) if jit else step
    for _ in range(steps):
        params, state, value = step(params, state)
    return params, state, value


adam = functools.partial(optax.adam, 1e-2)
TRANSFORMS = {
    "all": (
        jnp.bfloat16,
        lambda: jmp.with_loss_scale(jmp.with_stochastic_rounding(jmp.with_half_state(adam())), clip_norm=1.0),
    ),
    "with_loss_scale": (jnp.float32, lambda: jmp.with_loss_scale(adam())),
    "skip_nonfinite": (jnp.float32, lambda: jmp.skip_nonfinite(adam())),
    "with_master_params": (jnp.bfloat16, lambda: jmp.with_master_params(adam())),
    "with_half_state, stochastic": (jnp.float32, lambda: jmp.with_half_state(adam())),
    "with_stochastic_rounding": (jnp.bfloat16, lambda: jmp.with_stochastic_rounding(adam())),
}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_a_transform_trains_as_on_one_device(name, jit):
    dtype, tx = TRANSFORMS[name]
    params, state, value = trained(tx(), *sharded(dtype), loss, jit)
    assert_split(params)
    with jax.set_mesh(jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,))):
        whole = jax.tree.map(lambda leaf: leaf.astype(dtype), WHOLE)
        expected, _, true = trained(tx(), whole, X, plain, jit)
    np.testing.assert_allclose(value, true, rtol=2e-3)
    # Adam's first steps have the size of the learning rate: a sign may differ where a gradient is near 0.
    for leaf, other, start in zip(*map(jax.tree.leaves, (params, expected, WHOLE)), strict=True):
        moved = np.asarray(leaf, np.float32) - np.asarray(start)
        expected_move = np.asarray(other, np.float32) - np.asarray(start)
        assert np.linalg.norm(moved - expected_move) < 0.2 * np.linalg.norm(expected_move)
    if name == "with_loss_scale":
        resumed = jmp.migrate_state(jmp.with_loss_scale(adam(), clip_norm=1.0), params, state)
        assert_split(resumed.inner_state[0].mu)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_stochastic_rounding_gives_each_element_the_bits_that_it_has_on_one_device(dtype):
    key, (params, _) = jax.random.key(3), sharded()
    stochastic_round = jax.jit(jmp.stochastic_round, static_argnums=1)
    for name in ("w1", "w2"):
        rounded = stochastic_round(params[name], dtype, key)
        assert rounded.sharding.is_equivalent_to(params[name].sharding, 2)
        expected = stochastic_round(np.asarray(WHOLE[name]), dtype, key)
        np.testing.assert_array_equal(np.asarray(rounded, np.float32), np.asarray(expected, np.float32))


@pytest.mark.slow
def test_an_inf_in_one_shard_skips_the_step_on_all_devices():
    params, x = sharded()
    x = jnp.where(jnp.arange(32, out_sharding=P("data"))[:, None] == 5, jnp.inf, x)
    after, state, _ = trained(jmp.with_loss_scale(adam()), params, x, loss, jit=True, steps=1)
    jax.tree.map(np.testing.assert_array_equal, after, params)
    assert float(jmp.get_metrics(state)["skipped_steps"]) == 1
    with pytest.raises(FloatingPointError, match="The last step was skipped"):
        jmp.raise_if_stuck(state, max_consecutive_skips=1)


@pytest.mark.slow
def test_trees_and_layers():
    params, x = sharded()
    assert bool(jmp.all_finite(params))
    assert_split(jmp.select_tree(jmp.all_finite(params), params, jax.tree.map(jnp.zeros_like, params)))
    halves, _ = sharded(jnp.bfloat16)
    tx = jmp.with_master_params(adam())
    opt_state = tx.init(halves)
    assert_split(jmp.get_master_params(opt_state, halves))
    opt_state, halves = jmp.set_master_params(opt_state, halves, params)
    assert_split(halves)
    assert_split(jmp.get_master_params(opt_state, halves))
    jax.tree.map(np.testing.assert_array_equal, jmp.get_master_params(opt_state, halves), params)
    cast = jmp.cast_params(params, jmp.get_policy("bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(cast)} == {np.dtype(jnp.bfloat16)}
    assert_split(cast)
    masters = jmp.get_master_params(opt_state, halves)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(masters)} == {"float32"}
    layer = jmp.with_layer_loss_scale(
        lambda w, x: jnp.einsum("bi,ij->bj", x, w, out_sharding=P("data", "model"))
    )
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(layer(w, x) ** 2)))(params["w1"])
    expected = jax.grad(lambda w: jnp.sum((X @ w) ** 2))(WHOLE["w1"])
    np.testing.assert_allclose(np.asarray(gradient), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_raise_if_stuck_reads_a_state_in_the_context_of_the_mesh():
    params, _ = sharded()
    tx = jmp.with_loss_scale(optax.adam(1e-3))
    state = tx.init(params)
    for _ in range(2):
        _, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    jmp.raise_if_stuck(state, 2)
    _, still = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    with pytest.raises(FloatingPointError, match="gradients of all 1 steps were zero"):
        jmp.raise_if_stuck(still, 1)

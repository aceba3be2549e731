"""What Linen and NNX have in common under a policy: sums in float32, carries, subclasses of layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_lite as jmp
from jmp_lite import linen
from jmp_lite import nnx as under_nnx
from jmp_lite._flax.calls import _is_shared
from tests.support.jaxprs import products
from tests.support.policies import F16, SEQUENCE, each_policy

RNGS = nnx.Rngs(0)
each_library = pytest.mark.parametrize("library", ["Linen", "NNX"])


def with_policy(model, policy):
    return (linen if isinstance(model, nn.Module) else under_nnx).with_policy(model, policy)


def as_function(model, *inputs):
    """Returns a model of either library as a function of parameters and inputs, and the parameters."""
    if isinstance(model, nn.Module):
        params = model.init(jax.random.key(0), *inputs)["params"]
        return lambda params, *inputs: model.apply({"params": params}, *inputs), params
    graph, params, others = nnx.split(model, nnx.Param, ...)
    return lambda params, *inputs: nnx.merge(graph, params, others)(*inputs), params


def embedding(library, dtype=None):
    return nn.Embed(2, 1, dtype=dtype) if library == "Linen" else nnx.Embed(2, 1, dtype=dtype, rngs=RNGS)


def convolution(library, dtype=None):
    if library == "Linen":
        return nn.Conv(8, (1, 1), dtype=dtype)
    return nnx.Conv(1, 8, (1, 1), dtype=dtype, rngs=RNGS)


@pytest.mark.cases(fast=2, slow=0)
@each_library
@each_policy
def test_the_gradients_of_an_embedding_row_are_summed_in_float32(library, policy):
    ids = jnp.zeros(10_009, jnp.int32)

    def count(model):
        run, params = as_function(model, ids)
        return jax.grad(lambda params: run(params, ids).sum())(params)["embedding"][0, 0]

    assert count(with_policy(embedding(library), policy)) == 10_009
    stuck = {"float16": 2048, "bfloat16": 256}  # The layer's own dtype gives this.
    assert count(embedding(library, policy.compute_dtype)) == stuck[np.dtype(policy.compute_dtype).name]


@pytest.mark.cases(fast=2, slow=0)
@each_library
@each_policy
def test_the_gradients_of_a_bias_are_summed_in_float32(library, policy):
    x, weights = jnp.zeros((40, 32, 32, 1)), jnp.ones((40, 32, 32, 8))

    def count(model):
        run, params = as_function(model, x)
        loss_fn = lambda params, weights: (run(params, x) * weights).sum()
        return jax.jit(jax.grad(loss_fn))(params, weights)["bias"][0]

    assert count(with_policy(convolution(library), policy)) == 40_960
    if jax.default_backend() == "cpu":
        stuck = {"float16": 4096, "bfloat16": 512}  # The layer's own dtype gives this.
        assert count(convolution(library, policy.compute_dtype)) == stuck[np.dtype(policy.compute_dtype).name]


class LinenRows(nn.Module):
    @nn.compact
    def __call__(self, x, positions):
        return x + nn.Embed(2, 1)(positions)


class NnxRows(nnx.Module):
    def __init__(self):
        self.embedding = nnx.Embed(2, 1, rngs=RNGS)

    def __call__(self, x, positions):
        return x + self.embedding(positions)


@pytest.mark.cases(slow=2)
@each_library
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_the_gradient_of_rows_that_a_batch_shares_is_summed_in_float32_on_request(library, shape):
    x, positions = jnp.ones((10_009, 1, 1)), jnp.zeros(shape, jnp.int32)
    model = LinenRows() if library == "Linen" else NnxRows()

    def count(reduce_dtype):
        library_of_model = linen if library == "Linen" else under_nnx
        under = library_of_model.with_policy(model, F16, reduce_dtype=reduce_dtype)
        run, params = as_function(under, x, positions)
        return jax.tree.leaves(jax.grad(lambda params: run(params, x, positions).sum())(params))[0][0, 0]

    assert count("float32") == 10_009
    assert count(None) != 10_009  # The addition is in half precision.


@pytest.mark.parametrize(
    ("shape", "is_shared"), [((), True), ((5,), True), ((1, 5), True), ((2, 5), False), ((2, 1), False)]
)
def test_indices_without_a_batch_are_shared_by_the_batch(shape, is_shared):
    assert _is_shared(jnp.zeros(shape, jnp.int32)) is is_shared


@pytest.mark.slow
@each_library
def test_a_carry_that_is_handed_in_is_not_rounded(library):
    x = SEQUENCE[:, 0]
    cell = nn.LSTMCell(8) if library == "Linen" else nnx.LSTMCell(6, 8, rngs=RNGS)
    carry = (jnp.zeros((4, 8)) + 1 / 3, jnp.zeros((4, 8)) + 1 / 3)
    run, params = as_function(with_policy(cell, F16.with_output_dtype("float16")), carry, x)
    (c, _), y = run(params, carry, x)
    assert (c.dtype, y.dtype) == (jnp.float32, jnp.float16)
    assert not np.array_equal(c, c.astype(jnp.float16).astype(jnp.float32))


@pytest.mark.parametrize(("library", "by_name"), [("Linen", True), ("NNX", False)])
def test_a_weakly_typed_carry_is_not_rounded(library, by_name):
    x, weak = SEQUENCE[:, 0], (jnp.full((4, 8), 1 / 3), jnp.full((4, 8), 1 / 3))
    strong = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weak)
    assert (weak[0].weak_type, strong[0].weak_type) == (True, False)
    model = nn.LSTMCell(8) if library == "Linen" else nnx.LSTMCell(6, 8, rngs=RNGS)
    model = with_policy(model, F16)
    if library == "Linen":
        variables = model.init(jax.random.key(0), strong, x)
        run = lambda *args, **kwargs: model.apply(variables, *args, **kwargs)
    else:
        run = model
    expected, _ = run(strong, x)
    output, _ = run(carry=weak, inputs=x) if by_name else run(weak, x)
    jax.tree.map(np.testing.assert_array_equal, output, expected)
    assert not np.array_equal(output[0], output[0].astype(jnp.float16).astype(jnp.float32))


class DenseRelu(nn.Dense):
    """A Linen layer with something behind it, as users write them."""

    @nn.compact
    def __call__(self, x):
        return nn.relu(super().__call__(x)) * jnp.ones((), self.dtype)


class LinearRelu(nnx.Linear):
    """An NNX layer with something behind it, as users write them."""

    def __call__(self, x):
        return nnx.relu(super().__call__(x)) + 0 * self.bias[...]


@each_library
def test_a_subclass_of_a_layer_keeps_its_own_computation(library):
    bias_init = nn.initializers.constant(-1.0)
    model = DenseRelu(4, bias_init=bias_init)
    if library == "NNX":
        model = LinearRelu(6, 4, bias_init=bias_init, rngs=RNGS)
    x = SEQUENCE[:, 0]
    run, params = as_function(model, x)
    expected = run(params, x)
    assert (expected == 0).any()
    full, half = (as_function(with_policy(model, p), x)[0] for p in (jmp.get_policy("float32"), F16))
    np.testing.assert_array_equal(full(params, x), expected)
    np.testing.assert_allclose(half(params, x), expected, atol=0.01)


@each_library
def test_the_policy_wins_over_the_dtype_of_a_layer(library):
    model = nn.Sequential([nn.Dense(4, dtype=jnp.float32), nn.Dense(3)])
    if library == "NNX":
        model = nnx.Linear(6, 3, dtype=jnp.float32, rngs=RNGS)
    run, params = as_function(with_policy(model, F16), SEQUENCE)
    assert set(products(run, params, SEQUENCE)) == {("float16", "float16")}


class LinenClock(nn.Module):
    """Computes with its inputs before a layer takes them."""

    @nn.compact
    def __call__(self, x, t, ids):
        y = nn.Dense(3, name="dense")(jnp.sin(t[:, None] * jnp.exp(-jnp.arange(6.0))) + x)
        return y, x, t[0] + 1, ids


class NnxClock(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(6, 3, rngs=RNGS)

    def __call__(self, x, t, ids):
        y = self.dense(jnp.sin(t[:, None] * jnp.exp(-jnp.arange(6.0))) + x)
        return y, x, t[0] + 1, ids


@each_library
@each_policy
def test_inputs_keep_their_dtype_until_a_layer_takes_them(library, policy):
    model = LinenClock() if library == "Linen" else NnxClock()
    inputs = jnp.zeros((4, 6)), jnp.array([999.3, 936.7, 833.4, 625.1]), jnp.arange(300, 304)
    plain, params = as_function(model, *inputs)
    half, _ = as_function(with_policy(model, policy), *inputs)
    (y, *others), (expected, *kept) = half(params, *inputs), plain(params, *inputs)
    eps = float(jnp.finfo(policy.compute_dtype).eps)
    np.testing.assert_allclose(y, expected, atol=4 * eps)  # Rounded timesteps make it wrong by more.
    jax.tree.map(np.testing.assert_array_equal, others, kept)
    # The outputs have the output dtype, whatever their dtype was before.
    output = as_function(with_policy(model, policy.with_output_dtype(policy.compute_dtype)), *inputs)[0]
    wanted = [jnp.dtype(policy.compute_dtype)] * 3 + [jnp.dtype("int32")]
    assert [leaf.dtype for leaf in output(params, *inputs)] == wanted


@each_library
def test_a_second_policy_is_refused(library):
    with pytest.raises(ValueError, match=r"under a policy already\. Give the plain model to (linen|nnx)\."):
        with_policy(with_policy(embedding(library), F16), F16)


@each_library
def test_a_model_shows_its_policy(library):
    model = with_policy(embedding(library), F16)
    assert model.policy == F16
    assert "get_policy('p=full,c=f16,o=full')" in repr(model)


@each_library
@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
def test_an_embedding_runs_under_strict_dtype_promotion(library, reduce_dtype):
    under = (linen if library == "Linen" else under_nnx).with_policy
    ids = jnp.zeros((2, 3), jnp.int32)
    with jax.numpy_dtype_promotion("strict"):
        run, params = as_function(under(embedding(library), F16, reduce_dtype=reduce_dtype), ids)
        grads = jax.grad(lambda params: run(params, ids).sum())(params)
    assert grads["embedding"][0, 0] == 6


@pytest.mark.parametrize("library", [linen, under_nnx], ids=["Linen", "NNX"])
def test_wrong_arguments_are_type_errors(library):
    model = embedding("Linen" if library is linen else "NNX")
    for wrong in ((nn.relu, F16), (model, "float16")):
        with pytest.raises(TypeError, match=r"(linen|nnx)\.with_policy takes"):
            library.with_policy(*wrong)
    for policy in ("c=float8_e4m3fn", "c=bf16; head -> float8_e5m2"):
        said = r"computes in float8_e.m.*use jmp.autocast\(loss_fn, 'float8'\)"
        with pytest.raises(ValueError, match=said):
            library.with_policy(model, jmp.get_policy(policy))

"""`compare_precision` on models of NNX and Equinox, and on functions without modules."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jmp_lite.diagnostics import compare_precision

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (8, 16))
Y = jnp.arange(8) % 4


def entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.head(self.norm(x))


def test_an_nnx_model_is_split_by_its_objects_and_stays_as_it_is():
    model = Net(nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    loss = lambda model, x, y: (entropy(model(x), y), x)
    value_and_grad = functools.partial(nnx.value_and_grad)
    report = compare_precision(loss, "bfloat16", has_aux=True, value_and_grad_fn=value_and_grad, tolerance=0)(
        model, X, Y
    )
    assert {each.module for each in report.modules} == {"model/blocks/0", "model/blocks/1", "model/head"}
    assert all(each.own.gradients > 1e-4 for each in report.modules)
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.exhaustive
def test_the_layers_of_equinox_are_told_apart_though_they_share_a_scope():
    model = eqx.nn.MLP(16, 4, 16, 2, key=KEY)
    model = eqx.tree_at(lambda m: m.layers[2].weight, model, 1e6 * model.layers[2].weight)
    loss = lambda model, x, y: entropy(jax.vmap(model)(x) / 1e6, y)
    report = compare_precision(loss, "float16", value_and_grad_fn=eqx.filter_value_and_grad)(model, X, Y)
    assert {each.module for each in report.modules} == {f"model/layers/{n}" for n in range(3)}
    assert report.modules[0].module == "model/layers/2"
    assert report.rules == {"/model/layers/2": "float32"}


def test_einsums_are_told_apart_by_their_parameters():
    def loss(params, x):
        h = jnp.einsum("bi,io->bo", x, params["a"])
        return jnp.mean(jnp.einsum("bi,ij,jo->bo", h, params["b"], params["c"]))

    params = {"a": jnp.full((16, 8), 0.1), "b": jnp.full((8, 8), 0.1), "c": jnp.full((8, 4), 0.1)}
    report = compare_precision(jax.jit(loss), "float16", argnums=(0, 1), tolerance=0)(params, np.asarray(X))
    assert {each.module for each in report.modules} >= {"params/a", "params/b"}

"""`linen.with_policy`: the wrapper behaves as the plain module does outside `init` and `apply`."""

import copy
import pickle
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jmp_lite as jmp
from jmp_lite.linen import with_policy
from tests.support.jaxprs import products
from tests.support.policies import F16, SEQUENCE


class Generator(nn.Module):
    """A model with host methods, which call `init` and `apply` themselves."""

    features: int = 6
    activation: Callable[..., jax.Array] = nn.tanh

    def setup(self):
        self.dense = nn.Dense(self.features)

    def __call__(self, x):
        return self.activation(self.dense(x))

    def create_state(self, x):
        return TrainState.create(apply_fn=self.apply, params=self._params(x), tx=optax.sgd(0.1))

    def _params(self, x):
        return self.init(jax.random.key(0), x)["params"]

    def generate(self, params, x):
        for _ in range(2):
            x = self.apply({"params": params}, x, method=self.step)
        return x

    def step(self, x):
        return x + self(x)

    @property
    def sizes(self):
        return jax.tree.map(jnp.size, self.init(jax.random.key(0), SEQUENCE)["params"])

    @property
    def param_dtypes(self):
        return {leaf.dtype.name for leaf in jax.tree.leaves(self.init(jax.random.key(0), SEQUENCE))}

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def wide(cls):
        return cls(features=60)


@pytest.mark.slow
def test_host_methods_run_init_and_apply_under_the_policy():
    plain, model = Generator(), with_policy(Generator(), F16)
    state = model.create_state(SEQUENCE)
    jax.tree.map(np.testing.assert_array_equal, state.params, plain.create_state(SEQUENCE).params)
    assert products(model.generate, state.params, SEQUENCE) == [("float16", "float16")] * 2
    assert products(lambda p: state.apply_fn({"params": p}, SEQUENCE), state.params) == [("float16",) * 2]
    expected = plain.generate(state.params, SEQUENCE)
    np.testing.assert_allclose(model.generate(state.params, SEQUENCE), expected, atol=0.02)


def test_host_methods_give_parameters_in_the_parameter_dtype():
    model = with_policy(Generator(), jmp.get_policy("p=f16,c=f16,o=f32"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.create_state(SEQUENCE).params)} == {"float16"}
    assert model.param_dtypes == {"float16"}


def test_attributes_of_the_class_are_those_of_the_plain_module():
    model = with_policy(Generator(), F16)
    assert model.sizes == Generator().sizes
    assert model.double(2) == 4
    assert model.wide() == Generator(60)
    assert model.activation is nn.tanh


@pytest.mark.parametrize("how", ["clone", "copy"])
def test_clone_and_copy_take_fields_of_the_plain_module_and_of_the_wrapper(how):
    model = with_policy(nn.Dense(2), F16)
    assert getattr(model, how)(features=3) == with_policy(nn.Dense(3), F16)
    assert model == with_policy(nn.Dense(2), F16)
    full = jmp.get_policy("float32")
    assert getattr(model, how)(policy=full, use_bias=False) == with_policy(nn.Dense(2, use_bias=False), full)
    with pytest.raises(TypeError, match="no_such_field"):
        getattr(model, how)(no_such_field=3)


def test_a_copy_inside_a_compact_method_has_parameters_of_its_own():
    class Twice(nn.Module):
        wrap: Callable[..., nn.Module]

        @nn.compact
        def __call__(self, x):
            first = self.wrap(nn.Dense(6))
            return first.copy(name="named")(first.copy(features=4)(first(x)))

    plain = Twice(lambda module: module).init(jax.random.key(0), SEQUENCE)
    half = Twice(lambda module: with_policy(module, F16)).init(jax.random.key(0), SEQUENCE)
    assert jax.tree.map(jnp.shape, half) == jax.tree.map(jnp.shape, plain)
    assert set(plain["params"]) == {"Dense_0", "Dense_1", "named"}


class Scopes(nn.Module):
    @nn.compact_name_scope
    def up(self, x):
        return nn.Dense(8)(x)

    @nn.compact_name_scope
    def down(self, x):
        return nn.Dense(2)(x)

    def __call__(self, x):
        return self.down(self.up(x))


def test_compact_name_scopes_at_the_root():
    plain = Scopes().init(jax.random.key(0), SEQUENCE)
    model = with_policy(Scopes(), F16.with_rules({"up": "float32"}))
    jax.tree.map(np.testing.assert_array_equal, model.init(jax.random.key(0), SEQUENCE), plain)
    assert products(model.apply, plain, SEQUENCE) == [("float32",) * 2, ("float16",) * 2]
    assert model.apply(plain, SEQUENCE, method="up").shape == (4, 9, 8)


def test_intermediates_and_tables_list_the_model_once():
    model = with_policy(Generator(), F16)
    variables = model.init(jax.random.key(0), SEQUENCE)
    y, state = model.apply(variables, SEQUENCE, capture_intermediates=True)
    _, plain_state = Generator().apply(variables, SEQUENCE, capture_intermediates=True)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, plain_state)
    np.testing.assert_array_equal(state["intermediates"]["__call__"][0], y)
    options = {"console_kwargs": {"force_terminal": False, "width": 200}}
    table = model.tabulate(jax.random.key(0), SEQUENCE, **options)
    plain_table = Generator().tabulate(jax.random.key(0), SEQUENCE, **options)
    assert len(table.splitlines()) == len(plain_table.splitlines())


def test_the_wrapper_can_be_pickled_and_copied():
    model = with_policy(Generator(activation=np.tanh), F16)
    assert pickle.loads(pickle.dumps(model)) == copy.deepcopy(model) == copy.copy(model) == model

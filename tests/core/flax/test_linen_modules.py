"""`linen.with_policy`: rules, methods, submodules, lifted modules, and training with a `TrainState`."""

import copy
import functools
import pickle
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState

import jmp_lite as jmp
from jmp_lite.linen import with_policy
from tests.support.jaxprs import products
from tests.support.linen_layers import ConvNet, OwnParams, loss_fn, variables_of
from tests.support.policies import BF16, F16, IMAGES, SEQUENCE


def test_rules_keep_parts_in_float32():
    policy = F16.with_rules({"Dense_0": "float32", "**/BatchNorm*": "p=f32,c=f32,o=f16"})
    params, others = variables_of(ConvNet(), IMAGES)
    model = with_policy(ConvNet(), policy)
    dtypes = products(lambda p: loss_fn(p, others, model, IMAGES, True)[0], params)
    assert sorted(dtypes) == [("float16",) * 2] * 2 + [("float32",) * 2]


def test_rules_name_single_parameters_of_modules_that_users_write():
    policy = F16.with_rules({"in_setup": "float32"})
    params = OwnParams().init(jax.random.key(0), SEQUENCE)
    dtypes = products(lambda p: with_policy(OwnParams(), policy).apply(p, SEQUENCE), params)
    assert ("float16", "float32") in dtypes or ("float32", "float32") in dtypes


def test_a_rule_for_one_parameter_of_a_layer_is_an_error():
    policy = F16.with_rules({"Dense_0/bias": "float32"})
    params, others = variables_of(ConvNet(), IMAGES)
    with pytest.raises(ValueError, match="Let the rule name the layer, 'Dense_0'"):
        loss_fn(params, others, with_policy(ConvNet(), policy), IMAGES, True)


@pytest.mark.parametrize("call", ["init", "apply"])
def test_a_rule_that_matches_nothing_is_an_error_naming_the_nearest(call):
    model = with_policy(ConvNet(), F16.with_rules({"BatchNrom_0": "float32"}))
    variables = ConvNet().init(jax.random.key(0), IMAGES, train=False)
    first = {"init": jax.random.key(0), "apply": variables}[call]
    with pytest.raises(ValueError, match=r"matches no parameter. Nearest: 'BatchNorm_0'"):
        getattr(model, call)(first, IMAGES, train=False)


def test_other_methods_and_attributes_are_reached_under_the_policy():
    model = with_policy(OwnParams(), BF16)
    params = model.init(jax.random.key(0), SEQUENCE)
    y = model.apply(params, SEQUENCE, method="encode")
    assert y.dtype == jnp.float32
    assert products(lambda: model.apply(params, SEQUENCE, method="encode")) == [("bfloat16", "bfloat16")]
    assert with_policy(nn.Dense(7), F16).features == 7
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = model.no_such_thing


def test_inside_another_module_paths_stay_and_the_innermost_policy_wins():
    class Outer(nn.Module):
        policy: jmp.Policy | None

        @nn.compact
        def __call__(self, x):
            wrap = (lambda m: with_policy(m, self.policy)) if self.policy else (lambda m: m)
            return nn.Dense(3)(wrap(nn.Dense(4))(x))

    x = jnp.ones((2, 5))
    plain = Outer(None).init(jax.random.key(0), x)
    inner = Outer(jmp.get_policy("float32"))
    jax.tree.map(np.testing.assert_array_equal, inner.init(jax.random.key(0), x), plain)
    dtypes = products(with_policy(inner, F16).apply, plain, x)
    assert dtypes == [("float32", "float32"), ("float16", "float16")]


@pytest.mark.parametrize("lift", [nn.remat, nn.jit], ids=["remat", "jit"])
def test_lifted_modules_run_under_the_policy(lift):
    module = lift(OwnParams)
    params = module().init(jax.random.key(0), SEQUENCE)
    run = lambda p: with_policy(module(), F16).apply(p, SEQUENCE).sum()
    assert set(products(jax.grad(run), params)) == {("float16", "float16")}
    full = products(jax.grad(lambda p: module().apply(p, SEQUENCE).sum()), params)
    assert set(full) == {("float32", "float32")}  # Nothing of the policy is left behind.


@pytest.mark.slow
def test_each_policy_has_a_trace_of_its_own_under_the_jit_of_flax():
    @nn.jit
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            return nn.Dense(5)(nn.Embed(7, 4)(ids))

    ids = jnp.arange(6).reshape(2, 3)
    variables = Model().init(jax.random.key(0), ids)
    for dtype in ("bfloat16", "float16", "float32"):
        model = with_policy(Model(), jmp.get_policy(f"params=float32,compute={dtype}"))
        assert model.apply(variables, ids).dtype == dtype
        assert Model().apply(variables, ids).dtype == jnp.float32


@pytest.mark.slow
def test_a_run_that_is_repeated_in_float32_between_layers_counts_once():
    class Counts(nn.Module):
        def setup(self):
            self.norm = nn.BatchNorm(use_running_average=False)
            self.dropout = nn.Dropout(0.5, deterministic=False)
            self.dense = nn.Dense(6)

        def __call__(self, x):
            step = lambda dense, carry, _: (dense(carry), None)
            scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False}, length=2)
            self.sow("intermediates", "noise", jax.random.normal(self.make_rng("dropout"), x.shape))
            return scan(self.dense, self.norm(self.dropout(x)) + x, None)[0]

    class Twice(nn.Module):
        wrap: Callable[..., nn.Module]

        @nn.compact
        def __call__(self, x):
            inner = self.wrap(Counts())
            return inner(x) + inner(2 * x)

    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    plain, half = Twice(lambda module: module), Twice(lambda module: with_policy(module, F16))
    variables = plain.init(rngs, SEQUENCE)
    jax.tree.map(np.testing.assert_array_equal, half.init(rngs, SEQUENCE)["params"], variables["params"])
    state = {name: variables[name] for name in ("params", "batch_stats")}
    run = lambda model: model.apply(state, SEQUENCE, rngs=rngs, mutable=["batch_stats", "intermediates"])
    (y, new), (expected, wanted) = run(half), run(plain)
    np.testing.assert_allclose(y, expected, atol=0.02)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), new, wanted)


def test_wrapped_modules_are_equal_and_hash_by_value_so_that_jit_compiles_once():
    assert with_policy(nn.Dense(3), F16) == with_policy(nn.Dense(3), F16)
    assert hash(with_policy(nn.Dense(3), F16)) == hash(with_policy(nn.Dense(3), F16))
    assert with_policy(nn.Dense(3), F16) != with_policy(nn.Dense(3), BF16)


@pytest.mark.slow
def test_a_train_state_trains_and_survives_flax_serialization():
    model = with_policy(ConvNet(), F16)
    params, others = variables_of(model, IMAGES)
    tx = jmp.with_loss_scale(optax.adam(1e-2), jmp.DynamicLossScale(2.0**10, period=2))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    state = state.replace(step=jnp.int32(0))  # A Python number, as create leaves it, compiles twice.

    @jax.jit
    def step(state, others):
        scaled = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(state), has_aux=True)
        (loss, (_, new)), grads = scaled(state.params, others, model, IMAGES, True)
        state = state.apply_gradients(grads=grads)
        return state, jmp.select_tree(jmp.grads_finite(state), new, others), loss

    losses = []
    for _ in range(5):
        state, others, loss = step(state, others)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    fresh = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert jmp.get_loss_scale(restored).loss_scale == 2.0**12
    assert step._cache_size() == 1


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("rewrite", [nn.WeightNorm, nn.SpectralNorm])
def test_modules_that_rewrite_parameters_see_them_unrounded(rewrite):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            settings = {"update_stats": False} if rewrite is nn.SpectralNorm else {}
            return rewrite(nn.Dense(4))(x, **settings)

    x = SEQUENCE[:, 0]
    variables = Model().init(jax.random.key(0), x)
    model = with_policy(Model(), F16)
    jax.tree.map(np.testing.assert_array_equal, model.init(jax.random.key(0), x), variables)
    assert ("float16", "float16") in products(model.apply, variables, x)


def test_submodules_cannot_be_reached_past_the_policy():
    class Model(nn.Module):
        def setup(self):
            self.inner = nn.Dense(3)
            self.more = [nn.Dense(3)]

        def __call__(self, x):
            return self.more[0](self.inner(x)[..., :3])

    model = with_policy(Model(), F16)
    params = model.init(jax.random.key(0), SEQUENCE)
    for reach in (lambda m, x: m.inner(x), lambda m, x: m.more[0](x), Model.__call__):
        with pytest.raises(ValueError, match="would run outside the policy"):
            model.apply(params, SEQUENCE, method=reach)


def test_an_nnx_module_in_a_linen_model_runs():
    model = nnx.bridge.to_linen(nnx.Linear, 6, 4)
    params = model.init(jax.random.key(0), SEQUENCE)
    y = with_policy(model, BF16).apply(params, SEQUENCE)
    np.testing.assert_allclose(y, model.apply(params, SEQUENCE), atol=0.05)


# The wrapper is as the plain module outside `init` and `apply`


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


@pytest.mark.slow
def test_compact_name_scopes_at_the_root():
    plain = Scopes().init(jax.random.key(0), SEQUENCE)
    model = with_policy(Scopes(), F16.with_rules({"up": "float32"}))
    jax.tree.map(np.testing.assert_array_equal, model.init(jax.random.key(0), SEQUENCE), plain)
    assert products(model.apply, plain, SEQUENCE) == [("float32",) * 2, ("float16",) * 2]
    assert model.apply(plain, SEQUENCE, method="up").shape == (4, 9, 8)


def test_the_wrapper_can_be_pickled_and_copied():
    model = with_policy(Generator(activation=np.tanh), F16)
    assert pickle.loads(pickle.dumps(model)) == copy.deepcopy(model) == copy.copy(model) == model

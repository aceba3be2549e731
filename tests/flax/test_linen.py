"""`linen.with_policy`: every kind of layer against float32, in training and evaluation."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closeness import assert_close
from flax import nnx, serialization
from flax.training.train_state import TrainState
from jaxprs import equations, products

import jmp_lite as jmp
from jmp_lite.linen import with_policy

F16 = jmp.get_policy("params=float32,compute=float16,output=float32")
BF16 = jmp.get_policy("params=float32,compute=bfloat16,output=float32")


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        x = nn.gelu(x)
        x = nn.ConvTranspose(4, (2, 2))(x)
        return nn.Dense(3)(x.mean((1, 2)))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, ids, train: bool):
        embed = nn.Embed(11, 16)
        x = embed(ids)
        y = nn.LayerNorm()(x)
        mask = nn.make_causal_mask(ids)
        x += nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=not train)(y, mask=mask)
        y = nn.RMSNorm()(x)
        y = nn.Dense(16)(nn.gelu(nn.Dense(32)(y)))
        x += nn.Dropout(0.1, deterministic=not train)(y)
        return embed.attend(nn.GroupNorm(4)(x))


class Recurrent(nn.Module):
    cell: nn.RNNCellBase
    by_hand: bool = False

    @nn.compact
    def __call__(self, x, train: bool):
        del train
        if self.by_hand:
            scan = nn.scan(
                lambda cell, carry, x: cell(carry, x),
                variable_broadcast="params",
                split_rngs={"params": False},
                in_axes=1,
                out_axes=1,
            )
            carry = self.cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
            _, y = scan(self.cell, carry, x)
        else:
            y = nn.RNN(self.cell)(x)
        return nn.Dense(3)(y[:, -1])


class OwnParams(nn.Module):
    """A module that a user wrote: parameters of its own, no dtype."""

    def setup(self):
        self.in_setup = self.param("in_setup", nn.initializers.lecun_normal(), (6, 8))
        self.inner = nn.Dense(5)

    @nn.compact
    def __call__(self, x, train: bool = False):
        del train
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (8, 8))
        return self.inner(jnp.tanh(x @ self.in_setup) @ kernel)

    def encode(self, x):
        return x @ self.in_setup


IMAGES = jax.random.normal(jax.random.key(1), (4, 6, 6, 3))
TOKENS = jax.random.randint(jax.random.key(2), (3, 7), 0, 11)
SEQUENCE = jax.random.normal(jax.random.key(3), (4, 9, 6))
CELLS = [nn.LSTMCell, nn.OptimizedLSTMCell, nn.GRUCell, nn.SimpleCell]

MODELS = {
    "convolutions": (ConvNet(), IMAGES),
    "attention": (Transformer(), TOKENS),
    "own parameters": (OwnParams(), SEQUENCE),
    **{f"nn.RNN({cell.__name__})": (Recurrent(cell(8)), SEQUENCE) for cell in CELLS},
    "nn.scan(LSTMCell)": (Recurrent(nn.LSTMCell(8), by_hand=True), SEQUENCE),
    "nn.scan(SimpleCell)": (Recurrent(nn.SimpleCell(8), by_hand=True), SEQUENCE),
}
each_model = pytest.mark.parametrize(("model", "x"), MODELS.values(), ids=MODELS)
each_policy = pytest.mark.parametrize("policy", [F16, BF16], ids=["float16", "bfloat16"])


def variables_of(model, x):
    variables = model.init(jax.random.key(0), x, train=False)
    return variables["params"], {k: v for k, v in variables.items() if k != "params"}


def loss_fn(params, others, model, x, train):
    """A loss in which every output matters, and the collections after the step."""
    y, others = model.apply(
        {"params": params, **others},
        x,
        train=train,
        rngs={"dropout": jax.random.key(5)},
        mutable=list(others),
    )
    weights = jnp.cos(jnp.arange(y.size)).reshape(y.shape)
    return jnp.mean(weights * y.astype(jnp.float32)), (y, others)


@pytest.mark.parametrize(
    ("name", "policy", "train"),
    [
        *((name, F16, True) for name in MODELS),
        *((name, F16, False) for name in ("convolutions", "attention")),
        *((name, BF16, True) for name in ("convolutions", "attention", "nn.RNN(LSTMCell)")),
    ],
)
def test_agrees_with_float32_in_outputs_gradients_and_statistics(name, policy, train):
    model, x = MODELS[name]
    params, others = variables_of(model, x)
    run = jax.jit(jax.value_and_grad(loss_fn, has_aux=True), static_argnums=(2, 4))
    (_, (y, stats)), grads = run(params, others, model, x, train)
    (_, (half_y, half_stats)), half_grads = run(params, others, with_policy(model, policy), x, train)
    assert half_y.dtype == jnp.float32
    assert not np.array_equal(half_y, y)  # It did run in half precision.
    assert_close(half_y, y, policy.compute_dtype, 8)
    assert_close(half_grads, grads, policy.compute_dtype, 16)
    assert_close(half_stats, stats, policy.compute_dtype, 8)
    assert {leaf.dtype for leaf in jax.tree.leaves((half_grads, half_stats))} == {jnp.dtype("float32")}


@each_model
def test_every_product_of_forward_and_backward_takes_half_operands(model, x):
    params, others = variables_of(model, x)
    wrapped = with_policy(model, F16)
    found = products(
        jax.grad(lambda p: loss_fn(p, others, wrapped, x, True)[0]),
        params,
    )
    assert len(found) >= 3
    assert set(found) == {("float16", "float16")}


@each_model
def test_parameters_keep_their_paths_values_and_dtype(model, x):
    plain = model.init(jax.random.key(0), x, train=False)
    wrapped = with_policy(model, F16).init(jax.random.key(0), x, train=False)
    jax.tree.map(np.testing.assert_array_equal, wrapped, plain)
    assert jax.tree.map(lambda x: x.dtype, wrapped) == jax.tree.map(lambda x: x.dtype, plain)


def test_param_dtype_of_the_policy_is_that_of_the_initial_parameters():
    variables = with_policy(ConvNet(), jmp.get_policy("O2")).init(jax.random.key(0), IMAGES, train=False)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, variables)
    assert set(jax.tree.leaves(dtypes["params"]["Conv_0"])) == {"float16"}
    assert set(jax.tree.leaves(dtypes["params"]["BatchNorm_0"])) == {"float32"}
    assert set(jax.tree.leaves(dtypes["batch_stats"])) == {"float32"}


@each_policy
def test_batch_statistics_are_not_rounded_and_may_exceed_float16(policy):
    model = with_policy(nn.BatchNorm(momentum=0.0), policy)
    x = 3.0 + 600.0 * jax.random.normal(jax.random.key(0), (64, 2))  # A variance of 360,000.
    variables = model.init(jax.random.key(0), x, use_running_average=False)
    _, new = model.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
    variance = new["batch_stats"]["var"]
    assert (variance > 65504).all()
    assert not np.array_equal(variance, variance.astype(policy.compute_dtype).astype(jnp.float32))
    y = model.apply({**variables, **new}, x, use_running_average=True)
    expected = (x - new["batch_stats"]["mean"]) / jnp.sqrt(variance)
    np.testing.assert_allclose(y, expected, atol=16 * float(jnp.finfo(policy.compute_dtype).eps))


@each_policy
def test_the_gradients_of_an_embedding_row_are_summed_in_float32(policy):
    ids = jnp.zeros(10_009, jnp.int32)
    model = nn.Embed(2, 1)
    params = model.init(jax.random.key(0), ids)
    grads = jax.grad(lambda p: with_policy(model, policy).apply(p, ids).sum())(params)
    assert grads["params"]["embedding"][0, 0] == 10_009
    by_dtype = jax.grad(lambda p: nn.Embed(2, 1, dtype=policy.compute_dtype).apply(p, ids).sum())(params)
    stuck = {"float16": 2048, "bfloat16": 256}  # What the layer's own dtype gives.
    assert by_dtype["params"]["embedding"][0, 0] == stuck[policy.compute_dtype.name]


@each_policy
def test_the_gradients_of_a_bias_are_summed_in_float32(policy):
    x, weights = jnp.zeros((40, 32, 32, 1)), jnp.ones((40, 32, 32, 8))
    params = nn.Conv(8, (1, 1)).init(jax.random.key(0), x)

    def count(model):
        loss_fn = lambda params, weights: (model.apply(params, x) * weights).sum()
        return jax.jit(jax.grad(loss_fn))(params, weights)["params"]["bias"][0]

    assert count(with_policy(nn.Conv(8, (1, 1)), policy)) == 40_960
    if jax.default_backend() == "cpu":
        stuck = {"float16": 4096, "bfloat16": 512}  # What the layer's own dtype gives.
        assert count(nn.Conv(8, (1, 1), dtype=policy.compute_dtype)) == stuck[policy.compute_dtype.name]


def test_the_gradient_of_a_weight_in_a_scan_is_summed_in_float32():
    class Sum(nn.Module):
        @nn.compact
        def __call__(self, x):
            class Step(nn.Module):
                @nn.compact
                def __call__(self, carry, x):
                    w = self.param("w", nn.initializers.ones, ())
                    return carry, w * x

            scan = nn.scan(Step, variable_broadcast="params", split_rngs={"params": False})
            return scan(name="step")(jnp.float32(0), x)[1]

    x = jnp.ones(10_009)
    model = with_policy(Sum(), BF16)
    params = model.init(jax.random.key(0), x)
    grads = jax.grad(lambda p: model.apply(p, x).sum())(params)
    assert grads["params"]["step"]["w"] == 10_009


@each_policy
def test_a_recurrent_carry_stays_float32(policy):
    cell = nn.LSTMCell(4)
    carry = cell.initialize_carry(jax.random.key(0), (2, 3))
    model = with_policy(Recurrent(cell), policy)
    x = jnp.ones((2, 5, 3))
    params = model.init(jax.random.key(0), x, train=False)
    scans = [
        eqn
        for eqn in equations(jax.make_jaxpr(lambda p: model.apply(p, x, train=False))(params))
        if eqn.primitive.name == "scan"
    ]
    dtypes = [{v.aval.dtype.name for v in eqn.outvars if v.aval.shape == carry[0].shape} for eqn in scans]
    assert {"float32"} in dtypes


def test_rules_keep_parts_in_float32():
    policy = F16.with_rules({"Dense_0": "float32", "**/BatchNorm*": "p=f32,c=f32,o=f16"})
    params, others = variables_of(ConvNet(), IMAGES)
    model = with_policy(ConvNet(), policy)
    found = products(lambda p: loss_fn(p, others, model, IMAGES, True)[0], params)
    assert sorted(found) == [("float16",) * 2] * 2 + [("float32",) * 2]


def test_rules_name_single_parameters_of_modules_that_users_write():
    policy = F16.with_rules({"in_setup": "float32"})
    params = OwnParams().init(jax.random.key(0), SEQUENCE)
    found = products(lambda p: with_policy(OwnParams(), policy).apply(p, SEQUENCE), params)
    assert ("float16", "float32") in found or ("float32", "float32") in found


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


def test_the_policy_wins_over_the_dtype_of_a_layer():
    model = nn.Sequential([nn.Dense(4, dtype=jnp.float32), nn.Dense(3)])
    x = jnp.ones((2, 5))
    params = model.init(jax.random.key(0), x)
    assert set(products(with_policy(model, F16).apply, params, x)) == {("float16", "float16")}


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
    found = products(with_policy(inner, F16).apply, plain, x)
    assert found == [("float32", "float32"), ("float16", "float16")]


@pytest.mark.parametrize("lift", [nn.remat, nn.jit, None], ids=["remat", "jit", "none"])
def test_lifted_modules_run_under_the_policy(lift):
    module = OwnParams if lift is None else lift(OwnParams)
    params = module().init(jax.random.key(0), SEQUENCE)
    run = lambda p: with_policy(module(), F16).apply(p, SEQUENCE).sum()
    assert set(products(jax.grad(run), params)) == {("float16", "float16")}
    full = products(jax.grad(lambda p: module().apply(p, SEQUENCE).sum()), params)
    assert set(full) == {("float32", "float32")}  # Nothing of the policy is left behind.


def test_ensembles_under_vmap_run_under_the_policy():
    ensemble = nn.vmap(
        OwnParams, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3
    )
    params = ensemble().init(jax.random.key(0), SEQUENCE)
    model = with_policy(ensemble(), F16)
    assert set(products(model.apply, params, SEQUENCE)) == {("float16", "float16")}
    np.testing.assert_allclose(model.apply(params, SEQUENCE), ensemble().apply(params, SEQUENCE), atol=0.02)


def test_wrapped_modules_are_equal_and_hash_by_value_so_that_jit_compiles_once():
    assert with_policy(nn.Dense(3), F16) == with_policy(nn.Dense(3), F16)
    assert hash(with_policy(nn.Dense(3), F16)) == hash(with_policy(nn.Dense(3), F16))
    assert with_policy(nn.Dense(3), F16) != with_policy(nn.Dense(3), BF16)


@pytest.mark.parametrize(("module", "policy"), [(nn.relu, F16), (nn.Dense(3), "float16")])
def test_wrong_arguments_are_type_errors(module, policy):
    with pytest.raises(TypeError, match=r"linen\.with_policy takes"):
        with_policy(module, policy)


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


class DenseRelu(nn.Dense):
    """A layer of Flax with something after it, as users write them."""

    @nn.compact
    def __call__(self, x):
        return nn.relu(super().__call__(x)), x.shape


def test_a_subclass_of_a_layer_keeps_its_own_computation():
    model = DenseRelu(4, bias_init=nn.initializers.constant(-1.0))
    x = SEQUENCE[:, 0]
    params = model.init(jax.random.key(0), x)
    expected = model.apply(params, x)[0]
    assert (expected == 0).any()
    np.testing.assert_array_equal(with_policy(model, jmp.get_policy("float32")).apply(params, x)[0], expected)
    np.testing.assert_allclose(with_policy(model, F16).apply(params, x)[0], expected, atol=0.01)


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


def test_a_carry_that_is_handed_in_is_not_rounded():
    cell = nn.LSTMCell(8)
    x = SEQUENCE[:, 0]
    carry = jax.tree.map(lambda c: c + 1 / 3, cell.initialize_carry(jax.random.key(0), x.shape))
    model = with_policy(cell, F16.with_output_dtype("float16"))
    params = model.init(jax.random.key(0), carry, x)
    (c, _), y = model.apply(params, carry, x)
    assert (c.dtype, y.dtype) == (jnp.float32, jnp.float16)
    assert not np.array_equal(c, c.astype(jnp.float16).astype(jnp.float32))


@pytest.mark.parametrize("batch_dims", [0, (0,), ()])
def test_the_bias_of_a_layer_with_a_weight_for_each_member_of_a_batch(batch_dims):
    module = nn.DenseGeneral(7, batch_dims=batch_dims, bias_init=nn.initializers.normal(1.0))
    x = jax.random.normal(jax.random.key(0), (5, 5, 4))
    variables = module.init(jax.random.key(1), x)
    under = with_policy(module, jmp.get_policy("p=f32,c=f32"))
    np.testing.assert_array_equal(under.apply(variables, x), module.apply(variables, x))

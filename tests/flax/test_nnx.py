"""`nnx.with_policy`: every kind of layer against float32, in training and evaluation."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closeness import assert_close
from flax import nnx
from jaxprs import equations, products

import jmp_lite as jmp
from jmp_lite.linen import with_policy as linen_with_policy
from jmp_lite.nnx import with_policy

F16 = jmp.get_policy("params=float32,compute=float16,output=float32")
BF16 = jmp.get_policy("params=float32,compute=bfloat16,output=float32")


class ConvNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 4, (2, 2), rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = self.up(nnx.gelu(self.bn(self.conv(x))))
        return self.head(x.mean((1, 2)))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(11, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, dropout_rate=0.1, decode=False, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)])
        self.rms = nnx.RMSNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.group = nnx.GroupNorm(16, num_groups=4, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        x += self.attention(self.norm(x), mask=nnx.make_causal_mask(ids))
        x += self.dropout(self.layers[1](nnx.gelu(self.layers[0](self.rms(x)))))
        return self.embed.attend(self.group(x))


class Recurrent(nnx.Module):
    def __init__(self, cell, rngs: nnx.Rngs, by_hand: bool = False):
        self.cell = cell(6, 8, rngs=rngs)
        self.rnn = None if by_hand else nnx.RNN(self.cell, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        if self.rnn is not None:
            return self.head(self.rnn(x)[:, -1])
        carry = self.cell.initialize_carry(x[:, 0].shape, nnx.Rngs(0))
        scan = nnx.scan(
            lambda carry, cell, x: cell(carry, x), in_axes=(nnx.Carry, None, 1), out_axes=(nnx.Carry, 1)
        )
        return self.head(scan(carry, self.cell, x)[1][:, -1])


class OwnParams(nnx.Module):
    """A module that a user wrote: parameters of its own, no dtype."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(init(rngs.params(), (6, 8)))
        self.more = nnx.List([nnx.Param(init(rngs.params(), (8, 8))), nnx.Linear(8, 8, rngs=rngs)])
        self.calls = nnx.Variable(jnp.int32(0))

    def encode(self, x):
        return x @ self.kernel

    def __call__(self, x):
        self.calls[...] += 1
        return self.more[1](jnp.tanh(self.encode(x)) @ self.more[0])


IMAGES = jax.random.normal(jax.random.key(1), (4, 6, 6, 3))
TOKENS = jax.random.randint(jax.random.key(2), (3, 7), 0, 11)
SEQUENCE = jax.random.normal(jax.random.key(3), (4, 9, 6))
CELLS = [nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell]

MODELS = {
    "convolutions": (ConvNet, IMAGES),
    "attention": (Transformer, TOKENS),
    "own parameters": (OwnParams, SEQUENCE),
    **{f"nnx.RNN({cell.__name__})": (lambda rngs, c=cell: Recurrent(c, rngs), SEQUENCE) for cell in CELLS},
    "nnx.scan(LSTMCell)": (lambda rngs: Recurrent(nnx.LSTMCell, rngs, by_hand=True), SEQUENCE),
    "nnx.scan(SimpleCell)": (lambda rngs: Recurrent(nnx.SimpleCell, rngs, by_hand=True), SEQUENCE),
}
each_model = pytest.mark.parametrize(("make", "x"), MODELS.values(), ids=MODELS)
each_policy = pytest.mark.parametrize("policy", [F16, BF16], ids=["float16", "bfloat16"])


def loss_fn(model, x):
    """A loss in which every output matters."""
    y = model(x)
    weights = jnp.cos(jnp.arange(y.size)).reshape(y.shape)
    return jnp.mean(weights * y.astype(jnp.float32)), y


@nnx.jit
def run(model, x):
    (_, y), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x)
    return y, nnx.as_pure(grads)


def products_of_grad(model, x):
    """The operand dtypes of all products in the forward and backward pass."""
    model.train()
    graphdef, state = nnx.split(model)
    grad = lambda state, x: nnx.grad(loss_fn, has_aux=True)(nnx.merge(graphdef, state), x)[0]
    return products(grad, state, x)


@pytest.mark.parametrize(
    ("name", "policy", "train"),
    [
        *((name, F16, True) for name in MODELS),
        *((name, F16, False) for name in ("convolutions", "attention")),
        *((name, BF16, True) for name in ("convolutions", "attention", "nnx.RNN(LSTMCell)")),
    ],
)
def test_agrees_with_float32_in_outputs_gradients_and_statistics(name, policy, train):
    make, x = MODELS[name]
    model = make(nnx.Rngs(0))
    half_model = with_policy(model, policy)
    for m in (model, half_model):
        m.train() if train else m.eval()
    y, grads = run(model, x)
    half_y, half_grads = run(half_model, x)
    assert half_y.dtype == jnp.float32
    assert not np.array_equal(half_y, y)  # It did run in half precision.
    assert_close(half_y, y, policy.compute_dtype, 8)
    assert_close(half_grads, grads, policy.compute_dtype, 16)
    stats, half_stats = (nnx.as_pure(nnx.state(m, nnx.BatchStat)) for m in (model, half_model))
    assert_close(half_stats, stats, policy.compute_dtype, 8)
    assert {leaf.dtype for leaf in jax.tree.leaves((half_grads, half_stats))} == {jnp.dtype("float32")}


def test_the_fast_attention_of_jax_runs_in_half_too():
    """Without dropout Flax calls `jax.nn.dot_product_attention`, which knows no float16 on a CPU."""
    model = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(4), (3, 7, 16))
    half_model = with_policy(model, BF16)
    (y, grads), (half_y, half_grads) = run(model, x), run(half_model, x)
    assert_close(half_y, y, jnp.bfloat16, 8)
    assert_close(half_grads, grads, jnp.bfloat16, 16)
    assert ("bfloat16", "bfloat16") in products_of_grad(half_model, x)
    assert ("float32", "float32") not in products_of_grad(half_model, x)


@each_model
def test_every_product_of_forward_and_backward_takes_half_operands(make, x):
    found = products_of_grad(with_policy(make(nnx.Rngs(0)), F16), x)
    assert len(found) >= 3
    assert set(found) == {("float16", "float16")}


@each_model
def test_the_state_keeps_its_paths_values_and_dtypes(make, x):
    model = make(nnx.Rngs(0))
    before, after = nnx.state(model), nnx.state(with_policy(model, F16))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    values = lambda state: [nnx.as_pure(v) for v in jax.tree.leaves(state)]
    for a, b in zip(values(before), values(after), strict=True):
        assert a is b or (a == b).all()
        assert a.dtype == b.dtype


def test_the_plain_model_is_not_changed_and_checkpoints_fit():
    model = ConvNet(nnx.Rngs(0))
    wrapped = with_policy(model, F16)
    assert type(model) is ConvNet
    assert isinstance(wrapped, ConvNet)
    assert model.conv.dtype is None
    assert set(products_of_grad(model, IMAGES)) == {("float32", "float32")}
    nnx.update(wrapped, nnx.state(ConvNet(nnx.Rngs(1))))  # A checkpoint of a plain model.
    assert set(products_of_grad(wrapped, IMAGES)) == {("float16", "float16")}
    np.testing.assert_array_equal(wrapped.conv.kernel[...], ConvNet(nnx.Rngs(1)).conv.kernel[...])


def test_param_dtype_of_the_policy_is_that_of_the_parameters():
    model = with_policy(ConvNet(nnx.Rngs(0)), jmp.get_policy("O2"))
    dtype = lambda layer: {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(layer))}
    assert dtype(model.conv) == {"float16"}
    assert dtype(model.bn) == {"float32"}
    assert model.bn.dtype == jnp.float32


@each_policy
def test_batch_statistics_are_not_rounded_and_may_exceed_float16(policy):
    model = with_policy(nnx.BatchNorm(2, momentum=0.0, rngs=nnx.Rngs(0)), policy)
    x = 3.0 + 600.0 * jax.random.normal(jax.random.key(0), (64, 2))  # A variance of 360,000.
    model(x)
    variance = model.var[...]
    assert (variance > 65504).all()
    assert not np.array_equal(variance, variance.astype(policy.compute_dtype).astype(jnp.float32))
    model.eval()
    expected = (x - model.mean[...]) / jnp.sqrt(variance)
    atol = 16 * float(jnp.finfo(policy.compute_dtype).eps)
    np.testing.assert_allclose(model(x), expected, atol=atol)
    by_dtype = nnx.BatchNorm(2, dtype=jnp.float16, use_running_average=True, rngs=nnx.Rngs(0))
    by_dtype.mean[...], by_dtype.var[...] = model.mean[...], variance
    assert (by_dtype(x) == 0).all()  # What the layer's own dtype gives: the variance became inf.


@each_policy
def test_the_gradients_of_an_embedding_row_are_summed_in_float32(policy):
    ids = jnp.zeros(10_009, jnp.int32)
    count = lambda model: nnx.grad(lambda m: m(ids).sum())(model)["embedding"][0, 0]
    assert count(with_policy(nnx.Embed(2, 1, rngs=nnx.Rngs(0)), policy)) == 10_009
    by_dtype = nnx.Embed(2, 1, dtype=policy.compute_dtype, rngs=nnx.Rngs(0))
    stuck = {"float16": 2048, "bfloat16": 256}  # What the layer's own dtype gives.
    assert count(by_dtype) == stuck[policy.compute_dtype.name]


@each_policy
def test_the_gradients_of_a_bias_are_summed_in_float32(policy):
    x, weights = jnp.zeros((40, 32, 32, 1)), jnp.ones((40, 32, 32, 8))
    make = lambda dtype: nnx.Conv(1, 8, (1, 1), dtype=dtype, rngs=nnx.Rngs(0))

    def count(model):
        loss_fn = lambda model, weights: (model(x) * weights).sum()
        return nnx.jit(nnx.grad(loss_fn))(model, weights)["bias"][0]

    assert count(with_policy(make(None), policy)) == 40_960
    if jax.default_backend() == "cpu":
        stuck = {"float16": 4096, "bfloat16": 512}  # What the layer's own dtype gives.
        assert count(make(policy.compute_dtype)) == stuck[policy.compute_dtype.name]


def test_the_gradient_of_a_weight_in_a_scan_is_summed_in_float32():
    class Step(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.float32(1))

        def __call__(self, x):
            return self.w * x

    class Sum(nnx.Module):
        def __init__(self):
            self.step = Step()

        def __call__(self, x):
            return nnx.scan(lambda step, x: step(x), in_axes=(None, 0), out_axes=0)(self.step, x)

    grads = nnx.grad(lambda m: m(jnp.ones(10_009)).sum())(with_policy(Sum(), BF16))
    assert grads["step"]["w"][...] == 10_009


@each_policy
def test_a_recurrent_carry_stays_float32(policy):
    model = with_policy(Recurrent(nnx.LSTMCell, nnx.Rngs(0)), policy)
    graphdef, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, SEQUENCE)
    scans = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    carry = [v.aval.dtype.name for eqn in scans for v in eqn.outvars if v.aval.shape == (4, 8)]
    assert carry == ["float32", "float32"]


def test_rules_keep_parts_in_float32():
    model = ConvNet(nnx.Rngs(0))
    half = with_policy(model, F16.with_rules({"head": "float32", "bn": "p=f32,c=f32,o=f16"}))
    found = products_of_grad(half, IMAGES)
    assert sorted(set(found)) == [("float16",) * 2, ("float32",) * 2]
    assert found.count(("float32", "float32")) == 3  # The head: forward, and two backward.


def test_rules_name_single_parameters_of_modules_that_users_write():
    model = with_policy(OwnParams(nnx.Rngs(0)), F16.with_rules({"/kernel": "float32"}))
    jaxpr = jax.make_jaxpr(lambda x: model.encode(x))(SEQUENCE)
    operands = [v.aval.dtype.name for e in equations(jaxpr) if "dot" in e.primitive.name for v in e.invars]
    assert operands == ["float16", "float32"]


def test_a_rule_for_one_parameter_of_a_layer_is_an_error():
    with pytest.raises(ValueError, match="Let the rule name the layer, 'head'"):
        with_policy(ConvNet(nnx.Rngs(0)), F16.with_rules({"head/bias": "float32"}))


def test_a_rule_that_matches_nothing_is_an_error_naming_the_nearest():
    with pytest.raises(ValueError, match=r"matches no parameter. Nearest: 'head'"):
        with_policy(ConvNet(nnx.Rngs(0)), F16.with_rules({"haed": "float32"}))


def test_the_policy_wins_over_the_dtype_of_a_layer():
    model = with_policy(nnx.Linear(6, 3, dtype=jnp.float32, rngs=nnx.Rngs(0)), F16)
    assert set(products_of_grad(model, SEQUENCE)) == {("float16", "float16")}


def test_all_public_methods_run_under_the_policy_and_state_changes_stay():
    model = with_policy(OwnParams(nnx.Rngs(0)), BF16)
    assert model.encode(SEQUENCE).dtype == jnp.float32
    assert products(model.encode, SEQUENCE) == [("bfloat16", "bfloat16")]
    model(SEQUENCE)
    nnx.jit(lambda m, x: m(x))(model, SEQUENCE)
    assert model.calls[...] == 2
    assert model.kernel[...].dtype == jnp.float32


def test_random_number_streams_advance_when_given_as_an_argument():
    class Noisy(nnx.Module):
        def __call__(self, x, rngs):
            return x + rngs.noise.normal(x.shape)

    model, rngs = with_policy(Noisy(), F16), nnx.Rngs(noise=0)
    assert not np.array_equal(model(SEQUENCE, rngs), model(SEQUENCE, rngs))


def test_inside_another_model_the_innermost_policy_wins():
    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.inner = with_policy(nnx.Linear(6, 6, rngs=rngs), jmp.get_policy("float32"))
            self.head = nnx.Linear(6, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(self.inner(x))

    model = with_policy(Outer(nnx.Rngs(0)), F16)
    assert products(lambda x: model(x), SEQUENCE) == [("float32",) * 2, ("float16",) * 2]
    with pytest.raises(ValueError, match="under a policy already"):
        with_policy(model, F16)


def test_transforms_run_under_the_policy():
    ensemble = nnx.vmap(OwnParams, in_axes=0)(nnx.Rngs(0).split(3))
    half = with_policy(ensemble, F16)
    apply = nnx.vmap(lambda m, x: m(x), in_axes=(0, None))
    assert set(products(lambda x: apply(nnx.clone(half), x), SEQUENCE)) == {("float16", "float16")}
    np.testing.assert_allclose(apply(half, SEQUENCE), apply(ensemble, SEQUENCE), atol=0.02)
    model = with_policy(OwnParams(nnx.Rngs(0)), F16)
    remat = nnx.remat(lambda m, x: m(x))
    run = lambda x: nnx.grad(lambda m, x: remat(m, x).sum())(nnx.clone(model), x)
    assert set(products(run, SEQUENCE)) == {("float16", "float16")}


def test_the_same_class_under_a_policy_is_one_type_so_that_jit_compiles_once():
    assert type(with_policy(ConvNet(nnx.Rngs(0)), F16)) is type(with_policy(ConvNet(nnx.Rngs(1)), F16))


@pytest.mark.parametrize(("model", "policy"), [(nnx.relu, F16), (ConvNet(nnx.Rngs(0)), "float16")])
def test_wrong_arguments_are_type_errors(model, policy):
    with pytest.raises(TypeError, match=r"nnx\.with_policy takes"):
        with_policy(model, policy)


def test_an_optimizer_trains_in_float16_and_skips_the_bad_step():
    model = with_policy(ConvNet(nnx.Rngs(0)), F16)
    tx = jmp.with_loss_scale(optax.adam(1e-2), jmp.DynamicLossScale(2.0**10, period=2))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    traces = []

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(None)
        scaled = jmp.value_and_grad(
            loss_fn, jmp.get_loss_scale(optimizer), has_aux=True, transform=nnx.value_and_grad
        )
        (loss, _), grads = scaled(model, x)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, IMAGES)) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert jmp.get_loss_scale(optimizer).loss_scale == 2.0**12
    before = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(model, nnx.Param)))
    step(model, optimizer, IMAGES.at[0].set(jnp.inf))
    jax.tree.map(np.testing.assert_array_equal, nnx.as_pure(nnx.state(model, nnx.Param)), before)
    assert not jmp.grads_finite(optimizer)
    assert jmp.metrics(optimizer)["skipped_steps"] == 1
    assert jmp.get_loss_scale(optimizer).loss_scale == 2.0**11
    assert len(traces) == 1
    with pytest.raises(FloatingPointError, match="conv/kernel"):
        jmp.raise_if_stuck(optimizer, max_consecutive_skips=1)


class LinearRelu(nnx.Linear):
    """A layer of Flax with something after it, as users write them."""

    def __call__(self, x):
        return nnx.relu(super().__call__(x)) + 0 * self.bias[...]


def test_a_subclass_of_a_layer_keeps_its_own_computation():
    model = LinearRelu(6, 4, bias_init=nnx.initializers.constant(-1.0), rngs=nnx.Rngs(0))
    x = SEQUENCE[:, 0]
    assert (model(x) == 0).any()
    np.testing.assert_array_equal(with_policy(model, jmp.get_policy("float32"))(x), model(x))
    np.testing.assert_allclose(with_policy(model, F16)(x), model(x), atol=0.01)


def test_modules_that_rewrite_parameters_see_them_unrounded():
    inner = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    model = with_policy(nnx.WeightNorm(inner, rngs=nnx.Rngs(0)), BF16)
    plain = nnx.clone(nnx.WeightNorm(inner, rngs=nnx.Rngs(0)))
    np.testing.assert_allclose(model(SEQUENCE), plain(SEQUENCE), atol=0.05)
    kernel, expected = model.layer_instance.kernel[...], plain.layer_instance.kernel[...]
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(kernel, expected)


def test_methods_under_nnx_jit_run_under_the_policy():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((6, 6)))

        @nnx.jit
        def encode(self, x):
            return x @ self.w

    model = with_policy(Model(), BF16)
    assert products(model.encode, SEQUENCE) == [("bfloat16", "bfloat16")]


def test_the_attend_of_an_embedding_gives_the_output_dtype():
    model = with_policy(nnx.Embed(4, 6, rngs=nnx.Rngs(0)), BF16)
    assert model.attend(SEQUENCE).dtype == jnp.float32
    assert products(model.attend, SEQUENCE) == [("bfloat16", "bfloat16")]


def test_a_linen_module_inside_is_an_error_that_says_what_to_do():
    wrap = lambda module: nnx.Sequential(nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"jmp_lite\.linen\.with_policy"):
        with_policy(wrap(nn.Dense(3)), F16)
    model = nnx.bridge.lazy_init(with_policy(wrap(linen_with_policy(nn.Dense(3), F16)), F16), SEQUENCE)
    assert model(SEQUENCE).dtype == jnp.float32


def test_a_carry_that_is_handed_in_is_not_rounded():
    cell = nnx.LSTMCell(6, 8, rngs=nnx.Rngs(0))
    x = SEQUENCE[:, 0]
    carry = jax.tree.map(lambda c: c + 1 / 3, cell.initialize_carry(x.shape, nnx.Rngs(0)))
    (c, _), y = with_policy(cell, F16.with_output_dtype("float16"))(carry, x)
    assert (c.dtype, y.dtype) == (jnp.float32, jnp.float16)
    assert not np.array_equal(c, c.astype(jnp.float16).astype(jnp.float32))

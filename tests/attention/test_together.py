"""`fuse_attention` beside every other part: policies, meshes, export, loss scales, what has side effects."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from jmp_lite.linen import with_policy
from tests.attention.cases import FUSED, X, plain, qkv, repeated_mask
from tests.attention.test_fuse_attention import ORDERS, error
from tests.support.arrays import normal

PARAMS = {name: normal(n, 32, 4, 8, scale=0.2) for n, name in enumerate(("q", "k", "v"))}


def fuse(fun, dtype="bfloat16"):
    return jmp.fuse_attention(fun, dtype, implementation="xla")


def loss(params, x, attend=repeated_mask):
    q, k, v = (jnp.einsum("btd,dhf->bthf", x, params[name]) for name in ("q", "k", "v"))
    return jnp.mean(attend(q, k, v) * jnp.cos(jnp.arange(8.0)))


def check(actual, expected, most=0.02):
    assert jax.tree.all(jax.tree.map(lambda x: x <= most, error(actual, expected)))

    def dtypes(tree):
        return jax.tree.map(lambda x: x.dtype, tree)

    assert dtypes(actual) == dtypes(expected)


@pytest.fixture(scope="module")
def gradients():
    return jax.jit(jax.grad(loss))(PARAMS, X)


def is_fused(fun, *args):
    attentions = jmp.explain(fun)(*args).attentions
    return bool(attentions) and all(each.fused for each in attentions)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_policy_runs_the_layers_and_the_attention_is_fused(order):
    """Flax's layers return the output dtype of the policy, here float32."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = lambda name: nn.DenseGeneral((4, 8), name=name)
            return plain(*(dense(name)(x) for name in "qkv"))

    model = with_policy(Model(), jmp.get_policy("params=f32,compute=bf16,output=f32"))
    params = Model().init(jax.random.key(0), X)

    def of(model):
        return lambda params: jnp.mean(model.apply(params, X) * jnp.cos(jnp.arange(8.0)))

    grads = jax.grad(of(Model())), ORDERS[order](jax.grad, fuse(of(model)))
    expected, actual = jax.jit(lambda params: [grad(params) for grad in grads])(params)
    check(actual, expected)


MESH = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_it_runs_in_shards(order, gradients):
    """The batch and the heads are split, and each shard calls its own kernel."""
    spec = {name: P(None, "heads") for name in PARAMS}

    def shard(params, x):
        return jax.lax.pmean(loss(params, x), ("data", "heads"))

    whole = jax.shard_map(shard, mesh=MESH, in_specs=(spec, P("data")), out_specs=P())
    fused = fuse(whole)
    assert is_fused(fused, PARAMS, X)
    check(jax.jit(ORDERS[order](jax.grad, fused))(PARAMS, X), gradients)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_it_runs_on_a_mesh(kind, gradients):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
        fused = fuse(loss)
        assert is_fused(fused, params, x)
        check(jax.jit(jax.grad(jmp.autocast(fused)))(params, x), gradients)


@pytest.mark.slow
def test_a_program_is_exported_for_several_platforms_and_sizes(monkeypatch):
    """CUDA gets the kernel, and a CPU the program as it is."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **options: jnp.tanh(q))
    fused = jax.jit(jmp.fuse_attention(lambda x: plain(x, x, x)))
    (sizes,) = (jax.export.symbolic_shape("b, 16, 4, 8"),)
    x = qkv()[0]
    for shape in (x.shape, sizes):
        exported = jax.export.export(fused, platforms=("cpu", "cuda"))(
            jax.ShapeDtypeStruct(shape, jnp.float32)
        )
        assert "tanh" in exported.mlir_module()
        read = jax.export.deserialize(exported.serialize())
        np.testing.assert_allclose(read.call(x), plain(x, x, x), rtol=1e-5)


def test_a_loss_scale_reaches_through_it(gradients):
    """In float16, on a platform that is not CUDA: the attention is that of the program."""
    fused = jmp.autocast(jmp.fuse_attention(loss, "float16"), "float16")
    _, grads = jax.jit(jmp.value_and_grad(fused, jmp.StaticLossScale(2.0**10)))(PARAMS, X)
    check(grads, gradients)


@pytest.mark.slow
def test_a_training_step_with_a_loss_scale(monkeypatch):
    tx = jmp.with_loss_scale(optax.adam(1e-2))
    fused = jmp.autocast(fuse(loss))
    params, state = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(params, state):
        value, grads = jmp.value_and_grad(fused, jmp.get_loss_scale(state))(params, X)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    values = []
    for _ in range(5):
        params, state, value = step(params, state)
        values.append(float(value))
    assert values == sorted(values, reverse=True)
    assert int(jmp.get_metrics(state)["skipped_steps"]) == 0


@pytest.mark.slow
def test_options_of_autocast_hold_around_it(gradients):
    fused = fuse(loss)
    for options in ({"rules": {"**": "float32"}}, {"deny": ["dot_general"]}, {"float32_results": "**"}):
        check(jax.jit(jax.grad(jmp.autocast(fused, **options)))(PARAMS, X), gradients)


def test_it_traces_once_and_prints_once(capsys):
    calls = []

    def printing(params, x):
        calls.append(1)
        jax.debug.print("called")
        return loss(params, x)

    jax.block_until_ready(jax.jit(fuse(printing))(PARAMS, X))
    jax.effects_barrier()
    assert (len(calls), capsys.readouterr().out) == (1, "called\n")


def test_a_model_of_several_attentions_in_a_scan_and_a_branch():
    case = FUSED["a branch"]
    fused = fuse(
        lambda *x: jax.lax.scan(lambda c, _: (case.fun(*c), *x[1:]) and (c, case.fun(*c)), x, None, 2)[1]
    )
    assert is_fused(fused, *case.arrays)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_masks_and_biases_run_in_shards(kind):
    def attend(q, k, v, mask):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        changed = (
            jnp.where(mask[:, None, None] > 0, scores, -1e9)
            if kind == "mask"
            else scores + mask[:, None, None]
        )
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(changed), v)

    of_heads = P("data", None, "heads")
    sharded = jax.shard_map(attend, mesh=MESH, in_specs=(of_heads,) * 3 + (P("data"),), out_specs=of_heads)
    mask = normal(3, 2, 16)
    assert is_fused(fuse(sharded), *qkv(), mask)

    def of(fun):
        return jax.jit(jax.grad(lambda *x: jnp.mean(fun(*x) * jnp.cos(jnp.arange(8.0))), (0, 1, 2, 3)))

    check(of(fuse(sharded))(*qkv(), mask), of(attend)(*qkv(), mask))

"""`reduce_dtype`: weight gradients that leave their half precision products in float32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
import jmp_lite.linen
import jmp_lite.nnx
from tests.support.jaxprs import equations

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 6, 8)), jnp.float32)

LINEN = {
    "Dense": nn.Dense(5),
    "without bias": nn.Dense(5, use_bias=False),
    "DenseGeneral": nn.DenseGeneral((3, 5)),
    "axes out of order": nn.DenseGeneral((3, 2), axis=(-1, 1)),
    "attention": nn.MultiHeadDotProductAttention(num_heads=2),
    "in a scan": nn.RNN(nn.LSTMCell(5)),
}
NNX = {
    "Linear": lambda: nnx.Linear(8, 5, rngs=nnx.Rngs(0)),
    "LinearGeneral": lambda: nnx.LinearGeneral((6, 8), (3, 2), axis=(1, 2), rngs=nnx.Rngs(0)),
    "attention": lambda: nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)),
}


def linen_loss(model, dtype, **settings):
    """The loss of a Linen model under a policy, and its parameters."""
    policy = jmp.Policy(jnp.float32, dtype, jnp.float32)
    under = jmp_lite.linen.with_policy(model, policy, **settings)
    variables = under.init(jax.random.key(0), X)
    return lambda variables: jnp.sum(under.apply(variables, X) ** 2), variables


def nnx_loss(make, dtype, **settings):
    """The loss of an NNX model under a policy, and its parameters."""
    policy = jmp.Policy(jnp.float32, dtype, jnp.float32)
    graph, state = nnx.split(jmp_lite.nnx.with_policy(make(), policy, **settings))
    return lambda state: jnp.sum(nnx.merge(graph, state)(X) ** 2), state


CASES = [("linen", name) for name in LINEN] + [("nnx", name) for name in NNX]


def loss_of(kind, name, dtype, **settings):
    if kind == "linen":
        return linen_loss(LINEN[name], dtype, **settings)
    return nnx_loss(NNX[name], dtype, **settings)


def products(loss, params):
    """How many products of a gradient give float32, and how many take it."""
    closed = jax.make_jaxpr(jax.grad(loss))(params)
    dots = [equation for equation in equations(closed) if equation.primitive.name == "dot_general"]
    is_wide = lambda var: var.aval.dtype == jnp.float32
    return sum(is_wide(dot.outvars[0]) for dot in dots), sum(any(map(is_wide, dot.invars)) for dot in dots)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_gradients_are_those_of_half_products_within_their_rounding(kind, name):
    dtype = jnp.bfloat16  # JAX cannot compile its float16 attention for a CPU.
    gradients = {}
    for reduce_dtype in (None, "float32"):
        loss, params = loss_of(kind, name, dtype, reduce_dtype=reduce_dtype)
        gradients[reduce_dtype] = jax.jit(jax.grad(loss))(params)
    eps = float(jnp.finfo(dtype).eps)
    for half, wide in zip(*map(jax.tree.leaves, gradients.values()), strict=True):
        assert wide.dtype == jnp.float32
        size = float(jnp.abs(half).max())
        np.testing.assert_allclose(wide, half, rtol=8 * eps, atol=8 * eps * size)


@pytest.mark.cases(fast=2, slow=2)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_products_take_half_and_give_weights_their_gradients_in_float32(kind, name):
    half_gives, half_takes = products(*loss_of(kind, name, jnp.float16))
    gives, takes = products(*loss_of(kind, name, jnp.float16, reduce_dtype="float32"))
    assert gives == half_gives + {"attention": 4, "in a scan": 8}.get(name, 1)
    assert takes == half_takes
    assert takes == 0 or (kind, name) == ("nnx", "attention")  # JAX's own attention, of its weights.


def test_it_is_left_out_where_there_is_nothing_to_widen():
    full, params = linen_loss(nn.Dense(5), jnp.float32, reduce_dtype="float32")
    assert "custom_vjp" not in str(jax.make_jaxpr(full)(params))
    policy = jmp.get_policy("c=f16,o=f32; layers_0 -> f32")
    model = jmp_lite.linen.with_policy(nn.Sequential([nn.Dense(5), nn.Dense(3)]), policy, reduce_dtype="f32")
    params = model.init(jax.random.key(0), X)
    forward = str(jax.make_jaxpr(model.apply)(params, X))
    assert forward.count("custom_vjp_call") == 1


def test_a_product_of_the_layers_own_is_kept():
    called = []

    def own(x, weight, *args, **options):
        called.append((x.dtype, weight.dtype))
        return lax.dot_general(x, weight, *args, **options)

    loss, params = linen_loss(nn.Dense(5, dot_general=own), jnp.float16, reduce_dtype="float32")
    called.clear()
    jax.grad(loss)(params)
    assert set(called) == {(jnp.dtype("float16"),) * 2}


def test_the_layer_is_as_it_was_after_the_call():
    model = nnx.Linear(8, 5, rngs=nnx.Rngs(0))
    under = jmp_lite.nnx.with_policy(model, jmp.get_policy("c=f16,o=f32"), reduce_dtype="float32")
    before = under.dot_general
    under(X)
    assert (under.dot_general, under.dtype) == (before, jnp.float16)


def test_another_dtype_is_an_error():
    for library, model in ((jmp_lite.linen, nn.Dense(5)), (jmp_lite.nnx, NNX["Linear"]())):
        for dtype in ("float16", "float64"):
            with pytest.raises(ValueError, match=rf"reduce_dtype should be float32.*Got {dtype}"):
                library.with_policy(model, jmp.get_policy("c=f16"), reduce_dtype=dtype)


def test_a_layer_that_users_wrote_keeps_its_compute_dtype():
    class Doubled(nn.Dense):
        def __call__(self, x):
            return super().__call__(x) * jnp.ones((), self.dtype)

    class DoubledNnx(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x) * jnp.ones((), self.dtype)

    policy = jmp.get_policy("c=f16,o=f16")
    model = jmp_lite.linen.with_policy(Doubled(5, use_bias=False), policy, reduce_dtype="float32")
    variables = model.init(jax.random.key(0), X)
    assert "f32[4,6,5]" not in str(jax.make_jaxpr(model.apply)(variables, X))
    plain = DoubledNnx(8, 5, use_bias=False, rngs=nnx.Rngs(0))
    under = jmp_lite.nnx.with_policy(plain, policy, reduce_dtype="float32")
    graph, state = nnx.split(under)
    assert "f32[4,6,5]" not in str(jax.make_jaxpr(lambda state: nnx.merge(graph, state)(X))(state))


DEVICES = 4


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map_the_gradient_of_a_whole_weight_is_summed_over_the_devices(check_vma):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    loss, params = linen_loss(nn.Dense(5), jnp.float16, reduce_dtype="float32")
    expected = jax.grad(loss)(params)
    under = jmp_lite.linen.with_policy(nn.Dense(5), jmp.get_policy("c=f16,o=f32"), reduce_dtype="float32")

    def local(params, x):
        grads = jax.grad(lambda params: jnp.sum(under.apply(params, x) ** 2))(params)
        return grads if check_vma else lax.psum(grads, "data")  # Without the check nothing is summed.

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    grads = jax.jit(run)(params, X)
    for grad, wanted in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
        assert grad.dtype == jnp.float32
        np.testing.assert_allclose(grad, wanted, rtol=1e-2, atol=1e-2)

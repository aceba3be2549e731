"""`autocast(..., layer_scale=)`: a loss scale for each layer that a pattern selects."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_lite as jmp
from jmp_lite import linen
from tests.support.jaxprs import primitives

DEPTH, WIDTH = 6, 16
X = jax.random.normal(jax.random.key(0), (8, WIDTH))
W = jax.random.normal(jax.random.key(1), (DEPTH, WIDTH, WIDTH)) / WIDTH**0.5


def fading(x):
    """Returns `x`, and passes on its gradient times 2**-5: over six layers it shrinks by 30 powers of two."""
    return jax.lax.stop_gradient(x * (1 - 2.0**-5)) + x * 2.0**-5


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        y = nn.Dense(WIDTH)(nn.LayerNorm()(x))
        y = nn.Dropout(0.1, deterministic=not train)(y)
        return fading(x + nn.relu(nn.BatchNorm(use_running_average=not train)(y)))


class Net(nn.Module):
    block: type = Block

    @nn.compact
    def __call__(self, x):
        for i in range(DEPTH):
            x = self.block(name=f"Block_{i}")(x)
        return jnp.sum(x.astype(jnp.float32))


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        class Body(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return fading(x + nn.relu(nn.Dense(WIDTH)(x))), None

        scan = nn.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=DEPTH)
        return jnp.sum(scan(name="blocks")(x, None)[0])


def cosines(found, wanted):
    flat = [np.asarray(each, np.float64).reshape(DEPTH, -1) for each in (found, wanted)]
    lengths = [np.maximum(np.linalg.norm(each, axis=1), 1e-300) for each in flat]
    return (flat[0] * flat[1]).sum(1) / lengths[0] / lengths[1]


def kernels(grads):
    return np.stack([np.asarray(grads[f"Block_{i}"]["Dense_0"]["kernel"]) for i in range(DEPTH)])


@functools.cache
def variables():
    return Net().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)


def loss_of(net):
    def loss(params, x):
        rest = {"batch_stats": variables()["batch_stats"]}
        rngs = {"dropout": jax.random.key(2)}
        return net.apply({"params": params, **rest}, x, mutable=["batch_stats"], rngs=rngs)

    return loss


def grads_of(loss):
    grads, state = jax.jit(jax.grad(loss, has_aux=True))(variables()["params"], X)
    return kernels(grads), state


@functools.cache
def expected():
    return grads_of(loss_of(Net()))


@pytest.mark.slow
def test_in_float16_without_a_scale_the_first_blocks_have_no_gradient():
    assert cosines(grads_of(jmp.autocast(loss_of(Net()), "float16"))[0], expected()[0]).min() < 0.1


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("wrap", [nn.remat, lambda block: block])
def test_every_linen_block_learns_where_no_global_scale_serves_all(wrap):
    wanted, state = expected()
    loss = loss_of(Net(wrap(Block)))
    found, found_state = grads_of(jmp.autocast(loss, "float16", layer_scale="Block_*"))
    assert cosines(found, wanted).min() > 0.9999
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0.02, atol=0.01), found_state, state)


@pytest.mark.slow
def test_with_float32_a_model_under_a_policy_gets_the_scales_and_no_other_cast():
    wanted, _ = expected()
    loss = loss_of(linen.with_policy(Net(), jmp.get_policy("mixed_float16")))
    scaled = jmp.autocast(loss, "float32", layer_scale="Block_*")
    assert cosines(grads_of(loss)[0], wanted).min() < 0.9
    assert cosines(grads_of(scaled)[0], wanted).min() > 0.9999
    for one, other in zip(
        *(jax.tree.leaves(jax.jit(each)(variables()["params"], X)) for each in (loss, scaled))
    ):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_each_step_of_a_scan_over_layers_has_a_scale_of_its_own():
    net = Scanned()
    variables = net.init(jax.random.key(0), X)
    grads = lambda fun: jax.jit(jax.grad(fun))(variables, X)["params"]["blocks"]["Dense_0"]["kernel"]
    wanted = grads(net.apply)
    assert cosines(grads(jmp.autocast(net.apply, "float16")), wanted).min() < 0.1
    assert cosines(grads(jmp.autocast(net.apply, "float16", layer_scale="blocks")), wanted).min() > 0.9999


class NnxBlock(nnx.Module):
    def __init__(self, index, rngs):
        self.dense, self.name = nnx.Linear(WIDTH, WIDTH, rngs=rngs), f"block_{index}"

    def __call__(self, x):
        with jax.named_scope(self.name):
            return fading(x + nnx.relu(self.dense(x)))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NnxBlock(i, rngs) for i in range(DEPTH)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return jnp.sum(x)


@pytest.mark.slow
def test_nnx_modules_are_selected_by_their_named_scope():
    model = NnxNet(nnx.Rngs(0))

    def grads(**options):
        fun = lambda model, x: model(x)
        fun = jmp.autocast(fun, "float16", **options) if options else fun
        found = nnx.jit(nnx.grad(fun))(model, X)
        return np.stack([np.asarray(found.blocks[i].dense.kernel[...]) for i in range(DEPTH)])

    wanted = grads()
    assert cosines(grads(rules={"block_0": "float32"}), wanted).min() < 0.999
    assert cosines(grads(layer_scale=["block_*"]), wanted).min() > 0.99999


def chain(layer):
    def loss(w, x):
        for each in w:
            x = layer(each, x)
        return jnp.sum(x)

    return loss


def dense(w, x):
    return fading(jnp.tanh(x @ w))


def scales_in(fun, *args):
    """How often the gradient of a function takes the largest element of a gradient that arrives."""
    return primitives(jax.grad(fun), *args).count("reduce_max")


def test_each_call_of_a_jitted_function_is_a_layer():
    loss = chain(jax.jit(dense))
    assert scales_in(jmp.autocast(loss, "float16", layer_scale="dense"), W, X) == DEPTH
    wanted = jax.grad(loss)(W, X)
    found = jax.grad(jmp.autocast(loss, "float16", layer_scale="dense"))(W, X)
    assert cosines(found, wanted).min() > 0.999


def test_only_the_selected_layers_are_scaled():
    def named(w, x):
        for i, each in enumerate(w):
            with jax.named_scope(f"layer_{i}"):
                x = dense(each, x)
        return jnp.sum(x)

    count = lambda **options: scales_in(jmp.autocast(named, "bfloat16", **options), W, X)
    assert count() == 0
    assert count(layer_scale="layer_[0-3]") == 4
    assert count(layer_scale=["layer_0", "/layer_5"]) == 2
    assert count(layer_scale="layer_*", rules={"layer_0": "float32"}) == DEPTH


def test_an_operation_with_effects_stays_outside_and_the_gradients_are_the_same():
    seen = []

    def loss(w, x):
        with jax.named_scope("layer"):
            h = jnp.tanh(x @ w)
            jax.debug.callback(lambda h: seen.append(h), h[0, 0])
            return jnp.sum(fading(h @ w))

    found = jax.grad(jmp.autocast(loss, "float32", layer_scale="layer"))(W[0], X)
    jax.effects_barrier()
    assert len(seen) == 1
    np.testing.assert_allclose(found, jax.grad(loss)(W[0], X), rtol=1e-6)


def test_in_float32_no_bit_changes():
    def loss(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(jnp.sin(x @ w))

    scaled = jmp.autocast(loss, "float32", layer_scale="layer")
    np.testing.assert_array_equal(scaled(W[0], X), loss(W[0], X))
    np.testing.assert_array_equal(jax.grad(scaled)(W[0], X), jax.grad(loss)(W[0], X))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_derivative_is_refused_by_name(wrap):
    def loss(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(jnp.sin(x @ w))

    with pytest.raises(ValueError, match=r"selects '(loss/)?layer' in the derivative.*jax\.grad\(autocast\("):
        jmp.autocast(jax.grad(wrap(loss)), "float16", layer_scale="layer")(W[0], X)
    scanned = lambda w, x: jax.lax.scan(lambda x, w: (wrap(loss)(w, x) * x, None), x, w)[0].sum()
    with pytest.raises(ValueError, match=r"in the derivative"):
        jmp.autocast(jax.grad(scanned), "float16", layer_scale="layer")(W, X)


def test_a_pattern_that_selects_nothing_is_an_error():
    with pytest.raises(ValueError, match="'missing' selects nothing"):
        jmp.autocast(chain(dense), "float16", layer_scale="missing")(W, X)


@pytest.mark.parametrize("bad", ["", "/", [3], [""]])
def test_bad_patterns_are_refused_at_once(bad):
    with pytest.raises(TypeError, match="layer_scale= takes patterns over scopes"):
        jmp.autocast(chain(dense), "float16", layer_scale=bad)


def test_explain_shows_the_scopes_of_the_program():
    def loss(w, x):
        with jax.named_scope("outer"), jax.named_scope("layer"):
            return jnp.sum(x @ w)

    report = jmp.explain(jmp.autocast(loss, "float16", layer_scale="layer"))(W[0], X)
    (product,) = [each for each in report.operations if each.name == "dot_general"]
    assert (product.scope, product.in_half) == ("outer/layer", True)

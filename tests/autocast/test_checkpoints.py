"""A `jax.checkpoint` keeps a residual stream in bfloat16, and the forward pass reads it in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_lite as jmp
from jmp_lite._jaxpr.read import all_equations
from tests.support.arrays import normal

DEPTH, ROWS, WIDTH, CLASSES = 6, 24, 16, 12
STACK = (normal(0, DEPTH, WIDTH, 32, scale=1 / 4), normal(1, DEPTH, 32, WIDTH, scale=1 / 6))
X, HEAD, LABELS = normal(2, ROWS, WIDTH), normal(3, WIDTH, CLASSES, scale=1 / 4), jnp.arange(ROWS) % CLASSES


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def fast_layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.maximum((x * x).mean(-1, keepdims=True) - mean * mean, 0) + 1e-5)


def rms_norm(x):
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def block(x, weights, norm=layer_norm):
    inner, outer = weights
    return x + jax.nn.gelu(norm(x) @ inner) @ outer


def scanned(block, remat=jax.checkpoint):
    def loss(stack, x, head):
        x = lax.scan(lambda x, weights: (remat(block)(x, weights), None), x, stack)[0]
        return optax.softmax_cross_entropy_with_integer_labels(x @ head, LABELS).mean()

    return loss


def unrolled(stack, x, head):
    for weights in zip(*stack):
        x = jax.checkpoint(block)(x, weights)
    return optax.softmax_cross_entropy_with_integer_labels(x @ head, LABELS).mean()


def kept(loss, half="bfloat16", **options):
    """The dtypes of the arrays of the shape of the stream, or of a stack of streams, that are kept."""
    fun = jmp.autocast(loss, half, **options)
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], STACK, X, HEAD))
    return {leaf.dtype.name for leaf in leaves if leaf.shape == (DEPTH, ROWS, WIDTH)}


STREAMS = {
    "layer norm": block,
    "fast layer norm": lambda x, w: block(x, w, fast_layer_norm),
    "rms norm": lambda x, w: block(x, w, rms_norm),
    "products alone": lambda x, w: block(x, w, lambda x: x),
    "a scaled stream": lambda x, w: block(0.5 * x, w),
    "a function within": lambda x, w: jax.jit(block)(x, w),
    "two sums": lambda x, w: block(block(x, w), w),
    "moves": lambda x, w: jnp.concatenate([x[jnp.arange(4)], block(x, w)[4:]]),
}

OTHERS = {
    "a softmax of the stream": lambda x, w: block(x, w, lambda x: jax.nn.softmax(x)),
    "positions in the stream": lambda x, w: block(x, w, lambda x: jnp.sin(x)),
    "positions in a function within": lambda x, w: block(x, w, jax.jit(jnp.sin)),
    "a stream that no product reads": lambda x, w: x + 0.1 * x * (1 - x) + w[1][0, 0],
    "a function of a part": lambda x, w: jnp.concatenate([x[:4], jnp.tanh(x[4:])]) + block(x, w),
    "a norm of the sum": lambda x, w: layer_norm(block(x, w)),
    "a product in float32": lambda x, w: x + jnp.dot(x, w[0], precision="highest") @ w[1],
    "keep_float32": lambda x, w: block(jmp.keep_float32(x), w),
    "a product of keep_float32's scope": lambda x, w: jmp.full_precision(block)(x, w),
    "a derivative of its own": lambda x, w: block(x, w, own_rule),
}


@jax.custom_vjp
def own_rule(x):
    return x * 2.0


own_rule.defvjp(lambda x: (x * 2.0, x), lambda x, g: (g * 2.0 + 0.0 * x,))


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_products_norms_and_sums_read_is_kept_in_bfloat16(name):
    assert kept(scanned(STREAMS[name])) == {"bfloat16"}


@pytest.mark.parametrize("name", OTHERS)
def test_a_stream_with_another_reader_is_kept_in_float32(name):
    assert "float32" in kept(scanned(OTHERS[name]))


def test_float16_keeps_float32_because_its_range_is_too_small():
    assert kept(scanned(block), "float16") == {"float32"}


def test_a_rule_for_a_product_of_the_stream_keeps_it_in_float32():
    def scoped(x, weights):
        with jax.named_scope("router"):
            routed = x @ weights[0]
        return x + routed @ weights[1]

    assert kept(scanned(scoped), rules={"router": "float32"}) == {"float32"}


def test_a_policy_of_the_checkpoint_keeps_what_it_says():
    policy = jax.checkpoint_policies.dots_saveable
    assert "float32" in kept(scanned(block, lambda body: jax.checkpoint(body, policy=policy)))


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("loss", [scanned(block), unrolled], ids=["scanned", "unrolled"])
def test_the_loss_is_that_of_the_forward_pass_to_the_last_bit(loss):
    fun = jax.jit(jmp.autocast(loss))
    assert jax.jit(jax.value_and_grad(jmp.autocast(loss)))(STACK, X, HEAD)[0] == fun(STACK, X, HEAD)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("loss", [scanned(block), unrolled], ids=["scanned", "unrolled"])
def test_the_gradients_are_those_of_a_float32_copy_at_the_end_of_training(loss):
    """The other order keeps float32. Both are as near to float32, also where the loss is fitted."""
    args, gradient = (STACK, X, HEAD), jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    ours = jax.jit(jax.grad(jmp.autocast(loss), (0, 1, 2)))
    other = jax.jit(jmp.autocast(jax.grad(loss, (0, 1, 2))))
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    tx = optax.adam(3e-3)

    @jax.jit
    def train(args, state):
        def step(_, carry):
            args, state = carry
            updates, state = tx.update(gradient(*args)[1], state)
            return optax.apply_updates(args, updates), state

        return lax.fori_loop(0, 100, step, (args, state))

    state, losses, errors = tx.init(args), [], []
    for _ in range(4):
        value, grads = gradient(*args)
        losses.append(float(value))
        exact, mine, theirs = map(flat, (grads, ours(*args), other(*args)))
        errors.append([np.linalg.norm(each - exact) / np.linalg.norm(exact) for each in (mine, theirs)])
        args, state = train(args, state)
    assert losses[-1] < losses[0] / 100
    mine, theirs = np.array(errors).T
    assert (mine < 1.3 * theirs).all()
    assert mine.mean() < 1.1 * theirs.mean()


def test_there_is_no_product_more():
    def products(fun):
        return sum(
            each.primitive.name == "dot_general"
            for each in all_equations(jax.make_jaxpr(fun)(STACK, X, HEAD))
        )

    plain = products(jax.grad(scanned(block), (0, 1, 2)))
    assert products(jax.grad(jmp.autocast(scanned(block)), (0, 1, 2))) == plain
    # Nothing is differentiated that nobody asks for.
    assert products(jax.grad(jmp.autocast(scanned(block)))) == products(jax.grad(scanned(block)))


@pytest.mark.slow
def test_forward_mode_second_derivatives_and_vmap_work():
    loss = scanned(block)
    fun = jmp.autocast(loss)

    def hvp(loss, direction):
        return jax.jvp(lambda stack: jax.grad(loss)(stack, X, HEAD), (STACK,), (direction,))[1]

    @jax.jit
    def derivatives():
        grad = jax.grad(fun)(STACK, X, HEAD)
        tangent = jax.jvp(lambda stack: fun(stack, X, HEAD), (STACK,), (grad,))[1]
        several = jax.vmap(jax.grad(fun), (None, 0, None))(STACK, jnp.stack([X, 2 * X]), HEAD)
        return grad, tangent, several, hvp(fun, grad), hvp(loss, grad)

    grad, tangent, several, *products = derivatives()
    square = sum(float(jnp.vdot(leaf, leaf)) for leaf in jax.tree.leaves(grad))
    assert float(tangent) == pytest.approx(square, rel=0.02)
    for ours, exact in zip(*map(jax.tree.leaves, products)):
        assert np.linalg.norm(ours - exact) < 0.1 * np.linalg.norm(exact)
    for ours, alone in zip(jax.tree.leaves(several), jax.tree.leaves(grad)):
        np.testing.assert_allclose(ours[0], alone, rtol=0.05, atol=0.02 * float(jnp.abs(alone).max()))

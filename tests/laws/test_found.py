"""The smallest program of each fault that the laws, or other people's programs, have found."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_lite as jmp
from tests.laws.by_product import by_product
from tests.laws.cases import ORDERS
from tests.laws.test_numbers import flat
from tests.support.arrays import normal
from tests.support.jaxprs import equations, live_products, operands_of, product_kinds, products
from tests.support.small_programs import HALVES, W, X
from tests.support.xla import ONE_KERNEL

each_order = pytest.mark.parametrize("order", ORDERS)
each_half = pytest.mark.parametrize("half", HALVES)


def in_order(order, fun, half, transform=jax.grad, **options):
    """The gradient of a function under autocast, in one of both orders."""
    if order == ORDERS[0]:
        return transform(jmp.autocast(fun, half, **options))
    return jmp.autocast(transform(fun), half, **options)


def error(found, exact):
    return np.linalg.norm(flat(found) - flat(exact)) / np.linalg.norm(flat(exact))


# A half value is one value, whatever XLA leaves out.


def compiled(fun, *args):
    """The results of a jitted function, without and with the flag that limits.md recommends for JAX 0.12."""
    lowered = jax.jit(fun).lower(*args)
    flags = [{}] if jax.__version_info__ < (0, 11) else [{}, ONE_KERNEL]
    return [lowered.compile(options)(*args) for options in flags]


@functools.cache
def fitted(steps):
    """Parameters of a linear classifier after some steps of Adam, and its data."""
    x, labels = normal(1, 21, 16), jnp.asarray(np.random.default_rng(2).integers(0, 8, 21))
    loss = lambda w: optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()
    tx = optax.adam(0.1)

    @jax.jit
    def fit(w):
        def step(carry, _):
            w, state = carry
            updates, state = tx.update(jax.grad(loss)(w), state)
            return (optax.apply_updates(w, updates), state), None

        return lax.scan(step, (w, tx.init(w)), length=steps)[0][0]

    return fit(normal(3, 16, 8, scale=0.25)), x, labels


LOSSES = {
    "optax": lambda logits, labels: optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(),
    "logsumexp": lambda logits, labels: (
        jax.nn.logsumexp(logits, -1) - logits[jnp.arange(21), labels]
    ).mean(),
    "one-hot": lambda logits, labels: optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 8)).mean(),
}


@pytest.mark.cases(slow=6)
@each_half
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("steps", [0, 2000, 30, 300])
def test_the_loss_under_jit_is_the_eager_one(name, steps, half):
    """Losses of about 2, 0.1, 1e-3 and 1e-4."""
    w, x, labels = fitted(steps)
    loss = lambda w: LOSSES[name](x @ w, labels)
    eager = float(jmp.autocast(loss, half)(w))

    def value(order):
        return lambda w: in_order(order, loss, half, jax.value_and_grad)(w)[0]

    for fun in (jmp.autocast(loss, half), *map(value, ORDERS)):
        for found in compiled(fun, w):
            np.testing.assert_allclose(float(found), eager, rtol=3e-3)
    by_hand = lambda w: LOSSES[name]((x.astype(half) @ w.astype(half)).astype(jnp.float32), labels)
    np.testing.assert_allclose(float(by_hand(w)), eager, rtol=3e-3)


@pytest.mark.slow
@each_order
def test_a_checkpointed_reader_reads_the_value_that_the_others_read(order):
    w, x, _ = fitted(300)
    sums = lambda logits: jnp.log(jnp.exp(logits).sum(-1))

    def loss(w):
        logits = x @ w
        return jnp.mean(jax.checkpoint(sums)(logits) - sums(1.0005 * logits))

    for found in compiled(in_order(order, loss, "bfloat16"), w):
        assert error(found, jax.grad(loss)(w)) < 0.01


# Derivatives in the range of float16.


@pytest.mark.cases(fast=2, slow=2)
@each_order
@pytest.mark.parametrize("name", ["div", "atan2"])
def test_the_derivative_of_a_quotient_by_large_numbers_does_not_vanish(name, order):
    fun = {"div": jnp.divide, "atan2": jnp.arctan2}[name]
    loss = lambda w, v: jnp.sum(fun(300 + X @ w, 400 + X @ v) @ W)
    for found, exact in zip(
        *(
            g(W, W)
            for g in (
                in_order(order, loss, "float16", functools.partial(jax.grad, argnums=(0, 1))),
                jax.grad(loss, (0, 1)),
            )
        )
    ):
        assert error(found, exact) < 0.02


# Softmaxes and activation functions with an operand that is not differentiated.

ACTIVATIONS = {
    "softmax": lambda x, y: jax.nn.softmax(x + y),
    "gelu": lambda x, y: jax.nn.gelu(x * y),
    "silu": lambda x, y: jax.nn.silu(x) * y,
    "glu": lambda x, y: x * jax.nn.sigmoid(y),
}


@pytest.mark.cases(fast=1, slow=2)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_function_of_two_half_values_of_which_one_is_constant(name):
    loss = lambda w: jnp.sum(jnp.sin(ACTIVATIONS[name](X @ w, X @ jnp.flip(W)) @ w))
    assert error(jax.jit(jax.grad(jmp.autocast(loss, "float16")))(W), jax.grad(loss)(W)) < 0.02


# In float16. The `tanh` and the sigmoid are in other tests too, and the last three are `elu` and `silu` by
# other names, and in other numbers.
@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    "name",
    ["silu", "gelu", "mish", "elu", "relu", "softplus", "log_sigmoid", "tanh", "selu", "celu", "swish"],
)
@each_half
def test_an_activation_function_has_the_error_of_casts_around_each_matmul(name, half):
    """A loss over a few layers, at most 1.2 times in both orders, over sixteen seeds."""
    act, sizes = getattr(jax.nn, name), (8, 64, 64, 64, 64, 4)

    def loss(p, x, y):
        for w, b in p[:-1]:
            x = act(x @ w + b)
        return ((x @ p[-1][0] - y) ** 2).mean()

    def arguments(seed):
        shapes = list(itertools.pairwise(sizes))
        p = [
            (normal(100 * seed + i, a, b, scale=a**-0.5), normal(100 * seed + 10 + i, b, scale=0.1))
            for i, (a, b) in enumerate(shapes)
        ]
        return p, normal(100 * seed + 30, 256, 8), normal(100 * seed + 31, 256, 4)

    plain = jax.jit(jax.grad(loss))
    exact = [plain(*arguments(seed)) for seed in range(16)]
    mean = lambda run: np.log([error(run(*arguments(s)), exact[s]) for s in range(16)]).mean()
    with by_product(half):
        casts = mean(jax.jit(jax.grad(lambda *args: loss(*args))))
    for order in ORDERS:
        assert np.exp(mean(jax.jit(in_order(order, loss, half))) - casts) < 1.2


# What a loop decides by.


@each_order
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.slow
def test_the_gradient_of_a_transport_plan_that_a_loop_finds_is_that_of_casts(half, order):
    """Sinkhorn's algorithm computes the costs in each iteration, and once more behind the loop."""
    epsilon = 0.1
    cost = lambda z, y: (z**2).sum(-1)[:, None] + (y**2).sum(-1) - 2 * z @ y.T

    def loss(w, x, y):
        z = x @ w
        fixed = lax.stop_gradient(z)

        def step(state):
            g = -epsilon * jax.nn.logsumexp((state[0][:, None] - cost(fixed, y)) / epsilon, axis=0)
            f = -epsilon * jax.nn.logsumexp((g - cost(fixed, y)) / epsilon, axis=1)
            return f, g, jnp.abs(f - state[0]).max()

        start = jnp.zeros(len(x)), jnp.zeros(len(y)), jnp.float32(1)
        f, g, _ = lax.while_loop(lambda state: state[2] > 1e-5, step, start)
        plan = jnp.exp((f[:, None] + g - cost(z, y)) / epsilon)
        return (lax.stop_gradient(plan) * cost(z, y)).sum() / len(x)

    arguments = [
        (normal(n, 6, 3, scale=0.3), normal(n + 1, 24, 6), normal(n + 2, 24, 3)) for n in (0, 10, 20)
    ]
    reference = jax.jit(jax.grad(loss))
    exact = [reference(*each) for each in arguments]
    mean = lambda run: np.log([error(run(*each), right) for each, right in zip(arguments, exact)]).mean()
    with by_product(half):
        casts = mean(jax.jit(jax.grad(lambda *args: loss(*args))))
    assert (
        np.exp(mean(jax.jit(in_order(order, loss, half))) - casts) < 1.3
    )  # 8 with the loop's costs in float32.


@each_order
@pytest.mark.slow
def test_a_solver_that_rejects_steps_takes_those_of_float32_in_the_backward_pass(order):
    w = [normal(0, 2, 32, scale=1 / 1.4), normal(1, 32, 2, scale=1 / 5.6)]
    y = normal(2, 4, 2)

    def step(w, carry):
        f = lambda y: jnp.tanh(y @ w[0]) @ w[1]
        t, h, y = carry
        h = jnp.minimum(h, 2.0 - t)
        a = f(y)
        b = f(y + h * a)
        e = jnp.abs(h / 2 * (b - a)).max() / 1e-4
        ok = e < 1
        h_next = h * jnp.clip(0.9 * jnp.sqrt(1 / jnp.maximum(e, 1e-9)), 0.3, 3.0)
        return jnp.where(ok, t + h, t), h_next, jnp.where(ok, y + h / 2 * (a + b), y)

    start = lambda y: (jnp.float32(0), jnp.float32(0.1), y)

    @jax.custom_vjp
    def solve(w, y):
        return lax.while_loop(lambda s: s[1][0] < 2.0, lambda s: (s[0] + 1, step(w, s[1])), (0, start(y)))

    def forward(w, y):
        count, carry = solve(w, y)
        return (count, carry), (w, y, count)

    def backward(saved, cotangents):
        w, y, count = saved

        def run(w, y):
            def keep(c, i):
                return jax.tree.map(lambda a, b: jnp.where(i < count, a, b), step(w, c), c)

            return lax.scan(lambda c, i: (keep(c, i), None), start(y), jnp.arange(200))[0]

        return jax.vjp(run, w, y)[1](cotangents[1])

    solve.defvjp(forward, backward)
    loss = lambda w: (solve(w, y)[1][2] ** 2).sum()
    assert error(in_order(order, loss, "bfloat16")(w), jax.grad(loss)(w)) < 0.01


@each_order
@pytest.mark.parametrize("wrap", [lambda step: step, jax.checkpoint])
def test_a_solver_of_constant_steps_has_its_network_in_half(wrap, order):
    """Derivatives of selections select between cotangents, which the backward loop carries, and zeros."""

    def loss(w, x):
        act = lambda h: jnp.where(h > 0, h, jnp.where(h < -1, 0.1 * h, jnp.expm1(h)))
        step = lambda x, _: (act(x @ w) + jnp.where(x > 0, x, 0.5 * x), None)
        return jnp.mean(lax.scan(wrap(step), x, length=4)[0] ** 2)

    assert set(products(in_order(order, loss, "bfloat16"), W, X)) == {("bfloat16", "bfloat16")}


@each_order
def test_a_check_for_finite_numbers_decides_nothing_that_rounding_changes(order):
    """A scanned train step that skips bad steps keeps its parameters by a selection."""

    def loss(w, x):
        def step(w, _):
            new = w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
            return jnp.where(jnp.isfinite(new).all() & ~jnp.isnan(new).any(), new, w), None

        return jnp.mean(lax.scan(step, w, length=2)[0] ** 2)

    assert set(products(in_order(order, loss, "bfloat16"), W, X)) == {("bfloat16", "bfloat16")}


# `half_sums` and what is not a residual sum.


def test_half_sums_leaves_sums_of_other_dtypes_alone():
    fun = lambda w, x, z: ((x + x @ w) @ w, z + z * 3j)
    z = jnp.asarray(normal(3, 8) + 1j * normal(4, 8))
    found = jmp.autocast(fun, "bfloat16", half_sums="**")(W, X, z)[1]
    np.testing.assert_array_equal(found, z + z * 3j)

    def decode(w, x, i):
        cache = jnp.zeros((8, 8)).at[i + i].set(x[0] @ w)
        rows = w[jnp.arange(4) + jnp.arange(4)] + lax.dynamic_slice(w, (i + i, 0 * i), (4, 8))
        return (x + x @ w) @ w + rows + cache[:4], jax.nn.gelu(x.astype(jnp.float16))

    jax.eval_shape(jmp.autocast(decode, "bfloat16", half_sums="**"), W, X, jnp.int32(1))


@each_order
@pytest.mark.slow
@each_half
def test_half_sums_leaves_the_recursion_of_a_loss_alone(order, half):
    def loss(w):
        logits = (normal(5, 24, 16) @ w)[None]
        labels = jnp.arange(1, 7)[None]
        return optax.ctc_loss(logits, jnp.zeros((1, 24)), labels, jnp.zeros((1, 6))).mean()

    w = normal(6, 16, 8, scale=0.5)
    # A network in front of the loss, so that there is a residual sum for the pattern.
    model = lambda w: loss(w) + jnp.mean((X + X @ W) @ W) * 0
    assert error(in_order(order, model, half, half_sums="**")(w), jax.grad(loss)(w)) < 0.03


def test_half_sums_leaves_sums_of_scalars_alone():
    def model(w, x):
        balance = (x @ w)[0, 0]  # As the auxiliary losses of a mixture of experts.
        for _ in range(2):
            balance = balance + jnp.mean(jnp.square(x @ w))
        return ((x + x @ w) * balance) @ w

    found = jmp.explain(jmp.autocast(model, half_sums="**"))(W, X).operations
    assert [o.outputs[0] for o in found if o.name == "add"] == ["float32[]", "float32[]", "bfloat16[4,8]"]


def test_half_sums_leaves_sums_without_a_matmul_alone():
    def model(w, x):
        x = x + jnp.sin(x)
        return (x + x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True)) @ w) @ w

    found = jmp.explain(jmp.autocast(model, half_sums="**"))(W, X).operations
    assert [o.outputs[0] for o in found if o.name == "add"] == ["float32[4,8]", "bfloat16[4,8]"]


def test_half_sums_leaves_indexes_alone():
    def model(w, x):
        expert = jnp.argmax(x @ w, axis=-1) + 1
        return (x + x @ w + w[expert]) @ w

    jax.eval_shape(jmp.autocast(model, "bfloat16", half_sums="**"), W, X)


def test_half_sums_leaves_accumulators_alone():
    def chunked(w, x):
        add = lambda total, pair: (total + pair[0] @ pair[1], None)
        total = lax.scan(add, jnp.zeros((4, 8)), (x.reshape(4, 2, 4).swapaxes(0, 1), w.reshape(2, 4, 8)))[0]
        return ((total + total @ w) @ w).mean()

    found = jmp.explain(jmp.autocast(chunked, half_sums="**"))(W, X).operations
    assert [o.outputs[0] for o in found if o.name == "add"] == ["float32[4,8]", "bfloat16[4,8]"]


# Integers that a product makes.


@each_half
def test_a_product_of_which_only_integers_are_made_is_exact(half):
    def encode(z, w):
        basis = jnp.asarray([1.0, 3, 9, 27, 81, 243])
        digits = jnp.round(jax.nn.sigmoid(z) * 2)
        return (digits @ basis).astype(jnp.int32), z @ w

    z = normal(7, 64, 6, scale=2.0)
    found, _ = jmp.autocast(encode, half)(z, normal(8, 6, 6))
    np.testing.assert_array_equal(found, encode(z, normal(8, 6, 6))[0])
    report = jmp.explain(jmp.autocast(encode, half))(z, normal(8, 6, 6))
    reasons = [o.reason for o in report.operations if o.name == "dot_general"]
    assert reasons == [
        "only integers are computed from it, and rounding would change them",
        "dot_general is on the allow list",
    ]


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.astype(jnp.int32),
        lambda p: jnp.round(p * 2).astype(jnp.int8),
        lambda p: jax.jit(jnp.floor)(p).astype(jnp.uint32),
        lambda p: jnp.arange(8) < p.astype(jnp.int32),
    ],
    ids=["cast", "round", "floor under jit", "less"],
)
def test_where_a_product_ends_as_integers(use):
    assert products(jmp.autocast(lambda x, w: use(x @ w)), X, W) == [("float32", "float32")]

    def both(x, w):
        return (lambda p: (use(p), p @ w))(x @ w)

    assert products(jmp.autocast(both), X, W)[0] == ("bfloat16", "bfloat16")


def test_only_the_last_matmul_in_front_of_integers_stays_in_float32():
    encode = lambda x, w: (jnp.round(jnp.tanh(jax.nn.gelu(x @ w) @ w) * 4) @ w).astype(jnp.int32)
    dtypes = [left for left, _ in products(jmp.autocast(encode), X, W)]
    assert dtypes == ["bfloat16", "bfloat16", "float32"]


def test_the_index_of_a_largest_number_may_come_from_half():
    assert products(jmp.autocast(lambda x, w: (x @ w).argmax(-1)), X, W) == [("bfloat16", "bfloat16")]


# One-hot labels, custom rules, `keep_float32`, rules, lists.


@each_half
def test_one_hot_embeddings_have_the_same_products_in_both_orders(half):

    def loss(w, x, ids):
        x = x + jax.nn.one_hot(ids, 8) @ w
        x = x + jnp.tanh(x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True)) @ w) @ w
        return jnp.mean(jnp.square(x))

    args = W, X, jnp.arange(4)
    kinds = [live_products(jax.make_jaxpr(in_order(order, loss, half))(*args)) for order in ORDERS]
    assert kinds[0] == kinds[1] == {("dot_general", half, half, half): sum(kinds[0].values())}


@each_order
def test_float32_results_inside_of_a_custom_rule_have_gradients_of_half_operands(order):
    @jax.custom_jvp
    def layers(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    def rule(primals, tangents):
        return jax.jvp(
            lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], primals, tangents
        )

    layers.defjvp(rule)
    loss = lambda w, x: jnp.mean(layers(x @ w, jnp.stack([w, w])) ** 2)
    found = live_products(jax.make_jaxpr(in_order(order, loss, "bfloat16", float32_results="**"))(W, X))
    half = "bfloat16"
    assert found == {
        ("dot_general", half, half, "float32"): 2,
        ("dot_general", half, half, half): sum(found.values()) - 2,
    }


@each_half
def test_a_factor_that_half_rounds_badly_is_not_rounded(half):
    def scaled(number):
        return lambda x, w: ((x @ w) * number) @ w

    dtype_of = lambda number: operands_of("mul", jmp.autocast(scaled(number), half), X, W)
    # The rounding errors of 0.7 and 0.3 are over a quarter of the largest one, that of 1 / sqrt(128) is not.
    assert [dtype_of(number) for number in (0.7, 0.3, 0.3 * 2**9)] == [["float32"]] * 3
    assert [dtype_of(number) for number in (0.5, 128**-0.5, 256.0)] == [[half]] * 3


def test_a_scalar_argument_that_is_added_is_not_rounded():
    # All elements of the sum would be off by the same amount, while the roundings of an array cancel out.
    added = lambda x, w, shift: ((x @ w) + shift) @ w
    assert operands_of("add", jmp.autocast(added), X, W, jnp.float32(1.001)) == ["float32"]
    assert operands_of("add", jmp.autocast(added), X, W, jnp.full(8, 1.001)) == ["bfloat16"]


@pytest.mark.parametrize("options", [{}, {"rules": {"x": "bfloat16"}}])
def test_what_is_computed_of_parameters_and_broadcast_or_looked_up_adapts(options):
    def added(x, w, b, scale):
        table = 2 * w[jnp.arange(4)] + (2 * w)[jnp.arange(4)]
        return jnp.tanh(lax.clamp(-scale, x @ w, scale) + table) @ w

    half = jmp.autocast(added, **options)
    args = X, W, jnp.ones(8), jnp.float32(1.001)
    assert operands_of("tanh", half, *args) == ["bfloat16"]
    gain = jmp.autocast(lambda x, w, gain: ((x @ w) * gain) @ w)
    assert operands_of("mul", gain, X, W, jnp.ones(8)) == ["float32"]


def test_integers_of_the_program_that_become_numbers_adapt():
    numbers = jnp.arange(32).reshape(4, 8)
    constant = jmp.autocast(lambda x, w: jnp.tanh(x @ w + lax.iota("int32", 32).reshape(4, 8)) @ w)
    assert operands_of("tanh", constant, X, W) == ["bfloat16"]
    argument = jmp.autocast(lambda x, w, numbers: jnp.tanh(x @ w + numbers) @ w)
    assert operands_of("tanh", argument, X, W, numbers) == ["float32"]


def test_a_matmul_of_operands_of_which_one_has_another_dtype_stays_as_traced():
    mixed = lambda x, w: lax.dot(x, w.astype(jnp.float16), preferred_element_type=jnp.float32)
    assert products(jmp.autocast(mixed), X, W) == [("float32", "float16")]
    (operation,) = (o for o in jmp.explain(jmp.autocast(mixed))(X, W).operations if o.name == "dot_general")
    assert operation.reason == "an operand was traced in float16"


def test_a_product_by_one_hot_labels_is_half_if_a_matmul_reads_it():
    def picked(x, labels):
        return jax.nn.one_hot(labels, 4) @ jnp.cumsum(x, axis=1)

    labels = jnp.arange(4)
    assert products(jmp.autocast(picked), X, labels) == [("float32", "float32")]
    half = ("bfloat16", "bfloat16")
    assert products(jmp.autocast(lambda x, labels: picked(x, labels) @ W), X, labels) == [half] * 2


def test_the_gradients_of_an_outer_product_obey_the_options_of_its_arguments():
    outer = lambda u, v: jnp.sum(jnp.tanh(jnp.einsum("i,j->ij", u, v)))
    u, full = jnp.ones(8), ("float32",) * 3
    grad = jax.grad(jmp.autocast(outer, reduce_dtype="float32"), (0, 1))
    assert set(product_kinds(grad, u, u)) == {full}
    kept = lambda u, v: outer(jmp.keep_float32(u), v)
    assert set(product_kinds(jax.grad(jmp.autocast(kept), (0, 1)), u, u)) == {full}


def test_a_number_of_one_branch_alone_is_not_rounded():
    def scaled(x, large):
        factor = lax.cond(large, lambda: jnp.float32(1e5), lambda: jnp.float32(0.5))
        return ((x @ W) * factor) @ W

    x = 1e-3 * X
    assert error(jmp.autocast(scaled, "float16")(x, True), scaled(x, True)) < 0.01


@each_order
def test_a_table_of_numbers_in_a_backward_rule_stays_float32(order):
    """The angles of rotary positions, which a rule computes again: half would be off by radians."""

    def turned(x):
        positions, frequencies = 1000 + jnp.arange(4.0), jnp.exp(-0.1 * jnp.arange(8.0))
        return x * jnp.cos(jnp.einsum("i,j->ij", positions, frequencies))

    rotary = jax.custom_vjp(turned)
    rotary.defvjp(lambda x: (turned(x), None), lambda _, cotangent: (turned(cotangent),))
    loss = lambda w: jnp.sum(rotary(X @ w) @ W)
    assert operands_of("cos", in_order(order, loss, "bfloat16"), W) == ["float32"] * 2


def test_a_matmul_of_a_kept_value_runs_in_float32():
    kept = lambda x, w: jmp.keep_float32(x).T.reshape(8, 4).T @ w
    assert products(jmp.autocast(kept), X, W) == [("float32", "float32")]
    (operation,) = jmp.explain(jmp.autocast(kept))(X, W).in_float32()
    assert operation.reason == "keep_float32"
    behind = lambda x, w: jmp.keep_float32(x) @ w @ w
    assert products(jmp.autocast(behind), X, W) == [("float32", "float32"), ("bfloat16", "bfloat16")]
    changed = lambda x, w: (jmp.keep_float32(x) * 2) @ w
    assert products(jmp.autocast(changed), X, W) == [("bfloat16", "bfloat16")]


def test_the_first_rule_that_matches_wins_whether_it_names_a_scope_or_an_argument():
    def fun(p, x):
        with jax.named_scope("body"):
            x = jnp.tanh(x @ p["w"])
        with jax.named_scope("head"):
            return x @ p["v"]

    run = lambda *rules: [a for a, _ in products(jmp.autocast(fun, rules=rules), {"w": W, "v": W}, X)]
    assert run(("body", "bfloat16"), ("**", "float32")) == ["bfloat16", "float32"]
    assert run(("p/v", "bfloat16"), ("**", "float32")) == ["float32", "bfloat16"]
    assert run(("p/w", "float32"), ("body", "bfloat16")) == ["float32", "bfloat16"]
    assert run(
        ("**", "float32"),
    ) == ["float32", "float32"]


def test_a_rule_behind_a_wider_one_is_an_error_that_names_the_rule_in_front():
    fun = jmp.autocast(lambda p, x: x @ p["w"] + p["b"], rules=[("p/**", "float32"), ("p/b", "bfloat16")])
    with pytest.raises(ValueError, match=r"'p/b' has no effect.*'p/\*\*' in front of it selects 'p/b'"):
        fun({"w": W, "b": W[0]}, X)


@pytest.mark.parametrize(
    ("infer", "program", "name"),
    [
        (["exp", "reduce_sum", "reduce_max", "div", "sub"], lambda x: jax.nn.softmax(x), "exp"),
        (["integer_pow"], lambda x: jax.nn.gelu(x), "integer_pow"),
    ],
)
def test_a_list_of_the_users_wins_over_recomputation(infer, program, name):
    fun = lambda x, w: program(x @ w) @ w
    jaxpr = jax.make_jaxpr(jmp.autocast(fun, infer=infer))(X, W)
    (operation,) = [each for each in equations(jaxpr) if each.primitive.name == name]
    assert operation.invars[0].aval.dtype == jnp.bfloat16


def test_explain_names_options_without_effect():
    fun = lambda x, w: jnp.tanh(x @ w) @ w
    report = jmp.explain(jmp.autocast(fun, deny=["tanh"], infer=["exp"], reduce_dtype="float32"))(X, W)
    assert report.without_effect == ("infer=['exp']", "reduce_dtype='float32'")
    assert "Options without effect: infer=['exp'], reduce_dtype='float32'" in str(report)


# The time of a trace.


def test_operations_behind_a_softmax_are_read_in_linear_time():
    """Function calls of a trace with four times as many operations."""
    import cProfile
    import pstats

    def calls(count):
        def fun(x):
            y = jax.nn.softmax(x @ W)
            for _ in range(count):
                y = jnp.sin(y)
            return y @ W

        profile = cProfile.Profile()
        profile.runcall(jax.make_jaxpr(jmp.autocast(fun)), X)
        return pstats.Stats(profile).total_calls

    calls(4)
    assert calls(200) < 5 * calls(50)


def test_a_number_beyond_float16_is_inf_without_a_warning_of_numpy():
    """The lists of the user win: `allow=["mul"]` multiplies by the -1e5 of `optax.ctc_loss` in float16."""
    found = jmp.autocast(lambda x: x * -1e5, "float16", allow=["mul"])(jnp.ones(2))
    np.testing.assert_array_equal(found, -jnp.inf)


# The scopes of what `jax.checkpoint` computes again: JAX writes them twice.


def stacked(block, w, x):
    with jax.named_scope("stack"):
        return lax.scan(lambda x, _: (block(w, x), None), x, length=2)[0]


def twice(block, w, x):
    with jax.named_scope("stack"):
        return jax.checkpoint(lambda w, x: block(w, block(w, x)))(w, x)


@pytest.mark.cases(fast=4, slow=4)
@pytest.mark.parametrize("around", [stacked, twice])
@pytest.mark.parametrize("rule", ["/stack/block/layer", "stack/block/layer", "**/block/layer", "/stack/**"])
def test_a_rule_selects_what_a_checkpoint_computes_again(rule, around):
    def layer(w, x):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w)

    def block(w, x):
        with jax.named_scope("block"):
            return jax.checkpoint(layer)(w, x)

    def loss(w, x):
        return jnp.sum(around(block, w, x) @ w)

    options = {"rules": {rule: "float32"}}
    kinds = [product_kinds(in_order(order, loss, "bfloat16", **options), W, X) for order in ORDERS]
    assert kinds[0] == kinds[1]
    assert len(kinds[0]) > 1
    report = jmp.explain(in_order(ORDERS[1], loss, "bfloat16", **options))(W, X)
    scopes = {each.module for each in report.operations if each.name == "tanh"}
    assert scopes == {"stack/block/layer"}


# Solvers, mutable arrays and tangents that others wrote.

AUX = {
    "a count": jnp.int32(3),
    "a flag": jnp.bool_(True),
    "a residual": jnp.float32(0.5),
    "a history": jnp.ones(5),
    "several": (jnp.int32(3), jnp.ones(2)),
    "nothing": (),
}


@pytest.mark.cases(fast=1, slow=3)
@pytest.mark.parametrize("name", AUX)
@pytest.mark.parametrize("way", ["plain", "vmap", "grad"])
def test_the_auxiliary_results_of_a_solver_are_those_of_the_program(name, way):
    def solve(a, b):
        solver = lambda a: lambda _, b: (jnp.linalg.solve(a, b), AUX[name])
        return lax.custom_linear_solve(lambda x: a @ x, b, solver(a), solver(a.T), has_aux=True)

    around = {
        "plain": lambda f: f,
        "vmap": lambda f: lambda a, b: jax.vmap(f, (None, 0))(a, jnp.stack([b, 2 * b])),
        "grad": lambda f: jax.grad(lambda a, b: f(a, b)[0].sum()),
    }[way]
    args = 3 * jnp.eye(3) + 0.1, jnp.ones(3)
    found, expected = (jax.jit(around(f))(*args) for f in (jmp.autocast(solve), solve))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert ours.dtype == plain.dtype
        np.testing.assert_allclose(ours, plain, rtol=0.02)


@pytest.mark.cases(fast=1, slow=3)
@pytest.mark.parametrize("go", [lambda f: f, jax.jit, jax.grad], ids=["", "jit", "grad"])
@pytest.mark.parametrize("start", [jnp.float32(0), jnp.zeros(8), jnp.int32(0)], ids=str)
def test_a_mutable_array_that_is_closed_over_is_written_as_in_the_program(start, go):
    def written(wrap):
        ref = jax.new_ref(start)

        def fun(x):
            ref[...] = ref[...] + 1
            return (x @ W).sum()

        result = go(wrap(fun))(X[0])
        return result, ref[...]

    (found, ours), (expected, plain) = written(jmp.autocast), written(lambda f: f)
    assert ours.dtype == plain.dtype
    np.testing.assert_array_equal(ours, plain)
    np.testing.assert_allclose(found, expected, rtol=0.02)


@pytest.mark.parametrize("tangent", [2.0, jnp.float32(2)], ids=["a Python number", "an array"])
def test_a_tangent_may_be_a_python_number(tangent):
    @jax.custom_jvp
    def fun(t):
        return jnp.sum((t * W) @ W)

    fun.defjvp(lambda p, d: (fun(*p), jnp.sum(W @ W) * d[0]))
    (_, found), (_, expected) = (jax.jvp(f, (1.0,), (tangent,)) for f in (jmp.autocast(fun), fun))
    np.testing.assert_allclose(found, expected, rtol=0.02)


TABLES = {
    "scaled": lambda w: w * jnp.linspace(0.5, 1, 8),
    "doubled": lambda w: w * 2,
    "summed": lambda w: w + 0.1 * w[:1],
    "normalized": lambda w: w / jnp.linalg.norm(w, axis=-1, keepdims=True),
    "of a product": lambda w: w @ W,
}


@each_half
@pytest.mark.parametrize("name", TABLES)
def test_a_lookup_in_a_table_that_is_computed_has_the_same_products_in_both_orders(name, half):
    loss = lambda w, x, ids: jnp.sin(x + jax.nn.one_hot(ids, 8) @ TABLES[name](w)).mean()
    args = W, X, jnp.arange(4)
    kinds = [live_products(jax.make_jaxpr(in_order(order, loss, half))(*args)) for order in ORDERS]
    assert kinds[0] == kinds[1]


def _masked(y, other):
    return (y > 0).astype(jnp.float32) * jnp.sin(other)


COMPARED = {
    "hinge": lambda y, _: jnp.maximum(0, 1 - y),
    "absolute": lambda y, _: jnp.abs(y - 0.3),
    "largest": lambda y, _: y.max(0),
    "clipped": lambda y, _: jnp.clip(y, -1, 1),
    "relu": lambda y, _: jax.nn.relu(y),
    "selected": lambda y, _: jnp.where(y > 0, y, 0.1 * y),
    "masked": _masked,
    "equal": lambda y, other: jnp.where(y == 3.0, jnp.sin(other), 0.0),
}
REPEATED = {
    "plain": lambda fun: fun,
    "remat": jax.checkpoint,
    "remat of jit": lambda fun: jax.checkpoint(jax.jit(fun)),
    "scan of remat": lambda fun: (
        lambda w: lax.scan(
            lambda total, _: (total + jax.checkpoint(fun)(w), None), jnp.zeros_like(fun(w)), None, length=2
        )[0]
    ),
}


@pytest.mark.cases(fast=8, slow=24)
@pytest.mark.parametrize("way", REPEATED)
@pytest.mark.parametrize("name", COMPARED)
def test_a_product_that_is_only_compared_is_half_in_both_orders(name, way):
    """The backward pass cannot tell a mask of the program from the predicate of a derivative, such as relu's.

    Under a `jax.checkpoint` it computes the mask again, which should be the mask of the forward pass.
    """
    use = REPEATED[way](lambda w: COMPARED[name](X @ w, X @ jnp.sin(w)))
    loss = lambda w: use(w).mean()
    kinds = [live_products(jax.make_jaxpr(in_order(order, loss, "bfloat16"))(W)) for order in ORDERS]
    assert set(kinds[0]) == {("dot_general", "bfloat16", "bfloat16", "bfloat16")}
    assert kinds[1] == kinds[0]


def test_a_function_may_return_a_token():
    fun = lambda x: (lax.create_token(x), x @ W)
    token, y = jax.jit(jmp.autocast(fun))(X)
    assert type(token) is type(lax.create_token(0.0))
    assert y.shape == (len(X), W.shape[1])


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_a_checkpoint_may_guard_some_of_its_operands(order):
    """JAX gives `prevent_cse` for each operand, and autocast's checkpoints take others."""

    @functools.partial(jax.checkpoint, prevent_cse=(False, True))
    def layer(w, x):
        return x @ w + jnp.array([1.0, 2.0, 3.0])

    def loss(weights, x):
        for w in weights:
            x = layer(w, x)
        return jnp.sum(x**2)

    args = [jnp.ones((3, 3))] * 2, jnp.ones(3)
    gradient = jax.grad(jmp.autocast(loss)) if order == "inside" else jmp.autocast(jax.grad(loss))
    for found, exact in zip(gradient(*args), jax.grad(loss)(*args)):
        np.testing.assert_allclose(found, exact, rtol=0.02)
    barriers = jax.jit(gradient).lower(*args).as_text().count("optimization_barrier")
    assert barriers >= jax.jit(jax.grad(loss)).lower(*args).as_text().count("optimization_barrier") > 0


@pytest.mark.parametrize("given", [1.0, np.float32(1), np.ones(2, np.float32)])
def test_a_result_that_the_program_makes_an_array_is_one(given):
    """It was a number of the jaxpr, which has no `devices`."""
    fun = jmp.autocast(jnp.asarray)
    assert isinstance(fun(given), jax.Array)
    assert fun(given).weak_type == jnp.asarray(given).weak_type

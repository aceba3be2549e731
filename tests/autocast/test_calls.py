"""`autocast` goes inside every function within a function: jit, loops, remat, custom rules, shards."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.jaxprs import equations, primitives, products, text
from tests.support.small_programs import STACK, B, V, W, X, in_mesh, layer, value_and_grad, with_jvp, with_vjp

smooth, product = with_jvp(lambda x, w: jnp.tanh(x @ w)), with_vjp(jnp.matmul)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def power(x, w, times, name):
    for _ in range(times):
        x = jnp.tanh(x @ w)
    return x


def _power_forward(x, w, times, name):
    return power(x, w, times, name), (x, w)


def _power_backward(times, name, saved, g):
    x, w = saved
    _, pullback = jax.vjp(lambda x, w: power.fun(x, w, times, name), x, w)
    return pullback(g)


power.defvjp(_power_forward, _power_backward)


@jax.custom_vjp
def embed_and_multiply(ids, w, x):
    return x @ w + w[ids]


def _embed_forward(ids, w, x):
    return embed_and_multiply(ids, w, x), (ids, w, x)


def _embed_backward(saved, g):
    ids, w, x = saved
    return None, (x.T @ g).at[ids].add(g), g @ w.T


embed_and_multiply.defvjp(_embed_forward, _embed_backward)


def _closed(fun):
    """Runs a function from its jaxpr, as what exported or interpreted it would."""

    def run(*args):
        closed = jax.make_jaxpr(fun)(*args)
        return jaxpr_as_fun(closed)(*args)[0]

    return run


@jax.custom_jvp
def around_a_custom_vjp(x, w):
    return jnp.tanh(product(x, w))


around_a_custom_vjp.defjvp(
    lambda primals, tangents: jax.jvp(lambda x, w: jnp.tanh(product(x, w)), primals, tangents)
)


# Each of (x, w, b); between two plain layers all products of its kind must be half.
CALLS = {
    "jit": jax.jit(layer),
    "inlined jit": jax.jit(layer, inline=True),
    "jit in jit": jax.jit(lambda x, w, b: jax.jit(layer)(jax.jit(layer)(x, w, b), w, b)),
    "jit with a static argument": lambda x, w, b: jax.jit(lambda n, x: layer(x, w * n, b), static_argnums=0)(
        1, x
    ),
    "closed call": _closed(layer),
    "scan over layers": lambda x, w, b: lax.scan(lambda x, w: (layer(x, w, b), None), x, w + STACK)[0],
    "scan with constants": lambda x, w, b: lax.scan(lambda x, _: (layer(x, w, b), x.sum()), x, length=3)[0],
    "scan over slices": lambda x, w, b: lax.scan(
        lambda n, row: (n + 1, layer(row[None], w, b)[0] * n), 0, x, reverse=True
    )[1],
    "scan of a tuple": lambda x, w, b: lax.scan(
        lambda c, w: ((layer(c[0], w, b), c[1] + 1, {"m": c[2]["m"] * 0.5 + c[0].mean()}), c[0] @ w),
        (x, jnp.int32(0), {"m": jnp.float32(0)}),
        STACK + w,
    ),
    "map": lambda x, w, b: lax.map(lambda row: layer(row[None], w, b)[0], x),
    "associative scan": lambda x, w, b: lax.associative_scan(jnp.matmul, STACK + w)[-1][:4] + layer(x, w, b),
    "fori_loop": lambda x, w, b: lax.fori_loop(0, 3, lambda i, x: layer(x, w, b), x),
    "cond": lambda x, w, b: lax.cond(x[0, 0] < 9, lambda x: layer(x, w, b), lambda x: jnp.sin(x @ w.T), x),
    "switch": lambda x, w, b: lax.switch(
        jnp.int32(1) + (x[0, 0] > 99), [lambda x: x, lambda x: layer(x, w, b), jnp.cos], x
    ),
    "remat": jax.checkpoint(layer),
    "remat in scan": lambda x, w, b: lax.scan(
        lambda x, w: (jax.checkpoint(layer)(x, w, b), None), x, STACK + w
    )[0],
    "remat of scan": jax.checkpoint(
        lambda x, w, b: lax.scan(lambda x, w: (layer(x, w, b), None), x, STACK + w)[0]
    ),
    "custom_jvp": lambda x, w, b: smooth(x + b, w),
    "custom_vjp": lambda x, w, b: product(x + b, w),
    "custom_vjp of static arguments": lambda x, w, b: power(x + b, w, 2, "name"),
    "custom_vjp of integers": lambda x, w, b: embed_and_multiply(jnp.array([1, 2, 2, 0]), w, x + b),
    "custom_vjp in a custom_jvp rule": lambda x, w, b: around_a_custom_vjp(x + b, w),
    "custom_jvp in remat in cond": lambda x, w, b: (
        lax.cond(x[0, 0] < 9, jax.checkpoint(smooth), lambda x, w: x, x, w) + b
    ),
    "relu and its kin": lambda x, w, b: jax.nn.relu(jax.nn.relu6(jax.nn.silu(x @ w) + b) @ w),
    "vmap of rows": lambda x, w, b: jax.vmap(lambda row: layer(row[None], w, b)[0])(x),
    "vmap of weights": lambda x, w, b: jax.vmap(layer, (None, 0, None))(x, STACK + w, b).mean(0),
    "shard_map": in_mesh(layer, 1),
    "everything": jax.jit(
        lambda x, w, b: lax.scan(
            lambda x, w: (
                jax.checkpoint(
                    lambda x, w: lax.cond(
                        x.sum() < 1e9, lambda x: jax.nn.relu(product(smooth(x, w), w)) + b, lambda x: x, x
                    )
                )(x, w),
                None,
            ),
            x,
            STACK + w,
        )[0]
    ),
}


def program_of(name):
    """Two layers with a call of this kind between them."""

    def between_products(x, w, b):
        return jax.tree.map(lambda y: y @ W if y.shape[-1:] == (8,) else y, CALLS[name](x @ V, w, b))

    return between_products


@pytest.mark.cases(fast=6, slow=4)
@pytest.mark.parametrize("half", ["float16"])
@pytest.mark.parametrize("name", CALLS)
def test_every_product_inside_is_half_and_the_value_that_of_float32(name, half):
    fun = program_of(name)
    plain, found = products(fun, X, W, B), products(jmp.autocast(fun, half), X, W, B)
    assert len(plain) >= 3
    assert found == [(half, half)] * len(plain)
    expected, result = jax.jit(fun)(X, W, B), jax.jit(jmp.autocast(fun, half))(X, W, B)
    assert jax.tree.map(lambda y: (y.shape, y.dtype), result) == jax.tree.map(
        lambda y: (y.shape, y.dtype), expected
    )
    assert_close(result, expected, half, factor=16)


@pytest.mark.cases(fast=2, slow=3)
@pytest.mark.parametrize("name", CALLS)
def test_every_product_of_the_backward_pass_is_half_and_the_gradients_those_of_float32(name):
    fun = program_of(name)
    plain = jax.value_and_grad(
        lambda *args: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fun(*args))), (0, 1, 2)
    )
    for half, order in (("float16", "inside"), ("bfloat16", "outside")):
        found = products(value_and_grad(fun, half, order), X, W, B)
        assert set(found) == {(half, half)}
        if order == "outside":
            assert len(found) == len(products(plain, X, W, B))
    # The numbers by turns in either order.
    half, order = [("float16", "inside"), ("bfloat16", "outside")][list(CALLS).index(name) % 2]
    (value, grads), (expected, expected_grads) = (
        jax.jit(f)(X, W, B) for f in (value_and_grad(fun, half, order), plain)
    )
    assert [grad.dtype for grad in grads] == [jnp.float32] * 3
    assert_close(value, expected, half, factor=32)
    assert_close(grads, expected_grads, half, factor=32)


@pytest.mark.parametrize("name", CALLS)
def test_calls_stay_what_they_were_and_without_products_in_half_nothing_changes(name):
    fun = program_of(name)
    cast = jmp.autocast(fun)
    kinds = {
        "jit", "scan", "while", "cond", "remat2", "custom_jvp_call", "custom_vjp_call", "shard_map",
    }  # fmt: skip
    count = lambda f: collections.Counter(name for name in primitives(f, X, W, B) if name in kinds)
    plain, ours = count(fun), count(cast)
    if name == "custom_vjp in a custom_jvp rule":  # A rule without forward mode becomes a backward rule.
        plain += collections.Counter(custom_vjp_call=1, custom_jvp_call=-1)
    for kind in kinds - {"jit", "custom_jvp_call", "remat2"}:
        assert ours[kind] == plain[kind], kind
    # A loop computes its element-wise operations again, unless the program says itself what it keeps.
    # A SiLU is one function, which is computed again, and so is a chain of operations.
    activations = name in ("relu and its kin", "vmap of rows")
    assert plain["remat2"] <= ours["remat2"] <= plain["remat2"] + plain["scan"] + activations
    assert ours["custom_jvp_call"] >= plain["custom_jvp_call"]  # A cast that is shared is one as well.
    assert ours["jit"] >= plain["jit"]
    denied = jmp.autocast(fun, deny=["dot_general"])
    assert text(denied, X, W, B) == text(fun, X, W, B)
    assert text(jmp.autocast(cast, "float16"), X, W, B) == text(cast, X, W, B)


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("half", ["float16"])
@pytest.mark.parametrize(
    "name", ["custom_jvp", "jit", "scan with constants", "remat", "cond", "vmap of weights"]
)
def test_forward_mode_and_second_derivatives_work_through(name, half):
    fun = lambda w: jnp.sum(jnp.sin(CALLS[name](X, w, B)))
    direction = jax.random.normal(jax.random.key(0), (8, 8))  # The same in every order of the tests.
    cast = jmp.autocast(fun, half)

    def push(f):
        return jax.jit(lambda w: jax.jvp(f, (w,), (direction,)))(W)

    assert_close(push(cast), push(fun), half, factor=32)
    assert set(products(lambda w: jax.jvp(cast, (w,), (direction,)), W)) == {(half, half)}

    def along(f):
        return lambda w: jax.jvp(jax.grad(f), (w,), (direction,))[1]

    expected = jax.jit(along(fun))(W)
    assert_close(jax.jit(along(cast))(W), expected, half, factor=48)
    assert_close(jax.jit(jmp.autocast(along(fun), half))(W), expected, half, factor=48)
    assert set(products(along(cast), W)) == {(half, half)}


# A jitted function that is used many times stays one


def test_a_jitted_block_used_many_times_is_made_once():
    block = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def fun(x, w):
        x = block(x, w)
        for _ in range(6):
            x = block(x, w)
        return x

    jaxpr = jax.make_jaxpr(jmp.autocast(fun))(X, W)
    calls = [e for e in equations(jaxpr) if e.primitive.name == "jit" and e.params["name"] == "<lambda>"]
    assert len(calls) == 7
    assert len({id(e.params["jaxpr"]) for e in calls}) <= 3  # By the dtypes that go in and out.
    plain = jax.jit(fun).lower(X, W).as_text().count("func.func")
    assert jax.jit(jmp.autocast(fun)).lower(X, W).as_text().count("func.func") <= plain + 2


def test_the_solver_of_a_linear_system_is_float32_and_its_matrix_half():
    def solved(w, b):
        product = lambda v: w @ v
        solver = lambda _, b: w @ b  # Not the inverse: nothing runs it here.
        return lax.custom_linear_solve(product, b, solver, symmetric=True)

    closed = jax.make_jaxpr(jmp.autocast(solved, "float16"))(W, W)
    (system,) = (each for each in equations(closed) if each.primitive.name == "custom_linear_solve")
    parts = {
        name: products(jaxpr_as_fun(part), W, W) for name, part in system.params["jaxprs"]._asdict().items()
    }
    half, full = [("float16", "float16")], [("float32", "float32")]
    assert parts == {"matvec": half, "vecmat": half, "solve": full, "transpose_solve": full}

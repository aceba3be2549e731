"""The law of costs: a program that is twice as long costs at most 2.2 times as much to plan and trace.

Counted in calls of Python functions, in both orders, and not in seconds. And an eager call leaves nothing
behind.
"""

import cProfile
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.laws.cases import ORDERS
from tests.laws.test_found import in_order

WIDTH = 4
W, X = jnp.eye(WIDTH), jnp.ones((2, WIDTH))


def block(w, x):
    scores = jax.nn.softmax((x @ w) @ x.T)
    x = x + scores @ (x @ w)
    return x + jax.nn.gelu(x @ w) @ w


def unrolled(layer):
    def of_length(length):
        def loss(w, x):
            for _ in range(length):
                x = layer(w, x)
            return jnp.mean(x**2)

        return loss

    return of_length


def chain(w, x):
    return jnp.sin(x) * 1.5 + 0.5


def nested(length):
    def loss(w, x):
        def level(depth, x):
            if not depth:
                return jnp.tanh(x @ w)
            return lax.scan(lambda c, _: (level(depth - 1, c), None), x, None, length=2)[0]

        return jnp.mean(level(length, x))

    return loss


def carries(length):
    def loss(w, x):
        step = lambda xs, _: ([jnp.tanh(each @ w) for each in xs], None)
        return jnp.mean(sum(lax.scan(step, [x] * length, None, length=2)[0]))

    return loss


def running_sum(length):
    def loss(w, x):
        kept = [x := jnp.tanh(x @ w) for _ in range(length)]
        return jnp.mean(sum(kept) @ w)

    return loss


PROGRAMS = {
    "element-wise operations": (unrolled(chain), 20),
    "layers": (unrolled(lambda w, x: jnp.tanh(x @ w)), 12),
    "blocks": (unrolled(block), 4),
    "checkpointed blocks": (unrolled(jax.checkpoint(block)), 4),
    "jitted blocks": (unrolled(jax.jit(block)), 4),
    "scans": (unrolled(lambda w, x: lax.scan(lambda c, _: (block(w, c), None), x, None, length=2)[0]), 3),
    "carries of a scan": (carries, 6),
    "a running sum": (running_sum, 8),
}


def calls(fun):
    """How many Python functions a trace of `fun` calls."""
    jax.clear_caches()
    profile = cProfile.Profile(builtins=False)
    gc.disable()
    try:
        profile.runcall(jax.make_jaxpr(fun), W, X)
    finally:
        gc.enable()
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.cases(slow=4)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_twice_the_length_costs_at_most_2_2_times_as_much(name, order):
    of_length, length = PROGRAMS[name]
    once, twice = (calls(in_order(order, of_length(n), "bfloat16")) for n in (length, 2 * length))
    assert twice <= 2.2 * once


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("order", ORDERS)
def test_an_eager_call_leaves_no_objects_behind(order, only_new_garbage):
    loss = unrolled(block)(1)
    grad = in_order(order, loss, "bfloat16")

    def objects():
        gc.collect()
        return len(gc.get_objects())

    for _ in range(2):
        grad(W, X)
    before = objects()
    for _ in range(8):
        grad(W, X)
    # JAX itself keeps one or two for a call; a function has over a hundred.
    assert objects() - before < 8 * 5


@pytest.mark.parametrize("order", ORDERS)
def test_an_array_that_a_function_closes_over_is_freed_with_the_function(order, only_new_garbage):
    """At once, as under plain JAX, and not when Python looks for cycles."""
    gc.disable()
    try:
        data = jnp.ones((2, WIDTH))
        fun = jax.jit(in_order(order, lambda w, x, data=data: jnp.mean(jnp.tanh(x @ w) * data), "bfloat16"))
        fun(W, X)
        reference = weakref.ref(data)
        del data, fun
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("order", ORDERS)
def test_a_custom_rule_that_is_dropped_leaves_no_array_behind(order):
    references = []
    for _ in range(2):
        data = jnp.ones((2, WIDTH))
        act = jax.custom_vjp(lambda x: jnp.tanh(x))
        act.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g, data=data: (g * data,))
        loss = lambda w, x, act=act: jnp.mean(act(x @ w) @ w)
        references.append(weakref.ref(data))
        jax.make_jaxpr(in_order(order, loss, "bfloat16"))(W, X)
        del data, act, loss
    gc.collect()
    assert [reference() for reference in references] == [None, None]

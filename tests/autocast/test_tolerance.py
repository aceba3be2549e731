"""Loops to a tolerance: what the predicate of a `while` loop depends on stays in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import jmp_lite as jmp
from tests.support.halves import each_half
from tests.support.jaxprs import products, text
from tests.support.small_programs import W, X, normal

FULL = ("float32", "float32")
BIASES = normal(4, 8)
CAP = 300


def fixed_point(w, b):
    """The fixed point of a layer, by iteration to a tolerance of float32. Returns the iterations too."""

    def goes_on(state):
        _, residual, count = state
        return (residual > 1e-6) & (count < CAP)

    def step(state):
        x, _, count = state
        new = jnp.tanh(x @ (0.4 * w) + b)
        return new, jnp.max(jnp.abs(new - x)), count + 1

    x, _, count = lax.while_loop(goes_on, step, (jnp.zeros_like(b), jnp.float32(jnp.inf), 0))
    return x, count


def newton(w, b):
    """The root of a system, by Newton's method. The loop stops by a flag that it carries."""

    def step(state):
        x, _, count = state
        value = x + 0.1 * jnp.tanh(w @ x) - b
        slope = jnp.eye(8) + 0.1 * (1 - jnp.tanh(w @ x) ** 2)[:, None] * w
        change = jnp.linalg.solve(slope, value[:, None])[:, 0]
        return x - change, jnp.linalg.norm(change) < 1e-5, count + 1

    start = jnp.zeros(8), False, 0
    x, _, count = lax.while_loop(lambda s: ~s[1] & (s[2] < CAP), step, start)
    return x, count


@pytest.mark.cases(fast=1, slow=3)
@each_half
@pytest.mark.parametrize(("solve", "b"), [(fixed_point, BIASES), (newton, BIASES[0])])
def test_a_loop_to_a_tolerance_takes_the_steps_of_float32(solve, b, half):
    found, count = jax.jit(jmp.autocast(solve, half))(W, b)
    expected, steps = jax.jit(solve)(W, b)
    assert int(count) == int(steps) < 60
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap, jax.checkpoint], ids=["jit", "vmap", "checkpoint"])
def test_the_products_of_the_solver_stay_float32_and_those_around_it_do_not(wrap):
    def program(w, b):
        x = wrap(lambda b: fixed_point(w, b[None] if b.ndim == 1 else b)[0])(b @ w)
        return x.reshape(b.shape) @ w

    half = ("bfloat16", "bfloat16")
    assert products(jmp.autocast(program), W, BIASES) == [half, FULL, half]


def test_explain_names_the_predicate_and_the_line():
    report = jmp.explain(jmp.autocast(fixed_point))(W, BIASES)
    (product,) = [operation for operation in report.operations if operation.name == "dot_general"]
    assert product.reason == "a loop decides by it whether to go on, or what to keep"
    assert product.inputs == ("float32[4,8]", "float32[8,8]")
    assert "test_tolerance.py" in product.source
    assert product in report.in_float32()


def body_of(step):
    return lambda w, x: lax.while_loop(lambda s: s[1] < 3, lambda s: (step(s[0], w), s[1] + 1), (x, 0))[0]


def decode(w, x):
    """Decodes until an end token, whose integer the predicate reads."""

    def step(state):
        x, _, count = state
        logits = x @ w
        return jnp.tanh(logits), jnp.argmax(logits, axis=-1), count + 1

    return lax.while_loop(lambda s: jnp.any(s[1] != 0) & (s[2] < 5), step, (x, jnp.ones(4, int), 0))[0]


@pytest.mark.parametrize(
    "program",
    [
        body_of(lambda x, w: jnp.tanh(x @ w)),
        lambda w, x: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w), x),
        lambda w, x: lax.fori_loop(0, x.shape[0] + jnp.int32(2), lambda i, x: jnp.tanh(x @ w), x),
        lambda w, x: lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0],
        decode,
    ],
    ids=["while", "fori_loop", "dynamic fori_loop", "scan", "decode"],
)
def test_a_loop_that_counts_is_in_half(program):
    assert products(jmp.autocast(program), W, X) == [("bfloat16", "bfloat16")]
    reasons = {operation.reason for operation in jmp.explain(jmp.autocast(program))(W, X).operations}
    assert not any("predicate" in reason for reason in reasons)


def test_only_what_the_predicate_depends_on_stays_float32():
    def program(w, x):
        """The predicate reads a time, whose steps no product makes."""

        def step(state):
            time, x = state
            return time + 0.25, jnp.tanh(x @ w)

        return lax.while_loop(lambda s: s[0] < 1.0, step, (0.0, x))[1]

    assert products(jmp.autocast(program), W, X) == [("bfloat16", "bfloat16")]


def test_products_in_the_condition_in_a_scan_and_in_a_branch_of_the_body_count():
    def inner(x, w):
        x, _ = lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=2)
        return lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x)

    def program(w, x):
        goes_on = lambda s: (jnp.abs(s[0] @ w).max() > 1e-3) & (s[1] < 9)
        return lax.while_loop(goes_on, lambda s: (0.3 * inner(s[0], w), s[1] + 1), (x, 0))[0]

    assert products(jmp.autocast(program), W, X) == [FULL] * 3
    assert text(jmp.autocast(lambda w, x: program(w, x)), W, X).count("bf16") == 0


def to_a_tolerance(step, x):
    """Repeats a step until its change is small."""

    def body(state):
        new = step(state[0])
        return new, jnp.abs(new - state[0]).max(), state[2] + 1

    goes_on = lambda state: (state[1] > 1e-5) & (state[2] < CAP)
    return lax.while_loop(goes_on, body, (x, jnp.float32(jnp.inf), 0))[0]


HALF = ("bfloat16", "bfloat16")


def in_scan(fun):
    """A loop around that decides nothing, as over the steps of an epoch."""

    def summed(*args):
        return lax.scan(lambda carry, _: (carry + fun(*args[:-1], carry), None), args[-1], None, 3)[0]

    return summed


@pytest.mark.parametrize("around", [lambda fun: fun, in_scan])
@pytest.mark.parametrize("call", [lambda fun: fun, jax.jit, jax.checkpoint])
def test_what_no_iteration_changes_is_rounded_as_it_is_in_front_of_the_loop(call, around):
    def program(w, x):
        costs = call(lambda x: jnp.tanh(x @ w))
        return to_a_tolerance(lambda z: 0.1 * jnp.tanh(z @ w) + costs(x), x) + costs(x)

    of_costs, of_carry = HALF, FULL
    assert sorted(products(jmp.autocast(around(program)), W, X)) == [of_costs, of_costs, of_carry]


def test_a_constant_of_an_inner_loop_that_an_outer_loop_carries_is_decided_by():
    def program(w, x):
        def inner(z):
            return to_a_tolerance(lambda y: 0.1 * y + jnp.tanh(z @ w), z)

        return to_a_tolerance(lambda z: 0.1 * inner(z), x)

    assert products(jmp.autocast(program), W, X) == [FULL]


def test_what_a_scan_reads_is_no_constant():
    def program(w, xs):
        def step(state, x):
            new = 0.5 * state + jax.jit(lambda x, w: jnp.tanh(x @ w))(x, w)
            return jnp.where(jnp.abs(new - state).max() < 1.0, new, state), None

        return lax.scan(step, jnp.zeros_like(X), xs)[0]

    assert products(jmp.autocast(program), W, jnp.stack([X, X])) == [FULL]


def test_a_grouped_matmul_that_a_loop_decides_by_stays_float32():
    groups = jnp.array([1, 2, 1])
    stack = jnp.stack([W, W, W])

    def program(stack, x):
        return to_a_tolerance(lambda z: 0.1 * jnp.tanh(lax.ragged_dot(z, stack, groups)), x)

    assert products(jmp.autocast(program), stack, X) == [FULL]
    # Its derivative is that of the program.
    jax.eval_shape(lambda x: jax.jvp(lambda x: jmp.autocast(program)(stack, x), (x,), (x,)), X)


def test_what_a_callback_gives_in_each_iteration_is_no_constant():
    def program(w, x):
        def step(x, _):
            draw = io_callback(lambda: np.ones((4, 8), np.float32), jax.ShapeDtypeStruct((4, 8), "float32"))
            new = draw @ w
            return jnp.where(jnp.max(new) < jnp.max(x), new, x), None

        return lax.scan(step, x, length=2)[0]

    assert products(jmp.autocast(program), W, X) == [FULL]


def test_a_rule_that_gives_half_brings_the_loop_to_half():
    def program(w, b):
        with jax.named_scope("solver"):
            return fixed_point(w, b)[1]

    assert products(jmp.autocast(program), W, BIASES) == [FULL]
    ruled = jmp.autocast(program, rules={"solver": "bfloat16"})
    assert products(ruled, W, BIASES) == [("bfloat16", "bfloat16")]

"""`find_nonfinite` inside operations that run jaxprs: loops, branches, rematerialization, shards."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_lite.diagnostics import doctor, find_nonfinite
from tests.support.causes import cause_of, w, x


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
def test_the_iteration_of_a_scan(reverse):
    def loss(w, x):
        def body(carry, step):
            return carry + 0 * step, jnp.sum(jnp.exp(w) / (step - 5.0))

        return jnp.sum(lax.scan(body, 0.0, jnp.arange(9.0), reverse=reverse)[1])

    cause = cause_of(loss, w, x)
    assert cause.operation == "div"
    assert cause.operand_ranges[1] == (0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
def test_the_first_iteration_of_a_growing_carry(reverse):
    step = lambda c, _: (c * 1e10 + w.sum() * 0, None)
    grow = lambda w, x: w[0, 0] * 0 + lax.scan(step, x[0, 3] + 2, None, length=9, reverse=reverse)[0]
    cause = cause_of(grow, w, x - x[0, 3] - 1)
    assert cause.operation == "mul"
    assert [each.operation for each in find_nonfinite(grow)(w, x - x[0, 3] - 1).others] == []
    assert cause.operand_ranges[0] == (pytest.approx(1e30), pytest.approx(1e30))


@pytest.mark.slow
def test_a_scan_in_a_scan():
    def loss(w, x):
        def inner(c, j):
            i, total = c
            return (i, total + 1.0 / ((i - 2) ** 2 + (j - 1) ** 2)), None

        def outer(total, i):
            return lax.scan(inner, (i, total), jnp.arange(3.0))[0][1], None

        return lax.scan(outer, jnp.sum(w), jnp.arange(4.0))[0]

    cause = cause_of(loss, w, x)
    assert (cause.operation, cause.operand_ranges[1]) == ("div", (0.0, 0.0))


def test_a_batch_of_while_loops_stops_each_on_its_own():
    def one(limit):
        return lax.while_loop(lambda c: c < limit, lambda c: c * 1e4, 1.0)

    limits = lax.stop_gradient(jnp.array([10.0, 1e30]))
    loss = lambda w, x: jnp.sum(w) * jnp.sum(jax.vmap(one)(limits + 0 * x[0, 0])) * 1e-30
    assert find_nonfinite(loss)(w, x).is_finite


def test_what_remat_computes_again_is_named_as_such():
    def block(y):
        with jax.named_scope("inside"):
            return jnp.sin(jnp.exp(100 * y @ w))

    def loss(w, x):
        with jax.named_scope("block"):
            return jnp.sum(jax.checkpoint(block)(x * 10 + w.sum()))

    report = find_nonfinite(loss)(w, x)
    assert (report.cause.operation, report.cause.direction) == ("exp", "forward")
    again = [each for each in report.others if each.direction == "recomputed"]
    assert again[0].operation == "exp"
    assert again[0].module == report.cause.module == "block/inside"


def test_what_a_backward_rule_computes_again_is_no_gradient():
    @jax.custom_vjp
    def layer(y):
        return y

    layer.defvjp(lambda y: (y, y), lambda y, g: (g * (y.astype(jnp.float16) * 6e4 * 6).astype(jnp.float32),))
    report = find_nonfinite(lambda w, x: jnp.sum(layer(w)), loss_scale=2.0**4)(w, x)
    assert report.cause.direction == "backward"
    assert report.fitting_scale is None
    assert [trial.dtype for trial in report.tried] == ["bfloat16"]


def newton(weight, a, half):
    """A square root to a float32 tolerance, with iterates in half if `half` is a half dtype."""
    far = lambda y: jnp.abs(y.astype(jnp.float32) ** 2 - a) > 1e-5
    better = lambda y: (y + a.astype(half) / y) * jnp.asarray(0.5, half)
    root = lax.while_loop(far, better, a.astype(half))  # here
    return jnp.sum(weight) * root.astype(jnp.float32)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("nested", [False, True])
def test_a_loop_that_does_not_end_in_half_is_stopped_and_named(nested):
    def loss(weight, half):
        step = lambda total, a: (total + newton(weight, lax.stop_gradient(a), half), None)
        if nested:
            return lax.scan(step, 0.0, jnp.array([2.0, 3.0]))[0]
        return newton(weight, jnp.float32(2), half)

    weight = jnp.ones(3)
    report = find_nonfinite(lambda w: loss(w, jnp.bfloat16))(weight)
    lines, first = inspect.getsourcelines(newton)
    (here,) = [first + number for number, line in enumerate(lines) if line.endswith("# here\n")]
    (line,) = report.cut
    assert f"test_calls.py:{here}" in line
    assert "Not examined: what follows a loop of more than 10,000 steps, " in " ".join(str(report).split())
    diagnosis = doctor(lambda w: loss(w, jnp.bfloat16), device=None)(weight)
    assert [each for each in diagnosis.findings if each.severity != "speed"] == []
    assert diagnosis.skipped["the values in half"].startswith("It has a loop of more than 10,000 steps, ")
    assert find_nonfinite(lambda w: loss(w, jnp.float32))(weight).cut == ()


def test_a_loop_under_vmap_that_does_not_end_is_stopped():
    def roots(w):
        return jax.vmap(lambda a: newton(w, a, jnp.bfloat16))(jnp.array([2.0, 4.0]))

    report = find_nonfinite(lambda w: jnp.sum(roots(w)))(jnp.ones(3))
    assert len(report.cut) == 1


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("before", [False, True])
def test_a_counted_loop_of_12000_steps_is_no_finding_and_an_inf_before_it_is_one(before):
    def loss(w, steps):
        start = jnp.log(w[0] * 0) if before else w[0] * 0
        total = lax.fori_loop(0, steps, lambda _, total: total + 1, lax.stop_gradient(start))
        return jnp.sum(w) + total + 1 / (total - 10_000)  # The loop is stopped at 10,000.

    diagnosis = doctor(loss, device=None)(jnp.ones(4), jnp.int32(12_000))
    assert [each.what.split()[2] for each in diagnosis.findings] == (["log"] if before else [])
    assert diagnosis.skipped["the values in half"].startswith("It has a loop of more than 10,000 steps, ")
    assert "in float32" not in diagnosis.skipped["the values in half"]


def nonfinite_in_a_while(step, *start, large=False):
    def body(state):
        count, *values = state
        for _ in range(400 if large else 0):  # Too large to be measured inside.
            values = [jnp.flip(value) for value in values]
        return count + 1, *step(*values)

    def loss(w):
        state = lax.while_loop(lambda state: state[0] < 9, body, (0, *map(jnp.float32, start)))
        return jnp.sum(w) + sum(map(jnp.sum, state[1:]))

    return find_nonfinite(loss)(w)


def test_a_nan_inside_of_a_while_loop_is_found():
    report = nonfinite_in_a_while(lambda a: [jnp.sqrt(a - 1)], [5.0, 9.0])  # here
    assert (report.cause.what, report.cause.operation) == ("NaN", "sqrt")
    assert report.cause.operand_ranges[0][0] == -1  # After 2, 1 and 0.
    _, first = inspect.getsourcelines(test_a_nan_inside_of_a_while_loop_is_found)
    assert f"test_calls.py:{first + 1}" in report.cause.line
    assert report.cause.way[0][0] == "NaN from reduce_sum"


def test_an_inf_inside_of_a_while_loop_and_the_nan_that_it_becomes():
    step = lambda a, b: [a * 1e30, b + (a - a)]
    report = nonfinite_in_a_while(step, 1.0, 2.0)
    assert (report.first_inf.operation, report.first_nan.operation) == ("mul", "sub")
    assert report.cause is report.first_inf


def test_a_best_loss_that_starts_as_inf_hides_no_nan():
    step = lambda best, a: [jnp.minimum(best, jnp.abs(a)), jnp.log(a - 1)]
    report = nonfinite_in_a_while(step, jnp.inf, 9.0)
    assert report.first_nan.operation == "log"


def test_what_enters_a_while_loop_without_an_iteration_leaves_it():
    def loss(w):
        return jnp.sum(w * lax.while_loop(lambda a: a < 0, jnp.sin, jnp.log(jnp.float32(0))))

    assert find_nonfinite(loss)(w).cause.operation in ("log", "constant")


def test_the_inside_of_a_large_while_loop_is_not_measured_and_the_page_says_so():
    report = nonfinite_in_a_while(lambda a: [jnp.sqrt(a - 1)], [5.0, 9.0], large=True)
    assert report.cause.operation == "while"
    assert "    Where inside of the loop was not found: examine its body alone" in str(report)


@pytest.mark.slow
def test_an_inf_that_enters_the_backward_pass_of_a_scan_begins_outside_of_it():
    def loss(w, x):
        rows = lax.scan(lambda carry, row: (jnp.tanh(carry @ w) + row, carry), x[0], x)[1]
        return jnp.sqrt(jnp.sum((rows - rows[:1]) ** 2) * 0)  # Its derivative is inf.

    report = find_nonfinite(loss)(w, x)
    assert (report.loss, report.is_finite) == (0, False)
    assert (report.cause.what, report.cause.operation) == ("inf", "div")

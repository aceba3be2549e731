"""`compare_precision` and `doctor` on functions with half values of their own."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_lite as jmp
import jmp_lite.linen
from jmp_lite.diagnostics import compare_precision, doctor, find_nonfinite

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.

X = jax.random.normal(jax.random.key(0), (8, 16))
F16 = jmp.get_policy("params=float32,compute=float16,output=float32")
HALF = jnp.float16


def sum_of_ones(w):
    with jax.named_scope("count"):
        ones = (w * jnp.ones(10_000)).astype(HALF)
        total, _ = lax.scan(lambda total, one: (total + one, None), HALF(0), ones)
    return total.astype(jnp.float32) / 10_000


def equal_rows(params):
    table = params["table"].astype(HALF)
    with jax.named_scope("embed"):
        rows = table[jnp.zeros(20_000, jnp.int32)]
    return jnp.sum(rows.astype(jnp.float32)) * 1e-4


ROWS = {"table": jnp.ones((4, 2))}


def test_a_sum_in_half_that_stops_growing_is_found():
    assert float(sum_of_ones(jnp.float32(1))) == pytest.approx(0.2048)
    report = compare_precision(sum_of_ones)(jnp.float32(1))
    assert report.loss == pytest.approx(1.0)
    assert report.half.loss == pytest.approx(0.7952)
    assert report.modules[0].module == "count"
    assert all("test_own_casts.py" in line for line in report.kept)  # The cast that the loop adds up.
    assert report.rules == {}
    assert report.with_rules.loss < 1e-6
    diagnosis = doctor(sum_of_ones, device=None)(jnp.float32(1))
    assert [finding.severity for finding in diagnosis.findings] == ["accuracy"]
    assert "8.0e-01 count" in diagnosis.findings[0].where
    assert "test_own_casts.py" in diagnosis.findings[0].where


def test_the_gradients_of_a_loop_are_added_in_the_order_of_the_program():
    """In bfloat16 another order of this sum, such as that of `jax.checkpoint`, halves the error."""

    def loss_of(dtype):
        def loss(w):
            kernel = jnp.exp(-(jnp.tanh(X @ w) ** 2).astype(dtype) * 20)

            def iterate(carry, _):
                _, v = carry
                u = (1 / 8) / (kernel @ v)
                return (u, (1 / 8) / (kernel.T @ u)), None

            ones = jnp.ones(8, dtype)
            (u, v), _ = lax.scan(iterate, (ones, ones), length=10)
            return jnp.sum((u[:, None] * kernel * v).astype(jnp.float32) * X[:, :8])

        return loss

    w = 0.3 * jax.random.normal(jax.random.key(1), (16, 8))
    half, full = (jax.grad(loss_of(dtype))(w) for dtype in (jnp.bfloat16, jnp.float32))
    error = float(jnp.linalg.norm(half - full) / jnp.linalg.norm(full))
    assert compare_precision(loss_of(jnp.bfloat16))(w).half.gradients == pytest.approx(error, rel=0.02)


def test_a_cast_of_constants_to_a_dtype_that_is_an_argument_is_mended():
    """The noise schedule of a diffusion model, whose first steps bfloat16 rounds to 1."""

    def loss_of(dtype):
        def loss(w, t, x):
            rates = jnp.linspace(1e-4, 2e-3, 200).astype(dtype)
            kept = jnp.cumprod(1 - rates).astype(jnp.float32)[t]
            return jnp.mean((w * jnp.sqrt(kept) * x - 1) ** 2 / (1 - kept + 1e-3))

        return loss

    args = jnp.float32(0.9), jnp.arange(100), jax.random.normal(jax.random.key(0), (100,))
    report = compare_precision(loss_of(jnp.bfloat16))(*args)
    assert report.half.gradients > 0.5
    assert report.change == f"use float32 instead of bfloat16 on line {report.kept[0].partition(' ')[0]}"
    assert ".py:" in report.change
    half, full = (jax.value_and_grad(loss_of(dtype))(*args) for dtype in (jnp.bfloat16, jnp.float32))
    assert abs(half[1] - full[1]) > 0.5 * abs(full[1])
    assert report.with_rules.gradients < 1e-6  # The program without that cast is the one in float32.


def test_gradients_that_are_summed_in_half_are_found():
    np.testing.assert_allclose(jax.grad(equal_rows)(ROWS)["table"][0], 0.25, rtol=1e-3)
    diagnosis = doctor(equal_rows, device=None)(ROWS)
    (finding,) = diagnosis.findings
    assert "8.75e-01 in the gradients" in finding.what
    assert "embed" in finding.where
    assert "use float32 instead of float16 on line " in finding.advice
    assert "test_own_casts.py" in finding.advice
    assert diagnosis.precision.with_rules.gradients < 1e-3


class Net(nn.Module):
    """Two layers; the second one has large weights."""

    dtype: type | None = None

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(16, name="stem", dtype=self.dtype)(x))
        return nn.Dense(4, name="head", dtype=self.dtype)(x)


NET = Net()
PARAMS = NET.init(jax.random.key(0), X)
BIG = jax.tree_util.tree_map_with_path(lambda path, x: x * 1e6 if path[1].key == "head" else x, PARAMS)


def mean(y):
    return jnp.mean((y.astype(jnp.float32) / 1e6) ** 2)


def test_a_model_under_a_policy_gets_a_rule_of_its_policy():
    model = jmp_lite.linen.with_policy(NET, F16)
    loss = lambda params, x: mean(model.apply(params, x))
    report = compare_precision(loss)(BIG, X)
    assert report.half.loss == np.inf
    assert "policy.with_rules({'head': 'float32'})" in report.advice()
    assert report.rules == {}
    fixed = jmp_lite.linen.with_policy(NET, F16.with_rules({"head": "float32"}))
    assert np.isfinite(float(mean(fixed.apply(BIG, X))))


def test_layers_with_a_dtype_of_their_own_are_told_apart():
    model = Net(HALF)
    report = compare_precision(lambda params, x: mean(model.apply(params, x)))(BIG, X)
    assert report.dtype == jnp.dtype(HALF).name
    assert {"Net/stem", "Net/head"} <= set(report.names)
    assert np.isfinite(next(row.own.loss for row in report.modules if row.module == "Net/stem"))
    assert next(row.own.loss for row in report.modules if row.module == "Net/head") == np.inf
    assert "dtype=jnp.float32 in Net/head" in report.advice()


def test_everything_in_half_is_the_program_itself():
    model = Net(jnp.bfloat16)
    square = lambda y: jnp.mean(y.astype(jnp.float32) ** 2)
    loss = lambda params, x: square(model.apply(params, x))
    report = compare_precision(loss, loss_scale=2.0**10, tolerance=0)(PARAMS, X)
    run = lambda f: jax.jit(jmp.value_and_grad(f, jmp.StaticLossScale(2.0**10)))(PARAMS, X)
    (half, grads), (full, exact) = run(loss), run(lambda params, x: square(NET.apply(params, x)))
    flat = lambda tree: np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
    error = np.linalg.norm(flat(grads) - flat(exact)) / np.linalg.norm(flat(exact))
    assert report.loss == pytest.approx(float(full))
    assert report.half.gradients == pytest.approx(error, rel=0.05)
    assert report.half.loss == pytest.approx(abs(float(half - full)) / float(full), rel=0.05, abs=1e-5)
    assert report.rest.gradients == report.rest.loss == 0


def test_a_function_of_autocast_with_casts_of_its_own_has_both():
    """autocast has `hidden` in half already. Its cast rounds as soon as a rule has it in float32."""

    def loss(params, x, dtype=HALF, of_sum=HALF):
        with jax.named_scope("stem"):
            hidden = jnp.tanh(x @ params["stem"]).astype(dtype)
        with jax.named_scope("sums"):
            hidden = lax.scan(lambda total, row: (total + row, None), jnp.zeros(16, of_sum), hidden)[0]
        with jax.named_scope("head"):
            return jnp.mean(hidden.astype(jnp.float32)[None] @ params["head"])

    params = {"stem": 0.1 * X.T @ X, "head": jnp.ones((16, 4))}
    report = compare_precision(jmp.autocast(loss, HALF), tolerance=0.0)(params, X)
    assert set(report.names) == {"stem", "head", "stem (its own casts)", "sums"}
    assert set(report.rules) == {"/stem", "/head"}
    assert "use float32 instead of float16 on line" in report.change
    start = inspect.getsourcelines(loss)[1]
    assert f"test_own_casts.py:{start + 2}:" in report.change  # The cast.
    assert f"test_own_casts.py:{start + 4}:" in report.change  # Where the carry starts.
    assert report.with_rules.gradients == report.rest.gradients == 0
    exact = jax.jit(jax.grad(lambda params: loss(params, X, jnp.float32, jnp.float32)))(params)

    def grads(dtype):
        mended = jmp.autocast(lambda *args: loss(*args, dtype, jnp.float32), HALF, rules=report.rules)
        return jax.jit(jax.grad(mended))(params, X)

    assert not np.array_equal(grads(HALF)["head"], exact["head"])
    jax.tree.map(np.testing.assert_array_equal, grads(jnp.float32), exact)
    assert all(bool(row.pattern) != bool(row.lines) for row in report.modules)


def half_product_that_overflows(w, x, dtype=HALF):
    y = x.astype(HALF) @ w.astype(dtype)
    return jnp.mean(y.astype(jnp.float32) ** 2) * 1e-9


def test_autocast_casts_a_half_product_whose_own_casts_are_left_out_unless_a_rule_selects_it():
    w, x = 300 * jax.random.normal(jax.random.key(1), (16, 4)), 300 * X
    exact = half_product_that_overflows(w, x, jnp.float32)
    (trial, *_) = find_nonfinite(jmp.autocast(half_product_that_overflows, HALF))(w, x).remedies
    assert dict(trial.rules) == {"/w": "float32"}
    assert len(trial.lines) == 1  # One operand in float32 is enough.

    def mended(w, x):
        return half_product_that_overflows(w, x, jnp.float32)

    assert jmp.autocast(mended, HALF, rules=trial.rules)(w, x) == pytest.approx(float(exact), rel=1e-6)
    assert jmp.autocast(mended, HALF)(w, x) == np.inf


def test_a_product_of_a_half_and_a_float32_operand_is_one_that_autocast_casts():
    """No rule selects the second product: its weights are computed outside of all scopes."""

    def loss(w, x):
        with jax.named_scope("stem"):
            y = (x @ w).astype(HALF)
        return jnp.mean((y @ (w.T * 3e4)).astype(jnp.float32) ** 2) * 1e-9

    w = jax.random.normal(jax.random.key(1), (16, 4))
    assert jmp.autocast(loss, HALF)(w, X) == np.inf
    tried = find_nonfinite(jmp.autocast(loss, HALF))(w, X).tried
    assert [trial.dtype for trial in tried if trial.helps] == ["bfloat16"]


def test_an_argument_in_half_needs_the_rule_of_its_name_too():
    def loss(p, head, x):
        with jax.named_scope("stem"):
            y = jnp.tanh(x @ p)
        return jnp.mean(((300 * y).astype(head.dtype) @ head).astype(jnp.float32) ** 2) * 1e-9

    p, head = (
        jax.random.normal(jax.random.key(1), (16, 8)),
        300 * jax.random.normal(jax.random.key(2), (8, 4)),
    )
    head = head.astype(HALF)
    (trial, *_) = find_nonfinite(jmp.autocast(loss, HALF))(p, head, X).remedies
    assert trial.arguments == ("head",)
    assert "/head" in trial.rules
    head = head.astype(jnp.float32)
    assert jmp.autocast(loss, HALF)(p, head, X) == np.inf
    mended = jmp.autocast(loss, HALF, rules=trial.rules)(p, head, X)
    assert mended == pytest.approx(float(loss(p, head, X)), rel=1e-2)


@pytest.mark.parametrize("is_under_autocast", [False, True], ids=["own", "autocast"])
def test_the_cast_of_a_backward_rule_is_mended_at_its_own_line(is_under_autocast):
    @jax.custom_vjp
    def square(x):
        return x * x

    def backward(x, g):
        h = x.astype(HALF) * 300
        return (2 * g * (h * h).astype(jnp.float32) / (x * 90_000),)

    square.defvjp(lambda x: (x * x, x), backward)

    def loss(w, x):
        half = (lambda a: a) if is_under_autocast else (lambda a: a.astype(HALF))
        with jax.named_scope("stem"):
            h = half(x) @ half(w)
        return jnp.mean(square(h.astype(jnp.float32)))

    fun = jmp.autocast(loss, HALF) if is_under_autocast else loss
    w = jax.random.normal(jax.random.key(1), (16, 4))
    assert not bool(jnp.isfinite(jax.grad(fun)(w, X)).all())
    cast = f":{backward.__code__.co_firstlineno + 1}:12"

    def check(report, is_written=True):
        """The cast of the rule is named, or no line is: neither to mend it, nor not to."""
        assert report.cause is not None
        lines = [trial.lines for trial in report.tried if not trial.dtype and trial.helps]
        assert [cast in own[0] for own in lines] == [True] * is_written
        assert len(report.tried) == 1 + is_written

    def step(w, x):
        return w - 1e-3 * jax.grad(fun)(w, x)

    check(find_nonfinite(fun)(w, X))
    # What an autocast inside has in half cannot be written.
    check(find_nonfinite(step, value_and_grad_fn=None)(w, X), not is_under_autocast)
    check(find_nonfinite(lambda w, x: 2.0 * fun(w, x))(w, X), not is_under_autocast)
    page = doctor(fun, device=None)(w, X)
    assert [finding.severity for finding in page.findings] == ["not finite"]


def test_a_number_that_is_converted_to_half_stays_rounded_until_its_own_line_is_mended():
    def loss(w, x, dtype=HALF):
        g = (w * x).astype(dtype)
        norm = jnp.sqrt(jnp.sum(g**2, -1) + jnp.float16(1e-8))
        return jnp.mean((norm.astype(jnp.float32) * 1e4 - 1) ** 2)

    w = jnp.full((16,), 1e-5)
    (trial, *_) = find_nonfinite(loss)(w, X).remedies
    start = inspect.getsourcelines(loss)[1]
    rows = {line.split(" ")[0].split(":")[1] for line in trial.lines}
    assert rows == {str(start + 1), str(start + 2)}
    exact = jnp.mean((jnp.sqrt(jnp.sum((w * X) ** 2, -1) + 1e-8) * 1e4 - 1) ** 2)
    assert float(loss(w, X, jnp.float32)) > 2 * float(exact)  # The line of the cast alone.


def test_the_number_beside_a_function_of_jax_on_its_line_in_bfloat16():
    """The function computes in float32 with a zero of its own, which is no half number."""

    def loss(w, x):
        q = jax.nn.softmax(x @ w).astype(HALF) + jnp.float16(1e-8)
        return -jnp.mean(jnp.log(q[:, 0].astype(jnp.float32)))

    w = jax.random.normal(jax.random.key(1), (16, 8))
    report = find_nonfinite(loss)(w, 10 * X)
    assert [trial.helps for trial in report.tried] == [True, True]


def test_both_branches_of_a_cond_are_mended():
    def loss(w, x, t):
        scale = lax.cond(
            t > 1000,
            lambda t: jnp.minimum(t.astype(jnp.float16) * 0.1 / 20_000.0, 1.0),
            lambda t: jnp.zeros((), jnp.float16),
            t,
        )
        return jnp.mean((x @ w) ** 2) * scale.astype(jnp.float32)

    w = jax.random.normal(jax.random.key(1), (16, 4))
    (trial, *_) = find_nonfinite(loss)(w, X, jnp.int32(90_001)).remedies
    start = inspect.getsourcelines(loss)[1]
    rows = {line.split(" ")[0].split(":")[1] for line in trial.lines}
    assert rows == {str(start + 3), str(start + 4)}


def test_a_product_of_half_values_outside_of_all_scopes_is_cast_again():
    def loss(w, x):
        q = (x @ w * 40.0).astype(HALF)
        return jnp.mean((jax.nn.softmax((q @ q.T).astype(jnp.float32) * 1e-4) @ x - 1.0) ** 2)

    w = jax.random.normal(jax.random.key(1), (16, 16))
    tried = find_nonfinite(jmp.autocast(loss, HALF))(w, X).tried
    assert [trial.dtype for trial in tried if trial.helps] == ["bfloat16"]


def test_a_broadcast_of_an_operator_is_no_cast_of_the_expression_that_begins_there():
    """The angles of rotary positions: one cast is enough, and the other one may stay."""

    def loss(w, positions, y):
        rates = 1.0 / 100.0 ** (jnp.arange(8) / 8.0)
        angles = positions.astype(jnp.float16)[:, None] * rates.astype(jnp.float16)
        features = jnp.cos(angles.astype(jnp.float32)[:, None] - angles.astype(jnp.float32)[None])
        return jnp.mean((features @ w - y) ** 2)

    positions, y = 3000 + 3 * jnp.arange(16), jax.random.normal(jax.random.key(1), (16, 16))
    page = doctor(loss, device=None)(jax.random.normal(jax.random.key(0), (8,)), positions, y)
    assert page.precision.change.count("test_own_casts.py:") == 1


def test_a_gradient_that_is_lost_behind_an_overflow_is_no_harmless_overflow():
    def loss(p, x):
        h = x.astype(HALF)
        scale = lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5)
        return jnp.mean(((h * scale).astype(jnp.float32) @ p["a"] + x @ p["b"] - 1.0) ** 2)

    p = {name: 0.1 * jax.random.normal(jax.random.key(n), (16, 4)) for n, name in enumerate("ab")}
    x = X * jnp.where(jnp.arange(8) < 6, 300.0, 30.0)[:, None]
    report = find_nonfinite(loss)(p, x)
    assert report.cause is not None
    assert report.cause.end.startswith("rsqrt")
    assert report.harmless == ()


def test_a_remedy_of_a_loss_near_zero_says_so():
    def loss(w, x):
        return jnp.sum(jnp.exp((x @ w).astype(HALF)).astype(jnp.float32) * x[:, :4]) * 1e-5

    def shifted(w, x):
        return loss(w, x) - jnp.asarray(EXACT, jnp.float32)

    w = 2 * jax.random.normal(jax.random.key(1), (16, 4))
    EXACT = float(jnp.sum(jnp.exp(X @ w) * X[:, :4]) * 1e-5) * (1 - 1e-5)
    trials = [trial for trial in find_nonfinite(shifted)(w, X).tried if trial.helps]
    assert any("of a loss near zero" in str(trial) for trial in trials), list(map(str, trials))


def test_a_function_without_half_values_has_no_modules():
    report = compare_precision(lambda w: jnp.sum(jnp.sin(w)))(X)
    assert report.names == report.modules == ()
    assert "No value of this function is in float16" in str(report)


@pytest.mark.slow
def test_the_gradient_of_a_value_that_a_scan_reads_is_summed_in_the_dtype_of_the_value():
    """In bfloat16 the sum of 2,000 gradients stops growing, whatever else is in float32."""

    def loss(w, xs, dtype=jnp.bfloat16):
        p = w.astype(dtype)
        body = lambda total, x: (total + jnp.sum(jnp.sin(x @ p)).astype(jnp.float32), None)
        return lax.scan(body, jnp.zeros(()), xs.astype(jnp.bfloat16))[0] / 1000

    keys = jax.random.split(jax.random.key(0), 2)
    args = 0.1 * jax.random.normal(keys[0], (6, 8)), 1 + 0.1 * jax.random.normal(keys[1], (2000, 6))
    half, full = jax.grad(loss)(*args), jax.grad(loss)(*args, jnp.float32)
    measured = float(jnp.linalg.norm(half - full) / jnp.linalg.norm(full))
    assert measured > 0.5
    report = compare_precision(loss)(*args)
    assert report.modules[0].own.gradients == pytest.approx(measured, rel=0.05)
    assert report.kept is not None
    assert len(report.kept) == 1
    assert report.with_rules is not None
    assert report.with_rules.gradients < 0.01

"""Programs on which a diagnosis must not fail: it is asked just when something is wrong."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from jmp_lite.diagnostics import compare_precision, doctor, find_nonfinite, profile_ranges
from jmp_lite.diagnostics._precision.flags import FlaggedProgram

F16, F32 = jnp.float16, jnp.float32
X, W = jnp.ones((3, 4)), jnp.eye(4)
TOOLS = {
    "find_nonfinite": find_nonfinite,
    "compare_precision": compare_precision,
    "profile_ranges": profile_ranges,
    "doctor": lambda fun: doctor(fun, device=None),
}
tools = pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)


def half_product(w, x):
    return (x.astype(F16) @ w.astype(F16)).astype(F32)


@pytest.mark.cases(fast=1, slow=2)
@tools
@pytest.mark.parametrize("number", [2.0, {"t": 2.0}], ids=["alone", "in a tree"])
def test_a_python_number_among_the_parameters(tool, number):
    """`jax.value_and_grad` differentiates it as an array."""

    def loss(params, x):
        (t,) = jax.tree.leaves(params)
        return jnp.mean((x.astype(F16) * t).astype(F32) * half_product(W, x))

    assert str(tool(loss)(number, X)) == str(tool(loss)(jax.tree.map(jnp.asarray, number), X))


@pytest.mark.cases(fast=1, slow=3)
@tools
def test_a_python_number_in_the_data(tool):
    loss = lambda w, x, t: jnp.mean((x.astype(F16) @ w.astype(F16)) * t).astype(F32)
    assert str(tool(loss)(W, X, 0.5))


@pytest.mark.cases(fast=2, slow=2)
@tools
def test_a_constant_loss(tool):
    assert str(tool(lambda w, x: 0.0)(W, X))
    assert str(tool(lambda w, x: jnp.float32(0))(W, X))


def conjugate_gradients(w, x):
    system = lambda v: (w @ w.T + jnp.eye(4)) @ v
    return jnp.mean(jax.scipy.sparse.linalg.cg(system, x.sum(0))[0]) + jnp.mean(half_product(w, x))


@pytest.mark.cases(slow=2)
@tools
def test_a_linear_solve_beside_half_values(tool):
    assert str(tool(conjugate_gradients)(W, X))


@pytest.mark.slow
def test_an_overflow_beside_a_linear_solve():
    loss = lambda w, x: conjugate_gradients(w, x) + jnp.mean(jnp.exp((x @ w).astype(F16) * 12).astype(F32))
    report = find_nonfinite(loss)(W, X)
    assert report.cause.operation == "exp"
    assert report.remedies


@pytest.mark.cases(fast=1, slow=3)
@tools
@pytest.mark.parametrize("option", ["jax_debug_nans", "jax_debug_infs"])
def test_the_options_of_jax_that_raise_at_a_nan(tool, option):
    """Whoever looks for a NaN has them on."""
    value = {"jax_debug_nans": 0.0, "jax_debug_infs": 1e9}[option]

    def loss(w, x):
        hidden = half_product(w, x * value)
        return jnp.mean(x @ w) + 0 * jnp.sum(jax.lax.stop_gradient(jnp.where(True, 1.0, hidden / value)))

    jax.config.update(option, True)
    try:
        assert str(tool(loss)(W, X))
        assert getattr(jax.config, option)
    finally:
        jax.config.update(option, False)


@pytest.mark.cases(slow=4)
@pytest.mark.parametrize("how", ["explicit", "set_mesh"])
@tools
def test_an_explicit_mesh(tool, how):
    mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    spec = lambda *names: jax.NamedSharding(mesh, jax.P(*names))
    x, w = jax.device_put(jnp.ones((8, 4)), spec("d")), jax.device_put(W, spec(None, "e"))
    loss = lambda w, x: jnp.mean(half_product(w, x) ** 2)
    with jax.set_mesh(mesh) if how == "set_mesh" else contextlib.nullcontext():
        assert str(tool(loss)(w, x))
        assert str(tool(lambda w, x: jnp.mean((x @ w) ** 2))(w, x))


@pytest.mark.slow
def test_the_counts_of_an_explicit_mesh_are_those_of_one_device():
    mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), jax.NamedSharding(mesh, jax.P("d", "e")))
    loss = lambda w, x: jnp.mean(jnp.sin(x * w).astype(F16).astype(F32))
    one, several = (profile_ranges(loss)(jnp.ones(4), each) for each in (jnp.asarray(jax.device_get(x)), x))
    assert str(one) == str(several)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("waits", [False, True])
def test_a_loop_that_counts_ends_in_half_too(waits):
    def loss(w, x, steps):
        if waits:
            w = jax.lax.while_loop(lambda w: jnp.sum(w) > 1e3, lambda w: w / 2, jax.lax.stop_gradient(w)) + w
        return jnp.mean((x @ w) ** 2) + jax.lax.stop_gradient(
            jax.lax.fori_loop(0, steps, lambda _, total: total / 2, 1.0)
        )

    diagnosis = doctor(loss, device=None)(jnp.ones((4, 2)), jnp.ones((3, 4)), jnp.int32(3))
    assert {finding.severity for finding in diagnosis.findings} == {"speed"}
    assert diagnosis.skipped == {}


def test_a_program_that_does_not_fit_into_memory_in_float32_has_a_page(monkeypatch):
    def run(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nAllocator (GPU_0_bfc) ran out")

    monkeypatch.setattr(FlaggedProgram, "run", run)
    loss = lambda w, x: jnp.sum((x @ w).astype(jnp.float16) * 6e4)
    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    page = doctor(loss, device=None)(w, x)
    assert "inf from mul" in page.findings[0].what
    assert page.nonfinite.tried == ()
    assert page.nonfinite.is_finite_in_float32 is None
    assert page.skipped["the values in half"] == (
        "XLA did not run it in float32: RESOURCE_EXHAUSTED: Out of memory"
    )
    step = lambda w, x: w - 0.1 * jax.grad(loss)(w, x)
    assert "XLA did not run it" in str(doctor(step, value_and_grad_fn=None, device=None)(w, x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        compare_precision(loss)(w, x)

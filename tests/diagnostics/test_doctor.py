"""`doctor` names what is wrong, worst first, and skips what makes no sense."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from jmp_lite.diagnostics import _doctor, _findings, doctor
from jmp_lite.programs import read_program

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.

X = jnp.ones((8, 16))
F16 = jmp.get_policy("params=float32,compute=float16,output=float32")


@pytest.fixture(autouse=True)
def no_compiler_for_gpus(monkeypatch):
    """Compiling for an H100 takes seconds, and needs an extra: one test asks for it."""
    monkeypatch.setattr(_doctor, "_can_compile", lambda: False)


def severities(diagnosis):
    return [finding.severity for finding in diagnosis.findings]


def finding(diagnosis, text):
    (found,) = (each for each in diagnosis.findings if text in each.what)
    return found


def test_a_healthy_step_has_no_findings():
    params = {"a": jnp.eye(16) / 4, "b": jnp.eye(16)}
    diagnosis = doctor(lambda params, x: jnp.sum(jnp.tanh(x @ params["a"]) @ params["b"]))(params, X)
    assert diagnosis.findings == ()
    assert "Nothing is wrong." in str(diagnosis)
    assert diagnosis.nonfinite.is_finite
    assert diagnosis.precision.is_close
    assert list(diagnosis.skipped) == ["roofline"]


def faulty(params, x):
    with jax.named_scope("stem"):
        h = x @ params["stem"]
    with jax.named_scope("head"):
        return jnp.mean((h @ params["head"]) / 1e6)


FAULTY = {"stem": jnp.full((16, 15), 0.1), "head": jnp.full((15, 8), 1e6)}


def test_the_findings_are_those_of_the_parts_worst_first():
    diagnosis = doctor(faulty, "float16")(FAULTY, np.asarray(X))
    order = [_findings.SEVERITIES.index(each) for each in severities(diagnosis)]
    assert order == sorted(order)
    assert set(severities(diagnosis)) == {"not finite", "accuracy", "speed"}
    first = diagnosis.findings[0]
    assert "inf from" in first.what
    assert "head" in first.what
    assert "test_doctor.py" in first.where
    parameter, error = finding(diagnosis, "A parameter has 1e+06"), finding(diagnosis, "the error is")
    assert parameter.where == "params/head"
    assert parameter.advice.endswith("'float32'}. This was not tried.")
    assert "rules={'/head': 'float32'}" in error.advice
    assert "Then the error is" in error.advice  # compare_precision has tried these.
    sizes = [each.advice for each in diagnosis.findings if "run slowly" in each.what]
    assert any("N = 15: pad it to 16" in each for each in sizes)
    assert any("K = 15: pad it to 16" in each for each in sizes)
    text = str(diagnosis)
    assert all(each.what in text and each.advice in text for each in diagnosis.findings)
    assert diagnosis.precision.rules == {"/head": "float32"}


def test_the_advice_of_the_doctor_heals():
    rules = doctor(faulty, "float16")(FAULTY, X).precision.rules
    healed = doctor(jmp.autocast(faulty, "float16", rules=rules), loss_scale=2.0**10)(FAULTY, X)
    assert "not finite" not in severities(healed)
    assert healed.nonfinite.is_finite


def test_gradients_that_underflow_get_a_scale_that_saves_them():
    loss = lambda w, x: jnp.mean(jnp.sin(jax.named_scope("head")(jnp.matmul)(x, w))) * 1e-7
    w = jax.random.normal(jax.random.key(0), (16, 8)) / 4
    found = finding(doctor(loss)(w, X), "become zero in float16 at the loss scale 2**0")
    assert found.what.startswith("100.00% of the gradients")
    assert found.where == "/ 100%, head 100%"
    exponent = int(found.advice.split("2.0**")[1].split(")")[0])
    assert doctor(loss, loss_scale=2.0**exponent)(w, X).findings == ()


def test_gradients_that_a_loss_scale_makes_exact_need_no_rules():
    # The gradients are subnormal numbers of float16, so few are zero and many are wrong.
    loss = lambda w, x: jnp.mean(jnp.sin(x @ w) @ w.T) * 2e-5
    w = jax.random.normal(jax.random.key(0), (16, 8)) / 4
    found = finding(doctor(loss, tolerance=0.001)(w, X), "Without a loss scale")
    assert found.advice.startswith("Start with jmp.DynamicLossScale(): at 2**15 the error is")
    assert doctor(loss, tolerance=0.01, loss_scale=2.0**15)(w, X).findings == ()


def test_an_update_that_is_lost_is_counted():
    step = lambda w, g: (w - g).astype(jnp.float16)
    w = jnp.ones(8, jnp.float16)
    gradient = jnp.array([1e-5, 1e-5, 1e-5, 0.5, 0.5, 0.5, 0.5, 0.0], jnp.float16)
    what = doctor(step, transform=None, device=None)(w, gradient).findings[0].what
    assert what == "The update is lost in float16 for 43% of the elements of w that have one."


def test_a_loss_that_is_not_finite_in_float32_either_skips_the_comparison():
    diagnosis = doctor(lambda w, x: jnp.sum(jnp.log(x @ w)))(-jnp.ones((16, 8)), X)
    assert severities(diagnosis)[0] == "not finite"
    assert diagnosis.ranges is diagnosis.precision is None
    assert "not finite" in diagnosis.skipped["profile_ranges, compare_precision"]
    assert "Skipped: profile_ranges, compare_precision" in str(diagnosis)


def test_a_product_that_a_constant_promotes_is_named():
    table = jnp.linspace(0.0, 1.0, 16)

    def loss(params, x):
        params, x = F16.cast_to_compute((params, x))
        return jnp.sum((jnp.tanh(x @ params["a"]) * table) @ params["b"]).astype(jnp.float32)

    diagnosis = doctor(loss)({"a": jnp.eye(16), "b": jnp.eye(16)}, X)
    found = finding(diagnosis, "not in half")
    assert "a constant float32[16] is float32" in found.what
    assert found.severity == "speed"
    assert "test_doctor.py" in found.where
    assert diagnosis.precision.names
    assert diagnosis.precision.is_close
    assert diagnosis.ranges is not None


def test_a_program_is_estimated():
    w = jnp.ones((16, 16))
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    program = read_program(jax.jit(jax.grad(loss)).lower(w, X).compile())
    diagnosis = doctor(loss, program=program, device="a100")(w, X)
    assert diagnosis.roofline.device.name == "A100 SXM 80 GB"
    assert "roofline" not in diagnosis.skipped
    found = finding(diagnosis, "of the estimated time on A100")
    assert found.severity == "speed"
    assert "at best" in str(diagnosis)


def test_without_a_program_the_step_is_compiled_for_an_h100(monkeypatch):
    pytest.importorskip("jax_cuda13_plugin")
    monkeypatch.undo()
    diagnosis = doctor(lambda w, x: jnp.sum(jnp.tanh(x @ w)))(jnp.ones((16, 16)), X)
    assert diagnosis.roofline.device.name == "H100 SXM"


def test_bad_input_is_named():
    with pytest.raises(TypeError, match=r"takes a loss function first. Got 3"):
        doctor(3)
    with pytest.raises(TypeError, match=r"what read_program returns. Got str"):
        doctor(faulty, program="program")
    with pytest.raises(ValueError, match="autocast returned this function"):
        doctor(jmp.autocast(faulty), "float16")
    with pytest.raises(TypeError, match="Got str"):
        doctor(faulty, loss_scale="big")

"""`doctor` names what is wrong, worst first, and skips what makes no sense."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jmp_lite as jmp
from jmp_lite.diagnostics import _doctor, _findings, doctor
from jmp_lite.programs import read_program
from tests.support.arrays import normal

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
    assert "No fault was found." in str(diagnosis)
    assert diagnosis.nonfinite.is_finite
    assert diagnosis.precision.is_close
    assert list(diagnosis.skipped) == ["roofline"]


def test_what_a_step_changes_in_place_is_named_as_not_examined():
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return value

    diagnosis = doctor(step, value_and_grad_fn=None, device=None)(model, optimizer, X)
    assert "what the step changes in place" in diagnosis.skipped
    graph, state = nnx.split(model)

    def taking(state, x):
        grads = jax.grad(lambda state: jnp.mean(nnx.merge(graph, state)(x) ** 2))(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads)

    for step, first in ((taking, state), (lambda w, x: w - x, X)):
        diagnosis = doctor(step, value_and_grad_fn=None, device=None)(first, X)
        assert "what the step changes in place" not in diagnosis.skipped


def test_the_page_says_how_wrong_a_loss_is_whose_gradients_are_right_and_what_mends_it(monkeypatch):
    """The distance of BYOL: 2 - 2 cos near 0, of cosines that bfloat16 rounds to 1."""
    monkeypatch.setattr(_findings, "_slow_products", lambda report: {})
    w, x = normal(1, 16, 8, scale=0.3), normal(0, 64, 16)
    near = x + 0.03 * normal(2, 64, 16)
    unit = lambda y: y / jnp.linalg.norm(y, axis=-1, keepdims=True)

    def loss(w, one_dtype=jnp.bfloat16, other_dtype=jnp.bfloat16):
        one, other = (unit(each @ w) for each in (x, near))
        one = one.astype(one_dtype)
        other = lax.stop_gradient(other).astype(other_dtype)
        return (2 - 2 * jnp.einsum("bd,bd->b", one, other)).astype(jnp.float32).mean()

    said = " ".join(str(doctor(loss, device=None)(w)).split())
    assert "No fault was found in the gradients." in said
    numbers = re.search(r"The loss is (\S+), and (\S+) in float32; its gradients are (\S+)% off", said)
    half, full, error = map(float, numbers.groups())
    assert abs(half - full) > 0.1 * full
    assert 0 < error < 10
    lines, left = re.search(
        r"To mend the loss: use float32 instead of bfloat16 on (.+)\. Then it is (\S+)% off", said
    ).groups()
    edited = {int(line) - loss.__code__.co_firstlineno for line in re.findall(r"\.py:(\d+):", lines)}
    assert edited
    assert edited <= {2, 3}
    dtypes = (jnp.float32 if line in edited else jnp.bfloat16 for line in (2, 3))
    assert abs(loss(w, *dtypes) - full) / full == pytest.approx(float(left) / 100, abs=5e-3)


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
    assert severities(diagnosis) == ["not finite"]  # One finding for one cause, and none of speed beside it.
    first = diagnosis.findings[0]
    assert "inf from" in first.what
    assert "head" in first.what
    assert "test_doctor.py" in first.where
    assert "rules={'/head': 'float32'}: fixes it" in first.advice
    text = str(diagnosis)
    assert all(each.advice in text for each in diagnosis.findings)
    assert text.startswith('Examined: autocast(fun, "float16") of your program.')
    assert diagnosis.precision.rules == {"/head": "float32"}


def test_gradients_that_underflow_get_a_scale_that_saves_them():
    loss = lambda w, x: jnp.mean(jnp.sin(jax.named_scope("head")(jnp.matmul)(x, w))) * 1e-7
    w = jax.random.normal(jax.random.key(0), (16, 8)) / 4
    found = finding(doctor(loss)(w, X), "Without a loss scale the error")
    exponent = int(found.advice.split("2.0**")[1].split(")")[0])
    assert doctor(loss, loss_scale=2.0**exponent)(w, X).findings == ()


def test_gradients_that_the_first_scale_leaves_too_small_get_a_larger_one():
    loss = lambda w, x: jnp.mean(jnp.sin(x @ w)) * 1e-10
    w = jax.random.normal(jax.random.key(0), (16, 8)) / 4
    found = finding(doctor(loss)(w, X), "Without a loss scale the error")
    exponent = int(found.advice.split("2.0**")[1].split(")")[0])
    assert exponent > 15
    assert doctor(loss, loss_scale=2.0**exponent)(w, X).findings == ()


def test_after_an_overflow_the_rest_is_compared_at_the_scale_that_fits():
    """A healthy model at the first scale of a DynamicLossScale, whose first steps overflow."""
    loss = lambda w, x: jnp.sum(jnp.sin(jax.named_scope("head")(jnp.matmul)(x, w))) * 40
    w = jax.random.normal(jax.random.key(0), (16, 8)) / 4
    diagnosis = doctor(loss, loss_scale=jmp.DynamicLossScale(), device=None)(w, X)
    assert [each.severity for each in diagnosis.findings if each.severity != "speed"] == ["not finite"]
    (trial,) = diagnosis.nonfinite.remedies
    assert diagnosis.precision.loss_scale == trial.loss_scale < 2.0**15
    assert diagnosis.precision.is_close


def test_the_program_that_the_user_runs_is_the_one_that_is_examined():
    """Casts to bfloat16 beside float32 products are not judged as autocast in float16."""

    def loss(params, x):
        hidden = jnp.tanh(x @ params["a"]).astype(jnp.bfloat16).astype(jnp.float32)
        return jnp.sum(hidden @ params["b"])

    params = {"a": jnp.eye(16) / 4, "b": 1e5 * jnp.eye(16)}
    own = doctor(loss, device=None)(params, X)
    assert own.examined == "your program as it is, with its own half values"
    assert [each.severity for each in own.findings if each.severity != "speed"] == []
    assert own.precision.dtype == "bfloat16"
    given = doctor(loss, "float16", device=None)(params, X)
    assert given.examined == 'autocast(fun, "float16") of your program'
    assert given.findings[0].severity == "not finite"


def test_an_update_that_is_lost_is_measured_by_how_far_it_comes():
    step = lambda w, g: (w - g).astype(jnp.float16)
    w = jnp.ones(8, jnp.float16)
    findings = lambda size: doctor(step, value_and_grad_fn=None, device=None)(w, jnp.full(8, size)).findings
    (lost,) = findings(1e-5)
    said = "The update is lost in float16 for 100% of the elements of w that have one: they never move"
    assert lost.what == f"{said} in 20 steps on this batch."
    assert findings(1e-3) == ()


def test_a_loss_that_is_not_finite_in_float32_either_skips_the_comparison():
    diagnosis = doctor(lambda w, x: jnp.sum(jnp.log(x @ w)))(-jnp.ones((16, 8)), X)
    assert severities(diagnosis)[0] == "not finite"
    assert diagnosis.precision is None
    assert "not finite in float32" in diagnosis.skipped["the values in half"]
    assert "Not examined: the values in half." in str(diagnosis)


def test_a_product_that_a_constant_promotes_is_named():
    table = jnp.linspace(0.0, 1.0, 16)

    def loss(params, x):
        params, x = F16.cast_to_compute((params, x))
        return jnp.sum((jnp.tanh(x @ params["a"]) * table) @ params["b"]).astype(jnp.float32)

    diagnosis = doctor(loss)({"a": jnp.eye(16), "b": jnp.eye(16)}, X)
    found = finding(diagnosis, "in float32")
    assert "a constant float32[16] is float32" in found.what
    assert found.severity == "speed"
    assert "test_doctor.py" in found.where
    assert diagnosis.precision.names
    assert diagnosis.precision.is_close


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
    with pytest.raises(TypeError, match=r"takes a function first. Got 3"):
        doctor(3)
    with pytest.raises(TypeError, match=r"what read_program returns. Got str"):
        doctor(faulty, program="program")
    with pytest.raises(ValueError, match="autocast returned this function"):
        doctor(jmp.autocast(faulty), "float16")
    with pytest.raises(TypeError, match="Got str"):
        doctor(faulty, loss_scale="big")


def test_a_loss_that_is_zero_but_for_rounding_is_no_fault():
    """PPO at its first step: the ratio is 1, and the advantages are centred."""

    def ppo(w, obs, old, advantages):
        return -jnp.mean(jnp.exp(jax.nn.log_softmax(obs @ w)[:, 0] - old) * advantages)

    keys = jax.random.split(jax.random.key(0), 3)
    obs, w = jax.random.normal(keys[0], (64, 8)), 0.3 * jax.random.normal(keys[1], (8, 8))
    advantages = jax.random.normal(keys[2], (64,))
    old = jax.nn.log_softmax(obs @ w)[:, 0]
    diagnosis = doctor(jmp.autocast(ppo, "bfloat16"))(w, obs, old, advantages - advantages.mean())
    assert [each for each in diagnosis.findings if each.severity != "speed"] == []

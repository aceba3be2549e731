"""The findings of `doctor`, from reports of small programs and from numbers that are given."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from jmp_lite._autocast import make_rules
from jmp_lite.diagnostics import doctor
from jmp_lite.diagnostics._findings import (
    Finding,
    of_accuracy,
    of_all,
    of_operations,
    of_roofline,
    of_step_in_float32,
)
from jmp_lite.diagnostics._precision.modules import Module
from jmp_lite.diagnostics._precision.report import HARM, Difference, Limits, PrecisionReport
from tests.support.broken import WRONG


def test_products_of_one_slow_size_are_one_finding():
    fun = lambda w, v, x: (x @ w) + (x @ v)
    half = jnp.bfloat16
    report = jmp.explain(fun, "float32")(
        jnp.ones((8, 15), half), jnp.ones((8, 15), half), jnp.ones((8, 8), half)
    )
    (found,) = of_operations(report)
    assert found.what == "2 matmuls, 97% of the FLOPs, of a size that Tensor Cores run slowly."
    assert found.advice == "N = 15: pad it to 16"
    assert found.where.startswith("/, ")
    assert "test_findings.py" in found.where


def test_all_slow_sizes_of_a_product_are_named():
    zeros = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    (found,) = of_operations(jmp.explain(lambda x, w: x @ w, "float16")(zeros(64, 100), zeros(100, 60)))
    assert found.advice == "N = 60: pad it to 64; K = 100: pad it to 104"


def test_a_product_and_those_of_its_gradients_are_one_finding():
    half = jnp.float16
    step = lambda w, x: jax.value_and_grad(lambda w: jnp.mean(x @ w).astype(jnp.float32))(w)
    (found,) = of_operations(jmp.explain(step, "float32")(jnp.ones((64, 10), half), jnp.ones((32, 64), half)))
    assert found.what.startswith("2 matmuls, 100% of the FLOPs")
    assert sorted(found.advice.split("; ")) == ["M = 10: pad it to 16", "N = 10: pad it to 16"]


def test_a_product_in_a_line_of_a_package_and_one_of_few_flops_are_no_findings():
    half = jnp.float16

    def loss(w, x, small):
        y = x @ w  # In half.
        least = small @ small.T  # In float32, and below 1 % of the FLOPs.
        return y, least, optax.tree.vdot(x.astype(jnp.float32), x.astype(jnp.float32))

    args = jnp.ones((64, 64), half), jnp.ones((64, 64), half), jnp.ones((2, 2))
    assert list(of_operations(jmp.explain(loss, "float32")(*args))) == []


def test_a_float64_product_is_called_float64():
    with jax.enable_x64(True):
        wide = jnp.ones((8, 8), "float64")
        (found,) = of_operations(jmp.explain(lambda x, w: x @ w, "bfloat16")(wide, wide))
    assert ", in float64: " in found.what
    assert found.advice.startswith("Cast the float64 operands")


def test_the_four_slowest_modules_are_named_with_their_times():
    rows = [types.SimpleNamespace(module=name, fixed=2e-6, bound="bytes") for name in "abcde"]
    device = types.SimpleNamespace(name="H100 SXM")
    report = types.SimpleNamespace(fixed_modules=rows, fixed_share=0.5, device=device, speedup=lambda: 1.5)
    (found,) = of_roofline(report)
    assert found.where == ", ".join(f"{name} 2.0 us, bytes" for name in "abcd")
    assert list(of_roofline(None)) == []


def test_speed_is_a_finding_of_a_run_that_is_right():
    half = jnp.float16
    report = jmp.explain(lambda w, x: x @ w, "float32")(jnp.ones((8, 15), half), jnp.ones((8, 8), half))
    assert [each.severity for each in of_all([], report, None)] == ["speed"]
    wrong = Finding("accuracy", "The gradients are all zero.", "", "")
    assert of_all([wrong], report, None) == (wrong,)


ZERO, EXACT = Difference(1.0, 1.0, 0.0), Difference(0.0, 0.0, 1.0)


def precision(**fields):
    settings = {"names": ("head",), "half": EXACT, "unscaled": None}
    fixed = {"modules": (), "rest": None, "limits": Limits("gradients", 0.1)}
    return PrecisionReport("float16", loss_scale=2.0**15, loss=1.0, **{**settings, **fixed, **fields})


NO_STATES = type("States", (), {"in_half": False, "__bool__": lambda self: False})()
SOUND = types.SimpleNamespace(cause=None, smaller_scale=None)


def test_a_missing_loss_scale_is_named():
    (found,) = of_accuracy(SOUND, precision(unscaled=ZERO))
    assert found.what.startswith("Without a loss scale the error in float16 is")
    assert found.advice.startswith("Start with jmp.DynamicLossScale(2.0**15)")


def test_a_close_comparison_is_no_finding_and_another_is_one():
    assert list(of_accuracy(SOUND, precision())) == []
    (found,) = of_accuracy(SOUND, precision(half=ZERO, rest=ZERO))
    assert found.what.startswith("In float16 at the loss scale 2**15 the error is")


def test_a_step_that_is_off_names_the_results_and_what_mends_them():
    head = Module("head.py:3:4", "", ("head.py:3:4",), casts="float16")
    program = types.SimpleNamespace(
        edits=[head],
        completed=tuple,
        modules=(),
        operations=(),
        rules=make_rules("float16"),
        dtype=np.dtype("float16"),
    )

    def runs(group, after):
        error = lambda kept: Difference(0.0, after if kept else 0.5, 1.0, group)
        return types.SimpleNamespace(
            keeping=error,
            by_hand=Difference(0.0, 0.0, 1.0),
            states=NO_STATES,
            program=program,
            write=lambda kept: True,
            silent=[],
        )

    (found,) = of_step_in_float32(runs("params", HARM))
    assert found.what.startswith("The results in params are off: the relative error")
    assert found.advice == (
        "To mend it: use float32 instead of float16 on line head.py:3:4. Then the error is 1.0e-01."
    )
    (found,) = of_step_in_float32(runs("", 0.2))
    assert found.what.startswith("The result of the step is off")
    assert found.advice == ""


def test_a_program_with_half_values_of_its_own_is_examined_as_it_is():
    logarithm = lambda w: jnp.sum(jnp.log(w.astype(jnp.float16)).astype(jnp.float32))
    diagnosis = doctor(logarithm, device=None)(jnp.zeros(2))
    assert diagnosis.examined == "your program as it is, with its own half values"
    assert [finding.severity for finding in diagnosis.findings] == ["not finite"]
    assert diagnosis.skipped == {"the values in half": "The loss or its gradients are not finite in float32."}


@pytest.mark.slow
def test_the_new_parameters_of_a_step_have_the_name_of_the_old_ones():
    (run,) = (run for run in WRONG if run.name == "the_second_moment_of_adam_underflows")
    findings = doctor(run.fun, value_and_grad_fn=None, device=None)(*run.args).findings
    assert " for 100% of the elements of nu that have one" in findings[0].what

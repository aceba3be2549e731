"""The findings of `doctor`, from reports of small programs and from numbers that are given."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from jmp_lite.diagnostics import doctor
from jmp_lite.diagnostics._findings import (
    Finding,
    of_accuracy,
    of_all,
    of_operations,
    of_roofline,
    of_step_in_float32,
)
from jmp_lite.diagnostics._precision.compare import HARM
from jmp_lite.diagnostics._precision.report import Difference, Limits, PrecisionReport
from jmp_lite.diagnostics._ranges.magnitudes import Histogram
from jmp_lite.diagnostics._ranges.profile import ModuleRange, RangeReport
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
    (found,) = of_operations(jmp.explain(jnp.dot, "float16")(zeros(64, 100), zeros(100, 60)))
    assert found.advice == "N = 60: pad it to 64; K = 100: pad it to 104"


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
    return PrecisionReport(
        "float16", "float32", loss_scale=2.0**15, loss=1.0, **{**settings, **fixed, **fields}
    )


PROBE = Histogram(np.dtype(np.float16))
measure = jax.jit(PROBE.measure)


def ranges(*lost):
    """A report of modules with 100 gradients each, and how many of them become zero in float16."""
    rows = [
        ModuleRange(f"layer_{number}", "backward", PROBE.read(np.asarray(measure(gradients))), 0)
        for number, gradients in enumerate(np.repeat([1e-9, 1.0], (each, 100 - each)) for each in lost)
    ]
    return RangeReport(np.dtype(np.float16), 1.0, tuple(rows), ())


SOUND = types.SimpleNamespace(cause=None, smaller_scale=None)


def test_a_missing_loss_scale_is_named_with_the_modules_that_lose_most():
    (found,) = of_accuracy(SOUND, precision(unscaled=ZERO), lambda: ranges(10, 20, 30, 40, 50))
    assert found.what.startswith(
        "Without a loss scale 30.00% of the gradients that are not zero become zero, and"
    )
    assert found.where == "Lost, by module: layer_4 50%, layer_3 40%, layer_2 30%, layer_1 20%"
    (found,) = of_accuracy(SOUND, precision(unscaled=ZERO), lambda: ranges(0))
    assert found.what.startswith("Without a loss scale the error in float16 is")
    assert found.where == ""


def test_a_close_comparison_is_no_finding_and_another_is_one():
    assert list(of_accuracy(SOUND, precision(), lambda: ranges(0))) == []
    (found,) = of_accuracy(SOUND, precision(half=ZERO, rest=ZERO), lambda: ranges(0))
    assert found.what.startswith("In float16 at the loss scale 2**15 the error is")


def test_a_step_that_is_off_names_the_results_and_what_mends_them():
    head = types.SimpleNamespace(name="head")

    def runs(group, after):
        error = lambda kept: Difference(0.0, after if kept else 0.5, 1.0, group)
        return types.SimpleNamespace(
            keeping=error,
            limits=lambda *_: Limits("gradients", HARM),
            program=types.SimpleNamespace(edits=[head]),
            training=types.SimpleNamespace(has_state=False),
            change=lambda kept: "keep the head",
        )

    (found,) = of_step_in_float32(runs("params", HARM))
    assert found.what.startswith("The results in params are off: the relative error")
    assert found.advice == "To mend it: keep the head. Then the error is 1.0e-01."
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
    assert " nu comes 0% as far as in float32" in findings[0].what

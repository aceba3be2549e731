"""The broken runs of tests/support/broken: the tools name operation and line, and their remedies help."""

import numpy as np
import pytest

from jmp_lite.diagnostics import doctor, find_nonfinite
from tests.support.broken import ALL, REMEDIED, WRONG
from tests.support.broken.remedies import applied, in_float32, results

# JAX warns of a number such as 70000 in float16.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")


MANY_TRIALS = (
    *("a_mask_of_1e9_in_float16", "two_masks_of_the_least_number"),
    *("an_epsilon_of_a_layer_norm", "the_epsilon_of_adam_in_float16"),
)


def cases(runs):
    """Of nine named kinds of faults one is fast and three are exhaustive. The others are slow.

    Those after public issues, and three of four with remedies of their own, are exhaustive.
    """
    named = [run for run in runs if not run.source and run not in REMEDIED and run.name not in MANY_TRIALS]

    rare = [run for run in REMEDIED if run not in REMEDIED[2::4]]

    def marks(run):
        if run.source or run in rare or run in named[2::3]:
            return [pytest.mark.exhaustive]
        return [] if run in named[::9] else [pytest.mark.slow]

    return [pytest.param(run, marks=marks(run), id=run.name) for run in runs]


NOT_FINITE = [run for run in ALL if not run.finite]
FINITE_AND_WRONG = [run for run in ALL if run.finite]
OVERFLOWS = [run for run in FINITE_AND_WRONG if {"mul", "exp"} & set(run.operation)]
LOST = [run for run in FINITE_AND_WRONG if run.says in ("update is lost", "gradients are all zero")]
OFF = [run for run in WRONG if run.step and not run.operation]


def report_of(run):
    if run.step:
        return find_nonfinite(run.given, value_and_grad_fn=None)(*run.args)
    return find_nonfinite(run.given, loss_scale=run.scale)(*run.args)


def check(run, report):
    cause = report.cause
    assert cause.operation in run.operation
    assert run.says in " ".join(" ".join(report.advice()).split())
    if cause.operation == "argument":
        assert (cause.index, cause.line) == (run.index, "")
    else:
        assert any(line in cause.line for line in run.lines)


def check_remedies(run, report):
    """What the report says that helps is written into the program: it is then finite, and near float32."""
    exact = results(in_float32(run))
    for trial in report.remedies:
        found = results(applied(run, trial))
        assert np.isfinite(found).all(), trial
        if np.isfinite(exact).all():
            assert np.linalg.norm(found - exact) <= 0.2 * np.linalg.norm(exact) + 1e-6, trial


@pytest.mark.parametrize("run", cases(NOT_FINITE))
def test_the_operation_the_line_and_a_remedy_that_helps(run):
    report = report_of(run)
    assert not report.is_finite
    check(run, report)
    check_remedies(run, report)


# Finite, and wrong.


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("run", cases(OVERFLOWS))
def test_an_overflow_that_ends_in_finite_numbers(run):
    report = report_of(run)
    assert report.is_finite
    check(run, report)
    check_remedies(run, report)
    assert report.cause.what == "inf"
    assert "whose result is finite; float32 here changes what the program returns" in " ".join(
        str(report).split()
    )
    assert "A value inside of it is not finite." in report.summary()


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("run", OVERFLOWS, ids=lambda run: run.name)
def test_doctor_names_an_overflow_that_ends_in_finite_numbers(run):
    finding = doctor(run.fun, device=None, **({"value_and_grad_fn": None} if run.step else {}))(
        *run.args
    ).findings[0]
    assert finding.severity == "not finite"
    assert any(line in finding.where for line in run.lines)


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("run", cases((*LOST, *OFF)))
def test_doctor_names_what_a_step_loses(run):
    (finding,) = (
        f
        for f in doctor(run.fun, value_and_grad_fn=None, device=None)(*run.args).findings
        if f.severity == "accuracy"
    )
    assert run.says.lower() in finding.what.lower()


@pytest.mark.parametrize("run", cases(OFF))
def test_doctor_names_the_line_that_a_wrong_step_casts_in(run):
    (finding,) = doctor(run.fun, value_and_grad_fn=None, device=None)(*run.args).findings
    assert "Then the error is 0.0e+00." in finding.advice or "Then it trains as in" in finding.advice
    assert any(line in finding.advice for line in run.lines)


# XLA's CPU backend adds this sum up in float32, so that its error is that of a number near 1e-5 in float16.
RIGHT_ON_A_CPU = ("a_mean_of_small_numbers_in_float16",)


@pytest.mark.cases(slow=4)
@pytest.mark.parametrize("run", [run for run in FINITE_AND_WRONG if not run.step], ids=lambda run: run.name)
def test_doctor_finds_what_is_finite_and_wrong(run):
    diagnosis = doctor(run.fun, run.dtype, device=None)(*run.args)
    found = [finding for finding in diagnosis.findings if finding.severity != "speed"]
    assert bool(found) == (run.name not in RIGHT_ON_A_CPU)
    assert all(len(line) <= 90 or " " not in line.strip() for line in str(diagnosis).splitlines())

"""The broken runs of tests/support/broken: the tools name the operation, the line and the cause of each."""

import pytest

from jmp_lite.diagnostics import doctor, find_nonfinite, profile_ranges
from tests.support.broken import FINITE, LOSSES, PUBLIC, STEPS


def cases(runs):
    """The named kinds of faults are fast; those after public issues are slow."""
    slow = lambda run: [pytest.mark.slow] if run.source else []
    return [pytest.param(run, marks=slow(run), id=run.name) for run in runs]


NOT_FINITE = [run for run in (*LOSSES, *STEPS, *PUBLIC) if not run.finite]
FINITE_AND_WRONG = [run for run in (*FINITE, *STEPS, *PUBLIC) if run.finite]
OVERFLOWS = [run for run in FINITE_AND_WRONG if {"mul", "exp"} & set(run.operation)]
LOST = [run for run in FINITE_AND_WRONG if run.says in ("update is lost", "gradients are all zero")]


def report_of(run):
    if run.step:
        return find_nonfinite(run.fun, transform=None)(*run.args)
    return find_nonfinite(run.fun, loss_scale=run.scale)(*run.args)


def check(run, cause):
    assert cause.operation in run.operation
    assert run.says in cause.advice
    if cause.operation == "argument":
        assert (cause.index, cause.line) == (run.index, "")
    else:
        assert any(line in cause.line for line in run.lines)
    assert not run.iterations or cause.iterations == run.iterations


@pytest.mark.parametrize("run", cases(NOT_FINITE))
def test_the_operation_the_line_and_the_cause(run):
    report = report_of(run)
    assert not report.is_finite
    check(run, report.cause)


# Finite, and wrong.


@pytest.mark.parametrize("run", cases(OVERFLOWS))
def test_an_overflow_that_ends_in_finite_numbers(run):
    report = report_of(run)
    assert report.is_finite
    check(run, report.cause)
    assert report.cause.what == "inf"
    assert report.cause.end.partition(",")[0] in ("rsqrt", "div")
    assert "whose result is finite, and wrong" in str(report)
    assert "A value inside of it is not finite." in report.summary()


def test_profile_ranges_names_an_overflow_of_the_program():
    run = OVERFLOWS[0]
    report = profile_ranges(run.fun)(*run.args)
    (overflow,) = report.overflows
    assert (overflow.operation, overflow.end.partition(",")[0]) == ("mul", "rsqrt")
    assert "A value of the program overflows in half" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("run", cases(OVERFLOWS))
def test_doctor_names_an_overflow_that_ends_in_finite_numbers(run):
    finding = doctor(run.fun, device=None, **({"transform": None} if run.step else {}))(*run.args).findings[0]
    assert finding.severity == "not finite"
    assert any(line in finding.where for line in run.lines)


@pytest.mark.parametrize("run", cases(LOST))
def test_doctor_names_what_a_step_loses(run):
    (finding,) = (
        f
        for f in doctor(run.fun, transform=None, device=None)(*run.args).findings
        if f.severity == "accuracy"
    )
    assert run.says in finding.what.lower()


# XLA's CPU backend adds this sum up in float32, so that its error is that of a number near 1e-5 in float16.
RIGHT_ON_A_CPU = ("a_mean_of_small_numbers_in_float16",)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run for run in FINITE_AND_WRONG if not run.step], ids=lambda run: run.name)
def test_doctor_finds_what_is_finite_and_wrong(run):
    diagnosis = doctor(run.fun, run.dtype, device=None)(*run.args)
    found = [finding for finding in diagnosis.findings if finding.severity != "speed"]
    assert bool(found) == (run.name not in RIGHT_ON_A_CPU)
    assert not any("half: )" in finding.advice or "  " in finding.where for finding in found)

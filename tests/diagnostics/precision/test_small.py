"""`compare_precision` on products whose errors are known by hand, and the text of its report."""

import dataclasses
import math
import pathlib
import types

import jax.numpy as jnp
import pytest

import jmp_lite
from jmp_lite.diagnostics import compare_precision
from jmp_lite.diagnostics._precision.judge import Judge
from jmp_lite.diagnostics._precision.modules import is_of_library
from jmp_lite.diagnostics._precision.report import Difference, Limits, ModuleDifference, PrecisionReport

X = jnp.array([[1.0, 2.0**-11]] * 2)
OFF = 2.0**-11 / (
    1 + 2.0**-11
)  # In float16 1 + 2**-11 is 1: the relative error of the product of X and ones.


def squares(x, params):
    """Two matmuls, the only inexact operations. The second one and its gradient are twice as large."""
    return jnp.sum((params["a"].T @ x.T) ** 2 + (params["b"].T @ x.T) ** 2) / 2


PARAMS = {"a": jnp.ones((2, 2)), "b": 2 * jnp.ones((2, 2))}


def test_each_module_alone_has_its_part_of_the_error():
    report = compare_precision(squares, argnums=1, tolerance=0.7 * OFF)(X, PARAMS)
    assert report.names == ("params/a", "params/b")
    assert [row.module for row in report.modules] == ["params/b", "params/a"]
    parts = [row.own.gradients / OFF for row in report.modules]
    assert parts == pytest.approx([2 / math.sqrt(5), 1 / math.sqrt(5)], rel=1e-2)
    assert report.half.gradients == pytest.approx(OFF, rel=1e-2)
    assert report.rest.gradients == report.rest.loss == 0
    assert report.rules == {"/params/b": "float32"}
    assert report.with_rules.gradients == report.modules[1].own.gradients


def test_gradients_that_become_zero_in_float16_get_a_loss_scale():
    report = compare_precision(lambda w: jnp.sum(X @ w) * 1e-9)(jnp.ones((2, 2)))
    assert report.loss_scale == 2.0**15
    assert report.unscaled.gradients == 1


def test_a_loss_without_gradients_is_compared_alone():
    report = compare_precision(lambda params, x: jnp.sum(x @ jnp.ones((2, 2))))({}, X)
    assert report.half == Difference(pytest.approx(OFF), gradients=0.0, cosine=1.0)


@pytest.mark.parametrize(
    ("loss", "contribution", "error", "expected"),
    [
        (1.0, 0.5, 0.2, 0.2),
        (0.25, 0.5, 0.2, 0.1),
        (0.0, 0.5, 0.2, 0.4),  # The error of a loss of 0 is the difference.
        (0.0, 0.0, 0.2, 0.2),
        (0.25, 0.5, math.inf, math.inf),
    ],
)
def test_a_loss_error_is_relative_to_the_loss_or_what_the_parameters_contribute(
    loss, contribution, error, expected
):
    judge = Judge(types.SimpleNamespace(loss=loss, contribution=contribution))
    assert judge.loss_error(Difference(error, 0.0, 1.0)) == pytest.approx(expected)


def test_a_difference_of_large_numbers_that_is_zero_in_float32_is_no_fault():
    loss = lambda w: 100 * (jnp.sum(X @ w) - (4 + 2.0**-9))
    report = compare_precision(loss)(jnp.ones((2, 2)))
    assert (report.loss, report.half.loss) == (0.0, 100 * 2.0**-9)
    assert report.limits.measure == "gradients"
    assert report.is_close


ERROR = Difference(loss=1e-4, gradients=2e-3, cosine=0.999998)
REPORT = PrecisionReport(
    *("float16", 1.0, 1.0, ("head",), (ModuleDifference("head", ERROR, "/head"),)),
    *(ERROR, None, Difference(0.0, 0.0, 1.0), Limits("gradients", 1e-3)),
    *(("head",), {"/head": "float32"}, "rules={'/head': 'float32'}", Difference(0.0, 0.0, 1.0)),
)


def test_the_report_names_the_dtype_and_what_no_rule_selects():
    text = str(REPORT)
    assert "module alone in half" in text
    assert "no rule selects" not in text
    left = str(dataclasses.replace(REPORT, rest=ERROR))
    assert f"With all modules in float32 this is left, which no rule selects: {ERROR}." in " ".join(
        left.split()
    )


def test_a_loss_scale_is_advised_only_where_it_helped():
    assert REPORT.advice().startswith("To mend it: rules={'/head': 'float32'}. Then")
    helped = dataclasses.replace(REPORT, unscaled=Difference(1.0, 1.0, 0.0)).advice()
    assert helped.startswith(
        "Use a loss scale, such as jmp.DynamicLossScale(): without one the error is 1.00e+00"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", True),
        ("<unknown>:1", True),
        (f"{pathlib.Path(jmp_lite.__file__).parent}/_tree.py:3 (cast)", True),
        ("/usr/lib/python3/site-packages/flax/linen/linear.py:7 (__call__)", True),
        ("/home/me/train.py:12 (loss)", False),
    ],
)
def test_a_line_of_a_library_is_no_line_of_the_users_program(line, expected):
    assert is_of_library(line) is expected

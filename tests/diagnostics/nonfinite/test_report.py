"""The page of `find_nonfinite`, for origins that are written by hand."""

import dataclasses
import math

import pytest

from jmp_lite.diagnostics._nonfinite.report import Nonfinite, NonfiniteReport, Trial
from jmp_lite.diagnostics._precision.report import Difference

INF = Nonfinite(
    *("inf", "mul", "float16[4]", (1.0, math.inf), ("float16[4]", "float16[4]"), ((1.0, 300.0),) * 2),
    *("", "w", True, "train.py:3:4 (step)", "", "forward", (), "", None),
)
NAN = dataclasses.replace(INF, what="NaN", operation="div", line="train.py:4:4 (step)", direction="backward")
OTHER = dataclasses.replace(INF, operation="exp", line="train.py:5:4 (step)")
MASKS = tuple(dataclasses.replace(INF, operation=f"mask_{number}") for number in range(6))
TRIED = (
    Trial("rules={'/w': 'float32'}", Difference(1e-3, 1e-4, 1.0), True),
    Trial("bfloat16 in place of float16", Difference(math.inf, math.inf, math.nan), False),
)
REPORT = NonfiniteReport(None, 1.0, 1, ("w",), INF, NAN, (OTHER,), MASKS, tried=TRIED)

PAGE = """\
The result of one step (w) is not finite.

It begins here:
inf from mul near w, forward pass
    train.py:3:4 (step)
    takes float16[4], 1 to 300, twice
    gives float16[4], 1 to inf

Remedies that were run, with the relative error against float32:
    rules={'/w': 'float32'}: fixes it, error 1.0e-03
    bfloat16 in place of float16: does not fix it, still not finite

Beside it:
NaN from div near w, backward pass
    train.py:4:4 (step)

It begins at 1 further operation, such as:
inf from exp near w, forward pass
    train.py:5:4 (step)

Harmless, since it reaches no result:
    inf from mask_0 near w, forward pass
    inf from mask_1 near w, forward pass
    inf from mask_2 near w, forward pass
    inf from mask_3 near w, forward pass
    inf from mask_4 near w, forward pass
    and 1 more"""


def test_the_page_has_the_cause_the_trials_and_what_is_beside_it():
    assert str(REPORT) == PAGE


def test_an_operand_that_is_taken_once_is_not_called_twice():
    single = dataclasses.replace(INF, operands=("float16[4]", "float16[]"))
    assert single.details()[1:3] == ["    takes float16[4], 1 to 300", "    takes float16[], 1 to 300"]


def test_of_the_many_operands_of_a_loop_a_few_are_shown():
    loop = dataclasses.replace(
        INF, operands=tuple(f"float16[{n}]" for n in range(9)), operand_ranges=(None,) * 9
    )
    assert loop.details()[6:8] == ["    takes float16[5]", "    and 3 more"]


@pytest.mark.parametrize("part", [REPORT, INF, TRIED[0]], ids=lambda part: type(part).__name__)
def test_a_report_and_its_parts_cannot_be_changed(part):
    for field in dataclasses.fields(part):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field.name, None)


def test_float32_is_not_finite_either_only_if_half_is_not():
    wide = dataclasses.replace(REPORT, tried=(), is_finite_in_float32=False)
    assert wide.advice() == ["With every operation in float32 it is not finite either."]
    finite = dataclasses.replace(wide, gradients=())
    assert finite.advice() == ["With every operation in float32 it is not finite."]

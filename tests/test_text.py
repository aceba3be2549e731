"""How reports are written, and shown in a notebook."""

import dataclasses
import html

import pytest

import jmp_lite as jmp
from jmp_lite import diagnostics
from jmp_lite._text import Shown, aligned

REPORTS = [
    jmp.Report,
    *(diagnostics.Diagnosis, diagnostics.NonfiniteReport, diagnostics.PrecisionReport),
    diagnostics.RangeReport,
]


@pytest.mark.parametrize("report", REPORTS)
def test_a_notebook_shows_a_report_as_print_does_in_a_font_of_equal_widths(report, monkeypatch):
    text = "\n".join(aligned([("<lambda> & more", "1"), ("w", "12")]))
    monkeypatch.setattr(report, "__str__", lambda self: text)
    shown = report.__new__(report)._repr_html_()
    assert shown == f'<pre style="font-family: monospace">{html.escape(text)}</pre>'
    assert "&lt;lambda&gt; &amp; more   1\nw" in shown


def test_a_dataclass_with_slots_may_be_shown():
    @dataclasses.dataclass(frozen=True, slots=True)
    class Total(Shown):
        number: int

    assert not hasattr(Total(3), "__dict__")
    assert "Total(number=3)" in Total(3)._repr_html_()

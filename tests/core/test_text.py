"""How reports are written, and shown in a notebook."""

import dataclasses
import html
import re

import jax

import jmp_lite as jmp
from jmp_lite import diagnostics, programs
from jmp_lite._text import Shown, aligned, shortened

REPORTS = [
    *(diagnostics.Diagnosis, diagnostics.NonfiniteReport, diagnostics.PrecisionReport),
    *(diagnostics.RangeReport, programs.Program, programs.Roofline),
]


def test_a_notebook_shows_a_report_as_print_does_in_a_font_of_equal_widths(monkeypatch):
    text = "\n".join(aligned([("<lambda> & more", "1"), ("w", "12")]))
    style = "font: 85% monospace; white-space: pre; overflow-x: auto"
    for report in REPORTS:
        monkeypatch.setattr(report, "__str__", lambda self: text)
        shown = report.__new__(report)._repr_html_()
        assert shown == f'<pre style="{style}">{html.escape(text)}</pre>'
        assert "&lt;lambda&gt; &amp; more   1\nw" in shown


def test_a_report_is_written_in_a_folder_that_was_deleted(tmp_path, monkeypatch):
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert shortened(f"{folder}/train.py:3 (loss)") == "train.py:3 (loss)"
    folder.rmdir()
    assert shortened(f"{folder}/train.py:3 (loss)") == f"{folder}/train.py:3 (loss)"


def test_a_dataclass_with_slots_may_be_shown():
    @dataclasses.dataclass(frozen=True, slots=True)
    class Total(Shown):
        number: int

    assert not hasattr(Total(3), "__dict__")
    assert "Total(number=3)" in Total(3)._repr_html_()


def notebook_text(value):
    return re.fullmatch("<pre style=.*?>(.*)</pre>", html.unescape(value._repr_html_()), re.DOTALL)[1]


def test_a_notebook_shows_a_policy_as_a_short_table():
    policy = jmp.get_policy("mixed_float16").with_rules({"**/BatchNorm*": "float32"})
    lines = ["parameters     float32", "compute        float16", "output         float32"]
    assert notebook_text(policy).splitlines() == [*lines, "**/BatchNorm*  p=full,c=full,o=full"]


def test_a_notebook_shows_a_loss_scale_as_a_short_table():
    lines = notebook_text(jmp.DynamicLossScale(2.0**15, period=500)).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["loss_scale", "2**15"],
        ["counter", "0"],
        ["period", "500"],
    ]
    assert len({len(line) for line in lines}) == 1  # The values end in one column.
    assert not any("None" in line or "array" in line for line in lines)
    assert notebook_text(jmp.StaticLossScale(8.0)) == "loss_scale  8"


def test_a_traced_loss_scale_can_be_shown():
    shown = []
    jax.eval_shape(lambda scale: shown.append(notebook_text(jmp.StaticLossScale(scale))), 8.0)
    assert "float32[]" in shown[0]

"""What all reports have in common: they keep nothing of the user's alive, and can be pickled and copied."""

import copy
import functools
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from jmp_lite.diagnostics import Diagnosis, compare_precision, doctor, find_nonfinite, profile_ranges
from jmp_lite.diagnostics._nonfinite.flow import Flow

TOOLS = {
    "explain": jmp.explain,
    "find_nonfinite": find_nonfinite,
    "find_nonfinite of a step": functools.partial(find_nonfinite, value_and_grad_fn=None),
    "compare_precision": compare_precision,
    "profile_ranges": profile_ranges,
    "doctor": functools.partial(doctor, device=None),
    "doctor of a step": functools.partial(doctor, value_and_grad_fn=None, device=None),
}
slow = lambda name: [pytest.mark.slow] if "doctor" in name else []
tools = pytest.mark.parametrize(
    "tool", [pytest.param(tool, id=name, marks=slow(name)) for name, tool in TOOLS.items()]
)


def loss_with(constant):
    return lambda w, x: jnp.mean(jax.nn.silu(jax.nn.relu(x @ w)) / constant)


# A divisor of 0 gives an inf, which only some of the tools follow.
follows_inf = lambda name: "nonfinite" in name or "doctor" in name


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize(
    ("tool", "divisor"),
    [
        pytest.param(tool, divisor, id=f"{divisor}-{name}", marks=slow(name))
        for name, tool in TOOLS.items()
        for divisor in ((0, 1) if follows_inf(name) else (1,))
    ],
)
@pytest.mark.usefixtures("only_new_garbage")
def test_nothing_of_the_users_outlives_a_report(tool, divisor):
    w, x, constant = jnp.full((8, 4), 0.3), jnp.ones((2, 8)), jnp.arange(4.0) + divisor
    references = [weakref.ref(array) for array in (w, x, constant)]
    fun = loss_with(constant)
    tool(fun)(w, x)
    del w, x, constant, fun
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]
    assert not any(isinstance(each, Flow) for each in gc.get_objects())


@pytest.mark.cases(fast=2, slow=3)
@tools
@pytest.mark.parametrize("copied", [lambda report: pickle.loads(pickle.dumps(report)), copy.deepcopy])
def test_reports_can_be_pickled_and_copied(tool, copied):
    report = tool(loss_with(jnp.ones(4)))(jnp.full((8, 4), 0.3), jnp.ones((2, 8)))
    again = copied(report)
    assert (type(again), str(again), repr(again)) == (type(report), str(report), repr(report))
    if isinstance(report, Diagnosis):
        report, again = report.operations, again.operations
    if isinstance(report, jmp.AutocastReport):  # The jaxprs stay behind, in the copy alone.
        assert None not in (report.before, report.after)
        assert (again.before, again.after) == (None, None)
        assert again.operations == report.operations


def squares(w, x):
    with jax.named_scope("<b>"):
        hidden = x.astype(jnp.float16) @ w.astype(jnp.float16)
        hidden = hidden * hidden * 100.0  # Overflows & ends in the loss.
    return jnp.mean(hidden.astype(jnp.float32))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("tool", [find_nonfinite, functools.partial(doctor, device=None)])
def test_a_page_marks_where_inf_begins_and_the_line_of_the_edit(tool, tmp_path):
    report = tool(squares)(jnp.full((8, 8), 0.9), jnp.full((4, 8), 10.0))
    report.save(tmp_path / "marks.html")
    page = (tmp_path / "marks.html").read_text()
    # Each line of source with the marks up to the next one.
    parts = {
        code: marks for code, *marks in (part.split("<div class=mark>") for part in page.split("class=no>"))
    }
    of_line = lambda code: next("".join(marks) for line, marks in parts.items() if code in line)
    assert "It begins here: inf from mul in &lt;b&gt;, after w, forward pass." in of_line(
        "hidden * hidden * 100.0"
    )
    assert "use float32 instead of float16 on line" in of_line("x.astype(jnp.float16)")
    assert "On the way from there: inf from reduce_sum." in of_line("return jnp.mean(hidden.astype")
    assert "<b>" not in page.replace("<b class", "")
    assert "<details class=file open>" in page
    is_of_operations = isinstance(report, Diagnosis)
    assert ("f16 as traced" in page.replace("<small>", "")) == is_of_operations
    assert ("% of FLOPs" in page) == is_of_operations


def test_a_page_has_no_mark_of_a_sound_loss(tmp_path):
    doctor(lambda w: jnp.sum(w**2), device=None)(jnp.ones(4)).save(tmp_path / "sound.html")
    assert "<div class=mark>" not in (tmp_path / "sound.html").read_text()

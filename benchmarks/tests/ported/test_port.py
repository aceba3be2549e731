"""Ports as data: substitutions, line counts, revisions, and the results on the page."""

import dataclasses
import json
import subprocess
import sys

import pytest

from benchmarks.ported import page, port, stand_ins
from benchmarks.ported.port import CELL, Edit, Lines, Port
from benchmarks.ported.programs import NAMES

TEXT = "import optax\n\ntx = optax.adam(1e-3)\nstep(tx)\nstep(tx)\n"
EDITS = (
    Edit("import optax\n", "import optax\nimport jmp_lite as jmp\n"),
    Edit("optax.adam(1e-3)", "jmp.with_loss_scale(optax.adam(1e-3))"),
)


def small(*edits, **fields):
    plain = Port("Small", "someone/small", "0" * 40, "train.py", edits or EDITS, size="tiny")
    return dataclasses.replace(plain, **fields)


def test_an_edit_replaces_its_fragment():
    assert port.apply(small(), TEXT) == (
        "import optax\nimport jmp_lite as jmp\n\n"
        "tx = jmp.with_loss_scale(optax.adam(1e-3))\nstep(tx)\nstep(tx)\n"
    )
    assert port.apply(small(Edit("step(tx)", "step()", times=2)), TEXT).count("step()") == 2


@pytest.mark.parametrize(("fragment", "count"), [("optax.adamw(1e-3)", 0), ("step(tx)", 2)])
def test_a_fragment_that_does_not_stand_once_is_an_error_by_name(fragment, count):
    with pytest.raises(ValueError, match=r"train\.py of someone/small .* 1 times") as error:
        port.apply(small(Edit(fragment, "")), TEXT)
    assert repr(fragment) in str(error.value)
    assert f"Got {count} times" in str(error.value)


def test_a_diff_counts_lines_and_names_them():
    assert port.diff(small(), TEXT) == port.Diff(added=2, removed=1, lines=(1, 3))
    longer = Edit("step(tx)\nstep(tx)\n", "step(\n    tx\n)\n")
    assert port.diff(small(longer), TEXT) == port.Diff(added=3, removed=2, lines=(4,))
    # Lines that look like the two file names of a diff are lines.
    assert port.diff(small(Edit("step(tx)\nstep(tx)\n", "++ x\n-- y\n")), TEXT) == port.Diff(2, 2, (4,))


def git(folder, *arguments):
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "train.py").write_text(TEXT)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    return folder


def test_a_clone_at_another_revision_is_an_error(clone):
    head = git(clone, "rev-parse", "HEAD")
    port.check_revision(small(revision=head), clone)
    with pytest.raises(ValueError, match=f"for revision {'0' * 40} of someone/small. Got a clone at {head}"):
        port.check_revision(small(), clone)


def test_a_notebook_is_the_script_of_its_code_cells(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["x = 1\n", "y = 2  # raise"]},
        {"cell_type": "code", "source": ["z = x + y + w"]},
        {"cell_type": "code", "source": ["raise ValueError"]},
    ]
    (tmp_path / "book.ipynb").write_text(json.dumps({"cells": cells}))
    script = port.original(small(file="book.ipynb"), tmp_path)
    assert script == f"x = 1\ny = 2  # raise{CELL}z = x + y + w{CELL}raise ValueError\n"
    (tmp_path / "book.py").write_text(script)
    names = port.cells(str(tmp_path / "book.py"), "", "raise", {"w": 4})
    assert (names["x"], names["z"]) == (1, 7)
    assert "z" not in port.cells(str(tmp_path / "book.py"), "x = 1", "z =")


def test_the_text_of_an_own_file_is_not_read_from_the_clone(clone):
    assert port.original(small(), clone) == TEXT
    assert port.original(small(own="ours\n"), clone) == "ours\n"


def test_lines_are_counted_with_their_ends():
    assert Lines("jmp", "", "", "", "", ((3, 3), (7, 9))).count == 4


def test_stand_ins_have_every_name(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    stand_ins.stand_in("no_such_module")
    import no_such_module.inner
    from no_such_module.inner import Wrapper

    class Mine(Wrapper):
        pass

    assert isinstance(Mine(1, key=2), stand_ins.Anything)
    assert isinstance(no_such_module.inner.load("x").shuffle(3), stand_ins.Anything)
    with pytest.raises(ModuleNotFoundError):
        import no_such_module_either  # noqa: F401


def test_a_hunk_shows_what_changes():
    assert page.hunk(EDITS[0]) == " import optax\n+import jmp_lite as jmp"
    assert page.hunk(Edit("  tx=tx,", "  tx=scaled(tx),")) == "-tx=tx,\n+tx=scaled(tx),"


@pytest.mark.parametrize("name", NAMES)
class TestThePage:
    def test_the_results_are_those_of_the_port(self, name):
        module, result = page.program(name), page.result(name)
        assert result["edits"] == port.digest(module.PORT)
        assert len(result["lines"]) == len(module.PORT.edits)

    def test_the_claims_hold(self, name):
        full, half = page.result(name)["float32"], page.result(name)["float16"]
        assert full["share"] == 0
        assert half["share"] > 0.9
        assert full["bad_step_left_params"] is None
        if name == "purejaxrl":  # Returns, which rise.
            assert min(full["losses"][-1], half["losses"][-1]) > 4 * full["losses"][0]
        else:
            assert half["bad_step_left_params"] is True
            assert max(full["losses"][-1], half["losses"][-1]) < full["losses"][0]
            assert abs(half["losses"][0] - full["losses"][0]) < 1e-3 * full["losses"][0]

    def test_the_text_of_the_program_is_not_here(self, name):
        if page.program(name).PORT.own is None:
            assert all(
                len(edit.old) < 65 and edit.old.count("\n") < 2 for edit in page.program(name).PORT.edits
            )


def test_every_program_is_on_the_page():
    text = (page.RESULTS.parent.parent / "ported" / "diffs.md").read_text()
    assert [name for name in NAMES if f"## {page.program(name).PORT.title}\n" not in text] == []
    folder = page.RESULTS.parent.parent / "ported" / "programs"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__", "mamba2_train"} == set(NAMES)

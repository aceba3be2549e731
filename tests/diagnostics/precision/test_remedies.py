"""The search for edits: runs of one program find a set, and the program with the edits in it decides."""

import types

import pytest

from jmp_lite.diagnostics._precision.modules import Module
from jmp_lite.diagnostics._precision.needs import completed
from jmp_lite.diagnostics._precision.remedies import MOST_EDITS, few_edits


def cast(name):
    return Module(name, "", (f"{name}.py:1:0 ({name})",), casts="float16")


A, B, C, *MANY = (cast(f"edit{n}") for n in range(30))
SILENT = [cast(f"silent{n}") for n in range(5)]
RULE = Module("rule", "/rule")
POLICY = Module("policy", "", policy="policy")
LAYER = Module("layer", "", layer="m/layer", carries=("loop.py:1:0",))


class Runs:
    """The error of a set is 0 if it has the `needed` edits; where it is not written, some of them count."""

    def __init__(self, edits, needed, in_runs=(), silent=SILENT, can_write=True):
        self.needed, self.in_runs, self.silent, self.can_write = {*needed}, {*in_runs}, silent, can_write
        self.program = types.SimpleNamespace(edits=edits, completed=tuple, is_refused=lambda _: False)
        self.written, self.count = set(), 0

    def write(self, kept):
        if self.can_write:
            self.written.add(frozenset(kept))
        return self.can_write

    def error(self, kept):
        self.count += 1
        needed = self.needed if frozenset(kept) in self.written else self.in_runs
        return 0.0 if needed <= {*kept} else 1.0


def found(runs, near=()):
    kept = few_edits(runs, runs.error, 0.1, near)
    return None if kept is None else {edit.name for edit in kept}


def names(*edits):
    return {edit.name for edit in edits}


def test_what_the_runs_find_is_enough_where_it_is_written():
    assert found(Runs([A, B, C], [B], [B])) == names(B)
    assert found(Runs([A, B, C], [A, C], [A, C])) == names(A, C)
    assert found(Runs([A, B, C], [A], [A]), near=[A]) == names(A)


@pytest.mark.parametrize("needed", [[SILENT[0]], [SILENT[4]], SILENT[1:4], SILENT])
def test_a_cast_that_no_run_shows_is_found_and_no_other(needed):
    assert found(Runs([A, B, C], [B, *needed], [B])) == names(B, *needed)


def test_other_edits_are_found_where_those_of_the_runs_are_not_enough():
    assert found(Runs([A, B, C], [A, C], [B])) == names(A, C)
    assert found(Runs([A, B, C], [A, SILENT[2]], [B])) == names(A, SILENT[2])
    # The casts alone may be enough: what the runs find is left out then.
    assert found(Runs([A, B, C], [SILENT[2]], [B])) == names(SILENT[2])


def test_nothing_is_found_where_all_edits_are_not_enough():
    runs = Runs([A, B, C], [cast("other")], [B])
    assert found(runs) is None
    assert frozenset([A, B, C, *SILENT]) in runs.written


def test_what_cannot_be_written_is_made_with_all_casts():
    assert found(Runs([A, POLICY], [A], [POLICY], [], can_write=False)) == names(POLICY)
    # These lines have no source here.
    assert found(Runs([A, POLICY], [A], [POLICY], SILENT, can_write=False)) is None
    assert found(Runs([A, B, C], [A], [B], [], can_write=False)) is None


def test_rules_of_autocast_need_no_program_of_their_own():
    assert found(Runs([A, RULE], [A], [RULE], can_write=False)) == names(RULE)


def test_a_carry_that_follows_from_its_cast_is_left_out():
    both = Module("both", "", ("both.py:1:0",), casts="float16", carries=("loop.py:1:0",))
    runs = Runs([both, LAYER], [], [both])
    runs.error = lambda kept: 0.0 if any(edit.name == "both" and not edit.carries for edit in kept) else 1.0
    kept = few_edits(runs, runs.error, 0.1, [Module("both", "", ("both.py:1:0",), casts="float16")])
    assert [edit.carries for edit in kept] == [()]


def test_the_number_of_tries_is_bounded():
    silent = [cast(f"silent{n}") for n in range(200)]
    runs = Runs([A], [A, *silent[::2]], [A], silent)
    kept = found(runs)
    assert names(A, *silent[::2]) <= kept
    assert len(runs.written) <= MOST_EDITS + 8
    assert found(Runs(MANY, MANY, MANY)) == names(*MANY)


def test_an_edit_is_made_with_the_rule_that_it_needs():
    needs = [("a", frozenset({"x", "y"})), ("x", frozenset({"z"})), ("b", frozenset())]
    assert completed(needs, {"a"}, {"a", "x", "z"}) == {"a", "x", "z"}
    assert completed(needs, {"a", "y"}, {"a", "x", "y", "z"}) == {"a", "y"}
    assert completed(needs, {"a"}, {"a"}) is None
    assert completed(needs, {"b"}, {"a", "b", "x"}) is None
    assert completed(needs, {"c"}, {"c"}) == {"c"}

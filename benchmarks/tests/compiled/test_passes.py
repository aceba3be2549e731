"""The table of docs/how-autocast-works.md is what `python -m benchmarks.compiled.passes` prints."""

import pytest

from benchmarks.compiled import passes


@pytest.mark.exhaustive
def test_the_page_has_the_table_of_the_passes():
    text = passes.PAGE.read_text()
    for row in passes.rows():
        assert f"| {' | '.join(row)} |" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recompute", "checkpoints"])
def test_a_pass_holds_or_moves_fewer_bytes(name):
    """The two passes that save memory, each beside the passes in front of it, on an H100."""
    count = [each.__name__ for each in passes.planner.PASSES].index(name)
    before, after = (passes.megabytes(passes.first_passes(n)) for n in (count, count + 1))
    assert all(new <= old for new, old in zip(after, before))
    assert min(new / old for new, old in zip(after, before)) < 0.97

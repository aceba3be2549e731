"""The table of docs/how-autocast-works.md is what `python -m benchmarks.compiled.passes` prints."""

import pytest

from benchmarks.compiled import passes


@pytest.mark.exhaustive
def test_the_page_has_the_table_of_the_passes():
    text = passes.PAGE.read_text()
    for row in passes.rows():
        assert f"| {' | '.join(row)} |" in text


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("name", "checkpointed"), [("checkpoints", True), ("recompute", False)])
def test_a_pass_holds_fewer_bytes_and_moves_no_more(name, checkpointed):
    """The two passes that save memory, each beside the passes in front of it, on an H100."""
    count = [each.__name__ for each in passes.planner.PASSES].index(name)
    before, after = (
        passes.program(passes.first_passes(n), checkpointed, layers=2) for n in (count, count + 1)
    )
    assert after.bytes_moved <= before.bytes_moved
    assert after.temporary_bytes < 0.97 * before.temporary_bytes

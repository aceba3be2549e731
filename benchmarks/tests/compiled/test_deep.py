"""A scanned, rematerialized LLaMA at its true depth keeps and moves no more than with casts by hand."""

import pytest

from benchmarks.compiled.deep import SIZES, WAYS, program


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("size", SIZES)
def test_with_half_sums_a_deep_stack_keeps_and_moves_no_more_than_casts_by_hand(size):
    by_hand, default, ours = (program(SIZES[size], way) for way in list(WAYS)[:3])
    assert ours.temporary_bytes <= by_hand.temporary_bytes < default.temporary_bytes
    assert ours.bytes_moved <= by_hand.bytes_moved

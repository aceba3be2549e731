"""A scanned, rematerialized LLaMA at its true depth keeps and moves no more than with casts by hand."""

import functools

import pytest

from benchmarks.compiled.deep import SIZES, WAYS, program

program = functools.cache(program)  # Both tests look at the same programs.


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("size", SIZES)
def test_a_deep_stack_keeps_and_moves_no_more_than_with_casts_by_hand(size):
    by_hand, *ours = (program(SIZES[size], way) for way in list(WAYS)[:3])
    for each in ours:
        assert each.temporary_bytes <= 1.001 * by_hand.temporary_bytes
        assert each.bytes_moved <= by_hand.bytes_moved


@pytest.mark.slow
def test_a_loop_reads_no_mask_of_the_size_of_the_scores():
    by_hand, ours = (program(SIZES["7B"], way) for way in list(WAYS)[:2])
    assert ours.bytes_moved <= 0.74 * by_hand.bytes_moved
    assert ours.temporary_bytes <= 0.78 * by_hand.temporary_bytes  # Its softmaxes keep their weights alone.

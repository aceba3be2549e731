"""A mixture of experts over eight devices: with two options autocast moves the bytes of casts by hand."""

import pytest

from benchmarks.compiled.moe import WAYS, Size, program


@pytest.mark.parametrize(
    "size", [Size(512, 1792, 2, 1024), pytest.param(Size(), marks=pytest.mark.exhaustive)]
)
def test_rows_and_streams_in_half_move_the_bytes_of_casts_by_hand(size):
    by_hand, autocast, with_options = (program(size, way) for way in WAYS)
    assert with_options.bytes_moved <= 1.02 * by_hand.bytes_moved < autocast.bytes_moved
    assert with_options.temporary_bytes <= 1.02 * by_hand.temporary_bytes
    sent = [
        sum(each.size * each.times for each in one.collectives) for one in (by_hand, autocast, with_options)
    ]
    assert max(sent) <= 1.01 * sent[0]

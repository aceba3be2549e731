"""A loss with integer labels moves no more bytes than one with one-hot labels, in either order."""

import functools

import pytest

from benchmarks.compiled.labels import LOSSES, WAYS, program

program = functools.cache(program)  # Both losses are compared with one-hot labels.
SMALL = {"layers": 1, "width": 256, "length": 256, "vocabulary": 8192}


@pytest.mark.exhaustive  # tests/jaxpr/test_picks.py finds no scatter.
@pytest.mark.parametrize("loss", list(LOSSES)[1:])
@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_the_gradient_of_a_label_is_no_scatter_of_the_size_of_the_logits(loss, way):
    one_hot, ours = (program(each, way, **SMALL) for each in ("one-hot labels", loss))
    assert ours.bytes_moved <= 1.005 * one_hot.bytes_moved
    assert ours.temporary_bytes <= 1.005 * one_hot.temporary_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "most"), [(2, 0.83), pytest.param(12, 0.95, marks=pytest.mark.exhaustive)]
)
def test_a_gpt2_with_integer_labels_moves_and_keeps_less_than_by_hand(layers, most):
    by_hand, ours = (program("integer labels", way, layers=layers) for way in list(WAYS)[:2])
    assert ours.bytes_moved <= most * by_hand.bytes_moved
    assert ours.temporary_bytes <= 0.67 * by_hand.temporary_bytes

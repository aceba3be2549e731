"""Families of models beside the nine move little more than with casts by hand."""

import pytest

from benchmarks.compiled.families import WAYS, errors, program

# The limits are those of autocast with the stream in float32, and in half. A GNN sums its messages in
# float32, in place. Two layers, and a U-Net of its true widths, compile three times as long.
CASES = {
    "GNN": ({"layers": 1}, (1.04, 1.06)),
    "T5": ({"layers": 1}, (0.80, 0.78)),
    "U-Net": ({"layers": 1, "widths": (128, 256)}, (1.29, 1.07)),
    "ViT": ({"layers": 1}, (1.08, 0.985)),
}
LARGER = {"GNN": (1.06, 1.04), "T5": (0.97, 0.93), "U-Net": (1.34, 1.08), "ViT": (1.07, 1.0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "limits"),
    [
        *(
            # `test_h100` compiles the matmuls, norms and convolutions of the others.
            pytest.param(family, *case, marks=() if family == "GNN" else pytest.mark.exhaustive)
            for family, case in CASES.items()
        ),
        *(
            pytest.param(family, {"layers": 2}, limits, marks=pytest.mark.exhaustive)
            for family, limits in LARGER.items()
        ),
    ],
)
def test_a_family_moves_little_more_than_with_casts_by_hand(family, sizes, limits):
    by_hand, *ours = (program(family, way, **sizes).bytes_moved for way in list(WAYS)[:3])
    for moved, limit in zip(ours, limits, strict=True):
        assert moved <= limit * by_hand


@pytest.mark.exhaustive  # tests/autocast/test_sums.py has such sums.
def test_the_float32_sums_of_a_gnn_keep_digits_of_its_gradients():
    by_hand, autocast, *_ = errors("GNN")
    assert autocast < 0.5 * by_hand < 0.1

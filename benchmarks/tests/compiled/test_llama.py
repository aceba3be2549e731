"""What crosses between the devices of a LLaMA-like stack, by dtype."""

import functools

import pytest

from benchmarks.compiled.llama import MESHES, Llama, sent, sharded_program


@functools.cache
def sizes(mesh, way):
    sizes = sent(sharded_program(Llama(2048, 256), way, MESHES[mesh]))
    return sizes.get("f32", 0), sizes.get("f16", 0)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("mesh", MESHES)
def test_rows_of_a_table_cross_devices_in_half_on_request(mesh):
    """`allow=["gather"]` casts the table before rows are looked up, as casts by hand do."""
    by_hand, default, ours = (sizes(mesh, way) for way in ("by hand", "autocast", "autocast, gather"))
    assert sum(ours) <= 1.01 * sum(by_hand)
    assert ours[0] < 0.1 * default[0]

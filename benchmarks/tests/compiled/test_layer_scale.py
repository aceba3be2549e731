"""A loss scale for each block in the program for an H100."""

import importlib.util

import pytest

if importlib.util.find_spec("jax_cuda13_plugin") is None:
    pytest.skip('needs pip install -e ".[h100]"', allow_module_level=True)

from benchmarks.compiled.layer_scale import program


def test_a_scale_for_each_block_costs_a_kernel_and_leaves_every_product_in_half():
    sizes = {"batch": 2, "length": 128, "layers": 2, "width": 128, "vocabulary": 1024}
    one, each = program((), **sizes), program("blocks_*", **sizes)
    assert one.tensor_core_share == each.tensor_core_share == 1.0
    assert len(one.products) == len(each.products)
    assert 0 < each.kernels - one.kernels <= 2 * 3
    assert each.bytes_moved < 1.2 * one.bytes_moved

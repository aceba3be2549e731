"""Compiling for a GPU that the machine does not have: the errors.

benchmarks/tests/compiled/test_h100.py and test_other_gpus.py read the programs.
"""

import importlib.util

import jax.numpy as jnp
import pytest

from jmp_lite.programs import compile_for, mesh_for

HAS_PLUGIN = importlib.util.find_spec("jax_cuda13_plugin") is not None


def test_a_device_that_is_not_known_is_an_error():
    known = "'t4', 'a100', 'l4', 'h100', 'h200', 'b200'"
    with pytest.raises(ValueError, match=rf"The device should be one of {known}\. Got 'k80'\."):
        compile_for("k80", jnp.sin, jnp.ones(2))


def test_what_stands_in_the_wrong_place_is_named():
    with pytest.raises(TypeError, match=r"the device comes first, then the function. Got function and str"):
        compile_for(lambda x: x, "h100 sxm5 80", jnp.ones(2))
    for axes in ("d", {"d": "x"}, 8):
        with pytest.raises(ValueError, match=r"axes are names with sizes, such as \{'data': 8\}\. Got"):
            mesh_for("h100", axes)


@pytest.mark.parametrize("count", [0, 9, 12])
def test_a_mesh_has_whole_hosts(count):
    with pytest.raises(ValueError, match=f"a multiple of 8, eight a host. Got {count}"):
        mesh_for("h100", {"data": count})


def test_without_an_array_there_is_no_device_to_compile_for():
    with pytest.raises(ValueError, match="Give the function an array"):
        compile_for("h100", lambda x: x, 1.0)


@pytest.mark.skipif(HAS_PLUGIN, reason="The plugin is installed.")
def test_without_the_plugin_the_error_names_the_extra():
    with pytest.raises(RuntimeError, match=r"pip install -e \"\.\[h100\]\" in the clone"):
        compile_for("h100", jnp.sin, jnp.ones(2))

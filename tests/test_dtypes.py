"""Names of dtypes: which are read, how they are printed, which are errors."""

import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite
from jmp_lite._dtypes import dtype_name, parse_dtype

SPELLINGS = {
    "float16": [np.float16, jnp.float16, np.dtype("float16"), "float16", "f16", "fp16"],
    "bfloat16": [jnp.bfloat16, np.dtype(jnp.bfloat16), "bfloat16", "bf16"],
    "float32": [np.float32, jnp.float32, np.dtype("float32"), "float32", "f32", "full", "fp32"],
    "float64": [np.float64, jnp.float64, np.dtype("float64"), "float64", "f64"],
}


@pytest.mark.parametrize(
    ("name", "spelling"),
    [(name, spelling) for name, spellings in SPELLINGS.items() for spelling in spellings],
)
def test_every_spelling_names_the_same_dtype(name, spelling):
    dtype = parse_dtype(spelling)
    assert isinstance(dtype, np.dtype)
    assert dtype.name == name


@pytest.mark.parametrize("name", [*SPELLINGS, "float8_e4m3fn", "float8_e5m2"])
def test_the_printed_name_is_read_back(name):
    dtype = parse_dtype(name)
    assert parse_dtype(dtype_name(dtype)) == dtype


def test_printed_names_are_those_of_jmp():
    assert [dtype_name(parse_dtype(name)) for name in SPELLINGS] == ["f16", "bf16", "full", "f64"]


def test_half_is_float16_on_cpu_and_gpu_and_bfloat16_on_a_tpu(monkeypatch):
    class Device:
        platform = "cpu"

    monkeypatch.setattr("jax.local_devices", lambda: [Device])
    for Device.platform, expected in (("cpu", jnp.float16), ("gpu", jnp.float16), ("tpu", jnp.bfloat16)):
        assert jmp_lite.half_dtype() == expected
        assert parse_dtype("half") == expected


# NumPy alone would read the last four: as float64, as an object, as float32 and as float64.
@pytest.mark.parametrize("spec", ["float17", "compute_float16", "", "F16 ", "f8", "O4", "<f4", "d"])
def test_an_unknown_name_is_a_value_error_that_lists_the_names(spec):
    with pytest.raises(ValueError, match=f"Unknown dtype '{spec}'. It should be one of .*'half', 'bf16'"):
        parse_dtype(spec)


@pytest.mark.parametrize("spec", [None, 3, object(), [1], {"**": "fp8"}])
def test_other_values_than_dtypes_are_a_type_error(spec):
    with pytest.raises(TypeError, match="Expected a dtype or one of"):
        parse_dtype(spec)


@pytest.mark.parametrize("spec", [np.int32, "int8", bool, jnp.complex64, "uint32"])
def test_a_dtype_that_is_not_floating_is_a_type_error_that_says_why(spec):
    with pytest.raises(
        TypeError, match=r"Expected a floating dtype\. Got .* A policy casts floating values only"
    ):
        parse_dtype(spec)

"""The counts of values by what becomes of them in half, and the loss scales that follow."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmp_lite.diagnostics._ranges.magnitudes import EXPONENTS, Histogram, largest_safe, suggested
from tests.support.casts_of_values import DTYPES, cast, counts


def magnitudes(values, dtype="float16"):
    probe = Histogram(np.dtype(DTYPES[dtype]))
    return probe.read(np.asarray(jax.jit(probe.measure)(jnp.asarray(values))))


def edges(dtype):
    """The numbers at which rounding changes what becomes of a value, and their neighbours."""
    info = ml_dtypes.finfo(dtype)
    least, first, most = float(info.smallest_subnormal), float(info.smallest_normal), float(info.max)
    ulp = most - float(np.nextafter(info.max, dtype(0)))
    marks = np.array([least / 2, least, first, first - least / 2, first - least, most, most + ulp / 2])
    marks = np.concatenate([marks, 2.0 ** np.arange(-30, 20), [0.0]])
    marks = marks[marks < 3e38].astype(np.float32)
    near = [np.nextafter(marks, np.float32(end)) for end in (np.inf, 0)]
    return np.concatenate([marks, *near, -marks]).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_edges_of_the_range_are_those_of_a_cast(dtype):
    values = edges(DTYPES[dtype])
    measured = magnitudes(values, dtype)
    shifts = range(-45, 46) if dtype == "float16" else range(4)
    for exponent in shifts:
        assert counts(measured.fates(exponent)) == cast(values, exponent, DTYPES[dtype])


@pytest.mark.slow
@given(st.lists(st.floats(width=32, allow_subnormal=True), min_size=1, max_size=64), st.integers(-40, 40))
def test_the_counts_are_those_of_a_cast(values, exponent):
    values = np.resize(np.asarray(values, np.float32), 64)
    measured = magnitudes(values)
    assert counts(measured.fates(exponent)) == cast(values, exponent, np.float16)
    assert measured.values == values.size
    finite = np.abs(values[np.isfinite(values) & (values != 0)])
    assert measured.largest == (finite.max() if finite.size else 0)
    assert measured.smallest == (finite.min() if finite.size else 0)


@given(st.floats(2.0**-20, 2.0**30, width=32))
def test_the_largest_safe_scale_is_the_largest_power_of_two_below_65504(largest):
    found = largest_safe(largest, np.dtype("float16"))
    assert found == max(k for k in EXPONENTS if largest * 2.0**k < 65504)


def test_a_scale_is_a_float32_number_that_makes_1_a_float16_number():
    safe = lambda largest: largest_safe(largest, np.dtype("float16"))
    assert safe(1e-38) == 127  # 2**128 is inf in float32.
    assert (safe(2.0**39), safe(2.0**40)) == (-24, None)  # 2**-24 is the smallest number of float16.


def test_the_counts_and_the_shares():
    measured = magnitudes([0.0, 1.0, 1.5, -3.0, 2.0**-30, np.inf, np.nan])
    exponents = np.flatnonzero(measured.bins.sum(1)) - 149
    assert (*exponents, *measured.bins.sum(1)[exponents + 149]) == (-30, 0, 1, 1, 2, 1)
    assert (measured.zeros, measured.infs, measured.nans) == (1, 1, 1)
    fates = measured.fates()
    assert fates.share(fates.flushed) == fates.lost == 0.25
    both = measured + measured
    assert (both.values, both.smallest, both.largest) == (14, 2.0**-30, 3.0)
    assert magnitudes([]).fates().share(0) == 0.0


def test_the_suggested_scale_leaves_room_and_loses_no_more():
    # The largest gradient fits up to 2**15; 2**-20 is normal from 2**6 on, and one in 10,000 may be lost.
    assert suggested(magnitudes([1.0, 2.0**-30, *[2.0**-20] * 10000])) == 6
    # Here all stay subnormal at every safe scale, and none is lost from 2**6 on.
    gradients = magnitudes([1.0, *[2.0**-30] * 100])
    assert suggested(gradients) == 6
    assert gradients.fates(5).lost == pytest.approx(100 / 101)
    assert gradients.fates(6).lost == 0
    assert suggested(magnitudes([0.0])) is None

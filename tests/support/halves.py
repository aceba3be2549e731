"""Tests of both half dtypes: float16 always, bfloat16, which repeats it, among the exhaustive tests."""

import pytest

each_half = pytest.mark.parametrize(
    "half", ["float16", pytest.param("bfloat16", marks=pytest.mark.exhaustive)]
)

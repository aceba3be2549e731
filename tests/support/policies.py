"""Policies and inputs for the tests of `linen.with_policy` and `nnx.with_policy`."""

import pytest

import jmp_lite as jmp
from tests.support.arrays import integers, normal

F16 = jmp.get_policy("params=float32,compute=float16,output=float32")
BF16 = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
each_policy = pytest.mark.parametrize("policy", [F16, BF16], ids=["float16", "bfloat16"])

IMAGES = normal(1, 4, 6, 6, 3)
TOKENS = integers(2, 11, 3, 7)
SEQUENCE = normal(3, 4, 9, 6)

"""Policies and inputs for the tests of `linen.with_policy` and `nnx.with_policy`."""

import jax
import pytest

import jmp_lite as jmp

F16 = jmp.get_policy("params=float32,compute=float16,output=float32")
BF16 = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
each_policy = pytest.mark.parametrize("policy", [F16, BF16], ids=["float16", "bfloat16"])

IMAGES = jax.random.normal(jax.random.key(1), (4, 6, 6, 3))
TOKENS = jax.random.randint(jax.random.key(2), (3, 7), 0, 11)
SEQUENCE = jax.random.normal(jax.random.key(3), (4, 9, 6))

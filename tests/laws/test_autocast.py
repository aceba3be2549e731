"""The laws of autocast, over the product of programs, dtypes, options, orders and ways to run.

Each feature has tests of its own, mostly on float32 arrays. These tests put features beside each other:

(a) What runs in float32 runs under every option, or the error is a sentence of ours.
(b) Results have the dtypes of the float32 program, and what is not float32 keeps its bits.
(c) Both orders have the same products in the same dtypes.
(e) An option without effect is named by `explain`.
(f) No array of the user's outlives the call.

tests/laws/test_numbers.py has the laws of numbers. An option of autocast gets its row in `cases.OPTIONS`.
"""

import collections
import gc
import inspect
import traceback
import weakref

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jmp_lite as jmp
from jmp_lite._autocast.api import prepare
from jmp_lite._autocast.planning.rules import make_rules
from jmp_lite._autocast.planning.states import Kind
from jmp_lite._jaxpr.read import is_float32
from tests.laws.cases import OPTIONS, ORDERS, Case, cases
from tests.support.jaxprs import live_products, text

pytestmark = [
    pytest.mark.filterwarnings("ignore:autocast.*float8.*runs on cpu"),
    pytest.mark.usefixtures("whole_tracebacks"),
]


def test_every_parameter_of_autocast_has_a_row():
    assert set(OPTIONS) == set(inspect.signature(jmp.autocast).parameters)


class OurError(Exception):
    """autocast refused a case with a sentence of its own."""


def traced(fun, *args):
    """The jaxpr of a function and the types of its results. An error must be a sentence of jmp_lite."""
    try:
        return jax.make_jaxpr(fun, return_shape=True)(*args)
    except (ValueError, TypeError) as error:
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        raised_by = next(name for name in reversed(frames) if "jax/_src" not in name)
        if "jmp_lite/" in raised_by and "jax/_src" not in frames[-1]:
            raise OurError(str(error)) from None
        raise


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


@hypothesis.given(case=cases())
@hypothesis.settings(max_examples=60)
def test_a_program_runs_under_every_option_with_its_dtypes_and_the_same_products(case):
    """Laws a, b (dtypes) and c."""
    with case.context:
        args = case.arguments()
        _, expected = traced(case.value_and_grad(ORDERS[0], lambda fun: fun), *args)
        found = []
        for order in ORDERS:
            try:
                jaxpr, shapes = traced(case.value_and_grad(order), *args)
            except OurError:
                continue
            assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
                lambda x: (x.shape, x.dtype), expected
            )
            found.append(live_products(jaxpr))
        if len(found) == 2:
            assert found[0] == found[1]

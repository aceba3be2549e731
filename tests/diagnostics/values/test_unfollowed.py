"""The casts of functions that ran whose values are not known are found."""

import functools
import linecache

import jax
import jax.numpy as jnp
import pytest

from jmp_lite._jaxpr import trace
from jmp_lite.diagnostics._precision.sources import sources_of

F16, F32 = jnp.float16, jnp.float32
X = jnp.ones((4, 4))


def half(x):
    return x.astype(F16)


def double(x):
    return x * 2


def tree_map(tree):
    return jax.tree.map(lambda leaf: leaf.astype(F16), tree)


FOLLOWED = {
    "an_operation": lambda x: x.astype(F16) * 2,
    "an_operand": lambda x: double(x.astype(F16)).astype(F16) @ x.astype(F16),
    "a_helper": lambda x: half(half(x) * 2) * 2,
    "two_calls": lambda x: double(double(x.astype(F16)).astype(F16)),
    "a_number": lambda x: half(x) * jnp.asarray(2, F16),
    "float32": lambda x: half(x).astype(F32) * 2,
    "an_unknown_dtype": lambda x, dtype=F32: (half(x) * 2, (x.astype(dtype),)),
    "a_dict": lambda x: double({"x": double(half(x)).astype(F16)}["x"]),
    "a_reduction": lambda x: functools.reduce(lambda v, _: v.astype(F16) * 2, [0, 0], half(x)),
}
OTHERS = {
    "a_list": (lambda x: [half(x), [half(x) * 2][0].astype(F16)][1] * 1, "[half(x) * 2][0]"),
    "a_tree": (lambda x: jax.tree.map(lambda v: v.astype(F16), [double(half(x))])[0] * 2, "v.astype(F16)"),
    "a_function_without_operations": (lambda x: tree_map([double(half(x))])[0] * 2, "leaf.astype"),
    "a_comprehension": (lambda x: double(*[v.astype(F16) for v in [double(half(x))]]), "v.astype"),
}


def texts_of(fun):
    found = sources_of(trace(fun, (X,), {}, with_names=True), False, {})
    lines = (line.partition(" ")[0].rsplit(":", 2)[1:] for edit in found.unknown for line in edit.lines)
    return [linecache.getline(__file__, int(row))[int(column) :] for row, column in lines]


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_cast_whose_operand_is_known_is_followed(name):
    assert texts_of(FOLLOWED[name]) == []


@pytest.mark.parametrize("name", OTHERS)
def test_a_cast_whose_operand_is_not_known_is_found(name):
    fun, expected = OTHERS[name]
    (text,) = texts_of(fun)
    assert text.startswith(expected)

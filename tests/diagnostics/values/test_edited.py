"""Functions run with float32 in place of half precision on some lines, and afterwards as they are."""

import functools
import linecache
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_lite.diagnostics._values.edited import (
    UnknownFunctionError,
    are_known,
    edited,
    functions_in,
    watched,
)

F16 = jnp.float16
X = jnp.ones(3)


def function(x):
    return x.astype(F16)


@jax.jit
def jitted(x):
    return jnp.asarray(x, F16)


@functools.cache
def closure(dtype):
    name = jnp.float16
    return lambda x: x.astype(name) + jnp.zeros(3, dtype)


class Layer:
    dtype = F16

    def __call__(self, x, other=F16):
        return x.astype(self.dtype) * x.astype(other)


@jax.custom_vjp
def custom(x):
    return x * 1


custom.defvjp(lambda x: (x, None), lambda _, g: (lax.convert_element_type(g, "float16") * jnp.ones(3),))


def scanned(x):
    return lax.scan(lambda c, u: (c, u.astype(F16)), jnp.zeros((), F16), x)


FUNCTIONS = {
    "x.astype(F16)": function,
    "jnp.asarray(x, F16)": jitted,
    "x.astype(name)": closure(F16),
    "u.astype(F16)": lambda x: scanned(x)[1],
    'x.astype("float16")': lambda x: (lambda x: x.astype("float16"))(x),
    "jnp.float16(2)": lambda x: jnp.float16(2) * (x > 0),
}


def place(text):
    """Returns the line of the first call with a text in this file."""
    rows = enumerate(linecache.getlines(__file__), start=1)
    row, line = next((row, line) for row, line in rows if text in line)
    return f"{__file__}:{row}:{line.rindex(text)} (function)"


def of(roots):
    """Returns the functions of this file that roots reach."""
    return functions_in(roots, [__file__])


def dtype_of(fun):
    return jax.make_jaxpr(fun)(X).jaxpr.outvars[0].aval.dtype


@pytest.mark.parametrize("text", FUNCTIONS)
def test_a_function_runs_with_an_edit_and_then_without_it(text):
    fun, line = FUNCTIONS[text], place(text)
    before = dtype_of(fun)
    assert are_known([line], [])
    with edited(of([fun]), [line], []):
        assert dtype_of(fun) == jnp.float32
    assert dtype_of(fun) == before == jnp.float16


def test_an_edit_is_made_at_its_own_place_alone():
    layer = Layer()
    assert dtype_of(layer) == jnp.float16
    with edited(of([layer]), [place("x.astype(other)")], []):
        assert dtype_of(layer) == jnp.float32
        assert dtype_of(function) == jnp.float16


def test_a_backward_rule_is_edited():
    gradient = jax.grad(lambda x: jnp.sum(custom(x)))
    line = place('lax.convert_element_type(g, "float16")')

    def casts():
        return "f16" in str(jax.make_jaxpr(gradient)(X))

    assert casts()
    with edited(of([gradient]), [line], []):
        assert not casts()
    assert casts()


LOOPS = {
    "lax.scan(lambda c, u: (c, u.astype(F16))": scanned,
    "lax.fori_loop(": lambda x: lax.fori_loop(0, 2, lambda i, c: c + x[i], jnp.zeros((), F16)),
    "lax.while_loop(": lambda x: lax.while_loop(lambda c: c < 0, lambda c: c + x[0], jnp.zeros((), F16)),
}


@pytest.mark.parametrize("text", LOOPS)
def test_a_carry_starts_in_float32(text):
    fun, line = LOOPS[text], place(text)
    x = X.astype(F16)

    def dtype():
        return jax.make_jaxpr(fun)(x).jaxpr.outvars[0].aval.dtype

    assert dtype() == jnp.float16
    with edited(of([fun]), [], [line]):
        assert dtype() == jnp.float32
    assert dtype() == jnp.float16


def test_a_function_that_is_not_found_is_an_error(monkeypatch):
    monkeypatch.delitem(sys.modules, __name__)
    with (
        pytest.raises(UnknownFunctionError, match="1 of 1 edits did not run"),
        edited(of([]), [place("x.astype(F16)")], []),
    ):
        pass
    assert dtype_of(function) == jnp.float16


def test_a_function_in_a_tuple_of_another_library_is_found():
    class Transformed(tuple):
        """Holds functions, as Haiku's does."""

    line, held = place("x.astype(F16)"), Transformed([lambda x: (lambda x: function(x))(x)])
    with edited(of([held]), [line], []):
        assert dtype_of(held[0]) == jnp.float32


def test_a_line_without_a_half_dtype_is_not_known():
    assert not are_known([place("return x * 1")], [])
    assert not are_known([], [place("x.astype(F16)")])
    assert not are_known(["<string>:1:2 (f)"], [])


def inner(x, dtype):
    return x.astype(dtype)


def silent(x, is_run=True):
    h = inner(x, F16)
    g = inner(x, jnp.float32) + jax.tree.map(lambda leaf: leaf.astype(F16), {"h": h})["h"]
    full = lambda shape, fill: g + jnp.zeros(shape, "float16")
    return full(3, h) if is_run else jnp.asarray(g, jnp.bfloat16)


def test_the_half_dtypes_that_a_program_takes_are_noted():
    """Also that of a cast that does nothing; none where the dtype is float32, or that did not run."""
    found = {}
    with watched(of([silent]), found):
        assert dtype_of(silent) == jnp.float32
    named = {
        line.partition(" ")[0].rpartition(":")[0].rpartition(":")[2]: name for line, name in found.items()
    }
    lines = linecache.getlines(__file__)
    assert {lines[int(row) - 1].strip()[:12] for row in named} == {
        "h = inner(x,",
        "return x.ast",
        "g = inner(x,",
        "full = lambd",
    }
    assert set(named.values()) == {"float16"}
    with watched(of([silent]), found):
        jax.make_jaxpr(functools.partial(silent, is_run=False))(X)
    assert "bfloat16" in found.values()
    assert dtype_of(function) == jnp.float16

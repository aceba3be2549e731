"""The casts of arguments and results are found where a function is called."""

import functools
import linecache
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_lite._jaxpr import Category, inner_jaxprs, open_jaxpr, source_line, traits_of, users_places
from jmp_lite.diagnostics._values.casts import casts_around, casts_entering

F16 = jnp.float16
X = jnp.ones((4, 4), F16)


def double(x, w=1.0):
    y = x * 2
    x = jnp.tanh(y)
    return x * w


def scaled(w, x):
    return x * w


def through(v):
    return double(v)


class Doubling:
    def __call__(self, x):
        return x * 2


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * 2


times = lambda v: v * 2


def looped(x):
    for _ in range(2):
        y = x * 2
        x = y + 1
    return x


def decorated(function):
    def run(*args, **kwargs):
        return function(*args, **kwargs)

    return run


@decorated
def of_decorator(x):
    return x * 2


alias = double


def called(function, x):
    return function(x)


def renamed_to_half(function):
    return lambda h: function(
        h.astype(F16)  # A line of its own.
    )


def renamed(function):
    return lambda other: function(other + 0)


CALLS = {
    "a_call": lambda h: double(h.astype(F16)),
    "a_keyword": lambda h: double(w=2.0, x=h.astype(F16)),
    "two_calls": lambda h: through(h.astype(F16)),
    "a_name": lambda h: [double(u) for u in [0]] if h is None else named(h),
    "a_lambda": lambda h: times(h.astype(F16)),
    "a_method": lambda h: Doubling()(h.astype(F16)),
    "linen": lambda h: Layer().apply({}, h.astype(F16)),
    "jit": lambda h: jax.jit(double)(h.astype(F16)),
    "vmap": lambda h: jax.vmap(double)(h.astype(F16)),
    "decorator": lambda h: of_decorator(h.astype(F16)),
    "partial": lambda h: functools.partial(scaled, 2.0)(h.astype(F16)),
    "checkpoint": lambda h: jax.checkpoint(double)(h.astype(F16)),
    "cond": lambda h: lax.cond(jnp.sum(h) < 0, double, lambda v: v, h.astype(F16)),
    "switch": lambda h: lax.switch(jnp.int32(h.shape[0]), [double, lambda v: v], h.astype(F16)),
    "an_alias": lambda h: alias(h.astype(F16)),
    "a_table": lambda h: {"double": double}["double"](h.astype(F16)),
    "an_argument": lambda h: called(double, h.astype(F16)),
    "a_function_of_a_class": lambda h: Doubling.__call__(Doubling(), h.astype(F16)),
    "a_named_partial": lambda h: (bound := functools.partial(scaled, 2.0)) and bound(h.astype(F16)),
    "a_decorator": lambda h: renamed_to_half(double)(h),
    "scanned": lambda h: lax.scan(lambda c, u: (c, u * 2), 0.0, h.astype(F16))[1],
}
LOOPS = {
    "scan": lambda h: lax.scan(lambda c, u: (c * 2, u), h.astype(F16), h)[0],
    "fori_loop": lambda h: lax.fori_loop(0, 3, lambda i, c: c * 2, h.astype(F16)),
    "while_loop": lambda h: lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c * 2, h.astype(F16)),
    "two_carries": lambda h: lax.fori_loop(0, 3, lambda i, c: (c[0] * 2, c[1]), (h.astype(F16), h))[0],
}
OTHERS = {
    **LOOPS,  # The body gives a carry as well.
    "no_cast": lambda h: double(h),
    "another_argument": lambda h: double(h, w=jnp.asarray(1.0, F16)),
    "starred": lambda h: double(*[h.astype(F16)]),
    "assigned_in_a_loop": lambda h: looped(h.astype(F16)),
    "a_function_of_jax": lambda h: jax.tree.map(scaled, 2.0, h.astype(F16)),
    "a_partial_of_another_function": lambda h: called(functools.partial(scaled, 2.0), h.astype(F16)),
    "a_builtin": lambda h: next(map(double, [h.astype(F16)])),
    "a_reduction": lambda h: functools.reduce(double, [h], h.astype(F16)),
    "a_function_between": lambda h: renamed(double)(h.astype(F16)),
}


def named(h):
    half = h.astype(F16)
    return double(half)


def traced(fun, name):
    """Returns the operations of a function with a name, each with its places and those of the calls."""

    def inside(equations, around):
        for equation in equations:
            places = [*users_places(equation), *around]
            if equation.primitive.name == name:
                yield equation, places
            elif traits_of(equation.primitive.name).category is Category.CALL:
                for inner in inner_jaxprs(equation):
                    yield from inside(open_jaxpr(inner.jaxpr).eqns, places)

    return list(inside(jax.make_jaxpr(fun)(X).jaxpr.eqns, []))


def casts_of(fun):
    """Returns the text of each cast of an operand of the first multiplication, and of its result."""
    equation, places = traced(fun, "mul")[0]
    (found,) = casts_around(source_line(equation), "mul", places)
    operands = [_text(line) for lines in found.operands.values() for line in lines]
    return operands, [_text(place) for place in found.of_result]


def _text(place):
    row, column = re.search(r":(\d+):(\d+) ", place).groups()
    return linecache.getline(__file__, int(row))[int(column) :]


@pytest.mark.parametrize("name", CALLS)
def test_an_operand_that_is_a_parameter_is_cast_where_the_function_is_called(name):
    operands, _ = casts_of(CALLS[name])
    assert len(operands) == 1
    assert operands[0].startswith("h.astype(F16)")


@pytest.mark.parametrize("name", OTHERS)
def test_an_argument_that_is_not_cast_or_not_known_gives_no_cast(name):
    assert casts_of(OTHERS[name]) == ([], [])


def returns(h):
    return double(h)


def kept(h):
    result = returns(h)
    return jnp.tanh(result.astype(F16))


def test_a_result_is_cast_where_the_function_is_called():
    for fun in (lambda h: returns(h).astype(F16), lambda h: kept(h)):
        equation, places = traced(fun, "mul")[-1]
        (found,) = casts_around(source_line(equation), "mul", places)
        assert [".astype(F16)" in _text(line) for line in found.of_result] == [True]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cond", [-1]),
        ("switch", [-1]),
        ("scan", [0]),
        ("fori_loop", [-1]),
        ("while_loop", [-1]),
        ("two_carries", [-2]),
    ],
)
def test_what_branches_take_and_loops_start_from_is_known_by_its_operand(name, expected):
    every = {**CALLS, **LOOPS}
    ((equation, places),) = [each for kind in ("cond", "scan", "while") for each in traced(every[name], kind)]
    found = casts_entering(equation, places).operands
    assert [*found] == [number % len(equation.invars) for number in expected]
    assert all(_text(line).startswith("h.astype(F16)") for lines in found.values() for line in lines)

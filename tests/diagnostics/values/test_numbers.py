"""The numbers that half precision rounds away are found in the source, and no others are taken for them."""

import linecache
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_lite.diagnostics._values import numbers
from jmp_lite.diagnostics._values.numbers import lost_numbers
from jmp_lite.diagnostics._values.source import makes_half as makes_half_at

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")

F16 = jnp.float16
X = jnp.ones((2, 3), F16)


EPS = 1e-12


def found(fun):
    return sorted(written.number for written in lost_numbers(jax.make_jaxpr(fun)(X)).values())


def sure(fun):
    return [written.is_sure for written in lost_numbers(jax.make_jaxpr(fun)(X)).values()]


def softmax_of_a_masked_row(x):
    mask = jnp.where(x > 0, -1e9, 0.0)
    return jax.nn.softmax(x + mask.astype(F16))


def power_of_a_base(x):
    base = F16(5e5)
    return base**x


@pytest.mark.parametrize(
    ("fun", "numbers"),
    [
        (lambda x: x + 1e-8, [1e-8]),
        (lambda x: x / (x + 1e-9) * 3, [1e-9]),
        (lambda x: x - 1e-12, [1e-12]),
        (lambda x: x * 70000.0, [70000.0]),
        (lambda x: x + 1_000_000.0, [1e6]),
        (lambda x: x * 0.999, [0.999]),
        (power_of_a_base, [5e5]),
        (lambda x: jnp.maximum(x, 1e-12), [1e-12]),
        (lambda x: x / jnp.maximum(jnp.sum(x), EPS), [1e-12]),
        (lambda x: x + jnp.full((2, 1), 1e-8, F16), [1e-8]),
        (lambda x: x * 2.0**-30, [2.0**-30]),
        (lambda x: x + F16(1e-9), [1e-9]),
        (lambda x: x + jnp.float32(1e-9).astype(F16), [1e-9]),
        (lambda x: x + jnp.full((), 1e-9, F16), [1e-9]),
        (lambda x: x - np.asarray(-1e-9, np.float16), [-1e-9]),
        (lambda x: jnp.where(x > 1e-9, x, 0.0), [1e-9]),
        (lambda x: x * (x >= 0.999), [0.999]),
        (lambda x: jnp.zeros_like(x) * (x > 1e-9), [1e-9]),  # The number of a comparison, and no other.
    ],
)
def test_a_number_that_is_rounded_is_found(fun, numbers):
    assert found(fun) == pytest.approx(numbers)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.maximum(x, 0.0) * 0.5,
        lambda x: x * 2 + 0.25,
        softmax_of_a_masked_row,
        lambda x: jnp.log(x * 2).astype(jnp.float32) * 1e-12,  # A factor of float32 values.
        lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)),
    ],
)
def test_other_numbers_are_left(fun):
    assert found(fun) == []


def keeping(dtype):
    def fun(x):
        keep = jnp.asarray(0.999, dtype)
        return x.astype(jnp.float32) * keep

    return fun


def following(x):
    dtype = x.dtype
    return x * jnp.asarray(0.999, dtype) * jnp.asarray(0.998, x.dtype)


def test_a_dtype_may_have_a_name_that_the_source_does_not_explain():
    assert found(keeping(jnp.bfloat16)) == [0.999]
    assert found(keeping(jnp.float32)) == []
    (written,) = lost_numbers(jax.make_jaxpr(keeping(jnp.bfloat16))(X)).values()
    assert f":{keeping.__code__.co_firstlineno + 2}:" in written.line
    # The dtype of an array follows the array: to leave the conversion out is no edit.
    followed = lost_numbers(jax.make_jaxpr(following)(X)).values()
    assert [(written.number, written.line) for written in followed] == [(0.999, ""), (0.998, "")]


@pytest.mark.parametrize(
    ("expression", "makes_half"),
    [
        ("x.astype(jnp.bfloat16)", True),
        ('x.astype("float16")', True),
        ("x.astype(H)", True),
        ("x.astype(self.dtype)", True),
        ("jnp.array(x, H)", True),
        ("jnp.zeros((2,), H)", True),
        ("jnp.ones((2,), H)", True),
        ("jnp.full((2,), 3.0, H)", True),
        ("jnp.zeros((2,), dtype=H)", True),
        ("lax.convert_element_type(x, H)", True),
        ("x.astype(F32)", False),
        ("x.astype(y.dtype)", False),
        ("jnp.zeros_like(x)", False),
        ("net.apply(x, H)", False),  # Any argument.
        ("jnp.asarray(x)", False),
    ],
)
def test_which_calls_convert_to_a_half_dtype(expression, makes_half, monkeypatch):
    source = f"def fun(self, x, y, H):\n    return {expression}\n"
    monkeypatch.setitem(linecache.cache, "/drawn/call.py", (len(source), None, source.splitlines(True), ""))
    module = SimpleNamespace(__file__="/drawn/call.py", jnp=jnp, F32=jnp.float32)
    monkeypatch.setitem(sys.modules, "drawn_call", module)
    assert makes_half_at("/drawn/call.py:2:11 (fun)") == makes_half


def test_a_number_beside_the_expression_is_not_taken_for_one_in_it():
    epsilon = float("1e-10")
    assert found(lambda x: jnp.log(x + epsilon).astype(jnp.float32) * 1e-12) == [1e-10]


def test_a_number_of_which_only_the_default_is_known_may_be_another_one():
    def with_default(x, eps=1e-9):
        return x + eps

    class Norm:
        epsilon: float = 1e-9

        def __init__(self, small=1e-10):
            self.small = small

        def __call__(self, x):
            return x + self.epsilon

        def smaller(self, x):
            return x + self.small

    assert [found(fun) for fun in (with_default, Norm(), Norm().smaller)] == [[1e-9], [1e-9], [1e-10]]
    assert [sure(fun) for fun in (with_default, Norm(), Norm().smaller)] == [[False]] * 3
    assert sure(lambda x: x + 1e-9) == [True]


def test_a_name_that_is_not_known_is_taken_for_a_small_number_where_it_is_added():
    def added(x, eps):
        return x + eps

    assert found(lambda x: added(x, 1e-10)) == [1e-8]
    assert sure(lambda x: added(x, 1e-10)) == [False]
    assert found(lambda x: (lambda eps: x * eps)(1e-10)) == []
    assert found(lambda x: sum([x, x])) == []  # The 0 with which Python's sum begins.


def chained(x):
    x = x * 0.9991
    x = x * 0.9992 + 1e-8
    x = x * 0.9993
    return x * 0.9994


def test_a_name_that_is_computed_from_itself_is_searched_for_a_few_times(monkeypatch):
    """Each search walks over the function. Once they went on to the limit of recursion, for minutes."""
    searches, assigned = [], numbers.assigned
    monkeypatch.setattr(numbers, "assigned", lambda *args: searches.append(args) or assigned(*args))
    assert found(chained) == pytest.approx([1e-8, 0.9991, 0.9992, 0.9993, 0.9994])
    assert len(searches) < 30

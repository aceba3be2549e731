"""The casts to half around an operation are found in the source, also those that the jaxpr does not have."""

import inspect
import linecache
import re

import jax
import jax.numpy as jnp
import pytest

from jmp_lite.diagnostics import find_nonfinite
from jmp_lite.diagnostics._values.casts import casts_around

FILE = "/drawn/casts.py"
F16 = jnp.float16


def casts(expression, primitive, before="", row=3, column=11):
    source = f"def fun(x, a, b, H):\n    {before or 'pass'}\n    return {expression}\n"
    source += "to_half = lambda x, y: x.astype(jnp.float16)\ndef half(x):\n    return x.astype(jnp.float16)\n"
    source += "def other(x):\n    x = x + 1\n    return x.astype(jnp.float16)\n"
    linecache.cache[FILE] = (len(source), None, source.splitlines(True), FILE)

    def place(line):
        names = {3: "(fun)", 2: "(fun)", 4: "(<lambda>)", 6: "(half)"}
        row, column, name = re.fullmatch(rf"{FILE}:(\d+):(\d+) (.*)", line).groups()
        assert name == names[int(row)]
        return int(row), int(column)

    every = casts_around(f"{FILE}:{row}:{column} (fun)", primitive)
    found = (each for each in every if each.operands or each.of_result)
    return [
        ({at: [*map(place, lines)] for at, lines in each.operands.items()}, [*map(place, each.of_result)])
        for each in found
    ]


@pytest.mark.parametrize(
    ("expression", "primitive", "expected"),
    [
        ("x.astype(H) @ a", "dot_general", [({0: [(3, 11)]}, [])]),
        ("x @ jnp.asarray(a, H)", "dot_general", [({1: [(3, 15)]}, [])]),
        ("x.astype(H) @ a", "mul", []),  # Another operation of the same place, such as a broadcast.
        ("x.astype(H) * a + b.astype(H)", "mul", [({0: [(3, 11)]}, [])]),
        ("x.astype(H) * a + b.astype(H)", "add", [({1: [(3, 29)]}, [])]),
        ("jnp.tanh(x.astype(H))", "tanh", [({0: [(3, 20)]}, [])]),
        ("x.astype(H).sum()", "reduce_sum", [({0: [(3, 11)]}, [])]),
        ("jnp.asarray(jnp.tanh(x), H)", "tanh", []),  # The place is that of the cast.
        ("x.astype(b.dtype) @ a", "dot_general", []),  # It follows `b`.
        ("jnp.zeros(3, H) + a", "add", []),  # It converts nothing.
        ("lax.select(x, a.astype(H), b)", "select_n", [({2: [(3, 25)]}, [])]),
        ("jnp.where(x, a, b.astype(H))", "select_n", [({1: [(3, 27)]}, [])]),
        ("lax.select_n(x, a.astype(H), b)", "select_n", [({1: [(3, 27)]}, [])]),
        ("lax.concatenate([a, b.astype(H)], 0)", "concatenate", [({1: [(3, 31)]}, [])]),
        ("half(x) @ a", "dot_general", [({0: [(6, 11)]}, [])]),
        ("x @ to_half(a, b)", "dot_general", [({1: [(4, 23)]}, [])]),
        ("other(x) @ a", "dot_general", []),  # It does more than that.
        ("half(x.astype(H)) @ a", "dot_general", [({0: [(6, 11), (3, 16)]}, [])]),  # The last one first.
        # A promotion is that of the one operand in half.
        ("x.astype(H) @ a", "convert_element_type", [({0: [(3, 11)]}, [])]),
        ("x.astype(H) @ half(a)", "convert_element_type", []),
    ],
)
def test_the_casts_of_operands_are_found_by_position(expression, primitive, expected):
    assert casts(expression, primitive) == expected


def test_the_cast_of_a_result_is_that_around_it():
    assert casts("(x @ a).astype(H)", "dot_general", column=12) == [({}, [(3, 11)])]
    assert casts("jnp.asarray(jnp.tanh(x), H)", "tanh", column=23) == [({}, [(3, 11)])]
    assert casts("(x @ a).sum()", "dot_general", column=12) == []


def test_the_casts_of_a_result_are_those_of_the_name_that_it_is_assigned_to():
    assert casts("y.astype(H)", "mul", "y = x * 2", row=2, column=8) == [({}, [(3, 11)])]
    assert casts("y[:, 0].astype(H)", "mul", "y = x * 2", row=2, column=8) == [({}, [(3, 11)])]
    assert casts("half(y)", "mul", "y = x * 2", row=2, column=8) == [({}, [(6, 11)])]
    assert casts("y.astype(H)", "mul", "y = x * 2; y = y.astype(H)", row=2, column=8) == [({}, [(2, 19)])]
    assert casts("y.astype(H)", "mul", "y = x.astype(H); y = x * 2", row=2, column=25) == [({}, [(3, 11)])]
    loop = "for _ in range(2): z = y.astype(H); y = x * 2"  # The next iteration casts it.
    assert casts("y", "mul", loop, row=2, column=44) == [({}, [(2, 27)])]


def test_a_name_stands_for_the_cast_that_it_is_assigned_once():
    assert casts("y @ a", "dot_general", "y = x.astype(H)") == [({0: [(2, 8)]}, [])]
    assert casts("y @ a", "dot_general", "y = x.astype(H); y = y + 1") == []
    assert casts("y @ a", "dot_general", "y = x + 1; y = x.astype(H)") == [({0: [(2, 19)]}, [])]
    assert casts("y @ a", "dot_general", "y, z = x.astype(H), b") == [({0: [(2, 11)]}, [])]
    # The one that is assigned in a branch may be the other one.
    assert casts("y @ a", "dot_general", "y = x + 1\n    if b: y = x.astype(H)", row=4) == []
    assert casts("x @ a", "dot_general", "y = x.astype(H)") == []
    assert casts("y @ a", "dot_general", "y = x.astype(H); y = half(y)") == [({0: [(6, 11), (2, 8)]}, [])]


def loss(p, x):
    return 1e5 * jnp.sum((jnp.tanh(x.astype(F16)) @ p.astype(F16)).astype(jnp.float32))


def layers(p, x):
    h = jnp.sin(x.astype(F16) @ p.astype(F16))
    return 1e5 * jnp.sum((h.astype(F16) @ p.astype(F16)).astype(jnp.float32))


def squares(x):
    out = x.astype(F16)
    return jnp.sum((out * out * jnp.asarray(1e-3, F16)).astype(jnp.float32))


def test_of_two_operators_at_one_place_the_number_belongs_to_its_own():
    """To convert the number in float32 once was said to mend the square, which overflows."""
    (trial,) = (trial for trial in find_nonfinite(squares)(jnp.full(4, 300.0)).remedies if not trial.dtype)
    (line,) = trial.lines
    row = inspect.getsourcelines(squares)[1] + 1
    assert line.endswith(f"test_casts.py:{row}:10 (squares)")


@pytest.mark.parametrize(("fun", "column"), [(loss, 52), (layers, 26)])
def test_the_gradient_of_a_cast_is_rounded_to_half_whatever_computes_it(fun, column):
    """To cast only the other operand in float32 once was said to fix it."""
    step = lambda p, x: jax.grad(fun)(p, x)
    report = find_nonfinite(step, value_and_grad_fn=None)(0.1 * jnp.eye(8), jnp.ones((64, 8)))
    (trial,) = (trial for trial in report.remedies if not trial.dtype)
    places = [line.partition(" ")[0].rpartition(":")[2] for line in trial.lines]
    assert str(column) in places

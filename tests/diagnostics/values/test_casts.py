"""The casts to half around an operation are found in the source, also those that the jaxpr does not have."""

import linecache

import jax
import jax.numpy as jnp
import pytest

from jmp_lite.diagnostics import find_nonfinite
from jmp_lite.diagnostics._values.casts import casts_around

FILE = "/drawn/casts.py"
F16 = jnp.float16


def casts(expression, primitive, before="", column=11):
    source = f"def fun(x, a, b, H):\n    {before or 'pass'}\n    return {expression}\n"
    linecache.cache[FILE] = (len(source), None, source.splitlines(True), FILE)

    def place(line):
        return (
            tuple(map(int, line.removeprefix(f"{FILE}:").removesuffix(" (fun)").split(":"))) if line else ()
        )

    found = casts_around(f"{FILE}:3:{column} (fun)", primitive)
    return [({at: place(line) for at, line in each.operands.items()}, place(each.result)) for each in found]


@pytest.mark.parametrize(
    ("expression", "primitive", "expected"),
    [
        ("x.astype(H) @ a", "dot_general", [({0: (3, 11)}, ())]),
        ("x @ jnp.asarray(a, H)", "dot_general", [({1: (3, 15)}, ())]),
        ("x.astype(H) @ a", "mul", []),  # Another operation of the same place, such as a broadcast.
        ("x.astype(H) * a + b.astype(H)", "mul", [({0: (3, 11)}, ())]),
        ("x.astype(H) * a + b.astype(H)", "add", [({1: (3, 29)}, ())]),
        ("jnp.tanh(x.astype(H))", "tanh", [({0: (3, 20)}, ())]),
        ("x.astype(H).sum()", "reduce_sum", [({0: (3, 11)}, ())]),
        ("jnp.asarray(jnp.tanh(x), H)", "tanh", []),  # The place is that of the cast.
        ("x.astype(b.dtype) @ a", "dot_general", []),  # It follows `b`.
        ("jnp.zeros(3, H) + a", "add", []),  # It converts nothing.
    ],
)
def test_the_casts_of_operands_are_found_by_position(expression, primitive, expected):
    assert casts(expression, primitive) == expected


def test_the_cast_of_a_result_is_that_around_it():
    assert casts("(x @ a).astype(H)", "dot_general", column=12) == [({}, (3, 11))]
    assert casts("jnp.asarray(jnp.tanh(x), H)", "tanh", column=23) == [({}, (3, 11))]
    assert casts("(x @ a).sum()", "dot_general", column=12) == []


def test_a_name_stands_for_the_cast_that_it_is_assigned_once():
    assert casts("y @ a", "dot_general", "y = x.astype(H)") == [({0: (2, 8)}, ())]
    assert casts("y @ a", "dot_general", "y = x.astype(H); y = y + 1") == []
    assert casts("x @ a", "dot_general", "y = x.astype(H)") == []


def loss(p, x):
    return 1e5 * jnp.sum((jnp.tanh(x.astype(F16)) @ p.astype(F16)).astype(jnp.float32))


def layers(p, x):
    h = jnp.sin(x.astype(F16) @ p.astype(F16))
    return 1e5 * jnp.sum((h.astype(F16) @ p.astype(F16)).astype(jnp.float32))


@pytest.mark.parametrize(("fun", "column"), [(loss, 52), (layers, 26)])
def test_the_gradient_of_a_cast_is_rounded_to_half_whatever_computes_it(fun, column):
    """To cast only the other operand in float32 once was said to fix it."""
    step = lambda p, x: jax.grad(fun)(p, x)
    report = find_nonfinite(step, value_and_grad_fn=None)(0.1 * jnp.eye(8), jnp.ones((64, 8)))
    (trial,) = (trial for trial in report.remedies if not trial.dtype)
    places = [line.partition(" ")[0].rpartition(":")[2] for line in trial.lines]
    assert str(column) in places

"""Half values that have one dtype are widened together: JAX refuses a program that has two."""

import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_lite.diagnostics import find_nonfinite
from jmp_lite.diagnostics._precision.modules import Module
from jmp_lite.diagnostics._precision.ties import Constraints

F16, F32 = jnp.float16, jnp.float32
X = jax.random.normal(jax.random.key(0), (8, 8))


def names(text):
    return tuple(frozenset(part) for part in text.split())


def every(text):
    return {name: Module(name, "") for name in text}


@pytest.mark.parametrize(
    ("edits", "ties", "expected"),
    [
        ("a", ["a b"], "ab"),
        ("b", ["a b"], "ab"),
        ("c", ["a b"], "c"),
        ("a", ["a b", "b c"], "abc"),
        ("c", ["ab bc"], "ac"),
        ("a", ["ab ab"], "a"),
        ("a", ["a yz"], "ayz"[:2]),  # Either is enough.
        ("a", ["a x"], None),  # What a user cannot write is no edit.
        ("c", ["a x"], "c"),
    ],
)
def test_edits_are_completed_until_each_tie_has_one_dtype(edits, ties, expected):
    found = Constraints(list(map(names, ties))).completed(edits, every("abcyz"), of_gradients=True)
    assert found == (None if expected is None else frozenset(expected))


def test_only_right_gradients_need_what_a_cast_takes():
    constraints = Constraints(needs=[names("a b")])
    assert constraints.completed("a", every("ab"), of_gradients=False) == {"a"}
    assert constraints.completed("a", every("ab"), of_gradients=True) == {"a", "b"}
    assert constraints.completed("b", every("ab"), of_gradients=True) == {"b"}
    assert constraints.completed("a", every("a"), of_gradients=True) is None


def test_an_edit_of_several_lines_is_made_if_each_of_them_is_edited():
    a, b, both = (Module(name, "", tuple(name.split()), casts="float16") for name in ("a", "b", "a b"))
    edits = {edit.key: edit for edit in (a, b, both, Module("x", ""))}
    constraints = Constraints([(frozenset({"a b"}), frozenset({"x"}))])
    assert constraints.completed(["a"], edits, of_gradients=True) == {"a"}
    assert constraints.completed(["a", "b"], edits, of_gradients=True) == {"a", "b", "a b", "x"}
    assert constraints.completed(["x"], edits, of_gradients=True) == {"a b", "x", "a", "b"}
    after = edits | {"a": Module("a", "", ("a",), casts="float16", after=("b",))}
    assert constraints.completed(["a"], after, of_gradients=True) == {"a", "b", "a b", "x"}


def convolution(x):
    a = (x * 1e3).astype(F16)
    b = jnp.asarray(x, F16)
    return lax.conv(a[:, :, None], b[..., None] * 50, (1,), "VALID")


def select(x):
    a = x.astype(F16) * 3e4 * 10
    b = jnp.full(x.shape, -2.0, F16)
    return lax.select(x > 0, a, b)


def update(x):
    a = x.astype(F16) * 3e4 * 10
    b = jnp.zeros((9, 9), F16)
    return lax.dynamic_update_slice(b, a, (1, 1))


def number(x):
    a = x.astype(F16) * 1e4
    return lax.mul(a, jnp.asarray(50.0, F16))


def carry(x):
    a = x.astype(F16) * 1e4
    b = jnp.ones(8, F16)
    return lax.scan(lambda c, u: (c + 5 * u, None), b, a)[0]


def branches(x):
    a = x.astype(F16) * 3e4 * 10
    b = jnp.full(x.shape, 2.0, F16)
    return lax.cond(x[0, 0] < 9, lambda: a, lambda: b)


def count(x):
    b = jnp.zeros((), dtype=F16)
    start = jnp.zeros(8), b

    def body(c, u):
        return (c[0] + u, c[1] + 2000), None

    (total, n), _ = lax.scan(body, start, x.astype(F16).repeat(20, 0))
    return 1e4 * total / n.astype(F32)


def unread(x):
    """Where the carry starts is not found in the source."""
    start = [jnp.zeros((), dtype=F16) for _ in range(2)]

    def body(c, u):
        return [c[0] + 2000, c[1]], 1e4 * u

    return lax.scan(body, start, x.astype(F16).repeat(20, 0))[0][0]


def schedule(x):
    b = jnp.ones((), F16)
    for _ in range(12):
        b = b / 8
    return x.astype(F16).astype(F32) / b.astype(F32)


def average(x):
    a = x.astype(F16)
    b = jnp.zeros((8, 8), F16)
    return lax.scan(lambda c, u: (c + a * 3e4, None), b, jnp.arange(30))[0]


def promotes(x):
    a = x.astype(F16) * 3e4 * 10
    b = jnp.full(x.shape, 2.0, F16)
    return jnp.where(x > 0, a, b)


def products(x):
    a = x.astype(F16) * 1e4
    b = jnp.asarray(x, F16)
    return lax.dot(a, b * 50)


def keys(x):
    a = x[0].astype(F16) * 3e4 * 10
    b = x[1].astype(F16)
    return lax.sort((b, a), num_keys=1)[1]


@pytest.mark.cases(fast=4)
@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (select, ["a = ", "b = "]),
        (update, ["a = ", "b = "]),
        (number, ["a = ", "return lax.mul(a, "]),
        (carry, ["a = ", "b = "]),
        (convolution, ["a = ", "b = "]),
        (branches, ["a = ", "b = "]),
        (count, ["b = "]),
        (schedule, ["b = jnp"]),
        (average, ["b = "]),
        (promotes, ["a = "]),
        (products, ["a = "]),
        (keys, ["a = "]),
    ],
)
def test_a_remedy_names_all_casts_that_belong_together(fun, expected):
    report = find_nonfinite(lambda x: 1e-9 * jnp.sum(fun(x).astype(F32)))(X)
    (trial,) = (trial for trial in report.remedies if not trial.dtype)
    lines, first = inspect.getsourcelines(fun)
    found = {tuple(map(int, line.partition(" ")[0].rsplit(":", 2)[1:])) for line in trial.lines}
    starts = [
        (n, line.index(text) + len(text.removesuffix("jnp")))
        for n, line in enumerate(lines, first)
        for text in expected
        if text in line
    ]
    assert {line for line, _ in found} == {line for line, _ in starts}
    assert all(any(row == line and start <= column for row, column in found) for line, start in starts)


def test_a_carry_whose_start_is_not_found_in_the_source_is_an_edit_in_words():
    report = find_nonfinite(lambda x: jnp.sum(x * unread(x).astype(F32)))(X)
    (trial,) = (trial for trial in report.remedies if not trial.dtype)
    assert trial.lines == ()
    assert re.fullmatch(
        r"start the carry in float32 for the loop on line \S+test_ties.py:\d+:11", trial.change
    )


def test_a_name_that_is_assigned_a_tree_with_itself_is_read_once():
    def fun(x):
        carry = jnp.zeros((), dtype=F16)
        carry = (carry, x)
        body = lambda c, u: ((c[0] + 2000, c[1]), 1e4 * u)
        return lax.scan(body, carry, x.astype(F16).repeat(20, 0))[0][0]

    assert find_nonfinite(lambda x: jnp.sum(x * fun(x).astype(F32)))(X).remedies[0].helps

"""A jaxpr that is run again keeps each value no longer than its last reader needs it."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

from jmp_lite._jaxpr.replay import replay


class _Value:
    pass


def alive(fun, also_read=lambda index: ()):
    """How many values are alive in front of each equation of a function of one argument."""
    closed = jax.make_jaxpr(fun)(jnp.ones(3))
    values, counts = weakref.WeakSet(), []

    def action(index, equation, read):
        for var in (*equation.invars, *also_read(index)):
            read(var)
        counts.append(len(values))
        made = [_Value() for _ in equation.outvars]
        values.update(made)
        return made

    results = replay(closed, [_Value()], lambda var: _Value(), action, also_read)
    return counts, results


def test_a_chain_keeps_one_value():
    def chain(x):
        for _ in range(20):
            x = jnp.sin(x)
        return x

    gc.disable()  # A value ends with its last reference, and does not wait for a collection.
    try:
        counts, results = alive(chain)
    finally:
        gc.enable()
    assert max(counts) == 1
    assert len(results) == 1


def test_a_value_is_there_for_its_last_reader_and_for_the_outputs():
    counts, results = alive(lambda x: (y := jnp.sin(x), jnp.cos(jnp.tan(y)), y))
    assert counts == [0, 1, 2]
    assert results[0] is results[2]


def test_what_an_equation_reads_beside_its_operands_is_there():
    closed = jax.make_jaxpr(lambda x: jnp.tan(jnp.cos(jnp.sin(x))))(jnp.ones(3))
    first = closed.eqns[0].outvars[0]
    action = lambda index, equation, read: [read(first) if index == 2 else _Value()]
    run = lambda also_read: replay(closed, [_Value()], lambda var: _Value(), action, also_read)
    assert len(run(lambda index: [first] if index == 2 else [])) == 1
    with pytest.raises(KeyError):
        run(lambda index: [])

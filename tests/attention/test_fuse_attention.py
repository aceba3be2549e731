"""`fuse_attention`: which attentions it finds, and that their numbers are those of the program."""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from jmp_lite._attention.facts import Facts, unknown
from jmp_lite._attention.find import find_attentions, may_hold_attention
from jmp_lite._attention.run import why_not_fused
from tests.attention.cases import FUSED, LEFT, Case

BFLOAT16 = jnp.dtype("bfloat16")
ORDERS = {
    "grad(autocast(fuse))": lambda gradients, fused: gradients(jmp.autocast(fused, "bfloat16")),
    "autocast(grad(fuse))": lambda gradients, fused: jmp.autocast(gradients(fused), "bfloat16"),
}


def attentions(facts, kind="xla", half=BFLOAT16):
    """The kind of each attention, or why it is not fused, those of inner jaxprs last."""
    for each in find_attentions(facts).values():
        yield why_not_fused(each, half, kind) or each.mask.kind
    for equation in facts.equations:
        if may_hold_attention(equation):
            for inside, _ in facts.inside(equation):
                yield from attentions(inside, kind, half)


def found(case: Case, kind: str = "xla", half=BFLOAT16):
    return list(attentions(Facts(jax.make_jaxpr(case.fun)(*case.arrays), unknown), kind, half))


@pytest.mark.parametrize("name", FUSED)
def test_an_attention_is_found_however_it_is_written(name):
    case = FUSED[name]
    kinds = found(case)
    assert len(kinds) == case.count
    assert all(re.fullmatch(case.kind, kind) for kind in kinds)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_nearly_an_attention_is_left_with_a_reason(name):
    (reason,) = found(LEFT[name])
    assert re.search(LEFT[name].kind, reason)
    fused = jmp.fuse_attention(LEFT[name].fun, implementation="xla")
    jaxprs = [jax.make_jaxpr(fun)(*LEFT[name].arrays) for fun in (fused, LEFT[name].fun)]
    assert str(jaxprs[0]) == str(jaxprs[1])


def gradients_of(fun, case: Case):
    """Returns a function that gives the result of `fun` and its gradients by all float32 arrays."""
    argnums = tuple(n for n, x in enumerate(case.arrays) if x.dtype == jnp.float32)

    def gradients(fun):
        def loss(*arrays):
            out = fun(*arrays)
            weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
            return (out * weights).sum() / out.shape[0], out

        return jax.grad(loss, argnums, has_aux=True)

    return fun(gradients)


def error(actual, expected):
    """The largest error of each array, as a part of the largest number in all of them."""
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    return jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()) / largest, actual, expected)


# Each attention in one of the orders, and then in the other.
IN_TURNS = [*zip(FUSED, itertools.cycle(ORDERS)), *zip(FUSED, itertools.cycle(reversed(ORDERS)))]


@pytest.mark.cases(slow=len(FUSED) // 10)
@pytest.mark.parametrize(("name", "order"), IN_TURNS)
def test_values_and_gradients_are_those_of_the_program(name, order):
    """Within twice the error of autocast without it."""
    case = FUSED[name]
    fused = jmp.fuse_attention(case.fun, implementation="xla")
    exact = gradients_of(lambda gradients: gradients(case.fun), case)
    plain = gradients_of(lambda gradients: gradients(jmp.autocast(case.fun, "bfloat16")), case)
    ours = gradients_of(lambda gradients: ORDERS[order](gradients, fused), case)
    run = jax.jit(lambda *arrays: [fun(*arrays) for fun in (exact, plain, ours)])
    for scale in (1e-3, 1.0, 30.0):
        arrays = (case.arrays[0] * scale, *case.arrays[1:])
        expected, of_autocast, found = run(*arrays)
        if not all(jnp.isfinite(x).all() for x in jax.tree.leaves(expected)):
            continue  # A softmax without a maximum overflows.
        allowed = jax.tree.map(lambda x: 2 * x + 4 * 2.0**-8, error(of_autocast, expected))
        errors = error(found, expected)
        is_close = jax.tree.map(lambda x, most: x <= most, errors, allowed)
        assert all(jax.tree.leaves(is_close)), (scale, errors, allowed)

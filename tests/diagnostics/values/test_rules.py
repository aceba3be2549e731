"""The backward rules of a program that may cast to half by themselves, of which a jaxpr has no casts."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_lite.diagnostics._values.rules import operations_of_rules
from tests.support import double as other_module

F16 = jnp.float16


def with_rule(backward):
    function = jax.custom_vjp(lambda x: x * x)
    function.defvjp(lambda x: (x * x, x), backward)
    return function


def rounded(x):
    return x.astype(F16)


def twice(x):
    return jnp.multiply(x, 2)


def by_helper(x, g):
    return (rounded(g) * x,)


def by_helper_in_float32(x, g):
    return (twice(g) * lax.abs(x).sum(keepdims=True),)


casts, follows, names, known, imported, keywords, like, nested = (
    jax.custom_vjp(lambda x: x * x) for _ in range(8)
)
casts.defvjp(lambda x: (x * x, x), lambda x, g: (g.astype(F16) * x,))
follows.defvjp(lambda x: (x * x, x), lambda x, g: (2 * g * x,))
names.defvjp(lambda x: (x * x, x), by_helper)
known.defvjp(lambda x: (x * x, x), by_helper_in_float32)
imported.defvjp(lambda x: (x * x, x), lambda x, g: (other_module.double(g) * x,))
keywords.defvjp(fwd=lambda x: (x * x, x), bwd=lambda x, g: (jnp.asarray(g, "float16") * x,))
like.defvjp(lambda x: (x * x, x), lambda x, g: ((2 * g * x).astype(x.dtype),))
unknown = with_rule(lambda x, g: (g * x,))


@pytest.mark.parametrize(
    ("function", "may_cast"),
    [
        (lambda x: casts(x), True),
        (lambda x: follows(x), False),
        (lambda x: names(x), True),
        (lambda x: known(x), False),
        (lambda x: imported(x), True),
        (lambda x: keywords(x), True),
        (lambda x: like(x), False),
        (lambda x: unknown(x), True),  # No line has its name and its rule.
        (lambda x: jax.nn.relu(x) * x, False),
        (lambda x: jnp.tanh(jnp.sum(x * x)) * x, False),
        (lambda x: lax.scan(lambda c, u: (c * u, c), x, jnp.ones((3, 4), x.dtype))[0], False),
        (lambda x: jax.checkpoint(lambda x: jnp.sin(x) ** 2)(x), False),
    ],
)
def test_a_backward_rule_may_cast_if_its_source_does_or_is_not_found(function, may_cast):
    def step(x):
        return x - jax.grad(lambda x: jnp.sum(function(x).astype(jnp.float32)))(x)

    found = operations_of_rules(jax.make_jaxpr(step)(jnp.ones(4, F16)).jaxpr)
    assert bool(found) is may_cast


def test_only_the_operations_of_the_rule_are_found():
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(casts(jnp.sin(x)))))(jnp.ones(4)).jaxpr
    found = operations_of_rules(jaxpr)
    names = [each.primitive.name for each in jaxpr.eqns if id(each) in found]
    assert names == ["convert_element_type", "convert_element_type", "mul"]

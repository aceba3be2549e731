"""An operation that runs jaxprs is run again, with other functions in place of its jaxprs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_lite._jaxpr.bind import bind
from jmp_lite._jaxpr.calls import cond, while_loop
from jmp_lite._jaxpr.read import equations


@pytest.mark.parametrize(("end", "most", "iterations"), [(3, 5, 3), (9, 5, 5), (9, None, 9)])
def test_a_while_loop_ends_by_its_predicate_or_after_most_iterations(end, most, iterations):
    goes_on, body = lambda n: n < end, lambda n: n + 1
    (loop,) = equations(jax.make_jaxpr(lambda n: lax.while_loop(goes_on, body, n))(0))
    bodies = [lambda n: ([goes_on(n)], {}), lambda n: ([body(n)], {})]
    (count,), _ = while_loop(loop, bodies, [jnp.int32(0)], most=most)
    assert count == iterations


def test_a_branch_of_another_platform_is_not_compiled():
    """Such as a kernel of CUDA. Without the platforms a CPU would compile both branches, and fail."""
    of_cuda = lambda x: lax.platform_dependent(x, cuda=jnp.negative)
    choose = lambda x: lax.platform_dependent(x, cuda=of_cuda, default=jnp.sin)
    index, branches = equations(jax.make_jaxpr(choose)(1.0))

    def again(x):
        (number,) = bind(index, [])
        return cond(branches, [lambda x: ([of_cuda(x)], {}), lambda x: ([jnp.sin(x)], {})], [number, x])[0]

    assert jax.jit(again)(1.0) == [jnp.sin(1.0)]

"""One result whichever way round: the products of `grad(autocast(f))` are those of `autocast(grad(f))`.

`explain` tells the same products, of the derivative as well. All is read in jaxprs; nothing is compiled.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import models
import pytest
from jaxprs import PRODUCTS, equations
from small_programs import W, X

import jmp_lite as jmp
from examples.models import FAMILIES


def products(jaxpr):
    """How many products there are of each name and pair of operand dtypes, outer products included."""
    return collections.Counter(
        (equation.primitive.name, *(var.aval.dtype.name for var in equation.invars[:2]))
        for equation in equations(jaxpr)
        if equation.primitive.name in PRODUCTS
    )


def told(report):
    """How many products a report tells of each name and pair of operand dtypes."""
    return collections.Counter(
        (operation.name, *(each.partition("[")[0] for each in operation.inputs[:2]))
        for operation in report.operations
        if operation.name in PRODUCTS
    )


def both_orders(step, dtype, *arguments):
    """Returns the products of both orders, and those that `explain` tells.

    Args:
        step: takes a function to apply to the loss and one to apply to its gradient, and returns a step.
        dtype: the half dtype.
        arguments: of the step.
    """
    reports = []
    autocast = functools.partial(jmp.autocast, dtype=dtype)

    def explained(grad):
        return lambda *args: reports.append(jmp.explain(autocast(grad))(*args)) or grad(*args)

    same = lambda fun: fun
    inside = products(jax.make_jaxpr(step(autocast, same))(*arguments))
    jax.make_jaxpr(step(same, explained))(*arguments)
    (report,) = reports
    return inside, products(report.after), told(report)


@functools.cache
def family_case(name):
    """A model of the zoo as a step, like the cases of `models`."""
    workload = FAMILIES[name].small()
    inputs, targets = jax.tree.map(jnp.asarray, workload.batch(0, 2))
    variables = jax.eval_shape(workload.init, 0)
    params = variables["params"]
    state = {key: value for key, value in variables.items() if key != "params"}

    def loss(params, state, inputs, targets):
        outputs, new_state = workload.model.apply({"params": params, **state}, *inputs, mutable=list(state))
        return workload.loss(outputs, targets), new_state

    def step(inner, outer):
        return outer(jax.value_and_grad(inner(loss), has_aux=True))

    return step, (params, state, inputs, targets)


def step_of(fun):
    """Returns the gradients of a loss on the results of `fun` as a step."""
    loss = lambda *arguments: jnp.sum(jnp.sin(fun(*arguments)))
    return lambda inner, outer: outer(jax.grad(inner(loss), (0, 1)))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_products_of_a_family_are_the_same_in_both_orders(name):
    step, arguments = family_case(name)
    inside, outside, explained = both_orders(step, "bfloat16", *arguments)
    assert inside == outside == explained
    assert sum(inside.values()) > 3


@pytest.mark.parametrize("name", models.CASES)
def test_the_products_of_a_model_are_the_same_in_both_orders(name):
    if name.startswith("Haiku"):
        pytest.importorskip("haiku")
    case = models.CASES[name](None)
    step = lambda inner, outer: case.step(inner=inner, outer=outer)
    inside, outside, explained = both_orders(step, "float16", *case.arguments)
    assert inside == outside == explained
    assert sum(inside.values()) >= 8


def dense(x, w):
    return jnp.tanh(x @ w)


OUTER = {
    "a dense layer of one input": (lambda x, w: jnp.sin(dense(x[:, :1], w[:1])) @ w, 5),
    "a dense layer of one output": (lambda x, w: dense(x @ w, w[:, :1]), 6),
    "a product of one example": (lambda x, w: dense(x[0], w), 3),
    "a column by a row": (lambda x, w: jnp.sin(x[:, :1] * 2) @ jnp.sin(w[:1]), 2),
    "two vectors": (lambda x, w: jnp.einsum("i,j->ij", jnp.sin(x[0]), w[0]), 2),
    "two half vectors": (lambda x, w: jnp.einsum("bi,bj->bij", x @ w, x @ w) @ w, 12),
    "the states of mamba": (lambda x, w: jnp.einsum("bl,bn,ld->bldn", jnp.exp(x), x @ w, w), 7),
    "a tensor product of e3nn": (
        lambda x, w: jnp.einsum("bi,bj,ijk->bk", x, jnp.sin(x), w.reshape(8, 8, 1) * w[0]),
        5,
    ),
    "rotary embeddings": (
        lambda x, w: jnp.sin(jnp.einsum("i,j->ij", jnp.arange(4.0), 0.1 ** jnp.arange(8.0))) * dense(x, w),
        3,
    ),
    "in a loop": (
        lambda x, w: jax.lax.scan(
            lambda c, _: (jnp.outer(c[:, 0], w[0]) + c @ w[:, :1] @ w[:1], None), x, length=2
        )[0],
        5,
    ),
    "recomputed": (jax.checkpoint(lambda x, w: jnp.sin(x[:, :1] @ w[:1]) @ w[:, :1]), 5),
    "jitted": (jax.jit(lambda x, w: jnp.sin(x[:, :1] @ w[:1]) @ w[:, :1]), 5),
}


@pytest.mark.parametrize("name", OUTER)
def test_the_products_beside_outer_products_are_the_same_in_both_orders(name):
    fun, halves = OUTER[name]
    inside, outside, explained = both_orders(step_of(fun), "bfloat16", X, W)
    assert inside == outside == explained
    assert inside["dot_general", "bfloat16", "bfloat16"] == halves

"""One result whichever way round: the products of `grad(autocast(f))` are those of `autocast(grad(f))`.

`explain` tells the same products, of the derivative as well. All is read in jaxprs; nothing is compiled.
"""

import collections
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

import jmp_lite as jmp
from examples.models import FAMILIES
from tests.support import models
from tests.support.jaxprs import PRODUCTS, equations, rounded_sums
from tests.support.small_programs import W, X

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.


def products(jaxpr):
    """How many products there are of each name and pair of operand dtypes, outer products included.

    Those that no result depends on are left out, as JAX and `explain` leave them out.
    """
    inside = jaxpr.jaxpr
    needed, _ = partial_eval.dce_jaxpr(inside, [True] * len(inside.outvars))
    return collections.Counter(
        (equation.primitive.name, *(var.aval.dtype.name for var in equation.invars[:2]))
        for equation in equations(needed)
        if equation.primitive.name in PRODUCTS
    )


def told(report):
    """How many products a report tells of each name and pair of operand dtypes."""
    return collections.Counter(
        (operation.name, *(each.partition("[")[0] for each in operation.inputs[:2]))
        for operation in report.operations
        if operation.name in PRODUCTS
    )


class Explained(Exception):
    """Carries a report out of a step before the step computes anything."""


def both_orders(step, dtype, *arguments, adds_in_half=False):
    """Returns the products of both orders, and those that `explain` tells.

    Args:
        step: takes a function to apply to the loss and one to apply to its gradient, and returns a step.
        dtype: the half dtype.
        arguments: of the step.
        adds_in_half: whether the model adds a number to a part of a half value, as Haiku's LSTM does to its
            forget gate. The cotangent of that sum is half; float32 operations read the other parts.
    """
    autocast = functools.partial(jmp.autocast, dtype=dtype)

    def explained(grad):
        def explain(*args):
            raise Explained(jmp.explain(autocast(grad))(*args))

        return explain

    same = lambda fun: fun
    closed = jax.make_jaxpr(step(autocast, same))(*arguments)
    assert adds_in_half or not rounded_sums(closed)
    inside = products(closed)
    with pytest.raises(Explained) as caught:
        jax.make_jaxpr(step(same, explained))(*arguments)
    (report,) = caught.value.args
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


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt2-medium"])  # A larger gpt2-small.
def test_the_products_of_a_family_are_the_same_in_both_orders(name):
    step, arguments = family_case(name)
    inside, outside, explained = both_orders(step, "bfloat16", *arguments)
    assert inside == outside == explained
    assert sum(inside.values()) > 3


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("name", models.CASES)
def test_every_product_of_a_model_takes_half_operands_in_both_orders(name):
    if name.startswith("Haiku"):
        pytest.importorskip("haiku")
    case = models.CASES[name](None)
    step = lambda inner, outer: case.step(inner=inner, outer=outer)
    plain = products(jax.make_jaxpr(case.step())(*case.arguments))
    dtype = "bfloat16" if name.startswith("NNX") else "float16"
    is_lstm = name == "Haiku network"
    inside, outside, explained = both_orders(step, dtype, *case.arguments, adds_in_half=is_lstm)
    assert inside == outside == explained
    assert inside == {(product, dtype, dtype): count for (product, *_), count in plain.items()}
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
def test_the_products_near_outer_products_are_the_same_in_both_orders(name):
    fun, halves = OUTER[name]
    inside, outside, explained = both_orders(step_of(fun), "bfloat16", X, W)
    assert inside == outside == explained
    assert inside["dot_general", "bfloat16", "bfloat16"] == halves


def with_rule(kind, rule, **options):
    """A product with a rule of its own."""
    fun = kind(lambda x, w: x @ w)
    if kind is jax.custom_jvp:
        fun.defjvp(rule, **options)
    else:
        fun.defvjp(lambda x, w: (x @ w, (x, w)), rule, **options)
    return fun


def _backward(saved, g):
    return g @ saved[1].T, saved[0].T @ g


def _pushforward(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return x @ w, dx @ w + x @ dw


@eqx.filter_custom_vjp
def _filtered(arrays):
    return arrays[0] @ arrays[1]


_filtered.def_fwd(lambda perturbed, arrays: (arrays[0] @ arrays[1], None))
_filtered.def_bwd(lambda saved, g, perturbed, arrays: _backward(arrays, g))


@jax.custom_vjp
def _attention(x, w):
    return jax.nn.softmax(x @ x.T) @ x @ w


def _attention_backward(saved, g):
    """Computes the weights of the attention again, as flash attention does."""
    x, w = saved
    return jax.vjp(lambda x, w: jax.nn.softmax(x @ x.T) @ x @ w, x, w)[1](g)


_attention.defvjp(lambda x, w: (_attention(x, w), (x, w)), _attention_backward)


def _scoped(x, w):
    with jax.named_scope("kept"):
        return RULES["custom_vjp"](x, w)


def _solved(x, w):
    """A linear solve by iterations. The matrix depends on the parameters."""
    return jax.scipy.sparse.linalg.cg(lambda v: v + 0.1 * (w.T @ (w @ v)), (x @ w)[0], maxiter=3)[0]


RULES = {
    "custom_vjp": with_rule(jax.custom_vjp, _backward),
    "custom_jvp": with_rule(jax.custom_jvp, _pushforward),
    "custom_vjp of equinox, with symbolic zeros": lambda x, w: _filtered((x, w)),
    "custom_gradient": jax.custom_gradient(lambda x, w: (x @ w, lambda g: _backward((x, w), g))),
    "attention that is computed again": _attention,
    "a rule in a loop": lambda x, w: jax.lax.scan(
        lambda c, _: (jnp.tanh(RULES["custom_vjp"](c, w)), None), x, length=3
    )[0],
    "a recomputed rule": jax.checkpoint(lambda x, w: RULES["custom_jvp"](jnp.sin(x @ w), w)),
    "a vmapped rule": jax.vmap(lambda row, w: RULES["custom_vjp"](row[None], w)[0], (0, None)),
    "a rule in full precision": lambda x, w: jmp.full_precision(RULES["custom_vjp"])(x @ w, w),
    "a rule of JAX's own": lambda x, w: jax.nn.relu6(jax.nn.logsumexp(jax.nn.silu(x @ w) @ w)),
    "a linear solve by iterations": _solved,
    "a direct linear solve": lambda x, w: jnp.linalg.solve(w.T @ w + jnp.eye(8), (x @ w)[0]),
    "a while loop": lambda x, w: x @ w * jax.lax.while_loop(lambda n: n < 2.0, lambda n: n + 1, 0.0),
}


@pytest.mark.parametrize("name", RULES)
def test_the_products_of_a_rule_are_the_same_in_both_orders(name):
    inside, outside, explained = both_orders(step_of(RULES[name]), "float16", X, W)
    assert inside == outside == explained
    assert inside["dot_general", "float16", "float16"] >= 3


def test_the_products_of_a_rule_in_a_named_scope_are_the_same_in_both_orders():
    autocast = functools.partial(jmp.autocast, rules={"kept": "float32"})
    loss = lambda x, w: jnp.sum(jnp.sin(_scoped(x @ w, w)))
    inside = products(jax.make_jaxpr(jax.grad(autocast(loss), (0, 1)))(X, W))
    outside = products(jax.make_jaxpr(autocast(jax.grad(loss, (0, 1))))(X, W))
    assert inside == outside
    assert inside == {("dot_general", half, half): 3 for half in ("float32", "bfloat16")}


def test_the_products_in_a_composite_operation_are_told():
    fun = jax.lax.composite(lambda x, w: jnp.tanh(x @ w) @ w, name="two.layers")
    report = jmp.explain(fun)(X, W)
    assert products(report.after) == told(report) == {("dot_general", "bfloat16", "bfloat16"): 2}
    assert "two.layers" in jax.jit(jmp.autocast(fun)).lower(X, W).as_text()
    np.testing.assert_allclose(jmp.autocast(fun)(X, W), fun(X, W), atol=0.05)


def test_a_batching_rule_is_run_and_its_products_are_half():
    fun = jax.custom_batching.custom_vmap(lambda row, w: jnp.tanh(row @ w))
    fun.def_vmap(lambda size, batched, rows, w: (3 * jnp.tanh(rows @ w), True))
    layers = lambda row, w: fun(row @ w, w) @ w
    report = jmp.explain(layers)(X[0], W)
    assert products(report.after) == told(report) == {("dot_general", "bfloat16", "bfloat16"): 3}
    expected = jax.vmap(layers, (0, None))(X, W)
    for half in (jax.vmap(jmp.autocast(layers), (0, None)), jmp.autocast(jax.vmap(layers, (0, None)))):
        assert products(jax.make_jaxpr(half)(X, W)) == {("dot_general", "bfloat16", "bfloat16"): 3}
        np.testing.assert_allclose(half(X, W), expected, atol=0.05 * np.abs(expected).max())


def test_a_solver_runs_in_float32_and_the_products_of_its_derivative_in_half():
    report = jmp.explain(jax.grad(lambda x, w: jnp.sum(_solved(x, w)), 1))(X, W)
    inside = [o for o in report.operations if "inside a linear solver" in o.reason]
    products = [o for o in report.operations if o.is_product]
    assert {o.in_half for o in products if o in inside} == {False}
    assert {o.in_half for o in products if o not in inside} == {True}

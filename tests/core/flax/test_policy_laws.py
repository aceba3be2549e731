"""`with_policy` over the product of Flax's transforms, rules, half dtypes and inputs.

What runs in float32 runs under every policy. Results, gradients and statistics have the dtypes of the
float32 model, what is not floating keeps its bits, and the numbers are as good as with Flax's own `dtype`.
"""

import functools
import inspect
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from jmp_lite import linen
from jmp_lite import nnx as under_nnx
from tests.support.arrays import normal
from tests.support.jaxprs import equations
from tests.support.policies import F16
from tests.support.policy_models import INPUTS, LINEN, NNX, RULES, make, run
from tests.support.xla import lacks_matmul

OPTIONS = {
    "policy": [*itertools.product(RULES, ("bfloat16", "float16"))],
    "reduce_dtype": [None, "float32"],
}
LIBRARIES = {"Linen": linen, "NNX": under_nnx}
TRANSFORMS = [*(("Linen", name) for name in LINEN), *(("NNX", name) for name in NNX)]
CASES = [*itertools.product(OPTIONS["policy"], OPTIONS["reduce_dtype"], INPUTS)]
random.Random(1).shuffle(CASES)
CASES = CASES[:16]  # A third.
SEEDS = 16
make = functools.cache(make)


def under(library, model, rule, half, reduce_dtype):
    policy = jmp.get_policy(f"params=float32,compute={half},output=float32").with_rules(RULES[rule])
    return LIBRARIES[library].with_policy(model, policy, reduce_dtype=reduce_dtype)


def loss_and_grads(model, transform):
    """Returns a function of parameters, statistics and inputs."""
    if transform == "while_loop":  # JAX has no reverse-mode derivative of it.
        return lambda *args: (run(model, *args), None)
    return jax.value_and_grad(functools.partial(run, model), has_aux=True)


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_parameter_of_with_policy_has_a_row(library):
    _, *parameters = inspect.signature(LIBRARIES[library].with_policy).parameters
    assert parameters == [*OPTIONS]


@pytest.mark.cases(fast=1, slow=len(TRANSFORMS) // 3)
@pytest.mark.parametrize(("library", "transform"), TRANSFORMS[::2] + TRANSFORMS[1::2])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_what_runs_in_float32_runs_with_the_same_dtypes(library, transform, case):
    (rule, half), reduce_dtype, name = case
    plain, *state = make(library, transform, name)
    model = under(library, plain, rule, half, reduce_dtype)
    args = (*jax.eval_shape(lambda *state: state, *state), INPUTS[name])
    expected = jax.eval_shape(loss_and_grads(plain, transform), *args)
    jaxpr, found = jax.make_jaxpr(loss_and_grads(model, transform), return_shape=True)(*args)
    assert shapes(found) == shapes(expected)
    operands = [
        {var.aval.dtype for var in e.invars} for e in equations(jaxpr) if e.primitive.name == "dot_general"
    ]
    assert {jnp.dtype(half)} in operands


@pytest.mark.cases(fast=1, slow=len(TRANSFORMS) // 3)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(("library", "transform"), TRANSFORMS[::-1])
def test_it_runs_under_strict_dtype_promotion(library, transform, name):
    if (library, transform) == ("NNX", "scan of attention"):
        pytest.skip("JAX's own attention in half does not run")
    plain, *state = make(library, transform, name)
    args = (*jax.eval_shape(lambda *state: state, *state), INPUTS[name])
    # In half, Flax's own normalization does not run.
    policy = F16.with_rules({"**/norm": "float32", "statistics": "float32"})
    model = LIBRARIES[library].with_policy(plain, policy)
    with jax.numpy_dtype_promotion("strict"):
        expected, found = (jax.eval_shape(loss_and_grads(m, transform), *args) for m in (plain, model))
    assert shapes(found) == shapes(expected)


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(("library", "transform"), TRANSFORMS[::2] + TRANSFORMS[1::2])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_numbers_are_as_good_as_with_the_dtype_of_each_layer(library, transform, case):
    (rule, half), reduce_dtype, name = case
    if (library, transform, half) == ("NNX", "scan of attention", "float16"):
        pytest.skip("JAX cannot compile its attention in float16 for a CPU")
    plain, params, statistics = make(library, transform, name)
    by_hand, *_ = make(library, transform, name, jnp.dtype(half), rule)
    noise = lambda leaf: leaf + 0.1 * normal(leaf.size, SEEDS, *leaf.shape)
    many = jax.tree.map(noise, params), jax.tree.map(lambda leaf: jnp.stack([leaf] * SEEDS), statistics)
    models = plain, by_hand, under(library, plain, rule, half, reduce_dtype)
    runs = [jax.vmap(loss_and_grads(model, transform), in_axes=(0, 0, None)) for model in models]
    results = []
    run_all = jax.jit(lambda *args: [each(*args) for each in runs])
    try:
        found = jax.block_until_ready(run_all(*many, INPUTS[name]))
    except jax.errors.JaxRuntimeError as lacking:
        if not lacks_matmul(lacking):
            raise
        pytest.skip("limits.md: XLA for CPUs lacks some matmuls with half operands and a float32 result")
    for (_, (outputs, new)), grads in found:
        results.append((outputs.pop("y"), new, grads, outputs))
    expected, hand, policy = results
    jax.tree.map(np.testing.assert_array_equal, policy[3]["ids"], expected[3]["ids"])
    for got, limit, exact in zip(policy[:3], hand[:3], expected[:3]):
        assert error(got, exact) <= 1.2 * error(limit, exact) + 1e-6


def error(trees, exact):
    """Returns the relative error of a tree: the geometric mean over the seeds."""

    def norms(tree):
        return sum(jnp.sum(jnp.square(leaf.reshape(SEEDS, -1)), 1) for leaf in jax.tree.leaves(tree))

    squares = norms(jax.tree.map(jnp.subtract, trees, exact)) / jnp.maximum(norms(exact), 1e-30)
    return float(jnp.exp(jnp.mean(jnp.log(jnp.sqrt(squares) + 1e-7))))

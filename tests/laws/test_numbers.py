"""The laws of autocast about numbers, over the programs, dtypes and options of tests/laws/cases.py.

(b) What is not float32 keeps its bits.
(c) The gradients of both orders have at most 1.2 times the error of casts around each matmul, over seeds.
(d) The loss under `jit` is the eager one, within the rounding of one value.

Slow tests compute a few cases of each program, exhaustive tests many: before a release.
"""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.laws.by_product import by_product
from tests.laws.cases import BESIDE, ORDERS, Case, cases, options
from tests.laws.programs import PROGRAMS
from tests.laws.test_autocast import OurError, ours, whole_tracebacks

__all__ = ["whole_tracebacks"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:autocast.*float8.*runs on cpu"),
    pytest.mark.usefixtures("whole_tracebacks"),
]


def bits(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def check_bits(case):
    with case.context:
        args = case.arguments()
        expected = bits(jax.jit(case.fun)(*args)[1])
        for order in ORDERS:
            try:
                fun = jax.jit(ours(case.value_and_grad, order))
                ((_, kept), _) = ours(fun, *args)
            except OurError:
                continue
            for found, exact in zip(bits(kept), expected, strict=True):
                np.testing.assert_array_equal(found, exact)


@pytest.mark.slow
@pytest.mark.parametrize("beside", BESIDE)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=4)
def test_what_is_not_float32_keeps_its_bits(beside, data):
    program = data.draw(st.sampled_from(["residual_mlp", "scanned_layers", "loops_and_branches"]))
    fixed = {"beside": st.just(beside), "way": st.sampled_from(["plain", "remat"])}
    check_bits(data.draw(cases(program, **fixed)))


def flat(tree):
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])


def errors(case, seeds):
    """For each order, the error of the gradients beside that of casts around each matmul, over seeds."""
    args = [case.arguments(seed) for seed in seeds]
    gradients = lambda fun: [flat(fun(*each)[1]) for each in args]
    exact = gradients(jax.jit(case.value_and_grad(ORDERS[0], lambda fun: fun)))
    runs = {order: gradients(jax.jit(ours(case.value_and_grad, order))) for order in ORDERS}
    with by_product(case.half):
        # JAX remembers traces by the function, so the reference needs one of its own.
        casts = gradients(jax.jit(case.value_and_grad(ORDERS[0], lambda fun: lambda *args: fun(*args))))
    size = lambda found: [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, exact)]
    # An error far below the rounding of one value says nothing.
    least = float(jnp.finfo(case.half).eps) / 4
    logs = lambda found: np.log(np.maximum(size(found), least))
    return {order: float(np.exp(np.mean(logs(run) - logs(casts)))) for order, run in runs.items()}


# Open: on a CPU, XLA of JAX 0.10.2 leaves out roundings to bfloat16 for a part of the readers of a value, in
# this program, and in the reference of others. Eager errors, other versions and float16 keep the law.
OPEN = {"custom_rules": 2.5}


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_have_the_error_of_casts_around_each_matmul(program, half):
    found = errors(Case(program, "", "none", (("dtype", half),), "plain", ""), range(6))
    is_open = half == "bfloat16" and jax.__version_info__ < (0, 11)
    assert max(found.values()) < (OPEN.get(program, 1.5) if is_open else 1.2), found


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", PROGRAMS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=10)
def test_gradients_have_that_error_under_options_beside_other_dtypes_and_in_every_way(program, data):
    """Options that ask for more half values, and scopes of ours, have errors of their own."""
    options = st.sampled_from([(), (("float32_results", "**"),), (("reduce_dtype", "float32"),)])
    dtypes = st.sampled_from(["float16", "bfloat16"])
    drawn = st.builds(lambda dtype, more: (("dtype", dtype), *more), dtypes, options)
    case = data.draw(cases(program, scope=st.just("none"), options=drawn))
    with case.context:
        try:
            found = errors(case, range(6))
        except OurError:
            return
    assert max(found.values()) < 1.3, found


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=2)
def test_the_loss_under_jit_is_the_eager_one(program, data):
    case = data.draw(cases(program, beside=st.just(""), way=st.just("plain"), options=options(0)))
    args, rounding = case.arguments(), 8 * float(jnp.finfo(case.half).eps)
    eager = float(case.autocast(case.fun)(*args)[0])
    for fun in (case.fun, *(case.value_and_grad(order) for order in ORDERS)):
        found = jax.jit(case.autocast(fun) if fun is case.fun else fun)(*args)
        np.testing.assert_allclose(float(jax.tree.leaves(found)[0]), eager, rtol=rounding)

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
from tests.laws.cases import BESIDE, ORDERS, cases
from tests.laws.test_autocast import OurError, ours, whole_tracebacks

__all__ = ["whole_tracebacks"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:autocast.*float8.*runs on cpu"),
    pytest.mark.usefixtures("whole_tracebacks"),
]
EXACT = ["float16", "bfloat16", "float64", "complex64", "int32", "bool", "key", "float8_e4m3fn"]


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
    """For each order, the error of all gradients beside that of casts around each matmul, over seeds."""
    runs = {order: jax.jit(case.value_and_grad(order)) for order in ORDERS}
    plain = jax.jit(case.value_and_grad(ORDERS[0], lambda fun: fun))
    exact = [flat(plain(*case.arguments(seed))[1]) for seed in seeds]
    with by_product(case.half):
        casts = jax.jit(case.value_and_grad(ORDERS[0], lambda fun: lambda *args: fun(*args)))
        of_casts = [flat(casts(*case.arguments(seed))[1]) for seed in seeds]
    size = lambda found: [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, exact)]
    least = float(jnp.finfo(case.half).eps) / 4
    return {
        order: np.exp(
            np.mean(
                [
                    np.log(max(a, least) / max(b, least))
                    for a, b in zip(
                        size([flat(run(*case.arguments(seed))[1]) for seed in seeds]), size(of_casts)
                    )
                ]
            )
        )
        for order, run in runs.items()
    }

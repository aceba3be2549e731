"""FLOPs are those of the shapes, and for published models those of the literature."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.timed.flops import training_flops
from benchmarks.timed.run import model_flops
from examples.models import FAMILIES


def test_flops_are_counted_through_loops_calls_and_transposed_convolutions():
    w = jnp.ones((4, 4))

    @jax.jit
    def loop(x):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]

    assert training_flops(loop, jnp.ones((2, 4))) == 3 * 5 * 2 * 2 * 4 * 4
    image, kernel = jnp.ones((1, 6, 6, 3)), jnp.ones((3, 3, 3, 8))
    conv = lambda x, k: jax.lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert training_flops(conv, image, kernel) == 3 * 2 * 6 * 6 * 8 * 9 * 3
    widen = lambda x, k: jax.lax.conv_transpose(x, k, (2, 2), "SAME")
    assert training_flops(widen, image, kernel) == 3 * 2 * 6 * 6 * 3 * 9 * 8


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("resnet50", 3 * 2 * 4.09e9),  # 4.09 billion multiplications: torchvision's table.
        # 6 a parameter and token, 12 x layers x width x length for attention: Kaplan et al. (2020), table 1.
        ("gpt2-small", 1024 * (6 * 123.7e6 + 12 * 12 * 768 * 1024)),
    ],
)
def test_the_flops_of_a_model_are_those_of_the_literature(family, expected):
    assert model_flops(FAMILIES[family].full(), 1) == pytest.approx(expected, rel=0.01)

"""Why a product of the program is in float32, and which sizes Tensor Cores run slowly."""

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp

X, W = jnp.ones((16, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
ROPE = jnp.ones(64)


def products(fun, *args):
    """The products of the program as it is: whether each is in half, and why."""
    report = jmp.explain(fun, "float32")(*args)
    return [(each.in_half, each.reason) for each in report.operations if each.is_product]


def rotate(x):
    return x * ROPE  # Promotes.


def test_a_float32_constant_is_named_as_what_promotes_every_product_behind_it():
    def model(x, w):
        return jax.nn.relu(rotate(x @ w) @ w) @ w

    (first, _), (second, reason), (third, again) = products(model, X, W)
    assert first
    assert not second
    assert not third
    assert "float32 since a constant float32[64] is float32, " in reason
    assert "test_advice.py:" in reason
    assert reason.endswith("return x * ROPE  # Promotes.")
    assert again == reason


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.vmap], ids=["jit", "remat", "vmap"])
def test_the_constant_is_found_inside_calls(wrap):
    model = lambda x, w: wrap(rotate)(x @ w) @ w
    (_, _), (half, reason) = products(model, X, W)
    assert not half
    assert reason.endswith("return x * ROPE  # Promotes.")


def test_an_argument_is_named_by_its_path():
    params = {"head": {"kernel": jnp.ones((64, 64))}}
    ((half, reason),) = products(lambda params, x: x @ params["head"]["kernel"], params, X)
    assert not half
    assert "params/head/kernel is float32" in reason


def test_a_cast_of_the_program_is_told_from_a_promotion():
    ((half, reason),) = products(lambda x, w: x.astype(jnp.float32) @ w.astype(jnp.float32), X, W)
    assert not half
    assert reason.startswith("float32 since the program casts to float32, ")
    ((half, reason),) = products(lambda x: x @ x, jnp.ones((8, 8)))
    assert (half, reason) == (False, "float32 since x is float32")


def test_the_summary_counts_the_products():
    report = jmp.explain(lambda x, w: rotate(x @ w) @ w, "float32")(X, W)
    assert report.summary().endswith("as written: 1 of 2 matmuls in half")
    assert "float32 since a constant float32[64]" in str(report)


def advice(fun, *args):
    return [each.advice for each in jmp.explain(fun, "float16")(*args).operations if each.is_product]


def zeros(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def convolve(x, k):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=layout)


@pytest.mark.parametrize(
    ("fun", "shapes", "said"),
    [
        (jnp.dot, [(8, 64), (64, 50257)], "N = 50257: pad it to 50264"),
        (jnp.dot, [(8, 63), (63, 16)], "K = 63: pad it to 64"),
        (jnp.dot, [(8, 64), (64, 8)], ""),
        (jnp.dot, [(3, 8, 64), (64, 8)], ""),  # 3 sequences of 8 tokens are 24 rows.
        (jnp.dot, [(64, 64), (64, 1)], "N = 1: too thin for Tensor Cores"),
        (jnp.dot, [(7, 64), (64, 9)], "M = 7: too thin for Tensor Cores; N = 9: pad it to 16"),
        (
            convolve,
            [(2, 8, 8, 3), (3, 3, 3, 20)],
            "input channels = 3: pad it to 8; output channels = 20: pad it to 24",
        ),
    ],
)
def test_sizes_that_tensor_cores_run_slowly_are_named_with_what_to_pad_them_to(fun, shapes, said):
    assert advice(fun, *(zeros(*shape) for shape in shapes)) == [said]


def test_float32_products_get_no_advice_and_the_report_shows_the_others_once():
    assert [
        each.advice for each in jmp.explain(jnp.dot, "float32")(jnp.ones((9, 9)), jnp.ones((9, 9))).operations
    ] == [""]
    report = jmp.explain(lambda x, w: jnp.tanh(x @ w) @ w, "float16")(zeros(8, 63), zeros(63, 63))
    text = str(report)
    assert "Matmuls of sizes that Tensor Cores run slowly:" in text
    assert text.count("63: pad it to 64") == 4
    assert "1: N = 63: pad it to 64; K = 63: pad it to 64 (x, w)" in text


def test_a_matmul_with_vectors_names_what_keep_float32_saves():
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    reason = lambda fun, *args: jmp.explain(fun, "bfloat16")(*args).operations[-1].reason
    readout = lambda x, c: jnp.einsum("blen,bln->ble", jnp.cumsum(x, 1), c)
    said = "it reads float32[4,64,256,16] once: jmp.keep_float32 on it saves a copy in half, 2 MB"
    assert reason(readout, array(4, 64, 256, 16), array(4, 64, 16)).endswith(said)
    # Small arrays, weights, matrices, and values that are in half already: nothing to save.
    assert "keep_float32" not in reason(readout, array(4, 8, 8, 16), array(4, 8, 16))
    square, row = array(1024, 1024), array(1024)
    assert "keep_float32" in reason(lambda w, x: x @ jnp.cumsum(w, 0), square, row)
    assert "keep_float32" not in reason(lambda w, x: w @ x, square, row)
    assert "keep_float32" not in reason(lambda w, x: jnp.cumsum(w, 0) @ x, square, square)
    assert "keep_float32" not in reason(lambda w, x: (w @ w) @ x, square, row)

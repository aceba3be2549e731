"""The tables of the operations of torch.autocast and of TensorFlow, held to what autocast does with each."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_lite as jmp
from jmp_lite._jaxpr.primitives import traits_of
from tests.support import tensorflow_lists, torch_lists

TABLES = {"torch.autocast": torch_lists.ROWS, "TensorFlow": tensorflow_lists.ROWS}
ROWS = [row for rows in TABLES.values() for row in rows]


def attention(y):
    heads = y.reshape(1, 4, 2, 4)
    return jax.nn.dot_product_attention(heads, heads, heads).reshape(4, 8)


def sample(y):
    return jax.scipy.ndimage.map_coordinates(y, [jnp.array([0.5, 1.5]), jnp.array([0.5, 2.5])], order=1)


def convolution(of, rank, images, kernels):
    letters = "HWD"[:rank]
    layout = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    images, kernels = images.reshape(1, *[2] * rank, -1), kernels.reshape(*[1] * rank, 8, 8)
    images = jnp.broadcast_to(images[..., :1], (*images.shape[:-1], 8))
    return of(images, kernels, (1,) * rank, "SAME", dimension_numbers=layout)


def operations(expression, dtype):
    """What autocast does with an expression of a page's table, on the way between two products."""

    def fun(x, w):
        names = {
            "x": x,
            "w": w,
            "y": x @ w,
            "z": x[::-1] @ w,
            "optax": optax,
            "labels": jnp.zeros(4, jnp.int32),
            "attention": attention,
            "sample": sample,
            "conv": lambda rank: convolution(lax.conv_general_dilated, rank, x, w),
            "conv_transpose": lambda rank: convolution(lax.conv_transpose, rank, x, w),
        }
        result = eval(expression, globals(), names)
        if not result.ndim:
            return result
        return result @ (w if result.shape[-1] == 8 else jnp.ones((result.shape[-1], 8)))

    x, w = (
        jnp.asarray(np.random.default_rng(0).uniform(0.1, 0.2, shape), jnp.float32)
        for shape in [(4, 8), (8, 8)]
    )
    return jmp.explain(jmp.autocast(fun, dtype))(x, w).operations


MOVES = {"move", "as traced"}


def wrong(row, name, dtype):
    """The decisive operations that run elsewhere than the table says; None if there are none at all."""
    found = operations(row.names[name], dtype)
    if not row.decisive:
        decisive = [o for o in found if o.name not in torch_lists.PRODUCT and o.category not in MOVES]
    elif row.decisive == torch_lists.PRODUCT:
        decisive = [o for o in found if o.name in row.decisive and o.category == "allow"]
    else:
        decisive = [o for o in found if o.name in row.decisive][-1:]
    if not decisive:
        return None
    if row.here == "float32":
        return [str(operation) for operation in decisive if operation.in_half]
    # Half, and the widest of half. A quotient in float16, a product with a number that half rounds, and a
    # chain of operations are computed in float32 and stored in half.
    in_chain = lambda o: o.reason.startswith(("a chain of operations", "part of that function"))
    is_stored = lambda o: traits_of(o.name).scales or in_chain(o)
    is_half = lambda o: o.in_half or (is_stored(o) and o.outputs[0].startswith(dtype))
    return [str(operation) for operation in decisive if not is_half(operation)]


@pytest.mark.cases(fast=len(ROWS), slow=0)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: next(iter(row.names)))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_operations_of_a_row_run_where_the_table_says(dtype, row):
    assert not {name: found for name in row.names if (found := wrong(row, name, dtype)) != []}


@pytest.mark.parametrize("name", ["addcmul", "atan2", "cat"])
def test_the_widest_of_half_and_float32_is_float32(name):
    (expression,) = [row.names[name] for row in torch_lists.ROWS if name in row.names]
    found = operations(expression.replace("z", "x"), "bfloat16")
    mixed = [o for o in found if o.name in ("add", "mul", "atan2", "concatenate") and o.category == "infer"]
    assert mixed
    assert not any(operation.in_half for operation in mixed if operation.name != "add" or name != "addcmul")


@pytest.mark.parametrize("library", TABLES)
def test_the_page_shows_the_table(library):
    page = pathlib.Path(__file__).parent.parent.parent / "docs" / "operation-lists.md"
    assert torch_lists.table(library, TABLES[library]) in page.read_text()

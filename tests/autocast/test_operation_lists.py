"""The tables of the operations of torch.autocast and of TensorFlow, held to what autocast does with each."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_lite as jmp
from tests.support import tensorflow_lists, torch_lists

TABLES = {"torch": torch_lists.ROWS, "TensorFlow": tensorflow_lists.ROWS}
CASES = [(row, name) for rows in TABLES.values() for row in rows for name in row.names]


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
    """What autocast does with an expression of `tests/torch_lists.py`, on the way between two products."""

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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("row", "name"), CASES, ids=[name for _, name in CASES])
def test_an_operation_runs_where_the_table_says(row, name, dtype):
    found = operations(row.names[name], dtype)
    if row.decisive:
        decisive = [operation for operation in found if operation.name in row.decisive]
        if row.decisive == torch_lists.PRODUCT:
            decisive = [operation for operation in decisive if operation.category == "allow"]
        else:
            decisive = decisive[-1:]
    else:
        decisive = [o for o in found if o.name not in torch_lists.PRODUCT and o.category not in MOVES]
    assert decisive
    if row.here == "float32":
        assert any(operation.category in ("deny", "as traced", "infer", "allow") for operation in decisive)
        assert not [str(operation) for operation in decisive if operation.in_half]
    else:  # Half, and the widest of half operands.
        assert not [str(operation) for operation in decisive if not operation.in_half]


@pytest.mark.parametrize("name", ["addcmul", "atan2", "cat"])
def test_the_widest_of_half_and_float32_is_float32(name):
    (expression,) = [row.names[name] for row in torch_lists.ROWS if name in row.names]
    found = operations(expression.replace("z", "x"), "bfloat16")
    mixed = [o for o in found if o.name in ("add", "mul", "atan2", "concatenate") and o.category == "infer"]
    assert mixed
    assert not any(operation.in_half for operation in mixed if operation.name != "add" or name != "addcmul")


@pytest.mark.parametrize("library", TABLES)
def test_the_page_shows_the_table(library):
    page = pathlib.Path(__file__).parent.parent.parent / "docs" / "autocast.md"
    assert torch_lists.table(library, TABLES[library]) in page.read_text()

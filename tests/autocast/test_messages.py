"""Errors name the option, the pattern and the remedy; reasons lead to the line of the user."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from tests.support.small_programs import W, X

SQUARE = jnp.ones((16, 16))
product = lambda x: jnp.sum(x @ x)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "float8", "rules": {"**": "float16"}}, ValueError, r"'\*\*' gives float16.*or 'float8'\."),
        ({"dtype": "float8", "rules": {"**": "fp8"}}, ValueError, r"'\*\*' gives 'fp8'.*or 'float8'\."),
        ({"rules": {"**": "fp8"}}, ValueError, r"'\*\*' gives 'fp8'.*autocast\(loss_fn, 'float8'\)"),
        ({"dtype": "Float8"}, ValueError, r"Unknown dtype 'Float8'.*autocast\(loss_fn, 'float8'\)"),
        ({"dtype": "e4m3"}, ValueError, r"Unknown dtype 'e4m3'.*autocast\(loss_fn, 'float8'\)"),
        ({"rules": {"a/b": None}}, TypeError, r"The rule for 'a/b' gives None\. It may give float32"),
        ({"float32_results": {"**/head": True}}, TypeError, r"float32_results= .*pass \['\*\*/head'\]"),
        ({"half_sums": {"**/block": 1}}, TypeError, r"half_sums= .*pass \['\*\*/block'\]"),
        ({"reduce_dtype": True}, TypeError, r"reduce_dtype should be float32, or None .*Got True"),
        ({"reduce_dtype": "wide"}, ValueError, r"reduce_dtype should be float32, or None .*Got 'wide'"),
    ],
)
def test_an_option_is_named_with_what_it_takes(options, error, message):
    with pytest.raises(error, match=message):
        jmp.autocast(product, **options)


@pytest.mark.filterwarnings("ignore:autocast.*'float8'")
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"dtype": "float8", "rules": {"**": "float8"}}, "dtype 'float8'"),
        ({"reduce_dtype": "float32"}, "reduce_dtype='float32'"),
    ],
)
def test_a_forward_mode_derivative_names_the_option(options, name):
    with pytest.raises(TypeError, match=f"autocast with {name} has no forward-mode derivative"):
        jax.jvp(jmp.autocast(product, **options), (SQUARE,), (SQUARE,))
    outside = jmp.autocast(lambda x: jax.jvp(product, (x,), (x,))[1], **options)
    assert float(outside(SQUARE)) == float(jax.jvp(product, (SQUARE,), (SQUARE,))[1])


def test_keep_float32_and_full_precision_say_what_they_take():
    with pytest.raises(TypeError, match=r"keep_float32 takes a tree of arrays.*Got 'head'.*rules="):
        jmp.keep_float32("head")
    with pytest.raises(TypeError, match=r"keep_float32 takes a tree of arrays.*full_precision\(fun\)"):
        jmp.keep_float32(product)
    with pytest.raises(TypeError, match=r"full_precision takes a function.*keep_float32\(x\)"):
        jmp.full_precision(SQUARE)
    with pytest.raises(TypeError, match=r"full_precision takes a function. Got 'head'"):
        jmp.full_precision("head")


def test_a_constant_that_promotes_in_where_is_named_with_the_line_of_the_call():
    lowest = np.float32(np.finfo(np.float32).min)

    def masked(w, x):
        scores = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        scores = jnp.where(x > 0, scores, lowest)  # The cause.
        return scores @ w.astype(jnp.bfloat16)

    report = jmp.explain(masked, "float32")(W, X)
    (product,) = report.in_float32()
    assert product.reason.startswith("float32 since the constant -3.40282e+38 is float32, ")
    assert "test_messages.py" in product.reason
    assert "# The cause." in product.reason
    weak = jmp.explain(lambda w, x: masked(w, x) * 1.0, "float32")(W, X)
    assert len(weak.in_float32()) == 1


def test_a_reason_leads_to_the_line_that_calls_a_cast_of_ours():
    def fun(w, x):
        half = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        wide = jmp.cast_to_full(half)  # The user's line.
        return wide @ w

    (product,) = jmp.explain(fun, "float32")(W, X).in_float32()
    assert "_tree.py" not in product.reason
    assert "test_messages.py" in product.reason


def test_products_of_a_backward_pass_that_nothing_reads_do_not_count():
    @jax.custom_vjp
    def layer(x, w):
        return x @ w

    layer.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))
    loss = lambda w: jnp.sum(jnp.sin(layer(X, w)))
    report = jmp.explain(jmp.autocast(jax.grad(loss)))(W)
    # The gradient of X is dropped: a product forwards, one backwards.
    assert [operation.name for operation in report.operations].count("dot_general") == 2
    both = jmp.explain(jmp.autocast(jax.grad(lambda x, w: jnp.sum(jnp.sin(layer(x, w))), (0, 1))))(X, W)
    assert [operation.name for operation in both.operations].count("dot_general") == 3
    unread = jmp.explain(jmp.autocast(lambda w: jax.jit(lambda w: (w @ w, X @ w))(w)[1]))(W)
    assert [operation.name for operation in unread.operations].count("dot_general") == 1

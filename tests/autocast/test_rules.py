"""The options of `autocast`: lists of operations, and rules by scope."""

import functools
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jmp_lite as jmp
from tests.support.jaxprs import operands_of, products, text
from tests.support.small_programs import W, X

HALF, FULL = ("bfloat16", "bfloat16"), ("float32", "float32")


def mlp(x, w):
    return jnp.exp(jnp.tanh(x @ w)) @ w


def test_operations_are_added_to_a_list_by_name_or_primitive():
    assert operands_of("tanh", jmp.autocast(mlp), X, W) == ["float32"]  # Its result is for exp alone.
    assert operands_of("exp", jmp.autocast(mlp), X, W) == ["float32"]
    for exp in ("exp", lax.exp_p):
        inferred = jmp.autocast(mlp, infer=[exp])
        assert operands_of("tanh", inferred, X, W) == ["bfloat16"]
        assert operands_of("exp", inferred, X, W) == ["bfloat16"]
        assert operands_of("exp", jmp.autocast(mlp, allow={exp}), X, W) == ["bfloat16"]
    smooth = lambda x, w: jnp.tanh(x @ w) @ w
    assert operands_of("tanh", jmp.autocast(smooth), X, W) == ["bfloat16"]
    for tanh in ("tanh", lax.tanh_p):
        assert operands_of("tanh", jmp.autocast(smooth, deny=(tanh,)), X, W) == ["float32"]
        assert products(jmp.autocast(smooth, deny=[tanh]), X, W) == [HALF] * 2
    assert operands_of("tanh", jmp.autocast(lambda x: jnp.tanh(x)), X) == ["float32"]
    assert operands_of("tanh", jmp.autocast(lambda x: jnp.tanh(x), allow=["tanh"]), X) == ["bfloat16"]


def test_operations_are_removed_from_a_list():
    assert products(jmp.autocast(mlp, allow=["-dot_general"]), X, W) == [FULL] * 2
    assert text(jmp.autocast(mlp, allow=["-dot_general"]), X, W) == text(mlp, X, W)
    convolve = lambda x, w: lax.conv(x[None, None], w[None, None], (1, 1), "SAME")[0, 0] @ w
    found = products(jmp.autocast(convolve, allow=["-conv_general_dilated"]), X, W)
    assert found == [FULL, HALF]
    assert operands_of("tanh", jmp.autocast(lambda x, w: jnp.tanh(x @ w) @ w, infer=["-tanh"]), X, W) == [
        "float32"
    ]
    assert operands_of("exp", jmp.autocast(mlp, deny=["-exp"]), X, W) == ["float32"]  # As it was traced.


def test_a_product_on_the_infer_or_deny_list_is_no_longer_lowered():
    assert products(jmp.autocast(mlp, deny=["dot_general"]), X, W) == [FULL] * 2
    assert products(jmp.autocast(mlp, infer=["dot_general"]), X, W) == [FULL] * 2


def test_an_operation_without_a_half_version_cannot_be_put_on_a_list_of_half_operations():
    for name in ("scatter-add", "reduce", "cholesky", "fft", lax.fft_p):
        for option in ("allow", "infer"):
            with pytest.raises(ValueError, match=rf"{option}= names '\S+', which has no half version"):
                jmp.autocast(mlp, **{option: [name]})
        jmp.autocast(mlp, deny=[name])


def test_a_gradient_by_an_outer_product_is_off_the_list_with_the_others():
    grad = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    for off in ({"allow": ["-dot_general"]}, {"deny": ["dot_general"]}):
        assert text(jmp.autocast(grad, **off), W, X[:1]) == text(grad, W, X[:1])
    assert ":bfloat16[8,8]" in text(jmp.autocast(grad), W, X[:1])


def test_options_reach_into_calls():
    def fun(x, w):
        return lax.scan(lambda x, _: (jax.jit(jnp.tanh)(x @ w), None), x, length=2)[0]

    assert operands_of("tanh", jmp.autocast(fun, deny=["tanh"]), X, W) == ["float32"]
    assert products(jmp.autocast(fun, deny=["dot_general"]), X, W) == [FULL]


MEANINGLESS = {
    ValueError: [
        ({"allow": ["tanhh"]}, "allow= names 'tanhh', which is not a primitive of JAX.*mean 'tanh'"),
        ({"deny": ["softmax"]}, "deny= names 'softmax', which is not a primitive"),
        ({"infer": ["dot_genral"]}, "'dot_general'"),
        ({"allow": ["exp"], "infer": [lax.exp_p]}, "'exp' was given twice, in allow= and in infer="),
        ({"deny": ["tanh", "tanh"]}, "given twice"),
        ({"allow": ["-exp"], "deny": ["exp"]}, "given twice|takes 'exp' off a list on which it is not"),
        ({"deny": ["-tanh"]}, "takes 'tanh' off a list on which it is not; it is on the list"),
        ({"allow": ["-tanhh"]}, "not a primitive"),
        ({"deny": ["scan"]}, "names 'scan', which runs other operations"),
        ({"allow": ["jit"]}, "which runs other operations"),
        ({"infer": ["-custom_vjp_call"]}, "which runs other operations"),
        ({"rules": {"head": "float64"}}, "The rule for 'head' gives float64"),
        ({"rules": {"head": "float16"}}, "The rule for 'head' gives float16"),
        ({"rules": {"": "float32"}}, "A pattern of rules= is empty"),
        ({"rules": {"/": "float32"}}, "A pattern of rules= is empty"),
        ({"rules": {"head": "float8"}}, "gives float8. It may give float32, or the dtype of the autocast"),
        ({"dtype": "float8", "rules": {"**": "float16"}}, r"'\*\*' gives float16.*or 'float8'\."),
        ({"dtype": "float8", "rules": {"**": "fp8"}}, r"'\*\*' gives 'fp8'.*or 'float8'\."),
        ({"rules": {"**": "fp8"}}, r"'\*\*' gives 'fp8'.*autocast\(loss_fn, 'float8'\)"),
        ({"dtype": "Float8"}, r"Unknown dtype 'Float8'.*autocast\(loss_fn, 'float8'\)"),
        ({"dtype": "e4m3"}, r"Unknown dtype 'e4m3'.*autocast\(loss_fn, 'float8'\)"),
        ({"dtype": jnp.float8_e5m2}, r"in 'float8' .large matmuls in fp8"),
        ({"reduce_dtype": "wide"}, r"reduce_dtype should be float32, or None .*Got 'wide'"),
    ],
    TypeError: [
        ({"deny": "exp"}, r"deny= is a list of operations. Got 'exp'; write deny=\['exp'\]"),
        ({"allow": lax.exp_p}, "allow= is a list of operations"),
        ({"allow": 3}, "allow= is a list of operations"),
        ({"rules": 3}, "rules= takes a mapping, .* or a list of jmp.Rule. Got 3"),
        *(({"deny": [given]}, "takes primitives and their names") for given in (jnp.exp, 3, None)),
        ({"rules": ["head"]}, "rules= maps patterns over scopes to dtypes"),
        ({"rules": [("head", "float32", 1)]}, "rules= maps patterns over scopes to dtypes"),
        ({"rules": [(1, "float32")]}, "rules= maps patterns over scopes to dtypes"),
        ({"rules": {"a/b": None}}, r"The rule for 'a/b' gives None\. It may give float32"),
        ({"float32_results": {"**/head": True}}, r"float32_results= .*pass \['\*\*/head'\]"),
        ({"half_sums": {"**/block": 1}}, r"half_sums= .*pass \['\*\*/block'\]"),
        ({"reduce_dtype": True}, r"reduce_dtype should be float32, or None .*Got True"),
    ],
}


@pytest.mark.parametrize("error", MEANINGLESS)
def test_an_option_that_cannot_be_meant_is_an_error_at_once_that_says_what_it_takes(error):
    for options, message in MEANINGLESS[error]:
        with pytest.raises(error, match=message):
            jmp.autocast(mlp, **options)


def scoped(x, w):
    with jax.named_scope("encoder"):
        with jax.named_scope("attention"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("mlp"):
            x = jnp.tanh(x @ w)
    with jax.named_scope("decoder"):
        x = jax.jit(jax.named_scope("attention")(lambda x, w: jnp.tanh(x @ w)))(x, w)
        with jax.named_scope("head"):
            return x @ w


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "hhhh"),
        ({"decoder/head": "float32"}, "hhhf"),
        ({"decoder": "float32"}, "hhff"),
        ({"attention": "float32"}, "fhfh"),
        ({"encoder/attention": jnp.float32}, "fhhh"),
        ({"/decoder": "float32"}, "hhff"),
        ({"enc*": "float32"}, "ffhh"),
        ({"*/attention": "float32"}, "fhfh"),
        ({"**/head": "float32"}, "hhhf"),
        ({"decoder/**/head": "float32"}, "hhhf"),
        ([("decoder/head", "bfloat16"), ("decoder", "float32")], "hhfh"),
        ([("attention", "bfloat16"), ("encoder", "float32")], "hfhh"),
        ({"**": "float32"}, "ffff"),
        ({"mlp": "float32", "head": "float32"}, "hfhf"),
    ],
)
def test_rules_select_scopes_and_the_first_that_matches_wins(given, expected):
    wanted = [HALF if each == "h" else FULL for each in expected]
    assert products(jmp.autocast(scoped, rules=given), X, W) == wanted
    loss = lambda x, w: jnp.sum(scoped(x, w))
    for grad in (jax.grad(jmp.autocast(loss, rules=given), 1), jmp.autocast(jax.grad(loss, 1), rules=given)):
        assert set(products(grad, X, W)) == set(wanted)


def test_a_rule_that_hides_a_narrower_one_is_an_error():
    with pytest.raises(ValueError, match=r"'decoder/head'"):
        jmp.autocast(scoped, rules=[("decoder", "float32"), ("decoder/head", "bfloat16")])(X, W)


@pytest.mark.parametrize(
    "around", [jax.jit, jax.checkpoint, lambda f: lambda x: jax.vmap(f)(x[:, None])[:, 0]]
)
def test_rules_reach_scopes_through_transforms(around):
    fun = around(lambda x: scoped(x, W))
    assert products(jmp.autocast(fun, rules={"decoder/head": "float32"}), X) == [HALF] * 3 + [FULL]

    def in_scan(x):
        return lax.scan(lambda x, _: (fun(x), None), x, length=2)[0]

    assert products(jmp.autocast(in_scan, rules={"encoder": "float32"}), X) == [FULL] * 2 + [HALF] * 2


def test_the_name_of_a_jitted_function_is_a_scope():
    @jax.jit
    def router(x, w):
        return jax.nn.softmax(x @ w)

    fun = lambda x, w: router(x @ w, w) @ w
    assert products(jmp.autocast(fun, rules={"router": "float32"}), X, W) == [HALF, FULL, HALF]
    inside = lambda x, w: jax.checkpoint(fun)(x, w)
    assert products(jmp.autocast(inside, rules={"router": "float32"}), X, W) == [HALF, FULL, HALF]


def test_a_jitted_function_called_in_two_scopes_follows_the_rule_of_each():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def fun(x, w):
        with jax.named_scope("first"):
            x = layer(x, w)
        with jax.named_scope("second"):
            return layer(x, w)

    assert products(jmp.autocast(fun, rules={"first": "float32"}), X, W) == [FULL, HALF]
    assert products(jmp.autocast(fun, rules={"second": "float32"}), X, W) == [HALF, FULL]


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = x + nn.Dense(8, name=f"block_{i}")(x)
        return nn.Dense(8, name="head")(x)


def test_rules_select_linen_modules():
    model = Transformer()
    params = model.init(jax.random.key(0), X)
    for given, expected in (
        ({"head": "float32"}, [HALF, HALF, FULL]),
        ({"Transformer/block_1": "float32"}, [HALF, FULL, HALF]),
        ({"block_*": "float32"}, [FULL, FULL, HALF]),
        ({"Transformer": "float32"}, [FULL] * 3),
    ):
        assert products(jmp.autocast(model.apply, rules=given), params, X) == expected


def test_rules_select_arguments_by_their_paths():
    params = {"blocks": [{"kernel": W}, {"kernel": W}], "head": {"kernel": W}}

    def fun(params, x):
        for block in params["blocks"]:
            x = jnp.tanh(x @ block["kernel"])
        return x @ params["head"]["kernel"]

    for given, expected in (
        ({"head": "float32"}, [HALF, HALF, FULL]),
        ({"blocks/1": "float32"}, [HALF, FULL, HALF]),
        ({"params/blocks/1/kernel": "float32"}, [HALF, FULL, HALF]),
        ({"/params": "float32"}, [FULL] * 3),
        ({"blocks": "float32", "head": "bfloat16"}, [FULL, FULL, HALF]),
    ):
        assert products(jmp.autocast(fun, rules=given), params, X) == expected
        in_jit = lambda params, x: jax.checkpoint(jax.jit(fun))(params, x)
        assert products(jmp.autocast(in_jit, rules=given), params, X) == expected
    grads = jax.grad(lambda p: jmp.autocast(fun, rules={"head": "float32"})(p, X).sum())
    assert products(grads, params).count(FULL) == 3  # Of the head: forward, and backward both ways.


@pytest.mark.parametrize("pattern", ["**", "*"])
def test_a_rule_for_everything_selects_what_stands_in_no_scope(pattern):
    def loss(w, x):
        half_product = jnp.dot(x.astype("float16"), w.astype("float16"), preferred_element_type=jnp.float32)
        return jnp.sum(jnp.sin(half_product))

    kept = functools.partial(jmp.autocast, dtype="float16", rules={pattern: "float32"})
    reasons = {operation.reason for operation in jmp.explain(kept(loss))(W, X).operations}
    assert reasons == {f"the rule for '{pattern}'"}
    # The program asks for a float32 cotangent in the matmuls of its gradients, and keeps it in both orders.
    own = [("float16", "float16"), ("float32", "float16"), ("float32", "float16")]
    assert products(jax.grad(kept(loss), (0, 1)), W, X) == own
    assert products(kept(jax.grad(loss, (0, 1))), W, X) == own


def test_rules_select_nnx_and_equinox_modules_by_the_path_of_the_argument():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.body, self.head = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return self.head(jnp.tanh(self.body(x)))

    class Module(eqx.Module):
        body: eqx.nn.Linear
        head: eqx.nn.Linear

        def __call__(self, x):
            return jax.vmap(self.head)(jnp.tanh(jax.vmap(self.body)(x)))

    net = Net(nnx.Rngs(0))
    keys = jax.random.split(jax.random.key(0))
    module = Module(eqx.nn.Linear(8, 8, key=keys[0]), eqx.nn.Linear(8, 8, key=keys[1]))
    for model in (net, module):
        call = lambda model, x: model(x)
        for given, expected in (
            ({"head": "float32"}, [HALF, FULL]),
            ({"model/body": "float32"}, [FULL, HALF]),
            ({}, [HALF, HALF]),
        ):
            fun = jmp.autocast(call, rules=given)
            assert products(lambda x, fun=fun, model=model: fun(model, x), X) == expected


def test_a_rule_that_selects_nothing_is_a_value_error_that_names_similar_names():
    for pattern in ("haed", "decoder/headd", "encoder/head", "/head", "0/head"):
        fun = jmp.autocast(scoped, rules={pattern: "float32"})
        for run in (fun, jax.jit(fun)):
            with pytest.raises(ValueError, match=f"The rule for '{re.escape(pattern)}' selects nothing"):
                run(X, W)
    with pytest.raises(ValueError, match=r"'decoder/head'"):
        jmp.autocast(scoped, rules={"decoder/haed": "float32"})(X, W)


def test_a_rule_and_full_precision_and_autocast_within_go_together():
    def fun(x, w):
        with jax.named_scope("a"):
            x = jmp.autocast(lambda x, w: x @ w, jnp.float16)(x @ w, w)
        return jmp.full_precision(jnp.matmul)(x, w)

    names = [pair[0] for pair in products(jmp.autocast(fun, rules={"a": "float32"}), X, W)]
    assert names == ["float32", "float16", "float32"]


# Messages


SQUARE = jnp.ones((16, 16))
product = lambda x: jnp.sum(x @ x)


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
    assert "test_rules.py" in product.reason
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
    assert "test_rules.py" in product.reason


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

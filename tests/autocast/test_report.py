"""`explain`: what it says of every operation is what autocast does."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters import partial_eval

import jmp_lite as jmp
from tests.support.jaxprs import equations, products


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(32)(nn.LayerNorm()(x))
        return x + nn.Dense(16)(nn.gelu(h))


class Net(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(10, 16)(tokens)
        for index in range(2):
            x = Block(name=f"block{index}")(x)
        return nn.Dense(10, name="head", precision="highest")(x)


TOKENS = jnp.zeros((2, 3), jnp.int32)
PARAMS = jax.tree.map(
    lambda p: np.ones(p.shape, np.float32), jax.eval_shape(Net().init, jax.random.key(0), TOKENS)
)


def loss_fn(params, tokens):
    logits = Net().apply(params, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


@pytest.fixture(scope="module")
def report():
    return jmp.explain(jmp.autocast(loss_fn, "float16"))(PARAMS, TOKENS)


def dots(report):
    return [operation for operation in report.operations if operation.name == "dot_general"]


def test_the_report_has_every_product_with_its_dtypes(report):
    fun = jmp.autocast(loss_fn, report.dtype)
    told = [tuple(each.partition("[")[0] for each in operation.inputs) for operation in dots(report)]
    assert told == products(fun, PARAMS, TOKENS)
    assert [operation.in_half for operation in dots(report)] == [True] * 4 + [False]
    assert report.in_float32() == (dots(report)[-1],)


def test_the_report_has_every_operation_once_with_its_list_and_reason(report):
    inside = report.before.jaxpr
    needed, _ = partial_eval.dce_jaxpr(inside, [True] * len(inside.outvars))  # JAX drops the others too.
    before = [
        equation.primitive.name
        for equation in equations(needed)
        if equation.primitive.name not in {"jit", "custom_jvp_call"}
        and any(jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in (*equation.invars, *equation.outvars))
    ]
    assert [operation.name for operation in report.operations] == before
    lists = {operation.name: operation.category for operation in report.operations}
    assert (lists["dot_general"], lists["reduce_sum"], lists["add"]) == ("allow", "deny", "infer")
    assert lists["broadcast_in_dim"] == "move"
    assert all(operation.reason for operation in report.operations)


def test_it_tells_why_a_product_is_in_float32(report):
    (head,) = report.in_float32()
    assert head.reason == "the program asks for precision HIGHEST"
    assert head.scope == head.module == "Net/head"
    assert head.arguments == ("params/params/head/kernel",)
    assert "linear.py" in head.source
    assert str(head) in str(report)


def test_it_groups_by_module(report):
    modules = report.by_module()
    assert [name for name in modules if name.startswith("Net/block0")] == [
        "Net/block0/LayerNorm_0",
        "Net/block0/Dense_0",
        "Net/block0",
        "Net/block0/Dense_1",
    ]
    assert sum(map(len, modules.values())) == len(report.operations)
    assert {name.count("/") for name in report.by_module(depth=1)} == {0}
    assert len(report.by_module(depth=2)["Net/block0"]) == sum(
        len(operations) for name, operations in modules.items() if name.startswith("Net/block0")
    )


def test_the_summary_counts_what_the_report_holds(report):
    half = sum(operation.in_half for operation in report.operations)
    casts = [
        {equation.invars[0].aval.dtype.name, equation.outvars[0].aval.dtype.name}
        for equation in equations(report.after)
        if equation.primitive.name == "convert_element_type"
    ]
    assert report.casts == casts.count({"float32", report.dtype.name}) > 0
    assert report.summary() == (
        f"{half} of {len(report.operations)} operations in {report.dtype.name}, {report.casts} casts, "
        f"{report.tensor_core_share:.1%} of FLOPs on Tensor Cores"
    )
    assert str(report).startswith(report.summary())


def test_the_jaxprs_are_those_before_and_after(report):
    fun = jmp.autocast(loss_fn, report.dtype)
    same = lambda f: [e.primitive.name for e in equations(jax.make_jaxpr(f)(PARAMS, TOKENS))]
    assert [e.primitive.name for e in equations(report.before)] == same(loss_fn)
    assert [e.primitive.name for e in equations(report.after)] == same(fun)


def test_it_tells_of_the_backward_pass_too():
    both = jmp.explain(jmp.autocast(jax.value_and_grad(loss_fn)))(PARAMS, TOKENS)
    found = [operation.in_half for operation in dots(both)]
    assert len(found) == len(products(jax.grad(loss_fn), PARAMS, TOKENS))
    assert found.count(False) == 3  # The head's three, whose precision the program asks for.


def test_it_names_scopes_jitted_functions_and_rules():
    @jax.jit
    def inner(w, x):
        return x @ w

    def fun(w, x):
        with jax.named_scope("outer"):
            return inner(w, x) @ w

    w = x = jnp.ones((4, 4))
    report = jmp.explain(jmp.autocast(fun, rules={"outer/inner": "float32"}))(w, x)
    assert [(o.scope, o.in_half, o.reason) for o in dots(report)] == [
        ("outer/inner", False, "the rule for 'outer/inner'"),
        ("outer", True, "dot_general is on the allow list"),
    ]
    kept = jmp.explain(jmp.autocast(lambda w, x: jmp.full_precision(fun)(w, x) @ w))(w, x)
    assert [(o.scope, o.reason) for o in dots(kept)] == [
        ("outer/inner", "inside full_precision"),
        ("outer", "inside full_precision"),
        ("", "dot_general is on the allow list"),
    ]


def test_the_report_says_that_an_activation_function_runs_in_float32():
    report = jmp.explain(jmp.autocast(lambda w, x: jax.nn.gelu(x @ w) @ w))(
        jnp.ones((4, 4)), jnp.ones((2, 4))
    )
    *parts, last = [o for o in report.operations if o.name not in ("dot_general", "copy")]
    assert {operation.in_half for operation in (*parts, last)} == {False}
    assert {operation.reason for operation in parts} == {
        "part of that function, which is computed in float32"
    }
    assert last.reason == (
        "an activation function or softmax, computed in float32 from its half inputs, and recomputed"
    )
    assert last.outputs == ("bfloat16[2,4]",)


@pytest.mark.slow
def test_shapes_stand_for_arrays():
    shapes = jax.eval_shape(lambda: (PARAMS, TOKENS))
    for fun in (loss_fn, jax.grad(loss_fn)):
        assert jmp.explain(fun)(*shapes).table() == jmp.explain(fun)(PARAMS, TOKENS).table()
    seen = []
    jmp.autocast(lambda x, shape: seen.append(shape) or x)(jnp.ones(2), shapes[1])
    assert seen == [shapes[1]]  # To a function that autocast returned it is an argument like any other.


@pytest.mark.parametrize("own", ["float16", "bfloat16"])
def test_products_that_the_program_made_half_are_in_half(own):
    def fun(w, x):
        kept = jmp.full_precision(lambda h: h @ h.T)((x @ w).astype(own))
        return kept.astype(jnp.float32) @ x

    report = jmp.explain(fun, "bfloat16")(jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert [operation.inputs[0] for operation in dots(report)] == [
        "bfloat16[4,4]",
        f"{own}[4,4]",
        "bfloat16[4,4]",
    ]
    assert report.in_float32() == ()
    assert all(operation.on_tensor_cores for operation in dots(report))
    assert "not in half" not in str(report)


def test_operations_on_no_list_are_named():
    from jax.extend.core import Primitive

    own = Primitive("an_operation_of_ours")
    own.def_abstract_eval(lambda x: x)
    report = jmp.explain(jmp.autocast(lambda w: own.bind(w @ w) @ w))(jnp.ones((4, 4)))
    assert str(report).endswith("Not on any list, left unchanged: an_operation_of_ours")


@pytest.mark.parametrize("wrap", [jax.grad, jax.jit])
def test_it_does_not_explain_a_transform_of_an_autocast_function(wrap):
    with pytest.raises(
        TypeError, match=r"a transform of a function that autocast returned.*jax\.value_and_grad"
    ):
        jmp.explain(wrap(jmp.autocast(loss_fn)))


def test_it_explains_a_plain_function_as_if_it_were_autocast():
    for dtype in ("float16", "bfloat16"):
        assert jmp.explain(loss_fn, dtype)(PARAMS, TOKENS).table() == (
            jmp.explain(jmp.autocast(loss_fn, dtype))(PARAMS, TOKENS).table()
        )
    assert jmp.explain(loss_fn)(PARAMS, TOKENS).dtype == jnp.bfloat16
    assert jmp.explain(jax.jit(loss_fn))(PARAMS, TOKENS).tensor_core_share > 0
    with pytest.raises(ValueError, match="with the dtype float16; leave dtype out"):
        jmp.explain(jmp.autocast(loss_fn, "float16"), "bfloat16")
    with pytest.raises(TypeError, match=r"explain takes a function first\. Got 'float16'"):
        jmp.explain("float16")


def test_it_says_that_float32_changes_nothing():
    report = jmp.explain(jmp.autocast(loss_fn, "float32"))(PARAMS, TOKENS)
    count = len(report.operations)
    assert report.summary() == f"{count} operations as written: 0 of 5 matmuls in half"
    assert (report.casts, report.tensor_core_share) == (0, 0)
    others = {operation.reason for operation in report.operations if not operation.is_product}
    assert others == {"the dtype is float32"}
    assert str(report.after) == str(report.before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_function_that_calls_autocast_is_described_as_it_runs_if_no_dtype_is_given(dtype):
    w = jnp.eye(4)
    half_dot = jax.jit(jmp.autocast(jnp.dot, dtype))

    def step(w, x):
        return half_dot(w, x) @ x  # Nothing casts the second matmul.

    report = jmp.explain(step)(w, w)
    assert report.summary() == "5 operations as written: 1 of 2 matmuls in half"
    (left,) = report.in_float32()
    assert "step" in left.source
    assert report.table() == jmp.explain(step, "float32")(w, w).table()
    # A dtype asks what another autocast around it would do.
    assert not jmp.explain(step, dtype)(w, w).in_float32()


def test_the_text_is_the_summary_and_the_table_and_not_the_jaxprs(report):
    assert repr(report) == f"AutocastReport({report.summary()})"
    text = str(report)
    assert text.startswith(f"{report.summary()}\n")
    assert "Net/block0/Dense_0" in text
    assert " -> " in text  # The product of the head, which is in float32.
    assert "lambda" not in text


def test_an_operation_in_a_while_loop_counts_once_and_in_a_scan_each_time():
    def loops(x):
        x = jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x)
        return jax.lax.scan(lambda x, _: (x @ x, None), x, length=5)[0]

    found = [each for each in jmp.explain(loops)(jnp.ones((4, 4))).operations if each.is_product]
    assert [(each.times, each.flops) for each in found] == [(1, 2 * 4**3), (5, 5 * 2 * 4**3)]


def test_moves_and_casts_count_no_flops_and_the_casts_of_the_program_are_not_autocasts():
    def fun(w, x):
        return jnp.sum(x.T @ w) + jnp.sum(jnp.exp(x).astype(jnp.bfloat16).astype(jnp.float32))

    report = jmp.explain(jmp.autocast(fun))(jnp.ones((4, 8)), jnp.ones((4, 2)))
    flops = {operation.name: operation.flops for operation in report.operations}
    assert flops["transpose"] == flops["convert_element_type"] == 0
    assert (flops["dot_general"], flops["exp"]) == (2 * 2 * 8 * 4, 8)
    (casts,) = re.findall(r"(\d+) casts", report.summary())
    assert int(casts) == 3  # Of `w`, of `x`, and of the product in front of its sum.


def test_casts_of_a_float32_product_are_those_of_its_gradients():
    def settle(w, x):
        step = lambda z: 0.5 * jnp.tanh(z @ w) + x
        body = lambda carry: (step(carry[0]), jnp.abs(step(carry[0]) - carry[0]).max())
        return jax.lax.while_loop(lambda carry: carry[1] > 1e-3, body, (x, jnp.float32(1)))[0].sum()

    report = jmp.explain(settle, "bfloat16")(jnp.ones((8, 8)), jnp.ones((4, 8)))
    assert (
        f"0 of {len(report.operations)} operations in bfloat16, {report.casts} casts for gradients, "
        in str(report)
    )
    assert report.casts > 0


def test_the_lines_of_a_report_break_between_words():
    def fun(w, x):
        with jax.named_scope("one scope of many words, whose name does not fit into a line of a notebook"):
            return jnp.dot(x, w, precision="highest")

    report = jmp.explain(jmp.autocast(fun))(jnp.ones((8, 8)), jnp.ones((8, 8)))
    _, *why = str(report.operations[0]).splitlines()
    assert len(why) == 2
    assert max(map(len, why)) <= 90
    assert " ".join("".join(f"{line} " for line in why).split()) in " ".join(str(report).split())


@pytest.mark.parametrize("checkpoint", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_a_report_of_a_step_has_the_reasons_of_the_autocast_inside(checkpoint):
    @checkpoint
    def layer(w, x):
        with jax.named_scope("head"):
            return jnp.tanh(x @ w)

    def loss(w, x):
        return jnp.sum(layer(w, layer(w, x) @ w) @ w)

    def step(w, x):
        return jax.grad(jmp.autocast(loss, "bfloat16", rules={"head": "float32"}))(w, x)

    w, x = jnp.ones((32, 32)), jnp.ones((64, 32))
    for dtype in ("float32", "bfloat16"):
        report = jmp.explain(step, dtype)(w, x)
        matmuls = [each for each in report.operations if each.is_product or each.name == "dot_general"]
        kept = [each for each in matmuls if not each.in_half]
        assert {(each.why, each.reason) for each in kept} == {("rule", "the rule for 'head'")}
        assert {each.backward for each in kept} == {True, False}
        assert len(kept) < len(matmuls)


def test_the_gradient_of_a_weight_has_the_module_of_its_layer():
    def loss(params, x):
        for layer in params["layers"]:
            scores = jax.nn.softmax((x @ layer["q"]["kernel"]) @ (x @ layer["k"]["kernel"]).T)
            x = jnp.tanh(scores @ x @ layer["out"]["kernel"])
        return jnp.mean(jnp.tanh(x @ params["head"]["kernel"]) ** 2)

    weights = {name: {"kernel": jnp.ones((16, 16))} for name in ("q", "k", "out")}
    params = {"layers": [weights, weights], "head": {"kernel": jnp.ones((16, 16))}}
    report = jmp.explain(jmp.autocast(jax.grad(loss), "bfloat16"))(params, jnp.ones((32, 16)))
    found = [each.module for each in report.operations if each.is_product and each.backward]
    # Of the first layer q and k take an array that has no gradient, which tells nothing.
    known = {"head": 2, "layers/0/out": 2, "layers/1/q": 2, "layers/1/k": 2, "layers/1/out": 2}
    assert {name: found.count(f"params/{name}") for name in known} == known

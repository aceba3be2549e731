"""What `autocast` promises of any function: signature, dtypes, sums, casts and gradients."""

import concurrent.futures
import dataclasses
import functools
import inspect
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closeness import assert_close
from jax import lax
from jax.experimental import io_callback
from jaxprs import casts, equations, products, text

import jmp_lite as jmp

HALVES = ["float16", "bfloat16"]
_numbers = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return jnp.asarray(_numbers.normal(size=shape) * scale, jnp.float32)


W, V, X = normal(8, 8, scale=0.35), normal(8, 8, scale=0.35), normal(4, 8)


def mlp(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


PARAMS = {"w": W, "v": V, "b": normal(8)}


def eps(dtype):
    return float(jnp.finfo(dtype).eps)


# Signature, structure and dtypes.


def test_the_name_docstring_and_signature_of_the_function_are_kept():
    def named(x, *, flag: bool = True):
        """Documented."""
        return x

    wrapped = jmp.autocast(named)
    assert (wrapped.__name__, wrapped.__doc__) == ("named", "Documented.")
    assert inspect.signature(wrapped) == inspect.signature(named)
    assert jmp.full_precision(named).__name__ == "named"


def test_methods_partials_jitted_functions_and_callable_objects_are_functions():
    class Model:
        def __init__(self):
            self.w = W

        @jmp.autocast
        def apply(self, x):
            return x @ self.w

        def __call__(self, x, scale=1.0):
            return x @ self.w * scale

    model = Model()
    for fun in (
        model.apply,
        jmp.autocast(model),
        jmp.autocast(model.__call__),
        jmp.autocast(functools.partial(model, scale=2.0)),
        jmp.autocast(jax.jit(model)),
        jmp.autocast(jax.vmap(model)),
        jmp.autocast(jax.checkpoint(model)),
        jax.jit(jmp.autocast(model)),
    ):
        assert products(fun, X) == [("bfloat16", "bfloat16")]
    scaled = jax.jit(jmp.autocast(model), static_argnames="scale")
    assert_close(scaled(X, scale=3.0), X @ W * 3, "bfloat16", factor=2)


def test_gradients_of_integers_have_no_dtype_as_in_jax():
    fun = lambda x, n: jnp.sum(x @ W) * n
    grad = lambda f: jax.grad(f, (0, 1), allow_int=True)
    for ours in (grad(jmp.autocast(fun)), jmp.autocast(grad(fun)), jax.jit(jmp.autocast(grad(fun)))):
        grads = ours(X, jnp.int32(2))
        assert [g.dtype for g in grads] == [jnp.float32, jax.dtypes.float0]
        assert_close(grads[0], grad(fun)(X, jnp.int32(2))[0], "bfloat16", factor=2)


def test_lowering_ahead_of_time_and_exporting_work():
    fun = jax.jit(jmp.autocast(mlp))
    compiled = fun.lower(PARAMS, X).compile()
    np.testing.assert_array_equal(compiled(PARAMS, X), fun(PARAMS, X))
    exported = jax.export.export(fun)(PARAMS, X)
    np.testing.assert_array_equal(exported.call(PARAMS, X), fun(PARAMS, X))
    assert "tensor<8x8xbf16>" in exported.mlir_module()


def test_static_python_arguments_reach_the_function_as_they_are():
    seen = []

    def fun(x, flag, *rest, mode, nothing=None, number=2, **more):
        seen.append((flag, rest, mode, nothing, number, more))
        if flag and mode == "double" and number == 2:
            return x @ x.T * number
        return x

    result = jmp.autocast(fun)(X, True, "a", (3, None), mode="double", extra=3.5)
    assert seen == [(True, ("a", (3, None)), "double", None, 2, {"extra": 3.5})]
    assert [type(each) for each in (*seen[0][1][1], seen[0][5]["extra"])] == [int, type(None), float]
    assert_close(result, X @ X.T * 2, "bfloat16", factor=2)
    assert products(lambda x: jmp.autocast(fun)(x, True, mode="double"), X) == [("bfloat16", "bfloat16")]


def test_keyword_arguments_that_are_arrays_are_cast_like_others():
    fun = jmp.autocast(lambda x, *, w: x @ w)
    assert products(lambda x, w: fun(x, w=w), X, W) == [("bfloat16", "bfloat16")]


@pytest.mark.parametrize("half", HALVES)
def test_numpy_arguments_work_and_take_part_in_products(half):
    fun = jmp.autocast(lambda w, x: x @ w, half)
    result = fun(np.asarray(W), np.asarray(X))
    assert isinstance(result, (np.ndarray, jax.Array))
    assert_close(result, X @ W, half, factor=2)
    assert products(lambda x: fun(np.asarray(W), x), X) == [(half, half)]
    assert products(jax.jit(lambda w, x: fun(w, x)), np.asarray(W), X) == [(half, half)]


def test_a_computation_of_numpy_arguments_alone_uses_half_too():
    result = jmp.autocast(lambda w, x: jnp.dot(x, w))(np.asarray(W), np.asarray(X))
    exact = np.asarray(X) @ np.asarray(W)
    assert 0 < np.abs(result - exact).max() < 4 * eps("bfloat16") * np.abs(exact).max()


def test_outputs_of_any_kind_come_back_in_their_structure():
    class Pair(typing.NamedTuple):
        loss: jax.Array
        label: str

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Output:
        logits: jax.Array
        steps: int
        name: str = dataclasses.field(metadata={"static": True})

    def fun(x):
        y = x @ W
        return {
            "pair": Pair(y.sum(), "label"),
            "data": Output(y, 3, "run"),
            "none": None,
            "list": [1, 2.5, "x", np.arange(2), np.float32(3), x],
            "function": jnp.tanh,
        }

    plain, result = fun(X), jmp.autocast(fun)(X)
    assert jax.tree.structure(result) == jax.tree.structure(plain)
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(plain)):
        assert type(ours) is type(theirs)
        assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)
    assert result["list"][:3] == [1, 2.5, "x"]
    assert result["function"] is jnp.tanh
    assert result["data"].name == "run"


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "bool", "complex64", "float8_e4m3fn"])
def test_other_dtypes_are_left_alone(dtype):
    x = jnp.ones((4, 4), dtype)

    def fun(x):
        y = x if dtype == "bool" else x + x
        return x, y if dtype.startswith("float8") else y @ y, y.reshape(-1)[:3], x.real.astype(jnp.float32)

    assert text(jmp.autocast(fun), x) == text(fun, x)
    assert [leaf.dtype for leaf in jmp.autocast(fun)(x)] == [leaf.dtype for leaf in fun(x)]


def test_float64_is_left_alone():
    with jax.enable_x64(True):
        x = jnp.ones((4, 4), jnp.float64) / 3
        fun = lambda x: (x @ x, (x * 2.0).sum())
        assert text(jmp.autocast(fun), x) == text(fun, x)
        mixed = lambda x, w: ((x @ x).sum() + (w @ w).sum(), w @ w)
        w = jnp.ones((4, 4), jnp.float32) / 3
        assert products(jmp.autocast(mixed), x, w) == [
            ("float64", "float64"),
            *[("bfloat16", "bfloat16")] * 2,
        ]
        total, product = jmp.autocast(mixed)(x, w)
        assert (total.dtype, product.dtype) == (jnp.float64, jnp.float32)
        assert abs(float(total) - 128 / 9) < 64 / 9 * 4 * eps("bfloat16")


def test_random_keys_pass_through_and_dropout_draws_the_same_mask():
    def fun(x, key):
        key, new = jax.random.split(key)
        kept = jax.random.bernoulli(new, 0.5, x.shape)
        return (
            jnp.where(kept, x @ W / 0.5, 0.0),
            kept,
            key,
            jax.random.normal(key, (3,)),
            jax.random.uniform(new),
        )

    key = jax.random.key(3)
    plain, result = fun(X, key), jmp.autocast(fun)(X, key)
    assert jnp.array_equal(plain[1], result[1])
    assert jnp.array_equal(plain[0] == 0, result[0] == 0)
    assert result[2].dtype == key.dtype
    assert jnp.array_equal(jax.random.key_data(plain[2]), jax.random.key_data(result[2]))
    np.testing.assert_array_equal(plain[3], result[3])
    assert float(plain[4]) == float(result[4])
    assert products(jmp.autocast(fun), X, key) == [("bfloat16", "bfloat16")]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("own", HALVES)
def test_code_that_is_half_already_is_left_alone(half, own):
    x, w = X.astype(own), W.astype(own)
    fun = lambda x, w: jax.nn.softmax(jnp.tanh(x @ w) @ w * 2 + 1)
    assert text(jmp.autocast(fun, half), x, w) == text(fun, x, w)
    inside = lambda x, w: (x.astype(own) @ w.astype(own)).astype(jnp.float32)
    assert text(jmp.autocast(inside, half), X, W) == text(inside, X, W)


def test_half_arguments_beside_float32_ones_keep_jaxs_promotion():
    fun = lambda x, w: x @ w
    assert jmp.autocast(fun)(X.astype(jnp.bfloat16), W).dtype == jnp.float32
    assert products(jmp.autocast(fun), X.astype(jnp.bfloat16), W) == [("bfloat16", "bfloat16")]


def test_weak_types_of_outputs_are_those_of_the_plain_function():
    def fun(x, scale):
        return x @ x.T, scale * 2.0, jnp.asarray(1.0) * scale, x.sum() * scale, jnp.where(True, scale, 1.0)

    for given in (jnp.asarray(2.0), jnp.float32(2.0)):
        plain = [leaf.weak_type for leaf in fun(X, given)]
        assert [leaf.weak_type for leaf in jmp.autocast(fun)(X, given)] == plain
        abstract = lambda f, given=given: [leaf.weak_type for leaf in jax.eval_shape(f, X, given)]
        assert abstract(jmp.autocast(fun)) == abstract(fun)


def test_weak_types_survive_what_a_product_touches():
    fun = lambda x: (x @ x.T).sum() * jnp.asarray(2.0)
    scaled = lambda s: s * jnp.ones(())
    assert jax.eval_shape(jmp.autocast(fun), X).weak_type == jax.eval_shape(fun, X).weak_type
    weak = jnp.asarray(3.0)
    assert jax.eval_shape(jmp.autocast(scaled), weak).weak_type == jax.eval_shape(scaled, weak).weak_type


def test_shapes_alone_can_be_evaluated():
    shapes = jax.eval_shape(jmp.autocast(mlp), PARAMS, X)
    assert (shapes.shape, shapes.dtype) == ((4, 8), jnp.float32)


def test_arguments_in_any_pytree_work():
    model = eqx.nn.MLP(8, 2, 8, depth=1, key=jax.random.key(0))
    fun = jmp.autocast(lambda model, x: jax.vmap(model)(x))
    assert_close(fun(model, X), jax.vmap(model)(X), "bfloat16", factor=4)
    assert products(lambda x: fun(model, x), X) == [("bfloat16", "bfloat16")] * 2


def test_errors_of_the_function_come_through():
    def fun(x):
        if x.shape[0] == 4:
            raise KeyError("mine")
        return x

    with pytest.raises(KeyError, match="mine"):
        jmp.autocast(fun)(X)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        jmp.autocast(lambda a, b: a)(X)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jmp.autocast(lambda x: x if (x > 0).all() else -x)(X)


# What runs in half, and what in float32.


@pytest.mark.parametrize("half", HALVES)
def test_the_result_of_a_product_is_that_of_half_operands(half):
    result = jmp.autocast(lambda x, w: x @ w, half)(X, W)
    by_hand = (X.astype(half) @ W.astype(half)).astype(jnp.float32)
    assert_close(result, by_hand, half, factor=1)
    assert not np.array_equal(result, X @ W)


@pytest.mark.parametrize("half", HALVES)
def test_biases_activations_and_scalars_keep_half_between_products(half):
    def fun(x, w, b, scale):
        y = jax.nn.relu(x @ w + b) * scale
        return (jnp.tanh(y * 0.5 + 1.0) / 3.0) @ w

    jaxpr = jax.make_jaxpr(jmp.autocast(fun, half))(X, W, PARAMS["b"], jnp.float32(0.7))
    operands = [
        [var.aval.dtype.name for var in equation.invars]
        for equation in equations(jaxpr)
        if equation.primitive.name in ("tanh", "dot_general", "max")
    ]
    assert operands == [[half, half], [half, half], [half], [half, half]]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "fun",
    [jnp.exp, jnp.log1p, lambda y: y.sum(), lambda y: jnp.cumsum(y, 0), lambda y: lax.rsqrt(y + 9), jnp.std],
    ids=["exp", "log1p", "sum", "cumsum", "rsqrt", "std"],
)
def test_what_loses_precision_runs_in_float32(fun, half):
    def program(x, w):
        return fun((x @ w) * 0.1)

    half_results = [
        (equation.primitive.name, out.aval.dtype.name)
        for equation in equations(jax.make_jaxpr(jmp.autocast(program, half))(X, W))
        for out in equation.outvars
        if equation.primitive.name in ("exp", "log1p", "reduce_sum", "cumsum", "rsqrt", "log")
    ]
    assert half_results
    assert {dtype for _, dtype in half_results} == {"float32"}


def test_an_explicit_astype_of_the_users_is_obeyed():
    fun = lambda x, w: (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32) @ w
    assert products(jmp.autocast(fun), X, W) == [("float16", "float16"), ("bfloat16", "bfloat16")]
    cast = lambda x: (x @ x.T).astype(jnp.float16)
    assert jmp.autocast(cast)(X).dtype == jnp.float16


@pytest.mark.parametrize(
    "precision", ["highest", "float32", lax.Precision.HIGH, ("highest", "default"), "TF32_TF32_F32"]
)
def test_a_precision_that_the_program_asks_for_is_obeyed(precision):
    if isinstance(precision, str) and precision.startswith("TF32"):
        precision = lax.DotAlgorithmPreset.TF32_TF32_F32
    asked = lambda x, w: jnp.matmul(x, w, precision=precision)
    assert text(jmp.autocast(asked), X, W) == text(asked, X, W)
    both = lambda x, w: asked(x, w) @ w
    assert products(jmp.autocast(both), X, W) == [("float32", "float32"), ("bfloat16", "bfloat16")]


def test_a_default_precision_around_the_call_is_obeyed():
    fun = lambda x, w: x @ w
    with jax.default_matmul_precision("highest"):
        assert text(jmp.autocast(fun), X, W) == text(fun, X, W)
        assert products(jmp.autocast(fun), X, W) == [("float32", "float32")]
    assert products(jmp.autocast(fun), X, W) == [("bfloat16", "bfloat16")]


def test_a_precision_of_a_part_holds_in_its_backward_products():
    def loss(w):
        return jnp.sum(jnp.matmul(X, w, precision="highest") ** 2) + jnp.sum(jnp.tanh(X @ w))

    for grad in (jax.grad(jmp.autocast(loss)), jmp.autocast(jax.grad(loss))):
        found = products(grad, W)
        assert sorted(found) == [*[("bfloat16", "bfloat16")] * 2, *[("float32", "float32")] * 2]


def test_a_result_type_that_the_program_asks_for_is_obeyed():
    fun = lambda x: lax.dot(x, x.T, preferred_element_type=jnp.float16)
    assert jmp.autocast(fun)(X).dtype == fun(X).dtype
    assert text(jmp.autocast(fun), X) == text(fun, X)


def test_an_inner_product_stays_float32():
    ones = jnp.full(4099, 1.001, jnp.float32)
    for fun in (
        lambda a: a @ a,
        lambda a: jnp.vdot(a, a),
        lambda a: jnp.einsum("i,i->", a, a),
        optax.tree.norm,
    ):
        assert text(jmp.autocast(fun), ones) == text(fun, ones)
    batched = lambda a: jnp.einsum("bi,bi->b", a, a)
    rows = jnp.full((3, 4099), 1.001, jnp.float32)
    assert text(jmp.autocast(batched), rows) == text(batched, rows)
    assert products(jmp.autocast(lambda x, w: jnp.vdot(x @ w, x)), X, W) == [
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
    ]


@pytest.mark.parametrize(
    ("number", "apply"),
    [
        (1e-8, lambda y, number: y / (jnp.abs(y) + number)),
        (1e5, lambda y, number: y * number / number),
        (65536.0, lambda y, number: y * number),
        (1e-8, lambda y, number: jnp.maximum(y, number)),
        (3e38, lambda y, number: jnp.minimum(y, number)),
        (1e-7, lambda y, number: y + number),
        (4e-8, lambda y, number: jnp.where(y > 0, y, number)),
        (-1e9, lambda y, number: jnp.where(y > 0, y, number)),
        (70000.0, lambda y, number: jnp.clip(y, -number, number)),
    ],
)
def test_a_literal_that_float16_cannot_hold_keeps_its_operation_in_float32(number, apply):
    fun = lambda x, w: apply(x @ w, number) @ w
    jaxpr = jax.make_jaxpr(jmp.autocast(fun, jnp.float16))(X, W)
    arithmetic = [
        e for e in equations(jaxpr) if e.primitive.name in ("add", "mul", "div", "max", "min", "select_n")
    ]
    assert arithmetic
    for equation in arithmetic:
        assert {var.aval.dtype.name for var in equation.invars} <= {"float32", "bool"}
    expected, result = (
        apply(X @ W, number),
        jmp.autocast(lambda x, w: apply(x @ w, number), jnp.float16)(X, W),
    )
    assert_close(result, expected, "float16", factor=8)
    assert products(jmp.autocast(fun, jnp.float16), X, W) == [("float16", "float16")] * 2


MASKS = {
    "-inf selected": lambda s, keep: jnp.where(keep, s, -jnp.inf),
    "-1e9 selected": lambda s, keep: jnp.where(keep, s, -1e9),
    "least selected": lambda s, keep: jnp.where(keep, s, jnp.finfo(s.dtype).min),
    "-inf added": lambda s, keep: s + jnp.where(keep, 0.0, -jnp.inf),
    "-1e9 added": lambda s, keep: s + jnp.where(keep, 0.0, -1e9),
    "-1e9 by arithmetic": lambda s, keep: s + (1.0 - keep.astype(jnp.float32)) * -1e9,
    "least added": lambda s, keep: s + jnp.where(keep, 0.0, jnp.finfo(jnp.float32).min),
    "scaled by a million": lambda s, keep: s - 1e6 * (1 - keep),
}


def attention(masked, q, k, v, keep):
    scores = jnp.einsum("qd,kd->qk", q, k) / np.sqrt(q.shape[-1])
    return jax.nn.softmax(masked(scores, keep), axis=-1) @ v


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_attention_give_finite_values_and_gradients(mask, half):
    q, k, v = normal(6, 8), normal(6, 8), normal(6, 8)
    keep = jnp.tril(jnp.ones((6, 6), bool))
    fun = lambda q, k, v: attention(MASKS[mask], q, k, v, keep)
    loss = lambda f: lambda *args: jnp.sum(jnp.sin(f(*args)))
    assert_close(jmp.autocast(fun, half)(q, k, v), fun(q, k, v), half, factor=8)
    assert products(jmp.autocast(fun, half), q, k, v) == [(half, half)] * 2
    expected = jax.grad(loss(fun), (0, 1, 2))(q, k, v)
    assert all(jnp.isfinite(grad).all() for grad in expected)
    for grad in (
        jax.grad(loss(jmp.autocast(fun, half)), (0, 1, 2)),
        jmp.autocast(jax.grad(loss(fun), (0, 1, 2)), half),
    ):
        assert_close(grad(q, k, v), expected, half, factor=24)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("fill", [-np.inf, -1e9, np.finfo(np.float32).min])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_mask_that_is_an_argument_works(jit, fill, half):
    q, k, v = normal(6, 8), normal(6, 8), normal(6, 8)
    bias = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), 0.0, jnp.float32(fill))
    fun = lambda q, k, v, bias: attention(lambda s, bias: s + bias, q, k, v, bias)
    assert_close(jit(jmp.autocast(fun, half))(q, k, v, bias), fun(q, k, v, bias), half, factor=8)
    for shape in ((1, 6), (6,)):
        row = jnp.where(jnp.arange(6) < 4, 0.0, jnp.float32(fill)).reshape(shape)
        assert_close(jit(jmp.autocast(fun, half))(q, k, v, row), fun(q, k, v, row), half, factor=8)
    looked_up = lambda q, k, v, bias: fun(q, k, v, bias[jnp.arange(6)])
    assert_close(jit(jmp.autocast(looked_up, half))(q, k, v, bias), fun(q, k, v, bias), half, factor=8)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mask", ["-inf selected", "-1e9 selected", "least selected", "-1e9 by arithmetic"])
def test_fully_masked_rows_give_what_float32_gives(mask, half):
    q, k, v = normal(6, 8), normal(6, 8), normal(6, 8)
    keep = jnp.tril(jnp.ones((6, 6), bool)).at[2].set(False)
    fun = lambda q, k, v: attention(MASKS[mask], q, k, v, keep)
    expected, result = fun(q, k, v), jmp.autocast(fun, half)(q, k, v)
    np.testing.assert_array_equal(jnp.isnan(expected), jnp.isnan(result))
    assert_close(jnp.nan_to_num(result), jnp.nan_to_num(expected), half, factor=8)


def test_jax_dot_product_attention_with_masks_works_in_float16():
    q, k, v = (normal(2, 6, 2, 8) for _ in range(3))
    keep = jnp.tril(jnp.ones((6, 6), bool))[None, None]
    for settings in ({"is_causal": True}, {"mask": keep}, {"bias": jnp.where(keep, 0.0, -1e9)}, {}):
        fun = lambda q, k, v, settings=settings: jax.nn.dot_product_attention(q, k, v, **settings)
        loss = lambda f: lambda *args: jnp.sum(jnp.sin(f(*args)))
        assert_close(jmp.autocast(fun, "float16")(q, k, v), fun(q, k, v), "float16", factor=8)
        assert products(jmp.autocast(fun, "float16"), q, k, v) == [("float16", "float16")] * 2
        expected = jax.grad(loss(fun), (0, 1, 2))(q, k, v)
        assert_close(
            jax.grad(loss(jmp.autocast(fun, "float16")), (0, 1, 2))(q, k, v), expected, "float16", factor=16
        )


# full_precision and keep_f32.


def test_full_precision_keeps_products_float32_and_autocast_inside_it_switches_on_again():
    inner = jmp.autocast(lambda x, w: x @ w, jnp.float16)

    @jmp.full_precision
    def middle(x, w):
        return inner(x @ w, w) @ w

    @jmp.autocast
    def outer(x, w):
        return middle(x @ w, w) @ w

    names = [pair[0] for pair in products(outer, X, W)]
    assert names == ["bfloat16", "float32", "float16", "float32", "bfloat16"]
    names = [pair[0] for pair in products(jmp.full_precision(outer), X, W)]
    assert names == ["bfloat16", "float32", "float16", "float32", "bfloat16"]
    again = jmp.autocast(jmp.full_precision(outer), jnp.float16)
    assert [pair[0] for pair in products(again, X, W)] == names
    assert_close(outer(X, W), X @ W @ W @ W @ W @ W, "bfloat16", factor=8)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_full_precision_nests(depth):
    fun = lambda x, w: x @ w
    for _ in range(depth):
        fun = jmp.full_precision(fun)
    assert text(jmp.autocast(fun), X, W) == text(fun, X, W)
    for _ in range(depth):
        fun = jmp.full_precision(jmp.autocast(fun))
    assert products(jmp.autocast(fun), X, W) == [("float32", "float32")]


AROUND = {
    "jit": jax.jit,
    "inline": lambda f: jax.jit(f, inline=True),
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[:, None], w)[:, 0],
    "scan": lambda f: lambda x, w: lax.scan(lambda x, _: (f(x, w), None), x, length=1)[0],
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] < 100, f, f, x, w),
    "while": lambda f: lambda x, w: lax.fori_loop(0, x.shape[0] // 4, lambda _, x: f(x, w), x),
    "named_scope": jax.named_scope("mine"),
    "checkpointed jit": lambda f: jax.checkpoint(jax.jit(f)),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("within", [True, False], ids=["outside it", "inside it"])
def test_full_precision_holds_with(around, within):
    plain = lambda x, w: jnp.tanh(x @ w)
    fun = jmp.full_precision(AROUND[around](plain)) if within else AROUND[around](jmp.full_precision(plain))
    program = lambda x, w: fun(x @ w, w)
    found = products(jmp.autocast(program), X, W)
    assert found[0] == ("bfloat16", "bfloat16")
    assert set(found[1:]) == {("float32", "float32")}
    if around != "while":
        loss = lambda x, w: jnp.sum(fun(x, w))
        for grad in (jax.grad(jmp.autocast(loss), 1), jmp.autocast(jax.grad(loss, 1))):
            assert set(products(grad, X, W)) == {("float32", "float32")}


def test_a_jitted_function_used_inside_and_outside_full_precision_is_decided_apart():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    program = lambda x, w: layer(jmp.full_precision(layer)(layer(x, w), w), w)
    names = [pair[0] for pair in products(jmp.autocast(program), X, W)]
    assert names == ["bfloat16", "float32", "bfloat16"]
    # JAX's own caches of what was traced before must not bring it back.
    names = [pair[0] for pair in products(jmp.autocast(lambda x, w: layer(x, w)), X, W)]
    assert names == ["bfloat16"]


@pytest.mark.parametrize("around", [name for name in AROUND if name != "while"])
def test_keep_f32_survives(around):
    def plain(x, w):
        return jnp.tanh(jmp.keep_f32(x @ w) * 2.0)

    jaxpr = jax.make_jaxpr(jmp.autocast(AROUND[around](plain)))(X, W)
    assert ["float32"] in [
        [var.aval.dtype.name for var in equation.invars]
        for equation in equations(jaxpr)
        if equation.primitive.name == "tanh"
    ]
    assert products(jmp.autocast(AROUND[around](plain)), X, W)[0] == ("bfloat16", "bfloat16")
    without = jax.make_jaxpr(jmp.autocast(lambda x, w: jnp.tanh((x @ w) * 2.0) @ w))(X, W)
    tanh = next(equation for equation in equations(without) if equation.primitive.name == "tanh")
    assert tanh.invars[0].aval.dtype == jnp.bfloat16


def test_keep_f32_holds_under_grad():
    def loss(x, w):
        return jnp.sum(jnp.tanh(jmp.keep_f32(x @ w) * 2.0) @ w)

    for grad in (jax.grad(jmp.autocast(loss), 1), jmp.autocast(jax.grad(loss, 1))):
        tanh = [e for e in equations(jax.make_jaxpr(grad)(X, W)) if e.primitive.name == "tanh"]
        assert {equation.invars[0].aval.dtype.name for equation in tanh} == {"float32"}
        assert set(products(grad, X, W)) == {("bfloat16", "bfloat16")}


def test_keep_f32_outside_autocast_is_the_identity():
    np.testing.assert_array_equal(jmp.keep_f32(X), X)
    assert jmp.keep_f32(X.astype(jnp.float16)).dtype == jnp.float16
    assert float(jax.grad(lambda x: jmp.keep_f32(x) ** 2)(3.0)) == 6.0


# Sums of gradients.

MANY = 40_960


def both_orders(loss, half):
    """The gradient of a loss in both orders."""
    return {"inside": jax.grad(jmp.autocast(loss, half)), "outside": jmp.autocast(jax.grad(loss), half)}


def _bias(w):
    return lambda b: jnp.sum(jnp.ones((MANY, 1)) @ jnp.ones((1, 4)) * 1.0 + b)


# Each is linear in its argument, whose gradient is a count that half precision cannot reach by adding ones.
COUNTS = {
    "bias": ((4,), lambda b, one, eye: (one @ eye + b).sum()),
    "bias as a row": ((1, 4), lambda b, one, eye: (one @ eye + b).sum()),
    "bias broadcast": ((4,), lambda b, one, eye: (one @ eye + jnp.broadcast_to(b, (MANY, 4))).sum()),
    "half value broadcast": ((1, 4), lambda b, one, eye: (one @ eye + b @ eye).sum()),
    "half value broadcast in a dim": ((4,), lambda b, one, eye: (one @ eye + (b[None] @ eye)[0]).sum()),
    "half value tiled": ((1, 4), lambda b, one, eye: (jnp.tile(b @ eye, (MANY, 1)) + one @ eye).sum()),
    "half value repeated": (
        (1, 4),
        lambda b, one, eye: (jnp.repeat(b @ eye, MANY, axis=0, total_repeat_length=MANY) + one @ eye).sum(),
    ),
    "gain": ((4,), lambda b, one, eye: (one @ eye * b).sum()),
    "embedding row": ((3, 4), lambda b, one, eye: (b[jnp.zeros(MANY, int)] @ eye).sum() / 1.0),
    "embedding added": ((3, 4), lambda b, one, eye: (one @ eye + b[jnp.zeros(MANY, int)]).sum()),
    "half rows gathered": ((3, 4), lambda b, one, eye: ((b @ eye)[jnp.zeros(MANY, int)] * 1.0).sum()),
    "half rows taken": (
        (3, 4),
        lambda b, one, eye: (jnp.take(b @ eye, jnp.zeros(MANY, int), axis=0) @ eye).sum(),
    ),
    "selected": (
        (4,),
        lambda b, one, eye: jnp.where(jnp.ones((MANY, 1), bool), one @ eye * 0 + b, 0.0).sum(),
    ),
    "maximum": ((4,), lambda b, one, eye: jnp.maximum(one @ eye * 0 - 5, b).sum()),
    "bias by vmap": ((4,), lambda b, one, eye: jax.vmap(lambda row: row @ eye + b)(one).sum()),
    "bias in jit": ((4,), lambda b, one, eye: jax.jit(lambda b: one @ eye + b)(b).sum()),
    "bias in remat": ((4,), lambda b, one, eye: jax.checkpoint(lambda b: one @ eye + b)(b).sum()),
    "bias then product": ((4,), lambda b, one, eye: ((one @ eye + b) @ eye).sum()),
    "bias in half layers": ((4,), lambda b, one, eye: (jax.nn.relu((one @ eye + b) * 1.0) @ eye).sum()),
}


@pytest.mark.parametrize(("half", "order"), [("bfloat16", "inside"), ("float16", "outside")])
@pytest.mark.parametrize("name", COUNTS)
def test_the_gradient_over_a_batch_is_summed_in_float32(name, order, half):
    shape, fun = COUNTS[name]
    one, eye = jnp.ones((MANY, 4)), jnp.eye(4)
    loss = lambda b: fun(b, one, eye)
    grads = both_orders(loss, half)[order](jnp.ones(shape))
    assert grads.dtype == jnp.float32
    np.testing.assert_array_equal(jnp.ravel(grads)[:4], np.full(4, MANY, np.float32))


@pytest.mark.parametrize(("half", "order"), [("bfloat16", "inside"), ("float16", "outside")])
def test_a_scalar_parameter_of_a_batch_is_summed_in_float32(order, half):
    one, eye = jnp.ones((MANY, 4)), jnp.eye(4)
    for fun in (lambda s: (one @ eye * s).sum(), lambda s: (one @ eye + s).sum()):
        assert float(both_orders(fun, half)[order](jnp.float32(1))) == 4 * MANY


@pytest.mark.parametrize(("half", "order"), [("bfloat16", "inside"), ("float16", "outside")])
@pytest.mark.parametrize("steps", ["scan", "unrolled", "slices", "jitted", "fori"])
def test_a_weight_used_many_times_has_its_gradients_summed_in_float32(steps, order, half):
    # Every use adds 9 to the gradient, which float16 cannot count beyond 2048, bfloat16 beyond 256.
    count = 1026 if steps in ("scan", "slices", "fori") else 240
    x = jnp.full((2, 4), 4.5)

    def step(w):
        return jnp.tanh(0.0 * (x @ w)).sum() + (x @ w).sum()

    def loss(w):
        if steps == "unrolled":
            return sum(step(w) for _ in range(count))
        if steps == "jitted":
            jitted = jax.jit(step)
            return sum(jitted(w) for _ in range(count))
        if steps == "slices":
            return lax.scan(lambda _, x: (None, (x @ w).sum()), None, jnp.tile(x, (count, 1, 1)))[1].sum()
        if steps == "fori":
            return lax.fori_loop(0, count, lambda _, total: total + step(w), 0.0)
        return lax.scan(lambda total, _: (total + step(w), None), 0.0, length=count)[0]

    grads = both_orders(loss, half)[order](jnp.eye(4))
    np.testing.assert_array_equal(grads, np.full((4, 4), 9.0 * count))
    found = products(both_orders(loss, half)[order], jnp.eye(4))
    assert set(found) == {(half, half)}


@pytest.mark.parametrize(("half", "order"), [("bfloat16", "inside"), ("float16", "outside")])
def test_a_half_activation_used_in_every_step_of_a_scan_has_its_gradients_summed_in_float32(order, half):
    x, eye, count = jnp.full((2, 4), 1.5), jnp.eye(4), 1026

    def loss(w):
        activation = w @ eye  # Half, and constant in the loop.

        def step(total, _):
            return total + (x @ activation).sum() + activation.sum() * 0.0, None

        return lax.scan(step, 0.0, length=count)[0]

    # The activation is half, and so is its gradient, after the sum.
    np.testing.assert_allclose(
        both_orders(loss, half)[order](eye), np.full((4, 4), 3.0 * count), rtol=eps(half)
    )


@pytest.mark.parametrize("half", HALVES)
def test_parameters_gradients_come_back_in_the_parameters_dtype(half):
    params = {"w": W, "v": V.astype(half), "b": PARAMS["b"].astype("float16"), "s": jnp.float32(2)}
    loss = lambda p, x: jnp.sum(jnp.tanh((x @ p["w"] + p["b"]) @ p["v"] * p["s"]))
    for grad in (jax.grad(jmp.autocast(loss, half)), jmp.autocast(jax.grad(loss), half)):
        grads = grad(params, X)
        assert {k: g.dtype for k, g in grads.items()} == {k: p.dtype for k, p in params.items()}


@pytest.mark.parametrize("half", HALVES)
def test_the_backward_pass_saves_half_activations(half):
    def loss(params, x):
        for _ in range(3):
            x = jax.nn.relu(x @ params["w"] + params["b"])
        return jnp.sum(x @ params["v"])

    _, pullback = jax.vjp(jmp.autocast(loss, half), PARAMS, X)
    saved = [leaf for leaf in jax.tree.leaves(pullback) if getattr(leaf, "shape", ()) == (4, 8)]
    saved = [leaf for leaf in saved if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert saved
    assert {leaf.dtype.name for leaf in saved} == {half}


# Casts.


def count_casts(shape, fun, *args):
    return sum(found == shape for found, _, _ in casts(fun, *args))


def test_a_weight_used_twice_is_cast_once():
    w = normal(8, 8, scale=0.3)
    x = normal(5, 8)
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    programs = {
        "straight": lambda x, w: jnp.tanh(x @ w) @ w,
        "transposed": lambda x, w: jnp.tanh(x @ w) @ w.T,
        "jitted calls": lambda x, w: layer(layer(layer(x, w), w), w),
        "jitted and not": lambda x, w: layer(x @ w, w) @ w.T,
        "scan": lambda x, w: lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0] @ w,
        "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x @ w.T, x) @ w,
        "full precision between": lambda x, w: jmp.full_precision(layer)(x @ w, w) @ w,
    }
    for name, program in programs.items():
        assert count_casts((8, 8), jmp.autocast(program), x, w) == 1, name


def test_a_weight_used_twice_is_cast_once_forward_and_backward():
    x = normal(5, 8)
    loss = lambda w: jnp.sum(jnp.tanh(x @ w) @ w)
    down = [
        found for found in casts(jmp.autocast(jax.grad(loss)), W) if found == ((8, 8), "float32", "bfloat16")
    ]
    assert len(down) == 1
    down = [
        found for found in casts(jax.grad(jmp.autocast(loss)), W) if found == ((8, 8), "float32", "bfloat16")
    ]
    assert len(down) <= 2  # The cast itself, and what grad may make of it for the tangent.


def test_casts_that_meet_cancel():
    def fun(x, w):
        return x.astype(jnp.bfloat16).astype(jnp.float32) @ w

    found = casts(jmp.autocast(fun), X, W)
    assert [pair for shape, *pair in found if shape == (4, 8)] == [
        ["float32", "bfloat16"],
        *[["bfloat16", "float32"]] * (len([p for s, *p in found if s == (4, 8)]) - 1),
    ]
    read = jax.make_jaxpr(jmp.autocast(fun))(X, W)
    product = next(e for e in equations(read) if e.primitive.name == "dot_general")
    first = next(e for e in equations(read) if e.primitive.name == "convert_element_type")
    assert product.invars[0] is first.outvars[0]
    chained = lambda x, w: jnp.tanh(x @ w + PARAMS["b"]) @ w
    assert [found for found in casts(jmp.autocast(chained), X, W) if found[:2] == ((4, 8), "bfloat16")] == [
        ((4, 8), "bfloat16", "float32")  # The output, and nothing between the products.
    ]


def test_a_mixed_argument_is_not_cast_back_and_forth():
    fun = lambda x, w: x.astype(jnp.float32) @ w
    assert ((4, 8), "float32", "bfloat16") not in casts(jmp.autocast(fun), X.astype(jnp.bfloat16), W)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "option",
    [{}, {"deny": ["dot_general"]}, {"deny": ["tanh"]}, {"allow": ["tanh"]}, {"rules": {"part": "float32"}}],
)
def test_applying_autocast_twice_changes_nothing(option, half):
    def fun(params, x):
        with jax.named_scope("part"):
            x = mlp(params, x)
        return mlp(params, jmp.full_precision(jnp.dot)(x, params["w"]))

    once = jmp.autocast(fun, half, **option)
    other = "bfloat16" if half == "float16" else "float16"
    for outer in (half, other):
        assert text(jmp.autocast(once, outer), PARAMS, X) == text(once, PARAMS, X)
        np.testing.assert_array_equal(jmp.autocast(once, outer)(PARAMS, X), once(PARAMS, X))
    assert text(jmp.autocast(jmp.autocast(once, other), half), PARAMS, X) == text(once, PARAMS, X)


def test_an_inner_autocast_whose_rules_leave_everything_in_float32_is_respected():
    def fun(x, w):
        with jax.named_scope("head"):
            return x @ w

    for inner in (jmp.autocast(fun, rules={"head": "float32"}), jmp.autocast(fun, deny=["dot_general"])):
        assert text(jmp.autocast(inner, jnp.float16), X, W) == text(fun, X, W)
        assert text(jmp.autocast(inner), X, W) == text(fun, X, W)


def test_the_gradient_of_an_autocast_function_inside_autocast_changes_nothing():
    loss = jmp.autocast(lambda p, x: jnp.sum(mlp(p, x)), jnp.float16)
    step = lambda p, x: jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(loss)(p, x))
    assert set(products(jmp.autocast(step), PARAMS, X)) == {("float16", "float16")}


def nothing_to_do(x, y):
    total = lax.scan(lambda total, row: (total + jnp.tanh(row).sum(), row * 2), 0.0, x)[0]
    scaled = jax.jit(lambda x: jax.nn.softmax(x) * y)(x)
    picked = lax.cond(total > 0, jnp.sin, jax.checkpoint(jnp.cos), scaled)
    return jax.nn.relu(picked), jnp.linalg.norm(x), x[:, ::2], jax.random.normal(jax.random.key(0), (3,))


def test_with_nothing_to_do_the_jaxpr_comes_back_equal():
    y = jnp.float32(2)
    assert text(jmp.autocast(nothing_to_do), X, y) == text(nothing_to_do, X, y)
    loss = lambda x, y: sum(leaf.sum() for leaf in nothing_to_do(x, y))
    assert text(jmp.autocast(jax.grad(loss)), X, y) == text(jax.grad(loss), X, y)
    assert text(jax.grad(jmp.autocast(loss)), X, y) == text(jax.grad(loss), X, y)
    assert text(jax.vmap(jmp.autocast(loss), (0, None)), X[None], y) == text(
        jax.vmap(loss, (0, None)), X[None], y
    )
    off = jmp.autocast(mlp, deny=["dot_general"])
    assert text(off, PARAMS, X) == text(mlp, PARAMS, X)
    optimizer = optax.adam(1e-3)
    update = lambda grads, state: optimizer.update(grads, state)
    state = optimizer.init(PARAMS)
    assert text(jmp.autocast(update), PARAMS, state) == text(update, PARAMS, state)


# Side effects, tracers, threads, compilation.


def test_debug_prints_and_callbacks_run_once_with_float32_values(capsys):
    seen = []

    def fun(x, w):
        y = x @ w
        jax.debug.print("y00 = {} {}", y[0, 0], "text", ordered=False)
        jax.debug.callback(lambda y: seen.append(("debug", y.dtype.name, y.shape)), y)
        z = io_callback(
            lambda y: (seen.append(("io", y.dtype.name)), y + 1)[1], jax.ShapeDtypeStruct(y.shape, y.dtype), y
        )
        z = jax.pure_callback(lambda z: np.asarray(z * 2), jax.ShapeDtypeStruct(y.shape, y.dtype), z)
        return z @ w

    for run in (jmp.autocast(fun), jax.jit(jmp.autocast(fun))):
        seen.clear()
        result = run(X, W)
        jax.effects_barrier()
        assert sorted(seen) == [("debug", "float32", (4, 8)), ("io", "float32")]
        assert capsys.readouterr().out.count("y00 = ") == 1
        assert_close(result, ((X @ W) + 1) * 2 @ W, "bfloat16", factor=8)
    assert products(jmp.autocast(fun), X, W) == [("bfloat16", "bfloat16")] * 2


def test_ordered_effects_inside_loops_keep_their_order():
    seen = []

    def step(x, number):
        io_callback(lambda number: seen.append(int(number)), None, number, ordered=True)
        return jnp.tanh(x @ W), x.sum()

    fun = jmp.autocast(lambda x: lax.scan(step, x, jnp.arange(5)))
    jax.block_until_ready(jax.jit(fun)(X))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3, 4]
    seen.clear()
    jax.block_until_ready(fun(X))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3, 4]


def test_debug_prints_in_jitted_and_differentiated_code_run_once(capsys):
    @jax.jit
    def layer(x, w):
        jax.debug.print("layer {}", x.sum())
        return jnp.tanh(x @ w)

    loss = lambda w: layer(X, w).sum()
    for grad in (
        jax.grad(jmp.autocast(loss)),
        jmp.autocast(jax.grad(loss)),
        jax.jit(jax.grad(jmp.autocast(loss))),
    ):
        grad(W)
        jax.effects_barrier()
        assert capsys.readouterr().out.count("layer ") == 1


def test_no_tracers_leak():
    layer = jax.jit(lambda p, x: jnp.tanh(mlp(p, x)))

    def loss(params, x):
        x = lax.scan(lambda x, _: (jax.checkpoint(layer)(params, x), None), x, length=2)[0]
        x = lax.cond(x[0, 0] > 0, lambda x: layer(params, x), lambda x: x, x)
        return jnp.sum(jax.nn.relu(x) * jax.nn.silu(x))

    with jax.checking_leaks():
        jax.jit(jmp.autocast(loss))(PARAMS, X)
        jax.jit(jax.grad(jmp.autocast(loss)))(PARAMS, X)
        jax.jit(jmp.autocast(jax.grad(loss)))(PARAMS, X)
        jmp.autocast(loss)(PARAMS, X)


def test_threads_with_different_dtypes_get_their_own_results():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    fun = lambda x, w: layer(layer(x, w), w)
    variants = {
        "float16": jmp.autocast(fun, jnp.float16),
        "bfloat16": jmp.autocast(fun, jnp.bfloat16),
        "float32": fun,
        "full": jmp.autocast(jmp.full_precision(fun)),
    }
    expected = {name: text(variant, X, W) for name, variant in variants.items()}
    assert len(set(expected.values())) == 3
    values = {name: np.asarray(variant(X, W)) for name, variant in variants.items()}
    names = list(variants) * 8

    def work(name):
        return text(variants[name], X, W), np.asarray(variants[name](X, W))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for name, (found, value) in zip(names, pool.map(work, names)):
            assert found == expected[name]
            np.testing.assert_array_equal(value, values[name])


def test_one_compile_for_each_signature():
    traced = []

    def fun(params, x):
        traced.append(x.shape)
        return mlp(params, x)

    run = jax.jit(jmp.autocast(fun))
    for _ in range(3):
        run(PARAMS, X)
    assert traced == [(4, 8)]
    assert run._cache_size() == 1
    run(PARAMS, X[:2])
    run(PARAMS, X)
    assert traced == [(4, 8), (2, 8)]
    assert run._cache_size() == 2


def test_the_output_of_a_step_can_be_fed_back_without_compiling_again():
    optimizer = optax.adam(1e-2)

    @jax.jit
    @jmp.autocast
    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(mlp(p, x) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(3):
        params, state, _ = step(params, state, X)
    assert step._cache_size() == 1


# Training steps.


@pytest.mark.parametrize("half", HALVES)
def test_an_optimizer_inside_autocast_keeps_float32_accuracy(half):
    optimizer = optax.adamw(1e-3)
    x = normal(32, 8)

    def step(params, state):
        grads = jax.grad(lambda p: jnp.mean(mlp(p, x) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    state = optimizer.init(PARAMS)
    params, new_state, grads = jmp.autocast(step, half)(PARAMS, state)
    # Given the gradients that came out, all else must be what float32 gives, to the last bits.
    updates, expected_state = optimizer.update(grads, state, PARAMS)
    expected = optax.apply_updates(PARAMS, updates)
    for ours, theirs in zip(
        jax.tree.leaves((params, new_state)), jax.tree.leaves((expected, expected_state))
    ):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=16 * eps("float32"), atol=1e-9)
    assert_close(grads, step(PARAMS, state)[2], half, factor=16)
    assert set(products(jmp.autocast(step, half), PARAMS, state)) == {(half, half)}


def test_an_exponential_moving_average_moves_by_less_than_half_can_see():
    average = lambda old, w, x: (old * 0.9999 + w * 0.0001, (x @ w).sum())
    old = jnp.ones((8, 8))
    moved, _ = jmp.autocast(average)(old, old + 0.01, X)
    np.testing.assert_allclose(moved, old + 1e-6, rtol=2 * eps("float32"))


@pytest.mark.parametrize("half", HALVES)
def test_an_unrolled_inner_loop_updates_its_weights_in_float32(half):
    x, y = normal(16, 8), normal(16, 8)

    def meta_loss(params):
        inner = lambda p: jnp.mean((mlp(p, x) - y) ** 2)
        steps = []
        for _ in range(3):
            grads = jax.grad(inner)(params)
            steps.append((params, grads))
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return jnp.mean((mlp(params, x) - y) ** 2), (steps, params)

    _, (steps, last) = jmp.autocast(meta_loss, half)(PARAMS)
    for (before, grads), (after, _) in zip(steps, [*steps[1:], (last, None)]):
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, before, grads)
        for ours, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(expected)):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2 * eps("float32"))
    expected = jax.grad(meta_loss, has_aux=True)(PARAMS)[0]
    for grad in (
        jax.grad(jmp.autocast(meta_loss, half), has_aux=True),
        jmp.autocast(jax.grad(meta_loss, has_aux=True), half),
    ):
        assert_close(grad(PARAMS)[0], expected, half, factor=24)
        assert set(products(lambda p, grad=grad: grad(p)[0], PARAMS)) == {(half, half)}


def test_small_steps_on_weights_do_not_underflow_in_float16():
    # Every gradient is 2**-6, every step 2**-26, which float16 does not hold.
    def two_steps(w):
        for _ in range(2):
            w = w - 2.0**-20 * jax.grad(lambda w: (jnp.full((1, 8), 2.0**-6) @ w).sum())(w)
        return w

    w = jnp.zeros((8, 8))
    np.testing.assert_array_equal(jmp.autocast(two_steps, jnp.float16)(w), jnp.full((8, 8), -(2.0**-25)))
    unscaled = lambda w: w - 2.0**-20 * jax.grad(lambda w: (jnp.full((1, 8), 2.0**-6) @ w).sum())(w)
    used_again = lambda w: (unscaled(w), unscaled(w) @ w)
    np.testing.assert_array_equal(jmp.autocast(used_again, jnp.float16)(w)[0], jnp.full((8, 8), -(2.0**-26)))


@pytest.mark.parametrize("half", ["float16"])
def test_higher_derivatives_are_those_of_float32(half):
    fun = lambda w: jnp.sum(jnp.sin(jnp.tanh(X[:2, :4] @ w) @ w))
    w = normal(4, 4, scale=0.5)
    cast = jmp.autocast(fun, half)
    assert_close(jax.jvp(cast, (w,), (w,)), jax.jvp(fun, (w,), (w,)), half, factor=16)
    assert_close(jax.jacfwd(cast)(w), jax.jacfwd(fun)(w), half, factor=24)
    assert_close(jax.hessian(cast)(w), jax.hessian(fun)(w), half, factor=32)
    assert_close(jmp.autocast(jax.hessian(fun), half)(w), jax.hessian(fun)(w), half, factor=32)
    assert_close(jax.jacrev(jmp.autocast(jax.grad(fun), half))(w), jax.hessian(fun)(w), half, factor=32)
    for transformed in (lambda w: jax.jvp(cast, (w,), (w,)), jax.jacfwd(cast), jax.hessian(cast)):
        assert set(products(transformed, w)) == {(half, half)}


@pytest.mark.parametrize("half", HALVES)
def test_vmap_of_autocast_and_autocast_of_vmap_agree(half):
    batch = normal(3, 4, 8)
    for axes in ((None, 0), (0, 0)):
        params = PARAMS if axes[0] is None else jax.tree.map(lambda p: jnp.stack([p, p * 0.5, -p]), PARAMS)
        expected = jax.vmap(mlp, axes)(params, batch)
        for fun in (jax.vmap(jmp.autocast(mlp, half), axes), jmp.autocast(jax.vmap(mlp, axes), half)):
            assert_close(fun(params, batch), expected, half, factor=6)
            assert products(fun, params, batch) == [(half, half)] * 2
            loss = lambda p, fun=fun: jnp.sum(fun(p, batch))
            assert set(products(jax.grad(loss), params)) == {(half, half)}


def test_dtypes_are_given_by_any_of_their_names():
    for given in ("float16", jnp.float16, np.dtype("float16"), np.float16):
        assert products(jmp.autocast(mlp, given), PARAMS, X) == [("float16", "float16")] * 2
    for given in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), "bf16"):
        assert products(jmp.autocast(mlp, given), PARAMS, X) == [("bfloat16", "bfloat16")] * 2
    assert products(jmp.autocast(mlp), PARAMS, X) == [("bfloat16", "bfloat16")] * 2


@pytest.mark.parametrize("given", [jnp.float32, "float32", jnp.float64, "float8_e4m3fn", jnp.int32])
def test_a_dtype_that_is_not_half_is_an_error(given):
    with pytest.raises((TypeError, ValueError), match=r"float16 or bfloat16|floating"):
        jmp.autocast(mlp, given)


@pytest.mark.parametrize("given", ["half precision", None, 16, object()])
def test_what_is_no_dtype_is_an_error_at_once(given):
    with pytest.raises((TypeError, ValueError), match="dtype"):
        jmp.autocast(mlp, given)


def test_integer_and_boolean_inputs_of_products_are_handled_as_numbers():
    ids = jnp.array([0, 2, 1, 2])
    fun = lambda w: jax.nn.one_hot(ids, 8) @ w
    assert products(jmp.autocast(fun), W) == [("bfloat16", "bfloat16")]
    assert_close(jmp.autocast(fun)(W), fun(W), "bfloat16", factor=1)
    masked = lambda x, w: ((x > 0).astype(jnp.float32) * x) @ w
    assert products(jmp.autocast(masked), X, W) == [("bfloat16", "bfloat16")]
    large = lambda n: n.astype(jnp.float32) * 2.0
    assert float(jmp.autocast(large, "float16")(jnp.int32(100_001))) == 200_002.0


def test_indices_and_counts_computed_in_float32_stay_exact():
    def fun(x, w):
        positions = jnp.floor(jnp.arange(5000, dtype=jnp.float32) * 1.0)
        return positions, (positions[4097] + (x @ w).sum() * 0)

    positions, one = jmp.autocast(fun)(X, W)
    np.testing.assert_array_equal(positions, np.arange(5000))
    assert float(one) == 4097.0


def test_the_argmax_of_half_logits_is_that_of_the_half_logits():
    fun = lambda x, w: jnp.argmax(x @ w, axis=-1)
    logits = jmp.autocast(lambda x, w: x @ w)(X, W)
    np.testing.assert_array_equal(jmp.autocast(fun)(X, W), jnp.argmax(logits, axis=-1))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "fun",
    [
        lambda y: jnp.log(y * y + 1e-12),
        lambda y: jnp.log(jnp.abs(y) + 1e-7),
        lambda y: lax.rsqrt(y * y + 1e-9),
    ],
    ids=["log of a square", "log", "rsqrt"],
)
def test_the_derivative_of_an_activation_that_float16_does_not_hold_gives_no_nan(fun, half):
    x, mask = jnp.array([[1e-6, 1.0]]), jnp.array([[0.0, 1.0]])  # At 1e-6 the derivative is beyond 65504.
    loss = lambda x, w: jnp.sum((fun(x @ w) @ w) * mask)
    expected = jax.grad(loss, (0, 1))(x, jnp.eye(2))
    for grad in (jax.grad(jmp.autocast(loss, half), (0, 1)), jmp.autocast(jax.grad(loss, (0, 1)), half)):
        x_grad, w_grad = grad(x, jnp.eye(2))
        assert jnp.isfinite(x_grad).all()
        assert jnp.isfinite(w_grad).all()
        assert float(x_grad[0, 0]) == 0.0
        assert float(x_grad[0, 1]) == pytest.approx(float(expected[0][0, 1]), rel=0.02)


GROUPS = {
    "gelu": jax.nn.gelu,
    "gelu with erf": lambda y: jax.nn.gelu(y, approximate=False),
    "mish": jax.nn.mish,
    "selu": jax.nn.selu,
    "squareplus": jax.nn.squareplus,
    "glu": lambda y: jax.nn.glu(y),
    "swiglu": lambda y: jax.nn.silu(y) * jnp.sin(y),
    "square": lambda y: jnp.square(jax.nn.relu(y)),
    "of two": lambda y: jnp.exp(-(y**2)) * y[::-1],
    "used twice": lambda y: (lambda z: z * jnp.sin(z))(jnp.exp(-(y**2))),
    "given out": lambda y: jnp.concatenate([jnp.exp(-(y**2)), jnp.exp(-(y**2)) * 2]),
    "where": lambda y: jnp.where(y > 0, jnp.sqrt(jnp.where(y > 0, y, 1.0)), 0.0),
    "masked": lambda y: jnp.where(jnp.arange(y.shape[1]) % 2 == 0, jnp.exp(-(y**2)), y),
}


@pytest.mark.parametrize(("half", "order"), [("float16", "inside")])
@pytest.mark.parametrize("name", GROUPS)
def test_activation_functions_of_many_operations_have_the_derivatives_of_float32(name, half, order):
    fun = lambda x, w: GROUPS[name](x @ w) @ w[: 4 if name == "glu" else 8]
    loss = lambda w: jnp.sum(jnp.sin(fun(X, w)))
    grad = jax.grad(jmp.autocast(loss, half)) if order == "inside" else jmp.autocast(jax.grad(loss), half)
    assert_close(jmp.autocast(fun, half)(X, W), fun(X, W), half, factor=6)
    assert_close(grad(W), jax.grad(loss)(W), half, factor=16)
    assert set(products(grad, W)) == {(half, half)}
    along = jnp.ones((8, 8)) * 0.1
    push = lambda f: jax.jit(lambda w: jax.jvp(f, (w,), (along,)))
    assert_close(push(jmp.autocast(loss, half))(W), push(loss)(W), half, factor=24)
    if name in ("gelu", "swiglu"):
        assert_close(push(grad)(W), push(jax.grad(loss))(W), half, factor=48)


@pytest.mark.parametrize("half", HALVES)
def test_losses_are_computed_in_float32(half):
    labels = jnp.array([1, 0, 3, 2])
    losses = {
        "cross entropy": lambda y: optax.softmax_cross_entropy_with_integer_labels(y, labels).mean(),
        "squared error": lambda y: optax.l2_loss(y, jnp.ones_like(y)).mean(),
        "huber": lambda y: optax.huber_loss(y, jnp.ones_like(y)).mean(),
        "sigmoid": lambda y: optax.sigmoid_binary_cross_entropy(y, jnp.ones_like(y)).mean(),
    }
    for loss in losses.values():
        fun = lambda x, w, loss=loss: loss(x @ w * 3)
        half_logits = (X.astype(half) @ W.astype(half)).astype(jnp.float32) * 3
        value = jmp.autocast(fun, half)(X, W)
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, loss(half_logits), rtol=4 * eps(half))
        sums = [
            e
            for e in equations(jax.make_jaxpr(jmp.autocast(fun, half))(X, W))
            if e.primitive.name == "reduce_sum"
        ]
        assert sums
        assert {e.invars[0].aval.dtype.name for e in sums} == {"float32"}


@pytest.mark.parametrize("half", HALVES)
def test_a_learned_scale_is_applied_in_float32_and_keeps_a_half_activation_for_the_backward_pass(half):
    fun = lambda params, x: jnp.sum((params[0] * (x @ params[1])) @ params[1])
    by_hand = lambda params, x: fun(jax.tree.map(lambda p: p.astype(half), params), x.astype(half))

    def saved(fun):
        pullback = jax.eval_shape(lambda p: jax.vjp(lambda p: fun(p, X), p)[1], (jnp.ones(8), W))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))

    assert saved(jmp.autocast(fun, half)) <= saved(by_hand) + 2 * 8  # The scale itself is in float32.
    # Scales, learned or looked up, that float16 does not hold.
    small = (jnp.full(8, 1e5), W * 1e-3)
    for params in (small, (small[0][None], small[1])):
        for grad in (jax.grad(jmp.autocast(fun, half)), jmp.autocast(jax.grad(fun), half)):
            assert_close(grad(params, X * 1e-3), jax.grad(fun)(params, X * 1e-3), half, factor=16)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("order", ["inside", "outside"])
def test_the_backward_pass_does_not_round_what_the_loss_reads_in_float32(half, order):
    """A product of the backward pass wants the error in half; the loss squares it in float32."""
    target, bias = jnp.linspace(999.0, 1001.0, 4), jnp.array([1000.0])
    regression = lambda w, x: jnp.mean(((x @ w)[:, 0] + bias - target) ** 2)
    entropy = lambda w, x: -jnp.mean(jnp.log(1 - jax.nn.sigmoid(x @ w + 4) + 1e-7))
    for fun in (regression, entropy):
        expected = jax.value_and_grad(fun)(W, X)
        result = (
            jax.value_and_grad(jmp.autocast(fun, half))(W, X)
            if order == "inside"
            else jmp.autocast(jax.value_and_grad(fun), half)(W, X)
        )
        assert_close(result, expected, half, factor=16)

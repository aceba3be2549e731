"""`autocast` keeps what a function is: signature, structure, dtypes, errors."""

import dataclasses
import functools
import inspect
import typing

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from jmp_lite.diagnostics import compare_precision, doctor, find_nonfinite, profile_ranges
from tests.support.closeness import assert_close
from tests.support.jaxprs import operands_of, products, text
from tests.support.small_programs import PARAMS, W, X, mlp


def test_the_name_docstring_and_signature_of_the_function_are_kept():
    def named(x, *, flag: bool = True):
        """Documented."""
        return x

    wrapped = jmp.autocast(named)
    assert (wrapped.__name__, wrapped.__doc__) == ("named", "Documented.")
    assert inspect.signature(wrapped) == inspect.signature(named)
    assert jmp.full_precision(named).__name__ == "named"


def test_it_is_a_decorator_with_and_without_options():
    @jmp.autocast
    def plain(x):
        """Documented."""
        return x @ W

    @jmp.autocast(dtype="float16", deny=["tanh"])
    def with_options(x):
        """Documented too."""
        return jnp.tanh(x @ W) @ W

    assert (plain.__doc__, with_options.__doc__) == ("Documented.", "Documented too.")
    assert products(plain, X) == [("bfloat16", "bfloat16")]
    assert products(with_options, X) == [("float16", "float16")] * 2
    assert operands_of("tanh", with_options, X) == ["float32"]
    assert products(jmp.autocast()(lambda x: x @ W), X) == [("bfloat16", "bfloat16")]
    with pytest.raises(ValueError, match="names 'tanhh'"):
        jmp.autocast(dtype="float16", deny=["tanhh"])


def test_a_model_in_the_place_of_the_function_is_an_error():
    said = r"got the model \w+\. Give what computes: autocast\(model\.apply"
    for autocast in (jmp.autocast, jmp.autocast(dtype="float16"), jmp.autocast()):
        for model in (nn.Dense(3), hk.transform(lambda x: hk.Linear(3)(x))):
            with pytest.raises(TypeError, match=said):
                autocast(model)


def test_an_option_in_the_place_of_the_function_is_an_error():
    for given in ("float16", jnp.float16, np.float16, jnp.dtype("float16"), 3):
        with pytest.raises(TypeError, match=r"takes a function first\. Got .*autocast\(fun, \.\.\.\)"):
            jmp.autocast(given)


LARGE = {f"layer{number}": {"w": jnp.ones((8, 8)), "b": jnp.ones(8)} for number in range(62)}


def test_a_with_statement_is_an_error_that_shows_the_way():
    with (
        pytest.raises(
            TypeError, match=r"not a context manager.*loss_fn = jmp\.autocast\(loss_fn, 'float16'\)"
        ),
        jmp.autocast(dtype="float16"),
    ):
        pass


def test_arguments_in_the_place_of_the_function_are_named_by_their_first_leaves():
    leaves = "a dict with 'layer0/b', 'layer0/w', 'layer1/b' and 121 more"
    decorator = jmp.autocast(dtype="float16")
    for call in (lambda: jmp.autocast(LARGE), lambda: decorator(LARGE)):
        with pytest.raises(TypeError, match=rf"takes a function first\. Got {leaves}; write") as error:
            call()
        assert len(str(error.value)) < 300
    for given, got in (((LARGE, X), f"{leaves}, float32"), ((), "nothing")):
        with pytest.raises(TypeError, match=rf"a decorator, which takes one function\. Got {got}"):
            decorator(*given)
    with pytest.raises(TypeError, match=r"one function\. Got fun="):
        decorator(fun=jnp.dot)


def yields(x):
    yield jnp.sin(x)


async def awaited(x):
    return jnp.sin(x)


@pytest.mark.parametrize("fun", [yields, awaited])
def test_a_body_that_runs_after_the_call_is_refused(fun):
    """It was returned as it is, and ran in float32."""
    kind = "generator" if fun is yields else "coroutine"
    for wrap in (jmp.autocast, jmp.explain, jmp.fuse_attention, find_nonfinite):
        with pytest.raises(
            TypeError, match=f"{wrap.__name__} takes a function that returns arrays. Got a {kind} function"
        ):
            wrap(fun)


@pytest.mark.parametrize(
    "tool", [jmp.autocast, jmp.explain, find_nonfinite, compare_precision, profile_ranges, doctor]
)
def test_the_arguments_in_the_same_call_are_an_error(tool):
    name, fun = tool.__name__, lambda w, x: jnp.mean(x @ w)
    said = rf"{name} takes a function, and returns one that takes its arguments: write {name}\(fun, \.\.\.\)"
    for given in ((W, X), (X,), (LARGE,), (LARGE, X)):
        with pytest.raises(TypeError, match=said) as error:
            tool(fun, *given)
        assert len(str(error.value)) < 400
    with pytest.raises(TypeError, match=f"{name} takes a function first. Got a dict with 'layer0/b'"):
        tool(LARGE)


def test_a_scalar_of_a_trace_around_the_call_may_be_closed_over():
    plain = lambda scale: jnp.sum((X @ W) * scale @ W)

    def half(scale):
        return jmp.autocast(lambda x: jnp.sum((x @ W) * scale @ W), "float16")(X)

    found, expected = (jax.jit(jax.value_and_grad(each))(jnp.float32(2)) for each in (half, plain))
    np.testing.assert_allclose(found, expected, rtol=2 * jnp.finfo(jnp.float16).eps, atol=0.01)


def test_float32_is_the_identity():
    fun = lambda x: jnp.tanh(x @ W) @ x.T
    same = jmp.autocast(fun, "float32", deny=["tanh"], rules={"nowhere": "float32"})
    assert text(same, X) == text(fun, X)
    np.testing.assert_array_equal(same(X), fun(X))
    assert products(jmp.autocast(same), X) == [("float32", "float32")] * 2  # As full_precision does.
    inside = jmp.autocast(lambda x: same(x) @ x, "bfloat16")
    assert products(inside, X) == [("float32", "float32")] * 2 + [("bfloat16", "bfloat16")]


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


def test_a_call_outside_of_jit_reads_again_what_is_not_among_the_arguments():
    held = {"w": W}
    fun = jmp.autocast(lambda x: x @ held["w"])
    before = fun(X)
    held["w"] = 2 * W
    np.testing.assert_array_equal(fun(X), 2 * before)


def test_static_python_arguments_reach_the_function_unchanged():
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


def test_weak_types_of_outputs_are_those_of_the_plain_function():
    def fun(x, scale):
        return x @ x.T, scale * 2.0, jnp.asarray(1.0) * scale, x.sum() * scale, jnp.where(True, scale, 1.0)

    for given in (jnp.asarray(2.0), jnp.float32(2.0)):
        plain = [leaf.weak_type for leaf in fun(X, given)]
        assert [leaf.weak_type for leaf in jmp.autocast(fun)(X, given)] == plain
        abstract = lambda f, given=given: [leaf.weak_type for leaf in jax.eval_shape(f, X, given)]
        assert abstract(jmp.autocast(fun)) == abstract(fun)


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


def test_another_value_than_a_half_dtype_is_an_error_at_once():
    for given in (jnp.float64, "float8_e4m3fn", jnp.int32):
        with pytest.raises((TypeError, ValueError), match=r"float16 or bfloat16|floating"):
            jmp.autocast(mlp, given)
    for given in ("half precision", None, 16, object()):
        with pytest.raises((TypeError, ValueError), match="dtype"):
            jmp.autocast(mlp, given)

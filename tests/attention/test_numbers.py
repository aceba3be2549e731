"""Rows without a key, and what is refused: dtypes, platforms, second derivatives, orders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import jmp_lite as jmp
from tests.attention.cases import BIG, CAUSAL, FUSED, SCALE, mix, qkv, scores_of
from tests.attention.test_fuse_attention import found
from tests.support.arrays import normal

EMPTY = jnp.asarray(np.arange(16)[:, None] < 8)  # The first 8 queries read nothing.


def additive(q, k, v, *, mask=None, bias=None, scale, implementation, is_causal=False):
    """An attention that adds its mask to the scores, as cuDNN does."""
    least = -0.7 * float(jnp.finfo(q.dtype).max)
    bias = jnp.where(mask, 0, least).astype(q.dtype) if mask is not None else bias
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32) * scale + bias
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v.astype(jnp.float32)).astype(q.dtype)


def masked(fill, q, k, v):
    return mix(jax.nn.softmax(jnp.where(fill[0], fill[1], scores_of(q, k) * SCALE)), v)


def value_and_gradients(fun, *arrays):
    loss = lambda *arrays: (fun(*arrays) * normal(7, *arrays[0].shape)).sum()
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays)


@pytest.mark.slow
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_a_query_without_a_key_has_the_weights_and_the_gradients_of_the_program(half, monkeypatch):
    """All its scores are replaced: its weights are equal, and it gives queries and keys no gradient."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", additive)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # Where float16 is allowed.
    q, k, v = qkv()

    def fun(mask):
        return lambda q, k, v: masked((mask, BIG), q, k, v)

    # The mask is an argument: what is known while tracing is checked then.
    def run(wrap):
        return value_and_gradients(lambda *x: wrap(fun(x[3]))(*x[:3]), q, k, v, EMPTY)

    expected = run(lambda fun: fun)
    actual = run(lambda fun: jmp.fuse_attention(fun, half, implementation="xla"))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert float(jnp.abs(a - b).max()) < 0.03 * float(jnp.abs(b).max())
    assert not jnp.any(actual[1][0][:, :8])


def test_a_program_stays_as_it_is_where_jax_finds_no_cudnn(monkeypatch):
    def without_cudnn(*args, implementation, **kwargs):
        assert implementation == "cudnn"
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", without_cudnn)
    case = FUSED["a mask of numbers"]
    assert found(case, "cudnn") == ["JAX says: cuDNN is not detected."]
    jaxprs = [jax.make_jaxpr(fun)(*qkv()) for fun in (jmp.fuse_attention(case.fun), case.fun)]
    assert str(jaxprs[0]) == str(jaxprs[1])


def test_a_program_runs_as_it_is_on_a_cpu_where_jax_finds_cudnn(monkeypatch):
    """The other branch is for CUDA alone."""

    def with_cudnn(q, *args, **kwargs):
        return jax.lax.platform_dependent(q, cuda=jnp.negative)  # No CPU can compile it.

    monkeypatch.setattr(jax.nn, "dot_product_attention", with_cudnn)
    fun = FUSED["a mask of numbers"].fun
    fused, expected = jmp.fuse_attention(fun), jax.jit(fun)(*qkv())
    np.testing.assert_array_equal(jax.jit(fused)(*qkv()), expected)
    np.testing.assert_allclose(jax.jit(jmp.autocast(fused))(*qkv()), expected, atol=0.03)


def test_float16_is_refused_on_a_cpu():
    reasons = found(FUSED["plain"], "xla", jnp.dtype("float16"))
    assert reasons == ["XLA has no attention in float16 on a CPU"]


def without_second_derivatives(monkeypatch):
    """Stands for cuDNN's attention, whose operations have no derivatives in JAX."""
    kernel = Primitive("dot_product_attention_kernel")
    kernel.def_abstract_eval(lambda q: q)
    attend = jax.custom_vjp(lambda q, k, v: kernel.bind(q))
    attend.defvjp(lambda q, k, v: (kernel.bind(q), None), lambda saved, g: (g, g, g))
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **options: attend(q, k, v))


@pytest.mark.cases(fast=1, slow=3)
@pytest.mark.parametrize("wrap", [lambda fun: fun, jmp.autocast], ids=["alone", "autocast"])
@pytest.mark.parametrize("kind", ["cudnn", "xla"])
def test_a_second_derivative_is_refused(kind, wrap, monkeypatch):
    """XLA's attention has one, but a test on a CPU says what a GPU does."""
    if kind == "cudnn":
        without_second_derivatives(monkeypatch)
    fused = wrap(jmp.fuse_attention(FUSED["plain"].fun, implementation=kind))

    def loss(*arrays):
        return fused(*arrays).sum()

    def penalty(*arrays):
        return jnp.square(jax.grad(loss)(*arrays)).sum()

    jax.make_jaxpr(penalty)(*qkv())
    for second in (jax.hessian(loss), jax.grad(penalty)):
        with pytest.raises(TypeError, match=r"no second derivative\. .* leave fuse_attention out"):
            jax.make_jaxpr(second)(*qkv())
    if kind == "xla":  # A CPU has no such kernel, and would run the program as it is.
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(fused, qkv(), qkv())


def test_the_derivative_of_a_program_comes_after():
    case = FUSED["a mask of numbers"]
    gradient = jax.grad(lambda *x: case.fun(*x).sum())
    (reason,) = found(type(case)(gradient, qkv(), ""))
    assert reason == "its derivative is already taken: put jmp.fuse_attention inside of jax.grad"


def test_full_precision_keeps_an_attention():
    case = FUSED["plain"]
    assert found(type(case)(jmp.full_precision(case.fun), qkv(), "")) == ["inside full_precision"]
    assert found(type(case)(jmp.full_precision(jax.jit(case.fun)), qkv(), "")) == []


def test_bad_input_is_refused():
    with pytest.raises(TypeError, match="fuse_attention goes inside of autocast"):
        jmp.fuse_attention(jmp.autocast(FUSED["plain"].fun))
    with pytest.raises(ValueError, match=r"dtype should be bfloat16, float16 or float32\. Got float64"):
        jmp.fuse_attention(FUSED["plain"].fun, "float64")
    with pytest.raises(ValueError, match=r"implementation is 'cudnn' or 'xla'\. Got 'pallas'"):
        jmp.fuse_attention(FUSED["plain"].fun, implementation="pallas")
    with pytest.raises(TypeError, match="fuse_attention takes a function first"):
        jmp.fuse_attention(3)


def test_float32_changes_nothing():
    fun = FUSED["plain"].fun
    assert jmp.fuse_attention(fun, "float32") is fun


def test_a_constant_mask_may_be_a_tracer():
    """Such as a mask that a function closes over, under a transform around it."""

    def outer(mask):
        fused = jmp.fuse_attention(lambda *x: masked((~mask, BIG), *x), implementation="xla")
        return fused(*qkv())

    assert jnp.isfinite(jax.jit(outer)(jnp.asarray(CAUSAL))).all()

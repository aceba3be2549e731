"""The table of primitives, beside the primitives that JAX has."""

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import jmp_lite as jmp
from jmp_lite._autocast.planning.rules import make_rules
from jmp_lite._autocast.planning.states import fits
from jmp_lite._jaxpr.primitives import PRIMITIVES, Category, traits_of
from tests.support.halves import each_half
from tests.support.jaxprs import operands_of, primitives, products
from tests.support.small_programs import W, X

HALF = ("bfloat16", "bfloat16")

# On no list, and left as traced: nothing of theirs is float32, or only a rule of JAX's own binds them.
NO_FLOAT32 = frozenset(
    {
        *("and", "or", "not", "xor", "shift_left", "shift_right_arithmetic", "shift_right_logical", "clz"),
        *("population_count", "mulhi", "reduce_and", "reduce_or", "reduce_xor", "axis_index", "empty2"),
        *("after_all", "create_token", "random_bits", "random_fold_in", "random_seed", "random_split"),
        *("threefry2x32", "rng_bit_generator", "rng_uniform"),
    }
)


# On no list: a cast has rules of its own in decide.py; references and values in flight keep their dtypes.
OWN_RULES = frozenset({"convert_element_type"})
KEPT = frozenset({"get", "swap", "addupdate", "ragged_all_to_all", "custom_lin", "dce_sink", "stage", "call"})


def public_primitives():
    modules = (jax.extend.core.primitives, jax.lax, jax.ad_checkpoint)
    return {
        value.name for module in modules for value in vars(module).values() if isinstance(value, Primitive)
    }


def test_every_primitive_of_jax_has_a_row_or_is_left_out_on_purpose():
    sets = [set(PRIMITIVES), NO_FLOAT32, OWN_RULES, KEPT]
    found = {name: sum(name in each for each in sets) for name in public_primitives()}
    assert len(found) > 150
    assert {name for name, times in found.items() if times == 0} == set(), "nobody has decided about these"
    assert {name for name, times in found.items() if times > 1} == set(), "these have a row and are left out"


def test_the_flags_of_a_row_fit_its_list():
    for name, traits in PRIMITIVES.items():
        if traits.copies or traits.gathers:
            assert traits.category is Category.MOVE, name
        if traits.broadcasts or traits.scales or traits.pointwise:
            assert traits.category in (Category.INFER, Category.DENY, Category.RANGE), name
        if traits.scales and name != "elementwise_product":  # A dot_general takes each operand in its shape.
            assert traits.broadcasts, name
    assert traits_of("an_operation_of_a_user").category is Category.AS_TRACED


# Names in the lists that JAX does not make public as primitives, and programs that run them.
def _mesh():
    return jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])


def _sharded(fun, check_vma=True):
    spec = jax.sharding.PartitionSpec("d")
    return jax.shard_map(fun, mesh=_mesh(), in_specs=spec, out_specs=spec, check_vma=check_vma)


HIDDEN = {
    "ragged_dot_general": lambda x: lax.ragged_dot(x, jnp.ones((3, 8, 8)), jnp.array([1, 2, 1])),
    "shard_map": _sharded(jnp.sin),
    "psum_invariant": _sharded(lambda x: x * lax.psum(x, "d")),
    "pvary": _sharded(lambda x: x + lax.pcast(jnp.ones(()), "d", to="varying")),
    "reduce_scatter": _sharded(lambda x: lax.psum_scatter(jnp.tile(x, (2, 1)), "d", tiled=True)),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_listed_primitive_that_is_not_public_has_the_name_that_is_listed(name):
    assert name in primitives(HIDDEN[name], X)
    assert name in PRIMITIVES


def test_every_listed_name_is_one_of_some_supported_jax():
    # Primitives of other versions of JAX, or that are rarely bound. This test lets them through.
    others = {"closed_call", "eval_jaxpr", "log2", "one_minus_square", "polynomial", "unstack", "stack"}
    others |= {"layout_constraint", "scaled_dot", "scaled_matmul", "reshard", *HIDDEN}
    # No primitives: `1 / x` and kinds of `dot_general`. Not public: composite operations, batching rules.
    others |= {"reciprocal", "inner_product", "outer_product", "elementwise_product"}
    others |= {"composite", "custom_vmap_call"}
    assert set(PRIMITIVES) - public_primitives() <= others


DENIED = [name for name in sorted(public_primitives()) if traits_of(name).category is Category.DENY]
OF_ONE = (
    "exp exp2 expm1 log log1p rsqrt cbrt tan asin acos atan sinh cosh asinh acosh atanh erfc erf_inv lgamma"
)
OF_ONE += " digamma bessel_i0e bessel_i1e cumsum cumprod cumlogsumexp"
OPERATIONS = {
    **{name: getattr(lax, name) for name in OF_ONE.split()},
    "igamma": lambda y: lax.igamma(y, y),
    "igammac": lambda y: lax.igammac(y, y),
    "igamma_grad_a": lambda y: lax.igamma_grad_a(y, y),
    "log2": jnp.log2,
    "pow": lambda y: lax.pow(y, 1.5),
    "polygamma": lambda y: lax.polygamma(jnp.ones_like(y), y),
    "zeta": lambda y: lax.zeta(y + 2, y),
    "regularized_incomplete_beta": lambda y: lax.betainc(y, y, y),
    "reduce_sum": jnp.sum,
    "reduce_prod": jnp.prod,
    "reduce_window_sum": lambda y: lax.reduce_window(y, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
    "psum": lambda y: _sharded(lambda y: lax.psum(y, "d"), check_vma=False)(y),
}
NOT_ALONE = {"add_any", "one_minus_square", "polynomial", "psum_invariant", "reduce_scatter"}


def test_operations_on_the_deny_list_run_in_float32():
    """On a half product, wherever the primitive runs on one device."""
    assert set(DENIED) - NOT_ALONE <= set(OPERATIONS)
    small = lambda x, w: jnp.abs(x @ w) * 0.05 + 0.1
    for name in set(DENIED) & set(OPERATIONS):
        fun = jmp.autocast(lambda x, w, name=name: OPERATIONS[name](small(x, w)))
        assert set(operands_of(name, fun, X, W)) == {"float32"}, name


@pytest.mark.parametrize(("half", "expected"), [("float16", "float32"), ("bfloat16", "bfloat16")])
def test_powers_are_float32_in_float16_alone(half, expected):
    for name in ("square", "integer_pow", "reciprocal"):
        assert make_rules(half).category_of(name) is (Category.DENY if half == "float16" else Category.INFER)
    # A layout operation follows. So the operation is no part of an activation function, which is float32.
    for power, name in ((jnp.square, "square"), (lambda y: y * y, "mul")):
        fun = lambda x, w, power=power: jnp.concatenate([power(x @ w)] * 2) @ w
        assert operands_of(name, jmp.autocast(fun, half), X, W) == [expected]
    big = jnp.full((1, 1), 300.0)
    assert float(jmp.autocast(lambda x, w: (x @ w) ** 2, "float16")(big, jnp.ones((1, 1)))[0, 0]) == 90_000.0


AS_TRACED = {
    "bitcast_convert_type": lambda y: lax.bitcast_convert_type(
        lax.bitcast_convert_type(y, jnp.int32), y.dtype
    ),
    "cholesky": lambda y: lax.linalg.cholesky(y.T @ y + jnp.eye(8)),
    "fft": lambda y: jnp.fft.irfft(jnp.fft.rfft(y)),
    "reduce_precision": lambda y: lax.reduce_precision(y, 8, 10),
    "scatter-add": lambda y: y.at[0].add(y[1]),
    "triangular_solve": lambda y: lax.linalg.triangular_solve(jnp.eye(4), y, left_side=True),
}


@pytest.mark.parametrize("name", AS_TRACED)
def test_operations_as_traced_take_float32_between_two_half_products(name):
    found = operands_of(name, jmp.autocast(lambda x, w: AS_TRACED[name](x @ w) @ w), X, W)
    assert "float32" in found
    assert "bfloat16" not in found


def test_operations_on_no_list_keep_their_traced_dtypes():
    solve = lambda x, w: jnp.linalg.inv(x @ x.T + 3 * jnp.eye(4)) @ x
    fun = jmp.autocast(solve)
    assert set(operands_of("lu", fun, X, W)) == {"float32"}
    own = Primitive("jmp_lite_test_primitive")
    own.def_impl(lambda x: x)
    own.def_abstract_eval(lambda x: x)
    unknown = lambda x, w: own.bind(x @ w) @ w
    assert operands_of(own.name, jmp.autocast(unknown), X, W) == ["float32"]
    assert products(jmp.autocast(unknown), X, W) == [HALF] * 2
    # With the primitive itself it can be put on a list.
    assert operands_of(own.name, jmp.autocast(unknown, infer=[own]), X, W) == ["bfloat16"]
    assert operands_of(own.name, jmp.autocast(unknown, allow=[own]), X, W) == ["bfloat16"]


@pytest.mark.slow
def test_mutable_references_pallas_kernels_and_ffi_like_calls_keep_float32():
    def with_reference(x, w):
        ref = jax.new_ref(jnp.zeros((4, 8)))
        ref[...] = x @ w
        ref[1:2] = ref[0:1] * 2.0
        return ref[...] @ w

    if hasattr(jax, "new_ref"):
        expected = (X @ W).at[1].set((X @ W)[0] * 2) @ W
        result = jmp.autocast(with_reference)(X, W)
        np.testing.assert_allclose(result, expected, atol=0.1)
        assert products(jmp.autocast(with_reference), X, W) == [HALF] * 2
    pallas = pytest.importorskip("jax.experimental.pallas")

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2.0

    def call(x, w):
        y = x @ w
        return (
            pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype), interpret=True)(y)
            @ w
        )

    assert operands_of("pallas_call", jmp.autocast(call), X, W) == ["float32"]
    np.testing.assert_allclose(jmp.autocast(call)(X, W), (X @ W) * 2 @ W, atol=0.15)


def test_which_numbers_half_holds():
    lowest = np.float32(np.finfo(np.float32).min)
    held = {"float16": (0.1, 65504.0, 6.1e-5, -np.inf, np.nan, 0.0), "bfloat16": (1e-8, 1e30, 257.0)}
    others = {"float16": (1e-8, 1e5, 65536.0), "bfloat16": (3.4e38, lowest)}
    for numbers, expected in ((held, True), (others, False)):
        for half, values in numbers.items():
            assert [value for value in values if fits(value, jnp.dtype(half)) is not expected] == []


@pytest.mark.slow
@each_half
def test_a_product_that_sums_nothing_is_element_wise(half):
    # Rotary embeddings as they are usually written: in bfloat16 position 257 would be 256.
    positions, frequencies = jnp.arange(4099.0), jnp.array([1.0, 0.1])
    for angles in (
        lambda p, f: jnp.einsum("i,j->ij", p, f),
        lambda p, f: p[:, None] @ f[None],
        lambda p, f: (f[:, None] @ p[None]).T,
    ):
        found = jmp.autocast(lambda p, f, angles=angles: jnp.sin(angles(p, f)), half)(positions, frequencies)
        np.testing.assert_array_equal(found, jnp.sin(angles(positions, frequencies)))
    big = jnp.full(3, 1e3)
    assert float(jmp.autocast(lambda x: jnp.einsum("i,j->ij", x, x), half)(big)[0, 0]) == 1e6
    # The gradient of an inner product is one.
    grad = jax.grad(lambda x, y: jnp.dot(x, y))
    np.testing.assert_array_equal(jmp.autocast(grad, half)(jnp.ones(4), jnp.full(4, 1e5)), jnp.full(4, 1e5))


def test_an_outer_product_of_half_values_that_a_product_reads_is_half():
    fun = lambda x, w: jnp.einsum("bi,bj->bij", x @ w, x @ w) @ w
    assert operands_of("dot_general", jmp.autocast(fun), X, W) == ["bfloat16"] * 4

"""Programs of public packages, and of users, that did not run under autocast, or ran wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.scipy.sparse.linalg import bicgstab, cg, gmres
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.halves import each_half
from tests.support.jaxprs import equations, products, text
from tests.support.small_programs import STACK, W, X

ORDERS = {
    "grad(autocast)": lambda fun, half: jax.grad(jmp.autocast(fun, half)),
    "autocast(grad)": lambda fun, half: jmp.autocast(jax.grad(fun), half),
}
both_orders = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


# Loops.


@pytest.mark.cases(slow=1)
@both_orders
@each_half
def test_a_loop_may_compute_complex_numbers(half, order):
    """Linear recurrent units, and layers with a Fourier transform."""

    def units(weights):
        step = lambda c, w: (jnp.exp(1j * (c @ w)).real, None)
        return jnp.sum(lax.scan(step, X, weights)[0])

    def fourier(weights):
        step = lambda c, w: (jnp.tanh(jnp.fft.ifft(jnp.fft.fft(c) * jnp.fft.fft(c @ w)).real), None)
        return jnp.sum(lax.scan(step, X, weights)[0] ** 2)

    for fun in (units, fourier):
        assert_close(jax.jit(order(fun, half))(STACK), jax.jit(jax.grad(fun))(STACK), half, factor=16)


@pytest.mark.slow
def test_a_program_with_symbolic_sizes_can_be_exported():
    batch = jax.ShapeDtypeStruct(export.symbolic_shape("b, 8"), jnp.float32)
    rows = jnp.ones((5, 8))
    programs = {
        "scan": lambda x: lax.scan(lambda c, row: (c @ W + row, jnp.tanh(c)), jnp.zeros(8), x),
        "map": lambda x: lax.map(lambda row: jnp.tanh(row @ W), x),
        "layers": lambda x: jnp.tanh(x @ W) @ W,
        "gradient": lambda x: jax.grad(lambda w: jnp.sum(lax.map(lambda row: row @ w, x)))(W),
    }
    for name, fun in programs.items():
        exported = export.export(jax.jit(jmp.autocast(fun)))(batch)
        expected = jax.jit(jmp.autocast(fun))(rows)
        for result, wanted in zip(
            jax.tree.leaves(exported.call(rows)), jax.tree.leaves(expected), strict=True
        ):
            assert_close(result, wanted, "bfloat16", factor=8)
        report = jmp.explain(fun)(batch)
        assert "in bfloat16" in str(report), name
        assert report.tensor_core_share > 0.5, name


# Meshes with explicit axes.


@pytest.mark.cases(slow=1)
@both_orders
@each_half
def test_explicit_axes(half, order):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    index = jnp.array([3, 0, 3, 7])
    with jax.set_mesh(mesh):
        table = jax.device_put(W, NamedSharding(mesh, P("d", None)))
        inside = jax.sharding.auto_axes(lambda x: jnp.tanh(x @ W), out_sharding=P("d", None))
        programs = {
            "get": lambda w: jnp.sum((w.at[index].get(out_sharding=P(None, None)) @ W) ** 2),
            "get of half": lambda w: jnp.sum(jnp.tanh((w @ W).at[index].get(out_sharding=P(None, None)) @ W)),
            "add": lambda w: jnp.sum(jnp.zeros((8, 8)).at[index].add(X @ w, out_sharding=P(None, None)) ** 2),
            "auto axes": lambda w: jnp.sum(inside(w) ** 2),
            "auto axes of half": lambda w: jnp.sum(jnp.exp(inside(w @ W) @ W)),
        }
        for fun in programs.values():
            expected = jax.jit(jax.grad(fun))(table)
            assert_close(jax.jit(order(fun, half))(table), expected, half, factor=16)


# What enters and leaves.


class Keys:
    """A stateful generator of keys, as EasyLM has one."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        self.key, drawn = jax.random.split(self.key)
        return drawn


def test_a_value_that_leaves_by_a_side_effect_is_an_error_that_names_the_function():
    keys = Keys(jax.random.key(0))

    def my_loss(w):
        return jnp.sum((X @ w) * jax.random.bernoulli(keys(), 0.5, (4, 8)))

    def step(w):
        return jax.grad(jmp.autocast(my_loss))(w), jax.random.normal(keys())

    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"my_loss at .*test_programs.py"):
        jax.jit(step)(W)


class Output:
    def __init__(self, logits, name="out"):
        self.logits, self.name = logits, name


def test_an_output_that_is_no_pytree_is_an_error_if_it_holds_arrays():
    def my_model(w):
        return {"out": Output(X @ w)}

    with pytest.raises(
        TypeError, match="output of my_model has a Output, which holds arrays and is not a pytree"
    ):
        jmp.autocast(my_model)(W)
    with pytest.raises(TypeError, match="register_dataclass"):
        jax.jit(jmp.autocast(my_model))(W)
    with pytest.raises(TypeError, match="holds arrays"):
        jmp.autocast(lambda w: Output([{"w": X @ w}]))(W)
    settings = Output(None, "settings")
    assert jmp.autocast(lambda w: (X @ w, settings, jnp.tanh, "text", None))(W)[1:] == (
        settings, jnp.tanh, "text", None
    )  # fmt: skip


def test_a_numpy_argument_is_indexed_by_a_traced_order():
    rows = np.asarray(X)

    def loss(w, x):
        order = jax.random.permutation(jax.random.key(0), len(x))
        return jnp.sum((x[order] @ w) * jnp.arange(4.0)[:, None])

    expected = loss(W, rows)
    assert_close(jmp.autocast(loss)(W, rows), expected, "bfloat16", factor=8)
    assert jax.grad(jmp.autocast(loss))(W, rows).dtype == jnp.float32
    assert products(lambda w: jmp.autocast(loss)(w, rows), W) == [("bfloat16", "bfloat16")]
    assert "1 of" in jmp.explain(loss)(W, rows).summary()
    # NumPy's integers reach the function as they are: they may be sizes.
    sizes = lambda w, sizes: jnp.zeros(tuple(sizes)) @ w
    assert jmp.autocast(sizes)(W, np.array([3, 8])).shape == (3, 8)


# Decisions.


@each_half
def test_a_product_of_half_operands_with_a_float32_result_has_the_same_gradients_in_both_orders(half):
    def loss(w):
        return jnp.sum(lax.dot(X.astype(half), w.astype(half), preferred_element_type=jnp.float32) ** 2)

    first, second = (products(order(loss, half), W) for order in ORDERS.values())
    assert sorted(first) == sorted(second) == [(half, half)] * 2
    result = jax.make_jaxpr(jmp.autocast(loss, half))(W)
    (product,) = [e for e in equations(result) if e.primitive.name == "dot_general"]
    assert product.outvars[0].aval.dtype == jnp.float32
    for order in ORDERS.values():
        assert_close(order(loss, half)(W), jax.grad(loss)(W), half, factor=8)


KEPT = {
    "deny": (lambda fun: fun, {"deny": ["dot_general"]}),
    "not allowed": (lambda fun: fun, {"allow": ["-dot_general"]}),
    "a rule": (jax.named_scope("head"), {"rules": {"head": "float32"}}),
    "full_precision": (jmp.full_precision, {}),
    "autocast to float32": (lambda fun: jmp.autocast(fun, "float32"), {}),
}


@pytest.mark.parametrize("name", KEPT)
def test_such_a_product_has_the_gradients_of_the_program_where_the_user_keeps_it(name):
    scope, options = KEPT[name]
    half = jnp.bfloat16
    loss = scope(lambda w: lax.dot(X.astype(half), w.astype(half), preferred_element_type=jnp.float32).sum())
    first = products(jax.grad(jmp.autocast(loss, half, **options)), W)
    second = products(jmp.autocast(jax.grad(loss), half, **options), W)
    assert first == second == products(jax.grad(loss), W)


def test_none_is_no_option():
    fun = jmp.autocast(jnp.dot, rules=None, allow=None, deny=None, infer=None)
    assert products(fun, X, W) == [("bfloat16", "bfloat16")]


# Derivatives.


@pytest.mark.slow
@each_half
def test_a_shared_result_of_a_custom_vjp_under_vmap_needs_no_cotangent(half):
    """diffrax's default adjoint under `jax.vmap`."""

    @jax.custom_vjp
    def solve(x, w):
        return x @ w, w.sum()

    def backward(saved, cotangents):
        x, w = saved
        return cotangents[0] @ w.T, jnp.outer(x, cotangents[0]) + cotangents[1]

    solve.defvjp(lambda x, w: (solve(x, w), (x, w)), backward)
    over = lambda w, x: jax.vmap(solve, (0, None), (0, None))(x, w)
    for loss in (
        lambda w, x: jnp.sum(over(w, x)[0] ** 2),
        lambda w, x: jnp.sum(jax.checkpoint(over)(w, x)[0] @ w),
        lambda w, x: lax.scan(lambda c, _: (c + jnp.sum(over(w, x)[0]), None), 0.0, length=2)[0],
    ):
        expected = jax.grad(loss)(W, X)
        for order in ORDERS.values():
            assert_close(jax.jit(order(loss, half))(W, X), expected, half, factor=16)
    # Its own cotangent, where nothing is batched.
    alone = lambda w: jnp.sum(solve(X[0], w)[0]) + 3 * solve(X[0], w)[1]
    for order in ORDERS.values():
        assert_close(order(alone, half)(W), jax.grad(alone)(W), half, factor=16)


SOLVERS = {
    "cg": lambda matvec, b: cg(matvec, b)[0],
    "bicgstab": lambda matvec, b: bicgstab(matvec, b)[0],
    "gmres": lambda matvec, b: gmres(matvec, b)[0],
    "solve": lambda matvec, b: jnp.linalg.solve(2 * jnp.eye(16), b),
}


@pytest.mark.cases(slow=1)
@both_orders
@pytest.mark.parametrize("solver", SOLVERS)
def test_an_overflow_that_enters_a_linear_solver_reaches_the_check(solver, order):
    b, v = jnp.full(16, 300.0), jnp.ones((16, 256))

    def loss(w, scale):
        x = SOLVERS[solver](lambda v: 2 * v, b @ w)
        return 1e3 * scale * jnp.mean((x[None] @ v) ** 2)

    grad = jax.jit(order(loss, "float16"))
    # Backwards: the scaled cotangent of the solution is beyond float16.
    assert not jnp.all(jnp.isfinite(grad(jnp.eye(16), 2.0**15)))
    assert_close(grad(jnp.eye(16), 2.0**-16), jax.grad(loss)(jnp.eye(16), 2.0**-16), "float16", factor=16)
    # Forwards: the right side is beyond float16.
    assert not jnp.isfinite(jmp.autocast(loss, "float16")(jnp.eye(16) * 1e4, 1.0))


def test_an_inf_that_was_summed_in_float32_reaches_the_check_through_a_solver():
    def loss(w):
        right = jnp.sum(jnp.full((4, 16), 300.0) @ w, axis=0)
        # As an iterative solver, which stops at once.
        solver = lambda _, b: jnp.where(jnp.isfinite(b), b / 2, 0)
        return jnp.sum(lax.custom_linear_solve(lambda v: 2 * v, right, solver, symmetric=True))

    half = jmp.autocast(loss, "float16")
    assert not jnp.isfinite(half(1e4 * jnp.eye(16)))
    assert text(jmp.autocast(half, "float16"), jnp.eye(16)) == text(half, jnp.eye(16))  # Once is enough.


# Models with a dtype of their own.


def test_the_summary_tells_the_half_of_the_program_from_that_of_autocast():
    """Gemma of Flax's examples casts to bfloat16 by itself. autocast to float16 leaves that as it is."""

    def layer(w, x):
        return jnp.sum((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32))

    summary = jmp.explain(jmp.autocast(layer, "float16"))(W, X).summary()
    assert summary.startswith("0 of 5 operations in float16, 2 in the program's own bfloat16, 0 casts, ")
    summary = jmp.explain(jmp.autocast(layer, "bfloat16"))(W, X).summary()
    assert summary.startswith("2 of 5 operations in bfloat16, 0 casts, ")

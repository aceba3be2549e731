"""What autocast relies upon of JAX: a release that changes a name or a parameter fails here, by that name."""

import contextlib
import gc
import importlib
import inspect
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import source_info_util
from jax.extend.core import Literal, Primitive, jaxprs_in_params
from jax.interpreters import batching
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from jmp_lite._jaxpr import lines, read, scopes
from jmp_lite._jaxpr.inner import Role, inner_jaxprs, with_inner_jaxprs
from jmp_lite._jaxpr.precision import configured_precision, only_own_precisions
from jmp_lite._jaxpr.primitives import PRIMITIVES, Category
from tests.support.jaxprs import equations

bind = importlib.import_module("jmp_lite._jaxpr.bind")  # The room exports a function of this name.
W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


with_jvp, with_vjp = jax.custom_jvp(lambda x, w: x @ w), jax.custom_vjp(lambda x, w: x @ w)
with_jvp.defjvp(lambda p, t: (with_jvp(*p), t[0] @ p[1] + p[0] @ t[1]))

with_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def _sharded(x, w):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))(x, w)


def _loop(x, w):
    limit = x.sum() + 100
    return lax.while_loop(
        lambda s: (s[0] < 3) & (s[1].sum() < limit), lambda s: (s[0] + 1, s[1] @ w), (0, x)
    )[1]


def _scan(x, w):
    def step(carry, row):
        count, x = carry
        return (count + 1, x @ w), (row * 2, x.sum())

    return lax.scan(step, (0, x), x)


# For each operation on the list `call`, a function that runs it.
CALLS = {
    "jit": jax.jit(lambda x, w: x @ w),
    "remat2": jax.checkpoint(lambda x, w: x @ w),
    "custom_jvp_call": with_jvp,
    "custom_vjp_call": with_vjp,
    "custom_vmap_call": jax.custom_batching.sequential_vmap(lambda x, w: x @ w),
    "custom_linear_solve": lambda x, w: jnp.linalg.solve(w, x[0]),
    "composite": lax.composite(lambda x, w: x @ w, name="product"),
    "shard_map": _sharded,
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x),
    "scan": _scan,
    "while": _loop,
    "inlined": jax.grad(
        lambda x, w: jax.checkpoint(lambda x: lax.map(lambda row: jnp.sin(row @ w), x))(x).sum()
    ),
}


def find(name, fun, *args):
    return next(e for e in equations(jax.make_jaxpr(fun)(*args)) if e.primitive.name == name)


def call(name):
    names = ("closed_call", "eval_jaxpr") if name == "inlined" else (name,)
    found = [e for e in equations(jax.make_jaxpr(CALLS[name])(X, W)) if e.primitive.name in names]
    return found[0] if found else None


def test_every_call_of_the_lists_is_tried_here():
    listed = {name for name, traits in PRIMITIVES.items() if traits.category is Category.CALL}
    assert set(CALLS) - {"inlined"} == listed - {"closed_call", "eval_jaxpr"}


# The parameters that autocast reads of each call.
PARAMETERS = {
    "jit": {"jaxpr", "name", "in_shardings", "out_shardings", "in_layouts", "out_layouts", "donated_invars"},
    "remat2": {"jaxpr", "policy", "prevent_cse", "differentiated"},
    "custom_jvp_call": {"call_jaxpr", "num_consts", "symbolic_zeros"},
    "custom_vjp_call": {"call_jaxpr", "num_consts", "symbolic_zeros"},
    "custom_linear_solve": {"const_lengths", "jaxprs"},
    "shard_map": {"jaxpr", "mesh", "in_specs", "out_specs", "newly_manual_axes", "check_vma"},
    "cond": {"branches"},
    "scan": {"jaxpr", "length", "reverse", "unroll"},
    "while": {"cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_call_has_the_parameters_that_autocast_reads(name):
    assert call(name) is not None, f"JAX no longer has a primitive called {name}"
    assert PARAMETERS[name] <= set(call(name).params)


@pytest.mark.parametrize("name", CALLS)
def test_the_jaxprs_of_a_call_are_found_and_fit_its_operands(name):
    equation = call(name)
    assert equation is not None
    found = inner_jaxprs(equation)
    assert len(found) == {"cond": 2, "while": 2, "custom_linear_solve": 4}.get(name, 1)
    assert len(found) == len(list(jaxprs_in_params(equation.params)))
    for inner in found:
        inside = read.open_jaxpr(inner.jaxpr)
        assert len(inside.invars) == len(inner.operands) == len(inner.roles)
        assert len(inside.outvars) == len(inner.results) == len(inner.carries)
        for var, index, role in zip(inside.invars, inner.operands, inner.roles):
            outside = equation.invars[index].aval
            if name != "shard_map":
                assert var.aval.shape == (outside.shape[1:] if role is Role.ELEMENT else outside.shape)
            assert var.aval.dtype == outside.dtype
        for var, index in zip(inside.outvars, inner.results):
            if index is not None:
                assert var.aval.dtype == equation.outvars[index].aval.dtype


def test_the_operands_of_a_scan_are_constants_carry_and_slices():
    (body,) = inner_jaxprs(call("scan"))
    assert body.roles == (Role.CONSTANT, Role.CARRY, Role.CARRY, Role.ELEMENT)
    assert body.carries == (True, True, False, False)
    assert body.results == (0, 1, 2, 3)
    params = call("scan").params
    if "num_consts" in params:  # As JAX 0.10 writes it.
        assert (params["num_consts"], params["num_carry"]) == (1, 2)
    empty = find("scan", lambda x: lax.scan(lambda c, _: (c * 2, None), x, length=2), X)
    assert inner_jaxprs(empty)[0].roles == (Role.CARRY,)

    def draw(k):
        return lax.scan(lambda c, k: (c + 1, jax.random.normal(k)), 0, k)

    keys = find("scan", draw, jax.random.split(jax.random.key(0), 3))
    assert inner_jaxprs(keys)[0].roles == (Role.CARRY, Role.ELEMENT)


def test_the_operands_of_a_while_loop_are_both_constants_and_the_carry():
    condition, body = inner_jaxprs(call("while"))
    assert condition.roles == (Role.CONSTANT, Role.CARRY, Role.CARRY)
    assert body.roles == (Role.CONSTANT, Role.CARRY, Role.CARRY)
    assert (condition.operands, body.operands) == ((0, 2, 3), (1, 2, 3))
    assert (condition.results, body.results) == ((None,), (0, 1))


def test_the_first_operand_of_a_cond_is_the_index_of_the_branch():
    equation = call("cond")
    assert equation.invars[0].aval.dtype == jnp.int32
    assert [inner.operands[0] for inner in inner_jaxprs(equation)] == [1, 1]


def test_the_parameters_of_a_jit_have_one_entry_for_each_operand():
    params, operands = call("jit").params, len(call("jit").invars)
    for name in ("in_shardings", "in_layouts", "donated_invars"):
        assert len(params[name]) == operands, name
    donated = find("jit", lambda w: jax.jit(lambda w: w + 1, donate_argnums=0)(w * 2), W).params
    assert donated["donated_invars"] == (True,)
    named = find("jit", lambda x: jax.jit(lax.tanh)(x), X).params
    assert named["name"] == "tanh"


def test_shard_map_writes_what_the_public_function_takes():
    params = call("shard_map").params
    assert set(inspect.signature(jax.shard_map).parameters) >= {
        "mesh", "in_specs", "out_specs", "axis_names", "check_vma",
    }  # fmt: skip
    assert (tuple(params["in_specs"]), tuple(params["out_specs"])) == ((P("d"), P()), (P("d"),))
    assert set(params["newly_manual_axes"]) == {"d"}
    assert params["check_vma"] is True


def test_rematerialization_that_grad_has_made_is_marked():
    def loss(x):
        return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ W)), policy=lambda *_, **__: False)(x).sum()

    forward = call("remat2").params
    assert (forward["differentiated"], forward["policy"], forward["prevent_cse"]) == (False, None, True)
    backward = find("remat2", jax.grad(loss), X).params
    assert backward["differentiated"] is True
    assert callable(backward["policy"])
    assert {"policy", "prevent_cse"} <= set(inspect.signature(jax.checkpoint).parameters)


def test_custom_rules_take_their_constants_first():
    shift = jnp.full((3, 8), 2.0)
    identity_jvp, identity_vjp = jax.custom_jvp(lambda x: x @ shift.T), jax.custom_vjp(lambda x: x @ shift.T)
    identity_jvp.defjvp(lambda p, t: (identity_jvp(*p), t[0] @ shift.T))
    identity_vjp.defvjp(lambda x: (identity_vjp(x), None), lambda _, g: (g @ shift,))
    for name, fun in (("custom_jvp_call", identity_jvp), ("custom_vjp_call", identity_vjp)):
        equation = find(name, fun, X)
        assert len(equation.invars) == 1 + equation.params["num_consts"]
        assert equation.invars[-1].aval.shape == (4, 8)


def test_a_name_a_cast_and_the_products_have_the_parameters_that_autocast_reads():
    assert find("name", lambda x: checkpoint_name(x, "mine"), X).params["name"] == "mine"
    cast = find("convert_element_type", lambda x: x.astype(jnp.float16), X).params
    assert cast["new_dtype"] == jnp.float16
    product = find("dot_general", lambda x, w: jnp.matmul(x, w, precision="highest"), X, W).params
    assert set(product) >= {"precision", "preferred_element_type", "dimension_numbers"}
    assert [each.name for each in product["precision"]] == ["HIGHEST"] * 2
    assert find("dot_general", jnp.matmul, X, W).params["precision"] is None
    assert product["dimension_numbers"] == (((1,), (0,)), ((), ()))
    algorithm = lax.DotAlgorithmPreset.TF32_TF32_F32
    product = find("dot_general", lambda x, w: lax.dot(x, w, precision=algorithm), X, W).params
    assert product["precision"] == algorithm
    with jax.default_matmul_precision("highest"):
        assert configured_precision() == (lax.Precision.HIGHEST,) * 2
        with only_own_precisions():
            assert configured_precision() is None
    assert configured_precision() is None
    convolution = find(
        "conv_general_dilated", lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME"), X
    )
    assert set(convolution.params) >= {"precision", "preferred_element_type", "dimension_numbers"}
    assert len(convolution.params["dimension_numbers"].rhs_spec) == 4
    ragged = find(
        "ragged_dot_general", lambda x: lax.ragged_dot(x, jnp.ones((2, 8, 8)), jnp.array([1, 3])), X
    )
    assert set(ragged.params) >= {"precision", "preferred_element_type", "ragged_dot_dimension_numbers"}
    assert hasattr(ragged.params["ragged_dot_dimension_numbers"], "dot_dimension_numbers")


@pytest.mark.parametrize(
    ("fun", "primitive", "expected"),
    [
        (lambda x: jax.lax.mul(x, x), "mul", True),
        (lambda x: x * x, "mul", False),
        (lambda x: jnp.multiply(x, x), "mul", False),
        (jax.grad(lambda x: jnp.sum(jax.lax.mul(x, x))), "mul", True),
        (lambda x: jax.lax.dynamic_update_slice_in_dim(x, x[:1], 0, 0), "dynamic_update_slice", True),
        (lambda x: x.at[0].set(1.0), "scatter", False),
    ],
)
def test_the_functions_of_lax_are_told_from_those_that_promote(fun, primitive, expected):
    assert lines.is_of_lax(find(primitive, fun, X)) == expected


def test_an_equation_carries_its_names_line_and_context():
    def fun(x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jnp.sin(x)

    equation = find("sin", fun, X)
    assert str(equation.source_info.name_stack) == "outer/inner"
    assert scopes.scope_of(equation) == "outer/inner"
    assert scopes.scope_of(equation, "around") == "around/outer/inner"
    assert "test_read.py" in lines.source_line(equation)
    assert isinstance(equation.ctx.manager, contextlib.AbstractContextManager)
    stack = source_info_util.current_name_stack() + equation.source_info.name_stack
    assert str(stack) == "outer/inner"
    with scopes.context_of(equation):
        assert str(source_info_util.current_name_stack()) == "outer/inner"
    with jax.named_scope("before"), scopes.context_of(equation):
        again = find("cos", lambda x: jnp.cos(x), X)
        assert str(source_info_util.current_name_stack()) == "before/outer/inner"
    assert again is not None


@pytest.mark.parametrize(
    "transform", [jax.grad, jax.vmap, jax.checkpoint, jax.jacfwd, jax.hessian, jax.linearize]
)
def test_names_that_transforms_add_are_removed(transform):
    def fun(x):
        with jax.named_scope("scope"), jax.named_scope("sub"):
            return jnp.sum(jnp.sin(x) * x)

    args = (X,) if transform is not jax.linearize else ()
    transformed = transform(fun) if args else lambda x: jax.linearize(fun, x)[1](x)
    found = {
        scopes.scope_of(e)
        for e in equations(jax.make_jaxpr(transformed)(X))
        if e.primitive.name in ("sin", "cos", "mul") and str(e.source_info.name_stack)
    }
    assert found
    assert found <= {"scope/sub", "checkpoint/scope/sub", "rematted_computation/scope/sub", ""}


# The fields that JAX does not document: see the docstring of `read`.


def test_an_equation_has_the_settings_under_which_it_was_traced():
    before = jax.config.jax_threefry_partitionable
    with jax.threefry_partitionable(not before):
        equation = find("sin", lambda x: jnp.sin(x), np.ones(3))
    with equation.ctx.manager:
        assert jax.config.jax_threefry_partitionable is not before
    assert jax.config.jax_threefry_partitionable is before


def test_a_primitive_turns_the_parameters_of_an_equation_into_those_of_bind():
    equation = call("custom_jvp_call")
    assert "jvp" not in equation.params
    params = read.bind_params(equation.primitive, dict(equation.params))
    (result,) = equation.primitive.bind(X, W, **params)
    np.testing.assert_array_equal(result, X @ W)
    plain = find("sin", jnp.sin, X)
    assert read.bind_params(plain.primitive, dict(plain.params)) == plain.params


def test_a_name_stack_says_what_grad_made_and_what_it_computes_again():
    def loss(x):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)))(x))

    (again,) = [e for e in equations(jax.make_jaxpr(jax.grad(loss))(X)) if e.primitive.name == "remat2"]
    named = {}
    for equation in equations(again.params["jaxpr"]):
        named.setdefault(equation.primitive.name, equation)
    stacks = {name: str(equation.source_info.name_stack) for name, equation in named.items()}
    assert "rematted_computation" in stacks["cos"]
    assert scopes.is_recomputed(named["cos"])
    assert "transpose(" in str(again.source_info.name_stack) + stacks["mul"]
    assert scopes.is_transposed(again) or scopes.is_transposed(named["mul"])
    assert not scopes.is_recomputed(find("sin", jnp.sin, X))
    assert not scopes.is_transposed(find("sin", jnp.sin, X))
    linear = find("cos", jax.grad(lambda x: jnp.sum(jnp.sin(x))), X)
    assert "jvp(" in str(linear.source_info.name_stack)


def test_an_equation_can_be_bound_again():
    for name in CALLS:
        equation = call(name)
        if name == "shard_map":
            continue
        values = [np.asarray(v.val) if isinstance(v, Literal) else None for v in equation.invars]
        shaped = [
            jnp.ones(v.aval.shape, v.aval.dtype) if x is None else x for v, x in zip(equation.invars, values)
        ]
        results = bind.bind(equation, shaped)
        assert [r.shape for r in results] == [v.aval.shape for v in equation.outvars], name
    product = find("dot_general", jnp.matmul, X, W)
    (half,) = bind.bind(
        product, [X.astype("float16"), W.astype("float16")], preferred_element_type=jnp.float16
    )
    assert half.dtype == jnp.float16


def test_an_operation_bound_again_is_differentiated_once_and_leaves_no_trace(monkeypatch):
    traced = []
    operation = bind._operation

    def counted(primitive, params):
        return lambda *operands: traced.append(primitive) or operation(primitive, params)(*operands)

    monkeypatch.setattr(bind, "_operation", counted)
    bind._inlined.cache_clear()
    sine = find("sin", jnp.sin, X)

    def twelve(x):
        for _ in range(12):
            (x,) = bind.bind_repeated(sine, [x])
        return x.sum()

    found = jax.make_jaxpr(jax.grad(twelve))(X)
    bind._inlined.cache_clear()
    assert traced == [sine.primitive]
    names = [each.primitive.name for each in equations(found.jaxpr)]
    assert (names.count("sin"), names.count("cos"), names.count("jit")) == (12, 12, 0)


def test_operations_that_are_not_jaxs_own_are_not_taken_for_each_other_or_kept_alive():
    copysign = Primitive("copysign_of")
    copysign.def_abstract_eval(lambda x, *, sign: x.update())
    signs = [0.0, -0.0, 1, True, np.float32(1)]

    def twice(sign):
        return jmp.autocast(lambda x: copysign.bind(x @ x, sign=sign) + copysign.bind(x, sign=sign))

    batched = jnp.ones((3, 2, 2))
    batching.primitive_batchers[copysign] = lambda x, axes, **params: (copysign.bind(*x, **params), axes[0])
    found = [jax.make_jaxpr(jax.vmap(twice(sign)))(batched) for sign in signs]
    kept = [
        each.params["sign"] for jaxpr in found for each in equations(jaxpr.jaxpr) if "sign" in each.params
    ]
    assert [repr(sign) for sign in kept] == [repr(sign) for sign in signs for _ in range(2)]

    class Data:
        """What a callback may hold."""

    def trace():
        data = Data()
        shape = jax.ShapeDtypeStruct((2, 2), jnp.float32)

        def call(x):
            return jax.pure_callback(lambda x: (data, x)[1], shape, x, vmap_method="sequential")

        jax.make_jaxpr(jax.vmap(jmp.autocast(lambda x: call(x @ x) + call(x))))(batched)
        return weakref.ref(data)

    alive = trace()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("left", "right", "axes", "name"),
    [
        ((4, 8), (8, 8), "ij,jk", "dot_general"),
        ((8,), (8, 4), "j,jk", "dot_general"),
        ((8,), (8,), "j,j", "inner_product"),
        ((1, 8), (8, 1), "ij,jk", "inner_product"),
        ((4, 1), (1, 8), "ij,jk", "outer_product"),
        ((4, 1), (1, 1), "ij,jk", "elementwise_product"),
        ((4, 8), (4, 8), "bi,bi", "inner_product"),
    ],
)
def test_a_product_is_named_by_its_axes_that_are_longer_than_1(left, right, axes, name):
    first, second = axes.split(",")
    shared = [axis for axis in first if axis in second]
    batch = [axis for axis in shared if axis == "b"]

    def places(letters):
        return tuple(tuple(operand.index(axis) for axis in letters) for operand in (first, second))

    numbers = places([axis for axis in shared if axis not in batch]), places(batch)
    product = lambda x, y: lax.dot_general(x, y, numbers)
    (equation,) = read.equations(jax.make_jaxpr(product)(jnp.ones(left), jnp.ones(right)))
    assert read.name_of(equation) == name


def test_literals_and_constants_are_told_from_variables():
    closed = jax.make_jaxpr(lambda x: x * 2.0 + np.arange(8.0, dtype=np.float32))(X)
    multiply = next(e for e in read.equations(read.open_jaxpr(closed)) if e.primitive.name == "mul")
    literals = [var for var in multiply.invars if read.is_literal(var)]
    assert [float(var.val) for var in literals] == [2.0]
    assert all(read.is_float32(var) for var in multiply.invars)
    assert len(read.constants(closed)) == len(read.open_jaxpr(closed).constvars) == 1
    opened = read.without_constants(closed)
    assert (len(opened.constvars), len(opened.invars)) == (0, 2)
    bits = find("random_bits", lambda k: jax.random.bits(k), jax.random.key(0))
    assert not read.is_float32(bits.invars[0])


def test_a_mark_reaches_the_equations_of_the_derivative_and_is_no_scope():
    def loss(x):
        with jax.named_scope("layer"):
            return jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ W))(x))

    closed = jax.make_jaxpr(loss)(X)
    with_marks = read.with_equations(closed, [scopes.flagged(e, {2, 0}) for e in read.equations(closed)])
    assert read.constants(with_marks) == read.constants(closed)
    grad = jax.make_jaxpr(jax.grad(lambda x: jax.extend.core.jaxpr_as_fun(with_marks)(x)[0]))(X)
    (remat,) = (e for e in read.equations(grad) if e.primitive.name == "remat2")
    assert scopes.flags_of(remat) == {0, 2}
    assert "flags" in str(remat.source_info.name_stack)
    assert "flags" not in scopes.scope_of(remat)
    assert all(scopes.flags_of(e) is None for e in read.equations(closed))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_takes_other_jaxprs_in_place_of_its_own(name):
    equation = call(name)
    double = lambda jaxpr: read.with_equations(jaxpr, [scopes.flagged(e, {1}) for e in read.equations(jaxpr)])
    changed = with_inner_jaxprs(equation, [double(inner.jaxpr) for inner in inner_jaxprs(equation)])
    for inner, before in zip(inner_jaxprs(changed), inner_jaxprs(equation), strict=True):
        assert (inner.operands, inner.roles, inner.results) == (before.operands, before.roles, before.results)
        assert all(scopes.flags_of(e) == {1} for e in read.equations(inner.jaxpr))


def test_only_a_mutable_array_has_an_inner_aval():
    jaxpr = jax.make_jaxpr(lambda ref, x: ref[...] + x)(jax.new_ref(X), X)
    assert list(map(read.is_reference, read.open_jaxpr(jaxpr).invars)) == [True, False]
    literal = read.equations(jax.make_jaxpr(lambda x: x + 1.0)(X))[0].invars[1]
    assert not read.is_reference(literal)

"""Which operations run in which precision, and the options by which users change that."""

import fnmatch

import equinox as eqx
import flax.linen as nn
import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import Primitive
from jaxprs import equations, primitives, products, text

import jmp_lite as jmp
from jmp_lite._autocast import rules

_numbers = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return jnp.asarray(_numbers.normal(size=shape) * scale, jnp.float32)


W, X = normal(8, 8, scale=0.35), normal(4, 8)
HALF, FULL = ("bfloat16", "bfloat16"), ("float32", "float32")


def operands_of(name, fun, *args):
    """The dtypes of the first operand of every primitive called `name` that `fun` runs."""
    found = equations(jax.make_jaxpr(fun)(*args))
    return [equation.invars[0].aval.dtype.name for equation in found if equation.primitive.name == name]


# The lists, beside the primitives that JAX has.

# On no list, and left as traced: nothing of theirs is float32, or only a rule of JAX's own binds them.
NO_FLOAT32 = frozenset(
    {
        *("and", "or", "not", "xor", "shift_left", "shift_right_arithmetic", "shift_right_logical", "clz"),
        *("population_count", "mulhi", "reduce_and", "reduce_or", "reduce_xor", "axis_index", "empty2"),
        *("after_all", "create_token", "random_bits", "random_fold_in", "random_seed", "random_split"),
        *("threefry2x32", "rng_bit_generator", "rng_uniform"),
    }
)
# On no list: a cast has rules of its own in plan.py; references and what is in flight keep their dtypes.
OWN_RULES = frozenset({"convert_element_type"})
KEPT = frozenset({"get", "swap", "addupdate", "ragged_all_to_all", "custom_lin", "dce_sink", "stage", "call"})

LISTS = {**rules._DEFAULTS, "range": rules.RANGE}


def public_primitives():
    modules = (jax.extend.core.primitives, jax.lax, jax.ad_checkpoint)
    return {
        value.name for module in modules for value in vars(module).values() if isinstance(value, Primitive)
    }


def test_every_primitive_of_jax_is_in_exactly_one_list_or_left_out_on_purpose():
    sets = [*LISTS.values(), NO_FLOAT32, OWN_RULES, KEPT]
    found = {name: sum(name in each for each in sets) for name in public_primitives()}
    assert len(found) > 150
    assert {name for name, times in found.items() if times == 0} == set(), "nobody has decided about these"
    assert {name for name, times in found.items() if times > 1} == set(), "these are in several lists"


def test_no_primitive_is_in_two_lists():
    names = [name for each in LISTS.values() for name in each]
    assert len(names) == len(set(names))
    for also in (rules.SPREADS, rules.GATHERS):
        assert also <= rules.MOVE
    assert rules.BROADCASTS <= rules.INFER | rules.DENY


# Names in the lists that JAX does not make public as primitives, and programs that run them.
def _mesh():
    return jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])


def _sharded(fun, check_vma=True):
    spec = jax.sharding.PartitionSpec("d")
    return jax.shard_map(fun, mesh=_mesh(), in_specs=spec, out_specs=spec, check_vma=check_vma)


def _resharded(x):
    mesh = jax.make_mesh(
        (2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2]
    )
    with jax.set_mesh(mesh):
        return jax.make_jaxpr(lambda x: jax.sharding.reshard(x, jax.P("d")))(x)


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
    assert any(name in each for each in LISTS.values())


def test_reshard_has_the_name_that_is_listed():
    assert "reshard" in [e.primitive.name for e in equations(_resharded(X))]


def test_every_listed_name_is_one_of_some_supported_jax():
    # Of other versions of JAX, or bound in few places: what this test lets through is named here.
    others = {"closed_call", "eval_jaxpr", "log2", "one_minus_square", "polynomial", "unstack", "stack"}
    others |= {"layout_constraint", "scaled_dot", "scaled_matmul", "reshard", *HIDDEN}
    others |= {
        "reciprocal",
        "inner_product",
        "outer_product",
    }  # No primitives: `1 / x` and kinds of `dot_general`.
    listed = {name for each in LISTS.values() for name in each}
    assert listed - public_primitives() <= others


@pytest.mark.parametrize("name", sorted(rules.DENY & public_primitives()))
def test_what_is_on_the_deny_list_runs_in_float32(name):
    """On a half product, wherever the primitive runs on one device."""
    programs = {
        "exp": jnp.exp,
        "exp2": lax.exp2,
        "expm1": jnp.expm1,
        "log": jnp.log,
        "log1p": jnp.log1p,
        "log2": jnp.log2,
        "pow": lambda y: lax.pow(y, 1.5),
        "rsqrt": lax.rsqrt,
        "cbrt": jnp.cbrt,
        "tan": jnp.tan,
        "asin": jnp.arcsin,
        "acos": jnp.arccos,
        "atan": jnp.arctan,
        "sinh": jnp.sinh,
        "cosh": jnp.cosh,
        "asinh": jnp.arcsinh,
        "acosh": lax.acosh,
        "atanh": jnp.arctanh,
        "erfc": lax.erfc,
        "erf_inv": lax.erf_inv,
        "lgamma": lax.lgamma,
        "digamma": lax.digamma,
        "polygamma": lambda y: lax.polygamma(jnp.ones_like(y), y),
        "zeta": lambda y: lax.zeta(y + 2, y),
        "igamma": lambda y: lax.igamma(y, y),
        "igammac": lambda y: lax.igammac(y, y),
        "igamma_grad_a": lambda y: lax.igamma_grad_a(y, y),
        "bessel_i0e": lax.bessel_i0e,
        "bessel_i1e": lax.bessel_i1e,
        "regularized_incomplete_beta": lambda y: lax.betainc(y, y, y),
        "reduce_sum": jnp.sum,
        "reduce_prod": jnp.prod,
        "cumsum": jnp.cumsum,
        "cumprod": jnp.cumprod,
        "cumlogsumexp": lax.cumlogsumexp,
        "reduce_window_sum": lambda y: lax.reduce_window(y, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
        "psum": lambda y: _sharded(lambda y: lax.psum(y, "d"), check_vma=False)(y),
    }
    if name not in programs:
        assert name in {"add_any", "one_minus_square", "polynomial", "psum_invariant", "reduce_scatter"}
        return
    dtypes = operands_of(name, jmp.autocast(lambda x, w: programs[name](jnp.abs(x @ w) * 0.05 + 0.1)), X, W)
    assert dtypes
    assert set(dtypes) == {"float32"}


ELEMENTWISE = {
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "erf": lax.erf,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "sqrt": jnp.sqrt,
    "abs": jnp.abs,
    "neg": lambda y: -y,
    "max": jax.nn.relu,
    "floor": jnp.floor,
    "add": lambda y: y + 1.0,
    "mul": lambda y: y * 2.0,
    "div": lambda y: y / 2.0,
    "sub": lambda y: 1.0 - y,
    "select_n": lambda y: jnp.where(y > 0, y, 0.0),
    "concatenate": lambda y: jnp.concatenate([y, y], 0),
    "transpose": lambda y: y.T.T,
    "reshape": lambda y: y.reshape(2, 2, 8).reshape(4, 8),
    "rev": lambda y: y[::-1],
    "pad": lambda y: lax.pad(y, 0.0, ((0, 0, 0), (0, 0, 0))),
    "sort": lambda y: jnp.sort(y, axis=0),
    "slice": lambda y: y[:3],
    "reduce_max": lambda y: jnp.max(y, 0, keepdims=True),
    "clamp": lambda y: lax.clamp(0.0, y, 1.0),
    "dynamic_slice": lambda y: lax.dynamic_slice(y, (0, 0), (4, 8)),
    "cummax": lax.cummax,
    "optimization_barrier": lax.optimization_barrier,
    "dynamic_update_slice": lambda y: lax.dynamic_update_slice(y, y[:1], (1, 0)),
}


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_is_on_the_infer_list_runs_in_half_between_products(name, half):
    fun = lambda x, w: jax.nn.relu(ELEMENTWISE[name](x @ w)) @ w
    dtypes = [
        var.aval.dtype.name
        for equation in equations(jax.make_jaxpr(jmp.autocast(fun, half))(X, W))
        if equation.primitive.name == name
        for var in equation.invars
        if jnp.issubdtype(var.aval.dtype, jnp.floating)
    ]
    assert dtypes
    assert set(dtypes) == {half}
    assert products(jmp.autocast(fun, half), X, W) == [(half, half)] * 2


@pytest.mark.parametrize(("half", "expected"), [("float16", "float32"), ("bfloat16", "bfloat16")])
def test_powers_are_float32_in_float16_alone(half, expected):
    for name in ("square", "integer_pow", "reciprocal"):
        assert rules.make_rules(half).list_of(name) is (
            rules.List.DENY if half == "float16" else rules.List.INFER
        )
    # A layout operation after it, so that it is no part of an activation function, all of which is float32.
    fun = lambda x, w: jnp.concatenate([jnp.square(x @ w)] * 2) @ w
    assert operands_of("square", jmp.autocast(fun, half), X, W) == [expected]
    big = jnp.full((1, 1), 300.0)
    assert float(jmp.autocast(lambda x, w: (x @ w) ** 2, "float16")(big, jnp.ones((1, 1)))[0, 0]) == 90_000.0


def test_what_is_on_no_list_keeps_the_dtypes_it_was_traced_with():
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


# allow=, deny=, infer=.


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


def test_operations_are_taken_off_a_list():
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


def test_options_reach_into_calls():
    fun = lambda x, w: lax.scan(lambda x, _: (jax.jit(jnp.tanh)(x @ w), None), x, length=2)[0]
    assert operands_of("tanh", jmp.autocast(fun, deny=["tanh"]), X, W) == ["float32"]
    assert products(jmp.autocast(fun, deny=["dot_general"]), X, W) == [FULL]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"allow": ["tanhh"]}, ValueError, "allow= names 'tanhh', which is no primitive of JAX.*mean 'tanh'"),
        ({"deny": ["softmax"]}, ValueError, "deny= names 'softmax', which is no primitive"),
        ({"infer": ["dot_genral"]}, ValueError, "'dot_general'"),
        ({"deny": "exp"}, TypeError, r"deny= is a list of operations. Got 'exp'; write deny=\['exp'\]"),
        ({"allow": lax.exp_p}, TypeError, "allow= is a list of operations"),
        (
            {"allow": ["exp"], "infer": [lax.exp_p]},
            ValueError,
            "'exp' was given twice, in allow= and in infer=",
        ),
        ({"deny": ["tanh", "tanh"]}, ValueError, "given twice"),
        (
            {"allow": ["-exp"], "deny": ["exp"]},
            ValueError,
            "given twice|takes 'exp' off a list on which it is not",
        ),
        ({"deny": ["-tanh"]}, ValueError, "takes 'tanh' off a list on which it is not; it is on the list"),
        ({"allow": ["-tanhh"]}, ValueError, "no primitive"),
        ({"deny": ["scan"]}, ValueError, "names 'scan', which runs other operations"),
        ({"allow": ["jit"]}, ValueError, "which runs other operations"),
        ({"infer": ["-custom_vjp_call"]}, ValueError, "which runs other operations"),
        ({"deny": [jnp.exp]}, TypeError, "takes primitives and their names"),
        ({"deny": [3]}, TypeError, "takes primitives and their names"),
        ({"deny": [None]}, TypeError, "takes primitives and their names"),
        ({"rules": {"head": "float64"}}, ValueError, "The rule for 'head' gives float64"),
        ({"rules": {"head": "float16"}}, ValueError, "The rule for 'head' gives float16"),
        ({"rules": {"": "float32"}}, ValueError, "A pattern of rules= is empty"),
        ({"rules": {"/": "float32"}}, ValueError, "A pattern of rules= is empty"),
        ({"rules": ["head"]}, TypeError, "rules= maps patterns over scopes to dtypes"),
        ({"rules": [("head", "float32", 1)]}, TypeError, "rules= maps patterns over scopes to dtypes"),
        ({"rules": [(1, "float32")]}, TypeError, "rules= maps patterns over scopes to dtypes"),
    ],
)
def test_an_option_that_cannot_be_meant_is_an_error_at_once(options, error, message):
    with pytest.raises(error, match=message):
        jmp.autocast(mlp, **options)


@pytest.mark.parametrize(
    "options", [{"rules": {"head": "no dtype"}}, {"rules": {"head": None}}, {"allow": None}, {"rules": 3}]
)
def test_options_of_a_wrong_type_are_errors_at_once(options):
    with pytest.raises((TypeError, ValueError)):
        jmp.autocast(mlp, **options)


def test_unknown_options_are_errors():
    with pytest.raises(TypeError, match="denied"):
        jmp.autocast(mlp, denied=["exp"])
    with pytest.raises(TypeError, match="positional"):
        jmp.autocast(mlp, jnp.bfloat16, ["exp"])


# rules=.


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
        ([("decoder", "float32"), ("decoder/head", "bfloat16")], "hhff"),
        ([("attention", "bfloat16"), ("encoder", "float32")], "hfhh"),
        ({"**": "float32"}, "ffff"),
        ({"mlp": "float32", "head": "float32"}, "hfhf"),
    ],
)
def test_rules_select_scopes_and_the_first_that_matches_wins(given, expected):
    if isinstance(given, list) and given[0][0] == "decoder":  # The wide rule hides the narrow one.
        with pytest.raises(ValueError, match=r"'decoder/head'"):
            jmp.autocast(scoped, rules=given)(X, W)
        return
    fun = jmp.autocast(scoped, rules=given)
    wanted = [HALF if each == "h" else FULL for each in expected]
    assert products(fun, X, W) == wanted
    loss = lambda x, w: jnp.sum(scoped(x, w))
    backward = set(products(jax.grad(jmp.autocast(loss, rules=given), 1), X, W))
    assert backward == set(wanted)
    outside = products(jmp.autocast(jax.grad(loss, 1), rules=given), X, W)
    assert outside.count(FULL) == (0 if "f" not in expected else outside.count(FULL))
    assert set(outside) == set(wanted)


@pytest.mark.parametrize(
    "around", [jax.jit, jax.checkpoint, lambda f: lambda x: jax.vmap(f)(x[:, None])[:, 0]]
)
def test_rules_reach_scopes_through_transforms(around):
    fun = around(lambda x: scoped(x, W))
    assert products(jmp.autocast(fun, rules={"decoder/head": "float32"}), X) == [HALF] * 3 + [FULL]
    in_scan = lambda x: lax.scan(lambda x, _: (fun(x), None), x, length=2)[0]
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


@pytest.mark.parametrize("pattern", ["haed", "decoder/headd", "encoder/head", "/head", "0/head"])
def test_a_rule_that_selects_nothing_is_a_value_error(pattern):
    fun = jmp.autocast(scoped, rules={pattern: "float32"})
    with pytest.raises(
        ValueError, match=f"The rule for '{fnmatch.translate(pattern)[4:-3]}' selects nothing"
    ):
        fun(X, W)
    with pytest.raises(ValueError, match="selects nothing"):
        jax.jit(fun)(X, W)


def test_the_error_names_what_is_close():
    with pytest.raises(ValueError, match=r"'decoder/head'"):
        jmp.autocast(scoped, rules={"decoder/haed": "float32"})(X, W)


def test_a_rule_and_full_precision_and_autocast_within_go_together():
    def fun(x, w):
        with jax.named_scope("a"):
            x = jmp.autocast(lambda x, w: x @ w, jnp.float16)(x @ w, w)
        return jmp.full_precision(jnp.matmul)(x, w)

    names = [pair[0] for pair in products(jmp.autocast(fun, rules={"a": "float32"}), X, W)]
    assert names == ["float32", "float16", "float32"]


@pytest.mark.parametrize(
    ("value", "half", "expected"),
    [
        (0.1, "float16", True),
        (1e-8, "float16", False),
        (1e5, "float16", False),
        (65504.0, "float16", True),
        (65536.0, "float16", False),
        (6.1e-5, "float16", True),
        (-np.inf, "float16", True),
        (np.nan, "float16", True),
        (0.0, "float16", True),
        (1e-8, "bfloat16", True),
        (1e30, "bfloat16", True),
        (3.4e38, "bfloat16", False),
        (np.float32(np.finfo(np.float32).min), "bfloat16", False),
        (257.0, "bfloat16", True),
    ],
)
def test_which_numbers_half_holds(value, half, expected):
    assert rules.fits(value, jnp.dtype(half)) is expected


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
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

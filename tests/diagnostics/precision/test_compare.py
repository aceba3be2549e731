"""`compare_precision` measures what each module costs, and finds the fewest modules to keep in float32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from jmp_lite.diagnostics import compare_precision
from jmp_lite.diagnostics._precision import flags

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (8, 16))
Y = jnp.arange(8) % 4
OPTIONS = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 1}


def entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# The errors, against a computation that shares nothing with it but autocast.


class Blocks(nn.Module):
    """Three modules. No chain of operations that is rounded once leads from one into another."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(16, name="stem")(x))
        x = jnp.tanh(nn.Dense(16, name="middle")(x))
        return nn.Dense(4, name="head")(x)


BLOCKS = Blocks()
PARAMS = jax.jit(BLOCKS.init)(KEY, X)["params"]


def blocks_loss(params, x, y):
    return entropy(BLOCKS.apply({"params": params}, x), y)


def errors(fun, args, rules, dtype="float16", scale=1.0):
    """The relative error of loss and gradients, and the cosine, in float64."""
    run = lambda f, s: jax.jit(jmp.value_and_grad(f, jmp.StaticLossScale(s)), compiler_options=OPTIONS)(*args)
    flat = lambda tree: np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
    loss, grads = run(fun, 1.0)
    half_loss, half_grads = run(jmp.autocast(fun, dtype, rules=rules), scale)
    one, other = flat(half_grads), flat(grads)
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    return (
        abs(float(half_loss) - float(loss)) / abs(float(loss)),
        np.linalg.norm(one - other) / np.linalg.norm(other),
        cosine,
    )


def assert_is(difference, expected):
    np.testing.assert_allclose(difference.loss, expected[0], rtol=1e-2, atol=1e-6)
    # XLA of JAX 0.10.2 for CPUs leaves out other roundings in one program than in the other.
    rtol = 1e-3 if jax.__version_info__ >= (0, 11) else 4e-2
    np.testing.assert_allclose(difference.gradients, expected[1], rtol=rtol, atol=1e-6)
    np.testing.assert_allclose(difference.cosine, expected[2], rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def linen_report():
    return compare_precision(blocks_loss, "float16", tolerance=6e-4)(PARAMS, X, Y)


def test_the_error_of_a_module_is_that_of_this_module_alone_in_half(linen_report):
    names = ["Blocks/stem", "Blocks/middle", "Blocks/head"]
    assert sorted(each.module for each in linen_report.modules) == sorted(names)
    assert_is(linen_report.half, errors(blocks_loss, (PARAMS, X, Y), {}))
    for each in linen_report.modules:
        rules = {name: "float32" for name in names if name != each.module}
        assert_is(each.own, errors(blocks_loss, (PARAMS, X, Y), rules))
        assert each.own.gradients > 1e-5
    own = [each.own.gradients for each in linen_report.modules]
    assert own == sorted(own, reverse=True)
    assert linen_report.rest.gradients < 1e-6
    assert linen_report.loss == pytest.approx(float(blocks_loss(PARAMS, X, Y)))


def test_a_value_that_two_products_read():
    def loss(params, x):  # The gradient of `hidden` is a sum of two.
        with jax.named_scope("stem"):
            hidden = jnp.tanh(x @ params["stem"])
        with jax.named_scope("left"):
            left = hidden @ params["left"]
        with jax.named_scope("right"):
            return jnp.mean(jnp.sin(left) * (hidden @ params["right"]))

    keys = jax.random.split(KEY, 3)
    params = {
        name: jax.random.normal(key, (16, 16)) / 4 for name, key in zip(("stem", "left", "right"), keys)
    }
    report = compare_precision(loss, "float16", tolerance=0)(params, X)
    assert_is(report.half, errors(loss, (params, X), {}))
    for row in report.modules:
        rules = {name: "float32" for name in params if name != row.module}
        assert_is(row.own, errors(loss, (params, X), rules))


def test_the_report_says_the_rules(linen_report):
    text = str(linen_report)
    assert f"rules={linen_report.rules}" in text
    assert "To mend it: rules=" in " ".join(text.split())
    assert text.index(linen_report.modules[0].module) < text.index(linen_report.modules[-1].module)
    assert linen_report.summary() in repr(linen_report)
    assert_is(linen_report.with_rules, errors(blocks_loss, (PARAMS, X, Y), linen_report.rules))


def test_a_tolerance_that_float32_rounding_exceeds_has_no_rules():
    params = {"a": jnp.full((16, 4), 0.1)}
    loss = lambda params, x: jnp.mean((x @ params["a"]) @ (x @ params["a"]).T)
    report = compare_precision(loss, "float16", tolerance=1e-5)(params, X)
    # The product of the two has neither scope nor argument.
    assert report.rules is None
    assert report.rest.gradients > 1e-5
    assert "No rule, cast or argument that was tried" in str(report)


def test_a_scope_around_a_module_is_a_module_of_its_own():
    def loss(params, x):
        with jax.named_scope("outer"):
            with jax.named_scope("inner"):
                h = jnp.tanh(x @ params["a"])
            return jnp.mean((h @ params["b"]) / 1e6)

    params = {"a": jnp.full((16, 4), 0.1), "b": jnp.full((4, 8), 1e6)}
    report = compare_precision(loss, "float16")(params, X)
    own = {each.module: each.own.gradients for each in report.modules}
    assert own["outer"] == np.inf
    assert own["outer/inner"] < 0.01
    assert report.by_hand is None  # Casts by hand are run where an error is finite, which may be random.
    assert report.rules == {"/outer/inner": "float16", "/outer": "float32"}
    assert np.isfinite(report.with_rules.gradients)
    fixed = jmp.autocast(loss, "float16", rules=report.rules)
    inputs = [o.inputs[0] for o in jmp.explain(fixed)(params, X).operations if o.name == "dot_general"]
    assert inputs == ["float16[8,16]", "float32[8,4]"]


def test_the_rules_of_an_autocast_stay():
    params = {"a": jnp.full((16, 8), 0.1), "b": jnp.full((8, 8), 1e6), "c": jnp.full((8, 4), 0.1)}
    loss = lambda params, x: jnp.mean(((jnp.tanh(x @ params["a"]) @ params["b"]) / 1e6) @ params["c"])
    fun = jmp.autocast(loss, "float16", rules={"params/a": "float32"})
    report = compare_precision(fun)(params, X)
    assert {each.module for each in report.modules} == {"params/b", "params/c"}
    assert report.rules == {"/params/b": "float32", "params/a": "float32"}
    assert np.isfinite(errors(loss, (params, X), report.rules)[1])
    # A rule that nothing is left for would be an error if it were pasted.
    inner = jmp.autocast(loss, "float16", rules={"params/b": "float16", "params": "float32"})
    report = compare_precision(inner)(params, X)
    assert report.rules == {"/params/b": "float32", "params": "float32"}
    jmp.autocast(loss, "float16", rules=report.rules)(params, X)


def test_gradients_that_underflow_are_an_error_that_a_loss_scale_takes_away():
    def loss(params, x):
        return jnp.mean(jnp.sin(x @ params["a"]) @ params["b"]) * 1e-7

    params = {"a": jnp.full((16, 8), 0.1), "b": jnp.full((8, 4), 0.1)}
    scales = (1.0, 2.0**16, None)
    without, scaled, tried = (
        compare_precision(loss, "float16", loss_scale=scale)(params, X) for scale in scales
    )
    assert scaled.half.gradients < 0.01
    assert scaled.rules == {}
    assert_is(scaled.half, errors(loss, (params, X), {}, scale=2.0**16))
    assert scaled.unscaled is None
    # Without a scale, or with one that is too small, it tries the scale with which a run starts.
    assert without.loss_scale == tried.loss_scale == 2.0**15
    assert_is(tried.half, errors(loss, (params, X), {}, scale=2.0**15))
    assert without.unscaled == tried.unscaled
    assert tried.unscaled.gradients > 0.5
    assert tried.is_close
    assert tried.modules == ()
    assert (
        f"Use a loss scale, such as jmp.DynamicLossScale(): without one the error is {without.unscaled}"
        in " ".join(str(tried).split())
    )
    assert compare_precision(loss, "bfloat16")(params, X).loss_scale == 1.0


def test_a_loss_scale_that_does_not_help_is_not_taken():
    def loss(params, x):  # The gradient of `a` is beyond 65504 at any scale of 1 and more.
        return jnp.mean(jnp.sin(x @ params["a"]) @ params["b"])

    params = {"a": jnp.full((16, 8), 0.1), "b": jnp.full((8, 4), 1e6)}
    report = compare_precision(loss, "float16")(params, X)
    assert report.loss_scale == 1.0
    assert report.unscaled is None
    assert "loss scale," not in report.advice()


def test_a_program_within_the_tolerance_is_two_runs_and_no_table(monkeypatch):
    runs, run = [], flags.FlaggedProgram.__call__
    monkeypatch.setattr(flags.FlaggedProgram, "__call__", lambda *args: runs.append(args[1]) or run(*args))
    report = compare_precision(blocks_loss, "bfloat16", tolerance=0.5)(PARAMS, X, Y)
    assert len(runs) == 2  # In float32, and with everything in half.
    assert report.modules == ()
    assert report.rest is None
    assert len(report.names) == 3
    assert str(report).endswith("No rule is needed. tolerance=0 measures each module.")
    runs.clear()
    report = compare_precision(blocks_loss, "bfloat16", tolerance=0)(PARAMS, X, Y)
    assert len(runs) == 2 + 3 + 1  # Each module alone, and all in float32: that is the set to keep.
    assert len(report.kept) == len(report.modules) == 3


def test_tiny_gradients_count_as_large_ones_do():
    loss = lambda params, x: jnp.mean(jnp.sin(x @ params["a"])) * 1e-25  # Their squares are zero in float32.
    report = compare_precision(loss, "bfloat16")({"a": jnp.full((16, 8), 0.1)}, X)
    assert 1e-4 < report.half.gradients < 0.05
    assert 0.99 < report.half.cosine < 1


# Bad input.


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"tolerance": -1.0}, ValueError, "0 or more, or None. Got -1.0"),
        ({"tolerance": "small"}, ValueError, "Got 'small'"),
        ({"dtype": "float32"}, ValueError, "Got float32"),
        ({"loss_scale": "big"}, TypeError, "Got str"),
        ({"loss_scale": 0.0}, ValueError, "above 0"),
    ],
)
def test_bad_settings_are_named(options, error, says):
    with pytest.raises(error, match=says):
        compare_precision(lambda w, x: jnp.sum(x @ w), **options)


def test_bad_functions_are_named():
    with pytest.raises(TypeError, match="takes a function first"):
        compare_precision(3)
    with pytest.raises(ValueError, match="leave dtype out"):
        compare_precision(jmp.autocast(blocks_loss), "float16")
    with pytest.raises(ValueError, match="selects nothing"):
        compare_precision(jmp.autocast(blocks_loss, rules={"nowhere": "float32"}))(PARAMS, X, Y)
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda x: compare_precision(lambda w: jnp.sum(w @ w))(x).loss)(jnp.eye(2))


def test_a_loss_that_is_not_finite_in_float32_is_sent_to_find_nonfinite():
    with pytest.raises(ValueError, match=r"the loss is inf.*not finite: w.*find_nonfinite"):
        compare_precision(lambda w, x: jnp.sum(x @ w["w"] / 0.0))({"w": jnp.ones((16, 4))}, jnp.abs(X))

"""What several functions take is read in the same way by all of them: loss scales, rules and patterns."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from jmp_lite import diagnostics

W, X = jnp.full(4, 0.5), jnp.arange(4.0)
TX = optax.chain(jmp.unscale(), optax.sgd(1.0))


def loss_fn(w, x):
    return jnp.sum(jnp.tanh(w * x))


def functions_with(parameter):
    """Returns the names of the public functions that have a parameter of this name."""
    functions = {**vars(jmp), **vars(diagnostics)}.items()
    return {
        f
        for f, each in functions
        if inspect.isfunction(each) and parameter in inspect.signature(each).parameters
    }


def updated(tx, scale):
    return tx.update(W * 8, tx.init(W), loss_scale=scale)


SCALED = {
    "value_and_grad": lambda scale: jmp.value_and_grad(loss_fn, scale)(W, X),
    "grad": lambda scale: jmp.grad(loss_fn, scale)(W, X),
    "with_loss_scale": lambda scale: jmp.with_loss_scale(optax.sgd(1.0), scale).init(W),
    "find_nonfinite": lambda scale: diagnostics.find_nonfinite(loss_fn, loss_scale=scale)(W, X).loss_scale,
    "profile_ranges": lambda scale: diagnostics.profile_ranges(loss_fn, loss_scale=scale)(W, X).loss_scale,
    "compare_precision": lambda scale: (
        diagnostics.compare_precision(loss_fn, loss_scale=scale)(W, X).loss_scale
    ),
    "doctor": lambda scale: (
        diagnostics.doctor(loss_fn, loss_scale=scale, device=None)(W, X).nonfinite.loss_scale
    ),
    "update of unscale": lambda scale: updated(TX, scale),
    "update of skip_nonfinite": lambda scale: updated(jmp.skip_nonfinite(TX, clip_norm=1.0), scale),
}


def test_every_function_that_takes_a_loss_scale_is_tested_here():
    assert functions_with("loss_scale") == {name for name in SCALED if " " not in name}


@pytest.mark.parametrize("name", SCALED)
def test_a_number_is_a_static_loss_scale(name):
    expected = SCALED[name](jmp.StaticLossScale(8.0))
    for number in (8, 8.0, np.float64(8), jnp.float32(8)):
        found = SCALED[name](number)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", SCALED)
def test_what_is_no_loss_scale_is_refused(name):
    for other in ("dynamic", True, jmp.DynamicLossScale):
        with pytest.raises(TypeError, match=r"loss scale.*Got (str|bool|a class|type)"):
            SCALED[name](other)
    with pytest.raises(ValueError, match="loss_scale should be above 0 and finite"):
        SCALED[name](0.0)
    with pytest.raises(ValueError, match=r"loss_scale should be a scalar\. Got shape \(4,\)"):
        SCALED[name](X)


def dtypes_under(policy):
    return jax.tree.map(lambda leaf: leaf.dtype.name, policy.cast_to_compute(MODEL))


def products_under(**options):
    report = jmp.explain(jmp.autocast(model_loss, "float16", **options))(MODEL, jnp.ones((2, 4)))
    return [(each.scope, each.in_half) for each in report.operations if each.name == "dot_general"]


MODEL = {"body": jnp.ones((4, 4)), "head": jnp.ones((4, 2))}
HALF = jmp.get_policy("c=f16,o=f32")
RULED = {
    "autocast": lambda rules: products_under(rules=rules),
    "Policy": lambda rules: dtypes_under(jmp.Policy("float32", "float16", "float32", rules=rules)),
    "Policy.with_rules": lambda rules: dtypes_under(HALF.with_rules(rules)),
}


def model_loss(params, x):
    for name, weight in params.items():
        with jax.named_scope(name):
            x = x @ weight
    return jnp.sum(x)


def test_every_function_that_takes_rules_is_tested_here():
    assert functions_with("rules") == {"autocast"}


@pytest.mark.parametrize("name", RULED)
def test_rules_are_pairs_a_mapping_rules_or_none(name):
    without, expected = RULED[name](()), RULED[name]({"head": "float32"})
    assert without != expected
    assert RULED[name](None) == RULED[name]([]) == RULED[name]({}) == without
    rule = jmp.Rule("head", "float32")
    for rules in ([rule], (rule,), iter([rule]), [("head", jnp.float32)], [[" head ", "f32"]]):
        assert RULED[name](rules) == expected
    assert RULED[name]([jmp.Rule("head", "float32"), ("**", "float16")]) == expected
    for wrong in ("head", rule, 3):
        with pytest.raises(TypeError, match=r"rules= (takes|is|maps) .*Got"):
            RULED[name](wrong)


def test_a_rule_of_autocast_gives_its_compute_dtype_and_selects_something():
    assert RULED["autocast"]([jmp.Rule("head", "p=f32,c=f32,o=f16")]) == RULED["autocast"]({"head": "f32"})
    with pytest.raises(ValueError, match=r"'head \?-> .*' is optional.*Leave optional=True out"):
        RULED["autocast"]([jmp.Rule("head", "float32", optional=True)])

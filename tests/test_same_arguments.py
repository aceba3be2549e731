"""What several functions take is read in the same way by all of them: loss scales, rules and patterns."""

import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from jmp_lite import diagnostics, testing
from jmp_lite.diagnostics._values.case import Options

W, X = jnp.full(4, 0.5), jnp.arange(4.0)
TX = optax.chain(jmp.unscale(), optax.sgd(1.0))


def loss_fn(w, x):
    return jnp.sum(jnp.tanh(w * x))


def functions_with(parameter):
    """Returns the names of the public functions that have a parameter of this name."""
    functions = {**vars(jmp), **vars(diagnostics)}.items()
    return {f for f, each in functions if inspect.isfunction(each) and parameter in parameters_of(each)}


def parameters_of(function):
    """The names of the parameters, and the options that `**options: Unpack[Options]` stands for."""
    names = set(inspect.signature(function).parameters)
    for hint in function.__annotations__.values():
        if hint == "Unpack[Options]":  # In a file that evaluates no annotation.
            names |= set(Options.__annotations__)
        if typing.get_origin(hint) is typing.Unpack:
            names |= set(typing.get_args(hint)[0].__annotations__)
    return names


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


@pytest.mark.cases(fast=4, slow=9)
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


def test_a_rule_of_autocast_gives_its_compute_dtype_and_selects_something_unless_it_is_optional():
    expected = RULED["autocast"]({"head": "f32"})
    assert RULED["autocast"]([jmp.Rule("head", "p=f32,c=f32,o=f16")]) == expected
    assert RULED["autocast"]([jmp.Rule("head", "float32", optional=True)]) == expected
    optional, needed = jmp.Rule("tail", "float32", optional=True), jmp.Rule("head", "float32")
    assert RULED["autocast"]([optional, needed]) == expected
    with pytest.raises(ValueError, match="The rule for 'tail' selects nothing"):
        RULED["autocast"]([jmp.Rule("tail", "float32"), needed])


TREE = {"enc": {"layer_1": {"kernel": jnp.ones((4, 4))}}, "dec": {"kernel": jnp.ones((4, 4))}}
ADAM = optax.adam(1e-3)


def tree_loss(params, x):
    with jax.named_scope("enc"), jax.named_scope("layer_1"), jax.named_scope("kernel"):
        x = jnp.tanh(x @ params["enc"]["layer_1"]["kernel"])
    return jnp.sum(x @ params["dec"]["kernel"])


def in_autocast(option, name, pattern):
    """Whether an option of autocast changes the first product, whose scope or weight is called `name`."""
    weights = TREE if name else None
    loss = tree_loss if name else lambda x: tree_loss(TREE, x)
    args = (weights, jnp.ones((2, 4))) if name else (jnp.ones((2, 4)),)
    options = {"rules": {pattern: "float32"}} if option == "rules" else {option: pattern}
    try:
        found = jmp.explain(jmp.autocast(loss, "float16", **options))(*args).operations
    except ValueError as error:
        if "selects no" not in str(error):
            raise
        return False
    first = next(each for each in found if each.is_product)
    return not first.in_half if option == "rules" else first.results[0].dtype == jnp.float32


def in_policy(pattern):
    params = jmp.get_policy("c=f16").with_rules({pattern: "float32"}).cast_to_compute(TREE)
    return params["enc"]["layer_1"]["kernel"].dtype == jnp.float32


def in_state(pattern):
    try:
        state = jmp.with_half_state(ADAM, keep_float32=pattern).init(TREE).inner_state
    except ValueError as error:
        if "matches no array of the state" not in str(error):
            raise
        return False
    return state[0].mu["enc"]["layer_1"]["kernel"].dtype == jnp.float32


def in_assert_precision(pattern):
    half = jmp.autocast(tree_loss, "float16")
    try:
        testing.assert_precision(half, {pattern: "float32", "**": "float16"}, TREE, jnp.ones((2, 4)))
    except AssertionError as error:
        return "0 of 2" not in str(error)
    raise AssertionError("The pattern selects no product, and is not named.")


def in_ignore(pattern):
    """Whether `ignore` lets a step change one leaf of its state although it is skipped."""

    def step(state, x):
        scale, tree = state
        finite = jnp.isfinite(x).all()
        moved = jax.tree.map(lambda leaf: leaf + 1, tree)
        new = {**jmp.select_tree(finite, moved, tree), "enc": moved["enc"]}
        return (scale.adjust(finite), new), 0.0

    try:
        testing.assert_skips_nonfinite(step, (jmp.DynamicLossScale(), TREE), X, ignore=pattern)
    except AssertionError as error:
        if "kernel" not in str(error):
            raise
        return False
    return True


# Each with the path of the tree within what it selects from.
SELECTS = {
    "rules, an argument": (lambda pattern: in_autocast("rules", "params", pattern), "params/"),
    "rules, a scope": (lambda pattern: in_autocast("rules", "", pattern), ""),
    "float32_results": (lambda pattern: in_autocast("float32_results", "", pattern), ""),
    "a policy": (in_policy, ""),
    "keep_float32": (in_state, "0/mu/"),
    "assert_precision": (in_assert_precision, "params/"),
    "ignore": (in_ignore, "1/"),
}


@pytest.mark.parametrize("name", SELECTS)
def test_there_is_one_language_of_patterns(name):
    selects, root = SELECTS[name]
    within = (
        "enc",
        "enc/layer_1",
        "layer_*",
        "enc/**/kernel",
        "**/layer_1",
        "en?",
        "e[mn]c",
        " enc ",
        "enc/",
    )
    for pattern in (*within, f"/{root}enc/layer_1", f" /{root}*/layer_1/kernel"):
        assert selects(pattern), pattern
    for pattern in ("layer", "Enc", "/layer_1", "enc/kernel", "**/layer_1/bias", "enc*kernel"):
        assert not selects(pattern), pattern


@pytest.mark.parametrize("name", SELECTS)
def test_an_empty_pattern_and_another_type_are_refused(name):
    selects, _ = SELECTS[name]
    for empty in ("", " / "):
        with pytest.raises(ValueError, match=r"[Pp]attern"):
            selects(empty)
    with pytest.raises(TypeError, match=r"Got .*3"):
        selects(3)

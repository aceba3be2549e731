"""What careless users write: each mistake has a message that says what was given and what to do."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_lite as jmp
from tests.support.steps import make_grads, make_params, run, spoil

WRAPPERS = [jmp.with_loss_scale, jmp.skip_nonfinite]
PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(())}


def loss_fn(params, x):
    return jnp.sum(params["w"] * x) + params["b"]


# What is given to the wrappers


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_what_a_wrapper_is_given(wrap):
    adam = optax.adam(1e-3)
    for inner in (None, 1e-3, optax.adam, PARAMS):
        with pytest.raises(
            TypeError, match=rf"{wrap.__name__}\(inner\) wraps an optax transform such as optax"
        ):
            wrap(inner)
    with pytest.raises(TypeError, match=r"Got dict\. The state comes before the parameters\."):
        wrap(adam).update(PARAMS, PARAMS, wrap(adam).init(PARAMS))
    with pytest.raises(
        TypeError, match=r"that its init\(params\) returned\. Got tuple\. To go on .*jmp\.migrate_state"
    ):
        wrap(adam).update(PARAMS, adam.init(PARAMS), PARAMS)
    (other,) = set(WRAPPERS) - {wrap}
    with pytest.raises(ValueError, match=rf"{wrap.__name__}: update was given a state of {other.__name__}"):
        wrap(adam).update(PARAMS, other(adam).init(PARAMS), PARAMS)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_state_of_an_optimizer_of_another_name(wrap):
    one, other, unnamed = (wrap(optax.adam(1e-3), name=name) for name in ("a", "b", None))
    with pytest.raises(
        ValueError, match=r"a state of .*, named 'b'\. This optimizer is .*, named 'a'\. To go on"
    ):
        one.update(PARAMS, other.init(PARAMS), PARAMS)
    with pytest.raises(
        ValueError, match=r"a state of .* without clip_norm\. This optimizer is .*, named 'a'\."
    ):
        one.update(PARAMS, unnamed.init(PARAMS), PARAMS)
    one.update(PARAMS, one.init(PARAMS), PARAMS)


@pytest.mark.parametrize("jit", [jax.jit, lambda update: update], ids=["jit", "eager"])
def test_the_state_of_parameters_of_other_shapes(jit):
    tx, params = jmp.with_loss_scale(optax.adam(1e-3)), {"w": jnp.ones((4, 2))}
    state = tx.init({"w": jnp.ones((1, 2))})  # Adam would broadcast its moments.
    with pytest.raises(
        ValueError, match=r"0/mu/w has the shape \(1, 2\) in the state .* \(4, 2\) after the update"
    ):
        jit(tx.update)(params, state, params)


def test_a_loss_scale_within_a_loss_scale():
    for inner in (jmp.with_loss_scale(optax.sgd(1.0)), jmp.skip_nonfinite(optax.sgd(1.0))):
        for twice in (inner, optax.chain(optax.clip(1.0), inner)):
            with pytest.raises(
                ValueError, match="inner is wrapped in with_loss_scale or skip_nonfinite already"
            ):
                jmp.with_loss_scale(twice).init(PARAMS)
    with pytest.raises(ValueError, match=r"inner holds jmp\.unscale\(\).*Leave unscale out"):
        jmp.with_loss_scale(optax.chain(jmp.unscale(), optax.sgd(1.0))).init(PARAMS)


def test_the_scale_is_a_loss_scale():
    for scale in (True, "dynamic", jmp.DynamicLossScale):
        with pytest.raises(TypeError, match="expected a loss scale such as"):
            jmp.with_loss_scale(optax.sgd(1.0), scale)


@pytest.mark.parametrize("scale", [jmp.StaticLossScale, jmp.DynamicLossScale])
def test_an_invalid_scale_that_is_traced_skips_every_step_and_is_named(scale):
    tx = jmp.with_loss_scale(optax.sgd(1.0), scale(1.0))

    @jax.jit
    def step(number):
        state = dataclasses.replace(tx.init(PARAMS), loss_scale=scale(number))
        loss, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(state))(PARAMS, jnp.ones(3))
        return loss, tx.update(grads, state, PARAMS)

    for number in (0.0, -1.0, np.inf, np.nan):
        loss, (updates, state) = step(jnp.float32(number))
        assert float(loss) == 3.0
        assert not np.any(updates["w"])
        with pytest.raises(FloatingPointError, match=r"all 2 parameters\. The loss scale is nan"):
            jmp.raise_if_stuck(state, 1)
    assert float(jax.jit(lambda n: scale(n).loss_scale)(jnp.float32(8))) == 8.0


# A scale that nothing uses


def test_a_threaded_scale_that_nothing_divides_by():
    tx = jmp.skip_nonfinite(optax.adam(1e-3))
    with pytest.raises(TypeError, match=r"nothing divides the gradients by it\. Put jmp\.unscale\(\) first"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, loss_scale=jmp.StaticLossScale(2.0**10))
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, loss_scale=jmp.NoOpLossScale())


def test_unscale_is_found_wherever_it_stands():
    chain, params = optax.chain(jmp.unscale(), optax.sgd(1.0)), {"w": jnp.full(2, 8.0)}
    for inner in (
        chain,
        optax.masked(chain, {"w": True}),
        optax.chain(optax.chain(jmp.unscale()), optax.sgd(1.0)),
    ):
        tx = jmp.skip_nonfinite(inner)
        updates, _ = tx.update(params, tx.init(params), loss_scale=jmp.StaticLossScale(4))
        assert updates["w"].tolist() == [-2.0, -2.0]


# value_and_grad


def test_a_function_that_gives_gradients_alone():
    for gradient in (jax.grad, eqx.filter_grad, nnx.grad):
        with pytest.raises(
            TypeError, match=r"value_and_grad_fn should return what jax\.value_and_grad returns"
        ):
            jmp.value_and_grad(loss_fn, jmp.StaticLossScale(2), value_and_grad_fn=gradient)(
                PARAMS, jnp.ones(3)
            )


# States


def test_a_state_without_a_scale_says_what_to_do():
    state = {"inner_state": [], "loss_scale": {"loss_scale": 2.0, "counter": 0}, "leaf_finite": [True]}
    said = r"restored as plain dicts: restore it with a target, tx\.init\(params\)"
    with pytest.raises(ValueError, match=said):
        jmp.get_loss_scale(state)
    said = r"without a scale: jmp\.with_loss_scale\(tx, jmp\.NoOpLossScale\(\)\)"
    with pytest.raises(ValueError, match=said):
        jmp.get_loss_scale(optax.adam(1e-3).init(PARAMS))


@pytest.mark.parametrize("scale", [jmp.DynamicLossScale(jnp.float32(8)), jmp.StaticLossScale(jnp.float32(8))])
def test_donated_states_leave_the_scale_and_each_other_alone(scale):
    tx = jmp.with_loss_scale(optax.sgd(1.0), scale)
    step = jax.jit(lambda one, other: jax.tree.map(lambda x: x, (one, other)), donate_argnums=(0, 1))
    step(tx.init(PARAMS), tx.init(PARAMS))
    assert float(scale.loss_scale) == 8.0
    number = jnp.float32(8)
    built = type(scale)(number)
    jax.jit(lambda built: built, donate_argnums=0)(built)
    assert float(number) == 8.0


def test_tree_map_params_reaches_the_parameters_of_the_state():
    tx = jmp.with_loss_scale(optax.chain(optax.adam(1e-2), optax.trace(0.9)), clip_norm=1.0)
    state = tx.init(make_params())
    marked = optax.tree_map_params(tx, lambda _: "parameter", state, transform_non_params=lambda _: "other")
    assert set(jax.tree.leaves(marked.inner_state[0][0].mu)) == {"parameter"}
    assert jax.tree.leaves((marked.loss_scale, marked.counts, marked.leaf_finite)) == ["other"] * 4
    # A state that went through it still trains, and still has names.
    doubled = optax.tree_map_params(tx, lambda leaf: leaf * 2, state)
    _, doubled = jax.jit(tx.update)(spoil(make_grads(0)), doubled, make_params())
    with pytest.raises(FloatingPointError, match="1 of 3 parameters: dense/kernel"):
        jmp.raise_if_stuck(doubled, 1)


# Gradients of other dtypes


@pytest.mark.parametrize(
    ("wrap", "dtype", "value"),
    [(WRAPPERS[0], "float16", 1e-4), (WRAPPERS[1], "float16", 300.0), (WRAPPERS[0], "bfloat16", 1e-4)],
)
def test_gradients_in_half_are_widened_before_they_are_squared(wrap, dtype, value):
    """In float16 the square of 1e-4 is 0 and the square of 300 is inf."""
    tx = wrap(optax.adam(1e-3))
    params = jnp.zeros(2)
    updates, state = tx.update(jnp.full(2, value, dtype), tx.init(params), params)
    np.testing.assert_allclose(updates, -1e-3, rtol=1e-3)
    assert state.inner_state[0].nu.dtype == updates.dtype == jnp.float32
    assert np.isfinite(state.inner_state[0].nu).all()


def test_leaves_that_are_no_gradients_pass_through():
    grads = {
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": jax.random.key(0),
        "flag": jnp.array([True]),
        "count": jnp.arange(2),
        "none": None,
        "w": jnp.ones(2),
    }
    for settings in ({}, {"clip_norm": 1.0}):
        tx = jmp.skip_nonfinite(optax.identity(), **settings)
        state = tx.init({**grads, "float0": jnp.ones(2, int)})
        updates, state = tx.update(grads, state)
        assert jmp.grads_finite(state)
        assert updates["float0"].dtype == jax.dtypes.float0
        assert updates["key"] == grads["key"]
        updates, state = tx.update({**grads, "w": jnp.full(2, np.nan)}, state)
        assert not jmp.grads_finite(state)
        assert updates["w"].tolist() == [0, 0]


@pytest.mark.slow
def test_statistics_of_fp8_layers_are_no_gradients():
    """Flax returns new statistics instead of gradients. They are not changed."""
    import flax.linen as nn

    model = nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    x = jnp.linspace(-2, 2, 256).reshape(16, 16)
    variables = model.init(jax.random.key(0), x)
    assert "_overwrite_with_gradient" in variables
    mean_square = lambda variables: jnp.mean(model.apply(variables, x) ** 2)
    plain = jax.grad(mean_square)(variables)
    true = jmp.grad(mean_square, jmp.StaticLossScale(1024.0))(variables)
    for name in ("input_scale", "kernel_scale", "input_amax_history", "kernel_amax_history"):

        def statistic(tree, name=name):
            return jax.tree.leaves(
                [v for p, v in jax.tree_util.tree_leaves_with_path(tree) if name in jax.tree_util.keystr(p)]
            )

        assert statistic(plain)
        for one, other in zip(statistic(true), statistic(plain), strict=True):
            np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(true["params"]["bias"], plain["params"]["bias"], rtol=1e-2, atol=1e-3)


def test_multi_steps_count_micro_batches_as_the_documentation_says():
    tx = jmp.with_loss_scale(optax.MultiSteps(optax.sgd(1.0), 4), jmp.DynamicLossScale(8.0, period=4))
    _, state = run(tx, [make_grads(step) for step in range(4)])
    assert float(jmp.get_loss_scale(state).loss_scale) == 16.0


# A model that jax.value_and_grad cannot differentiate


class Normed(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear, self.norm = nnx.Linear(3, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


@functools.cache
def mlp():
    return eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))


MODELS = {
    "equinox": (mlp, lambda m, x: jnp.sum(jax.vmap(m)(x)), eqx.filter_value_and_grad),
    "nnx": (Normed, lambda m, x: jnp.sum(m(x) ** 2), nnx.value_and_grad),
    "in a dict": (lambda: {"m": mlp()}, lambda m, x: jnp.sum(jax.vmap(m["m"])(x)), eqx.filter_value_and_grad),
}


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_value_and_grad_fn_gets_the_line(name):
    build, fun, value_and_grad_fn = MODELS[name]
    made_by, wrap = jmp.value_and_grad, lambda fun: fun
    if name == "nnx":
        made_by, wrap = jmp.grad, lambda fun: jmp.autocast(fun, "float16")
    library = {"nnx": "nnx"}.get(name, "eqx.filter")
    line = rf"value_and_grad_fn={library}[._]value_and_grad, or differentiate a tree"
    with pytest.raises(TypeError, match=rf"{made_by.__name__}: .* Got a leaf of \w+, '.*'\. Give {line}"):
        made_by(wrap(fun), jmp.StaticLossScale(8.0))(build(), jnp.ones((4, 3)))
    swapped = lambda x, model: fun(model, x)
    with pytest.raises(TypeError, match=line):
        made_by(wrap(swapped), jmp.StaticLossScale(8.0), argnums=(0, 1))(jnp.ones((4, 3)), build())
    made_by(wrap(fun), jmp.StaticLossScale(8.0), value_and_grad_fn=value_and_grad_fn)(
        build(), jnp.ones((4, 3))
    )


def test_other_trees_name_both_lines_and_the_leaf():
    with pytest.raises(TypeError, match=r"Got a leaf of int32, 'n'\. Give value_and_grad_fn=nnx.* or eqx"):
        jmp.value_and_grad(lambda p: jnp.sum(p["w"]), jmp.StaticLossScale(8.0))(
            {**PARAMS, "n": jnp.arange(2)}
        )
    with pytest.raises(ZeroDivisionError):  # An error of the loss itself comes through.
        jmp.value_and_grad(lambda p: 1 / 0, jmp.StaticLossScale(8.0))(PARAMS)
    with pytest.raises(TypeError, match="The loss should be a floating scalar"):
        jmp.value_and_grad(lambda p: p["w"], jmp.StaticLossScale(8.0))(PARAMS)


@pytest.mark.parametrize(
    ("made_by", "advice"),
    [
        (jmp.value_and_grad, r"For gradients alone: jmp\.grad"),
        (jmp.grad, r"jmp\.grad takes one of these too"),
    ],
)
def test_each_of_both_names_itself_and_what_to_do(made_by, advice):
    name, scale, x = made_by.__name__, jmp.StaticLossScale(8.0), jnp.ones(3)
    with pytest.raises(TypeError, match=rf"{name}\(fun, .* Got \w+\. Give the function itself"):
        made_by(loss_fn(PARAMS, x), scale)
    with pytest.raises(TypeError, match=rf"{name}\(fun, loss_scale\): expected a loss scale"):
        made_by(loss_fn, "8")
    with pytest.raises(TypeError, match=rf"^{name}: .*{advice}"):
        made_by(loss_fn, scale, value_and_grad_fn=nnx.grad)(PARAMS, x)


def test_settings_of_value_and_grad_are_checked_at_once():
    for made in (jmp.value_and_grad, jmp.grad):
        with pytest.raises(TypeError, match=r"value_and_grad_fn is a function such as .* Got 'grad'"):
            made(loss_fn, jmp.NoOpLossScale(), value_and_grad_fn="grad")
        for argnums in ("params", ("params", "x")):
            with pytest.raises(TypeError, match=r"argnums are the positions .* not differentiated by name"):
                made(loss_fn, jmp.NoOpLossScale(), argnums=argnums)


def test_gradients_given_to_adjust_are_named_and_not_printed():
    with pytest.raises(ValueError, match=r"adjust takes one boolean scalar.* Got a dict with 'b', 'w'\."):
        jmp.DynamicLossScale(8.0).adjust(PARAMS)


def test_an_update_of_another_shape_is_not_called_a_gradient():
    def first(updates, state, params=None):
        return (jax.tree.map(lambda u: u[:1], updates), state)

    tx = jmp.skip_nonfinite(optax.GradientTransformation(lambda params: (), first))
    params = {"w": jnp.ones(3)}
    with pytest.raises(
        ValueError, match=r"The update 'w' has the shape \(1,\).* optimizer inside has changed"
    ):
        tx.update(params, tx.init(params), params)


def test_messages_name_the_first_leaves_of_a_large_tree():
    many = {f"layer_{i}": jnp.ones(2) for i in range(124)}
    tx = jmp.with_loss_scale(optax.adam(1e-3))
    mistakes = [
        lambda: jmp.migrate_state(many, many, many),
        lambda: jmp.migrate_state(tx, many, {"other": many}),
        lambda: jmp.with_half_state(tx.init(many)),
        lambda: jmp.DynamicLossScale(8.0).adjust(many),
        lambda: jmp.cast_params(many, many),
        lambda: jmp.cast_params("bloat16", many),
        lambda: jmp.Policy(many, many, many),
        lambda: jmp.with_loss_scale(optax.sgd(1.0), many),
        lambda: jmp.with_master_params(optax.sgd(1.0)).update(
            many, jmp.with_master_params(optax.sgd(1.0)).init(many), {"w": jnp.ones(2)}
        ),
    ]
    for mistake in mistakes:
        with pytest.raises((TypeError, ValueError)) as error:
            mistake()
        assert len(str(error.value)) < 700, str(error.value)[:800]


def test_a_state_of_shapes_cannot_be_resumed():
    tx = jmp.with_loss_scale(optax.adam(1e-3))
    with pytest.raises(TypeError, match=r"old_state holds arrays\. Got shapes"):
        jmp.migrate_state(tx, PARAMS, jax.eval_shape(tx.init, PARAMS))

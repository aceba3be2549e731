"""The types that an editor shows for the public functions. pyright checks this file in CI; pytest runs it."""

# A comment that ignores no error is an error: so pyright must report each wrong call below.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_lite as jmp
from jmp_lite import _dtypes, diagnostics, linen
from jmp_lite import nnx as jmp_nnx

Params = dict[str, jax.Array]
PARAMS: Params = {"w": jnp.ones(())}
X = jnp.ones(2)


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    return jnp.sum(params["w"] * x)


def loss_and_aux(params: Params, x: jax.Array) -> tuple[jax.Array, Params]:
    return loss_fn(params, x), params


def test_the_loss_scale_of_a_state():
    opt_state = jmp.with_loss_scale(optax.sgd(1.0)).init(PARAMS)
    assert_type(jmp.get_loss_scale(opt_state), jmp.LossScale)
    assert_type(jmp.get_loss_scale(opt_state).scale(X), jax.Array)
    assert_type(jmp.get_loss_scale(opt_state).adjust(True), jmp.LossScale)


def test_gradients():
    scale = jmp.DynamicLossScale()
    assert_type(jmp.value_and_grad(loss_fn, scale)(PARAMS, X), tuple[jax.Array, Any])
    (loss, aux), _ = jmp.value_and_grad(loss_and_aux, scale, has_aux=True)(PARAMS, x=X)
    assert_type(loss, jax.Array)
    assert_type(aux, Params)
    assert_type(jmp.grad(loss_fn, scale)(PARAMS, X), Any)
    assert_type(jmp.grad(loss_and_aux, scale, has_aux=True)(PARAMS, X), tuple[Any, Params])
    assert_type(jmp.grad(loss_and_aux, 2.0**15, has_aux=True)(PARAMS, x=X)[1], Params)


@pytest.mark.slow
def test_a_wrapped_function_keeps_its_arguments_and_its_result():
    assert_type(jmp.autocast(loss_fn, jnp.float16)(PARAMS, x=X), jax.Array)
    assert_type(jmp.autocast(dtype="float16")(loss_fn)(PARAMS, X), jax.Array)
    assert_type(jmp.full_precision(loss_fn)(PARAMS, X), jax.Array)
    assert_type(jmp.with_layer_loss_scale(loss_and_aux)(PARAMS, X), tuple[jax.Array, Params])
    assert_type(jmp.value_and_grad(jmp.autocast(loss_fn), jmp.NoOpLossScale())(PARAMS, X)[0], jax.Array)
    assert_type(jmp.explain(loss_fn)(PARAMS, X), jmp.AutocastReport)
    assert_type(diagnostics.find_nonfinite(loss_fn)(PARAMS, X), diagnostics.NonfiniteReport)
    assert_type(jmp.diagnostics.profile_ranges(loss_fn)(PARAMS, X), diagnostics.RangeReport)


def test_a_call_with_a_wrong_argument_is_an_error_of_pyright():
    def wrong() -> None:
        jmp.autocast(loss_fn)(PARAMS, y=X)  # pyright: ignore[reportCallIssue]
        jmp.value_and_grad(loss_fn, jmp.NoOpLossScale())(PARAMS)  # pyright: ignore[reportCallIssue]
        jmp.autocast(loss_fn, "flaot16")  # pyright: ignore
        jmp.autocast(loss_fn, rules={"head": "flaot32"})  # pyright: ignore
        jmp.explain(loss_fn, "flaot16")  # pyright: ignore[reportArgumentType]
        jmp.Policy("float32", "flaot16", "float32")  # pyright: ignore[reportArgumentType]
        jmp.with_half_state(optax.sgd(1.0), "bfloat61")  # pyright: ignore[reportArgumentType]
        jmp.GradScaler()  # pyright: ignore[reportAttributeAccessIssue]

    assert callable(wrong)


def test_the_strings_of_a_dtype_are_those_that_a_type_checker_knows():
    for name in get_args(_dtypes.DTypeName):
        if name == "float8":
            jmp.autocast(loss_fn, name)
        else:
            jmp.Policy(name, name, name)
    assert set(get_args(_dtypes.DTypeName)) == {"half", "float8", *_dtypes._DTYPES}


def test_a_dtype_is_a_string_a_type_or_a_dtype():
    policy = jmp.Policy("f32", jnp.float16, np.dtype("float32"))
    rules: list[Any] = [jmp.Rule("head", "p=f32,c=f16"), ("**", np.float32)]
    assert jmp.autocast(loss_fn, policy.compute_dtype, rules=rules)
    assert jmp.autocast(loss_fn, "half", rules={"head": jnp.float32, "**": "float32"}, reduce_dtype="f32")
    assert policy.with_rules({"head": "half"}).with_output_dtype("bf16")
    assert jnp.zeros(2, policy.param_dtype).astype(policy.output_dtype).dtype == jnp.float32


@pytest.mark.slow
def test_the_rules_of_a_report_are_those_that_autocast_takes():
    assert jmp.autocast(loss_fn, rules=diagnostics.compare_precision(loss_fn)(PARAMS, X).rules)
    for trial in diagnostics.find_nonfinite(loss_fn)(PARAMS, X).remedies:
        assert jmp.autocast(loss_fn, rules=trial.rules)


def test_a_tree_keeps_its_type():
    params = jmp.cast_to_half(PARAMS)
    assert_type(params, Params)
    assert_type(jmp.get_policy("half").cast_to_compute(PARAMS), Params)
    assert_type(jmp.cast_params(PARAMS, jmp.get_policy("half")), Params)
    assert_type(jmp.select_tree(True, PARAMS, PARAMS), Params)
    state = jmp.with_master_params(optax.sgd(1.0)).init(params)
    assert_type(jmp.get_master_params(state, params), Params)
    assert_type(jmp.set_master_params(state, params, PARAMS)[1], Params)


def test_a_model_under_a_policy():
    policy = jmp.get_policy("mixed_bfloat16")
    assert_type(linen.with_policy(nn.Dense(2), policy), linen.WithPolicy)
    assert_type(jmp_nnx.with_policy(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), policy), nnx.Linear)

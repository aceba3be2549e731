"""`jmp_lite.testing`: each assertion passes, and fails with a message that names what is wrong."""

import dataclasses
import functools
import os
import re
import socket
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
import jmp_lite.linen
from jmp_lite.testing import (
    assert_precision,
    assert_same_on_all_hosts,
    assert_skips_nonfinite,
    assert_tensor_cores,
)
from tests.support.arrays import normal
from tests.support.compiled_programs import compiled, h100


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16, name="body")(x))
        weights = jax.nn.softmax(nn.Dense(4, name="router")(x))
        return nn.Dense(8, name="head")(x) * weights.sum()


network, x = Network(), jnp.ones((4, 8))
variables = jax.tree.map(
    lambda p: normal(0, *p.shape, scale=0.5), jax.eval_shape(network.init, jax.random.key(0), x)
)


def loss_fn(variables, x):
    return jnp.mean(network.apply(variables, x) ** 2)


ROUTED = {"**/router": "float32", "**": "bfloat16"}
routed = jmp.autocast(loss_fn, "bfloat16", rules={"router": "float32"})


@pytest.mark.parametrize(
    "fun",
    [
        routed,
        jax.jit(jax.value_and_grad(routed)),
        jmp.autocast(jax.grad(loss_fn), "bfloat16", rules={"router": "float32"}),
    ],
)
def test_the_products_of_autocast_and_of_its_gradients_run_as_asserted(fun):
    assert_precision(fun, ROUTED, variables, x)
    with pytest.raises(AssertionError, match="float32, not the bfloat16 of"):
        assert_precision(fun, {"**": "bfloat16"}, variables, x)


def test_a_model_under_a_policy_and_casts_by_hand():
    policy = jmp.get_policy("c=bfloat16,o=float32").with_rules({"router": "float32"})
    model = jmp_lite.linen.with_policy(network, policy)
    assert_precision(jax.grad(lambda variables: jnp.sum(model.apply(variables, x))), ROUTED, variables)

    def by_hand(w, x):
        return jnp.sum(x.astype(jnp.float16) @ w.astype(jnp.float16))

    w = jnp.ones((8, 8))
    assert_precision(jax.grad(by_hand), {"**": "float16"}, w, x)
    assert_precision(by_hand, {"w": "float16"}, w, x)


def test_the_first_pattern_that_matches_decides():
    assert_precision(routed, {"router": "float32", "Network": "bfloat16"}, variables, x)
    with pytest.raises(AssertionError, match="the pattern 'router' decides about no matmul"):
        assert_precision(routed, {"Network": "bfloat16", "router": "float32"}, variables, x)


def test_the_message_names_lines_of_the_program_and_not_ours():
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    wide = jmp_lite.linen.with_policy(network, policy, reduce_dtype="float32")
    fun = jax.grad(lambda variables, x: wide.apply(variables, x).sum())
    with pytest.raises(AssertionError) as error:
        assert_precision(fun, {"**": "float64"}, variables, x)
    assert "linear.py:" in str(error.value)
    assert os.path.dirname(jmp.__file__) not in str(error.value)


def test_the_message_names_dtype_scope_line_and_reason():
    table = jnp.ones(8)

    def promoted(w, x):
        with jax.named_scope("attention"):
            return (x.astype(jnp.bfloat16) * table) @ w.astype(jnp.bfloat16)

    with pytest.raises(AssertionError) as error:
        assert_precision(promoted, {"**": "bfloat16"}, jnp.ones((8, 8)), x)
    message = str(error.value)
    assert message.startswith(
        "[jmp_lite] Assertion assert_precision failed: 1 of 1 matmuls are not as asserted."
    )
    # The newest JAX multiplies the two dtypes as they are. Before, it cast the weight up.
    assert re.search(
        r"float32( x bfloat16)?, not the bfloat16 of '\*\*': dot_general float32\[4,8\]", message
    )
    assert "in attention, " in message
    assert "test_testing.py:" in message
    assert "a constant float32[8] is float32" in message


def test_a_product_of_two_dtypes_is_in_neither():
    fun = lambda w, x: jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type="float32")
    with pytest.raises(AssertionError, match="float32 x bfloat16, not the bfloat16"):
        assert_precision(fun, {"**": "bfloat16"}, jnp.ones((8, 8), jnp.bfloat16), x)


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ({"**/rooter": "float32", "**": "bfloat16"}, r"the pattern '\*\*/rooter' decides about no matmul"),
        ({"body": "bfloat16"}, "no pattern matches it"),
        (
            {"**/rooter": "float32"},
            "The modules with matmuls are: Network/body, Network/head, Network/router",
        ),
    ],
)
def test_a_pattern_without_a_product_and_a_product_without_a_pattern_fail(dtypes, message):
    with pytest.raises(AssertionError, match=message):
        assert_precision(routed, dtypes, variables, x)


def test_a_function_without_products_fails():
    with pytest.raises(AssertionError, match="The modules with matmuls are: none"):
        assert_precision(jnp.tanh, {"**": "bfloat16"}, x)


def test_what_is_no_mapping_is_an_error():
    for dtypes in ({}, "bfloat16", [("**", "bfloat16")]):
        with pytest.raises(TypeError, match="takes a mapping of patterns to dtypes"):
            assert_precision(routed, dtypes)


# assert_skips_nonfinite


def make_step(tx, params=None, select=True):
    """A step with batch statistics and a moving average, as a tuple of four."""
    loss_fn = jmp.autocast(lambda params, x: jnp.mean((x @ params["w"]) ** 2), "float16")

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, x):
        params, opt_state, mean, average = state
        loss, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        new = 0.9 * mean + 0.1 * x.mean(0), optax.incremental_update(params, average, 0.1)
        if select:
            new = jmp.select_tree(jmp.grads_finite(opt_state), new, (mean, average))
        return (params, opt_state, *new), loss

    params = {"w": jnp.full((8, 4), 0.1)}
    return train_step, (params, tx.init(params), jnp.zeros(8), jax.tree.map(jnp.copy, params))


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
    "tx",
    [
        jmp.with_loss_scale(optax.adamw(0.1), jmp.StaticLossScale(128.0)),
        jmp.with_loss_scale(optax.adamw(0.1), jmp.DynamicLossScale(2.0**60)),  # Skips its first steps.
        jmp.with_loss_scale(optax.MultiSteps(optax.adamw(0.1), 3)),
        jmp.with_loss_scale(optax.adamw(0.1), jmp.DynamicLossScale(hysteresis=1)),
    ],
)
def test_a_step_that_selects_its_other_state_passes(tx):
    train_step, state = make_step(tx)
    assert_skips_nonfinite(train_step, state, x)
    assert float(state[0]["w"][0, 0]) == np.float32(0.1)  # The step was given copies.


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("batch", [np.ones((4, 8), np.float32), 1.0, np.float32(1)])
def test_a_batch_of_numpy_and_of_numbers(batch):
    train_step, state = make_step(jmp.with_loss_scale(optax.adamw(0.1)))
    jitted = jax.jit(lambda state, batch: train_step(state, jnp.ones((4, 8)) * batch))
    assert_skips_nonfinite(jitted, state, batch)


@pytest.mark.slow
def test_it_names_the_statistics_and_the_average_that_moved():
    tx = jmp.with_loss_scale(optax.adamw(0.1))
    train_step, state = make_step(tx, select=False)
    with pytest.raises(AssertionError) as error:
        assert_skips_nonfinite(train_step, state, x)
    message = str(error.value)
    assert "assert_skips_nonfinite failed: 2 leaves of the state moved on a batch of inf" in message
    assert "\n- 2\n- 3/w\n- Write jmp.select_tree(" in message
    assert_skips_nonfinite(train_step, state, x, ignore=["2", "3"])


def test_it_names_the_parameters_that_a_plain_optimizer_moves():
    tx = jmp.with_loss_scale(optax.sgd(0.1))
    outside = optax.chain(tx, optax.add_decayed_weights(0.1))  # Runs on skipped steps too.
    train_step, state = make_step(outside)
    with pytest.raises(AssertionError, match=r"1 leaf of the state moved(.|\n)*- 0/w\n"):
        assert_skips_nonfinite(train_step, state, x)


def test_it_names_what_a_step_changes_inside_of_the_optimizer_state():
    tx = jmp.with_loss_scale(optax.adam(0.1))
    train_step, state = make_step(tx)

    def counts(state, x):
        (params, opt_state, *others), _ = train_step(jax.tree.map(jnp.copy, state), x)
        inner = jax.tree.map(lambda leaf: leaf + 1, opt_state.inner_state)
        return (params, dataclasses.replace(opt_state, inner_state=inner), *others)

    with pytest.raises(AssertionError, match="- 1/inner_state/0/count\n"):
        assert_skips_nonfinite(counts, state, x)


def threaded(adjust):
    """A step with the loss scale in its own hands, as in jmp, and a random key."""

    def train_step(state, x):
        params, scale, key = state
        _, grads = jmp.value_and_grad(lambda params, x: jnp.mean((x @ params) ** 2), scale)(params, x)
        finite = jmp.all_finite(grads)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return jmp.select_tree(finite, new, params), adjust(scale, finite), key

    return train_step


def test_a_loss_scale_in_the_hands_of_the_step():
    state = (jnp.ones((8, 2)), jmp.DynamicLossScale(2.0**10), jax.random.key(0))
    assert_skips_nonfinite(threaded(lambda scale, finite: scale.adjust(finite)), state, x)
    message = r"the loss scale did not fall on a batch of inf.\n- it is 2\*\*10, and was 2\*\*10"
    with pytest.raises(AssertionError, match=message):
        assert_skips_nonfinite(threaded(lambda scale, finite: scale), state, x)


def test_parameters_that_never_move_fail():
    tx = jmp.with_loss_scale(optax.set_to_zero())
    train_step, state = make_step(tx)
    copied = lambda state: jax.tree.map(jnp.copy, state)  # The step donates its state.
    frozen = lambda state, x: ((*train_step(copied(state), x)[0][:2], *state[2:]), None)
    with pytest.raises(AssertionError, match="move no floating leaf outside of the optimizer"):
        assert_skips_nonfinite(frozen, state, x)


def test_an_inf_that_reaches_no_gradient_fails_with_the_reason():
    def train_step(state, x):
        params, opt_state = state
        tx = jmp.with_loss_scale(optax.sgd(0.1))
        loss_fn = lambda params: jnp.mean(jnp.nan_to_num(x, posinf=1.0) @ params)
        _, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jnp.ones((8, 2))
    state = params, jmp.with_loss_scale(optax.sgd(0.1)).init(params)
    with pytest.raises(AssertionError, match="The step was not skipped: the gradients"):
        assert_skips_nonfinite(train_step, state, x)


def test_a_state_whose_dtypes_change_fails_in_the_words_of_chex():
    tx = jmp.with_loss_scale(optax.sgd(0.1))
    train_step, state = make_step(tx)
    drifts = lambda state, x: ((jax.tree.map(jnp.bfloat16, state[0]), *train_step(state, x)[0][1:]), None)
    with pytest.raises(AssertionError, match=r"\[Chex\]"):
        assert_skips_nonfinite(drifts, state, x)


@pytest.mark.parametrize(
    ("state", "batch", "error", "message"),
    [
        ({"w": jnp.ones(2)}, x, AssertionError, "the state holds no loss scale"),
        (jmp.DynamicLossScale(), jnp.arange(3), TypeError, "this batch has none"),
        (jmp.DynamicLossScale(), x, TypeError, "returns the new state, or a tuple that begins with it"),
    ],
)
def test_what_it_cannot_examine_is_an_error(state, batch, error, message):
    with pytest.raises(error, match=message):
        assert_skips_nonfinite(lambda state, batch: batch.sum(), state, batch)


# assert_tensor_cores


def test_the_products_on_tensor_cores_are_counted_by_their_flops():
    """A program of an H100 with matmuls in float16, bfloat16, TF32 and float32."""
    program = h100("products")
    share = program.tensor_core_share
    assert 0 < share < 1
    assert_tensor_cores(program, share)
    with pytest.raises(AssertionError) as error:
        assert_tensor_cores(program)
    summary, *lines = str(error.value).splitlines()
    assert f"{share:.1%} of the FLOPs are on Tensor Cores in half, not 99.0%" in summary
    shares = [float(re.match(r"- ([0-9.]+)% of the FLOPs: ", line)[1]) for line in lines]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100 * (1 - share), abs=0.1 * len(shares))
    assert any(" in tf32, " in line for line in lines)


def test_a_program_for_a_cpu_is_an_error_and_one_without_products_fails():
    with pytest.raises(ValueError, match=r"Got one for cpu. jmp_lite.programs.compile_for\('h100'"):
        assert_tensor_cores(compiled(lambda x: x @ x, x.T @ x))
    empty = dataclasses.replace(h100("products"), matmuls=())
    with pytest.raises(AssertionError, match="the program has no matmuls"):
        assert_tensor_cores(empty)


def test_a_share_outside_of_0_to_1_is_an_error():
    for share in (0, -0.1, 1.1, 99):
        with pytest.raises(ValueError, match="share is above 0 and at most 1"):
            assert_tensor_cores(h100("products"), share)


def test_the_arguments_belong_to_the_same_call():
    for args in ((), (variables,), (variables, x, x)):
        with pytest.raises(TypeError, match=r"traces fun with its arguments: (missing|too many)"):
            assert_precision(routed, {"**": "float16"}, *args)
    with pytest.raises(AssertionError, match="bfloat16, not the float16"):
        assert_precision(routed, {"**": "float16"}, variables, x=x)


# assert_same_on_all_hosts


def replicated(*copies):
    """An array that should be the same on all devices, with the copies that some devices have."""
    mesh = jax.make_mesh((len(copies),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    arrays = [jax.device_put(jnp.asarray(c), d) for c, d in zip(copies, mesh.devices.flat, strict=True)]
    whole = jax.NamedSharding(mesh, jax.P())
    return jax.make_array_from_single_device_arrays(arrays[0].shape, whole, arrays)


def test_copies_on_the_devices_of_one_process_are_compared():
    same = {
        "w": replicated(jnp.ones(3), jnp.ones(3)),
        "key": jax.random.key(0),
        "step": 3,
        "host": np.ones(2),
    }
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    same["split"] = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("x")))
    assert_same_on_all_hosts(same)
    for one, other in ((jnp.float32(8), jnp.float32(4)), (jnp.float32(0.0), jnp.float32(-0.0))):
        with pytest.raises(
            AssertionError, match=r"1 of 6 leaves have copies that differ\.\n- scale: on the proc"
        ):
            assert_same_on_all_hosts({**same, "scale": replicated(one, other)})


def test_copies_on_devices_that_are_not_of_the_default_backend_are_compared(monkeypatch):
    # As with one GPU, beside which the array lies on two CPU devices.
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    assert_same_on_all_hosts({"w": replicated(jnp.ones(3), jnp.ones(3))})
    with pytest.raises(AssertionError, match="1 of 1 leaves have copies that differ"):
        assert_same_on_all_hosts({"w": replicated(jnp.ones(3), jnp.zeros(3))})


def test_what_has_no_value_is_an_error():
    with pytest.raises(TypeError, match="call it on the host, outside jit"):
        jax.jit(assert_same_on_all_hosts)(jnp.ones(2))
    with pytest.raises(TypeError, match=r"compares arrays\. Got str at 'name'"):
        assert_same_on_all_hosts({"name": "x"})


HOSTS = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import jax.numpy as jnp, numpy as np, optax, jmp_lite as jmp
from jmp_lite.testing import assert_same_on_all_hosts
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
number = np.float32(jax.process_index())
put = lambda value, spec: jax.make_array_from_process_local_data(jax.NamedSharding(mesh, spec), value)
opt_state = jmp.with_loss_scale(optax.adam(1e-3)).init({"w": jnp.ones(2)})
assert_same_on_all_hosts((opt_state, put(np.full((1, 2), number), jax.P("x")), put(np.ones(2), jax.P())))
for bad in ({"scale": put(number, jax.P())}, {"scale": jmp.StaticLossScale(1 + number)}, {"scale": number}):
    try:
        assert_same_on_all_hosts({"w": jnp.ones(2), **bad})
    except AssertionError as error:
        print(str(error).splitlines()[1])
try:
    assert_same_on_all_hosts([1.0] * (1 + jax.process_index()))
except AssertionError as error:
    print(error)
"""


@pytest.mark.slow
def test_two_processes_are_compared():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.getcwd()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    commands = [[sys.executable, "-c", HOSTS, address, str(index)] for index in range(2)]
    processes = [subprocess.Popen(command, **pipes) for command in commands]
    ended = [(*process.communicate(timeout=120), process.returncode) for process in processes]
    for index, (out, errors, status) in enumerate(ended):
        assert status == 0, errors
        lines = [line for line in out.splitlines() if "[Gloo]" not in line]
        assert len(lines) == 4
        assert lines[0].startswith(f"- scale: on the processes [0, 1]; here it is {index}")
        assert lines[1].startswith(f"- scale/loss_scale: on the processes [0, 1]; here it is {index + 1}")
        assert lines[2].startswith("- scale: on the processes [0, 1]")
        assert "the trees of the processes have other leaves" in lines[3]

"""What only a GPU shows; skipped where there is none.

On a machine with one, `pytest` runs everything else on its CPU, as everywhere, and these on the GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from benchmarks.arms.jax_arms import CUDNN_ARMS, JAX_ARMS, JaxArm
from benchmarks.compiled.gpt import gpt, gpt_loss
from benchmarks.compiled.h100 import compile_for_gpu
from benchmarks.device import HAS_GPU
from examples.models import FAMILIES
from jmp_lite.programs import read_program

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]


@pytest.fixture(autouse=True)
def on_the_gpu():
    with jax.default_device(jax.devices("cuda")[0]):
        yield


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt2-medium"])
@pytest.mark.parametrize("arm", ["float16", "float16 autocast", "TF32"])
def test_a_model_multiplies_as_it_claims_and_learns(family, arm):
    workload = FAMILIES[family].small()
    made = JaxArm(arm, workload, workload.batch_size)
    made.compile()  # Raises if a product of the GPU's program has another dtype.
    first = made.steps(1)
    assert made.steps(40) < first


@pytest.mark.parametrize("arm", ["bfloat16", "float16", "float16 autocast"])
def test_cudnn_attention_gives_the_gradients_of_attention_that_is_written_out(arm):
    workload = FAMILIES["gpt2-small"].small()
    grads = []
    for name in (arm, f"{arm}, cuDNN attention"):
        made = JaxArm(name, workload, 4)
        params, _, statistics = made.initial_state()
        loss = lambda params, made=made, rest=statistics: made.loss(params, rest, workload.batch(0, 4))[0]
        grads.append(jax.jit(jax.grad(loss))(params))
    tolerance = 8 * float(jnp.finfo((JAX_ARMS | CUDNN_ARMS)[arm].dtype).eps)
    for ours, theirs in zip(*map(jax.tree.leaves, grads)):
        assert float(jnp.linalg.norm(ours - theirs)) <= tolerance * float(jnp.linalg.norm(ours)) + 1e-6


def scaled_step():
    """A step of a float16 model with a scale, its state donated, and where it starts."""
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    tx = jmp.with_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))

    def loss_fn(params, x):
        params, x = policy.cast_to_compute((params, x))
        return policy.cast_to_output(jnp.tanh(x @ params["w"]) @ params["v"]).mean()

    def step(params, opt_state, x):
        loss, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    w, v = jax.random.normal(jax.random.key(0), (2, 128, 128))
    params = {"w": w, "v": v}
    return jax.jit(step, donate_argnums=(0, 1)), params, tx.init(params)


def test_a_skipped_step_changes_no_bit_but_the_scale():
    step, params, opt_state = scaled_step()
    params, opt_state, _ = step(params, opt_state, jnp.ones((8, 128)))
    before = jax.tree.map(np.asarray, (params, opt_state.inner_state))
    scale = float(jmp.get_loss_scale(opt_state).loss_scale)
    params, opt_state, _ = step(params, opt_state, jnp.full((8, 128), jnp.inf))
    for new, old in zip(jax.tree.leaves((params, opt_state.inner_state)), jax.tree.leaves(before)):
        assert np.asarray(new).tobytes() == old.tobytes()
    assert float(jmp.get_loss_scale(opt_state).loss_scale) == scale / 2
    assert int(jmp.get_metrics(opt_state)["skipped_steps"]) == 1


def test_a_step_writes_its_state_in_place_and_never_waits_for_the_host():
    step, params, opt_state = scaled_step()
    x = jnp.ones((8, 128))
    program = read_program(step.lower(params, opt_state, x).compile())
    assert program.host_syncs == ()
    assert program.aliased_bytes >= 3 * 2 * 128 * 128 * 4
    params, opt_state, _ = step(params, opt_state, x)
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            params, opt_state, loss = step(params, opt_state, x)
    assert np.isfinite(float(loss))


@pytest.mark.parametrize("casts", ["none", "by hand", "policy", "autocast"])
def test_the_program_of_an_h100_that_was_not_there_is_the_one_that_is(casts):
    model = gpt(vocabulary=2048, length=256, width=256, layers=3)
    tokens = jax.ShapeDtypeStruct((8, 256), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    step = jax.value_and_grad(gpt_loss(model, casts, jnp.float16))
    pretended, real = (
        read_program(compile_for_gpu(step, params, tokens, pretend=pretend)) for pretend in (True, False)
    )
    count = lambda program: sorted((product.kind, product.arithmetic) for product in program.matmuls)
    assert count(pretended) == count(real)
    assert real.tensor_core_share == pretended.tensor_core_share
    # XLA may fuse a product that it autotunes with the operations around it.
    assert real.kernels == pytest.approx(pretended.kernels, rel=0.15)
    assert real.temporary_bytes == pytest.approx(pretended.temporary_bytes, rel=0.25)

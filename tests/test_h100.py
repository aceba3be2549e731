"""What jmp_lite costs in the program that an H100 would run; needs `pip install -e ".[h100]"`, and no GPU.

The figures are read off programs compiled here and now: a test fails when one gets worse.
"""

import importlib.util
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from jmp_lite.linen import with_policy

if importlib.util.find_spec("jax_cuda13_plugin") is None:
    pytest.skip('needs pip install -e ".[h100]"', allow_module_level=True)

from benchmarks import loss_scale_cost
from benchmarks.gpt import GPT, next_token_loss
from benchmarks.h100 import HAS_GPU, compile_for_gpu, gpu_mesh
from jmp_lite.diagnostics import read_program

pytestmark = pytest.mark.skipif(HAS_GPU, reason="on a GPU the program is another one")

F16 = jmp.get_policy("params=float32,compute=float16,output=float32")


def assert_in_place(row, leaves):
    """All state is written over the old one; the flags of the last step, a byte a leaf, nobody reads."""
    assert row.aliased_bytes == row.state_bytes - leaves
    assert (row.conditionals, row.host_syncs) == (0, 0)


# The loss scale.


def test_the_step_of_124_leaves_costs_24_kernels_two_bytes_a_parameter_and_nothing_else():
    plain, ours, peer = (loss_scale_cost.CASES["adamw"][1](arm) for arm in ("plain", "jmp_lite", "jmp 0.0.4"))
    assert plain.parameters > 48e6
    assert plain.bytes_a_parameter == pytest.approx(26, abs=0.01)
    assert ours.bytes_a_parameter <= 28.1
    assert ours.kernels <= min(150, plain.kernels + 24)
    assert ours.temporary_bytes < 1e6
    assert_in_place(ours, leaves=124)
    assert peer.kernels > plain.kernels + 150  # A kernel a leaf, or more, is what would be found out.


def some_leaves(count):
    """The first leaves of the case of 124, two a layer."""
    leaves = loss_scale_cost.many_leaves()
    return {name: leaves[name] for name in sorted(leaves)[: count // 2]}


@pytest.mark.parametrize(
    ("tx", "dtype"),
    [(optax.adamw(1e-3), jnp.float32), (optax.sgd(0.1, momentum=0.9), jnp.float16)],
    ids=["adamw, float32 gradients", "sgd"],
)
def test_other_optimizers_and_gradients_cost_as_little(tx, dtype):
    plain, ours = (
        loss_scale_cost.optimizer_case(arm, tx, some_leaves(40), dtype) for arm in ("plain", "jmp_lite")
    )
    read_again = jnp.dtype(dtype).itemsize
    assert ours.bytes_a_parameter <= plain.bytes_a_parameter + read_again + 0.1
    assert ours.kernels <= plain.kernels + 24
    assert_in_place(ours, leaves=40)


def test_many_small_leaves_are_checked_together():
    leaves = dict(list(loss_scale_cost.small_leaves().items())[:160])
    plain, ours = (
        loss_scale_cost.optimizer_case(arm, optax.adamw(1e-3), leaves, jnp.float16)
        for arm in ("plain", "jmp_lite")
    )
    assert ours.kernels <= plain.kernels + 24
    assert ours.bytes_a_parameter <= 28.1


def test_behind_a_clip_by_global_norm_the_check_reads_no_gradient_and_adds_one_kernel():
    """One writes down which leaves are finite; the others are the scale, its counter and two counts."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    plain, ours = (
        loss_scale_cost.optimizer_case(arm, tx, some_leaves(40), jnp.float16) for arm in ("plain", "jmp_lite")
    )
    assert ours.bytes_a_parameter <= plain.bytes_a_parameter + 0.01
    assert ours.kernels <= plain.kernels + 7


def test_a_float16_step_with_scaling_beside_a_bfloat16_step_without():
    sizes = {"layers": 8, "width": 256, "vocabulary": 2048, "batch": 8, "length": 256}
    half = loss_scale_cost.gpt_case("jmp_lite", jnp.float16, **sizes)
    brain = loss_scale_cost.gpt_case("plain", jnp.bfloat16, **sizes)
    assert half.bytes_moved <= 1.01 * brain.bytes_moved
    assert half.kernels <= 1.05 * brain.kernels
    assert_in_place(half, leaves=8 * 12 + 6)


def test_a_step_that_keeps_its_old_state_aside_would_be_found_out():
    """The measure works: without donation the same step needs every buffer twice."""
    tx = jmp.with_loss_scale(optax.adamw(1e-3))
    params = some_leaves(4)
    step = lambda grads, params, opt_state: tx.update(grads, opt_state, params)
    compiled = compile_for_gpu(step, params, params, jax.eval_shape(tx.init, params))
    assert read_program(compiled).aliased_bytes == 0


# The casts.


def test_with_policy_sums_bias_gradients_in_float32_at_no_cost():
    """Beside the same layers with their own dtype: the same library calls, no kernel more."""

    class Network(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(64, (3, 3), dtype=self.dtype)(x)).mean((1, 2))
            return nn.Dense(256, dtype=self.dtype)(nn.relu(nn.Dense(512, dtype=self.dtype)(x)))

    x = jax.ShapeDtypeStruct((64, 32, 32, 64), jnp.float16)
    programs = []
    for model in (Network(jnp.float16), with_policy(Network(), jmp.get_policy("c=f16,o=f32"))):
        params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
        loss_fn = lambda params, x, model=model: model.apply({"params": params}, x).astype(jnp.float32).mean()
        programs.append(compile_for_gpu(jax.grad(loss_fn), params, x))
    own_dtype, policy = (program.as_text() for program in programs)
    assert "f16[512]{0} reduce(" in own_dtype
    assert not re.findall(r" f16\[[\d,]*\]\S* reduce\(", policy)
    calls = r"__cublas\$\w+|__cudnn\$\w+|\"epilogue\":\"\w+\""
    assert re.findall(calls, policy) == re.findall(calls, own_dtype)
    assert policy.count(" fusion(") <= own_dtype.count(" fusion(")
    memory = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert memory[1] <= 1.01 * memory[0]  # The partial sums are wider.


TOKENS = jax.ShapeDtypeStruct((8, 256), jnp.int32)
SMALL = GPT(vocabulary=2048, width=256, layers=3)


def loss_of(apply):
    return lambda params, tokens: next_token_loss(apply(params, tokens), tokens)


def by_hand(policy):
    """The model with its parameters cast before use and its logits after, as every guide has it."""
    return loss_of(
        lambda params, tokens: policy.cast_to_output(SMALL.apply(policy.cast_to_compute(params), tokens))
    )


@pytest.fixture(scope="module")
def programs():
    """The gradients of a GPT by several ways, each compiled once for all tests that read it."""
    params = jax.eval_shape(SMALL.init, jax.random.key(0), TOKENS)
    made = {}

    def program(way, dtype=jnp.float16):
        policy = jmp.Policy(jnp.float32, dtype, jnp.float32)
        ways = {
            "float32": lambda: loss_of(SMALL.apply),
            "by hand": lambda: by_hand(policy),
            "policy": lambda: loss_of(with_policy(SMALL, policy).apply),
            "autocast": lambda: jmp.autocast(loss_of(SMALL.apply), dtype),
        }
        if (way, dtype) not in made:
            made[way, dtype] = read_program(compile_for_gpu(jax.value_and_grad(ways[way]()), params, TOKENS))
        return made[way, dtype]

    return program


PRODUCTS = (
    3 * (4 + 2) * 3 + 3
)  # Forward and two backward of each of six products in three blocks, and of the head.


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("way", ["policy", "autocast"])
def test_every_gemm_takes_half_as_with_casts_by_hand_and_no_more_bytes_are_moved(programs, way, dtype):
    full, hand, ours = (programs(each, dtype) for each in ("float32", "by hand", way))
    assert len(ours.products) == len(hand.products) == len(full.products) == PRODUCTS
    half = "bf16" if dtype == jnp.bfloat16 else "f16"
    assert {array.dtype for product in ours.products for array in product.operands} == {half}
    assert {(product.arithmetic, product.accumulation) for product in ours.products} == {(half, "f32")}
    assert ours.tensor_core_share == 1
    assert full.tensor_core_share == 0
    assert {product.arithmetic for product in full.products} == {"tf32"}
    assert ours.bytes_moved <= 1.01 * hand.bytes_moved < full.bytes_moved
    assert ours.temporary_bytes <= 1.01 * hand.temporary_bytes < full.temporary_bytes


# Many devices.


def split(x, mesh):
    """Fully sharded: the longest axis of what is not tiny, split over all devices."""
    axis = max(range(len(x.shape)), key=lambda axis: x.shape[axis], default=None)
    count = mesh.devices.size
    fits = axis is not None and x.size >= 2**14 and x.shape[axis] % count == 0
    return P(*(None,) * axis, "data") if fits else P()


def sharded_program(devices, fully, policy=F16, **settings):
    """A loss-scaled AdamW step of a GPT, the batch split over the devices, two sequences for each."""
    mesh = gpu_mesh({"data": devices})
    place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    tokens = place(jax.ShapeDtypeStruct((2 * devices, 128), jnp.int32), P("data"))
    plain = GPT(vocabulary=2048, width=256, layers=2)
    model = with_policy(plain, policy, **settings)
    tx = jmp.with_loss_scale(optax.adamw(1e-3))
    params = jax.eval_shape(plain.init, jax.random.key(0), tokens)
    state = (params, jax.eval_shape(tx.init, params))
    if fully:
        state = jax.tree.map(lambda x: place(x, split(x, mesh)), state)

    def step(params, opt_state, tokens):
        loss_scale = jmp.get_loss_scale(opt_state)
        loss, grads = jmp.value_and_grad(loss_of(model.apply), loss_scale)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return read_program(compile_for_gpu(step, *state, tokens, donate_argnums=(0, 1), mesh=mesh)), params


def moved(program, *kinds):
    """The bytes that a device sends by collectives of some kinds, by dtype."""
    found = {}
    for each in program.collectives:
        for array in each.arrays:
            if each.kind in kinds:
                found[array.dtype] = found.get(array.dtype, 0) + array.size
    return found


def summed_in_float32(params):
    """The parameters whose gradients `with_policy` sums in float32: all vectors and the embedding."""
    inside = params["params"]
    sums = (inside["Embed_0"], [x for x in jax.tree.leaves(inside) if len(x.shape) == 1])
    return sum(x.size for x in jax.tree.leaves(sums))


@pytest.mark.parametrize("devices", [8, 256])
def test_fully_sharded_gathers_and_reduces_move_half(devices):
    program, params = sharded_program(devices, fully=True)
    total = sum(x.size for x in jax.tree.leaves(params))
    gathered = moved(program, "all-gather")
    assert gathered.get("f16", 0) >= 0.9 * 2 * total / devices
    assert gathered.get("f32", 0) == 0
    reduced = moved(program, "reduce-scatter", "all-reduce")
    assert reduced["f16"] == pytest.approx(2 * (total - summed_in_float32(params)), rel=0.01)
    assert reduced["f32"] <= 4 * summed_in_float32(params) + 1024
    # The flags of all leaves, once.
    assert len([each for each in program.collectives if "pred" in each.dtypes]) == 1
    assert reduced["pred"] <= 4096


def test_data_parallel_gradients_are_reduced_in_half_and_the_check_needs_no_collective():
    program, params = sharded_program(8, fully=False)
    reduced = moved(program, "all-reduce")
    total = sum(x.size for x in jax.tree.leaves(params))
    assert {each.kind for each in program.collectives} == {"all-reduce"}
    assert reduced["f16"] == pytest.approx(2 * (total - summed_in_float32(params)), rel=0.01)
    assert reduced["f32"] <= 4 * summed_in_float32(params) + 1024
    assert set(reduced) == {"f16", "f32"}  # Every device has all gradients and sees the same.

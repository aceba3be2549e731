"""What jmp_lite costs in the program that an H100 would run; needs `pip install -e ".[h100]"`, and no GPU.

The figures are read off programs compiled here and now: a test fails when one gets worse.
"""

import functools
import importlib.util
import math
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from jmp_lite.linen import with_policy
from tests.support.jaxprs import equations

if importlib.util.find_spec("jax_cuda13_plugin") is None:
    pytest.skip('needs pip install -e ".[h100]"', allow_module_level=True)

from benchmarks.compiled import float32_results, loss_scale_cost
from benchmarks.compiled.gpt import gpt, gpt_loss
from benchmarks.compiled.h100 import compile_for_gpu, gpu_mesh
from benchmarks.compiled.pages import RESULTS
from benchmarks.compiled.step import moved, training_step
from benchmarks.device import HAS_GPU
from examples.models import bert, gpt2, seq2seq
from examples.models.resnet import ResNet
from examples.models.seq2seq import LSTM
from jmp_lite.programs import compile_for, read_program

pytestmark = pytest.mark.skipif(HAS_GPU, reason="on a GPU the program is another one")


def assert_in_place(row, leaves):
    """All state is written over the old state, except for the flags of the last step, one byte a leaf."""
    assert row.aliased_bytes == row.state_bytes - leaves
    assert (row.conditionals, row.host_syncs) == (0, 0)


# The loss scale.


def test_the_step_of_124_leaves_costs_24_kernels_two_bytes_a_parameter_and_nothing_else():
    plain, ours = (loss_scale_cost.CASES["adamw"][1](arm) for arm in ("plain", "jmp_lite"))
    assert plain.parameters > 48e6
    assert plain.bytes_a_parameter == pytest.approx(26, abs=0.01)
    assert ours.bytes_a_parameter <= 28.1
    assert ours.kernels <= min(150, plain.kernels + 24)
    assert ours.temporary_bytes < 1e6
    assert_in_place(ours, leaves=124)


def test_the_gate_rejects_a_check_with_a_kernel_for_each_leaf():
    """The measure works: jmp checks leaf by leaf."""
    tx, leaves = optax.adamw(1e-3), some_leaves(30)
    plain, peer = (
        loss_scale_cost.optimizer_case(arm, tx, leaves, jnp.float16) for arm in ("plain", "jmp 0.0.4")
    )
    assert peer.kernels > plain.kernels + 30


def some_leaves(count):
    """Returns the first `count` leaves of the case of 124 leaves, two a layer."""
    leaves = loss_scale_cost.many_leaves()
    return {name: leaves[name] for name in sorted(leaves)[: count // 2]}


@pytest.mark.parametrize(
    ("tx", "dtype"),
    [(optax.adamw(1e-3), jnp.float32), (optax.sgd(0.1, momentum=0.9), jnp.float16)],
    ids=["adamw, float32 gradients", "sgd"],
)
def test_other_optimizers_and_gradients_cost_at_most_as_much(tx, dtype):
    plain, ours = (
        loss_scale_cost.optimizer_case(arm, tx, some_leaves(24), dtype) for arm in ("plain", "jmp_lite")
    )
    read_again = jnp.dtype(dtype).itemsize
    assert ours.bytes_a_parameter <= plain.bytes_a_parameter + read_again + 0.1
    assert ours.kernels <= plain.kernels + 24
    assert_in_place(ours, leaves=24)


def test_many_small_leaves_are_checked_together():
    leaves = dict(list(loss_scale_cost.small_leaves().items())[:64])
    plain, ours = (
        loss_scale_cost.optimizer_case(arm, optax.adamw(1e-3), leaves, jnp.float16)
        for arm in ("plain", "jmp_lite")
    )
    assert ours.kernels <= plain.kernels + 24
    assert ours.bytes_a_parameter <= 28.1


def test_the_check_reshards_no_leaf_of_another_sharding():
    """A variadic reduction over leaves of one shape would: XLA gives its operands one sharding."""
    mesh = gpu_mesh({"data": 8})
    specs = (P("data"), P(None, "data")) * 4
    leaves = [
        jax.ShapeDtypeStruct((1024, 768), jnp.float32, sharding=NamedSharding(mesh, spec)) for spec in specs
    ]
    program = read_program(compile_for_gpu(jmp.all_finite, leaves, mesh=mesh))
    assert program.collectives
    assert sum(each.size * each.times for each in program.collectives) <= 8 * 1024


def test_leaves_of_one_shape_are_not_checked_one_by_one():
    leaves = [jax.ShapeDtypeStruct((4096, 1024), jnp.float32)] * 6
    assert read_program(compile_for("h100", jmp.all_finite, leaves)).kernels < len(leaves)


def test_with_clip_norm_the_check_reads_no_gradient():
    """The norm is the check. The other kernels are the scale, the counts, the norm and the flags."""
    plain, ours = (
        loss_scale_cost.optimizer_case(arm, optax.adamw(1e-3), some_leaves(24), jnp.float16, clip_norm=1.0)
        for arm in ("plain", "jmp_lite")
    )
    assert ours.bytes_a_parameter <= plain.bytes_a_parameter + 0.01
    assert ours.kernels <= plain.kernels + 8


def test_a_scaled_float16_step_costs_little_more_than_a_bfloat16_step():
    sizes = {"layers": 1, "width": 256, "vocabulary": 2048, "batch": 8, "length": 256}
    half = loss_scale_cost.gpt_case("jmp_lite", jnp.float16, **sizes)
    brain = loss_scale_cost.gpt_case("plain", jnp.bfloat16, **sizes)
    assert half.bytes_moved <= 1.01 * brain.bytes_moved
    assert half.kernels <= brain.kernels + 24
    assert_in_place(half, leaves=12 + 4)


def test_the_gate_rejects_a_step_that_copies_its_old_state():
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


def step_of(model, casts, *inputs):
    """The gradients of the mean of a model, with its statistics, in the program for an H100."""
    if casts == "policy":
        model = with_policy(model, jmp.get_policy("c=f16,o=f32"))

    def loss(params, statistics, *inputs):
        outputs, _ = model.apply({"params": params, **statistics}, *inputs, mutable=list(statistics))
        return jnp.mean(outputs)

    statistics = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    params = statistics.pop("params")
    fun = jmp.autocast(loss, jnp.float16) if casts == "autocast" else loss
    return compile_for_gpu(jax.grad(fun), params, statistics, *inputs)


SMALL_MODELS = {
    "LSTM": (nn.Sequential([LSTM(256), nn.Dense(256)]), (64, 20, 256), 1.0),
    # The last activation stays in float32, since only a mean reads it. A deep ResNet has one of many.
    "ResNet": (ResNet(classes=64, stages=(2, 1), features=32), (32, 64, 64, 3), 1.07),
}


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_autocast_moves_and_holds_as_little_as_a_policy(name):
    model, shape, limit = SMALL_MODELS[name]
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    policy, ours = (read_program(step_of(model, casts, x)) for casts in ("policy", "autocast"))
    assert ours.bytes_moved <= limit * policy.bytes_moved
    assert ours.temporary_bytes <= limit * policy.temporary_bytes
    assert ours.kernels <= policy.kernels


def test_the_cotangent_of_a_gelu_is_not_stored_in_float32():
    network = nn.Sequential([nn.Dense(1024), nn.gelu, nn.Dense(256), nn.LayerNorm()])
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    assert "= f32[512,1024]" not in _entry(step_of(network, "autocast", x))
    assert "= f16[512,1024]" in _entry(step_of(network, "autocast", x))


def _entry(compiled):
    """The computation that launches the kernels."""
    return compiled.as_text().partition("ENTRY ")[2]


@pytest.mark.parametrize("loss", [bert.loss, gpt2.loss, seq2seq.loss])
def test_the_gradient_of_a_loss_scatters_nothing(loss):
    logits, labels = (jax.ShapeDtypeStruct(*x) for x in (((16, 8, 512), jnp.float32), ((16, 8), jnp.int32)))
    found = {each.primitive.name for each in equations(jax.make_jaxpr(jax.grad(loss))(logits, labels))}
    assert "scatter-add" not in found


TOKENS = jax.ShapeDtypeStruct((8, 256), jnp.int32)
TOKENS_OF_ZERO = np.zeros((8, 256), np.int32)
SMALL = gpt(vocabulary=1280, length=256, width=256, layers=1)


@pytest.fixture(scope="module")
def params():
    return jax.eval_shape(SMALL.init, jax.random.key(0), TOKENS)


def test_a_jitted_step_is_compiled_as_it_is():
    step = jax.jit(lambda w, x, name: {name: w + x @ w}, donate_argnums=0, static_argnums=2)
    w, x = jnp.ones((64, 64), jnp.float16), jax.ShapeDtypeStruct((64, 64), jnp.float16)
    program = read_program(compile_for("h100", step, w, x, "w"))
    assert program.device == "NVIDIA H100 80GB HBM3"
    assert [product.arithmetic for product in program.matmuls] == ["f16"]
    assert program.aliased_bytes == w.nbytes
    assert f"on {program.device}: 100.0%" in str(program)


@pytest.mark.parametrize(
    ("setting", "arithmetic"),
    [
        *((name, "tf32") for name in (None, "default", "high", "tensorfloat32")),
        ("highest", "f32"),
        ("float32", "f32"),
    ],
)
def test_which_setting_of_jax_makes_a_float32_product_tf32(setting, arithmetic):
    """The table of docs/choosing.md."""
    matrix = jnp.ones((512, 512))
    with jax.default_matmul_precision(setting):
        program = read_program(compile_for("h100", jax.jit(jnp.matmul), matrix, matrix))
    assert [product.arithmetic for product in program.matmuls] == [arithmetic]


# One forward and two backward: six in the block, and the head.
PRODUCTS = 3 * (6 + 1)


def test_every_gemm_takes_half_and_the_step_moves_at_most_the_bytes_of_casts_by_hand(params):
    """In one test, so that a program that several ways are compared with is compiled once."""

    def program(casts):
        return read_program(
            compile_for_gpu(jax.value_and_grad(gpt_loss(SMALL, casts, jnp.float16)), params, TOKENS)
        )

    full, hand, *ways = (program(casts) for casts in ("none", "by hand", "policy", "autocast"))
    assert len(hand.matmuls) == len(full.matmuls) == PRODUCTS
    assert full.tensor_core_share == 0
    assert {product.arithmetic for product in full.matmuls} == {"tf32"}
    for ours in ways:
        assert len(ours.matmuls) == PRODUCTS
        assert {array.dtype for product in ours.matmuls for array in product.operands} == {"f16"}
        assert {(product.arithmetic, product.accumulation) for product in ours.matmuls} == {("f16", "f32")}
        assert ours.tensor_core_share == 1
        assert ours.bytes_moved <= 1.01 * hand.bytes_moved < full.bytes_moved
        assert ours.temporary_bytes <= 1.01 * hand.temporary_bytes < full.temporary_bytes


@pytest.mark.parametrize("way", ["policy", "autocast"])
def test_no_float32_activation_is_saved_that_casts_by_hand_would_not_save(params, way):
    def saved(casts):
        """The float32 activations, batch x sequence x features, kept for the backward pass; bytes of all."""
        loss = gpt_loss(SMALL, casts, jnp.float16)
        _, pull_back = jax.eval_shape(lambda p: jax.vjp(lambda p: loss(p, TOKENS_OF_ZERO), p), params)
        arrays = [x for x in jax.tree.leaves(pull_back) if math.prod(x.shape) >= 8 * 256 * 256]
        wide = [x for x in arrays if x.dtype == jnp.float32]
        return len(wide), sum(x.size * x.dtype.itemsize for x in arrays)

    (hand, hand_bytes), (ours, our_bytes) = saved("by hand"), saved(way)
    assert ours <= hand
    assert our_bytes <= 1.01 * hand_bytes
    assert hand_bytes < 0.9 * saved("none")[1]


def test_each_weight_is_cast_once_a_step(params):
    loss = gpt_loss(SMALL, "policy", jnp.float16)
    closed = jax.make_jaxpr(jax.value_and_grad(loss))(params, TOKENS_OF_ZERO)
    casts = [
        each.invars[0].aval.shape
        for each in equations(closed)
        if each.primitive.name == "convert_element_type"
        and each.params["new_dtype"] == jnp.float16
        and each.invars[0].aval.dtype == jnp.float32
    ]
    weights = [x.shape for x in jax.tree.leaves(params) if len(x.shape) == 2]
    tokens = (SMALL.vocabulary, SMALL.width)
    for shape in set(weights):
        # The table is looked up and is the head: XLA makes one cast of the two.
        assert casts.count(shape) == weights.count(shape) + (shape == tokens), shape


# Many devices.


@functools.cache
def sharded(devices, full, reduce_dtype=None):
    """A training step of a GPT, two sequences a device, and the shapes of its parameters."""
    model = gpt(vocabulary=2048, length=128, width=256, layers=1)
    loss = gpt_loss(model, "policy", jnp.float16, reduce_dtype)
    return training_step(model, loss, 2 * devices, 128, gpu_mesh({"data": devices}), full)


def sizes(params):
    """Counts all parameters, those of the table of tokens, those of the table of positions, and the vectors.

    The gradients of vectors and of looked-up rows are summed in float32. All others are summed in half: those
    of the table of tokens as the head, and those of the positions, which are broadcast over the batch.
    """
    inside = params["params"]
    parts = (
        inside,
        inside["tokens"],
        inside["positions"],
        [x for x in jax.tree.leaves(inside) if x.ndim == 1],
    )
    return tuple(sum(x.size for x in jax.tree.leaves(part)) for part in parts)


@pytest.mark.cases(fast=1, slow=0)
@pytest.mark.parametrize("devices", [8, 256])
def test_fully_sharded_gathers_and_reduces_move_half(devices):
    program, params = sharded(devices, full=True)
    total, table, _, vectors = sizes(params)
    gathered = moved(program, "all-gather")
    assert set(gathered) == {"f16"}
    assert gathered["f16"] >= 0.9 * 2 * total / devices
    reduced = moved(program, "reduce-scatter", "all-reduce")
    assert reduced["f16"] == pytest.approx(2 * (total - vectors), rel=0.01)
    assert reduced["f32"] <= 4 * (table + vectors) + 1024
    # The flags of the leaves, once.
    assert len([each for each in program.collectives if "pred" in each.dtypes]) == 1
    assert reduced["pred"] <= 4096


def test_data_parallel_gradients_are_reduced_in_half_and_the_check_needs_no_collective():
    program, params = sharded(8, full=False)
    total, table, _, vectors = sizes(params)
    assert {each.kind for each in program.collectives} == {"all-reduce"}
    reduced = moved(program, "all-reduce")
    assert reduced["f16"] == pytest.approx(2 * (total - vectors), rel=0.01)
    assert reduced["f32"] <= 4 * (table + vectors) + 1024
    assert set(reduced) == {"f16", "f32"}  # Every device has all gradients and sees the same.


def test_gradients_are_reduced_in_float32_on_request_by_products_of_half_operands():
    program, params = sharded(8, full=True, reduce_dtype="float32")
    total, table, positions, _ = sizes(params)
    gathered = moved(program, "all-gather")
    assert set(gathered) == {"f16", "f32"}
    assert gathered["f32"] <= 4 * positions  # Positions have no batch, so their rows stay float32.
    reduced = moved(program, "reduce-scatter", "all-reduce")
    assert reduced["f16"] == 2 * table  # `attend` is no Dense layer.
    assert reduced["f32"] == pytest.approx(4 * total, rel=0.01)
    assert program.tensor_core_share == 1


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_loop_reads_rounded_values_in_the_program_too(half):
    """XLA removes a cast to half if a cast to float32 follows it. It does not remove `reduce_precision`.

    So the softmax reads the rounded values, which the backward pass reads too.
    """

    def loss(w, x):
        # A softmax over the last axis is computed from the rounded values in both passes.
        attend = lambda c: jax.nn.softmax((c @ w) @ c.T, axis=0) @ c
        return jnp.sum(jax.lax.scan(lambda c, t: (attend(c + t), None), x @ w, jnp.stack([x, x]))[0])

    w, x = jnp.ones((64, 64)), jnp.ones((32, 64))
    count = lambda fun: compile_for_gpu(jax.jit(fun), w, x).as_text().count("reduce-precision(")
    assert count(jax.grad(jmp.autocast(loss, half))) > count(jax.grad(loss)) == 0


@pytest.mark.parametrize(("length", "drop"), [(257, False), (197, True)])
def test_rows_that_are_no_multiple_of_8_move_no_more_bytes_than_the_other_order(length, drop):
    """ViT has 197 tokens, DINOv2 257: XLA pads the scores, which a second softmax would read as they are."""

    def loss(w, x):
        q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], 36, 64), 3, 2)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q / 8, k))
        if drop:  # A softmax that is not computed from its weights.
            weights = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape), weights, 0)
        return jnp.mean((jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ w[:, :768]) ** 2)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((768, 2304), (16, length, 768))]
    gradient = lambda fun: jax.grad(fun, (0, 1))
    half = jnp.bfloat16
    inside, outside = gradient(jmp.autocast(loss, half)), jmp.autocast(gradient(loss), half)
    moved = [read_program(compile_for("h100", fun, *shapes)).bytes_moved for fun in (inside, outside)]
    # In the other order the dropout of the gradient is a part of one function with what stands around it.
    assert moved[0] <= (1.14 if drop else 1.001) * moved[1]


def test_float32_logits_of_half_operands_cost_the_bytes_of_wider_logits_and_no_kernel():
    """docs/autocast.md has the table. The logits are written once and read three times, 2 bytes wider."""
    half, wide = (float32_results.measure(arm) for arm in list(float32_results.ARMS)[:2])
    logits = float32_results.TOKENS * float32_results.WORDS
    assert {(product.arithmetic, product.on_tensor_cores) for product in wide.program.matmuls} == {
        ("bf16", True)
    }
    assert len(wide.program.matmuls) == len(half.program.matmuls) == 3
    assert wide.program.kernels == half.program.kernels
    assert wide.program.bytes_moved - half.program.bytes_moved == pytest.approx(8 * logits, rel=0.01)
    assert wide.error < 1e-4 < 0.1 < half.error
    page = (RESULTS / "h100-pretended" / "float32_results.txt").read_text()
    # Without the last column: the error is computed here, and differs between CPUs.
    rows = float32_results.table({"half logits": half, 'float32_results="head"': wide}).splitlines()[1:]
    assert all(row.rpartition(" ")[0].rstrip() in page for row in rows)

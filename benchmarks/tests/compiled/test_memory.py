"""Master weights and state in bfloat16 in the program of an H100, and the files of results."""

import functools
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp

if importlib.util.find_spec("jax_cuda13_plugin") is None:
    pytest.skip('needs pip install -e ".[h100]"', allow_module_level=True)

from benchmarks.arms.memory_arms import ARMS
from benchmarks.compiled.h100 import compile_for_gpu, gpu_mesh, on_mesh
from benchmarks.compiled.memory import facts, optimizer_program
from benchmarks.compiled.pages import RESULTS
from benchmarks.device import HAS_GPU
from jmp_lite._memory.rounding import round_to
from jmp_lite.programs import read_program

on_h100 = pytest.mark.skipif(HAS_GPU, reason="on a GPU the program is another one")

# Bytes at rest; bytes that the check and the optimizer move. The gradients are read twice, for the check and
# for the update. All else is read once and written once, except the half parameters, which are there as well.
EXPECTED = {
    "float32 parameters": (12, 3 * 8 + 2 * 2),
    "O2, masters": (14, 3 * 8 + 2 * 2 + 2 * 2),
    "O2, masters, bf16 moments": (10, 8 + 2 * 4 + 2 * 2 + 2 * 2),
    "bf16 moments": (8, 8 + 2 * 4 + 2 * 2),
    "all bf16": (6, 3 * 4 + 2 * 2),
}


@functools.cache
def small(arm):
    leaves = {f"w{i}": jax.ShapeDtypeStruct((1024, 768), jnp.float32) for i in range(4)}
    return facts(*optimizer_program(ARMS[arm], leaves))


@on_h100
@pytest.mark.parametrize("arm", EXPECTED)
def test_every_number_is_read_once_and_written_once(arm):
    at_rest, moved = EXPECTED[arm]
    found = small(arm)
    assert found["bytes_at_rest"] == at_rest
    assert found["bytes_moved"] == pytest.approx(moved, abs=0.02)
    assert found["temporary_bytes"] < 2e4
    assert found["in_place"] > 0.9999


@on_h100
@pytest.mark.parametrize("arm", sorted(set(EXPECTED) - {"float32 parameters"}))
def test_no_leaf_costs_one_more_kernel(arm):
    """Four more for all leaves together: the loss scale of float16, the keys."""
    assert small(arm)["kernels"] <= small("float32 parameters")["kernels"] + 4


@on_h100
def test_xla_drops_a_cast_to_half_and_back_but_not_the_rounding():
    """Without the rounding in integers the parameters would not be the masters, rounded."""
    x = jax.ShapeDtypeStruct((1024, 768), jnp.float32)
    casts = compile_for_gpu(lambda x: x.astype(jnp.float16).astype(jnp.float32), x).as_text()
    assert " convert(" not in casts
    rounding = compile_for_gpu(lambda x: round_to(x, np.dtype("float16")), x).as_text()
    assert "round-nearest-even" in rounding


@on_h100
def test_under_fsdp_the_half_parameters_are_gathered_as_they_rest():
    mesh = gpu_mesh({"data": 8})
    tx = jmp.with_loss_scale(jmp.with_master_params(optax.adamw(1e-3)))
    params = {name: on_mesh(mesh, (1024, 1024), jnp.float16, "data") for name in ("a", "b")}
    axes = lambda leaf: ["data"] if leaf.shape == (1024, 1024) else []
    placed = lambda leaf: on_mesh(mesh, leaf.shape, leaf.dtype, *axes(leaf))
    state = jax.tree.map(placed, jax.eval_shape(tx.init, params))
    x = on_mesh(mesh, (64, 1024), jnp.float16, "data")

    def step(params, state, x):
        def loss_fn(params):
            return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]).astype(jnp.float32) ** 2)

        _, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(state))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    program = read_program(compile_for_gpu(step, params, state, x, donate_argnums=(0, 1), mesh=mesh))
    gathered = [array for each in program.collectives if each.kind == "all-gather" for array in each.arrays]
    assert {array.dtype for array in gathered} == {"f16"}
    # What a device sends of two arrays is an eighth of each.
    assert sum(array.size for array in gathered) <= 3 * 1024 * 1024 * 2
    large = [each for each in program.collectives if each.size > 2**14]
    assert {dtype for each in large for dtype in each.dtypes} == {"f16"}
    assert program.temporary_bytes < 2**24


# The files of results


def test_o2_moves_no_more_bytes_than_float32_parameters_with_a_cast_a_step():
    whole = json.loads((RESULTS / "memory.json").read_text())["gpt"]
    assert whole["O2, masters"]["bytes_moved"] <= whole["float32 parameters"]["bytes_moved"]
    assert whole["O2, masters"]["temporary_bytes"] <= 1.01 * whole["float32 parameters"]["temporary_bytes"]


def test_the_results_have_every_arm_and_three_seeds():
    found = json.loads((RESULTS / "cpu" / "memory.json").read_text())
    for task in found["tasks"].values():
        assert set(task) == set(ARMS)
        assert {len(runs) for runs in task.values()} == {3}


def mean(task, arm, name):
    found = json.loads((RESULTS / "cpu" / "memory.json").read_text())["tasks"][task]
    return np.mean([run[name] for run in found[arm]])


def test_on_text_every_arm_but_one_lies_within_the_spread_of_float32():
    found = json.loads((RESULTS / "cpu" / "memory.json").read_text())["tasks"]["language model"]
    seeds = [run["bits_per_byte"] for run in found["float32"]]
    within = {arm for arm in ARMS if min(seeds) <= mean("language model", arm, "bits_per_byte") <= max(seeds)}
    assert within == set(ARMS) - {"all bf16, to nearest"}
    assert min(run["bits_per_byte"] for run in found["all bf16, to nearest"]) > max(seeds)


@pytest.mark.parametrize("arm", sorted(set(ARMS) - {"float32", "all bf16, to nearest"}))
def test_digits_end_within_half_a_percent_of_float32(arm):
    assert abs(mean("digits", arm, "accuracy") - mean("digits", "float32", "accuracy")) <= 0.5

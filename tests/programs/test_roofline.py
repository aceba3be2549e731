"""The estimate of a step's time."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jmp_lite.programs import Launch, Program, compile_for, mesh_for, read_program, roofline
from jmp_lite.programs._gpus import DESCRIPTIONS, DEVICES, PRECISIONS
from jmp_lite.programs._roofline import module_of
from tests.support.compiled_programs import ROWS, TWO_WEIGHTS, two_modules


def program(*launches):
    """A program of these kernels, without products to list."""
    kernels = sum(launch.times for launch in launches)
    return Program("GPU", (), (), launches, kernels, 0, 0, 0, 0, 0, 0, ())


def launch(operation, flops=0, moved=0, float32=0, half=0, times=1):
    return Launch(operation, operation, flops, moved, float32, half, times)


def test_the_balance_of_a_v100_is_the_one_of_nvidias_guide():
    """125 TFLOPS and 900 GB/s are 139 FLOPs a byte."""
    assert round(DEVICES["v100"].balance("float16")) == 139
    assert DEVICES["v100"].balance("float32") == pytest.approx(15.7e12 / 900e9)


def test_docstrings_and_the_page_name_every_gpu():
    page = Path(__file__).parents[2].joinpath("docs", "diagnosis.md").read_text()
    named = {
        "roofline": (roofline.__doc__, DEVICES),
        "compile_for": (compile_for.__doc__, DESCRIPTIONS),
        "mesh_for": (mesh_for.__doc__, DESCRIPTIONS),
        "docs/diagnosis.md": (page, DESCRIPTIONS),
    }
    missing = lambda text, gpus: [gpu for gpu in gpus if f'"{gpu}"' not in text]
    assert not {where: gpus for where, of in named.items() if (gpus := missing(*of))}


# TFLOPS in float32, TF32, bfloat16, float16 and float8 without sparsity, GB/s and GB: NVIDIA's data sheets.
SHEETS = {
    "v100": (15.7, 15.7, 15.7, 125, 125, 900, 16),
    "t4": (8.1, 8.1, 8.1, 65, 65, 300, 16),
    "a100": (19.5, 156, 312, 312, 312, 2039, 80),
    "l4": (30.3, 60, 121, 121, 242.5, 300, 24),
    "h100": (66.9, 494.7, 989.4, 989.4, 1978.9, 3352, 80),
    "h200": (66.9, 494.7, 989.4, 989.4, 1978.9, 4800, 141),
    "b200": (75, 1100, 2250, 2250, 4500, 7700, 180),
}


def test_the_rates_are_those_of_the_data_sheets():
    sheets = {
        name: (*(rate / 1e12 for rate in gpu.flops.values()), gpu.bandwidth / 1e9, gpu.memory / 1e9)
        for name, gpu in DEVICES.items()
    }
    assert sheets == {name: pytest.approx(rates) for name, rates in SHEETS.items()}
    assert list(DEVICES["h100"].flops) == [*PRECISIONS, "float8"]


@pytest.mark.parametrize("gpu", DEVICES.values(), ids=DEVICES)
def test_a_data_sheet_has_a_title_and_an_address(gpu):
    title, address = gpu.source.rsplit(", ", 1)
    assert title.startswith("NVIDIA ")
    assert address.startswith("https://")


def test_the_first_line_names_the_memory_of_the_gpu():
    first, *_ = str(roofline(program(launch("a/dot", 0, 8)), "l4")).split("\n")
    assert first.startswith(
        "an estimate for L4: 24 GB, 0.30 TB/s; in float16 arithmetic is the limit from 403"
    )


def test_a_long_name_is_cut_at_the_start():
    report = str(roofline(program(launch("m" * 32 + "end/dot", 0, 8))))
    assert "..." + "m" * 25 + "end " in report
    assert "m" * 31 + " " in str(roofline(program(launch("m" * 31 + "/dot", 0, 8))))


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_takes_the_time_of_its_arithmetic_or_of_its_bytes(device):
    gpu = DEVICES[device]
    big, flat = launch("a/dot", 10**15, 10**6), launch("b/dot", 10**6, 10**12)
    rows = {row.module: row for row in roofline(program(big, flat), device).modules}
    for precision in PRECISIONS:
        assert rows["a"].seconds[precision] == pytest.approx(1e15 / gpu.flops[precision])
        assert rows["b"].seconds[precision] == pytest.approx(1e12 / gpu.bandwidth)
    assert (rows["a"].bound, rows["b"].bound) == ("arithmetic", "memory")
    assert rows["a"].intensity == 1e9


def test_half_precision_halves_the_float32_arrays_between_kernels_and_nothing_else():
    report = roofline(program(launch("a/add", 0, 1000 * 10**9, float32=400 * 10**9)), "h100")
    (row,) = report.modules
    assert row.seconds["float32"] == row.seconds["tf32"] == pytest.approx(1000 / 3352)
    assert row.seconds["float16"] == row.seconds["bfloat16"] == pytest.approx(800 / 3352)
    assert report.speedup() == pytest.approx(1.25)


def test_a_half_program_in_float32_has_arrays_of_twice_the_width():
    (row,) = roofline(program(launch("a/add", 0, 1000 * 10**9, half=400 * 10**9)), "h100").modules
    assert row.seconds["float16"] == pytest.approx(1000 / 3352)
    assert row.seconds["float32"] == pytest.approx(1400 / 3352)


def test_a_small_kernel_takes_a_launch_and_every_run_counts():
    (row,) = roofline(program(launch("a/add", 0, 8, times=500)), launch_seconds=3e-6).modules
    assert row.bound == "launches"
    assert row.seconds["float16"] == pytest.approx(1.5e-3)
    assert (row.launches, row.bytes_moved) == (500, 4000)


def test_by_amdahl_the_rest_stands_in_the_way():
    """Half of the TF32 time is a product, which float16 runs in half of it; the update does not change."""
    product = launch("model/dot", int(2 * 494.7e12), 0)
    update = launch("optimizer/add", 0, 2 * 3352 * 10**9)
    report = roofline(program(update, product), "h100")
    assert report.speedup() == pytest.approx(2 / 1.5)
    assert [row.module for row in report.modules] == ["optimizer", "model"]
    assert [row.fixed for row in report.modules] == pytest.approx([2.0, 0.0])
    text = str(report)
    assert "float16 is at best 1.33 times as fast as TF32" in text
    assert "no faster in float16 than in TF32, 67% of the time: optimizer 2000.000 ms" in text


def test_modules_are_scopes_without_transforms():
    assert module_of("transpose(jvp(GPT))/blocks_0/attention/dot_general", 3) == "GPT/blocks_0/attention"
    assert module_of("jvp(jmp_lite.autocast)/head/jit(relu)/max", 1) == "head"
    assert module_of("transpose(jvp(a))/mul;b/add", 2) == "a"
    again = "transpose(jvp(a))/b/jvp(a)/b/checkpoint/rematted_computation/head/dot_general"
    assert module_of(again, 3) == "a/b/head"
    assert module_of("jvp(a)/while/body/eval_jaxpr/b/b/checkpoint/head/mul", 3) == "a/b/head"
    assert module_of("jvp(a)/cond/branch_1_fun/head/mul", 3) == "a/branch_1_fun/head"
    assert module_of("", 2) == "(no scope)"


@pytest.mark.parametrize("name", ["body", "cond", "while", "remat"])
def test_a_scope_of_the_users_may_have_the_name_of_a_loop_or_of_its_parts(name):
    def step(x, _):
        with jax.named_scope(name), jax.named_scope("attn"):
            return x @ x, None

    loss = lambda x: jax.lax.scan(step, x, None, length=3)[0].sum()
    compiled = jax.jit(jax.grad(loss)).lower(jnp.ones((8, 8))).compile()
    operations = [launch.operation for launch in read_program(compiled).launches]
    assert f"{name}/attn" in {module_of(operation, 2) for operation in operations}
    assert "while" not in {module_of(operation, 1) for operation in operations} - {name}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "k80"}, "The device should be one of 'v100', .*. Got 'k80'"),
        ({"depth": 0}, "depth should be 1 or more"),
        ({"launch_seconds": -1}, "launch_seconds 0 or more"),
    ],
)
def test_bad_options_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        roofline(program(), **options)


def test_what_is_no_program_is_an_error():
    for given in (None, "h100", jax.jit(jnp.sin)):
        with pytest.raises(TypeError, match=r"takes what read_program\(step.lower.* returns\. Got"):
            roofline(given)


def test_the_launches_of_a_program_add_up_to_it():
    found = read_program(jax.jit(jax.grad(two_modules)).lower(TWO_WEIGHTS, ROWS).compile())
    assert sum(each.times for each in found.launches) == found.kernels > 4
    assert sum(each.times * each.bytes_moved for each in found.launches) == found.bytes_moved
    flops = sum(each.times * each.flops for each in found.launches)
    assert flops == sum(each.times * each.flops for each in found.matmuls) > 0
    assert {"up", "down"} <= {row.module for row in roofline(found, depth=1).modules}


def test_arguments_and_outputs_keep_their_width():
    found = read_program(
        jax.jit(lambda x, y: (x @ y, x)).lower(jnp.ones((64, 64)), jnp.ones((64, 64))).compile()
    )
    assert all(each.float32_bytes == 0 for each in found.launches)
    found = read_program(
        jax.jit(lambda x: jnp.sum(jnp.sort(jnp.sort(x) @ x))).lower(jnp.ones((64, 64))).compile()
    )
    assert any(each.float32_bytes >= 64 * 64 * 4 for each in found.launches)

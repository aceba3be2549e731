"""What `read_program` says of loops, bytes and memory."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from jmp_lite.programs import read_program
from jmp_lite.programs._read import _read
from tests.support.compiled_programs import H100, LT, PROGRAMS, VERSIONS, entry, f32, h100, program, x


@pytest.mark.parametrize("version", VERSIONS)
def test_loops_of_an_h100(version):
    """Five times three, a loop whose length nobody knows, and a conditional."""
    found = h100("loops", version)
    assert [each.times for each in found.matmuls] == [15, 1, 1]
    assert {each.flops for each in found.matmuls} == {2 * 64**3}
    assert found.conditionals == 1
    assert found.host_syncs == ("while, of a length that the device decides", "conditional")


def test_a_scan_counts_as_often_as_it_runs():
    once = program(lambda x: jnp.tanh(x @ x), x((32, 32), f32))
    step = lambda x, _: (jnp.tanh(x @ x), None)
    seven, nine = (program(lambda x, n=n: lax.scan(step, x, length=n)[0], x((32, 32), f32)) for n in (7, 9))
    assert ([p.times for p in seven.matmuls], [p.times for p in nine.matmuls]) == ([7], [9])
    assert seven.matmuls[0].flops == once.matmuls[0].flops == 2 * 32**3
    # Beside the step a loop adds to its counter and compares it.
    assert nine.kernels - seven.kernels == 2 * (once.kernels + 2)
    assert 0 < nine.bytes_moved - seven.bytes_moved - 2 * once.bytes_moved < 2 * 64
    assert (seven.host_syncs, seven.conditionals) == ((), 0)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_scan_moves_a_slice_an_iteration_of_what_it_reads_and_writes(version):
    """tanh(x), x @ w of 64x64 in float16, six times. In 0.12 the product reads w and writes y in place."""
    found = h100("scan", version)
    whole, index = 64 * 64 * 2, 4
    product, tanh, count, compare = 3 * whole, 2 * whole, 2 * index, index + 1
    # Each slice is copied before and after the product, where these are not one with it.
    copies = 2 * (2 * whole + index) if version == "0.10.2" else index
    start = 2 * whole + 2 * index + 6 * whole  # x and the counter are copied, the outputs are zeroed.
    assert found.bytes_moved == 6 * (product + tanh + count + compare + copies) + start
    assert found.kernels == 6 * (4 + 2 * (version == "0.10.2")) + 3
    assert [(each.times, each.flops) for each in found.matmuls] == [(6, 2 * 64**3)]


def test_a_while_loop_of_unknown_length_is_a_host_sync_and_counted_once():
    def loop(x):
        return lax.while_loop(lambda x: x.sum() < 10, lambda x: jnp.tanh(x @ x), x)

    found = program(loop, x((8, 8), f32))
    assert [each.times for each in found.matmuls] == [1]
    assert found.host_syncs == ("while, of a length that the device decides",)
    assert found.conditionals == 0


def test_a_conditional_counts_both_branches_and_syncs():
    def branches(p, x):
        return lax.cond(p, lambda x: x @ x, lambda x: jnp.tanh(x) @ x, x)

    found = program(branches, x((), jnp.bool_), x((8, 8), f32))
    assert [each.times for each in found.matmuls] == [1, 1]
    assert (found.conditionals, found.host_syncs) == (1, ("conditional",))

    def branches(i, x):
        return lax.switch(i, [jnp.sin, lambda x: x @ x, jnp.cos], x)

    found = program(branches, x((), jnp.int32), x((8, 8), f32))
    assert (len(found.matmuls), found.conditionals) == (1, 1)


def test_calls_back_to_python_are_host_syncs():
    def pure(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((8,), f32), x) * 2

    def debug(x):
        jax.debug.callback(lambda x: None, x)
        return x * 2

    for fun in (pure, debug):
        (reason,) = program(fun, x((8,), f32)).host_syncs
        assert "callback" in reason
    assert program(lambda x: x * 2, x((8,), f32)).host_syncs == ()


# Bytes.


def test_a_kernel_reads_and_writes_each_array_once():
    found = program(lambda a, b: jnp.tanh(a) * a + b, x((512, 512), f32), x((512, 512), f32))
    assert (found.kernels, found.bytes_moved) == (1, 3 * 4 * 512 * 512)


@pytest.mark.parametrize("version", VERSIONS)
def test_lookups_updates_and_copies_of_a_table_on_an_h100(version):
    """Of 1000 rows of 256 bytes."""
    row = 64 * 4
    lookup = 4 * row + 4 * 4 + 4 * row
    update = row + 4 + row
    added = 4 * row + 4 * row + 4 * 4 + 4 * row
    copy = 2 * 1000 * row
    found = h100("traffic", version)
    assert (found.kernels, found.bytes_moved) == (4, lookup + update + added + copy)


TABLE = x((1000, 64), f32)


ROW = 64 * 4


def test_a_lookup_reads_the_rows_that_it_looks_up():
    found = program(lambda table, places: table[places] * 2, TABLE, x((4,), jnp.int32))
    assert 2 * 4 * ROW + 16 <= found.bytes_moved < 2 * 4 * ROW + 100


def test_a_kernel_that_casts_before_it_slices_reads_the_slice():
    kernel = """%fused (p0: bf16[1000,64]) -> f32[1000,16] {
  %p0 = bf16[1000,64]{1,0} parameter(0)
  %wide = f32[1000,64]{1,0} convert(%p0)
  %rounded = f32[1000,64]{1,0} reduce-precision(%wide), exponent_bits=8, mantissa_bits=7
  ROOT %slice = f32[1000,16]{1,0} slice(%rounded), slice={[0:1000], [0:16]}
}

ENTRY %main (x: bf16[1000,64]) -> f32[1000,16] {
  %x = bf16[1000,64]{1,0} parameter(0)
  ROOT %fusion = f32[1000,16]{1,0} fusion(%x), kind=kLoop, calls=%fused
}"""
    assert _read(kernel, None, H100).bytes_moved == 1000 * 16 * (2 + 4)
    again = kernel.replace(
        "parameter(0)\n  %wide", "parameter(0)\n  %rows = bf16[500,64]{1,0} slice(%p0)\n  %wide", 1
    )
    again = again.replace("1000,64]{1,0} convert(%p0)", "500,64]{1,0} convert(%rows)").replace(
        "f32[1000,", "f32[500,"
    )
    assert _read(again, None, H100).bytes_moved == 500 * 16 * (2 + 4)
    whole = kernel.replace("ROOT %slice", "%slice").replace("%rounded = ", "ROOT %rounded = ")
    assert _read(whole, None, H100).bytes_moved == 1000 * (64 * 2 + 16 * 4)


def test_an_update_in_place_writes_the_slice_and_one_that_is_not_copies_the_rest():
    update = lambda table, new, i: lax.dynamic_update_slice(table, new * 2, (i, jnp.int32(0)))
    args = TABLE, x((1, 64), f32), x((), jnp.int32)
    assert 2 * ROW < program(update, *args, donate_argnums=0).bytes_moved < 2 * ROW + 100
    assert 2 * 1001 * ROW < program(update, *args).bytes_moved < 2 * 1001 * ROW + 100


def test_an_update_that_the_kernel_reads_again_reads_all_of_it():
    update = lambda table, new: jnp.tanh(lax.dynamic_update_slice(table, new, (3, 0)))
    found = program(update, TABLE, x((1, 64), f32))
    assert found.kernels == 1
    assert found.bytes_moved == 2 * 1000 * ROW + ROW


def test_an_update_of_what_a_kernel_makes_writes_all_of_it():
    kernel = """%fused (p0: f32[1,64]) -> f32[1000,64] {
  %p0 = f32[1,64]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %zeros = f32[1000,64]{1,0} broadcast(%zero), dimensions={}
  %place = s32[] constant(3)
  ROOT %update = f32[1000,64]{1,0} dynamic-update-slice(%zeros, %p0, %place, %place)
}

ENTRY %main (new: f32[1,64]) -> f32[1000,64] {
  %new = f32[1,64]{1,0} parameter(0)
  ROOT %fusion = f32[1000,64]{1,0} fusion(%new), kind=kLoop, calls=%fused
}"""
    assert _read(kernel, None, H100).bytes_moved == 1001 * ROW
    in_place = kernel.replace("broadcast(%zero), dimensions={}", "parameter(1)")
    in_place = in_place.replace("fusion(%new)", "fusion(%new, %new)")
    assert _read(in_place, None, H100).bytes_moved == 2 * ROW


def test_updates_and_lookups_outside_kernels_count_as_inside():
    start = "  %t = f32[1000,64]{1,0} parameter(0)", "  %i = s32[] parameter(1)"
    new = "  %n = f32[1,64]{1,0} parameter(2)"
    update = "  ROOT %u = f32[1000,64]{1,0} dynamic-update-slice(%t, %n, %i, %i)"
    lookup = "  ROOT %s = f32[1,64]{1,0} dynamic-slice(%t, %i, %i), dynamic_slice_sizes={1,64}"
    assert entry(*start, new, update).bytes_moved == 2 * ROW + 8
    assert entry(*start, lookup).bytes_moved == 2 * ROW + 8


def test_a_copy_counts_and_a_workspace_does_not():
    assert program(jnp.copy, TABLE).bytes_moved == 2 * 1000 * ROW
    text = (PROGRAMS / "scan-0.12.0.1.txt").read_text()
    assert "s8[33554432]" in text  # Of cuBLAS: 32 MB, more than all that is counted.
    assert h100("scan").bytes_moved < 33554432
    # Bytes that the program itself computes do count.
    assert program(jnp.negative, x((1024,), jnp.int8)).bytes_moved == 2048


def test_no_kernel_runs_for_an_array_without_elements():
    empty = program(lambda x: (x * 2, jnp.sum(x)), x((0, 4), f32))
    assert empty.bytes_moved <= 8
    line = "  ROOT %c = f32[0,4]{1,0} copy(%p)"
    assert entry("  %p = f32[0,4]{1,0} parameter(0)", line).kernels == 0
    assert entry("  %p = f32[2,4]{1,0} parameter(0)", line.replace("[0,", "[2,")).kernels == 1


def test_an_asynchronous_operation_counts_once():
    """A start names its operands beside its results."""
    found = entry(
        "  %p = f32[256]{0} parameter(0)",
        "  %s = (f32[256]{0}, f32[256]{0:S(5)}, u32[]) copy-start(%p)",
        "  ROOT %d = f32[256]{0:S(5)} copy-done(%s)",
    )
    assert (found.kernels, found.bytes_moved) == (1, 2 * 1024)
    found = entry(
        "  %p = f32[64,64]{1,0} parameter(0)",
        f"  %s = ((f32[64,64], f32[64,64]), (f16[64,64]), u32[]) custom-call-start(%p, %p), "
        f'custom_call_target="{LT}"',
        "  %u = ((f32[64,64], f32[64,64]), (f16[64,64]), u32[]) custom-call-update(%s)",
        "  ROOT %d = f16[64,64] custom-call-done(%u)",
    )
    assert (found.kernels, found.bytes_moved) == (1, 64 * 64 * (4 + 4 + 2))
    assert [str(each.result) for each in found.matmuls] == ["f16[64,64]"]


# Memory.


def test_memory_with_and_without_donation():
    step = lambda state, grads: (state - 0.1 * grads, (grads * grads).sum())
    args = x((256, 256), f32), x((256, 256), f32)
    state = 256 * 256 * 4
    plain, donated = program(step, *args), program(step, *args, donate_argnums=0)
    assert (plain.argument_bytes, donated.argument_bytes) == (2 * state, 2 * state)
    assert (plain.aliased_bytes, donated.aliased_bytes) == (0, state)
    for each in (plain, donated):
        assert state + 4 <= each.output_bytes <= state + 64  # With the table of a tuple.


def test_temporary_memory_is_the_memory_kept_between_kernels():
    found = program(lambda x: (x @ x) @ (x.T @ x.T), x((128, 128), f32))
    assert 2 * 128 * 128 * 4 <= found.temporary_bytes < 3 * 128 * 128 * 4 + 4096


def test_a_step_of_nnx_jit_is_read_whole():
    """Flax wraps the compiled program. Of `jax.jit(step)` the updates of the modules would be dead code."""

    def step(model, x):
        grads = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))

    x = jnp.ones((4, 8))
    compiled = nnx.jit(step).lower(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), x).compile()
    assert [product.kind for product in read_program(compiled).matmuls] == ["gemm", "gemm"]

"""What `read_program` says of collectives; its text and its errors."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jmp_lite.programs import read_program
from jmp_lite.programs._hlo import HloArray, parse
from jmp_lite.programs._read import _read
from tests.support.compiled_programs import H100, PROGRAMS, VERSIONS, f32, h100, program, x


def shards(fun, *arrays):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    return program(mapped, *arrays)


@pytest.mark.parametrize(
    ("kind", "fun"),
    [
        ("all-reduce", lambda x: lax.psum(x, "d")),
        ("all-gather", lambda x: lax.all_gather(x, "d", tiled=True)),
        ("reduce-scatter", lambda x: lax.psum_scatter(x, "d", tiled=True)),
        ("all-to-all", lambda x: lax.all_to_all(x, "d", 1, 0, tiled=True)),
        ("collective-permute", lambda x: lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)])),
    ],
)
def test_collectives_of_eight_cpus(kind, fun):
    """Each has 8 rows of 128 float32 of the 64."""
    (found,) = shards(fun, x((64, 128), f32)).collectives
    assert (found.kind, found.dtypes, found.size, found.times) == (kind, ("f32",), 8 * 128 * 4, 1)
    assert found.operation.startswith("shard_map/")


def test_a_collective_in_a_scan_counts_as_often_as_it_runs():
    step = lambda x, _: (lax.psum(jnp.tanh(x), "d"), None)
    found = shards(lambda x: lax.scan(step, x, length=5)[0], x((64, 128), f32))
    assert [(each.kind, each.times) for each in found.collectives] == [("all-reduce", 5)]


@pytest.mark.parametrize("version", VERSIONS)
def test_collectives_of_eight_h100s(version):
    """Some are started and waited for later; each is there once."""
    found = h100("collectives", version)
    kinds = {
        "shard_map/psum": ("all-reduce", "f32[8,128]", 8 * 128 * 4, 1),
        "shard_map/all_gather": ("all-gather", "bf16[8,128]", 8 * 128 * 2, 1),
        "shard_map/reduce_scatter": ("reduce-scatter", "f32[8,128]", 8 * 128 * 4, 1),
        "shard_map/all_to_all": ("all-to-all", "f32[8,128]", 8 * 128 * 4, 1),
        "shard_map/ppermute": ("collective-permute", "f32[8,128]", 8 * 128 * 4, 1),
    }
    body = "eval_jaxpr" if version == "0.12.0.1" else "closed_call"
    kinds[f"shard_map/while/body/{body}/psum"] = ("all-reduce", "f32[8,128]", 8 * 128 * 4, 5)
    assert len(found.collectives) == 6
    assert {
        each.operation: (each.kind, *map(str, each.arrays), each.size, each.times)
        for each in found.collectives
    } == kinds
    assert "all-reduce-start" in (PROGRAMS / f"collectives-{version}.txt").read_text()


def test_a_collective_of_several_arrays_and_one_in_a_computation_of_its_own():
    text = """%wrapped (a: f32[16], b: bf16[16]) -> (f32[16], bf16[16]) {
  %a = f32[16]{0} parameter(0)
  %b = bf16[16]{0} parameter(1)
  ROOT %both = (f32[16]{0}, bf16[16]{0}) all-reduce(%a, %b), to_apply=%add
}

ENTRY %main (p: f32[16], q: bf16[16]) -> (f32[16], bf16[16]) {
  %p = f32[16]{0} parameter(0)
  %q = bf16[16]{0} parameter(1)
  %s = ((f32[16], bf16[16]), (f32[16], bf16[16]), u32[]) async-start(%p, %q), calls=%wrapped
  ROOT %d = (f32[16]{0}, bf16[16]{0}) async-done(%s)
}"""
    found = _read(text, None, H100)
    (both,) = found.collectives
    assert (both.kind, both.dtypes, both.size, both.times) == ("all-reduce", ("bf16", "f32"), 96, 1)
    assert (found.kernels, found.bytes_moved) == (0, 0)


# The text.


def test_the_table_names_the_float32_products_among_half_products():
    lines = str(h100("products")).split("\n")
    words = [" ".join(line.split()) for line in lines]
    assert words[0] == "matmul operands multiplies adds in result runs GFLOP"
    table = words[1 : lines.index("in float32 or wider:")]
    assert "gemm bf16 x bf16 bf16 f32 bf16 2 0.0" in table
    assert "gemm f8e4m3fn x f8e4m3fn f8e4m3fn f32 f32 1 0.0" in table
    assert len(table) == 7
    assert lines.count("    dot_general  f32[64,128] x f32[64,128]") == 3
    assert lines.count("    dot_general  f64[64,128] x f64[64,128]") == 1
    share = "on NVIDIA H100 80GB HBM3: 73.3% of the matmuls' FLOPs in 16 bits on Tensor Cores"
    assert share in lines
    assert "11 kernels and library calls, 1.03 MB read and written" in lines


def test_flops_and_runs_in_the_table_are_totals():
    """Forward, and the gradients to the kernel and to the images, of 0.302 GFLOP each."""
    line = str(h100("convolutions")).split("\n")[1]
    assert " ".join(line.split()) == "convolution f16 x f16 f16 f32 f16 3 0.9"
    assert str(h100("loops")).split("\n")[1].split()[-2] == "17"


def test_all_in_float32_is_not_listed_and_more_than_eight_are_counted():
    dots = lambda x: sum(jnp.dot(x, jnp.sin(x + i)) for i in range(10))
    whole = str(program(dots, x((8, 8), f32)))
    assert "wider" not in whole
    assert whole.split("\n")[1].split()[-2] == "10"
    mixed = lambda x, y: (dots(x), lax.dot(y, y, preferred_element_type=jnp.int32))
    lines = str(program(mixed, x((8, 8), f32), x((8, 8), jnp.int8))).split("\n")
    listed = lines[lines.index("in float32 or wider:") + 1 :]
    assert listed[:8] == ["    dot_general  f32[8,8] x f32[8,8]"] * 8
    assert listed[8] == "    and 2 more"


def test_the_totals_of_the_text():
    step = lambda x: x * 2
    text = str(program(step, x((500, 500), f32), donate_argnums=0))
    assert "on cpu: no matmuls" in text
    assert "1 kernels and library calls, 2.00 MB read and written" in text
    assert "memory: 1.00 MB arguments, 1.00 MB outputs (1.00 MB in place), 0.00 MB temporary" in text
    assert text.endswith("0 conditionals, 0 host syncs")
    assert "1 conditionals, 2 host syncs while, of a length that the device decides, conditional" in str(
        h100("loops")
    )
    assert "     5  all-reduce of 0.00 MB in f32" in str(h100("collectives")).split("\n")


def test_on_a_cpu_the_report_does_not_speak_of_tensor_cores():
    x = jnp.ones((8, 8), jnp.float16)
    text = str(read_program(jax.jit(jnp.dot).lower(x, x).compile()))
    assert "on cpu: a CPU computes half precision by way of float32" in text
    assert "Tensor Cores" not in text


# Errors.


def test_a_function_that_is_not_compiled_is_an_error_that_says_what_to_do():
    step = jax.jit(lambda x: x * 2)
    for wrong in (step, step.lower(x((8,), f32)), (lambda x: x)):
        message = r"Got \w+. Write read_program\(step.lower\(\*args\).compile\(\)\)"
        with pytest.raises(TypeError, match=message):
            read_program(wrong)


@pytest.mark.parametrize("text", ["", "nonsense", "module @jit_f { func.func public @main() }"])
def test_no_program_is_a_value_error(text):
    with pytest.raises(ValueError, match="no ENTRY computation was found"):
        parse(text)


# What a program may hold.


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *[("pred", 7), ("s8", 7), ("f8e4m3fn", 7), ("f8e5m2", 7), ("f16", 14), ("bf16", 14), ("f32", 28)],
        *[("c64", 56), ("f64", 56), ("c128", 112), ("s4", 4), ("u4", 4), ("s2", 2), ("f4e2m1fn", 4)],
        *[("token", 0)],
    ],
)
def test_the_bytes_of_seven_of_each_dtype(dtype, size):
    assert HloArray(dtype, (7,)).size == size
    line = f"  ROOT %p = {dtype}[7]{{0}} parameter(0)"
    (found,) = parse(f"ENTRY %main (p: {dtype}[7]) -> {dtype}[7] {{\n{line}\n}}")
    assert found.arrays == (HloArray(dtype, (7,)),)


def test_programs_without_inputs_products_or_outputs():
    constants = program(lambda: (jnp.arange(4.0) * jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.ones((2, 3))))
    assert (constants.argument_bytes, constants.matmuls, constants.tensor_core_share) == (0, (), 1)
    nothing = program(lambda: ())
    assert (nothing.kernels, nothing.bytes_moved, nothing.matmuls) == (0, 0, ())
    nested = program(lambda tree: jax.tree.map(jnp.sin, tree), {"a": (x((3,), f32), [x((), f32)])})
    assert nested.bytes_moved == 2 * (12 + 4)


@pytest.mark.parametrize(
    "name",
    [
        'a{b}"c',
        "a)b(c",
        "back\\slash, =\n %x{",
        " calls=%nothing body=%none",
        "é\u2028\x0bß",
        "}, ROOT %y = f32[",
    ],
)
def test_any_scope_is_read_back(name):
    def step(x):
        with jax.named_scope(name):
            return x @ jnp.tanh(x)

    (matmul,) = program(step, x((8, 8), f32)).matmuls
    assert matmul.operation == f"{name}/dot_general"

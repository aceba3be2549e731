"""Programs for GPUs other than an H100, compiled without one; needs `pip install -e ".[h100]"`."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

if importlib.util.find_spec("jax_cuda13_plugin") is None:
    pytest.skip('needs pip install -e ".[h100]"', allow_module_level=True)

from benchmarks.device import HAS_GPU
from jmp_lite.programs import compile_for, mesh_for, read_program, roofline
from jmp_lite.programs._gpus import DESCRIPTIONS, DEVICES

pytestmark = pytest.mark.skipif(HAS_GPU, reason="compile_for is for a machine without a GPU")

FLOAT16, BFLOAT16, FLOAT32, FLOAT8 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
AMPERE = {FLOAT16: "f16", BFLOAT16: "bf16", FLOAT32: "tf32", FLOAT8: "f16"}
FROM_ADA_ON = {**AMPERE, FLOAT8: "f8e4m3fn"}
# In which dtype a product of each dtype runs.
ARITHMETIC = {
    "t4": {FLOAT16: "f16", BFLOAT16: "f32", FLOAT32: "f32", FLOAT8: "f16"},
    "a100": AMPERE,
    "l4": FROM_ADA_ON,
    "h100": FROM_ADA_ON,
    "h200": FROM_ADA_ON,
    "b200": FROM_ADA_ON,
}


def shape(sizes, dtype):
    return jax.ShapeDtypeStruct(sizes, dtype)


def product(x, w):
    return jax.lax.dot(x, w.T, preferred_element_type=jnp.float32)


@pytest.mark.parametrize("device", DESCRIPTIONS)
@pytest.mark.parametrize("dtype", AMPERE)
def test_the_dtype_in_which_each_gpu_multiplies(device, dtype):
    program = read_program(compile_for(device, product, shape((256, 512), dtype), shape((512, 512), dtype)))
    (gemm,) = program.matmuls
    assert gemm.arithmetic == ARITHMETIC[device][dtype]
    assert gemm.on_tensor_cores == (gemm.arithmetic != "f32")
    assert gemm.flops == 2 * 256 * 512 * 512
    assert device.upper() in program.device
    assert device.upper() in roofline(program, device).device.name


def test_there_is_a_data_sheet_for_each_description():
    assert set(DESCRIPTIONS) == set(ARITHMETIC) == set(DEVICES) - {"v100"}


def test_a_mesh_of_other_gpus():
    mesh = mesh_for("a100", {"data": 4})
    split = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct((64, 512), FLOAT16, sharding=split)
    program = read_program(
        compile_for("a100", lambda w, x: x.T @ (x @ w), shape((512, 512), FLOAT16), x, mesh=mesh)
    )
    assert [collective.kind for collective in program.collectives] == ["all-reduce"]


@pytest.mark.parametrize(
    ("device", "name", "target", "arithmetic"),
    [
        ("b200", "mxfp8", "__cudnn$blockScaledDot", "f8e4m3fn"),
        ("b200", "nvfp4", "__cudnn$blockScaledDot", "f4e2m1fn"),
        # An H100 has no block-scaled product. XLA multiplies in float32.
        ("h100", "mxfp8", None, "tf32"),
    ],
)
def test_a_block_scaled_product(device, name, target, arithmetic):
    scale = {"global_scale": jnp.ones((1,))} if name == "nvfp4" else {}
    configs = [jax.nn.get_scaled_dot_general_config(name, **scale)] * 3
    axes = (((1,), (0,)), ((), ()))

    def multiply(x, w):
        return jax.nn.scaled_dot_general(x, w, axes, preferred_element_type=jnp.float32, configs=configs)

    compiled = compile_for(device, multiply, shape((128, 256), BFLOAT16), shape((256, 512), BFLOAT16))
    program = read_program(compiled)
    (gemm,) = program.matmuls
    assert gemm.target == target or target is None
    assert (gemm.kind, gemm.arithmetic, gemm.on_tensor_cores) == ("gemm", arithmetic, True)
    assert gemm.flops == 2 * 128 * 256 * 512
    assert program.tensor_core_share == (device == "b200")

"""Compiles a jitted step for an H100, or for a mesh of H100s, on a machine that has none.

The result is the real optimized H100 program, for `jmp_lite.diagnostics.read_program`: its library calls,
kernels and memory. The program cannot be run, so it says nothing about time. The command
`pip install -e ".[h100]"` installs what this needs; CUDA and a driver are not needed. On a machine with an
NVIDIA GPU the same functions compile for that GPU.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from benchmarks.device import HAS_GPU

if not HAS_GPU:
    # With the plugin installed, JAX looks for a driver and fails without one.
    jax.config.update("jax_platforms", "cpu")

# An H100 SXM as XLA describes it: a GpuTargetConfigProto in text form.
H100 = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000
  device_memory_size: 84942979072
  l2_cache_size: 52428800
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  ecc_enabled: true
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.28.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def gpu_mesh(axes: Mapping[str, int], pretend: bool = not HAS_GPU) -> Mesh:
    """Returns a mesh of the GPUs of this machine, or of pretended H100s if it has too few.

    Args:
        axes: names and sizes, such as `{"data": 8}`. The mesh has 1 to 8 devices, or a multiple of 8:
            eight on each host.
        pretend: whether the mesh is of pretended H100s even if there are GPUs.

    Raises:
        ValueError: the number of devices is another one.
        RuntimeError: the CUDA plugin of JAX is not installed.
    """
    count = math.prod(axes.values())
    if count < 1 or (count > 8 and count % 8):
        raise ValueError(f"A mesh has 1 to 8 devices or a multiple of 8, eight a host; got {count}.")
    devices = [] if pretend else jax.devices("gpu")[:count]
    if len(devices) < count:
        if importlib.util.find_spec("jax_cuda13_plugin") is None:
            raise RuntimeError('The CUDA plugin of JAX is not installed: pip install -e ".[h100]"')
        hosts, each = (1, count) if count <= 8 else (count // 8, 8)
        devices = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=H100, topology=f"1x{hosts}x{each}"
        ).devices
    shape = tuple(axes.values())
    return Mesh(np.array(devices).reshape(shape), tuple(axes), axis_types=(AxisType.Auto,) * len(shape))


def compile_for_gpu(
    fun: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    mesh: Mesh | None = None,
    pretend: bool = not HAS_GPU,
) -> jax.stages.Compiled:
    """Compiles `jax.jit(fun)` for an H100, or for this machine's GPU if it has one.

    Args:
        fun: a function of arrays.
        args: pytrees of arrays or `ShapeDtypeStruct`s. Only shapes, dtypes and shardings are used. An
            argument without a sharding is replicated.
        donate_argnums: as in `jax.jit`.
        mesh: from `gpu_mesh`, to compile for more than one device.
        pretend: whether to compile for a pretended H100 even if there is a GPU.

    Returns:
        The compiled program, for `read_program`. For a pretended H100 no product is autotuned, so all
        products are those of cuBLAS.

    Raises:
        ValueError: there is no array among the arguments. The arguments carry the device.
        RuntimeError: as in `gpu_mesh`.
    """
    if not jax.tree.leaves(args):
        raise ValueError("Give the function an argument: by the arguments JAX knows what to compile for.")
    if mesh is None:
        whole = SingleDeviceSharding(gpu_mesh({"device": 1}, pretend).devices.item())
    else:
        whole = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> jax.ShapeDtypeStruct:
        given = x.sharding if mesh is not None and isinstance(x, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=given or whole)

    lowered = jax.jit(fun, donate_argnums=donate_argnums).lower(*jax.tree.map(place, args))
    return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False} if pretend else {})

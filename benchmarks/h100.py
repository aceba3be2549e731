"""Compiles a jitted step for an H100 on a machine that has none.

The result is the real optimized H100 program: its library calls, kernels and memory. It cannot be
run, so it says nothing of time. Needs `pip install -e ".[h100]"` (no CUDA, no driver) and, in the
environment, `JAX_PLATFORMS=cpu`, without which JAX looks for the driver.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

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


def compile_for_h100(
    fun: Callable[..., Any], *args: Any, donate_argnums: int | Sequence[int] = ()
) -> jax.stages.Compiled:
    """Compiles `jax.jit(fun)` for one H100.

    Args:
        fun: a function of arrays.
        args: pytrees of arrays or `ShapeDtypeStruct`s; only shapes and dtypes count.
        donate_argnums: as in `jax.jit`.

    Returns:
        The compiled program, for `.as_text()` and `.memory_analysis()`.

    Raises:
        RuntimeError: the CUDA plugin of JAX is not installed.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=H100, topology="1x1x1"
    )
    sharding = SingleDeviceSharding(topology.devices[0])
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    lowered = jax.jit(fun, donate_argnums=donate_argnums).lower(*jax.tree.map(place, args))
    return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})

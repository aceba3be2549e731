"""Compiles a step for a GPU that the machine does not have.

The result is the optimized program for that GPU, with its library calls, kernels and memory. It cannot be
run, so it says nothing about time.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ._gpus import DESCRIPTIONS


def mesh_for(device: str, axes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of GPUs that the machine does not have, for `compile_for`.

    Args:
        device: `"t4"`, `"a100"` (SXM, 80 GB), `"l4"`, `"h100"` (SXM, 80 GB), `"h200"` or `"b200"`.
        axes: names and sizes, such as `{"data": 8}`. The mesh has 1 to 8 devices, or a multiple of 8: eight
            on each host.

    Returns:
        A mesh whose axes have the type `Auto`.

    Raises:
        ValueError: the device is not known, the axes are not names with sizes, or the number of devices is
            not allowed.
        RuntimeError: the CUDA plugin of JAX is not installed.

    Examples:
        With the extra `[h100]` and `JAX_PLATFORMS=cpu`:

        ```python
        mesh = mesh_for("h100", {"data": 8})
        x = jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("data")))
        program = read_program(compile_for("h100", lambda x: x.sum(0), x, mesh=mesh))
        assert program.collectives[0].kind == "all-reduce"
        ```
    """
    if not isinstance(device, str) or device not in DESCRIPTIONS:
        known = ", ".join(map(repr, DESCRIPTIONS))
        raise ValueError(f"The device should be one of {known}. Got {device!r:.80}.")
    if not isinstance(axes, Mapping) or not all(isinstance(size, int) for size in axes.values()):
        raise ValueError(f"mesh_for: axes are names with sizes, such as {{'data': 8}}. Got {axes!r:.80}.")
    count = math.prod(axes.values())
    if count < 1 or (count > 8 and count % 8):
        raise ValueError(f"A mesh has 1 to 8 devices, or a multiple of 8, eight a host. Got {count}.")
    # JAX's own error for a missing plugin does not say what to install.
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise RuntimeError('JAX has no CUDA plugin: pip install -e ".[h100]" in the clone of jmp_lite.')
    hosts, devices = (1, count) if count <= 8 else (count // 8, 8)
    # XLA's form of a topology: groups of hosts, hosts of a group, devices of a host. XLA reads the properties
    # of the GPU from `target_config`, and does not ask the driver: https://github.com/openxla/xla/pull/16913.
    topology: Any = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=DESCRIPTIONS[device], topology=f"1x{hosts}x{devices}"
    )
    devices_on_axes = np.array(topology.devices).reshape(tuple(axes.values()))
    # `Auto` lets XLA choose the shardings inside the program; `Explicit` would make them part of the types.
    return Mesh(devices_on_axes, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def compile_for(
    device: str,
    fun: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    mesh: Mesh | None = None,
) -> jax.stages.Compiled:
    """Compiles a step for a GPU that the machine does not have. `read_program` reads the result.

    It needs the extra `[h100]`, which installs JAX's CUDA plugin without the CUDA libraries. Start Python
    with `JAX_PLATFORMS=cpu`: without that variable JAX looks for a driver, and fails. No matmul is
    autotuned, so all matmuls are those of cuBLAS and cuDNN.

    Args:
        device: `"t4"`, `"a100"` (SXM, 80 GB), `"l4"`, `"h100"` (SXM, 80 GB), `"h200"` or `"b200"`.
        fun: a function of pytrees of arrays, jitted (`jax.jit`) or not.
        args: its arguments: arrays or `jax.ShapeDtypeStruct`s. Only shapes, dtypes and, with a mesh,
            shardings are used. An argument without a shape and a dtype reaches `fun` unchanged.
        donate_argnums: as in `jax.jit`, for a function that is not jitted.
        mesh: a mesh from `mesh_for`, to compile for more than one device. An argument without a sharding is
            replicated.

    Returns:
        The compiled program. It cannot be run.

    Raises:
        ValueError: as in `mesh_for`, or no argument is an array: arrays tell JAX the device.
        TypeError: `fun` is not a function, or it comes first.
        RuntimeError: the CUDA plugin of JAX is not installed.

    Examples:
        With the extra `[h100]` and `JAX_PLATFORMS=cpu`:

        ```python
        w = jax.ShapeDtypeStruct((512, 512), jnp.float16)
        compiled = compile_for("h100", lambda w, x: jnp.tanh(x @ w), w, w)
        (matmul,) = read_program(compiled).matmuls
        assert matmul.on_tensor_cores and matmul.arithmetic == "f16"
        print(roofline(read_program(compiled), "h100"))
        ```
    """
    if callable(device) or not callable(fun):
        raise TypeError(
            "compile_for(device, fun, *args): the device comes first, then the function. "
            f"Got {type(device).__name__} and {type(fun).__name__}."
        )

    def is_array(x):
        return hasattr(x, "shape") and hasattr(x, "dtype")

    if not any(map(is_array, jax.tree.leaves(args))):
        raise ValueError("Give the function an array: by its arrays JAX knows for what to compile.")
    if mesh is None:
        default: Sharding = SingleDeviceSharding(mesh_for(device, {"device": 1}).devices.item())
    else:
        default = NamedSharding(mesh, PartitionSpec())  # Replicated.

    def on_device(x: Any) -> Any:
        if not is_array(x):
            return x
        # The sharding of an array names devices of this machine, so only that of a ShapeDtypeStruct counts.
        counts = mesh is not None and isinstance(x, jax.ShapeDtypeStruct)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=(x.sharding if counts else None) or default)

    jitted: Any = fun if hasattr(fun, "lower") else jax.jit(fun, donate_argnums=donate_argnums)
    # JAX compiles for the devices of the arguments' shardings. It needs no array on them.
    lowered = jitted.lower(*jax.tree.map(on_device, args))
    # XLA chooses between Triton's kernels and cuBLAS, and the tiles of a fusion, by running them, and there
    # is no GPU to run them on. At level 0 it does not (https://github.com/tensorflow/tensorflow/pull/35621),
    # and compiles in three quarters of the time.
    options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
    compiled = lowered.compile(compiler_options=options)
    return getattr(compiled, "compiled", compiled)  # `nnx.jit` wraps what `jax.jit` has compiled.

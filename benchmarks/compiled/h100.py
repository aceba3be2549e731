"""Compiles a step for this machine's GPU, or, without one, for a pretended H100.

`pip install -e ".[h100]"` installs what a pretended H100 needs. A program for it cannot be run, so it says
nothing about time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from benchmarks.device import HAS_GPU
from jmp_lite.programs import compile_for, mesh_for

if not HAS_GPU:
    # With the plugin installed, JAX looks for a driver and fails without one.
    jax.config.update("jax_platforms", "cpu")


def gpu_mesh(axes: Mapping[str, int], pretend: bool = not HAS_GPU) -> Mesh:
    """Returns a mesh of the GPUs of this machine, or of pretended H100s if it has too few.

    Args:
        axes: names and sizes, as in `mesh_for`.
        pretend: whether the mesh is of pretended H100s even if there are GPUs.
    """
    count = math.prod(axes.values())
    devices = [] if pretend else jax.devices("gpu")[:count]
    if len(devices) < count or not count:
        return mesh_for("h100", axes)
    shape = tuple(axes.values())
    return Mesh(np.array(devices).reshape(shape), tuple(axes), axis_types=(AxisType.Auto,) * len(shape))


def on_mesh(mesh: Mesh, shape: Sequence[int], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array that is split over axes of a mesh, as `PartitionSpec(*axes)` says."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*axes)))


def compile_for_gpu(
    fun: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    mesh: Mesh | None = None,
    pretend: bool = not HAS_GPU,
) -> jax.stages.Compiled:
    """Compiles `jax.jit(fun)` for an H100, or for this machine's GPU if it has one.

    Args:
        fun, args, donate_argnums: as in `compile_for`.
        mesh: from `gpu_mesh`, to compile for more than one device.
        pretend: whether to compile for a pretended H100 even if there is a GPU.
    """
    if pretend:
        return compile_for("h100", fun, *args, donate_argnums=donate_argnums, mesh=mesh)
    own = gpu_mesh({"device": 1}, pretend) if mesh is None else mesh
    whole = jax.sharding.NamedSharding(own, jax.sharding.PartitionSpec())

    def on_device(x: Any) -> jax.ShapeDtypeStruct:
        given = x.sharding if mesh is not None and isinstance(x, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=given or whole)

    return jax.jit(fun, donate_argnums=donate_argnums).lower(*jax.tree.map(on_device, args)).compile()

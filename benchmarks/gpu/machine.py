"""Reports the machine, and checks within ten seconds that JAX computes on the GPU.

    python -m benchmarks.gpu.machine

The report has the GPU, its driver, clocks and memory, the cores, the versions, and two ceilings that were
measured: bytes copied a second, and products of 8192 x 8192 matrices.
"""

import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.command import make_parser, write_json
from benchmarks.device import HAS_GPU, clocks, device_name, memory_bytes, versions

PRECISIONS = {"float16": jnp.float16, "bfloat16": jnp.bfloat16, "TF32": jnp.float32, "float32": jnp.float32}


def report() -> dict[str, Any]:
    """Returns the facts of the machine that need no computation."""
    with open("/proc/meminfo") as file:
        memory = int(file.readline().split()[1]) * 1024
    return {
        "device": device_name(),
        "gpu_bytes": memory_bytes() if HAS_GPU else None,
        "clocks": clocks(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "free_disk_bytes": shutil.disk_usage(".").free,
        "versions": versions(),
        "jax_devices": [device.device_kind for device in jax.devices()],
    }


def check() -> float:
    """Computes a product on the default device, and returns the seconds of the first one, with compilation.

    Raises:
        RuntimeError: there is a GPU, and JAX does not use it; or the product is wrong.
    """
    began = time.perf_counter()
    if HAS_GPU and jax.devices()[0].platform != "gpu":
        raise RuntimeError(f"The machine has a GPU, and JAX sees {jax.devices()}.")
    x = jnp.full((256, 256), 2.0, jnp.float16)
    found = float((x @ x)[0, 0])
    if found != 1024:
        raise RuntimeError(f"The product of two matrices of 256 x 256 twos is {found}, not 1024.")
    return time.perf_counter() - began


def seconds_of(fun: Callable[..., jax.Array], *arguments: jax.Array, runs: int = 10) -> float:
    """Returns the seconds of a run of a jitted function, the mean of `runs`."""
    jax.block_until_ready(fun(*arguments))
    began = time.perf_counter()
    for _ in range(runs):
        last = fun(*arguments)
    jax.block_until_ready(last)  # type: ignore[possibly-unbound]
    return (time.perf_counter() - began) / runs


def ceilings(size: int) -> dict[str, float]:
    """Returns the measured rates: `copy` in bytes a second, read and written, and products in FLOP/s.

    Args:
        size: matrices have `size` rows and columns.
    """
    x = jax.random.normal(jax.random.key(0), (size, 2 * size))
    found = {"copy": 2 * x.nbytes / seconds_of(jax.jit(jnp.negative), x)}
    for name, dtype in PRECISIONS.items():
        y = x[:, :size].astype(dtype)
        precision = {"TF32": "tensorfloat32", "float32": "highest"}.get(name)
        with jax.default_matmul_precision(precision):
            found[name] = 2 * size**3 / seconds_of(jax.jit(jnp.matmul), y, y)
    return {name: float(f"{rate:.4g}") for name, rate in found.items()}


def main() -> None:
    """Prints the report and writes it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--size", type=int, default=8192, help="of the matrices that are multiplied")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("out/machine.json"))
    options = parser.parse_args()
    found = report() | {"check_seconds": round(check(), 2)}
    write_json(options.json, found)
    found["ceilings"] = ceilings(options.size)
    found["clocks_busy"] = clocks()
    write_json(options.json, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""What figures depend on: the device, its clocks, and the versions of the packages."""

import importlib.metadata
import pathlib
import platform
import subprocess

HAS_GPU = any(pathlib.Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl"))
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "jmp", "numpy", "torch", "triton")
PACKAGES += ("nvidia-cudnn-cu13", "nvidia-cublas")


def _nvidia_smi(*fields: str) -> list[str] | None:
    """Returns fields of the first GPU; None if there is no GPU. This only reads."""
    try:
        text = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return [value.strip() for value in text.splitlines()[0].split(",")]


def device_name() -> str:
    """Returns the name of the GPU, such as `nvidia-h100-80gb-hbm3`, or `cpu`. This does not start JAX."""
    found = _nvidia_smi("name")
    return "-".join(found[0].lower().split()) if found else "cpu"


def memory_bytes() -> float:
    """Returns the memory of the GPU in bytes; infinity without a GPU, since the host swaps."""
    found = _nvidia_smi("memory.total")
    return float(found[0]) * 2**20 if found else float("inf")


def clocks() -> dict[str, str] | None:
    """Returns clocks in MHz, temperature in degrees Celsius and power in watts; None without a GPU."""
    fields = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "driver_version")
    found = _nvidia_smi(*fields)
    return dict(zip(fields, found)) if found else None


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that are installed."""
    installed = {
        each.name: each.version for each in importlib.metadata.distributions() if each.name in PACKAGES
    }
    return {"python": platform.python_version()} | {
        name: installed[name] for name in PACKAGES if name in installed
    }

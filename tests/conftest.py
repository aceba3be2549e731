"""Settings that must stand before JAX starts: eight virtual CPU devices, and a compiler in a hurry."""

import os

# The tests spend their time in the compiler, not in the programs that it makes.
_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_FLAGS))
os.environ.setdefault("KERAS_BACKEND", "jax")

import hypothesis

hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("ci")

"""Settings that must stand before JAX starts: eight virtual CPU devices for the sharding tests."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("KERAS_BACKEND", "jax")

import hypothesis

hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("ci")

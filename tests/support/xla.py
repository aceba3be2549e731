"""Where XLA for CPUs differs from a program, as docs/limits.md says."""

import jax

# On the newest JAX, other kernels round and sum bfloat16 matmuls elsewhere. The oldest one lacks the flag.
ONE_KERNEL = {} if jax.__version_info__ < (0, 11) else {"xla_cpu_experimental_ynn_fusion_type": ""}


def lacks_matmul(error):
    """Whether an error says that XLA lacks a matmul with half operands and a float32 result."""
    return "Unsupported element type for DotThunk" in str(error)

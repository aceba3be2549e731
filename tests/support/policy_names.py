"""What the tests of policies read off policies and trees."""

import jax.numpy as jnp
import numpy as np

F16, BF16, F32, F64 = (np.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))


def dtypes_of(policy):
    return (policy.param_dtype, policy.compute_dtype, policy.output_dtype)

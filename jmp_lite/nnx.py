"""Flax NNX: `with_policy` returns a model that runs under a policy, with the same parameter tree."""

from ._flax.nnx import with_policy as with_policy

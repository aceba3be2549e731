"""Flax Linen: `with_policy` runs a module under a policy, with the same parameter tree."""

from ._flax.linen import WithPolicy as WithPolicy
from ._flax.linen import with_policy as with_policy

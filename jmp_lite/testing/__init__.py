"""Assertions about precision for a user's own tests, in the manner of chex.

`assert_precision`: the dtype of every matmul of a function, by scope.
`assert_tensor_cores`: the share of a compiled program that Tensor Cores run.
`assert_same_on_all_hosts`: that the processes of a run hold the same values.
`assert_skips_nonfinite`: that a train step leaves its state alone where a batch holds inf or NaN.

The files: `_matmuls`, `_hosts`, `_skips`.
"""

from ._hosts import assert_same_on_all_hosts as assert_same_on_all_hosts
from ._matmuls import assert_precision as assert_precision
from ._matmuls import assert_tensor_cores as assert_tensor_cores
from ._skips import assert_skips_nonfinite as assert_skips_nonfinite

"""Mixed precision training in JAX, functions over pytrees.

Half precision: `autocast`, `full_precision`, `keep_float32`, `explain`.
Flash attention, the model untouched: `fuse_attention`.
What `explain` returns: `AutocastReport`, `AutocastOperation`, `AutocastAttention`.
Loss scales: `DynamicLossScale`, `StaticLossScale`, `NoOpLossScale`, `LossScale`.
True gradients: `value_and_grad`, `grad`; `with_layer_loss_scale`, a loss scale for one layer.
Master weights: `with_master_params`, `get_master_params`, `set_master_params`.
Half precision at rest: `with_half_state`, `with_stochastic_rounding`, `stochastic_round`.
Optimizers: `with_loss_scale`, or `skip_nonfinite` and `unscale`; their state is a `SkipNonfiniteState`.
An old optimizer state under other settings: `migrate_state`.
What the optimizer says: `get_loss_scale`, `grads_finite`, `get_metrics`, `raise_if_stuck`.
Policies: `Policy`, `Rule`, `get_policy`, `half_dtype`, `cast_to_half`, `cast_to_full`, `cast_params`.
Trees: `all_finite`, `select_tree`.

Submodules, loaded when they are first asked for:

`diagnostics`: `doctor`, `find_nonfinite`, `profile_ranges`, `compare_precision`: why is a run NaN?
`programs`: `read_program`, `compile_for` and `roofline`, compiled programs.
`testing`: assertions about precision; needs chex.
`linen`, `nnx`: `with_policy`, a Flax module under a policy.
"""

import typing

from ._autocast.api import autocast as autocast
from ._autocast.keep import full_precision as full_precision
from ._autocast.keep import keep_float32 as keep_float32
from ._cast_params import cast_params as cast_params
from ._dtypes import half_dtype as half_dtype
from ._memory.half_params import with_master_params as with_master_params
from ._memory.half_params import with_stochastic_rounding as with_stochastic_rounding
from ._memory.half_state import with_half_state as with_half_state
from ._memory.master_params import get_master_params as get_master_params
from ._memory.master_params import set_master_params as set_master_params
from ._memory.rounding import stochastic_round as stochastic_round
from ._policy import Policy as Policy
from ._policy import Rule as Rule
from ._policy import get_policy as get_policy
from ._scaling.finite import all_finite as all_finite
from ._scaling.grad import grad as grad
from ._scaling.grad import value_and_grad as value_and_grad
from ._scaling.layer import with_layer_loss_scale as with_layer_loss_scale
from ._scaling.loss_scale import DynamicLossScale as DynamicLossScale
from ._scaling.loss_scale import LossScale as LossScale
from ._scaling.loss_scale import NoOpLossScale as NoOpLossScale
from ._scaling.loss_scale import StaticLossScale as StaticLossScale
from ._scaling.migrate import migrate_state as migrate_state
from ._scaling.optimizer import skip_nonfinite as skip_nonfinite
from ._scaling.optimizer import unscale as unscale
from ._scaling.optimizer import with_loss_scale as with_loss_scale
from ._scaling.state import SkipNonfiniteState as SkipNonfiniteState
from ._scaling.state import get_loss_scale as get_loss_scale
from ._scaling.state import get_metrics as get_metrics
from ._scaling.state import grads_finite as grads_finite
from ._scaling.stuck import raise_if_stuck as raise_if_stuck
from ._tree import cast_to_full as cast_to_full
from ._tree import cast_to_half as cast_to_half
from ._tree import select_tree as select_tree
from ._version import __version__ as __version__

if typing.TYPE_CHECKING:  # These load when they are first asked for (`_names`).
    from . import diagnostics as diagnostics
    from . import linen as linen
    from . import nnx as nnx
    from . import programs as programs
    from . import testing as testing
    from ._attention.api import fuse_attention as fuse_attention
    from ._autocast.report.attentions import AutocastAttention as AutocastAttention
    from ._autocast.report.explain import AutocastReport as AutocastReport
    from ._autocast.report.explain import explain as explain
    from ._autocast.report.operations import AutocastOperation as AutocastOperation
else:
    from ._names import __dir__ as __dir__
    from ._names import __getattr__ as __getattr__

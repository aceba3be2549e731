"""What users are told of autocast.

`advice` says why a product is in float32, and which sizes Tensor Cores run slowly. `flops` counts the
floating point operations of an operation. `gradients` finds the matmul to which a matmul of the backward pass
belongs. `operations` describes the operations of a plan, `attentions` the softmaxes between two matmuls.
`page` shows the operations beside the source. `explain` makes the report.

Other rooms take the names below, and no others. The room loads when `explain` is first asked for.
"""

from .explain import AutocastReport as AutocastReport
from .explain import explain as explain
from .explain import report_of as report_of
from .operations import AutocastOperation as AutocastOperation
from .operations import has_floating as has_floating
from .operations import operations_of as operations_of
from .page import page_of as page_of

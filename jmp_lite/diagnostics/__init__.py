"""Diagnosis of a step: of its values, and of its compiled program.

`find_nonfinite` finds the operation at which a loss or its gradients begin to be not finite. `profile_ranges`
says how much of the values half precision loses, and which loss scale recovers the gradients. Read `_sites`
(the operations at which values are measured), `_tap` and `_calls` (which run a program and measure), `_trace`
(which makes the program of a loss function), then `_extremes`, `_flow`, `_advice`, `_nonfinite` and `_find`,
or `_bits`, `_scales`, `_pages`, `_ranges` and `_profile`. `compare_precision` says which module costs the
accuracy, and which modules to keep in float32: `_fewest`, `_precision`, `_piled`, `_compare`.

`read_program` reads the program that XLA compiled. It says which products run on Tensor Cores and in which
dtypes, and how many kernels, bytes and collectives a step has. Read `_hlo`, `_traffic`, `_products`, then
`_program`. `compile_for` compiles a step for a GPU that the machine does not have. `roofline` estimates the
time of a program, module by module, and `read_profile` reads the times that were measured (`_measured`).

`doctor` asks all of this about a loss function, and says it on one page (`_doctor`).
"""

from ._bits import Fates as Fates
from ._bits import Magnitudes as Magnitudes
from ._compare import compare_precision as compare_precision
from ._compile import compile_for as compile_for
from ._compile import mesh_for as mesh_for
from ._doctor import Diagnosis as Diagnosis
from ._doctor import Finding as Finding
from ._doctor import doctor as doctor
from ._find import find_nonfinite as find_nonfinite
from ._measured import read_profile as read_profile
from ._nonfinite import Nonfinite as Nonfinite
from ._nonfinite import NonfiniteReport as NonfiniteReport
from ._precision import Difference as Difference
from ._precision import ModuleDifference as ModuleDifference
from ._precision import Piled as Piled
from ._precision import PrecisionReport as PrecisionReport
from ._products import Product as Product
from ._profile import profile_ranges as profile_ranges
from ._program import Collective as Collective
from ._program import Launch as Launch
from ._program import Program as Program
from ._program import read_program as read_program
from ._ranges import ModuleRange as ModuleRange
from ._ranges import RangeReport as RangeReport
from ._roofline import ModuleTime as ModuleTime
from ._roofline import Roofline as Roofline
from ._roofline import roofline as roofline
from ._scales import Scales as Scales

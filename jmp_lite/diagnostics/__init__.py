"""Diagnosis of a compiled step.

`read_program` reads the program that XLA compiled. It says which products run on Tensor Cores and in which
dtypes, and how many kernels, bytes and collectives a step has. Read `_hlo`, `_traffic`, `_products`, then
`_program`. `compile_for` compiles a step for a GPU that the machine does not have. `roofline` estimates the
time of a program, module by module, and `read_profile` reads the times that were measured.
"""

from ._compile import compile_for as compile_for
from ._compile import mesh_for as mesh_for
from ._products import Product as Product
from ._measured import read_profile as read_profile
from ._program import Collective as Collective
from ._program import Launch as Launch
from ._program import Program as Program
from ._program import read_program as read_program
from ._roofline import ModuleTime as ModuleTime
from ._roofline import Roofline as Roofline
from ._roofline import roofline as roofline

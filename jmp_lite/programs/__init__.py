"""Compiled programs: what XLA made of a step, and how long it takes. This file lists the public names.

`compile_for` compiles for a GPU that the machine does not have, `read_program` reads the matmuls, kernels,
bytes and collectives of a compiled step, and `roofline` estimates its time. Nothing is run.

The files, in the reading order: `_hlo` (parses the text that XLA prints), `_traffic` (the bytes of a kernel),
`_matmuls` (matmuls and their dtypes), `_program` (the report), `_read` (reads a program), `_gpus`
(data sheets and descriptions), `_compile`, `_roofline`.
"""

from ._compile import compile_for as compile_for
from ._compile import mesh_for as mesh_for
from ._matmuls import Matmul as Matmul
from ._program import Collective as Collective
from ._program import Launch as Launch
from ._program import Program as Program
from ._read import read_program as read_program
from ._roofline import ModuleTime as ModuleTime
from ._roofline import Roofline as Roofline
from ._roofline import roofline as roofline

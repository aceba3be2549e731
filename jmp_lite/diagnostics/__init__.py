"""What the numbers and the compiled program say.

`read_program` answers from the program that XLA compiled: do my products run on Tensor Cores, in which
dtypes, how many kernels, bytes and collectives does a step have?
"""

from ._products import Product as Product
from ._program import Collective as Collective
from ._program import Program as Program
from ._program import read_program as read_program

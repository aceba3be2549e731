"""What an operation adds to the demand: how it uses each of its operands."""

import numpy as np

from ..._jaxpr import read
from ..._jaxpr.primitives import Category
from .op import Op
from .ruling import Ruling
from .wanted import Demand, Wanted


def note_use(op: Op, demand: Demand) -> None:
    """Notes whether an operation reads its operands as numbers, or makes integers of them."""
    # What leads to a cast to integers by element-wise operations and moves alone should be exact: an
    # identifier of 261 is another one than 260, and bfloat16 has only the latter.
    if op.is_cast and not any(map(read.is_floating, op.equation.outvars)):
        demand.read_exactly(op.variables)
        return
    # Comparisons, and other operations that return integers, such as `argmax`, compare numbers with each
    # other. A matmul whose result becomes integers reads numbers too.
    if _is_numeric(op) or any(demand.uses[var].as_number for var in op.equation.outvars):
        demand.read_numbers(op.variables)
    elif any(demand.uses[var].exactly for var in op.equation.outvars):
        demand.read_exactly(op.variables)


def _is_numeric(op: Op) -> bool:
    """Whether an operation reads numbers whatever is made of its results."""
    has_others = not all(map(read.is_floating, op.equation.outvars))
    return op.traits.category is Category.ALLOW or bool(op.equation.effects) or has_others


def wants(
    op: Op, ruling: Ruling, takes_half: bool, gives_half: bool, result: Wanted, half: np.dtype
) -> Wanted:
    """Returns how an operation wants its operands in half. Its results are wanted as `result`."""
    if takes_half:
        return Wanted.BY_PRODUCTS_ONLY
    if op.is_cast:  # A cast of the program to the half dtype rounds the value as a product would.
        return Wanted.INDIRECTLY if op.equation.outvars[0].aval.dtype == half else result
    if ruling.category is Category.MOVE or (ruling.category is Category.INFER and op.traits.selects):
        return result
    # A `tanh` takes half whatever reads it: rounding its operand changes the result by less than rounding a
    # number near 1 does.
    if ruling.category is Category.INFER and op.traits.saturates:
        return Wanted.INDIRECTLY
    return min(result, Wanted.INDIRECTLY) if gives_half else Wanted.NO


def reads_in_float32(op: Op, ruling: Ruling, takes_half: bool, gives_half: bool, demand: Demand) -> bool:
    """Whether an operation computes a float32 value. Its operands should then not be rounded."""
    if takes_half or (ruling.category is Category.INFER and op.traits.saturates):
        return False
    # What passes a value on reads it in float32 where its own readers do.
    keeps = any(demand.uses[var].keep_float32 for var in op.equation.outvars)
    if ruling.category is Category.MOVE or op.traits.selects or op.is_cast:
        return keeps
    return (keeps or not gives_half) and any(map(read.is_float32, op.equation.outvars))

"""Finds the regions of a jaxpr: operations that together are one function of one or two values.

autocast computes a region, such as a GELU or a softmax (`softmaxes`), in float32 from half values, keeps only
these half values, and computes the region again in the backward pass. It does so if only products read the
result, since products take half operands in any case (`Analysis.region_of`).
"""

from collections.abc import Sequence, Set

from ..._jaxpr.read import Var, is_float32
from .op import Op, Readers
from .softmaxes import Barrier, Region, find_softmaxes


def find_regions(ops: Sequence[Op], readers: Readers, with_softmaxes: bool) -> dict[Var, Region]:
    """Returns the regions among the operations `ops` of an open jaxpr, by their results."""
    regions: dict[Var, Region] = {}
    functions: dict[Var, Region] = {}  # Each result of element-wise operations, as a function of operands.
    wide: set[Var] = set()  # Those of which an operation should stay in float32.
    saturated: set[Var] = set()  # The results of saturating operations.
    spread: set[Var] = set()  # Biases and scales that the program broadcasts itself.
    for index, op in enumerate(ops):
        if op.traits.copies:
            spread.update(op.equation.outvars)
        function = _function(index, op, functions, spread)
        if function is None:
            continue
        (out,) = op.equation.outvars
        functions[out] = function
        # A GELU is seven operations. One of them is a power, which runs in float32, and so do those after it.
        # If JAX differentiated them one by one, they would keep four float32 arrays for the backward pass.
        if op.stays_float32 or not wide.isdisjoint(op.variables):
            wide.add(out)
            regions[out] = function
        elif op.traits.saturates:
            saturated.add(out)
        # A gate, such as a SiLU: in half it would be rounded at each operation.
        elif op.name == "mul" and len(op.variables) == 2 and not saturated.isdisjoint(op.variables):
            regions[out] = Region(function.sources, (), function.members, Barrier.NONE)
    return regions | find_softmaxes(ops, readers) if with_softmaxes else regions


def _function(index: int, op: Op, functions: dict[Var, Region], spread: Set[Var]) -> Region | None:
    """Returns an operation as a function of one or two float32 variables of its shape; None if it is none."""
    if not op.traits.pointwise or op.is_listed:  # The user's lists win over regions.
        return None
    shape = op.equation.outvars[0].aval.shape
    if any(var in spread or var.aval.shape != shape for var in op.variables):
        return None
    sources: dict[Var, None] = {}  # A dict for its order, as in `_softmax`.
    members = {index}
    for var in op.variables:
        made = functions.get(var)
        sources.update(dict.fromkeys((var,) if made is None else made.sources))
        members.update(() if made is None else made.members)
    if len(sources) not in (1, 2) or not all(map(is_float32, sources)):
        return None
    return Region(tuple(sources), (), frozenset(members), Barrier.CHECKPOINT)

"""Finds the softmaxes in a jaxpr, with the masks in front of them and the dropout behind them.

A softmax is a region (`regions`): autocast computes it in float32 from half scores, and keeps half values for
the backward pass.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence, Set

from ..._jaxpr.primitives import traits_of
from ..._jaxpr.read import Equation, Var, equations, is_float32, name_of, open_jaxpr
from ..._jaxpr.scopes import is_of_gradient
from ..._jaxpr.softmax import softmax_input
from .op import Op, Readers

# XLA computes a softmax in one kernel on an H100 if its rows have at most this many numbers.
LONGEST_ROW = 16384
# XLA pads other rows for Tensor Cores. A softmax that is computed again would read the scores without the
# padding, which XLA then writes as well: at 257 tokens that is 11 % of the bytes of an attention layer. One
# that keeps its weights alone moves 16 % less there.
ALIGNMENT = 8

_MOVES = {"broadcast_in_dim", "reshape", "squeeze", "stop_gradient", "transpose"}


class Barrier(enum.Enum):
    """What keeps XLA from merging the second computation of a region with the first."""

    CHECKPOINT = "the barriers of `jax.checkpoint`, and one on the cotangents of the sources"
    # With the barriers of `jax.checkpoint` XLA would write the masks, and transpose cotangents.
    SOURCES = "barriers in the derivative, on the sources alone"
    # XLA computes a gate and the element-wise operations around it in one kernel.
    NONE = "no barrier"


@dataclasses.dataclass(frozen=True)
class Region:
    """Operations that are one function of one or two float32 values: an activation function or a softmax."""

    sources: tuple[Var, ...]  # The one or two float32 operands of its size.
    extras: tuple[Var, ...]  # The other operands of a softmax: masks, and float32 scalars.
    members: frozenset[int]  # The indexes of the operations that compute it.
    barrier: Barrier  # That of a softmax is `SOURCES`.
    # Of a softmax that ends with its division: what the exponentials are made of. Its derivative needs the
    # weights alone, and the matmul behind it keeps them in half in any case, so nothing else is kept.
    logits: Var | None = None
    # Of an activation function or a gate: its inputs, which the region may compute itself (`regions`).
    inputs: tuple[Var, ...] = ()

    @property
    def is_chain(self) -> bool:
        """Whether it is neither an activation function nor a gate nor a softmax."""
        return self.barrier is Barrier.NONE and not self.inputs


def find_softmaxes(ops: Sequence[Op], readers: Readers) -> dict[Var, Region]:
    """Returns the softmaxes over the last axis among the operations `ops` of a jaxpr, by their results."""
    # JAX would keep the sum of each row for the backward pass, and XLA would run one more kernel, which reads
    # all scores to write these sums. Without it, a GPT-2's softmaxes move a sixth fewer bytes on an H100.
    # An operation with several results is never a part of a softmax.
    made_by = {op.equation.outvars[0]: n for n, op in enumerate(ops) if len(op.equation.outvars) == 1}
    found: dict[Var, Region] = {}
    of_sums: set[Var] = set()  # The row sums, and the variables that are computed from them.
    for out, index in made_by.items():
        op = ops[index]
        if _starts(op, ops, made_by):
            of_sums.add(out)
        elif not of_sums.isdisjoint(op.variables) and _is_part(op):
            of_sums.add(out)
            # If an element-wise operation reads the result, that one may end the softmax instead.
            if not any(map(_is_elementwise_part, (ops[reader] for reader in readers.operations[out]))):
                softmax = _softmax(out, ops, made_by, of_sums)
                if _is_whole(softmax, index, ops, readers, of_sums):
                    found[out] = softmax
    return found


def _starts(op: Op, ops: Sequence[Op], made_by: Mapping[Var, int]) -> bool:
    """Whether an operation makes the row sums of a softmax of which the program takes no derivative."""
    # In `autocast(grad(f))` the backward pass of the program reads parts of its softmaxes.
    if op.name != "reduce_sum" or op.is_listed or is_of_gradient(op.equation):
        return False
    return _sums_exponentials(op, ops, made_by)


def _is_elementwise_part(op: Op) -> bool:
    return op.name not in _MOVES and _is_part(op)


def _is_whole(softmax: Region, end: int, ops: Sequence[Op], readers: Readers, after: Set[Var]) -> bool:
    """Whether a softmax, which ends with the operation `end`, may be computed as one function."""
    if len(softmax.sources) not in (1, 2):
        return False
    if softmax.logits is None and (_is_padded(ops[end].equation.outvars[0]) or _has_bias(softmax, ops)):
        return False
    made = {ops[member].equation.outvars[0] for member in softmax.members - {end}}
    # If others read the weights too, they would be computed twice in the forward pass.
    return all(readers.are_only(var, softmax.members) for var in made & after)


def _is_padded(weights: Var) -> bool:
    length = max(weights.aval.shape[-1:], default=1)  # The sum of one vector is a scalar.
    return length % ALIGNMENT > 0 and length > ALIGNMENT  # Shorter rows cost nothing.


def _has_bias(softmax: Region, ops: Sequence[Op]) -> bool:
    """Whether a softmax adds a position bias."""
    # If such a softmax were computed again, XLA would write its gradient twice, in float32 and in half.
    readers = [ops[member] for member in softmax.members]
    return any(_is_bias(var, readers) for var in softmax.extras)


def _softmax(out: Var, ops: Sequence[Op], made_by: Mapping[Var, int], after: Set[Var]) -> Region:
    """Returns `out` as a function of the values from which a softmax is computed."""
    members: set[int] = set()
    operands: dict[Var, None] = {}  # A dict for its order: equal layers then give equal regions.
    open_vars = [out]
    while open_vars:
        var = open_vars.pop()
        index = made_by.get(var)
        # The search ends where something other than a part of a softmax, such as a matmul, makes the value.
        if index is None or not (var in after or _is_part(ops[index])):
            operands[var] = None
        elif index not in members:
            members.add(index)
            open_vars.extend(ops[index].variables)
    sources = tuple(var for var in operands if is_float32(var) and _size(var) == _size(out))
    extras = tuple(var for var in operands if var not in sources)
    equations_of = {ops[member].equation.outvars[0]: ops[member].equation for member in members}
    logits = softmax_input(ops[made_by[out]].equation, equations_of)
    return Region(sources, extras, frozenset(members), Barrier.SOURCES, logits)


def _size(var: Var) -> int:
    return math.prod(var.aval.shape)


def _sums_exponentials(op: Op, ops: Sequence[Op], made_by: Mapping[Var, int]) -> bool:
    """Whether a `reduce_sum` sums the rows of an `exp`, masked or not."""
    if not _is_over_rows(op):
        return False
    made = _makers(op, ops, made_by)
    # `jax.nn.softmax(where=...)` sums `where(mask, exp, 0)`.
    if made and _masks(made[0]):
        made = _makers(made[0], ops, made_by)
    return any(each.name in ("exp", "exp2") and not each.is_listed for each in made)


def _masks(op: Op) -> bool:
    return (op.traits.selects or op.name == "jit") and _is_part(op)


def _makers(op: Op, ops: Sequence[Op], made_by: Mapping[Var, int]) -> list[Op]:
    return [ops[made_by[var]] for var in op.variables if var in made_by]


def _is_over_rows(op: Op) -> bool:
    shape = op.equation.invars[0].aval.shape
    is_last = tuple(op.equation.params["axes"]) == (len(shape) - 1,)
    # A symbolic size of `jax.export` cannot be compared with the limit.
    return is_last and isinstance(shape[-1], int) and shape[-1] <= LONGEST_ROW


def _is_part(op: Op) -> bool:
    """Whether a softmax may compute a float32 operation itself. The user's lists win."""
    if op.is_listed or not all(map(is_float32, op.equation.outvars)):
        return False
    if op.name == "reduce_max":
        return _is_over_rows(op)
    return _is_elementwise(op.name, op.equation, op.variables)


def _is_elementwise(name: str, equation: Equation, operands: Sequence[Var]) -> bool:
    if name in _MOVES:
        return True
    if name == "convert_element_type":
        return equation.params["new_dtype"] in ("float32", "bool")
    if name == "jit":  # Such as `jnp.where`, which masks scores or drops weights.
        inside = equations(equation.params["jaxpr"])
        return all(_compares_or_selects(name_of(each), each) for each in inside)
    return traits_of(name).pointwise and any(map(is_float32, operands))


def _compares_or_selects(name: str, equation: Equation) -> bool:
    traits = traits_of(name)
    return traits.compares or traits.selects or _is_elementwise(name, equation, ())


def _is_bias(var: Var, readers: Iterable[Op]) -> bool:
    """Whether an operand of a softmax is a float32 array but not a mask."""
    # Flax's `make_causal_mask` gives a float32 mask by default, and `jnp.where` compares it with zero.
    if not is_float32(var) or _size(var) == 1:
        return False
    return not all(_only_compares(op.equation, var) for op in readers if var in op.variables)


def _only_compares(equation: Equation, var: Var) -> bool:
    """Whether an operation, or the function that it calls, only compares `var` with something."""
    if equation.primitive.name != "jit":
        return traits_of(name_of(equation)).compares
    inside = open_jaxpr(equation.params["jaxpr"])
    # A call may take the same operand several times.
    inner = [inner for inner, outer in zip(inside.invars, equation.invars) if outer is var]
    readers = (each for each in equations(inside) if any(x is y for x in each.invars for y in inner))
    return all(traits_of(name_of(each)).compares for each in readers)

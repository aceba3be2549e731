"""States: what autocast knows of a value. The functions say how an operation changes a state.

Only float32 values are ever changed. The kinds of values are:

- A literal is a number. The number decides whether half can hold it.
- A free value takes the type of the other operands: a broadcast bias, scale or mask, a looked-up embedding, a
  value that is computed from literals alone.
- An open value is an argument of the function, or is computed from arguments. It is float32 until it is
  broadcast or looked up.
- A firm value was computed in float32, because an operation or the user demands it.
- A half value was computed in half.
"""

import dataclasses
import enum

from ..._jaxpr.inner import Role
from ..._jaxpr.read import Var, is_float32
from .op import Op


class Kind(enum.IntEnum):
    """The kind of a value. Among several operands the largest kind decides."""

    OTHER = 0  # Not float32: integers, keys, float64, half values of the user's own. Never changed.
    LITERAL = 1
    FREE = 2
    OPEN = 3
    FIRM = 4
    HALF = 5


@dataclasses.dataclass(frozen=True)
class State:
    """What autocast knows of one value.

    Attributes:
        kind: see `Kind`.
        number: the value of a literal.
        leaf: the value is an argument, at most moved, or holds only 0 and 1. It may be rounded to half.
        binary: the value holds only 0 and 1, such as one-hot labels.
        constant: the value is computed from literals alone.
        full: the value is an argument, at most moved. A rule keeps its products in float32.
        reduced: the value is an argument, at most moved. The product that makes its gradient gives float32.
        float32_result: the value is an argument, at most moved, and this pattern of `float32_results` selects
            it: products of it give float32. Empty for none.
        float8_rule: the value is an argument, at most moved, and this rule of an autocast to float8
            selects it: the pattern, and the dtype that products of it take.
    """

    kind: Kind
    number: float | None = None
    leaf: bool = False
    binary: bool = False
    constant: bool = False
    full: bool = False
    reduced: bool = False
    float32_result: str = ""
    float8_rule: tuple[str, str] | None = None

    @property
    def is_half(self) -> bool:
        """Whether the value was computed in half."""
        return self.kind == Kind.HALF


OTHER = State(Kind.OTHER)
FIRM = State(Kind.FIRM)
HALF = State(Kind.HALF)


def moved(op: Op, state: State, out: Var) -> State:
    """Returns the state of an operand after a move. A broadcast or looked-up argument becomes free."""
    if not is_float32(out) or state.kind != Kind.OPEN:
        return state
    freed = op.frees(out) and (state.leaf or op.name != "gather")
    # The gradient of a broadcast or looked-up argument is a sum of its own, in float32.
    return dataclasses.replace(state, kind=Kind.FREE, reduced=False) if freed else state


def broadcast(op: Op, var: Var, state: State) -> State:
    """Returns the state of an operand that an element-wise operation may broadcast along axes of size 1."""
    freed = state.kind == Kind.OPEN and op.broadcasts(var)
    return dataclasses.replace(state, kind=Kind.FREE) if freed else state


def may_be_rounded(op: Op, var: Var, state: State) -> bool:
    """Whether an operation may take an operand in half: a half value, a literal, or a parameter that it adds.

    A factor may leave the range of half where the product does not.
    """
    return state.kind != Kind.FREE or (state.leaf and var.aval.ndim > 0 and not op.traits.scales)


def entering(state: State, role: Role) -> State:
    """Returns the state of an operand inside the jaxpr that takes it."""
    if role is not Role.CARRY:
        return state
    # A value that changes from one iteration to the next is no constant.
    return OTHER if state.kind == Kind.OTHER else FIRM


def leaving(state: State, carry: bool, wanted: bool) -> State:
    """Returns the state of a result outside its loop. A carry keeps its dtype; a slice may be in half."""
    if state.kind == Kind.OTHER:
        return state
    return FIRM if carry else HALF if wanted and state.kind == Kind.FIRM else state


def join(first: State, second: State) -> State:
    """Returns the state of a result that comes from one of two branches: the wider one."""
    if first == second:
        return first
    if Kind.OTHER in (first.kind, second.kind):
        return OTHER
    if Kind.HALF in (first.kind, second.kind):
        return FIRM
    kind = max(first.kind, second.kind, Kind.FREE)
    float32_result = first.float32_result or second.float32_result
    return State(kind, full=first.full or second.full, float32_result=float32_result)

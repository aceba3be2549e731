"""What autocast knows of a value: plain data, and how each kind of operation changes it.

Only float32 values are ever changed. A state says what autocast knows of one value:

- a literal is a number; the number decides whether half can hold it;
- a free value takes the type of the operands that it meets: a broadcast bias, scale or mask, a looked-up
  embedding, a value that is made of literals alone;
- an open value is an argument of the function, or made of arguments: float32, until it is broadcast or looked
  up;
- a firm value was computed in float32, because an operation or the user demands it;
- a half value was computed in half.
"""

import dataclasses
import enum

from ..._jaxpr.inner import Role
from ..._jaxpr.read import Var, is_float32
from .op import Op


class Kind(enum.IntEnum):
    """The kind of a value, in the order of precedence: the last kind decides. See above."""

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
        leaf: the value is an argument, at most moved, or holds only 0 and 1: half may round it.
        constant: the value is made of literals alone.
        full: the value is an argument, at most moved, and a rule keeps the products of it in float32.
        reduced: the value is an argument, at most moved, and its gradient leaves its product in float32.
    """

    kind: Kind
    number: float | None = None
    leaf: bool = False
    constant: bool = False
    full: bool = False
    reduced: bool = False

    @property
    def is_half(self) -> bool:
        """Whether the value was computed in half."""
        return self.kind == Kind.HALF


OTHER = State(Kind.OTHER)
FIRM = State(Kind.FIRM)
HALF = State(Kind.HALF)


def moved(op: Op, state: State, out: Var) -> State:
    """The state of an operand after a move: a broadcast or looked-up argument becomes free."""
    if not is_float32(out) or state.kind != Kind.OPEN:
        return state
    freed = op.frees(out) and (state.leaf or op.name != "gather")
    # The gradient of a broadcast or looked-up argument is a sum of its own, in float32.
    return dataclasses.replace(state, kind=Kind.FREE, reduced=False) if freed else state


def broadcast(op: Op, var: Var, state: State) -> State:
    """The state of an operand that an element-wise operation may broadcast along axes of size 1."""
    freed = state.kind == Kind.OPEN and op.broadcasts(var)
    return dataclasses.replace(state, kind=Kind.FREE) if freed else state


def may_be_rounded(op: Op, var: Var, state: State) -> bool:
    """Whether an operand may be taken in half: a half value, a literal, or a parameter that is added.

    A factor may leave the range of half where the product does not.
    """
    return state.kind != Kind.FREE or (state.leaf and var.aval.ndim > 0 and not op.traits.scales)


def entering(state: State, role: Role) -> State:
    """The state of an operand inside the jaxpr that takes it."""
    if role is not Role.CARRY:
        return state
    # A value that changes from one iteration to the next is no constant.
    return OTHER if state.kind == Kind.OTHER else FIRM


def leaving(state: State, carry: bool, wanted: bool) -> State:
    """The state of a result outside its loop: a carry keeps its dtype, a slice leaves in half if wanted."""
    if state.kind == Kind.OTHER:
        return state
    return FIRM if carry else HALF if wanted and state.kind == Kind.FIRM else state


def join(first: State, second: State) -> State:
    """The state of a result that may come from either of two branches: the widest."""
    if first == second:
        return first
    if Kind.OTHER in (first.kind, second.kind):
        return OTHER
    if Kind.HALF in (first.kind, second.kind):
        return FIRM
    kind = max(first.kind, second.kind, Kind.FREE)
    return State(kind, full=first.full or second.full)

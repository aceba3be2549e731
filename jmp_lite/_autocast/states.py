"""What autocast knows of a value, and what it decides about an operation: plain data.

Only float32 values are ever changed. The state of one says what autocast knows of it:

- a literal is a number, whose value decides whether half can hold it;
- a free value (a bias, a scale, a mask, an embedding that was looked up, anything made of literals alone)
  takes the type of what it meets;
- an open value is an argument of the function, or made of such: float32, until it is broadcast or looked up;
- a firm value was computed in float32, because an operation demands it or the user does;
- a half value was computed in half.
"""

import collections
import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

from .activations import Anatomy
from .jaxprs import Role, constants, is_float32, is_literal, open_jaxpr
from .rules import BROADCASTS, SCALES, List


class Kind(enum.IntEnum):
    """What is known of a value, from what yields most to what yields least; see above."""

    OTHER = 0  # No float32: integers, keys, float64, what the user made half. Never changed.
    LITERAL = 1
    FREE = 2
    OPEN = 3
    FIRM = 4
    HALF = 5


@dataclasses.dataclass(frozen=True)
class State:
    """What the plan knows of one value.

    Attributes:
        kind: see `Kind`.
        number: the value of a literal.
        leaf: it is an argument or an exact 0 and 1, at most reshaped: it may be rounded to half.
        constant: it was made of literals alone.
        full: it is an argument, at most reshaped, of which a rule keeps every product in float32.
    """

    kind: Kind
    number: float | None = None
    leaf: bool = False
    constant: bool = False
    full: bool = False


OTHER = State(Kind.OTHER)
FIRM = State(Kind.FIRM)
HALF = State(Kind.HALF)


def moved(equation: Any, state: State, out: Any) -> State:
    """The state of a value after a move: what is broadcast or looked up becomes free."""
    if not is_float32(out) or state.kind != Kind.OPEN:
        return state
    source = equation.invars[0].aval
    grown = equation.primitive.name == "broadcast_in_dim" and math.prod(out.aval.shape) > math.prod(
        source.shape
    )
    freed = grown or (state.leaf and equation.primitive.name == "gather")
    return dataclasses.replace(state, kind=Kind.FREE) if freed else state


def broadcast(equation: Any, var: Any, state: State) -> State:
    """The state of an operand that an element-wise operation may broadcast along axes of size 1."""
    if state.kind != Kind.OPEN or equation.primitive.name not in BROADCASTS:
        return state
    grown = math.prod(var.aval.shape) < math.prod(equation.outvars[0].aval.shape)
    return dataclasses.replace(state, kind=Kind.FREE) if grown else state


def may_be_rounded(equation: Any, var: Any, state: State) -> bool:
    """Whether an operand may be taken in half: it is in half, a literal, or a parameter that is added.

    What a value is multiplied by may leave the range of half where the result does not.
    """
    return state.kind != Kind.FREE or (
        state.leaf and var.aval.ndim > 0 and equation.primitive.name not in SCALES
    )


def entering(state: State, role: Role) -> State:
    """The state of an operand inside the jaxpr that takes it."""
    if state.kind == Kind.OTHER:
        # What changes from one iteration to the next is no constant.
        return OTHER if role is Role.CARRY else state
    if role is Role.CARRY:
        return FIRM
    return state


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


class Compute(enum.Enum):
    """The dtype in which an operation takes its float32 operands."""

    HALF = "half"
    FLOAT32 = "float32"
    STORE_HALF = "float32, the result stored in half"
    ACTIVATION = "float32, as the end of a function of half values; the result stored in half"
    EACH = "each operand as it is"


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """How one equation is run.

    Attributes:
        which: the list that decided.
        compute: the dtype of the operands that were traced in float32.
        results: the state of each result.
        reason: why, in words.
        inner: the plans of the jaxprs inside it.
        changed: whether it differs from what was traced.
    """

    which: List
    compute: Compute
    results: tuple[State, ...]
    reason: str
    inner: tuple["Plan", ...] = ()
    changed: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How a jaxpr is run.

    Attributes:
        jaxpr: the jaxpr, closed or open.
        scope: the scopes around it.
        states: of its constants and inputs.
        decisions: one for each equation.
        results: the state of each output.
        demand: what is wanted in half.
        anatomy: the activation functions in it.
        skipped: the places of the equations that activation functions compute themselves.
        changed: whether any decision differs from what was traced.
    """

    jaxpr: Any
    scope: str
    states: tuple[State, ...]
    decisions: tuple[Decision, ...]
    results: tuple[State, ...]
    demand: "Demand"
    anatomy: Anatomy
    skipped: frozenset[int]
    changed: bool

    @property
    def wanted(self) -> tuple[int, ...]:
        """For each input, how many operations want it in half."""
        return tuple(self.demand.uses[var] for var in open_jaxpr(self.jaxpr).invars)

    @property
    def inputs(self) -> tuple[State, ...]:
        """The states of the inputs, without those of the constants."""
        return self.states[len(constants(self.jaxpr)) :]


class Wanted(enum.IntEnum):
    """Whether a value is wanted in half."""

    NO = 0
    YES = 1  # By an operation that passes it on to a product, perhaps with others.
    BY_PRODUCTS = 2  # And by nothing else: whatever reads it would round it.


@dataclasses.dataclass(frozen=True)
class Demand:
    """What a jaxpr wants in half.

    Attributes:
        reads: how often each variable is read.
        uses: how often it is wanted in half.
        products: how often a product, and nothing else, wants it so.
        kept: what an operation reads in float32: rounded for others, it would be rounded for that one too.
    """

    reads: Callable[[Any], int]
    uses: collections.Counter[Any] = dataclasses.field(default_factory=collections.Counter)
    products: collections.Counter[Any] = dataclasses.field(default_factory=collections.Counter)
    kept: set[Any] = dataclasses.field(default_factory=set)

    def of(self, var: Any) -> Wanted:
        """Returns whether the variable `var` is wanted in half."""
        if is_literal(var) or not self.uses[var] or var in self.kept:
            return Wanted.NO
        return Wanted.BY_PRODUCTS if self.products[var] >= self.reads(var) else Wanted.YES

    def of_all(self, outputs: Sequence[Any]) -> Wanted:
        """Returns how the results of one equation are wanted: as the one that is wanted most."""
        return max(map(self.of, outputs), default=Wanted.NO)

    def keep(self, var: Any) -> None:
        """Notes that an operation reads `var` in float32."""
        if not is_literal(var):
            self.kept.add(var)

    def add(self, var: Any, wanted: Wanted, times: int = 1) -> None:
        """Notes that one reader wants `var`, as if it read it `times`."""
        if wanted and not is_literal(var) and is_float32(var):
            self.uses[var] += times
            self.products[var] += wanted is Wanted.BY_PRODUCTS

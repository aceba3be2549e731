"""What a plan consists of: plain data.

The planner decides about each equation once, and writes an action: all that the interpreter needs to run the
equation. The interpreter carries the actions out and decides nothing.
"""

import collections
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

from .jaxprs import Equation, Jaxpr, Var, constants, is_float32, is_literal, open_jaxpr
from .primitives import List
from .states import Kind, State


class Take(enum.Enum):
    """The dtype in which an operation or a call takes a value."""

    AS_IS = "as it was computed"
    FLOAT32 = "float32"
    HALF = "half"
    BROADCAST = "broadcast in float32 to the shape of the result, then cast to half"
    BOTH = "float32, and the same value in half as a further operand"


def conversion(source: State, target: State) -> Take:
    """Returns how a value of the state `source` becomes one of the state `target`."""
    if target.kind == Kind.OTHER or (target.kind == Kind.HALF) == (source.kind == Kind.HALF):
        return Take.AS_IS
    return Take.HALF if target.kind == Kind.HALF else Take.FLOAT32


@dataclasses.dataclass(frozen=True)
class Bind:
    """Runs the operation.

    Attributes:
        operands: how it takes each operand.
        params: the parameters that change.
        narrow: for each result, whether it is cast to half; empty for no cast.
    """

    operands: tuple[Take, ...]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    narrow: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True)
class WideGradient(Bind):
    """Runs a product of half operands whose weight gradients leave their own products in float32.

    Attributes:
        wide: for each operand, whether its gradient is such a weight gradient.
    """

    wide: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True)
class HalfGradient(Bind):
    """Runs an outer product in float32, and the products of its derivatives on half operands."""


@dataclasses.dataclass(frozen=True)
class StoreHalf:
    """Runs the operation in float32 and stores the result in half.

    Attributes:
        widen: for each operand, whether it is cast from half to float32.
        narrow: for each result, whether it is cast to half.
        recompute: whether the backward pass computes the operation again, to keep no float32 operand.
    """

    widen: tuple[bool, ...]
    narrow: tuple[bool, ...]
    recompute: bool


@dataclasses.dataclass(frozen=True)
class PassOn:
    """Gives the operand itself: a cast that changes nothing."""


@dataclasses.dataclass(frozen=True)
class CastDown:
    """Casts to half, and shares the cast with all other readers of the operand in half."""


@dataclasses.dataclass(frozen=True)
class CastUp:
    """Casts up from half as the program does, and remembers the half operand for readers that take half."""


@dataclasses.dataclass(frozen=True)
class MoveLater:
    """Moves the value when it is read: cast before the move, so that all moves of a value share its cast.

    Attributes:
        gathers: whether the move is one between devices, as in `Gather`.
    """

    gathers: bool


@dataclasses.dataclass(frozen=True)
class Gather:
    """Gathers half values from all devices; the gradients that come back are summed in float32."""


@dataclasses.dataclass(frozen=True)
class Activation:
    """Computes a function of half values in float32, and again in the backward pass.

    Attributes:
        sources: the half values.
        equations: the equations that compute the function, in order.
    """

    sources: tuple[Var, ...]
    equations: tuple[Equation, ...]


@dataclasses.dataclass(frozen=True)
class Skip:
    """Runs nothing: only activation functions read the result, and they compute it themselves."""


@dataclasses.dataclass(frozen=True)
class Inside:
    """How one of the jaxprs of a call runs.

    Attributes:
        plan: its plan.
        enter: how it takes each of its operands.
        leave: how the call takes each of its results.
    """

    plan: "Plan"
    enter: tuple[Take, ...]
    leave: tuple[Take, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """Runs an operation that runs jaxprs, each by its plan.

    Attributes:
        handler: the name of its handler in `calls.CALLS`.
        inner: how each jaxpr runs, in the order of `jaxprs.inner_jaxprs`.
        recompute: whether the backward pass of a loop computes element-wise float32 operations again, to
            keep the half values that they are computed from.
    """

    handler: str
    inner: tuple[Inside, ...]
    recompute: bool = False


Action = (
    Bind | StoreHalf | PassOn | CastDown | CastUp | MoveLater | Gather | Activation | Skip | Call
)  # WideGradient and HalfGradient are kinds of Bind.


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """How one equation runs, and why.

    Attributes:
        which: the list that decided.
        action: what the interpreter does.
        results: the state of each result.
        reason: why, in words.
        inner: the plans of the jaxprs inside it.
        changed: whether anything differs from the program as it was traced.
    """

    which: List
    action: Action
    results: tuple[State, ...]
    reason: str
    inner: tuple["Plan", ...] = ()
    changed: bool = False

    @property
    def takes_half(self) -> bool:
        """Whether the operation itself takes half operands."""
        takes = self.action.operands if isinstance(self.action, Bind) else ()
        return Take.HALF in takes or Take.BROADCAST in takes

    @property
    def gives_half(self) -> bool:
        """Whether a result is in half."""
        return any(state.kind == Kind.HALF for state in self.results)


class Wanted(enum.IntEnum):
    """Whether a value is wanted in half."""

    NO = 0
    YES = 1  # By an operation that passes it on to a product, perhaps with other readers.
    BY_A_PRODUCT = 2  # By a product, which would round it, and by other readers that may read it rounded.
    BY_PRODUCTS = 3  # By products alone: each reader would round it.


@dataclasses.dataclass(frozen=True)
class Demand:
    """What a jaxpr wants in half.

    Attributes:
        reads: how often each variable is read.
        uses: how often it is wanted in half.
        products: how often a product, and nothing else, wants it in half.
        kept: the variables that an operation reads in float32. Rounded for other readers, they would be
            rounded for that operation too.
        joined: the variables that a residual sum reads in float32. It may read a rounded one if a product
            reads it too, which casts by hand would round for both.
    """

    reads: Callable[[Var], int]
    uses: collections.Counter[Var] = dataclasses.field(default_factory=collections.Counter)
    products: collections.Counter[Var] = dataclasses.field(default_factory=collections.Counter)
    kept: set[Var] = dataclasses.field(default_factory=set)
    joined: set[Var] = dataclasses.field(default_factory=set)

    def of(self, var: Var) -> Wanted:
        """Returns whether the variable `var` is wanted in half."""
        if is_literal(var) or not self.uses[var] or self.keeps(var):
            return Wanted.NO
        if self.products[var] >= self.reads(var):
            return Wanted.BY_PRODUCTS
        return Wanted.BY_A_PRODUCT if self.products[var] else Wanted.YES

    def keeps(self, var: Var) -> bool:
        """Whether an operation reads `var` in float32 and should not read a rounded value."""
        return var in self.kept or (var in self.joined and not self.products[var])

    def of_all(self, outputs: Sequence[Var]) -> Wanted:
        """Returns how the results of one equation are wanted: as the result that is wanted most."""
        if len(outputs) == 1:
            return self.of(outputs[0])
        return max(map(self.of, outputs), default=Wanted.NO)

    def keep(self, var: Var) -> None:
        """Notes that an operation reads `var` in float32."""
        if not is_literal(var):
            self.kept.add(var)

    def join(self, var: Var) -> None:
        """Notes that a residual sum reads `var` in float32."""
        if not is_literal(var):
            self.joined.add(var)

    def add(self, var: Var, wanted: Wanted, times: int = 1) -> None:
        """Notes that one reader wants `var`, as if it read it `times`."""
        if wanted and not is_literal(var) and is_float32(var):
            self.uses[var] += times
            self.products[var] += wanted >= Wanted.BY_A_PRODUCT


@dataclasses.dataclass(frozen=True)
class Around:
    """The part of a program around a jaxpr, as far as it decides anything.

    Attributes:
        scope: the scopes around the jaxpr.
        backward: whether it runs in a backward pass.
        staying: for each output, whether it stays in the backward pass; empty without a `reduce_dtype`.
    """

    scope: str = ""
    backward: bool = False
    staying: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How a jaxpr runs.

    Attributes:
        jaxpr: the jaxpr, closed or open.
        around: the part of the program around it.
        states: the states of its constants and inputs.
        decisions: one for each equation.
        results: the state of each output.
        demand: what it wants in half.
        changed: whether any decision differs from the program as it was traced.
    """

    jaxpr: Jaxpr
    around: Around
    states: tuple[State, ...]
    decisions: tuple[Decision, ...]
    results: tuple[State, ...]
    demand: Demand
    changed: bool

    @property
    def wanted(self) -> tuple[int, ...]:
        """For each input, how many operations want it in half."""
        return tuple(self.demand.uses[var] for var in open_jaxpr(self.jaxpr).invars)

    @property
    def inputs(self) -> tuple[State, ...]:
        """The states of the inputs, without those of the constants."""
        return self.states[len(constants(self.jaxpr)) :]

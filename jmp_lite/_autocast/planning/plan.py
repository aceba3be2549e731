"""The parts of a plan, as plain data.

The planner decides about each equation once, and writes an action. An action is all that the interpreter
needs to run the equation. The interpreter carries the actions out and decides nothing.
"""

import dataclasses
import enum
from typing import Any

import numpy as np

from ..._float8.action import Float8
from ..._jaxpr.inner import Inner, Role
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import Equation, Jaxpr, Var, constants, open_jaxpr
from .op import Context, Op
from .states import Kind, State
from .wanted import Demand


class Take(enum.Enum):
    """The dtype in which an operation or a call takes a value."""

    AS_IS = "as it was computed"
    FLOAT32 = "float32"
    ROUNDED = "cast up from half, and rounded to half once more"
    HALF = "half"
    BROADCAST = "broadcast in float32 to the shape of the result, then cast to half"
    HOISTED = "float32 for a constant of a loop, with its cast to half in front of the loop"


def conversion(source: State, target: State) -> Take:
    """Returns how a value of the state `source` becomes one of the state `target`."""
    if target.kind == Kind.OTHER:
        return Take.AS_IS
    if target.kind == Kind.HALF:
        return Take.HALF
    return Take.FLOAT32 if source.kind == Kind.HALF else Take.AS_IS


@dataclasses.dataclass(frozen=True)
class Run:
    """Runs the operation."""

    operands: tuple[Take, ...]  # How it takes each operand.
    params: dict[str, Any] = dataclasses.field(default_factory=dict)  # The parameters that change.
    # One flag for each result: whether the result is stored in half. Empty if no result is.
    narrow: tuple[bool, ...] = ()
    # For a product whose derivatives have dtypes of their own, the dtype that the product of each operand's
    # gradient gives. These products take half operands. Empty if JAX differentiates the operation as it runs.
    gradients: tuple[np.dtype, ...] = ()
    # Whether a product that makes a weight gradient runs with its operands in the other order.
    swapped: bool = False
    remat: bool = False  # Whether those who read the result of a sum with a bias compute the sum again.


@dataclasses.dataclass(frozen=True)
class Move:
    """Moves data. Each operand keeps its dtype."""

    operands: tuple[Take, ...]  # How it takes each operand.
    # Whether to move the first operand twice, in float32 and in half. Its gradients then stay float32, so
    # those of a copy are summed in float32. The half operand is cast before the move, so a gather across
    # devices sends half the bytes.
    both: bool = False
    # One flag for each result: whether float32 operations read a half result (`pairs`).
    paths: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True)
class Activation:
    """Computes a function of half values, a GELU or softmax, in float32, and again in the backward pass."""

    sources: tuple[Var, ...]  # The half values.
    equations: tuple[Equation, ...]  # The equations that compute the function, in order.
    # The other operands of a softmax, such as masks; none for a gate, such as a SiLU. None for an activation
    # function that may compute the sum with a bias in front of it again.
    extras: tuple[Var, ...] | None = None
    # Whether a barrier keeps XLA from merging the backward pass's computation with the forward pass's. A gate
    # needs none: the operations around it are element-wise, and XLA computes all of them in one kernel.
    barred: bool = True


@dataclasses.dataclass(frozen=True)
class Skip:
    """Runs nothing."""

    # The index of the operand that is the result of a cast which changes nothing. None if only activation
    # functions read the result, which they compute themselves.
    operand: int | None = None


@dataclasses.dataclass(frozen=True)
class Inside:
    """How one of the jaxprs of a call runs."""

    inner: Inner  # The jaxpr, and which operands it takes.
    plan: "Plan"
    enter: tuple[Take, ...]  # How the jaxpr takes each operand.
    leave: tuple[Take, ...]  # How the call takes each result of the jaxpr.

    @property
    def reads(self) -> tuple[int, ...]:
        """The indexes of the half operands of the call that the jaxpr reads in float32.

        Constants of loops enter in float32. A carry is one value an iteration, without a path beside it.
        """
        invars = open_jaxpr(self.plan.jaxpr).invars
        inputs = zip(self.inner.operands, self.inner.roles, self.enter, invars)
        return tuple(
            index
            for index, role, take, var in inputs
            if role is not Role.CARRY and take is Take.HALF and var in self.plan.pairs.read
        )


@dataclasses.dataclass(frozen=True)
class Call:
    """Runs an operation that runs jaxprs, each by its plan."""

    # The name of the handler in `calls.HANDLERS`. It is the name of the primitive, or of another primitive
    # whose handler runs the operation too.
    handler: str
    inner: tuple[Inside, ...]  # How each jaxpr runs, in the order of `Op.inner`.
    # Whether the backward pass of a loop computes element-wise float32 operations again. The loop then keeps
    # only their half operands.
    recompute: bool = False
    paired: tuple[int, ...] = ()  # The indexes of the half results that leave the call as pairs (`pairs`).
    # The indexes of the operands that a `jax.checkpoint` keeps in half for its backward pass (`checkpoints`).
    kept: tuple[int, ...] = ()


Action = Run | Float8 | Move | Activation | Skip | Call


def rounded(action: Action) -> Action:
    """Returns an action with half operands rounded once more, for a loop that a backward pass computes again.

    By default XLA may leave out a cast down and up again. The forward pass then reads a value that was never
    rounded, and the backward pass reads the rounded value that the loop has kept. A softmax that is computed
    from both is not a softmax. XLA never leaves out a `reduce_precision`.
    """

    def round_all(takes: tuple[Take, ...]) -> tuple[Take, ...]:
        return tuple(Take.ROUNDED if take is Take.FLOAT32 else take for take in takes)

    if isinstance(action, Run):
        return dataclasses.replace(action, operands=round_all(action.operands))
    if isinstance(action, Call):
        inner = (
            dataclasses.replace(inside, enter=round_all(inside.enter), leave=round_all(inside.leave))
            for inside in action.inner
        )
        return dataclasses.replace(action, inner=tuple(inner))
    return action


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """How one operation runs, and why."""

    op: Op
    category: Category  # The category that decided.
    action: Action  # What the interpreter does.
    results: tuple[State, ...]  # The state of each result.
    reason: str  # Why, in words.
    changed: bool = False  # Whether anything differs from the program as it was traced.
    inner: tuple["Plan", ...] = ()  # The plans of the jaxprs inside the operation.

    @property
    def takes(self) -> tuple[Take, ...]:
        """How the operation itself takes each operand. Empty if it has no dtypes of its own, as a call."""
        if isinstance(self.action, Float8):
            return Take.HALF, Take.HALF
        return self.action.operands if isinstance(self.action, (Run, Move)) else ()

    @property
    def takes_half(self) -> bool:
        """Whether the operation itself takes half operands."""
        return Take.HALF in self.takes or Take.BROADCAST in self.takes

    @property
    def in_float8(self) -> bool:
        """Whether the operation itself is a product in fp8."""
        return isinstance(self.action, Float8)

    @property
    def gives_half(self) -> bool:
        """Whether a result is in half."""
        return any(state.is_half for state in self.results)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The half variables of a jaxpr whose gradients need a path in float32. See `planning.pairs`."""

    starts: frozenset[Var]  # The variables at which float32 gradients of several readers meet.
    # The variables that are read in float32: by an operation, by a call, or after a move.
    read: frozenset[Var]
    outputs: tuple[bool, ...]  # Which outputs are half values whose gradients are summed in float32.


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How a jaxpr runs."""

    jaxpr: Jaxpr
    context: Context
    states: tuple[State, ...]  # The states of the constants and inputs.
    decisions: tuple[Decision, ...]  # One for each equation.
    results: tuple[State, ...]
    demand: Demand  # The variables that the jaxpr wants in half.
    pairs: Pairs  # The half variables whose gradients need a path in float32.
    changed: bool  # Whether any decision differs from the program as it was traced.
    float8: bool  # Whether a product runs in fp8.

    @property
    def is_wanted(self) -> tuple[bool, ...]:
        """One flag for each input: whether a product wants the input in half."""
        return tuple(self.demand.products[var] > 0 for var in open_jaxpr(self.jaxpr).invars)

    @property
    def inputs(self) -> tuple[State, ...]:
        """The states of the inputs, without those of the constants."""
        return self.states[len(constants(self.jaxpr)) :]

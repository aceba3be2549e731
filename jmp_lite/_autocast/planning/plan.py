"""The parts of a plan, as plain data.

The planner writes an action for each equation. The interpreter carries the actions out and decides nothing.
"""

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..._jaxpr.inner import Inner, Role
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import Equation, Jaxpr, Var, is_literal, open_jaxpr
from .demand import Analysis
from .op import Op
from .ruling import Why
from .softmaxes import Region
from .states import Kind, State


# `AS_IS` is not `FLOAT32`: a value that was computed in half stays half, and an integer an integer.
class Take(enum.Enum):
    """The dtype in which an operation or a call takes a value."""

    AS_IS = "as it was computed"
    FLOAT32 = "float32"
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
    operands: tuple[Take, ...]  # How it takes each operand.
    params: dict[str, Any] = dataclasses.field(default_factory=dict)  # The parameters that change.
    # One flag for each result: whether the result is stored in half. Empty if no result is.
    narrow: tuple[bool, ...] = ()
    picks: bool = False  # Whether it is a scatter that adds to one element of each row (`_jaxpr/picks.py`).


@dataclasses.dataclass(frozen=True)
class Product:
    """Runs a matmul whose gradients have dtypes of their own. The matmuls of the gradients take half."""

    # JAX would take them from the matmul: its transpose has the same `preferred_element_type`
    # (https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/lax/lax.py#L5850), and so gives half for the
    # gradient of a weight, also where that is then cast up: https://github.com/jax-ml/jax/issues/34330.
    operands: tuple[Take, ...]  # How it takes each operand.
    gradients: tuple[np.dtype, ...]  # The dtype that the matmul of each operand's gradient gives.
    # The parameters that change in the same matmul of half operands, whose transposes the gradients are.
    half_params: dict[str, Any]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)  # The parameters that change.


@dataclasses.dataclass(frozen=True)
class WeightGradient:
    """Runs a matmul of a backward pass that makes the gradient of a weight, and gives float32."""

    operands: tuple[Take, ...]  # How it takes each operand.
    params: dict[str, Any]  # The parameters that change.


@dataclasses.dataclass(frozen=True)
class Move:
    """Moves data. Each operand keeps its dtype."""

    operands: tuple[Take, ...]  # How it takes each operand.
    has_paths: bool = False  # Whether float32 operations read one of its half results (`pairs`).
    picks: bool = False  # Whether it is a lookup of one element of each row (`_jaxpr/picks.py`).


@dataclasses.dataclass(frozen=True)
class MoveBoth:
    """Moves the first operand twice, in float32 and in half, and gives one result in both dtypes."""

    # The gradients of the operand stay float32, so those of a copy are summed in float32. The half operand is
    # cast before the move, so a gather across devices sends half the bytes.
    operands: tuple[Take, ...]  # How it takes each operand; the first is `HALF` if the value is half already.
    picks: bool = False  # As for `Move`.


@dataclasses.dataclass(frozen=True)
class Recompute:
    """Computes a region, such as a GELU, in float32 from half values, and again in the backward pass."""

    region: Region
    equations: tuple[Equation, ...]  # The equations of the region, in order. The last one makes its result.


@dataclasses.dataclass(frozen=True)
class Float8:
    """Runs a product in fp8 (`_float8.action`)."""

    formats: tuple[np.dtype, ...]  # The fp8 dtype of each operand.
    sources: tuple[np.dtype, ...]  # The dtype of each operand before its cast to fp8: float32 or bfloat16.
    result: np.dtype
    gradients: tuple[np.dtype, ...]  # For each operand, the dtype that the product of its gradient gives.


@dataclasses.dataclass(frozen=True)
class Skip:
    # The index of the operand that is the result of a cast which changes nothing. None if only regions read
    # the result, which they compute themselves.
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
        """The indexes of the half operands of the call that the jaxpr reads in float32."""
        # Constants of loops enter in float32. A carry is one value an iteration, without a path beside it.
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


Action = Run | Product | WeightGradient | Float8 | Move | MoveBoth | Recompute | Skip | Call


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """How one operation runs, and why."""

    op: Op
    category: Category  # The category that decided.
    action: Action  # What the interpreter does.
    results: tuple[State, ...]  # The state of each result.
    reason: str  # Why, in words.
    changed: bool = False  # Whether anything differs from the program as it was traced.
    inner: tuple["Plan", ...] = ()  # The plans of the jaxprs inside the operation, changed or not.
    why: Why = Why.OTHER  # The kind of the reason.
    not_fp8: str = ""  # Why a product in bfloat16 is not in fp8; empty without fp8.

    @property
    def takes(self) -> tuple[Take, ...]:
        """How the operation itself takes each operand. Empty if it has no dtypes of its own, as a call."""
        if isinstance(self.action, Float8):
            return Take.HALF, Take.HALF
        return () if isinstance(self.action, (Recompute, Skip, Call)) else self.action.operands

    @property
    def takes_half(self) -> bool:
        return Take.HALF in self.takes or Take.BROADCAST in self.takes

    @property
    def in_fp8(self) -> bool:
        return isinstance(self.action, Float8)

    @property
    def why_float32(self) -> tuple[Why, str] | None:
        """Why a matmul, or all of those in an unchanged call, stay float32 for the user or for a loop."""
        # Each operation inside of a call that changes says so itself.
        is_one = len(self._why_matmuls) == 1 and not (self.category is Category.CALL and self.changed)
        return next(iter(self._why_matmuls)) if is_one else None

    @functools.cached_property
    def _why_matmuls(self) -> frozenset[tuple[Why, str] | None]:
        """The reasons of its matmuls; None for one that takes half, or keeps float32 for another reason."""
        if self.category is Category.CALL:
            inside = (each for plan in self.inner for each in plan.decisions)
            return frozenset[Any]().union(*(each._why_matmuls for each in inside))
        if self.op.traits.category is not Category.ALLOW:
            return frozenset()
        is_kept = not self.takes_half and self.why not in (Why.OTHER, Why.NO_LIST)
        return frozenset({(self.why, self.reason) if is_kept else None})

    @property
    def gives_half(self) -> bool:
        return any(state.is_half for state in self.results)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The half variables of a jaxpr whose gradients need a path in float32. See `planning.passes.pairs`."""

    starts: frozenset[Var]  # The variables at which float32 gradients of several readers meet.
    # The variables that are read in float32: by an operation, by a call, or after a move.
    read: frozenset[Var]
    outputs: tuple[bool, ...]  # Which outputs are half values whose gradients are summed in float32.


_NO_PAIRS = Pairs(frozenset(), frozenset(), ())


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How a jaxpr runs. Compared by identity."""

    jaxpr: Jaxpr
    analysis: Analysis  # What was known before the decisions: the operations, their readers, the demand.
    states: Mapping[Var, State]  # The state of each variable.
    decisions: tuple[Decision, ...]  # One for each equation.
    results: tuple[State, ...]
    pairs: Pairs = _NO_PAIRS  # The half variables whose gradients need a path in float32.

    def with_decisions(self, decisions: Sequence[Decision]) -> "Plan":
        # A pass that has nothing to do gives the same plan: decisions are compared by identity.
        decisions = tuple(decisions)
        if decisions == self.decisions:
            return self
        states = dict(self.states)
        for decision, old in zip(decisions, self.decisions):
            if decision is not old:
                states.update(zip(decision.op.equation.outvars, decision.results))
        outvars = zip(open_jaxpr(self.jaxpr).outvars, self.results)
        results = tuple(state if is_literal(var) else states[var] for var, state in outvars)
        return dataclasses.replace(self, decisions=decisions, states=states, results=results)

    # Cached, since each call of the jaxpr asks.
    @functools.cached_property
    def changed(self) -> bool:
        """Whether any decision differs from the program as it was traced."""
        return any(decision.changed for decision in self.decisions)

    @functools.cached_property
    def in_fp8(self) -> bool:
        return any(each.in_fp8 or any(plan.in_fp8 for plan in each.inner) for each in self.decisions)

    @property
    def is_wanted(self) -> tuple[bool, ...]:
        """One flag for each input: whether a product wants the input in half."""
        return tuple(self.analysis.demand.uses[var].by_products > 0 for var in open_jaxpr(self.jaxpr).invars)

    @property
    def constants(self) -> tuple[State, ...]:
        return tuple(map(self.states.__getitem__, open_jaxpr(self.jaxpr).constvars))

    @property
    def inputs(self) -> tuple[State, ...]:
        return tuple(map(self.states.__getitem__, open_jaxpr(self.jaxpr).invars))

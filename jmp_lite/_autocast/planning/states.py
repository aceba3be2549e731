"""States: what autocast knows of a value. The functions say how an operation changes a state."""

import dataclasses
import enum

import numpy as np

from ..._jaxpr.inner import Role
from ..._jaxpr.read import Var
from .op import Op


class Kind(enum.IntEnum):
    """The kind of a value. Among several operands the largest kind decides."""

    OTHER = 0  # Not float32: integers, keys, float64, half values of the user's own. Never changed.
    BINARY = 1  # Holds only 0 and 1, such as one-hot labels. Takes the dtype of the other operands.
    ADAPTS = 2  # Takes the dtype of the other operands: a number, a broadcast bias, a looked-up embedding.
    ARGUMENT = 3  # Computed from arguments alone. It stays float32 until it is broadcast or looked up.
    FLOAT32 = 4  # Computed in float32, because an operation or the user demands it.
    BY_RULE = 5  # An argument, at most moved, whose products a rule of the user keeps in float32.
    KEPT = 6  # A value of `keep_float32`, at most moved. Its products stay in float32.
    HALF = 7  # Computed in half.


WIDE = (Kind.FLOAT32, Kind.BY_RULE, Kind.KEPT)
"""The kinds of values that element-wise operations take in float32, whatever their other operands are."""


@dataclasses.dataclass(frozen=True)
class Source:
    """An argument of the function, of which a value is at most a moved part. So the value may be rounded."""

    wide_gradient: bool = False  # The product that makes its gradient gives float32.
    float32_result: str = ""  # The pattern of `float32_results` that selects it; empty for none.
    # The first rule of the user that selects it: the pattern, and the dtype that its products take.
    rule: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class State:
    """What autocast knows of one value."""

    kind: Kind  # See `Kind`.
    number: float | None = None  # The number, at most moved, if it is known.
    constant: bool = False  # The value is computed from literals alone.
    source: Source | None = None  # The argument that the value is; numbers 0 and 1 of booleans have one too.
    half_sum: bool = False  # The value is a residual sum that `half_sums` selects, at most moved.

    @property
    def wide_gradient(self) -> bool:
        return self.source is not None and self.source.wide_gradient

    @property
    def rule(self) -> tuple[str, str] | None:
        return None if self.source is None else self.source.rule

    @property
    def is_half(self) -> bool:
        return self.kind == Kind.HALF


OTHER = State(Kind.OTHER)
FLOAT32 = State(Kind.FLOAT32)
KEPT = State(Kind.KEPT)
HALF = State(Kind.HALF)
HALF_SUM = State(Kind.HALF, half_sum=True)


def moved(op: Op, state: State, out: Var) -> State:
    """Returns the state of an operand after a move. A broadcast or looked-up argument then adapts."""
    if state.kind != Kind.ARGUMENT or not op.makes_adapting(out):
        return state
    # The gradient of a broadcast or looked-up argument is a sum of its own, in float32.
    source = None if state.source is None else dataclasses.replace(state.source, wide_gradient=False)
    return dataclasses.replace(state, kind=Kind.ADAPTS, source=source)


def kind_for(op: Op, var: Var, kind: Kind) -> Kind:
    """Returns the kind of an operand that an element-wise operation may broadcast along axes of size 1."""
    return Kind.ADAPTS if kind == Kind.ARGUMENT and op.broadcasts(var) else kind


def may_be_rounded(op: Op, var: Var, state: State) -> bool:
    """Whether an operation may take an operand in half: half, a number, or a parameter that it adds."""
    if state.number is not None or kind_for(op, var, state.kind) not in (Kind.BINARY, Kind.ADAPTS):
        return True
    # A factor may leave the range of half where the product does not. A scalar argument is not rounded
    # either: all elements would be off by the same amount, while the roundings of an array cancel out.
    return state.source is not None and var.aval.ndim > 0 and not op.traits.scales


def entering(op: Op, state: State, role: Role) -> State:
    """Returns the state of an operand of a call inside the jaxpr that takes it."""
    # The solver runs in float32 (`SOLVER_SCOPE`), and its handler takes no pairs.
    if op.name == "custom_linear_solve" and state.is_half:
        return FLOAT32
    if role is not Role.CARRY:
        return state
    # A value that changes from one iteration to the next is neither a constant nor an argument, and what the
    # body makes of it has to fit the dtype with which the loop starts.
    return OTHER if state.kind == Kind.OTHER else FLOAT32


def leaving(op: Op, state: State, carry: bool, stacked: bool) -> State:
    """Returns the state of a result of a call outside of it. `stacked` says that a scan stacks it in half."""
    # A carry is float32, except for a sum that `half_sums` selects: the planner has made that carry half from
    # the first iteration on (`Planner._plan_inside`).
    if state.kind == Kind.OTHER or (op.name == "scan" and state.half_sum):
        return state
    return FLOAT32 if carry else HALF if stacked and state.kind in WIDE else state


def merged(first: State, second: State) -> State:
    """Returns the state of a result that comes from one of two branches: the wider one.

    Examples:
        >>> merged(State(Kind.OTHER, constant=True), OTHER) == OTHER  # A known integer and an unknown one.
        True
    """
    if first == second:
        return first
    if Kind.OTHER in (first.kind, second.kind):
        return OTHER
    if first.is_half and second.is_half:
        return HALF
    if Kind.HALF in (first.kind, second.kind):
        return FLOAT32  # JAX wants one dtype of all branches.
    # What is a number, or zeros and ones, in one branch only is neither behind the `cond`.
    return State(max(first.kind, second.kind, Kind.ADAPTS))


def fits(value: float, half: np.dtype) -> bool:
    """Whether `half` holds the number `value`: it does not overflow, vanish or lose more than 2 %.

    Examples:
        >>> [fits(value, np.dtype("float16")) for value in (0.1, -np.inf, 1e-8, 1e5)]
        [True, True, False, False]
    """
    # A normal number is off by 0.4 % at most, in bfloat16. So this refuses what overflows, and subnormal
    # numbers of float16 that have too few bits left.
    return rounding_error(value, half) <= 0.02


def rounding_error(value: float, half: np.dtype) -> float:
    """Returns the relative error of `value` in half."""
    if value == 0 or not np.isfinite(value):  # Both halves have inf and NaN: `-inf` fills masks.
        return 0.0
    with np.errstate(over="ignore", under="ignore"):
        return abs(float(np.asarray(value, half)) / float(value) - 1)

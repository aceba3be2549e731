"""Reads each equation of a jaxpr once, and keeps what the planner needs of it: the class `Op`."""

import collections
import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence, Set

from ..._jaxpr.inner import Inner, inner_jaxprs
from ..._jaxpr.primitives import Category, Traits, traits_of
from ..._jaxpr.read import (
    Equation,
    Jaxpr,
    Var,
    equations,
    holds,
    holds_complex,
    is_float32,
    is_literal,
    is_reference,
    name_of,
    open_jaxpr,
)
from ..._jaxpr.scopes import is_recomputed, is_transposed, scope_of
from ..._paths import join
from .rules import Rules


# All later files of the planner take an `Op` in place of an equation, and no decision changes it.
@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Op:
    equation: Equation
    name: str  # The name of the operation in the table of primitives.
    traits: Traits
    category: Category  # The category of the operation after the user's options.
    scope: str  # The named scopes around the operation, without those around its jaxpr.
    inner: tuple[Inner, ...]  # The jaxprs that the operation runs; empty for most operations.
    variables: tuple[Var, ...]  # The operands without the literals.
    is_cast: bool
    is_listed: bool  # Whether the user has put the operation on a list, or taken it off one.
    is_residual_sum: bool  # Whether the operation adds two float32 arrays of the same shape.
    is_transposed: bool  # Whether JAX made the operation for a backward pass.
    is_recomputed: bool  # Whether the operation computes a part of the forward pass again.
    # Whether the operation is a loop whose backward pass computes float32 values again. Other loops keep
    # these values.
    recomputes: bool

    @property
    def stays_float32(self) -> bool:
        """Whether the operation should stay in float32 as a part of an activation function."""
        return self.category is Category.DENY or self.traits.category is Category.RANGE

    def moved_operand(self, result: int) -> int:
        """Returns the index of the operand that a move gives as its result at the index `result`."""
        # A `sort` or an `optimization_barrier` moves each operand. Other moves have one operand, and further
        # ones that say where to move it, such as the indices of a `gather`.
        return result if len(self.equation.outvars) == len(self.equation.invars) else 0

    def makes_adapting(self, out: Var) -> bool:
        """Whether a move broadcasts its operand or looks up rows, so that its result adapts (`states`)."""
        is_broadcast = self.name == "broadcast_in_dim" and grows(self.equation.invars[0], out)
        return is_broadcast or self.name == "gather"

    def broadcasts(self, var: Var) -> bool:
        return self.traits.broadcasts and grows(var, self.equation.outvars[0])


def grows(var: Var, out: Var) -> bool:
    """Whether a result has more elements than an operand."""
    # With `<`, JAX raises an error for the symbolic sizes of `jax.export`, and not with `!=`:
    # https://docs.jax.dev/en/latest/export/shape_poly.html, https://github.com/jax-ml/jax/pull/14290.
    return math.prod(var.aval.shape) != math.prod(out.aval.shape)


def read_ops(jaxpr: Jaxpr, rules: Rules) -> tuple[Op, ...]:
    return tuple(_read_op(equation, rules) for equation in equations(jaxpr))


def _read_op(equation: Equation, rules: Rules) -> Op:
    name = name_of(equation)
    category = rules.category_of(name)
    # The rule of such a function may keep the mutable array for its backward pass, and a rule that autocast
    # traces cannot return it.
    if name in ("custom_jvp_call", "custom_vjp_call") and any(map(is_reference, equation.invars)):
        category = Category.AS_TRACED
    return Op(
        equation,
        name,
        traits_of(name),
        category,
        scope_of(equation),
        # What is on no list, such as a Pallas kernel, may hold jaxprs too. autocast does not enter them.
        inner_jaxprs(equation) if category is Category.CALL else (),
        tuple(var for var in equation.invars if not is_literal(var)),
        name == "convert_element_type",
        name in rules.listed,
        name == "add" and _is_residual_sum(equation),
        is_transposed(equation),
        is_recomputed(equation),
        _recomputes(equation),
    )


def _is_residual_sum(equation: Equation) -> bool:
    out = equation.outvars[0]
    same = all(not is_literal(var) and var.aval.shape == out.aval.shape for var in equation.invars)
    # A sum of scalars, such as that of the terms of a loss, is not part of a residual stream.
    return same and is_float32(out) and bool(out.aval.shape)


def _recomputes(equation: Equation) -> bool:
    if equation.primitive.name != "scan" or equation.effects:
        return False
    body = equation.params["jaxpr"]
    # With a `remat2` the program itself says what the loop keeps. And JAX rounds each value that a policy
    # saves by a `reduce_precision`, which does not take complex numbers:
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/ad_checkpoint.py#L708.
    return not holds(body, "remat2") and not holds_complex(body)


@dataclasses.dataclass(frozen=True)
class Readers:
    """Who reads the variables of an open jaxpr."""

    # For each variable, the indexes of the operations that read it: twice for one that reads it twice.
    operations: Mapping[Var, Sequence[int]]
    outputs: collections.Counter[Var]  # How often each variable is an output.

    def count(self, var: Var) -> int:
        """Returns how often an operation reads `var` or the jaxpr returns it."""
        return len(self.operations[var]) + self.outputs[var]

    def are_only(self, var: Var, indexes: Set[int]) -> bool:
        """Whether no operation but those at `indexes` reads `var`."""
        return not self.outputs[var] and all(reader in indexes for reader in self.operations[var])


def readers_of(inside: Jaxpr, ops: Sequence[Op]) -> Readers:
    readers: dict[Var, list[int]] = collections.defaultdict(list)
    for index, op in enumerate(ops):
        for var in op.variables:
            readers[var].append(index)
    # It stays a `defaultdict`: a variable that nothing reads has no readers.
    return Readers(readers, collections.Counter(var for var in inside.outvars if not is_literal(var)))


class ReadJaxprs:
    """The operations of jaxprs and their readers. Each jaxpr is read once, and is kept alive."""

    # Jaxprs are found by their ids, here and in `DemandWalk`. Python may give the id of a dropped jaxpr to
    # a new one, so none of them is dropped.
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._read: dict[int, tuple[Jaxpr, tuple[Op, ...], Readers]] = {}

    def ops(self, jaxpr: Jaxpr) -> tuple[Op, ...]:
        return self._of(jaxpr)[1]

    def readers(self, jaxpr: Jaxpr) -> Readers:
        return self._of(jaxpr)[2]

    def _of(self, jaxpr: Jaxpr) -> tuple[Jaxpr, tuple[Op, ...], Readers]:
        inside = open_jaxpr(jaxpr)
        if id(inside) not in self._read:
            ops = read_ops(inside, self._rules)
            self._read[id(inside)] = inside, ops, readers_of(inside, ops)
        return self._read[id(inside)]


class Held(enum.Enum):
    """What a variable of a jaxpr inside of a loop holds."""

    CARRY = "what the loop carries, at most moved"
    FIXED = "what no iteration changes of any loop that decides by it"
    COMPUTED = "what an iteration computes with a product"


@dataclasses.dataclass(frozen=True)
class Context:
    """What the planner needs to know of the program around a jaxpr."""

    scope: str = ""  # The scopes around the jaxpr.
    backward: bool = False  # Whether the jaxpr runs in a backward pass.
    # One flag for each output: whether the output is intermediate (`dependence`).
    intermediate: tuple[bool, ...] = ()
    # One flag for each output: whether a product reads it later (`dependence`). Empty without
    # `half_sums`.
    streams: tuple[bool, ...] = ()
    # One flag for each output: whether a decision of a loop depends on it (`dependence`). Empty if no loop
    # around the jaxpr has such a decision.
    decides: tuple[bool, ...] = ()
    held: tuple[Held | None, ...] = ()  # For each input, what it holds of a loop. Empty outside of loops.
    # One flag for each input: whether it is the tangent of a forward-mode rule, or depends on one
    # (`dependence`). Empty outside of such rules.
    tangents: tuple[bool, ...] = ()
    # Whether the program took a derivative of the jaxpr, so that it has the backward pass too.
    of_gradient: bool = False

    def scope_of(self, op: Op) -> str:
        """Returns all scopes around an operation of the jaxpr."""
        return join(self.scope, op.scope) if op.scope else self.scope

    def is_backward(self, op: Op) -> bool:
        # What `jax.checkpoint` computes again gets the dtypes that it had in the forward pass.
        return (self.backward or op.is_transposed) and not op.is_recomputed

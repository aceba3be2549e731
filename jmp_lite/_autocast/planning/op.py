"""Reads each equation of a jaxpr once, and keeps what the planner needs of it: the class `Op`.

All later files of the planner take an `Op` in place of an equation. No decision changes it.
"""

import dataclasses
import math
from collections.abc import Sequence, Set

import jax.numpy as jnp

from ..._jaxpr.inner import Inner, inner_jaxprs
from ..._jaxpr.precision import precisions
from ..._jaxpr.primitives import Category, Traits, traits_of
from ..._jaxpr.read import (
    Equation,
    Jaxpr,
    Var,
    equations,
    floating_operands,
    holds,
    holds_complex,
    is_float32,
    is_literal,
    is_recomputed,
    is_transposed,
    name_of,
    scope_of,
)
from ..._paths import join
from ..._tree import KEEP_FLOAT32_NAME
from .predicates import DECIDES
from .rules import Rules
from .scopes import Scopes


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Op:
    """One operation of a jaxpr.

    Attributes:
        equation: the equation.
        name: the name of the operation in the table of primitives.
        traits: the row of the table.
        category: the category of the operation after the user's options.
        scope: the named scopes around the operation, without those around its jaxpr.
        inner: the jaxprs that the operation runs; empty for most operations.
        is_transposed: whether JAX made the operation for a backward pass.
        is_recomputed: whether the operation computes a part of the forward pass again.
        recomputes: whether the operation is a loop whose backward pass computes float32 values again. Other
            loops keep these values.
    """

    equation: Equation
    name: str
    traits: Traits
    category: Category
    scope: str
    inner: tuple[Inner, ...]
    is_transposed: bool
    is_recomputed: bool
    recomputes: bool

    @property
    def variables(self) -> list[Var]:
        """The operands without the literals."""
        return [var for var in self.equation.invars if not is_literal(var)]

    @property
    def is_cast(self) -> bool:
        """Whether the operation casts."""
        return self.name == "convert_element_type"

    @property
    def is_residual_sum(self) -> bool:
        """Whether the operation adds two values of the same shape."""
        if self.name != "add":
            return False
        shape = self.equation.outvars[0].aval.shape
        return all(not is_literal(var) and var.aval.shape == shape for var in self.equation.invars)

    @property
    def stays_float32(self) -> bool:
        """Whether the operation should stay in float32 as a part of an activation function."""
        return self.category is Category.DENY or self.traits.category is Category.RANGE

    def moved_operand(self, result: int) -> int:
        """Returns the index of the operand that a move gives as its result at the index `result`."""
        return result if len(self.equation.outvars) == len(self.equation.invars) else 0

    def frees(self, out: Var) -> bool:
        """Whether a move broadcasts its operand or looks up rows. The result is then free (`states`)."""
        is_broadcast = self.name == "broadcast_in_dim" and grows(self.equation.invars[0], out)
        return is_broadcast or self.name == "gather"

    def broadcasts(self, var: Var) -> bool:
        """Whether an element-wise operation broadcasts the operand `var`."""
        return self.traits.broadcasts and grows(var, self.equation.outvars[0])


def grows(var: Var, out: Var) -> bool:
    """Whether a result has more elements than an operand.

    A symbolic size has no order: `jax.export` can compare it only with `==` and `!=`.
    """
    return math.prod(var.aval.shape) != math.prod(out.aval.shape)


def read_ops(jaxpr: Jaxpr, rules: Rules) -> tuple[Op, ...]:
    """Returns the operations of a jaxpr, closed or open."""
    return tuple(_read_op(equation, rules) for equation in equations(jaxpr))


def _read_op(equation: Equation, rules: Rules) -> Op:
    name = name_of(equation)
    category = rules.category_of(name)
    return Op(
        equation,
        name,
        traits_of(name),
        category,
        scope_of(equation),
        inner_jaxprs(equation) if category is Category.CALL else (),
        is_transposed(equation),
        is_recomputed(equation),
        _recomputes(equation),
    )


def _recomputes(equation: Equation) -> bool:
    # With a `remat2` the program itself says what the loop keeps. JAX keeps no complex numbers by a policy.
    if equation.primitive.name != "scan" or equation.effects:
        return False
    body = equation.params["jaxpr"]
    return not holds(body, "remat2") and not holds_complex(body)


@dataclasses.dataclass(frozen=True)
class Around:
    """What the planner needs to know of the program around a jaxpr.

    Attributes:
        scope: the scopes around the jaxpr.
        backward: whether the jaxpr runs in a backward pass.
        intermediate: one flag for each output: whether the output is intermediate (`gradients`). Empty
            without a `reduce_dtype`.
        recomputed: whether the jaxpr is in a loop whose backward pass computes it again from half values.
        decides: one flag for each output: whether the predicate of a loop depends on it (`predicates`).
            Empty if no loop around the jaxpr has such a predicate.
    """

    scope: str = ""
    backward: bool = False
    intermediate: tuple[bool, ...] = ()
    recomputed: bool = False
    decides: tuple[bool, ...] = ()

    def scope_of(self, op: Op) -> str:
        """Returns all scopes around an operation of the jaxpr."""
        return join(self.scope, op.scope) if op.scope else self.scope

    def is_backward(self, op: Op) -> bool:
        """Whether an operation of the jaxpr is a part of a backward pass."""
        return (self.backward or op.is_transposed) and not op.is_recomputed


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """How an operation runs, before the planner knows the states of its operands.

    Attributes:
        category: the category that decides.
        reason: why the operation keeps the dtypes of the program or float32; empty if it may run in half.
        float32_result: the pattern of `float32_results` that selects the scope of a product; empty for none.
        half_sum: the pattern of `half_sums` that selects the scope of a residual sum; empty for none.
    """

    category: Category
    reason: str = ""
    float32_result: str = ""
    half_sum: str = ""

    @property
    def is_half_product(self) -> bool:
        """Whether the operation is a product that takes half operands, unless a rule keeps one in float32."""
        return self.category is Category.ALLOW and not self.reason


def courses(
    ops: Sequence[Op], around: Around, rules: Rules, scopes: Scopes, decisive: Set[Var] = frozenset()
) -> tuple[Course, ...]:
    """Returns the course of each operation of a jaxpr.

    `decisive` has the variables on which the predicate of a loop depends.
    """
    steps = (_course(op, around, rules, scopes) for op in ops)
    if not decisive:
        return tuple(steps)
    return tuple(
        dataclasses.replace(step, reason=DECIDES)
        if _decides(op, step, decisive) and not rules.gives_half(around.scope_of(op))
        else step
        for op, step in zip(ops, steps)
    )


def _decides(op: Op, course: Course, decisive: Set[Var]) -> bool:
    """Whether an operation that may run in half computes what the predicate of a loop depends on."""
    may_be_half = course.category in (Category.ALLOW, Category.INFER) and not course.reason
    return (
        may_be_half
        and not decisive.isdisjoint(op.equation.outvars)
        and any(map(is_float32, op.equation.invars))
    )


def _course(op: Op, around: Around, rules: Rules, scopes: Scopes) -> Course:
    if op.category is Category.CALL:
        return Course(Category.CALL)
    if reason := scopes.why_as_traced(around.scope_of(op)):
        return Course(Category.AS_TRACED, reason)
    if op.is_cast:
        return Course(Category.AS_TRACED)
    if op.name == "name" and op.equation.params["name"] == KEEP_FLOAT32_NAME:
        return Course(Category.DENY, "keep_float32")
    match op.category:
        case Category.ALLOW:
            # The products of a backward pass give half, as those of other products do.
            pattern = "" if around.is_backward(op) else rules.float32_result_for(around.scope_of(op))
            return Course(op.category, _why_not_half(op.equation, rules), pattern)
        case Category.INFER if op.name in ("outer_product", "elementwise_product"):
            # In a backward pass an outer product is the gradient of a product, and runs as the others do.
            reason = _why_not_half(op.equation, rules)
            is_gradient = op.name == "outer_product" and around.is_backward(op)
            is_product = not reason and is_gradient and _halves_products(rules)
            return Course(Category.ALLOW if is_product else op.category, reason)
        case Category.INFER if op.is_residual_sum and not around.is_backward(op):
            pattern = rules.half_sum_for(around.scope_of(op))
            if pattern:
                scopes.select("half_sums", pattern)
            return Course(op.category, half_sum=pattern)
        case Category.DENY:
            return Course(op.category, f"{op.name} is on the deny list")
        case Category.AS_TRACED:
            known = "stays as traced" if op.name in rules.categories else "is on no list"
            return Course(op.category, f"{op.name} {known}")
    return Course(op.category)


def _halves_products(rules: Rules) -> bool:
    return rules.category_of("dot_general") is Category.ALLOW


def _why_not_half(equation: Equation, rules: Rules) -> str:
    """Returns why a product keeps its dtypes, whatever its operands are; empty if it takes half operands."""
    floating = floating_operands(equation)
    if not any(map(is_float32, floating)):
        traced = sorted({var.aval.dtype.name for var in floating}) or ["integers"]
        return f"its operands were traced in {' and '.join(traced)}"
    others = {var.aval.dtype.name for var in floating if var.aval.dtype not in (jnp.float32, rules.dtype)}
    if others:
        return f"an operand was traced in {' and '.join(sorted(others))}"
    # JAX multiplies a float32 cotangent by a half operand, and names the arithmetic of the half product.
    own = {"F16_F16_F32", "BF16_BF16_F32"} if not all(map(is_float32, floating)) else set[str]()
    if asked := precisions(equation) - own:
        return f"the program asks for precision {' and '.join(sorted(asked))}"
    preferred = equation.params.get("preferred_element_type")
    if preferred not in (None, jnp.float32):
        return f"the program asks for a result in {preferred}"
    return ""

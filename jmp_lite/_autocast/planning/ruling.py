"""How the user's options, the scopes and the table treat an operation: a ruling, forwards."""

import dataclasses
import enum
from collections.abc import Collection, Sequence, Set

import jax.numpy as jnp

from ..._jaxpr import read
from ..._jaxpr.precision import precisions
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import Equation, Var
from ..._tree import KEEP_FLOAT32_NAME
from .op import Context, Op
from .rules import Rules, first_match
from .scopes import INSIDE_FULL_PRECISION, Scopes
from .states import Kind, State


class Why(enum.Enum):
    """What keeps an operation from half, as far as other code asks for it."""

    RULE = "a rule of the user"
    OPTION = "full_precision, or a list or pattern that autocast was given"
    KEEP_FLOAT32 = "keep_float32"
    LOOP = "a loop decides by it"
    NO_LIST = "it is on no list"
    OTHER = "another reason"


@dataclasses.dataclass(frozen=True, slots=True)
class Ruling:
    """How an operation runs, before the planner knows the states of its operands."""

    category: Category  # The category that decides.
    # Why the operation keeps the dtypes of the program or float32; empty if it may run in half.
    reason: str = ""
    why: Why = Why.OTHER  # The kind of the reason.
    # The pattern of `float32_results` that selects the scope of a product; empty for none.
    float32_result: str = ""
    # The pattern of `half_sums` that selects the scope of a residual sum; empty for none.
    half_sum: str = ""
    rule: tuple[str, str] | None = None  # The first rule that selects the scope of a product.
    is_first: bool = False  # Whether that rule gives half, and stands before all that give float32.
    # The ruling on a product that the rule keeps in float32, should the rule of an argument come first.
    otherwise: "Ruling | None" = None

    @property
    def is_half_product(self) -> bool:
        """Whether the operation is a product that takes half operands, unless one of them is kept."""
        return self.category is Category.ALLOW and not self.reason

    def takes_half(self, operands: Collection[Kind]) -> bool:
        """Whether the operation is a product that takes half operands, given the kinds of its operands."""
        is_kept = Kind.KEPT in operands or (Kind.BY_RULE in operands and not self.is_first)
        return self.is_half_product and not is_kept


class RulingWalk:
    """Rules on the operations of an open jaxpr, but for `half_sums`, which is a question of its own."""

    def __init__(self, context: Context, rules: Rules, scopes: Scopes, decisive: Set[Var]) -> None:
        self._context, self._rules, self._scopes, self._decisive = context, rules, scopes, decisive

    def rule(self, op: Op) -> Ruling:
        """Returns the ruling on an operation."""
        scope = self._context.scope_of(op)
        ruling = self._ruling(op, scope)
        # A rule that gives half wins over the decision of a loop.
        if self._decisive and _decides(op, ruling, self._decisive) and not self._rules.gives_half(scope):
            return dataclasses.replace(ruling, reason=_DECIDES, why=Why.LOOP)
        return ruling

    def _ruling(self, op: Op, scope: str) -> Ruling:
        if op.category is Category.CALL:
            return _CALL  # Each operation inside has a scope and a ruling of its own.
        if reason := self._scopes.why_as_traced(scope):
            return self._ruling_as_traced(reason, op, scope)
        if op.is_cast:
            return _AS_TRACED
        if op.name == "name" and op.equation.params["name"] == KEEP_FLOAT32_NAME:
            return KEPT_BY_USER
        if op.category is Category.DENY:
            return Ruling(op.category, f"{op.name} is on the deny list")
        if op.category is Category.AS_TRACED:
            is_listed = op.name in self._rules.categories
            known = "stays as traced" if is_listed else "is on no list"
            return Ruling(op.category, f"{op.name} {known}", Why.OTHER if is_listed else Why.NO_LIST)
        return self._ruling_on_product(op, scope) if is_product(op) else _BY_OPERANDS[op.category]

    def _ruling_as_traced(self, reason: str, op: Op, scope: str) -> Ruling:
        """Returns the ruling on an operation of a scope that stays as it was traced."""
        if scope not in self._scopes.kept_by_rules:
            asked = reason == INSIDE_FULL_PRECISION
            return Ruling(Category.AS_TRACED, reason, Why.OPTION if asked else Why.OTHER)
        # The rule of an argument of the product may come before that of its scope (`by_first_rule`).
        kept = Ruling(Category.AS_TRACED, reason, Why.RULE)
        rule = self._scopes.rule_for(scope) if is_product(op) else None
        if rule is None:
            return kept
        return dataclasses.replace(kept, rule=rule, otherwise=self._ruling_on_product(op, scope))

    def _ruling_on_product(self, op: Op, scope: str) -> Ruling:
        rules, is_backward = self._rules, self._context.is_backward(op)
        reason = _why_not_half(op.equation, rules)
        rule = self._scopes.rule_for(scope)
        is_first = rules.is_first(rule)
        if op.category is Category.ALLOW:
            # The products of a backward pass give half, as those of other products do.
            pattern = "" if is_backward else first_match(rules.float32_results, scope)
            return Ruling(op.category, reason, float32_result=pattern, rule=rule, is_first=is_first)
        # In a backward pass an outer product is the gradient of a product, and runs as the others do.
        # A user who takes `dot_general` off the allow list means these too.
        is_gradient = op.name == "outer_product" and is_backward and rules.halves_products
        category = Category.ALLOW if is_gradient and not reason else op.category
        return Ruling(category, reason, rule=rule, is_first=is_first)


def kind_in_demand(state: State) -> Kind:
    """Returns the kind of a value for the demand: `ADAPTS` for one that may be in half."""
    return Kind.ADAPTS if state.kind in (Kind.OTHER, Kind.HALF) else state.kind


# The ruling.


OUTER = ("outer_product", "elementwise_product")
"""Products that sum nothing."""


def is_product(op: Op) -> bool:
    """Whether an operation is a product: a matmul, a convolution, or a product without a sum."""
    return op.category is Category.ALLOW or op.name in OUTER


KEPT_BY_USER = Ruling(Category.DENY, "keep_float32", Why.KEEP_FLOAT32)
"""The ruling on a value that the user keeps in float32, a constant too."""
_DECIDES = "a loop decides by it whether to go on, or what to keep"
_CALL, _AS_TRACED = Ruling(Category.CALL), Ruling(Category.AS_TRACED)
_BY_OPERANDS = {category: Ruling(category) for category in (Category.INFER, Category.MOVE)}


def _decides(op: Op, ruling: Ruling, decisive: Set[Var]) -> bool:
    """Whether an operation that may run in half computes what the predicate of a loop depends on."""
    # A move needs no ruling: it moves what another operation has computed in float32.
    may_be_half = ruling.category in (Category.ALLOW, Category.INFER) and not ruling.reason
    is_decisive = may_be_half and not decisive.isdisjoint(op.equation.outvars)
    return is_decisive and any(map(read.is_float32, op.equation.invars))


def _why_not_half(equation: Equation, rules: Rules) -> str:
    """Returns why a product keeps its dtypes, whatever its operands are; empty if it takes half operands."""
    floating = read.floating_operands(equation)
    if not any(map(read.is_float32, floating)):
        traced = sorted({var.aval.dtype.name for var in floating}) or ["integers"]
        return f"its operands were traced in {' and '.join(traced)}"
    others = {var.aval.dtype.name for var in floating if var.aval.dtype not in (jnp.float32, rules.dtype)}
    if others:
        return f"an operand was traced in {' and '.join(sorted(others))}"
    return _what_the_program_asks(equation, floating)


def _what_the_program_asks(equation: Equation, floating: Sequence[Var]) -> str:
    """Returns in words for which precision or result the program asks; empty if it asks for none."""
    # JAX multiplies a float32 cotangent by a half operand (https://github.com/jax-ml/jax/issues/10818), with
    # the precision for which the program asks in the half product:
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/lax/lax.py#L5849.
    own = {"F16_F16_F32", "BF16_BF16_F32"} if not all(map(read.is_float32, floating)) else set[str]()
    if asked := precisions(equation) - own:
        return f"the program asks for precision {' and '.join(sorted(asked))}"
    preferred = equation.params.get("preferred_element_type")
    return "" if preferred in (None, jnp.float32) else f"the program asks for a result in {preferred}"

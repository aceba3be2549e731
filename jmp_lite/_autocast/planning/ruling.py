"""The pass of the planner before it knows what is wanted in half: a ruling and an estimate, forwards.

The ruling says how the user's options, the scopes and the table treat an operation. The estimate says which
values stay float32 in any case; `ADAPTS` estimates a value that may be in half.
"""

import dataclasses
import enum
from collections.abc import Collection, Iterable, Sequence, Set

import jax.numpy as jnp

from ..._jaxpr import read
from ..._jaxpr.precision import precisions
from ..._jaxpr.primitives import Category, traits_of
from ..._jaxpr.read import Equation, Jaxpr, Var
from ..._tree import KEEP_FLOAT32_NAME
from .op import Context, Op
from .rules import Rules, first_match
from .scopes import INSIDE_FULL_PRECISION, Scopes
from .states import WIDE, Kind, State, kind_for


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
    """Rules on the operations of an open jaxpr, in their order.

    Attributes:
        estimates: the estimates of the variables so far.
    """

    def __init__(
        self, inside: Jaxpr, inputs: Sequence[Kind], context: Context, rules: Rules, scopes: Scopes
    ) -> None:
        self.estimates = Estimates(zip((*inside.constvars, *inside.invars), inputs, strict=True))
        self._context, self._rules, self._scopes = context, rules, scopes
        self._of_products: set[Var] = set()  # Results of products, and element-wise functions of them.
        self._half_sums: set[Var] = set()
        # For each variable, the arrays whose slices it is computed from by moves and element-wise operations.
        self._sliced: dict[Var, frozenset[Var]] = {}

    def run(self, ops: Sequence[Op], decisive: Set[Var], streams: Set[Var]) -> tuple[Ruling, ...]:
        """Returns the ruling on each operation.

        Args:
            ops: the operations.
            decisive: the variables on which a decision of a loop depends.
            streams: the variables from which products are computed later.
        """
        rulings = []
        for op in ops:
            scope = self._context.scope_of(op)
            ruling = self._ruling(op, scope)
            if self._rules.half_sums and self._continues_stream(op, ruling, streams):
                ruling = self._ruling_on_sum(ruling, scope)
            # A rule that gives half wins over the decision of a loop.
            if decisive and _decides(op, ruling, decisive) and not self._rules.gives_half(scope):
                ruling = dataclasses.replace(ruling, reason=_DECIDES, why=Why.LOOP)
            rulings.append(ruling)
            self._note(op, ruling)
        return tuple(rulings)

    def _continues_stream(self, op: Op, ruling: Ruling, streams: Set[Var]) -> bool:
        """Whether an operation is a sum of a residual stream: of a matmul's result, for later matmuls."""
        # Other sums of two arrays, such as those of log-probabilities in a loss or those of an accumulator,
        # may need float32.
        if op.name != "add" or self._context.is_backward(op) or ruling.reason:
            return False
        if not op.is_residual_sum:
            return self._adds_bias(op) and not streams.isdisjoint(op.equation.outvars)
        # A sum may continue a stream that only a loss reads: casts by hand would round it too.
        is_read = not streams.isdisjoint(op.equation.outvars) or not self._half_sums.isdisjoint(op.variables)
        # `lax.associative_scan` computes a recursion by sums of the even and odd elements of one array.
        is_of_slices = bool(frozenset.intersection(*map(self._slices, op.variables)))
        return is_read and not is_of_slices and self._adds_product(op)

    def _adds_product(self, op: Op) -> bool:
        # What adapts may be a product's result that a call or a loop returns.
        may_be_half = Kind.ADAPTS in map(self.estimates.of, op.equation.invars)
        return may_be_half or not self._of_products.isdisjoint(op.variables)

    def _adds_bias(self, op: Op) -> bool:
        """Whether an operation adds something smaller, such as a bias, to the result of a product."""
        (out,) = op.equation.outvars
        whole = [var for var in op.variables if var.aval.shape == out.aval.shape]
        is_product = [self.estimates.of(var) == Kind.ADAPTS and var in self._of_products for var in whole]
        return is_product == [True] and read.is_float32(out)

    def _ruling_on_sum(self, ruling: Ruling, scope: str) -> Ruling:
        """Returns the ruling on a sum of a residual stream: it is in half if `half_sums` selects it."""
        pattern = first_match(self._rules.half_sums, scope)
        if not pattern:
            return ruling
        self._scopes.note_used("half_sums", pattern)
        return dataclasses.replace(ruling, half_sum=pattern)

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

    def _note(self, op: Op, ruling: Ruling) -> None:
        """Notes what later rulings ask about the results of an operation."""
        # A sum of `half_sums` may add what a reshape or a dropout makes of a product's result.
        passes_on = ruling.category in _BY_OPERANDS and not self._of_products.isdisjoint(op.variables)
        if passes_on or ruling.is_half_product:
            self._of_products.update(op.equation.outvars)
        if ruling.half_sum:
            self._half_sums.update(op.equation.outvars)
        if self._rules.half_sums and ruling.category in _BY_OPERANDS:
            self._note_slices(op)
        self.estimates.add(op, ruling)

    def _note_slices(self, op: Op) -> None:
        slices = frozenset[Var]().union(*map(self._slices, op.variables))
        slices |= {*op.variables} if op.name == "slice" else frozenset()
        self._sliced.update(dict.fromkeys(op.equation.outvars, slices))

    def _slices(self, var: Var) -> frozenset[Var]:
        return self._sliced.get(var, frozenset())


# The demand asks them whether an operation can give a half result. One that certainly runs in float32 does
# not want its other operands in half: so a residual stream that nothing normalizes stays float32.
class Estimates:
    """The estimated kind of each variable of a jaxpr."""

    def __init__(self, kinds: Iterable[tuple[Var, Kind]]) -> None:
        self._kinds = dict(kinds)

    def of(self, var: Var) -> Kind:
        return Kind.LITERAL if read.is_literal(var) else self._kinds[var]

    def add(self, op: Op, ruling: Ruling) -> None:
        for index, out in enumerate(op.equation.outvars):
            is_call = ruling.category is Category.CALL
            self._kinds[out] = _estimate_of_call(op, index) if is_call else self._of_result(op, ruling, index)

    def _of_result(self, op: Op, ruling: Ruling, index: int) -> Kind:
        operands = list(map(self.of, op.equation.invars))
        # What is computed from numbers alone is a number, unless an effect, as of an `io_callback`, makes it.
        is_constant = not op.equation.effects and all(kind == Kind.LITERAL for kind in operands)
        if is_constant and ruling.why is not Why.KEEP_FLOAT32:
            return Kind.LITERAL
        is_float32 = read.is_float32(op.equation.outvars[index])
        return _estimate_of_float32(op, ruling, operands, index) if is_float32 else Kind.ADAPTS


def estimate_of_state(state: State) -> Kind:
    """Returns the estimate of a value whose state is known."""
    if state.constant and state.kind not in (Kind.BINARY, Kind.BY_RULE, Kind.KEPT):
        return Kind.LITERAL
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


# The estimate.


def _estimate_of_float32(op: Op, ruling: Ruling, operands: list[Kind], index: int) -> Kind:
    """Returns the estimate of a float32 result from those of the operands."""
    if ruling.why is Why.KEEP_FLOAT32:
        return Kind.KEPT
    if op.is_cast:
        (source,) = op.equation.invars
        # `x.astype(jnp.float32)` of a float32 value, which JAX traces if it is weakly typed, does nothing.
        return operands[0] if read.is_float32(source) else _estimate_of_cast(source.aval.dtype)
    if ruling.category is Category.MOVE:
        return _estimate_of_move(op, operands, index)
    if (ruling.takes_half(operands) and not ruling.float32_result) or ruling.half_sum:
        return Kind.ADAPTS
    is_elementwise = ruling.category is Category.INFER and not ruling.reason
    return _widest(op, operands) if is_elementwise else Kind.FLOAT32


def _widest(op: Op, operands: list[Kind]) -> Kind:
    kinds = [
        kind_for(op, var, kind) if read.is_float32(var) else Kind.ADAPTS
        for var, kind in zip(op.equation.invars, operands)
    ]
    return Kind.FLOAT32 if not set(kinds).isdisjoint(WIDE) else max(Kind.ADAPTS, *kinds)


def _estimate_of_move(op: Op, operands: list[Kind], index: int) -> Kind:
    kind = operands[op.moved_operand(index)]
    is_adapting = kind == Kind.ARGUMENT and op.makes_adapting(op.equation.outvars[index])
    return Kind.ADAPTS if is_adapting else kind


def _estimate_of_cast(source: jnp.dtype) -> Kind:
    if source == jnp.bool_:
        return Kind.BINARY
    # The program has widened a half value of its own: it asks for float32. Integers may fit half.
    return Kind.FLOAT32 if jnp.issubdtype(source, jnp.floating) else Kind.ADAPTS


def _estimate_of_call(op: Op, index: int) -> Kind:
    """Returns the estimate of a result of a call, as far as the inner jaxprs alone tell it."""
    outputs = [
        (read.open_jaxpr(inner.jaxpr), number, carry)
        for inner in op.inner
        for number, (result, carry) in enumerate(zip(inner.results, inner.carries))
        if result == index
    ]
    if read.is_float32(op.equation.outvars[index]) and any(carry for _, _, carry in outputs):
        return Kind.FLOAT32
    # `jax.nn.one_hot` is a jitted function, whose result is a cast of booleans.
    is_binary = all(_is_cast_from_bool(jaxpr, jaxpr.outvars[number]) for jaxpr, number, _ in outputs)
    return Kind.BINARY if is_binary else Kind.ADAPTS


def _is_cast_from_bool(jaxpr: Jaxpr, var: Var) -> bool:
    made_by = {out: equation for equation in read.equations(jaxpr) for out in equation.outvars}
    while not read.is_literal(var) and var in made_by:
        equation = made_by[var]
        if equation.primitive.name == "convert_element_type":
            return equation.invars[0].aval.dtype == jnp.bool_
        if traits_of(equation.primitive.name).category is not Category.MOVE:
            return False
        var = equation.invars[0]
    return False

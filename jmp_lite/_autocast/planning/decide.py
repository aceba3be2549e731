"""Decides in which precision one operation runs, and why."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ..._jaxpr.picks import picked_axis
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import Var, is_float32
from .demand import Analysis
from .elementwise import decide_elementwise, in_full, in_half, results_of, run_in_float32, store_half
from .op import Op
from .plan import Decision, Move, MoveBoth, Product, Run, Skip, Take
from .products import by_first_rule, decide_outer, decide_product, half_params, widens
from .ruling import KEPT_BY_USER, OUTER, Ruling, Why, is_product
from .states import FLOAT32, HALF_SUM, KEPT, Kind, Source, State, moved
from .wanted import Wanted


def decide(op: Op, ruling: Ruling, operands: Sequence[State], analysis: Analysis) -> Decision:
    """Decides about an operation that runs no jaxprs.

    Raises:
        ValueError: `float32_results` selects an operation that cannot give float32 from half operands.
    """
    # From what the user asks for to what the operands are: the first answer counts.
    rules, wanted = analysis.rules, analysis.demand.of_results(op)
    if rules.scopes:
        ruling = by_first_rule(op, ruling, operands, rules)
    if ruling.reason:
        return _kept(op, operands, ruling, analysis)
    if op.is_cast:
        return _cast(op, operands[0])
    if ruling.half_sum:
        return _half_sum(op, operands, ruling.half_sum)
    if is_product(op) and any(state.kind == Kind.KEPT for state in operands):
        return run_in_float32(op, operands, dataclasses.replace(KEPT_BY_USER, category=ruling.category))
    if ruling.category is Category.ALLOW and not _is_constant_outer(op, operands):
        return decide_product(op, ruling, operands, wanted, analysis)
    if op.name in OUTER:
        return decide_outer(op, operands, wanted, rules)
    if ruling.category is Category.MOVE:
        return _move(op, operands, wanted, analysis)
    return decide_elementwise(op, operands, wanted, rules.dtype)


def _is_constant_outer(op: Op, operands: Sequence[State]) -> bool:
    # Such as a table of positions and frequencies, which is no gradient even in a backward pass.
    return op.name == "outer_product" and all(state.constant for state in operands)


def _kept(op: Op, operands: Sequence[State], ruling: Ruling, analysis: Analysis) -> Decision:
    """Decides about an operation whose ruling has a reason: it runs as in the program, or in float32."""
    kept, half = run_in_float32(op, operands, ruling), analysis.rules.dtype
    if _ends_region(op, operands, ruling, analysis):  # The region gives half (`passes.recompute`).
        return dataclasses.replace(store_half(op, operands, ruling.reason), category=Category.DENY)
    # In `autocast(grad(f))`, the gradient of a lookup of labels (`_jaxpr/picks.py`).
    if op.name == "scatter-add" and _picks(op):
        action = dataclasses.replace(in_full(operands), picks=True)
        return dataclasses.replace(kept, action=action, changed=True)
    if ruling.why is Why.KEEP_FLOAT32:
        return dataclasses.replace(kept, results=results_of(op, operands, KEPT))
    if takes := _takes_beside_half_gradients(op, operands, ruling, half):
        action = Product(takes, (half, half), half_params(op, half))
        return dataclasses.replace(kept, action=action, changed=True)
    return kept


def _ends_region(op: Op, operands: Sequence[State], ruling: Ruling, analysis: Analysis) -> bool:
    """Whether an operation of the deny list, such as an `exp` or a power, makes the result of a region."""
    ends_region = not analysis.regions.keys().isdisjoint(op.equation.outvars)
    is_constant = all(state.constant for state in operands)
    return ruling.category is Category.DENY and ends_region and not is_constant


def _takes_beside_half_gradients(
    op: Op, operands: Sequence[State], ruling: Ruling, half: np.dtype
) -> tuple[Take, ...]:
    """Returns how a kept product takes its operands if the products of its gradients take half; else `()`."""
    if op.traits.category is not Category.ALLOW:
        return ()
    if ruling.why is Why.LOOP and len(operands) == 2:  # Its gradients decide nothing.
        return in_full(operands).operands
    # Otherwise JAX would multiply a float32 cotangent by half operands, which Tensor Cores cannot do:
    # https://github.com/jax-ml/jax/issues/10818. What the user takes off the allow list, or puts into a scope
    # that stays as traced, has the gradients of the program.
    is_allowed = ruling.category is Category.ALLOW
    return (Take.AS_IS,) * len(operands) if is_allowed and widens(op, half) else ()


def _half_sum(op: Op, operands: Sequence[State], pattern: str) -> Decision:
    """Decides about a residual sum that `half_sums` selects: it adds in half."""
    # A float32 sum with a cast to half would not do: XLA drops the cast where it is cast up again
    # (https://github.com/openxla/xla/issues/41605), and stores the sum in float32.
    reason = f"half_sums='{pattern}' selects it"
    return Decision(
        op, Category.INFER, Run(in_half(op, operands)), (HALF_SUM,), reason, changed=True, why=Why.OPTION
    )


def _move(op: Op, operands: Sequence[State], wanted: Wanted, analysis: Analysis) -> Decision:
    """Decides about an operation that moves data: each operand keeps its dtype."""
    outvars = op.equation.outvars
    if _casts_first(op, operands[0], wanted):
        # The devices send half, forwards and backwards, as with a cast by hand.
        half = dataclasses.replace(operands[0], kind=Kind.HALF)
        return Decision(op, Category.MOVE, Move((Take.HALF,)), (half,), "matmuls use its result", True)
    if _looks_up_half(op, operands[0], wanted):
        operands = [dataclasses.replace(operands[0], kind=Kind.HALF), *operands[1:]]
    results = tuple(moved(op, operands[op.moved_operand(n)], out) for n, out in enumerate(outvars))
    # A constant of a loop that is in half outside of it has a float32 array too, so ask for the half one.
    takes = tuple(Take.HALF if state.is_half else Take.AS_IS for state in operands)
    picks = op.name == "gather" and _picks(op)
    reason = "it only moves data, so it keeps the dtype of its input"
    if len(results) == 1 and _moves_both(op, operands[0], analysis):
        return Decision(op, Category.MOVE, MoveBoth(takes, picks), results, reason, changed=True)
    changed = Take.HALF in takes or picks
    return Decision(op, Category.MOVE, Move(takes, picks=picks), results, reason, changed)


def _picks(op: Op) -> bool:
    """Whether a lookup takes one float32 number of each row, or a scatter is the gradient of one."""
    return is_float32(op.equation.outvars[0]) and not op.is_listed and picked_axis(op.equation) is not None


def _casts_first(op: Op, operand: State, wanted: Wanted) -> bool:
    """Whether a float32 value is cast before it moves between devices, where products read it."""
    keeps = operand.kind in (Kind.OTHER, Kind.BY_RULE, Kind.HALF) or operand.wide_gradient
    return op.name == "reshard" and wanted >= Wanted.WITH_OTHERS and not keeps


def _looks_up_half(op: Op, operand: State, wanted: Wanted) -> bool:
    """Whether to cast a float32 array in front of a lookup of rows that only matmuls use."""
    if op.name != "gather" or wanted is not Wanted.BY_PRODUCTS_ONLY or operand.kind is not Kind.FLOAT32:
        return False
    # Only if it takes as many rows as there are, as a mixture of experts does. Of a table of embeddings few
    # rows are taken, and all would be cast.
    taken, table = op.equation.outvars[0].aval.size, op.equation.invars[0].aval.size
    return isinstance(taken, int) and isinstance(table, int) and taken >= table


def _moves_both(op: Op, operand: State, analysis: Analysis) -> bool:
    """Whether a value should move in both dtypes."""
    # The transpose of a copy is a sum, which then adds float32 cotangents up.
    if operand.is_half:
        return op.traits.gathers or op.traits.copies
    is_wanted = analysis.demand.uses[op.equation.outvars[0]].in_half
    if not is_wanted:
        return False
    # A backward pass transposes or reverses weights for the gradients of inputs: XLA would reverse the
    # float32 weights of a convolution, and cast them in a kernel of its own.
    turns = analysis.context.is_backward(op) and not op.traits.copies
    return turns or op.traits.gathers or (op.name == "reshard" and operand.wide_gradient)


def _cast(op: Op, operand: State) -> Decision:
    """Decides about a cast of the program. autocast obeys it. A cast from float32 to float32 does nothing."""
    (source,), (target,) = op.equation.invars, op.equation.outvars
    if is_float32(source) and is_float32(target):
        action, result, reason = Skip(operand=0), operand, "float32 already"
    else:
        action, (result, reason) = Run((Take.AS_IS,)), _result_of_cast(source, target, operand)
    return Decision(op, Category.AS_TRACED, action, (result,), reason, changed=operand.is_half)


def _result_of_cast(source: Var, target: Var, operand: State) -> tuple[State, str]:
    """Returns the state of the result of a cast of the program, and the reason."""
    if not is_float32(target):
        return State(Kind.OTHER, constant=operand.constant), "the program casts"
    if source.aval.dtype == jnp.bool_:  # It has a source, since it may be rounded as an argument may.
        return State(Kind.BINARY, constant=operand.constant, source=Source()), "half holds 0 and 1"
    if jnp.issubdtype(source.aval.dtype, jnp.integer):
        # float16 holds all integers up to 2048, and bfloat16 up to 256. A number or a scalar, such as a size
        # by which a sum is divided, adapts: what takes it beside a half value computes in float32.
        is_free = operand.constant or source.aval.ndim == 0
        kind = Kind.ADAPTS if is_free else Kind.ARGUMENT
        return State(kind, constant=operand.constant), "half may not hold the integers"
    return FLOAT32, "the program casts to float32"

"""Which sums of a residual stream the option `half_sums` brings to half."""

import dataclasses
from collections.abc import Callable, Set

from ..._jaxpr.primitives import Category
from ..._jaxpr.read import Var, is_float32
from .op import Context, Op
from .rules import Rules, first_match
from .ruling import Ruling, Why
from .scopes import Scopes

# What such an operation makes of a product's result is still that result, such as a reshape or a dropout.
_PASSES_ON = (Category.INFER, Category.MOVE)


class HalfSums:
    """The sums that `half_sums` selects in an open jaxpr, asked for in the order of its operations.

    Args:
        streams: the variables that matmuls read later.
        may_be_half: whether a variable may be in half.
    """

    def __init__(
        self,
        rules: Rules,
        scopes: Scopes,
        context: Context,
        streams: Set[Var],
        may_be_half: Callable[[Var], bool],
    ) -> None:
        self._rules, self._scopes, self._context = rules, scopes, context
        self._streams, self._may_be_half = streams, may_be_half
        self._of_products: set[Var] = set()  # Results of products, and element-wise functions of them.
        self._selected: set[Var] = set()  # The sums.
        # For each variable, the arrays whose slices it is computed from by moves and element-wise operations.
        self._sliced: dict[Var, frozenset[Var]] = {}

    def rule(self, op: Op, ruling: Ruling) -> Ruling:
        """Returns the ruling on an operation, with the pattern that selects it if it is such a sum."""
        if self._continues_stream(op, ruling):
            pattern = first_match(self._rules.half_sums, self._context.scope_of(op))
            if pattern:
                self._scopes.note_used("half_sums", pattern)
                self._selected.update(op.equation.outvars)
                ruling = dataclasses.replace(ruling, half_sum=pattern)
        self._note(op, ruling)
        return ruling

    def _note(self, op: Op, ruling: Ruling) -> None:
        """Notes what later questions ask about the results of an operation."""
        outvars, passes_on = op.equation.outvars, ruling.category in _PASSES_ON
        if ruling.is_half_product or (passes_on and not self._of_products.isdisjoint(op.variables)):
            self._of_products.update(outvars)
        if passes_on:
            slices = frozenset[Var]().union(*map(self._slices, op.variables))
            slices |= {*op.variables} if op.name == "slice" else frozenset()
            self._sliced.update(dict.fromkeys(outvars, slices))

    def _continues_stream(self, op: Op, ruling: Ruling) -> bool:
        """Whether an operation is a sum of a residual stream: of a matmul's result, for later matmuls."""
        # Other sums of two arrays, such as those of log-probabilities in a loss or those of an accumulator,
        # may need float32.
        is_kept = bool(ruling.reason) and ruling.why is not Why.LOOP
        if op.name != "add" or self._context.is_backward(op) or is_kept:
            return False
        if not op.is_residual_sum:
            return self._adds_bias(op) and not self._streams.isdisjoint(op.equation.outvars)
        # A sum may continue a stream that only a loss reads: casts by hand would round it too.
        is_stream = not self._streams.isdisjoint(op.equation.outvars)
        is_read = is_stream or not self._selected.isdisjoint(op.variables)
        # `lax.associative_scan` computes a recursion by sums of the even and odd elements of one array.
        is_of_slices = bool(frozenset.intersection(*map(self._slices, op.variables)))
        return is_read and not is_of_slices and self._adds_product(op)

    def _adds_product(self, op: Op) -> bool:
        # What adapts may be a product's result that a call or a loop returns.
        may_be_half = any(map(self._may_be_half, op.equation.invars))
        return may_be_half or not self._of_products.isdisjoint(op.variables)

    def _adds_bias(self, op: Op) -> bool:
        """Whether an operation adds something smaller, such as a bias, to the result of a product."""
        (out,) = op.equation.outvars
        whole = [var for var in op.variables if var.aval.shape == out.aval.shape]
        is_product = [self._may_be_half(var) and var in self._of_products for var in whole]
        return is_product == [True] and is_float32(out)

    def _slices(self, var: Var) -> frozenset[Var]:
        return self._sliced.get(var, frozenset())

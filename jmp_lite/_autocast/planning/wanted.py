"""How much the values of a jaxpr are wanted in half: what the backward pass of the planner finds."""

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable

from ..._jaxpr.read import Var, is_float32
from .op import Op


class Wanted(enum.IntEnum):
    """How much the readers of a value want the value in half."""

    EXACT = -1  # Only integers and booleans are computed from the value, and rounding would change them.
    NO = 0
    INDIRECTLY = 1  # An operation passes the value on to a product. There may be other readers.
    WITH_OTHERS = 2  # A product takes the value and rounds it. Other readers may read the rounded value.
    BY_PRODUCTS_ONLY = 3  # All readers are products, which round the value.


@dataclasses.dataclass(frozen=True)
class Demand:
    """What a jaxpr wants in half."""

    reads: Callable[[Var], int]  # How often each variable is read.
    # The variables that some operation wants in half.
    wanted: set[Var] = dataclasses.field(default_factory=set)
    # For each variable, how many readers take it in half as a product does.
    products: collections.Counter[Var] = dataclasses.field(default_factory=collections.Counter)
    # The variables that an operation reads in float32. If other readers rounded such a variable, that
    # operation would read the rounded value too.
    kept: set[Var] = dataclasses.field(default_factory=set)
    # The variables that a residual sum reads in float32. If a product reads such a variable too, the sum may
    # read it rounded: a user who casts by hand would round it for both.
    summed: set[Var] = dataclasses.field(default_factory=set)
    # The variables that something reads as numbers, and those from which integers or booleans are computed.
    numbers: set[Var] = dataclasses.field(default_factory=set)
    exact: set[Var] = dataclasses.field(default_factory=set)
    # The residual sums that `half_sums` selects. They are in half, whatever reads them.
    stored: set[Var] = dataclasses.field(default_factory=set)

    def of_var(self, var: Var) -> Wanted:
        """Returns how a variable is wanted in half."""
        if var in self.stored:
            return Wanted.WITH_OTHERS
        if var in self.exact and var not in self.numbers:
            return Wanted.EXACT
        if var not in self.wanted or self.keeps(var):
            return Wanted.NO
        if self.products[var] >= self.reads(var):
            return Wanted.BY_PRODUCTS_ONLY
        return Wanted.WITH_OTHERS if self.products[var] else Wanted.INDIRECTLY

    def of_results(self, op: Op) -> Wanted:
        """Returns how the results of an operation are wanted: the largest answer among them."""
        outvars = op.equation.outvars
        if len(outvars) == 1:
            return self.of_var(outvars[0])
        return max(map(self.of_var, outvars), default=Wanted.NO)

    def keeps(self, var: Var) -> bool:
        """Whether an operation reads `var` in float32 and should not read a rounded value."""
        if var in self.stored:
            return False
        return var in self.kept or (var in self.summed and not self.products[var])

    def want_output(self, var: Var, wanted: Wanted) -> None:
        """Notes how the caller of the jaxpr wants an output."""
        self.want([var], wanted)
        (self.exact if wanted is Wanted.EXACT else self.numbers).add(var)
        if wanted <= Wanted.NO:
            self.kept.add(var)

    def want(self, variables: Iterable[Var], wanted: Wanted) -> None:
        """Notes that one reader wants some variables."""
        if wanted > Wanted.NO:
            for var in filter(is_float32, variables):
                self.wanted.add(var)
                self.products[var] += wanted >= Wanted.WITH_OTHERS

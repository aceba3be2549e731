"""How much the values of a jaxpr are wanted in half: what the demand, a walk backwards, finds."""

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence

from ..._jaxpr.read import Var, is_float32, is_literal
from .op import Op


# The order is that of how much may be rounded. An operation that computes wants its operands at most as much
# as its result is wanted (`min`); a move wants its operand as its result is wanted. Of several branches the
# most careful one decides (`min`), of several results the one that is wanted most (`max`).
class Wanted(enum.IntEnum):
    """How much the readers of a value want the value in half."""

    EXACT = -1  # Only integers are computed from the value, and rounding would change them.
    NO = 0
    INDIRECTLY = 1  # An operation passes the value on to a product. There may be other readers.
    WITH_OTHERS = 2  # A product takes the value and rounds it. Other readers may read the rounded value.
    BY_PRODUCTS_ONLY = 3  # All readers are products, which round the value, or moves for products.


@dataclasses.dataclass(slots=True)
class Uses:
    in_half: bool = False  # An operation wants it in half.
    by_products: int = 0  # How many readers take it in half as a product does.
    # An operation reads it in float32. If other readers rounded it, that operation would read the rounded
    # value too.
    in_float32: bool = False
    # A residual sum reads it in float32. If a product reads it too, the sum may read it rounded: a user who
    # casts by hand would round it for both.
    by_sums: bool = False
    as_number: bool = False  # Something reads it as a number.
    exactly: bool = False  # Integers are computed from it.
    is_half_sum: bool = False  # It is a residual sum that `half_sums` selects: in half, whatever reads it.

    @property
    def keep_float32(self) -> bool:
        """Whether an operation reads it in float32 and should not read a rounded value."""
        # One that `half_sums` selects is in half by the user's wish, so its readers read it rounded.
        return not self.is_half_sum and (self.in_float32 or (self.by_sums and not self.by_products))

    @property
    def is_exact(self) -> bool:
        """Whether nothing but integers is computed from it."""
        return self.exactly and not self.as_number

    def wanted(self, reads: int) -> Wanted:
        """Returns how the variable, which is read `reads` times, is wanted in half."""
        if self.is_half_sum:
            return Wanted.WITH_OTHERS
        if self.is_exact:
            return Wanted.EXACT
        # From here on: may it be rounded, and would a reader round it in any case?
        if not self.in_half or self.keep_float32:
            return Wanted.NO
        if not self.by_products:
            return Wanted.INDIRECTLY
        return Wanted.BY_PRODUCTS_ONLY if self.by_products >= reads else Wanted.WITH_OTHERS

    def add_call(self, inside: "Uses", is_carry: bool) -> None:
        """Adds the uses of the variable inside of a call. A carry is a float32 number in any case."""
        # `in_half` and `by_products` follow from the answer of all jaxprs of the call (`DemandWalk`).
        self.in_float32 |= is_carry or inside.in_float32
        self.by_sums |= inside.by_sums
        if is_carry or inside.as_number:
            self.as_number = True
        else:
            self.exactly |= inside.exactly


@dataclasses.dataclass(frozen=True)
class Demand:
    reads: Callable[[Var], int]  # How often each variable is read.
    uses: dict[Var, Uses] = dataclasses.field(default_factory=lambda: collections.defaultdict(Uses))

    def of_var(self, var: Var) -> Wanted:
        return self.uses[var].wanted(self.reads(var))

    def of_results(self, op: Op) -> Wanted:
        """Returns how the results of an operation are wanted: the largest answer among them."""
        outvars = op.equation.outvars
        if len(outvars) == 1:
            return self.of_var(outvars[0])
        return max(map(self.of_var, outvars), default=Wanted.NO)

    def want_outputs(self, outvars: Sequence[Var], wanted: Sequence[Wanted]) -> None:
        """Notes how the caller of the jaxpr wants its outputs."""
        for var, want in zip(outvars, wanted):
            if not is_literal(var):
                # An output counts as a reader (`Readers.count`), and wants what the readers outside want.
                self.want([var], want)
                (self.read_exactly if want is Wanted.EXACT else self.read_numbers)([var])
                self.uses[var].in_float32 |= want <= Wanted.NO

    def read_numbers(self, variables: Iterable[Var]) -> None:
        for var in variables:
            self.uses[var].as_number = True

    def read_exactly(self, variables: Iterable[Var]) -> None:
        """Notes that integers are computed from some variables."""
        for var in variables:
            self.uses[var].exactly = True

    def want(self, variables: Iterable[Var], wanted: Wanted) -> None:
        if wanted > Wanted.NO:
            # `by_products` counts readers, so a variable that an operation reads twice counts twice.
            for var in filter(is_float32, variables):
                self.uses[var].in_half = True
                self.uses[var].by_products += wanted >= Wanted.WITH_OTHERS

    def keep(self, variables: Iterable[Var], by_sum: bool = False) -> None:
        """Notes that an operation, such as a residual sum, reads some variables in float32."""
        for var in variables:
            if by_sum:
                self.uses[var].by_sums = True
            else:
                self.uses[var].in_float32 = True

    def note_sum(self, var: Var, in_half: bool) -> None:
        """Notes a residual sum. One that another sum reads stays float32, unless `half_sums` selects it."""
        # If a residual stream were rounded at each sum, its rounding errors would pile up.
        uses = self.uses[var]
        uses.is_half_sum = in_half
        uses.in_float32 |= uses.by_sums


class Everything(Demand):
    """The demand of a first decision: each variable may be wanted in half."""

    def of_var(self, var: Var) -> Wanted:
        del var
        return Wanted.INDIRECTLY

    def of_results(self, op: Op) -> Wanted:
        del op
        return Wanted.INDIRECTLY

"""The demand: a walk backwards that finds the values which are wanted in half.

A value is wanted in half if two conditions hold. A product takes the value, directly or through operations
that pass it on. No operation reads the value in float32, since that operation would read a rounded value.
(`wanted` has the exceptions: functions that saturate, residual sums, and `half_sums`.)
"""

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

from ..._jaxpr import read, scopes
from ..._jaxpr.inner import Inner, Role
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import Jaxpr, Var
from .dependence import Dependence, Intermediate, LoopDecisions, Streams, Tangents
from .op import Context, Held, Op, Readers, ReadJaxprs
from .operands import note_use, reads_in_float32, wants
from .regions import Regions
from .rules import Rules
from .ruling import Ruling, kind_in_demand
from .scopes import Scopes
from .softmaxes import Region
from .states import WIDE, Kind, State
from .wanted import Demand, Everything, Wanted


@dataclasses.dataclass(eq=False)
class Analysis:
    """All that the planner knows of a jaxpr at one point of the program.

    Its states are those of a first decision, made as if everything were wanted in half: what is not in half
    then stays float32 in any case.
    """

    rules: Rules
    scopes: Scopes
    inside: Jaxpr  # The open jaxpr.
    ops: tuple[Op, ...]
    readers: Readers
    found: Regions  # Where its regions may end, such as activation functions and softmaxes.
    context: Context
    rulings: list[Ruling]
    states: dict[Var, State]
    inner: dict[Op, list["Analysis"]]  # Those of the jaxprs of each call.
    intermediate: frozenset[Var]  # The variables that a backward pass reads on (`dependence`).
    gradients: frozenset[Var]  # The results of a backward pass, such as the gradient of a weight.
    streams: frozenset[Var]  # The variables that products read later; empty without `half_sums`.
    decisive: frozenset[Var]  # The variables on which a decision of a loop depends (`dependence`).
    tangents: frozenset[Var]  # The variables that depend on the tangents of a forward-mode rule.
    demand: Demand  # The variables that the jaxpr wants in half.
    regions: dict[Var, Region] = dataclasses.field(default_factory=dict)  # By their results.
    results: tuple[State, ...] = ()

    def kind(self, var: Var) -> Kind:
        return Kind.ADAPTS if read.is_literal(var) else kind_in_demand(self.states[var])

    def makes_gradient(self, op: Op) -> bool:
        """Whether an operation makes a result of the backward pass, such as the gradient of a weight."""
        return not self.gradients.isdisjoint(op.equation.outvars)

    def is_gradient_of_half(self, op: Op) -> bool:
        """Whether a product by one-hot labels is in a backward pass, and in half in the forward pass."""
        if not self.context.is_backward(op):
            return False
        # Both take the same labels, the forward pass beside a table and the backward pass beside a cotangent.
        labels = [var for var in op.variables if self.kind(var) == Kind.BINARY]
        readers = (self.ops[index] for var in labels for index in self.readers.operations[var])
        return any(
            reader.traits.category is Category.ALLOW
            and not self.context.is_backward(reader)
            and not any(self.kind(var) in WIDE for var in reader.variables)
            for reader in readers
        )


class DemandWalk:
    """Reads jaxprs, and finds what they want in half."""

    def __init__(self, rules: Rules, scopes: Scopes) -> None:
        self._rules, self._scopes = rules, scopes
        self._jaxprs = ReadJaxprs(rules)
        self._regions: dict[tuple[int, bool], Regions] = {}
        self._analyses: dict[Any, Analysis] = {}
        self._is_told: bool | None = None  # See `_tells_gradients`.
        self._decisions = LoopDecisions(self._jaxprs.ops)
        self._intermediate = Intermediate(self._jaxprs.ops)
        self._streams = Streams(self._jaxprs.ops)
        self._tangents = Tangents(self._jaxprs.ops)

    def read(self, jaxpr: Jaxpr, context: Context, states: dict[Var, State]) -> Analysis:
        """Returns what is known of a jaxpr before any decision: everything may be wanted in half."""
        inside = read.open_jaxpr(jaxpr)
        ops, readers = self._jaxprs.ops(inside), self._jaxprs.readers(inside)
        # The questions of `dependence`, each asked only where a decision needs the answer.
        intermediate = gradients = frozenset[Var]()
        if self._tells_gradients(inside):
            intermediate = self._intermediate.variables(inside, context.intermediate, context.backward)
            made = {var for op in ops if context.is_backward(op) for var in op.equation.outvars}
            # What the backward pass computes and nothing reads is not a gradient.
            gradients = frozenset(filter(readers.count, made - intermediate))
        streams = frozenset[Var]()
        if self._rules.half_sums:
            streams = self._streams.variables(inside, context.streams, context.backward)
        return Analysis(
            rules=self._rules,
            scopes=self._scopes,
            inside=inside,
            ops=ops,
            readers=readers,
            found=self._regions_of(inside, context.of_gradient),
            context=context,
            rulings=[],
            states=states,
            inner={},
            intermediate=intermediate,
            gradients=gradients,
            streams=streams,
            decisive=self._decisions.variables(inside, context.decides, held=context.held),
            tangents=self._tangents.variables(inside, context.tangents),
            demand=Everything(readers.count),
        )

    def analyse(self, first: Analysis, wanted: tuple[Wanted, ...]) -> Analysis:
        """Returns an analysis with the demand of the jaxpr, whose outputs are wanted in half as `wanted`."""
        key = first, wanted
        if key not in self._analyses:
            demand = Demand(first.readers.count)
            self._analyses[key] = dataclasses.replace(first, demand=demand, regions={})
            self._go_backwards(self._analyses[key], wanted)
        return self._analyses[key]

    def context(self, op: Op, inner: Inner, analysis: Analysis) -> Context:
        """Returns what one of the jaxprs of a call needs to know of the program around it."""
        around, index = analysis.context, op.inner.index(inner)
        scope = scopes.call_scope(around.scope_of(op), op.equation)
        scope = self._scopes.cache_key(f"{scope}/{inner.scope}" if inner.scope else scope)

        def outputs(question: Dependence, found: Set[Var]) -> tuple[bool, ...]:
            results = [var in found for var in op.equation.outvars]
            return question.outputs(op, results, around.is_backward(op))[index]

        tells_gradients = self._tells_gradients(analysis.inside)
        decides, held = self._of_loops(op, index, analysis)
        return Context(
            scope,
            around.is_backward(op),
            outputs(self._intermediate, analysis.intermediate) if tells_gradients else (),
            outputs(self._streams, analysis.streams) if self._rules.half_sums else (),
            decides,
            held,
            self._tangents.inputs(op, analysis.tangents)[index] if analysis.tangents else (),
            of_gradient=around.of_gradient or scopes.is_of_gradient(op.equation),
        )

    def _of_loops(
        self, op: Op, index: int, analysis: Analysis
    ) -> tuple[tuple[bool, ...], tuple[Held | None, ...]]:
        """Returns which outputs of a jaxpr decide a loop around it, and what its inputs hold of that loop."""
        around, results = analysis.context, [var in analysis.decisive for var in op.equation.outvars]
        known = self._decisions.loops.held(analysis.inside, around.held)
        held = self._decisions.loops.inside(op, known, results)[index]
        decides: tuple[bool, ...] = ()
        if analysis.decisive or Held.CARRY in held:
            decides = self._decisions.outputs(op, results, around.is_backward(op), known)[index]
        # Flags that say nothing are left out, so that equal layers in other places share an analysis.
        says_something = Held.CARRY in held or any(decides)
        return decides if any(decides) else (), held if says_something else ()

    def _tells_gradients(self, inside: Jaxpr) -> bool:
        """Whether decisions depend on which products make the gradients of weights."""
        # They do with a `reduce_dtype`, and if the program makes numbers of booleans, such as one-hot labels.
        # The first jaxpr that is analysed is the whole program.
        if self._is_told is None:
            casts = (
                each for each in read.all_equations(inside) if each.primitive.name == "convert_element_type"
            )
            has_one_hot = any(each.invars[0].aval.dtype == bool for each in casts)
            self._is_told = has_one_hot or self._rules.reduce_dtype is not None
        return self._is_told

    def _regions_of(self, inside: Jaxpr, of_gradient: bool) -> Regions:
        key = id(inside), of_gradient
        if key not in self._regions:
            self._regions[key] = Regions(self._jaxprs.ops(inside), self._jaxprs.readers(inside), of_gradient)
        return self._regions[key]

    def _go_backwards(self, analysis: Analysis, wanted: Sequence[Wanted]) -> None:
        """Adds to the demand what each operation wants, from the last operation to the first."""
        # When the walk reaches an operation, it has met all readers of its results.
        demand = analysis.demand
        demand.want_outputs(analysis.inside.outvars, wanted)
        absorbed: dict[int, Region] = {}  # The region that computes an operation, by the operation's index.
        for index in reversed(range(len(analysis.ops))):
            op, ruling = analysis.ops[index], analysis.rulings[index]
            if op.is_residual_sum or ruling.half_sum:
                demand.note_sum(op.equation.outvars[0], in_half=bool(ruling.half_sum))
            result = demand.of_results(op)
            is_inside = _is_inside(index, absorbed, analysis)
            if not is_inside and (region := _region_ending(index, result, analysis)) is not None:
                _add_region(region, op.equation.outvars[0], analysis)
                absorbed |= dict.fromkeys(region.members, region)
                is_inside = True
            if ruling.category is not Category.CALL:
                kept: Sequence[Var] = op.variables
                if is_inside:  # A residual sum within a chain continues the stream in front of it.
                    continues = op.is_residual_sum and absorbed[index].is_chain
                    kept = analysis.found.made_outside(op, absorbed.keys()) if continues else ()
                self._want_operands(op, ruling, result, kept, analysis)
            elif is_inside:  # A `jnp.where` within a softmax.
                demand.read_numbers(op.variables)
            else:
                self._want_operands_of_call(op, analysis)

    def _want_operands(
        self, op: Op, ruling: Ruling, result: Wanted, kept: Sequence[Var], analysis: Analysis
    ) -> None:
        """Notes how an operation, whose result is wanted as `result`, uses its operands.

        If the operation computes in float32, `kept` should not be rounded.
        """
        demand = analysis.demand
        note_use(op, demand)
        takes_half, gives_half = self._halves(op, ruling, analysis, result)
        demand.want(op.variables, wants(op, ruling, takes_half, gives_half, result, self._rules.dtype))
        if reads_in_float32(op, ruling, takes_half, gives_half, demand):
            demand.keep(kept, by_sum=op.is_residual_sum)

    def _halves(self, op: Op, ruling: Ruling, analysis: Analysis, result: Wanted) -> tuple[bool, bool]:
        """Returns two flags: the operation takes half operands as a product; its result may be in half."""
        if ruling.is_half_product:
            operands = list(map(analysis.kind, op.equation.invars))
            # A product by one-hot labels selects numbers for float32 operations, as a lookup would. One that
            # makes the gradient of a weight is a product like others.
            is_gradient = analysis.makes_gradient(op) or analysis.is_gradient_of_half(op)
            selects = Kind.BINARY in operands and result is Wanted.NO and not is_gradient
            takes_half = ruling.takes_half(operands) and not selects and result is not Wanted.EXACT
            return takes_half, takes_half
        if ruling.category is not Category.INFER or ruling.reason:
            return False, False
        # The kinds below `ARGUMENT` are those that may be in half, or are no float32 values.
        return False, all(analysis.kind(var) < Kind.ARGUMENT for var in op.equation.outvars)

    def _want_operands_of_call(self, op: Op, analysis: Analysis) -> None:
        """Notes how the jaxprs of a call use its operands. Of several jaxprs the most careful one decides."""
        demand, invars = analysis.demand, op.equation.invars
        results = [demand.of_var(var) for var in op.equation.outvars]
        wants: dict[int, Wanted] = {}  # By the index of the operand.
        for inner, first in zip(op.inner, analysis.inner[op]):
            inside = self.analyse(first, wanted_inside(inner, results))
            for index, role, var in zip(inner.operands, inner.roles, inside.inside.invars):
                if read.is_literal(invars[index]):
                    continue
                is_carry = role is Role.CARRY
                demand.uses[invars[index]].add_call(inside.demand.uses[var], is_carry)
                want = Wanted.NO if is_carry else inside.demand.of_var(var)
                if want > Wanted.NO:
                    wants[index] = min(want, wants.get(index, want))
        for index, want in wants.items():
            demand.want([invars[index]], want)


def wanted_inside(inner: Inner, results: Sequence[Wanted]) -> tuple[Wanted, ...]:
    """Returns for each output of an inner jaxpr how it is wanted in half."""
    # The carry of a loop keeps its dtype. The predicate of a `while` is no result (None).
    return tuple(
        Wanted.NO if index is None or carry else results[index]
        for index, carry in zip(inner.results, inner.carries)
    )


def _is_inside(index: int, absorbed: Mapping[int, Region], analysis: Analysis) -> bool:
    """Whether a region computes an operation, and nothing outside of the regions reads the result."""
    outvars = analysis.ops[index].equation.outvars
    return index in absorbed and len(outvars) == 1 and analysis.readers.are_only(outvars[0], absorbed.keys())


def _region_ending(index: int, wanted: Wanted, analysis: Analysis) -> Region | None:
    """Returns the region that ends with an operation whose result is wanted as `wanted`, if there is one."""
    if len(analysis.ops[index].equation.outvars) != 1:
        return None
    return analysis.found.ending(index, wanted, analysis.states, analysis.rulings)


def _add_region(region: Region, result: Var, analysis: Analysis) -> None:
    analysis.regions[result] = region
    # If the sources were not in half, the backward pass would keep the float32 values inside each GELU: a
    # GPT-2 would read and write 7.8 % more bytes on an H100.
    analysis.demand.want(region.sources, Wanted.INDIRECTLY)
    analysis.demand.keep(region.extras)

"""Half values that have one dtype, or JAX refuses the program: an edit has to widen all of them.

The functions of `jax.lax` do not promote their operands. A carry has one dtype, and so have branches.
"""

import collections
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ..._jaxpr import Equation, inner_jaxprs, is_of_lax
from .._values.casts import Casts
from .._values.reference import is_narrow
from .._values.sites import line_of
from .modules import Module
from .origins import Origin, Sources

Tie: TypeAlias = tuple[frozenset[str], ...]
"""Half values that must share a dtype. Each is the set of the names of the edits that make it float32."""


class Constraints(NamedTuple):
    """Which edits have to be made together."""

    ties: Sequence[Tie] = ()
    needs: Sequence[Tie] = ()  # Pairs: an edit of the first needs one of the second, for right gradients.
    rules: Sequence[Tie] = ()  # The same, also for a right loss: autocast casts what the first makes float32.

    def completed(
        self, edits: Collection[str], every: Mapping[str, Module], of_gradients: bool
    ) -> frozenset[str] | None:
        """Returns some edits, with those of `every` that they need as well; None if they are not enough."""
        done, made = frozenset[str](), frozenset(edits)
        while made != done:
            done = made
            while (missing := next(self._missing(done, of_gradients), None)) is not None:
                if not (known := sorted(missing.intersection(every))):
                    return None
                done |= {known[0]}
            # An edit of several lines is made if each of them is edited.
            lines = {line for key in done for line in (*every[key].lines, *every[key].after)}
            made = done | {key for key, edit in every.items() if edit.casts and lines.issuperset(edit.lines)}
        return done

    def _missing(self, edits: Collection[str], of_gradients: bool) -> Iterator[frozenset[str]]:
        """Yields each set of edits that needs one more edit: one of the set is required, and none is made."""
        for tie in self.ties:
            in_half = [names for names in tie if names.isdisjoint(edits)]
            if len(in_half) < len(tie):
                yield from in_half
        for first, second in (*self.rules, *(self.needs if of_gradients else ())):
            if second.isdisjoint(edits) and not first.isdisjoint(edits):
                yield second


class Found(NamedTuple):
    """The sources of a program. Operations are those of a report, by their index."""

    sources: list[Sources]  # What the half values of each operation come from.
    constraints: Constraints
    autocast: dict[int, Module]  # Of a half product that an autocast inside of the program runs, its scope.
    others: list[Module]  # Edits that no operation may have as a source.
    rules: set[int]  # Those of a backward rule that may cast to half by itself.
    unknown: list[Module]  # Casts of values that are not known, which any edit may need.


class Ties:
    """The ties of a program, as they are found."""

    def __init__(self) -> None:
        self._found: dict[Tie, None] = {}
        self._needs: dict[Tie, None] = {}
        # By the name of a source, the loops whose half carries come from it and start from numbers alone.
        self.carried: dict[str, dict[str, None]] = collections.defaultdict(dict)

    def of_operands(self, equation: Equation, operands: Sequence[Origin], left_out: Casts) -> None:
        """Notes that the half operands of an equation have one dtype, but for casts that JAX left out."""
        values = {n: operands[n].edits for n, var in enumerate(equation.invars) if is_narrow(var)}
        own = {n: left_out.edits_of(n) for n in left_out.operands}
        self._add((values | own).values())

    def of_casts(self, equation: Equation, operands: Sequence[Origin], left_out: Casts) -> None:
        """Notes the casts that round a gradient where the backward pass has no equation that does so."""
        for n in left_out.operands:
            own, edits = left_out.edits_of(n), operands[n].edits
            # A cast to float32 in its place has a gradient in half, as long as its operand is in half.
            self._needs[own, edits] = None
            # The gradient of a sum is that of its result: left in the program, such a cast rounds it.
            if equation.primitive.name in ("add", "sub"):
                self._needs[edits, own] = None

    def of_call(
        self,
        equation: Equation,
        operands: Sequence[Origin],
        inner: Sequence[Sequence[Origin]],
        results: Sequence[Origin],
    ) -> None:
        """Notes that the start of a carry and its next value share a dtype, or the results of branches."""
        name, body = equation.primitive.name, inner_jaxprs(equation)[-1]
        for n, var in enumerate(equation.outvars):
            if is_narrow(var) and name == "cond":
                self._add(branch[n].entering for branch in inner)
            elif is_narrow(var) and name in ("scan", "while") and n < body.carried:
                first = operands[body.operands[body.constants + n]].entering
                self._add((first, inner[-1][n].entering))
                for source in () if first else results[n].sources:
                    self.carried[source.name][line_of(equation)] = None

    def _add(self, values: Iterable[frozenset[str]]) -> None:
        tie = tuple(filter(None, values))  # A value without an edit adapts to the others.
        if len(tie) > 1:
            self._found[tie] = None

    def with_casts(self, after: Mapping[str, Collection[str]]) -> Constraints:
        """Returns the ties. `after` maps the name of a source to the casts that its edit makes float32."""

        every = {name: all_after(after, name) for name in after}

        def widened(names):
            return names | {source for source, casts in every.items() if not names.isdisjoint(casts)}

        def all_widened(ties):
            return [tuple(map(widened, tie)) for tie in ties if all(tie)]

        return Constraints(all_widened(self._found), all_widened(self._needs))


def all_after(after: Mapping[str, Collection[str]], name: str) -> tuple[str, ...]:
    """Returns the casts of what comes from a source, and those of what comes from these casts."""
    found, new = dict[str, None](), dict.fromkeys([name])
    while new := dict.fromkeys(cast for each in new for cast in after.get(each, ()) if cast not in found):
        found |= new
    return tuple(found)


def keeps_dtypes(equation: Equation) -> bool:
    """Whether an operation does not promote operands of two dtypes."""
    name = equation.primitive.name
    # Products take them. Of several results, as those of a sort, each has its own.
    has_one_dtype = len(equation.outvars) == 1 and not name.endswith(("dot_general", "convert_element_type"))
    return has_one_dtype and is_of_lax(equation)


def rules_needed(
    own: Mapping[Module, Collection[int]], rules: Mapping[int, Module | None], cast: Sequence[Module]
) -> Iterator[Tie]:
    """Yields which edit needs which other one under autocast. `rules` has what selects a product, or None."""
    # In float32, a half product of the program is one that autocast casts, if no rule selects it.
    for edit, members in own.items():
        if edit.is_edit:
            found = (rules[n] for n in members if n in rules)
            yield from ((frozenset({edit.key}), frozenset({rule.key} if rule else ())) for rule in found)
    # A rule selects an argument that is passed in float32.
    given = {edit.name: edit.key for edit in own if edit.is_argument}
    for module in cast:
        if (argument := module.name.partition("/")[0]) in given:
            yield frozenset({module.key}), frozenset({given[argument]})

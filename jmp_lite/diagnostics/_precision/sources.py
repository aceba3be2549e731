"""The sources of a program's half values: casts in lines of the user, layers of a library, arguments in half.

If the cast of a source is left out, JAX's promotion computes in float32 all that depends on its result, up to
a cast back to float32. So a source is an edit that a user can write, where a scope is not.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..._jaxpr import (
    Arguments,
    Category,
    Equation,
    Forward,
    Jaxpr,
    Span,
    call_scope,
    inner_jaxprs,
    is_by_autocast,
    scope_of,
    traits_of,
    users_places,
)
from ..._paths import visible_scope
from .._values.numbers import Numbers, all_written
from .._values.reference import is_narrow
from .._values.rules import operations_of_rules
from .._values.sites import line_of
from .modules import Module, is_of_library
from .needs import Tie
from .origins import (
    LIBRARY,
    NONE,
    UNKNOWN,
    Key,
    Origin,
    Sources,
    Stage,
    both,
    calls_of_checkpoints,
    gives_half,
    joined,
    keeps_dtypes,
    keys_of,
    layers_of,
    number_in_half,
    of_cast,
    operations_of,
    stage_of,
    widens,
)


class Found(NamedTuple):
    """The sources of a program. Operations are those of a report, by their index."""

    sources: list[Sources]  # What the half values of each operation come from.
    autocast: dict[int, Module]  # Of a half product that an autocast inside of the program runs, its scope.
    rules: set[int]  # Those of a backward rule that may cast to half by itself.
    ties: list[Tie]  # What JAX refuses in two dtypes: operands of `jax.lax`, carries and branches.


def sources_of(
    traced: Arguments, is_step: bool, numbers: Numbers, layers: Mapping[int, Module] = MappingProxyType({})
) -> Found:
    """Returns what the half values of a program come from.

    An operation in float32 has sources if one of the `numbers` that it takes was converted to half. `layers`
    has the layers of a library, by the indexes of their operations. What one gives comes from it alone: it
    casts whatever it takes to its own dtype.
    """
    named = zip(traced.names, traced.arrays, strict=True)

    def source(name):
        return Origin(frozenset({Module(name.split("/")[0], "", is_argument=True)}))

    operations = list(operations_of(traced.jaxpr))
    search = _Search(traced.jaxpr, numbers, layers_of(operations, layers))
    search.run(traced.jaxpr, [source(name) if is_narrow(array) else Origin() for name, array in named])
    every = frozenset[Module]().union(*map(joined, search.found.values())) - {NONE, LIBRARY}
    # In a loss, a layer of a library has a dtype of its own. In a step, an optimizer casts to the dtypes of
    # its parameters.
    of_library = frozenset(source for source in every if source.is_argument and is_step)

    # A line may convert an array and a number. Only the array tells to which dtype.
    dtypes = {source.name: source.casts for source in every if source.casts != UNKNOWN}

    def with_lines(source: Module) -> Module:
        return dataclasses.replace(
            source,
            casts=dtypes.get(source.name, source.casts),
            carries=tuple(search.carried[source.name]),
        )

    def resolved(equation: Equation) -> Sources:
        if not search.is_rounded(equation):
            return frozenset()
        sources = joined(search.found[id(equation)])
        own = (sources | of_library if LIBRARY in sources else sources) - {LIBRARY, NONE}
        # What has no source adapts to what it meets. Alone it is what any half value may need.
        own = own if own or NONE not in sources else every
        return frozenset(map(with_lines, own))

    products = {n: own for n, each in enumerate(operations) if (own := search.products.get(id(each)))}
    of_rules = operations_of_rules(traced.jaxpr)
    rules = {n for n, each in enumerate(operations) if id(each) in of_rules}
    return Found(list(map(resolved, operations)), products, rules, [*search.ties])


class _Search(Forward[Origin]):
    """Follows sources forwards through a program."""

    def __init__(self, jaxpr: Jaxpr, numbers: Numbers, layers: Mapping[int, Sources]) -> None:
        super().__init__(self._origins, both, Origin(is_fixed=True))
        self._checkpoints = calls_of_checkpoints(jaxpr)
        self._numbers, self._layers = numbers, layers
        # For an operation with half operands and a float32 result, by its key, the sources of these operands.
        self._widened: dict[Key, Sources] = collections.defaultdict(frozenset)
        self._narrowed: dict[str, Sources] = collections.defaultdict(frozenset)  # Those of a cast to half.
        self._differentiated: Sources = frozenset()  # Of the half values that a forward pass takes.
        # By its places, what an operation of a forward pass comes from, and so its backward pass.
        self._forward: dict[tuple[Key, bool], Sources] = {}
        # By the name of a source, the loops whose half carries come from it and start from numbers alone.
        self.carried: dict[str, dict[str, None]] = collections.defaultdict(dict)
        self.ties: dict[Tie, None] = {}
        self.products: dict[int, Module] = {}  # Of an autocast inside, by their ids: their scopes.
        self.rounding = set[int]()  # The ids of equations with a float32 result that round their operands.

    def _call(self, equation: Equation, operands: Sequence[Origin]) -> list[Origin]:
        results = super()._call(equation, operands)
        is_backward = stage_of((*self.calls, equation)) is Stage.BACKWARD
        if equation.primitive.name in ("scan", "while") and not is_backward:
            body = inner_jaxprs(equation)[-1]
            starts = body.operands[body.constants :][: body.carried]
            for first, var, result in zip(starts, equation.outvars, results):
                own = operands[first].edits
                self._tie(own, result.edits - own)
                if is_narrow(var) and not own:
                    for source in result.sources:
                        self.carried[source.name][line_of(equation)] = None
        if equation.primitive.name == "cond" and not is_backward:
            for result in results:
                self._tie(*(frozenset({edit}) for edit in result.edits))
        return results

    def _tie_operands(self, equation: Equation, operands: Sequence[Origin]) -> None:
        halves = [each.edits for each, var in zip(operands, equation.invars) if is_narrow(var)]
        if len(halves) > 1 and keeps_dtypes(equation):
            self._tie(*halves)

    def _tie(self, *values: frozenset[str]) -> None:
        tie = tuple(filter(None, values))  # A value without an edit adapts to the others.
        if len(tie) > 1:
            self.ties[tie] = None

    def _origins(self, equation: Equation, operands: list[Origin]) -> list[Origin]:
        line = self._line(equation)
        stage = stage_of((*self.calls, equation))
        if stage is not Stage.BACKWARD and id(equation) not in self._layers:
            self._tie_operands(equation, operands)
        operands = self._across_gradient(equation, operands, stage, line)
        is_fixed = all(origin.is_fixed for origin in operands)
        sources = self._taken(operands, line) | self.of_numbers(equation)
        if gives_half(equation):
            sources = self._of_half(equation, line, sources, is_fixed, stage)
            sources = self._as_in_forward(equation, sources, stage, line)
        elif stage is not Stage.BACKWARD:
            self._note_widened(equation, operands)
        elif widens(equation):
            # The gradient of a half value is rounded to half, whatever computes it.
            self.rounding.add(id(equation))
            sources = self._narrowed[line] or sources
        sources = (self._layers.get(id(equation)) if sources else None) or sources
        lines = ("" if is_narrow(var) else line for var in equation.outvars)
        return [Origin(sources, own, is_fixed, stage) for own in lines]

    def _line(self, equation: Equation) -> str:
        # A function that JAX jits, such as `jax.nn.one_hot`, has no line of its own: that of its call counts.
        return next(filter(None, map(line_of, (equation, *reversed(self.calls)))), "")

    def _places(self, equation: Equation) -> list[Span]:
        """Returns the expression that made an equation, and the calls around it, inner first."""
        # JAX keeps the frames of the function that it traces, and those of its call in the equation around.
        return [place for each in (equation, *reversed(self.calls)) for place in users_places(each)]

    def _keys(self, equation: Equation, line: str) -> list[Key]:
        return keys_of(line, self._places(equation), self._checkpoints)

    def _taken(self, operands: Sequence[Origin], line: str) -> Sources:
        """Returns what the operands of an operation come from."""
        # `jnp.mean` of half values widens them, sums, and casts back, on one line: the user wrote no cast.
        return joined(origin for origin in operands if origin.line in ("", line))

    def _autocast_around(self, equation: Equation) -> Module | None:
        """Returns the scope of an operation that an autocast inside runs; None for another one."""
        if not any(map(is_by_autocast, (*self.calls, equation))):
            return None
        scope = self._scope(equation)
        return Module(scope or "autocast", "", autocast=scope)

    def _scope(self, equation: Equation) -> str:
        around = functools.reduce(lambda scope, call: call_scope(scope_of(call, scope), call), self.calls, "")
        return visible_scope(scope_of(equation, around))

    def _as_in_forward(self, equation: Equation, sources: Sources, stage: Stage, line: str) -> Sources:
        """Returns the sources of a half result; in a backward pass those of the operation on its line."""
        category = traits_of(equation.primitive.name).category
        if is_of_library(line) or equation.primitive.name == "convert_element_type":
            return sources
        keys = [(key, category is Category.ALLOW) for key in self._keys(equation, line)]
        if stage is Stage.BACKWARD:
            return next(filter(None, map(self._forward.get, keys)), sources)
        # JAX moves operands before it computes with them: it broadcasts one.
        if stage is Stage.OUTSIDE or category is Category.MOVE:
            return sources
        # Of the operations that begin at one place, the first one may be in half where the last one is not.
        self._forward |= {key: self._forward.get(key, sources) & sources for key in keys}
        return sources

    def _across_gradient(
        self, equation: Equation, operands: list[Origin], stage: Stage, line: str
    ) -> list[Origin]:
        """Notes half values that enter a gradient; returns the operands, with the gradients among them."""
        halves = [o for o, var in zip(operands, equation.invars) if is_narrow(var)]
        if stage is Stage.FORWARD:
            self._differentiated |= joined(o for o in halves if o.stage is Stage.OUTSIDE)
        if stage is Stage.OUTSIDE and any(o.stage is Stage.BACKWARD for o in halves):
            return [self._gradient(o, equation, line) for o in operands]
        return operands

    def _gradient(self, origin: Origin, equation: Equation, line: str) -> Origin:
        """Returns the origin of an operand that may be a gradient, in an equation outside of the gradient."""
        if origin.stage is not Stage.BACKWARD or not self._differentiated:
            return origin
        # A gradient has the dtype of the value that was differentiated.
        self.rounding.add(id(equation))
        names = frozenset(source.name for source in self._differentiated)
        sources = {Module(f"the gradients of {', '.join(sorted(names))}", "", one_of=names)}
        if gives_half(equation) and not is_of_library(line):
            sources.add(Module(line, "", (line,), is_gradient=True))
        return origin._replace(sources=frozenset(sources))

    def _of_half(
        self, equation: Equation, line: str, sources: Sources, is_fixed: bool, stage: Stage
    ) -> Sources:
        """Returns the sources of a half result whose operands have the given ones."""
        # A cotangent has the dtype of the value whose gradient it is: what this line has cast to float32.
        if equation.primitive.name == "convert_element_type" and stage is Stage.BACKWARD:
            found = (self._widened[key] for key in self._keys(equation, line))
            return next(filter(None, found), frozenset({NONE}))
        autocast, is_of_jax = self._autocast_around(equation), stage is Stage.BACKWARD
        is_product = traits_of(equation.primitive.name).category is Category.ALLOW
        if autocast is not None and is_product and not is_of_jax:
            self.products[id(equation)] = autocast
            # It casts the operands of a product, whatever their dtypes, unless the program has cast them.
            own = frozenset(source for source in sources if source.is_edit and not source.autocast)
            return own or frozenset({autocast})
        if not sources:
            # JAX makes a cast for a gradient.
            sources = frozenset({NONE}) if is_of_jax else of_cast(equation, line, is_fixed, autocast)
            self._narrowed[line] |= sources
        return sources

    def _note_widened(self, equation: Equation, operands: Sequence[Origin]) -> None:
        """Notes what the half operands of an operation of the forward pass come from; it gives float32."""
        if halves := [operand for operand, var in zip(operands, equation.invars) if is_narrow(var)]:
            for key in self._keys(equation, self._line(equation)):
                self._widened[key] |= joined(halves)

    def is_rounded(self, equation: Equation) -> bool:
        """Whether an equation gives half values, or rounds or takes some."""
        # A comparison with a number that half rounds gives booleans.
        compares = traits_of(equation.primitive.name).compares and bool(all_written(self._numbers, equation))
        is_half = gives_half(equation) or id(equation) in self.rounding
        return is_half or compares or bool(self.of_numbers(equation))

    def of_numbers(self, equation: Equation) -> Sources:
        """Returns the lines that convert the numbers of an equation to half."""
        lines = (number.line for number in all_written(self._numbers, equation))
        return frozenset(map(number_in_half, filter(None, lines)))

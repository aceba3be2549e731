"""The sources of a program's half values: casts in lines of the user, layers of a library, arguments in half.

If the cast of a source is left out, JAX's promotion computes in float32 all that depends on its result, up to
a cast back to float32. So a source is an edit that a user can write, where a scope is not.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ..._jaxpr import (
    Arguments,
    Category,
    Equation,
    Forward,
    Jaxpr,
    Place,
    call_scope,
    inner_jaxprs,
    is_by_autocast,
    is_literal,
    open_jaxpr,
    scope_of,
    traits_of,
    users_places,
)
from ..._paths import visible_scope
from .._values.casts import Casts, casts_of_operators
from .._values.numbers import Numbers, all_written
from .._values.reference import is_narrow
from .._values.rules import operations_of_rules
from .._values.sites import line_of
from .._values.source import names_half
from .._values.unfollowed import Expressions
from .calls import Key, calls_of_checkpoints, casts_of_calls, entering, keys_of, scalars_of_branches
from .modules import Module, is_of_library
from .origins import (
    LIBRARY,
    NONE,
    UNKNOWN,
    Origin,
    Sources,
    Stage,
    both,
    edit_of,
    forward_operations,
    gives_half,
    joined,
    layers_of,
    made_at,
    number_in_half,
    of_cast,
    of_constants,
    operations_of,
    promoting,
    stage_of,
    widens,
)
from .ties import Found, Ties, all_after, keeps_dtypes

_NO_CASTS = Casts({})


def sources_of(
    traced: Arguments, is_step: bool, numbers: Numbers, layers: Mapping[int, Module] = MappingProxyType({})
) -> Found:
    """Returns what the half values of a program come from, and which of them belong together.

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
            carries=tuple(search.ties.carried[source.name]) or source.carries,
            after=all_after(search.after, source.name),
        )

    def resolved(equation: Equation) -> Sources:
        is_half = any(map(is_narrow, equation.outvars)) or id(equation) in search.rounding
        is_half |= search.compares_a_number(equation)
        if not (is_half or search.of_numbers(equation)):
            return frozenset()
        sources = joined(search.found[id(equation)])
        own = (sources | of_library if LIBRARY in sources else sources) - {LIBRARY, NONE}
        # What has no source adapts to what it meets. Alone it is what any half value may need.
        own = own if own or NONE not in sources else every
        return frozenset(map(with_lines, own))

    products = {n: own for n, each in enumerate(operations) if (own := search.products.get(id(each)))}
    others = [*dict.fromkeys(products.values()), *map(with_lines, search.others)]
    of_rules = operations_of_rules(traced.jaxpr)
    rules = {n for n, each in enumerate(operations) if id(each) in of_rules}
    constraints = search.ties.with_casts(search.after)
    unknown = list(map(number_in_half, search.expressions.unfollowed({source.name for source in every})))
    return Found(list(map(resolved, operations)), constraints, products, others, rules, unknown)


class _Search(Forward[Origin]):
    """Follows sources forwards through a program."""

    def __init__(self, jaxpr: Jaxpr, numbers: Numbers, layers: Mapping[int, Sources]) -> None:
        super().__init__(self._origins, both, Origin(is_fixed=True))
        # The lines that cast to float32, by a name that the source may not explain.
        self._widening = set(map(line_of, filter(widens, forward_operations(jaxpr))))
        self._checkpoints = calls_of_checkpoints(jaxpr)
        self._numbers, self._layers = numbers, layers
        # For an operation with half operands and a float32 result, by its key, the sources of these operands.
        self._widened: dict[Key, Sources] = collections.defaultdict(frozenset)
        self._narrowed: dict[str, Sources] = collections.defaultdict(frozenset)  # Those of a cast to half.
        # By the name of a source, the casts of what comes from it that JAX left out.
        self.after: dict[str, dict[str, None]] = collections.defaultdict(dict)
        self._differentiated: Sources = frozenset()  # Of the half values that a forward pass takes.
        # By its places, what an operation of a forward pass comes from, and so its backward pass.
        self._forward: dict[tuple[Key, bool], Sources] = {}
        self.expressions = Expressions()
        self.ties = Ties()
        self._results: dict[int, list[Origin]] = {}  # Of each jaxpr when it was last run.
        self.others: dict[Module, None] = {}  # The edits of what loops and branches take and return.
        self.products: dict[int, Module] = {}  # Of an autocast inside, by their ids: their scopes.
        self.rounding = set[int]()  # The ids of equations with a float32 result that round their operands.

    def run(self, jaxpr: Jaxpr, inputs: Sequence[Origin]) -> list[Origin]:
        self._results[id(open_jaxpr(jaxpr))] = results = super().run(jaxpr, inputs)
        return results

    def _call(self, equation: Equation, operands: Sequence[Origin]) -> list[Origin]:
        if stage_of((*self.calls, equation)) is Stage.BACKWARD:
            return super()._call(equation, operands)
        line, places = line_of(equation), self._places(equation)
        entered, edits, casts = entering(equation, line, places, operands, self.ties, self._is_no_widening)
        operands = [entered.get(n, operand) for n, operand in enumerate(operands)]
        self.others |= dict.fromkeys(edits)
        self.expressions.casts |= casts.paths
        results = super()._call(equation, operands)
        inner = [[*self._results[id(open_jaxpr(part.jaxpr))]] for part in inner_jaxprs(equation)]
        for (branch, n), edit in scalars_of_branches(equation).items():
            self.others[edit] = None
            inner[branch][n] = Origin(frozenset({edit}))
            results[n] = both(results[n], inner[branch][n])
        self.ties.of_call(equation, operands, inner, results)
        if any(map(is_narrow, equation.outvars)):
            around = casts_of_calls(line, equation.primitive.name, places, {}).only(self._is_no_widening)
            self.expressions.casts |= around.paths
            self._note_after(frozenset[str]().union(*(each.edits for each in results)), around.of_result)
        return results

    def _origins(self, equation: Equation, operands: list[Origin]) -> list[Origin]:
        line = self._line(equation)
        is_half = gives_half(equation)
        stage = stage_of((*self.calls, equation))
        if stage is not Stage.BACKWARD:
            self.expressions.note(self._places(equation))
        operands = self._across_gradient(equation, operands, stage, line)
        casts = self._left_out(equation, operands, line, stage)
        left_out = edit_of(equation, casts)
        is_fixed = all(origin.is_fixed for origin in operands)
        sources = left_out or self._taken(operands, line) | self.of_numbers(equation)
        if is_half:
            sources = self._of_half(equation, line, sources, is_fixed, stage)
            sources = self._as_in_forward(equation, sources, stage, line)
        else:
            if stage is not Stage.BACKWARD:
                self._note_widened(equation, operands, left_out)
            sources = self._of_float32(equation, line, sources, left_out, stage)
        sources = (self._layers.get(id(equation)) if sources else None) or sources
        lines = ("" if is_narrow(var) else line for var in equation.outvars)
        made, promoted = "", frozenset[str]()
        if is_half:
            made = made_at(equation, operands, line)
            is_forward = stage is not Stage.BACKWARD
            promoted = frozenset(promoting(equation, operands, casts) if is_forward else ())
            self._note_after(promoted.union(source.name for source in sources), casts.of_result)
        return [Origin(sources, own, is_fixed, stage, made, promoted=promoted) for own in lines]

    def _line(self, equation: Equation) -> str:
        # A function that JAX jits, such as `jax.nn.one_hot`, has no line of its own: that of its call counts.
        return next(filter(None, map(line_of, (equation, *reversed(self.calls)))), "")

    def _places(self, equation: Equation) -> list[Place]:
        """Returns the expression that made an equation, and the calls around it, inner first."""
        # JAX keeps the frames of the function that it traces, and those of its call in the equation around.
        return [place for each in (equation, *reversed(self.calls)) for place in users_places(each)]

    def _keys(self, equation: Equation, line: str) -> list[Key]:
        return keys_of(line, self._places(equation), self._checkpoints)

    def _taken(self, operands: Sequence[Origin], line: str) -> Sources:
        """Returns what the operands of an operation come from."""
        # `jnp.mean` of half values widens them, sums, and casts back, on one line: the user wrote no cast.
        return joined(origin for origin in operands if origin.line in ("", line))

    def _note_after(self, edits: Iterable[str], casts: Sequence[str]) -> None:
        for edit in edits:
            self.after[edit] |= dict.fromkeys(casts)

    def _autocast_around(self, equation: Equation) -> Module | None:
        """Returns the scope of an operation that an autocast inside runs; None for another one."""
        if not any(map(is_by_autocast, (*self.calls, equation))):
            return None
        scope = self._scope(equation)
        return Module(scope or "autocast", "", autocast=scope)

    def _scope(self, equation: Equation) -> str:
        around = functools.reduce(lambda scope, call: call_scope(scope_of(call, scope), call), self.calls, "")
        return visible_scope(scope_of(equation, around))

    def _left_out(self, equation: Equation, operands: list[Origin], line: str, stage: Stage) -> Casts:
        """Returns the casts around an operation that JAX left out.

        Such a cast rounds a value and its gradient, also where the other operands are float32. So the
        operation counts as half until the source has no such cast.
        """
        if stage is Stage.BACKWARD or not any(map(is_narrow, (*equation.invars, *equation.outvars))):
            return _NO_CASTS
        casts = _NO_CASTS if is_of_library(line) else self._casts_of(equation, operands, line)
        # JAX promotes a number to the dtype of the other operand, except in a function that does not promote.
        keeps = keeps_dtypes(equation) and id(equation) not in self._layers
        left = dict[int, tuple[str, ...]]()
        for position, (var, operand) in enumerate(zip(equation.invars, operands)):
            own = casts.operands.get(position, ())
            lines = operand.left_out(own if {*operand.casts} <= {*own} else (*own, *operand.casts))
            if lines and is_narrow(var) and (keeps or not is_literal(var)):
                left[position] = lines
        left_out = casts._replace(operands=left)
        self.ties.of_casts(equation, operands, left_out)
        if keeps:
            self.ties.of_operands(equation, operands, left_out)
        return left_out

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

    def _casts_of(self, equation: Equation, operands: list[Origin], line: str) -> Casts:
        """Returns the casts of the expression that made an equation."""
        # JAX broadcasts the operands of an operator on the line on which it begins.
        if equation.primitive.name == "broadcast_in_dim" and operands[0].edits & casts_of_operators(line):
            return _NO_CASTS
        found = casts_of_calls(line, equation.primitive.name, self._places(equation), self._checkpoints)
        self.expressions.casts |= found.paths
        # What an autocast inside has in half is float32 for its function, which may cast it to float32.
        return found.only(names_half if self._autocast_around(equation) else self._is_no_widening)

    def _is_no_widening(self, line: str) -> bool:
        return line not in self._widening

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
            made = frozenset({NONE}) if is_of_jax else of_cast(equation, line, is_fixed, autocast)
            sources = (of_constants(equation, line) if NONE in made else None) or made
            self._narrowed[line] |= sources
        return sources

    def _of_float32(
        self, equation: Equation, line: str, sources: Sources, left_out: Sources, stage: Stage
    ) -> Sources:
        """Returns the sources of a result that is not in half, whose operands have the given ones."""
        if left_out:  # It rounds an operand that JAX then promotes.
            self.rounding.add(id(equation))
            return self._as_in_forward(equation, sources, stage, line)
        if widens(equation) and stage is Stage.BACKWARD:
            # The gradient of a half value is rounded to half, whatever computes it.
            self.rounding.add(id(equation))
            return self._narrowed[line] or sources
        return sources

    def _note_widened(self, equation: Equation, operands: Sequence[Origin], left_out: Sources) -> None:
        """Notes what the half operands of an operation of the forward pass come from; it gives float32."""
        if halves := [operand for operand, var in zip(operands, equation.invars) if is_narrow(var)]:
            for key in self._keys(equation, self._line(equation)):
                self._widened[key] |= left_out or joined(halves)

    def compares_a_number(self, equation: Equation) -> bool:
        """Whether an equation compares half values with a number that half rounds."""
        return traits_of(equation.primitive.name).compares and bool(all_written(self._numbers, equation))

    def of_numbers(self, equation: Equation) -> Sources:
        """Returns the lines that convert the numbers of an equation to half."""
        lines = (number.line for number in all_written(self._numbers, equation))
        return frozenset(map(number_in_half, filter(None, lines)))

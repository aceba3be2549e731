"""A loss and its gradients as one compiled program, with a flag for each module: half or float32."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._autocast import Interpreter, Value, make_plan, run
from ..._autocast.report import has_floating
from ..._dtypes import HALF_DTYPES
from ..._jaxpr import (
    Array,
    Category,
    Equation,
    Jaxpr,
    Var,
    cast,
    equations,
    flagged,
    flags_of,
    inner_jaxprs,
    is_float32,
    only_own_precisions,
    traits_of,
    with_equations,
    with_inner_jaxprs,
)
from .._values.case import Case, gives_half
from .._values.numbers import lost_numbers
from .._values.reference import Flags, Reference, flags_in, has_value, is_narrow
from .._values.rules import casts_in_rule
from .._values.sites import NARROW
from .._values.sums import sums_of_gradients
from .._values.trace import EVERY_CAST
from .modules import (
    Module,
    cast_modules,
    has_more_half,
    is_of_library,
    jitted_as_a_whole,
    own_modules,
    renamed,
    scopes_for,
)
from .needs import completed, is_refused, rules_needed
from .sources import sources_of

_Members: TypeAlias = dict[Module, set[int]]
"""Modules or sources, each with the indexes of its operations."""


class FlaggedProgram:
    """A loss and its gradients, or a step, with a flag for each module. It is compiled once.

    The groups are the modules in half, and the sources of the program's own half values: casts in lines of
    the user, and arguments in half. A module is in `dtype` if its flag is on, and in float32 if not.
    `outputs` is as in `LossProgram`. `has_rules`: rules of derivatives may cast to half by themselves.
    """

    def __init__(self, case: Case) -> None:
        self._case, self.rules = case, case.rules
        self.is_step = case.call.value_and_grad_fn is None
        self.operations = case.operations(self.rules)
        modules, sources, in_half = self._groups(case.call.differentiated)
        self.modules, self._sources = tuple(modules), tuple(sources)
        self.groups = frozenset((*self.modules, *self._sources))
        flags = _numbered(len(self.operations), [*modules.values(), *sources.values(), in_half])
        self._flags_by_line: dict[str, set[int]] = collections.defaultdict(set)
        for operation, own in zip(self.operations, flags, strict=True):
            self._flags_by_line[operation.source] |= own
        always = frozenset({len(self.groups)})
        flags = [always if n in self._found.rules else own for n, own in enumerate(flags)]
        with only_own_precisions():  # The reference gives all others the highest one.
            jaxpr = _with_flags(case.traced.jaxpr, iter(flags), always)
            self.has_rules = always in flags_in(jaxpr)
            planner, plan = make_plan(dataclasses.replace(case.traced, jaxpr=jaxpr), self.rules)
            self._program = case.program_of(lambda arrays: run(planner, plan, arrays, _Interpreter))
        # Without autocast it is the dtype that the program has most often.
        values = [value for each in case.before for value in (*each.operands, *each.results)]
        most = max(HALF_DTYPES, key=lambda half: sum(value.dtype == half for value in values))
        self.dtype = most if self.rules.dtype == jnp.float32 else self.rules.dtype
        self.state, self.outputs = self._program.state, self._program.named_outputs
        self.aux, self.jaxpr = self._program.aux, case.program.jaxpr
        self.parameters = self._program.floating_parameters
        self.has_float16 = has_value(self._program.jaxpr, (jnp.float16,))
        self._numbers = lost_numbers(self._program.jaxpr, case.numbers)
        lines = self._flags_of_numbers()
        # One switch for each set of flags that occurs, so that an equation reads one boolean.
        self._sets = sorted(flags_in(self._program.jaxpr) | {*lines.values()}, key=sorted)

        # Under autocast, each reader in half casts a value by itself.
        is_own = self.rules.dtype == jnp.float32
        casts = sums_of_gradients(self._program.jaxpr).items() if is_own else ()
        sums = {key: flags for key, cast in casts if (flags := flags_of(cast)) is not None}

        def switched(arrays: Sequence[Array], is_on: Array) -> list[Array]:
            is_flag_on = dict(zip(self._sets, is_on))
            reference = Reference(is_flag_on, self._numbers, sums=sums, lines=lines)
            return reference.run(self._program.jaxpr, arrays)

        # The switches are an argument. So one compiled program computes the results as they are, in float32,
        # and with any set of modules in float32.
        self._run = jax.jit(switched, compiler_options=EVERY_CAST)

    def __call__(self, half: Collection[Module] | None, scale: float, nudge: float = 0.0) -> list[Array]:
        """Returns the outputs with some of the groups in half; None for everything in float32.

        With a `nudge` each parameter differs by at most this part of itself.
        """
        return self.run(self.arrays(scale, nudge), half)[: self.floating]

    def run(self, arrays: Sequence[Array], half: Collection[Module] | None) -> list[Array]:
        """Returns all results for arrays such as `arrays()`, with some of the groups in half."""
        groups, names = (*self.modules, *self._sources), {group.name for group in half or ()}

        def is_half(group):
            return not names.isdisjoint(group.one_of) if group.one_of else group in (half or ())

        on = {number for number, group in enumerate(groups) if is_half(group)}
        on |= {len(groups)} if half is not None else set()
        is_on = np.array([flags <= on for flags in self._sets], bool)
        return self._run(list(arrays), is_on)

    def _flags_of_numbers(self) -> dict[str, Flags]:
        """Returns the flags of the lines that convert a number, which no other edit makes float32."""
        lines = {number.line for number in self._numbers.values()}
        sources = enumerate(self._sources, start=len(self.modules))
        return {source.name: frozenset({number}) for number, source in sources if source.name in lines}

    def unknown(self) -> list[Array]:
        """Returns NaN for each of the outputs."""
        variables = self._program.jaxpr.outvars[: self.floating]
        return [jnp.full(var.aval.shape, jnp.nan, jnp.float32) for var in variables]

    def arrays(self, scale: float, nudge: float = 0.0) -> list[Array]:
        """Returns the inputs of the program, in float32 where it takes half."""
        arrays = self._program.at_scale(scale)
        arrays = [jnp.asarray(array, jnp.float32) if is_narrow(array) else array for array in arrays]
        if not nudge:
            return arrays
        named = zip(arrays, self._program.names)

        # A change that looks random and is the same in each run.
        def nudged(array):
            return array + array * nudge * jnp.sin(1e4 * array)

        return [nudged(array) if name in self.parameters else array for array, name in named]

    def argument(self, number: int) -> tuple[str, str]:
        """Returns the path of an argument and its dtype, by its index among the inputs of the program."""
        return self._program.names[number], self._program.arrays[number].dtype.name

    @functools.cached_property
    def edits(self) -> tuple[Module, ...]:
        """The groups that a user can write into the program, to compute them and nothing else in float32."""
        groups = [group for group in (*self.modules, *self._sources) if group.is_edit]
        # A step may widen a state before it computes with it, so that nothing in half comes from it.
        found, program = {group.name for group in groups}, self._program
        halves = (program.names[n] for n in self.state.values() if is_narrow(program.arrays[n]))
        states = dict.fromkeys(name.split("/")[0] for name in halves)
        return (*groups, *(Module(name, "", is_argument=True) for name in states if name not in found))

    def completed(self, kept: Iterable[Module]) -> tuple[Module, ...] | None:
        """Returns edits with the rules of autocast that they need; None if there are none."""
        keyed = {edit.key: edit for edit in self.edits}
        keys = completed(self._needs, {edit.key for edit in kept}, keyed)
        return None if keys is None else tuple(edit for key, edit in keyed.items() if key in keys)

    def is_refused(self, kept: Iterable[Module]) -> bool:
        """Whether JAX refuses the program with some edits alone."""
        return is_refused(self._found.ties, {edit.name for edit in kept})

    def groups_on(self, line: str, only_edits: bool = True) -> list[Module]:
        """Returns the groups with an operation on a line of the program: sources, or modules without them."""
        groups, flags = (*self.modules, *self._sources), self._flags_by_line.get(line, ())
        own = [group for number, group in enumerate(groups) if number in flags]
        found = [group for group in own if group.is_edit or not only_edits]
        sources = [group for group in found if group in self._sources]
        return sorted(sources, key=lambda source: not source.is_argument) or found

    def rounded_numbers(self) -> tuple[str, ...]:
        """Returns a sentence for each number on a line of the program that is 0 or inf in half precision."""
        return self._numbers_in_half((0, math.inf, -math.inf))

    def rounded_to_one(self, edited: Collection[str]) -> tuple[str, ...]:
        """Returns a sentence for each number that is converted to 1 on a line that is not `edited`.

        A few steps may not show its error, as that of the decay of an average.
        """
        lines = {written.line for written in self._numbers.values()} - {"", *edited}
        return self._numbers_in_half((1,), lines)

    def _numbers_in_half(
        self, values: Collection[float], lines: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """Returns a sentence for each number that has one of some values in half, of those on some lines."""
        # JAX widens a half number that meets float32, with its error.
        said = (
            f"The number {written.number:g} on {(written.line or line).partition(' ')[0]} is {value:g} in "
            f"{dtype.name if dtype in NARROW else 'half precision'}."
            for (line, dtype, value, _), written in self._numbers.items()
            if written.is_sure and value in values and (lines is None or written.line in lines)
            if not is_of_library(line)
        )
        return tuple(dict.fromkeys(said))

    def in_bfloat16(self, scale: float) -> list[Array]:
        """Returns the outputs with bfloat16 in place of float16. This is a program of its own."""
        reference = Reference({}, self._numbers, jnp.bfloat16)
        return self._compiled(reference)(self._program.at_scale(scale))[: self.floating]

    def by_hand(self, nudges: Iterable[float], dtype: Any = None) -> Iterator[list[Array]]:
        """Yields the outputs with casts by hand around each matmul, and everything else in float32."""
        run = self._by_hand(self.dtype if dtype is None else dtype)
        return (run(self.arrays(1.0, nudge))[: self.floating] for nudge in nudges)

    @property
    def step_by_hand(self) -> Callable[[list[Array]], list[Array]]:
        """The step with casts by hand: a function of arrays such as `arrays()`, with all results."""
        return self._by_hand(self.dtype)

    def _by_hand(self, dtype: Any) -> Callable[[list[Array]], list[Array]]:
        return self._compiled(Reference({}, self._numbers, by_hand=dtype))

    def _compiled(self, reference: Reference) -> Callable[[list[Array]], list[Array]]:
        return jax.jit(functools.partial(reference.run, self._program.jaxpr), compiler_options=EVERY_CAST)

    @property
    def floating(self) -> int:
        """How many floating results there are: the outputs, then the auxiliary results."""
        return len(self.outputs) + len(self.aux)

    def _groups(self, parameters: Sequence[str]) -> tuple[_Members, _Members, set[int]]:
        """Returns the modules and the sources, each with its operations, and all operations in half."""
        around = jitted_as_a_whole(self._case.traced.jaxpr)
        own, sources = self._own_groups(parameters, around)
        of_program = set[int]().union(*own.values())
        pairs = list(zip(self.operations, self._case.before, strict=True))
        is_under_autocast = self.rules.dtype != jnp.float32
        products = [n for n, (now, _) in enumerate(pairs) if is_under_autocast and now.on_tensor_cores]
        selected = cast_modules([self.operations[n] for n in products], parameters, around)
        cast = list(dict.fromkeys(filter(None, selected)))
        # The readers of a half value round its gradients: a cast of the program to float32 needs no flag.
        by_autocast = {n for n, pair in enumerate(pairs) if has_more_half(*pair)} - of_program
        modules = {module: kept & by_autocast for module, kept in zip(cast, self._kept_by_rules(cast))}
        own = dict(zip(renamed([*own], cast), own.values()))
        rules = dict(zip(products, selected)) | self._found.autocast
        self._needs = list(dict.fromkeys(rules_needed(own | sources, rules, cast)))
        sources |= {module: members for module, members in modules.items() if not members}
        known = {source.key for source in sources}
        sources |= {edit: set[int]() for edit in self._found.autocast.values() if edit.key not in known}
        modules = {module: members for module, members in modules.items() if members} | own
        return modules, sources, of_program | by_autocast

    def _own_groups(self, parameters: Sequence[str], around: str) -> tuple[_Members, _Members]:
        """Returns the modules of the program's own half values and the sources, each with its operations."""
        traced, before = self._case.traced, self._case.before
        numbers = lost_numbers(traced.jaxpr, self._case.numbers)
        found = sources_of(traced, self.is_step, numbers)
        own = [n for n, operation in enumerate(before) if gives_half(operation) or found.sources[n]]
        paths = [name for name in traced.names if name.split("/")[0] in parameters]
        parts, owners = own_modules([before[n] for n in own], parameters, paths, around)
        # Layers of a library are found among the modules. What comes out of one comes from it alone, so the
        # sources are then found again.
        if layers := {n: parts[owner] for n, owner in zip(own, owners, strict=True) if parts[owner].layer}:
            found = sources_of(traced, self.is_step, numbers, layers)
        self._found = found
        every = sorted(frozenset[Module]().union(*found.sources), key=lambda source: source.name)
        sources = {source: {n for n in own if source in found.sources[n]} for source in every}
        with_carries = {source.name: source for source in every if source.layer}
        parts = [with_carries.get(part.name, part) for part in parts]
        modules = {part: sources.pop(part, set[int]()) for part in parts}
        for n, owner in zip(own, owners, strict=True):
            modules[parts[owner]].add(n)
        return modules, sources

    def _kept_by_rules(self, cast: Sequence[Module]) -> Iterator[set[int]]:
        """Yields for each module the operations to which a rule for float32 gives other dtypes."""
        for module in cast:
            scopes = scopes_for([module], cast, self.rules.dtype.name)
            rules = dataclasses.replace(self.rules, scopes=(*scopes, *self.rules.scopes))
            pairs = enumerate(zip(self.operations, self._case.operations(rules), strict=True))
            yield {
                n for n, (now, kept) in pairs if (now.operands, now.results) != (kept.operands, kept.results)
            }


def _numbered(count: int, groups: Iterable[Collection[int]]) -> list[Flags]:
    """Returns for each of `count` operations the numbers of the groups that it belongs to."""
    flags = [set[int]() for _ in range(count)]
    for number, members in enumerate(groups):
        for n in members:
            flags[n].add(number)
    return list(map(frozenset, flags))


class _Interpreter(Interpreter):
    """Keeps the casts of literals and of half values in the program, so that flags switch them."""

    def _bind(self, equation: Equation, action: Any, operands: list[Value]) -> list[Value]:
        results = super()._bind(equation, action, operands)
        dtype = equation.params.get("new_dtype")
        if dtype not in HALF_DTYPES or operands[0].native.dtype != dtype:
            return results
        # autocast has made the value in half already, so JAX drops this cast of the program. A rule for
        # float32 would bring it back.
        digits = jnp.finfo(dtype)
        return [Value(lax.reduce_precision(value.native, digits.nexp, digits.nmant)) for value in results]

    def _literal(self, var: Var) -> Value:
        return _Number(np.asarray(var.val, np.float32)) if is_float32(var) else super()._literal(var)


class _Number(Value):
    def copy(self) -> Value:
        return self

    def to(self, dtype: Any) -> Array:
        # JAX computes the cast of a number while tracing
        # (https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/lax/lax.py#L1728): the jaxpr would have the
        # rounded number, and no flag could switch that. The result of a barrier is traced.
        return self.native if dtype == jnp.float32 else cast(lax.optimization_barrier(self.native), dtype)


def _with_flags(jaxpr: Jaxpr, flags: Iterator[Flags], always: Flags) -> Jaxpr:
    """Returns a jaxpr with flags in its equations: the next of `flags` for each operation of a report.

    The rules of derivatives that make half values by themselves have the flag that is `always` on in half.
    """

    def changed(equation: Equation) -> Equation:
        own: Flags = frozenset()
        if traits_of(equation.primitive.name).category is Category.CALL:
            is_rule = casts_in_rule(equation)
            parts = [_with_flags(inner.jaxpr, flags, always) for inner in inner_jaxprs(equation)]
            equation = with_inner_jaxprs(equation, parts)
            # For the equations that JAX makes itself, such as those of the rule of a custom derivative.
            own = always if is_rule else own.union(*(each for part in parts for each in flags_in(part)))
        elif has_floating(equation):
            own = next(flags)
        return flagged(equation, own) if own else equation

    return with_equations(jaxpr, list(map(changed, equations(jaxpr))))

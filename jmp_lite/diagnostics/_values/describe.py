"""Describes the sites of a program before it runs: what each value is, and what it was computed from."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxpr import (
    Category,
    Equation,
    Inner,
    Jaxpr,
    Role,
    Var,
    all_equations,
    call_scope,
    calling_line,
    describe,
    inner_jaxprs,
    is_literal,
    is_recomputed,
    is_transposed,
    open_jaxpr,
    replay,
    scope_of,
    traits_of,
)
from ..._paths import visible_scope
from ..._tree import is_floating
from .sites import Loop, Path, Site, SiteKind, line_of

INLINE = ("closed_call", "composite", "custom_jvp_call", "custom_linear_solve", "custom_vjp_call")
INLINE += ("custom_vmap_call", "eval_jaxpr", "jit")
"""The calls that run inline: the program is differentiated already, so they are parts of it."""
CUT = -3
"""The number of the site that says whether a while loop was stopped."""
KEPT = 2
"""The iterations of a while loop that are kept: the first with an inf or NaN, and the first with a NaN."""
# Of the thousands of a solver, such as those of diffrax, XLA would compile the measurements for minutes.
_MOST_MEASURED = 300
"""The most equations of a while loop that is measured inside."""
LEAVE = 1_000_000
"""The number of the first result that leaves a call: more than any equation has inner jaxprs."""


class Value(NamedTuple):
    """What is known of a value before the program runs."""

    source: Path | None = None  # The site at which it is measured, if it is.
    argument: str = ""  # The path of the argument that it is, at most moved or cast.
    number: float | None = None  # The number, if it is a literal.
    last_parameter: str = ""  # The path of the last parameter that it was computed from.
    is_scaled: bool = False  # Whether it depends on the loss scale, as gradients do.


Values = Sequence[Value]


@dataclasses.dataclass(frozen=True)
class Where:
    """The surroundings of a jaxpr in the program."""

    path: Path = ()
    scope: str = ""
    direction: str = "forward"
    loops: tuple[Loop, ...] = ()
    line: str = ""  # That of the call around it, for operations without a line of their own.


class Description:
    """The sites of a program, and how values go through its loops.

    `inputs` are what is known of its inputs; those that are floating become sites.
    """

    def __init__(self, jaxpr: Jaxpr, inputs: Values) -> None:
        self.sites: dict[Path, Site] = {}
        # For the entry of each loop carry, the site of the result that enters the next iteration.
        self.carried: dict[Path, Path | None] = {}
        self.checked: set[Path] = set()  # The values that the program itself tests for inf and NaN.
        named = zip(open_jaxpr(jaxpr).invars, inputs, strict=True)
        values = [self._input(var.aval, value, Where(), number) for number, (var, value) in enumerate(named)]
        self.outputs = self._run(jaxpr, values, Where())

    def _input(self, aval: Any, value: Value, where: Where, number: int) -> Value:
        """Describes an input of the program, or a constant in it."""
        if not is_floating(aval):
            return value
        path = (*where.path, -1, number)
        self.sites[path] = Site(
            path=path,
            kind=SiteKind.INPUT,
            operation="argument" if value.argument else "constant",
            shape=aval.shape,
            dtype=aval.dtype,
            loops=where.loops,
            is_scaled=value.is_scaled,
            argument=value.argument,
            last_parameter=value.last_parameter,
        )
        return value._replace(source=path)

    def _run(self, jaxpr: Jaxpr, values: Values, where: Where) -> list[Value]:
        fixed = enumerate(open_jaxpr(jaxpr).constvars)
        constants = [self._input(var.aval, Value(), where, -2 - number) for number, var in fixed]

        def action(index: int, equation: Equation, read: Callable[[Var], Value]) -> Values:
            operands, path = list(map(read, equation.invars)), (*where.path, index)
            if traits_of(equation.primitive.name).category is Category.CALL:
                return self._call(equation, operands, path, where)
            return self._operation(equation, operands, path, where)

        return replay(jaxpr, [*constants, *values], _literal, action)

    def _operation(self, equation: Equation, operands: Values, path: Path, where: Where) -> Values:
        name, results = equation.primitive.name, equation.outvars
        if name == "is_finite" and operands[0].source is not None:
            self.checked.add(operands[0].source)
        is_cast = name == "convert_element_type"
        # The result has the elements of the operand, so the measurement of the operand holds for it. The
        # bits of an fp8 tensor stand for the tensor.
        is_move = traits_of(name).keeps_elements or name == "bitcast_convert_type"
        is_same = is_move or (is_cast and _survives_cast(operands[0].number, results[0].aval))
        if is_same and all(map(_is_known, operands, results)):
            return operands[: len(results)]
        argument = operands[0].argument if is_move or is_cast else ""
        value = Value(None, argument, None, _last_parameter(operands), any(v.is_scaled for v in operands))
        return [
            value._replace(
                source=self._site((*path, n), SiteKind.OPERATION, equation, operands, var.aval, where)
            )
            for n, var in enumerate(results)
        ]

    def _call(self, equation: Equation, operands: Values, path: Path, where: Where) -> Values:
        name, inners = equation.primitive.name, inner_jaxprs(equation)
        if name == "while":
            # A site of its own, since the values of a loop that was stopped look like any others.
            self._site((*path, CUT), SiteKind.CUT, equation, [], jax.typeof(1.0), where)
            if not _is_measured_inside(equation):
                return self._operation(equation, operands, path, where)
        parts = [
            (inner, _inside(equation, (*path, number), where))
            for number, inner in enumerate(inners)
            if None not in inner.results
        ]
        if name in (*INLINE, "remat2"):
            ((inner, inside),) = parts
            return self._run(inner.jaxpr, [operands[number] for number in inner.operands], inside)
        branches = [self._body(equation, inner, operands, inside, where) for inner, inside in parts]
        if name == "while":  # A loop that runs no iteration returns its initial carry.
            branches.append([operands[number] for number in inners[1].operands[inners[1].constants :]])
        left = []  # Each result may come from any of the branches.
        for number, (var, values) in enumerate(zip(equation.outvars, zip(*branches))):
            at = (*path, LEAVE + number)
            source = self._site(at, SiteKind.LEAVE, equation, values, var.aval, where)
            value = values[0]._replace(is_scaled=any(value.is_scaled for value in values))
            left.append(value._replace(source=source or value.source, argument="", number=None))
        return left

    def _body(
        self, equation: Equation, inner: Inner, operands: Values, inside: Where, where: Where
    ) -> list[Value]:
        """Describes the body of a loop, a branch or a shard; returns what it knows of its results."""
        first, outside = inner.constants, dataclasses.replace(where, loops=inside.loops)
        given = [operands[number] for number in inner.operands]
        inputs = list(enumerate(zip(open_jaxpr(inner.jaxpr).invars, inner.roles)))
        # Again while what is known of a carry changes by the body that returns it: each round but the last
        # makes one more carry depend on the loss scale.
        results: list[Value] = []
        for _ in range(inner.carried + 1):
            taken = list(given)
            for number, (var, role) in inputs:
                # A constant of a loop is the same in each iteration, so its own measurement holds for it.
                if inside.loops != where.loops and role is not Role.CONSTANT:
                    at, value = (*inside.path, -1, number), given[number]
                    source = self._site(at, SiteKind.ENTRY, equation, [value], var.aval, outside)
                    taken[number] = value._replace(source=source or value.source, number=None)
            results = self._run(inner.jaxpr, taken, inside)
            carries = list(zip(range(first, first + inner.carried), results))
            for number, result in carries:
                if (entry := taken[number].source) is not None:
                    self.carried[entry] = result.source
            # A sum of gradients starts as zeros, and becomes a gradient in the second iteration.
            late = [n for n, result in carries if result.is_scaled and not given[n].is_scaled]
            if not late:
                break
            for number in late:
                given[number] = given[number]._replace(is_scaled=True)
        return results

    def _site(
        self, path: Path, kind: SiteKind, equation: Equation, operands: Values, aval: Any, where: Where
    ) -> Path | None:
        """Describes a value at an equation; returns the path of its site, or None if it is not floating."""
        if not is_floating(aval):
            return None
        known, sources = [], [value.source for value in operands]
        if kind is SiteKind.OPERATION:
            known = list(map(_operand, equation.invars, operands))
        if equation.primitive.name == "integer_pow":  # Its exponent is shown as an operand.
            known.append((str(equation.params["y"]), float(equation.params["y"])))
            sources.append(None)
        self.sites[path] = Site(
            path=path,
            kind=kind,
            operation=equation.primitive.name,
            shape=aval.shape,
            dtype=aval.dtype,
            loops=where.loops,
            is_scaled=any(value.is_scaled for value in operands),
            operands=tuple(text for text, _ in known),
            numbers=tuple(number for _, number in known),
            sources=tuple(sources),
            module=visible_scope(scope_of(equation, where.scope)),
            argument=_argument_of(operands),
            last_parameter=_last_parameter(operands),
            line=line_of(equation) or where.line,
            direction=_direction(equation, where.direction),
            caller=calling_line(equation),
        )
        return path


def _inside(equation: Equation, path: Path, where: Where) -> Where:
    """Returns the surroundings of an inner jaxpr of an equation."""
    name, params, loops = equation.primitive.name, equation.params, where.loops
    if name == "shard_map":
        mesh, manual = params["mesh"], params["newly_manual_axes"]
        shards = math.prod(mesh.shape[axis] for axis in mesh.axis_names if axis in manual)
        loops = (*loops, Loop(name, path, shards))
    elif name == "scan":
        loops = (*loops, Loop(name, path, params["length"], params["reverse"]))
    elif name == "while":
        loops = (*loops, Loop(name, path, KEPT))
    scope, line = call_scope(scope_of(equation, where.scope), equation), line_of(equation) or where.line
    return Where(path, scope, _direction(equation, where.direction), loops, line)


def _is_measured_inside(equation: Equation) -> bool:
    """Whether a while loop is measured inside: a small one, which is not that of a batch."""
    (predicate,) = open_jaxpr(equation.params["cond_jaxpr"]).outvars
    size = len(list(all_equations(equation.params["body_jaxpr"])))
    # Under `vmap` a loop runs until all members have ended, and its condition is an array.
    return not predicate.aval.shape and size <= _MOST_MEASURED


def _last_parameter(operands: Values) -> str:
    """Returns the last parameter that any of some operands was computed from."""
    return next((value.last_parameter for value in reversed(operands) if value.last_parameter), "")


def _argument_of(operands: Values) -> str:
    """Returns the path of the last parameter among some operands; without one, of the last argument."""
    arguments = [value.argument for value in operands if value.argument]
    parameters = [value.argument for value in operands if value.argument == value.last_parameter != ""]
    return next(reversed(parameters or arguments), "")


def _literal(var: Var) -> Value:
    is_number = jnp.issubdtype(var.aval.dtype, jnp.floating) and not var.aval.shape
    return Value(number=float(var.val) if is_number else None)


def _operand(var: Var, value: Value) -> tuple[str, float | None]:
    """Returns an operand as it is shown, and its number if that is known while tracing."""
    if value.number is not None:
        text = f"{value.number:.4g}"
        return text, float(text)  # The number that is shown, so that a hint and the report agree.
    if not is_literal(var):
        return describe(var.aval), None
    is_number = jnp.issubdtype(var.aval.dtype, jnp.number)
    is_real = is_number and not jnp.issubdtype(var.aval.dtype, jnp.complexfloating)
    # JAX prints an integer with its dtype.
    return str(np.asarray(var.val)), float(var.val) if is_real else None


def _is_known(value: Value, result: Var) -> bool:
    return value.source is not None or value.number is not None or not is_floating(result.aval)


def _survives_cast(number: float | None, aval: Any) -> bool:
    """Whether the cast of a literal to the dtype of a result does not make a finite number inf."""
    if number is None or not is_floating(aval):
        return False
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.asarray(number, aval.dtype)) == np.isfinite(number))


def _direction(equation: Equation, around: str) -> str:
    if is_recomputed(equation):
        return "recomputed"
    if around != "forward":  # A call in the backward pass holds nothing of the forward pass.
        return around
    return "backward" if is_transposed(equation) else "forward"

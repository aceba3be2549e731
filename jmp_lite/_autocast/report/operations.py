"""One operation of a program as a report shows it: its category, dtypes, reason, scope and source line."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..._jaxpr import lines, read, scopes
from ..._jaxpr.inner import Inner, Role
from ..._jaxpr.primitives import Category, traits_of
from ..._jaxpr.read import Equation, Jaxpr, Var
from ..._paths import join, visible_scope
from ..._text import shortened, wrapped
from ..._tree import is_floating
from ..planning.op import Op
from ..planning.plan import Decision, Float8, Plan
from ..planning.ruling import Why
from ..planning.states import Kind, State
from .advice import advise_keeping, advise_shapes
from .flops import flops_of, known
from .gradients import forward_products


@dataclasses.dataclass(frozen=True)
class AutocastOperation:
    """What autocast decided about one operation with floating-point inputs or outputs.

    Attributes:
        name: the primitive, as `jax.make_jaxpr` prints it.
        category: the category that decided: `allow`, `deny`, `infer`, `move` (the part of infer that
            changes no value) or `as traced`.
        reason: why it runs in the dtypes in which it runs, in words.
        why: the kind of the reason: `rule`, `option` (`full_precision`, or a list or a pattern that autocast
            was given), `keep_float32`, `loop` (which decides by the operation) or `no_list`; else `other`.
        operands: dtype and shape of each operand.
        results: dtype and shape of each result.
        scope: the named scopes, Flax modules and jitted functions around it, joined by slashes.
        arguments: the paths of the arguments that it takes, as they are or cast, reshaped, looked up. The
            gradients of a matmul have those of the matmul.
        source: the line that made it, as `file.py:12:4 (function)`.
        caller: the line of the program from which a package made it; empty if `source` is in no package.
        backward: whether the backward pass runs it, which also runs what `jax.checkpoint` computes again.
        times: how often it runs in one call; the iterations of a `while` loop are not known and count as one.
        flops: floating point operations in one call of the function; a symbolic size counts as 1.
        in_half: whether it takes half operands, made by autocast or by the program.
        in_fp8: whether autocast casts its operands to fp8. `in_half` holds too.
        not_fp8: why a matmul in bfloat16 is not in fp8; empty without fp8.
        advice: the sizes of a half precision product that Tensor Cores run slowly, and what to pad them to.

    Examples:
        >>> operation = jmp.explain(jnp.dot)(jnp.ones((2, 2)), jnp.ones((2, 2))).operations[0]
        >>> operation.name, operation.inputs, operation.in_half, operation.flops
        ('dot_general', ('bfloat16[2,2]', 'bfloat16[2,2]'), True, 16)
    """

    name: str
    category: str
    reason: str
    why: str
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    scope: str
    arguments: tuple[str, ...]
    source: str
    times: int
    flops: int
    in_half: bool
    advice: str = ""
    in_fp8: bool = False
    not_fp8: str = ""
    caller: str = ""
    backward: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The operands in words, such as `bfloat16[8,128]`."""
        return tuple(map(read.describe, self.operands))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The results in words."""
        return tuple(map(read.describe, self.results))

    @property
    def module(self) -> str:
        """The scope; without one, the object that holds its last argument, such as an NNX module."""
        if self.scope or not self.arguments:
            return self.scope
        return self.arguments[-1].rpartition("/")[0]

    @property
    def is_product(self) -> bool:
        """Whether Tensor Cores could run the operation: a convolution or a product, but no inner product."""
        return traits_of(self.name).category is Category.ALLOW and self.category in ("allow", "as traced")

    @property
    def on_tensor_cores(self) -> bool:
        """Whether Tensor Cores run the operation: `is_product` holds, and its operands are in half."""
        return self.in_half and self.is_product

    def __str__(self) -> str:
        shapes = f"{' '.join(self.inputs)} -> {' '.join(self.outputs)}"
        why = wrapped(f"{self.reason}; {self.scope or '/'}; {shortened(self.source)}", 4)
        return "\n".join([f"{self.category:<9} {self.name:<20} {shapes}", *why])


@dataclasses.dataclass(frozen=True)
class _Around:
    """What runs a plan: its scope and line in the program, how often, and whether in the backward pass."""

    scope: str
    times: int
    source: str = ""
    caller: str = ""
    backward: bool = False

    def of(self, op: Op) -> "_Around":
        """Returns the same of an operation of the plan."""
        scope = join(self.scope, op.scope) if op.scope else self.scope
        backward = self.backward or op.is_transposed or op.is_recomputed
        # The operations of JAX's own functions, such as `jnp.where`, have the line that calls the function.
        if not (source := lines.source_line(op.equation)):
            return dataclasses.replace(self, scope=scope, backward=backward)
        return _Around(scope, self.times, source, lines.calling_line(op.equation), backward)


def operations_of(
    plan: Plan,
    half: Any,
    scope: str,
    times: int,
    origins: Sequence[str],
    promotions: Mapping[int, str],
    outputs: Sequence[bool] | None = None,
) -> Iterator[AutocastOperation]:
    """Yields the operations of a plan and of the plans inside it.

    Args:
        plan: the plan.
        half: the half dtype.
        scope: the scope around it.
        times: how often it is run.
        origins: for each input, the path of the argument that it is; empty for a computed value.
        promotions: why products are in float32, by the `id` of their equations.
        outputs: for each output, whether anything reads it. Operations that only unread outputs need are left
            out, as JAX drops them. None for every operation.
    """
    return _Walk(half, promotions).operations(plan, _Around(scope, times), origins, outputs)


@dataclasses.dataclass(frozen=True)
class _Walk:
    """A walk over a plan and the plans inside it, which describes each operation."""

    half: np.dtype
    promotions: Mapping[int, str]

    def operations(
        self, plan: Plan, around: _Around, origins: Sequence[str], outputs: Sequence[bool] | None
    ) -> Iterator[AutocastOperation]:
        live = None if outputs is None else _live(read.open_jaxpr(plan.jaxpr), outputs)
        paths = _paths_of_operands(plan, origins)
        for decision, taken, arguments in zip(plan.decisions, paths, _arguments(plan, paths)):
            op = decision.op
            if live is not None and id(op.equation) not in live:
                continue
            if decision.category is Category.CALL:
                yield from self._inside(decision, around.of(op), taken, live)
            elif has_floating(op.equation):
                yield self._operation(decision, around.of(op), arguments, plan.states)

    def _inside(
        self, call: Decision, here: _Around, origins: Sequence[str], live: dict[int, set[Var]] | None
    ) -> Iterator[AutocastOperation]:
        """Yields the operations of the plans inside a call. `origins` are those of its operands."""
        equation = call.op.equation
        scope = scopes.call_scope(here.scope, equation)
        for inner, plan in zip(call.op.inner, call.inner):
            looped = Role.CARRY in inner.roles or Role.ELEMENT in inner.roles
            # Only a scan has a length. A `while` counts as one iteration.
            runs = known(equation.params.get("length", 1)) if looped else 1
            around = dataclasses.replace(here, scope=scope, times=here.times * runs)
            entering = [origins[index] for index in inner.operands]
            outputs = None if live is None else _read_inside(equation, inner, looped, live)
            yield from self.operations(plan, around, entering, outputs)

    def _operation(
        self, decision: Decision, here: _Around, arguments: tuple[str, ...], states: Mapping[Var, State]
    ) -> AutocastOperation:
        equation, half = decision.op.equation, self.half
        taken = [_taken_in_half(decision, var, states) for var in equation.invars]
        in_half = any(taken) or _takes_own_half(equation)
        is_product = traits_of(equation.primitive.name).category is Category.ALLOW
        why, reason = self._why(decision, here.scope if is_product and not in_half else "")
        formats = decision.action.formats if isinstance(decision.action, Float8) else [half] * len(taken)
        are_half = [state.is_half for state in decision.results]
        return AutocastOperation(
            name=equation.primitive.name,
            category=decision.category.value,
            reason="; ".join([reason, *_remarks(decision, in_half, states)]),
            why=why,
            operands=tuple(map(_typed, equation.invars, taken, formats)),
            results=tuple(_typed(var, is_half, half) for var, is_half in zip(equation.outvars, are_half)),
            scope=visible_scope(here.scope),
            arguments=arguments,
            source=here.source,
            times=here.times,
            flops=flops_of(equation) * here.times,
            in_half=in_half,
            advice=advise_shapes(equation) if is_product and in_half else "",
            in_fp8=decision.in_fp8,
            not_fp8=decision.not_fp8,
            caller=here.caller,
            backward=here.backward,
        )

    def _why(self, decision: Decision, scope: str) -> tuple[str, str]:
        """Returns the kind of the reason of an operation, and the reason.

        What an autocast inside of the function has left in float32 has both in its `scope`.
        """
        if all(inside := scopes.reason_of_scope(scope)):
            return inside
        # A user's list is an option too, and its ruling has no kind of its own.
        is_by_list = decision.op.is_listed and decision.why is Why.OTHER
        reason = self.promotions.get(id(decision.op.equation), decision.reason)
        return (Why.OPTION if is_by_list else decision.why).name.lower(), reason


def _paths_of_operands(plan: Plan, origins: Sequence[str]) -> list[list[str]]:
    """Returns for each operation which argument each operand is, by its path; empty for a computed value."""
    paths: dict[Var, str] = dict(zip(read.open_jaxpr(plan.jaxpr).invars, origins, strict=True))
    found: list[list[str]] = []
    for decision in plan.decisions:
        equation = decision.op.equation
        found.append(["" if read.is_literal(var) else paths.get(var, "") for var in equation.invars])
        # An argument that is cast, reshaped or looked up is still that argument to its reader.
        if decision.category is Category.MOVE or decision.op.is_cast:
            paths[equation.outvars[0]] = found[-1][0]
    return found


def _arguments(plan: Plan, paths: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Returns the arguments of each operation, each once. `paths` are those of its operands."""
    taken = [tuple(dict.fromkeys(filter(None, each))) for each in paths]
    forward = forward_products([decision.op for decision in plan.decisions])
    # The gradient of a weight takes no argument, and belongs to the layer whose gradient it is.
    return [taken[forward.get(index, index)] or each for index, each in enumerate(taken)]


def _live(inside: Jaxpr, outputs: Sequence[bool]) -> dict[int, set[Var]]:
    """Returns the operations that an output needs, by `id`, each with its results that anything reads."""
    needed = {var for var, is_read in zip(inside.outvars, outputs) if is_read and not read.is_literal(var)}
    live: dict[int, set[Var]] = {}
    # As JAX's own dead code elimination: what has an effect, such as a print, stays.
    for equation in reversed(read.equations(inside)):
        results = needed.intersection(equation.outvars)
        if results or equation.effects:
            live[id(equation)] = results
            needed.update(var for var in equation.invars if not read.is_literal(var))
    return live


def _read_inside(
    equation: Equation, inner: Inner, looped: bool, live: Mapping[int, set[Var]]
) -> tuple[bool, ...]:
    """Returns for each output of the jaxpr of a call whether anything reads it."""
    # A loop reads its carries. The predicate of a `while` is no result (None).
    return tuple(
        looped or index is None or equation.outvars[index] in live[id(equation)] for index in inner.results
    )


def _remarks(decision: Decision, in_half: bool, states: Mapping[Var, State]) -> Iterator[str]:
    """Yields what a report adds to the reason of an operation."""
    equation = decision.op.equation
    if in_half and (saves := advise_keeping(equation, [_state(var, states) for var in equation.invars])):
        yield saves
    if decision.not_fp8:
        yield f"bfloat16, not fp8: {decision.not_fp8}"


def _state(var: Var, states: Mapping[Var, State]) -> State:
    return State(Kind.ADAPTS) if read.is_literal(var) else states[var]


def _typed(var: Var, as_half: bool, half: np.dtype) -> jax.ShapeDtypeStruct:
    dtype = half if as_half and read.is_float32(var) else var.aval.dtype
    return jax.ShapeDtypeStruct(var.aval.shape, dtype)


def _taken_in_half(decision: Decision, var: Var, states: Mapping[Var, State]) -> bool:
    # These keep the dtype of each operand.
    if decision.category is Category.MOVE or decision.op.is_cast:
        return not read.is_literal(var) and states[var].is_half
    return decision.takes_half


def _takes_own_half(equation: Equation) -> bool:
    """Whether all floating operands of an operation are in one half dtype in the program itself."""
    return {var.aval.dtype.name for var in read.floating_operands(equation)} in ({"float16"}, {"bfloat16"})


def has_floating(equation: Equation) -> bool:
    """Whether an operation takes or gives floating or complex values."""
    return any(is_floating(var.aval) for var in (*equation.invars, *equation.outvars))

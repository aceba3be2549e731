"""One operation of a program as a report shows it: its category, dtypes, reason, scope and source line."""

import dataclasses
import math
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
class Around:
    """What runs a plan: its line in the program, and whether that is in the backward pass."""

    source: str = ""
    caller: str = ""
    backward: bool = False

    def inside(self, op: Op) -> "Around":
        """Returns what is known of an operation, or of what it runs."""
        source, backward = (
            lines.source_line(op.equation),
            self.backward or op.is_transposed or op.is_recomputed,
        )
        # The operations of JAX's own functions, such as `jnp.where`, have the line that calls the function.
        if not source:
            return dataclasses.replace(self, backward=backward)
        return Around(source, lines.calling_line(op.equation), backward)


def operations_of(
    plan: Plan,
    half: Any,
    scope: str,
    times: int,
    origins: Sequence[str],
    promotions: Mapping[int, str],
    outputs: Sequence[bool] | None = None,
    around: Around = Around(),
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
        around: what runs the plan.
    """
    inside = read.open_jaxpr(plan.jaxpr)
    states = plan.states
    paths = dict(zip(inside.invars, origins, strict=True))
    live = None if outputs is None else _live(inside, outputs)
    forward = forward_products([decision.op for decision in plan.decisions])
    arguments: dict[int, tuple[str, ...]] = {}  # Those of each operation, by its index.
    for index, decision in enumerate(plan.decisions):
        op, equation = decision.op, decision.op.equation
        path = join(scope, op.scope) if op.scope else scope
        taken = ["" if read.is_literal(var) else paths.get(var, "") for var in equation.invars]
        # The gradient of a weight takes no argument, and belongs to the layer whose gradient it is.
        of_forward = arguments.get(forward.get(index, -1), ())
        arguments[index] = of_forward or tuple(dict.fromkeys(filter(None, taken)))
        if live is not None and id(equation) not in live:
            pass  # The paths of its results below may still be asked for.
        elif decision.category is Category.CALL:
            yield from _operations_of_call(
                decision,
                half,
                scopes.call_scope(path, equation),
                times,
                taken,
                promotions,
                live,
                around,
            )
        elif has_floating(equation):
            reason = promotions.get(id(equation), decision.reason)
            yield _operation(decision, reason, states, half, path, arguments[index], times, around)
        # An argument that is cast, reshaped or looked up is still that argument to its reader.
        if decision.category is Category.MOVE or op.is_cast:
            paths[equation.outvars[0]] = taken[0]


def _operations_of_call(
    decision: Decision,
    half: Any,
    scope: str,
    times: int,
    origins: Sequence[str],
    promotions: Mapping[int, str],
    live: dict[int, set[Var]] | None,
    around: Around,
) -> Iterator[AutocastOperation]:
    """Yields the operations of the plans inside a call. `origins` are those of its operands."""
    equation = decision.op.equation
    inside = around.inside(decision.op)
    for inner, plan in zip(decision.op.inner, decision.inner):
        looped = Role.CARRY in inner.roles or Role.ELEMENT in inner.roles
        # Only a scan has a length. A `while` counts as one iteration.
        runs = known(equation.params.get("length", 1)) if looped else 1
        entering = [origins[index] for index in inner.operands]
        outputs = None if live is None else _read_inside(equation, inner, looped, live)
        yield from operations_of(plan, half, scope, times * runs, entering, promotions, outputs, inside)


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


def _operation(
    decision: Decision,
    reason: str,
    states: Mapping[Var, State],
    half: np.dtype,
    scope: str,
    arguments: tuple[str, ...],
    times: int,
    around: Around,
) -> AutocastOperation:
    action = decision.action
    formats = action.formats if isinstance(action, Float8) else ()
    equation = decision.op.equation
    taken = [_taken_in_half(decision, var, states) for var in equation.invars]
    traced = {var.aval.dtype.name for var in read.floating_operands(equation)}
    # In half by autocast, or by the program itself.
    in_half = any(taken) or traced in ({"float16"}, {"bfloat16"})
    is_product = traits_of(equation.primitive.name).category is Category.ALLOW
    here = around.inside(decision.op)
    why, reason = _why(decision, reason, "" if in_half or not is_product else scope)
    saves = advise_keeping(equation, [_state(var, states) for var in equation.invars]) if in_half else ""
    not_fp8 = f"bfloat16, not fp8: {decision.not_fp8}" if decision.not_fp8 else ""
    return AutocastOperation(
        name=equation.primitive.name,
        category=decision.category.value,
        reason="; ".join(filter(None, (reason, saves, not_fp8))),
        why=why,
        operands=tuple(map(_typed, equation.invars, taken, formats or [half] * len(taken))),
        results=tuple(
            _typed(var, each.is_half, half) for var, each in zip(equation.outvars, decision.results)
        ),
        scope=visible_scope(scope),
        arguments=arguments,
        source=here.source,
        times=times,
        flops=_flops(equation) * times,
        in_half=in_half,
        advice=advise_shapes(equation) if in_half and is_product else "",
        in_fp8=bool(formats),
        not_fp8=decision.not_fp8,
        caller=here.caller,
        backward=here.backward,
    )


def _why(decision: Decision, reason: str, scope: str) -> tuple[str, str]:
    """Returns the kind of the reason of an operation, and the reason.

    What an autocast inside of the function has left in float32 has both in its `scope`.
    """
    if all(inside := scopes.reason_of_scope(scope)):
        return inside
    # A user's list is an option too, and its ruling has no kind of its own.
    is_by_list = decision.op.is_listed and decision.why is Why.OTHER
    return (Why.OPTION if is_by_list else decision.why).name.lower(), reason


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


def has_floating(equation: Equation) -> bool:
    """Whether an operation takes or gives floating or complex values."""
    return any(is_floating(var.aval) for var in (*equation.invars, *equation.outvars))


def _flops(equation: Equation) -> int:
    """Floating point operations: two for each multiply and add of a product, else one an element."""
    name, params = equation.primitive.name, equation.params
    if name == "conv_general_dilated":
        kernel, out = _shape(equation.invars[1]), _shape(equation.outvars[0])
        # Each element of the result sums over the kernel of one output feature.
        features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(out) * math.prod(kernel) // features
    if name == "dot_general":
        return 2 * math.prod(_shape(equation.outvars[0])) * _summed(equation, params["dimension_numbers"])
    if name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return 2 * math.prod(_shape(equation.outvars[0])) * _summed(equation, numbers)
    if traits_of(name).category is Category.MOVE or name == "convert_element_type":
        return 0
    # A reduction has more elements in its operand than in its result.
    return max((math.prod(_shape(var)) for var in (*equation.invars, *equation.outvars)), default=0)


def _summed(equation: Equation, numbers: Any) -> int:
    """Returns how many products a matmul adds up for each element of its result."""
    left = _shape(equation.invars[0])
    return math.prod(left[axis] for axis in numbers[0][0])


def _shape(var: Var) -> tuple[int, ...]:
    return tuple(map(known, getattr(var.aval, "shape", ())))


def known(size: Any) -> int:
    """Returns a size, 1 for a symbolic one: `jax.export` knows it only when the program runs."""
    return size if isinstance(size, int) else 1

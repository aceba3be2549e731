"""What autocast does to every operation, and why: `explain`."""

import collections
import dataclasses
import functools
import html
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from .._dtypes import DTypeLike
from .api import prepare, run, settings_of
from .jaxprs import (
    Equation,
    Jaxpr,
    Role,
    Var,
    call_scope,
    equations,
    floating_operands,
    inner_jaxprs,
    is_float32,
    is_literal,
    open_jaxpr,
    scope_of,
    source_line,
    visible_scope,
)
from .plan import Decision, Plan
from .primitives import List, traits_of
from .rules import make_rules
from .states import Kind, State


@dataclasses.dataclass(frozen=True)
class Operation:
    """What autocast decided about one operation that takes or gives floating values.

    Attributes:
        name: the primitive, as `jax.make_jaxpr` prints it.
        list: the list that decided: `allow`, `deny`, `infer`, `move` (the part of infer that changes no
            value) or `as traced`.
        reason: why it runs in the dtypes in which it runs.
        inputs: dtype and shape of each operand, such as `bfloat16[8,128]`.
        outputs: dtype and shape of each result.
        scope: the named scopes, Flax modules and jitted functions around it, joined by slashes.
        arguments: the paths of the arguments that it takes, as they are or cast, reshaped, looked up.
        source: the line that made it, as `file.py:12:4 (function)`.
        times: how often it runs in one call; the iterations of a `while` loop are not known and count as one.
        flops: floating point operations in one call of the function.
        in_half: whether it takes half operands, made by autocast or by the program.

    >>> import jmp_lite as jmp
    >>> operation = jmp.explain(jnp.dot)(jnp.ones((2, 2)), jnp.ones((2, 2))).operations[0]
    >>> operation.name, operation.inputs, operation.in_half, operation.flops
    ('dot_general', ('bfloat16[2,2]', 'bfloat16[2,2]'), True, 16)

    Guide: docs/autocast.md.
    """

    name: str
    list: str
    reason: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scope: str
    arguments: tuple[str, ...]
    source: str
    times: int
    flops: int
    in_half: bool

    @property
    def module(self) -> str:
        """The scope; without one, the object that holds its last argument, such as an NNX module."""
        if self.scope or not self.arguments:
            return self.scope
        return self.arguments[-1].rpartition("/")[0]

    @property
    def is_product(self) -> bool:
        """Whether it is a convolution or a product that Tensor Cores could run: no inner product."""
        return traits_of(self.name).list is List.ALLOW and self.list in ("allow", "as traced")

    @property
    def on_tensor_cores(self) -> bool:
        """Whether it is such a product, of half operands."""
        return self.in_half and self.is_product

    def __str__(self) -> str:
        shapes = f"{' '.join(self.inputs)} -> {' '.join(self.outputs)}"
        return (
            f"{self.list:<9} {self.name:<20} {shapes}\n    {self.reason}; {self.scope or '/'}; {self.source}"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What autocast does to a function. `str(report)` is the summary and a table of the modules.

    Attributes:
        dtype: the half dtype; float32 for an autocast that changes nothing.
        operations: every operation with floating operands or results, in the order of the program.
        casts: how many casts between float32 and the half dtype were added.
        before: the function's jaxpr as it was traced.
        after: the jaxpr that autocast runs instead.

    >>> import jmp_lite as jmp
    >>> jmp.explain(jnp.dot, "float16")(jnp.ones((2, 2)), jnp.ones((2, 2)))
    Report(1 of 1 operations in float16, 3 casts, 100.0% of FLOPs on Tensor Cores)

    Guide: docs/autocast.md.
    """

    dtype: np.dtype
    operations: tuple[Operation, ...]
    casts: int
    before: Any
    after: Any

    @property
    def tensor_core_share(self) -> float:
        """The share of floating point operations in half precision products, from 0 to 1."""
        total = sum(operation.flops for operation in self.operations)
        return sum(o.flops for o in self.operations if o.on_tensor_cores) / total if total else 0.0

    def summary(self) -> str:
        """Returns one line: the operations in half, the casts, the share of FLOPs on Tensor Cores."""
        if self.dtype == jnp.float32:
            return f"{len(self.operations):,} operations, all as the program has them: the dtype is float32"
        half = sum(operation.in_half for operation in self.operations)
        return (
            f"{half:,} of {len(self.operations):,} operations in {self.dtype.name}, {self.casts:,} casts, "
            f"{self.tensor_core_share:.1%} of FLOPs on Tensor Cores"
        )

    def by_module(self, depth: int | None = None) -> dict[str, tuple[Operation, ...]]:
        """Returns the operations of each module, in the order of the program.

        Args:
            depth: how many names of a module's path count; all by default.
        """
        modules: dict[str, list[Operation]] = collections.defaultdict(list)
        for operation in self.operations:
            modules["/".join(operation.module.split("/")[:depth])].append(operation)
        return {module: tuple(operations) for module, operations in modules.items()}

    def in_float32(self) -> tuple[Operation, ...]:
        """Returns the products and convolutions that are not in half: what Tensor Cores could run."""
        return tuple(o for o in self.operations if o.is_product and not o.in_half)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, ready for `json.dumps`; the jaxprs as text."""
        return {
            "dtype": self.dtype.name,
            "summary": self.summary(),
            "casts": self.casts,
            "tensor_core_share": self.tensor_core_share,
            "operations": [dataclasses.asdict(operation) for operation in self.operations],
            "before": str(self.before),
            "after": str(self.after),
        }

    def table(self) -> str:
        """Returns every operation as text: its list, dtypes, reason, scope and source line."""
        return "\n".join(map(str, self.operations))

    def __repr__(self) -> str:
        return f"Report({self.summary()})"

    def _repr_html_(self) -> str:
        """Shows the report in a notebook as `print` shows it."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        rows = [("module", "operations", "in half", "FLOPs", "on Tensor Cores")]
        for module, operations in self.by_module().items():
            flops = sum(o.flops for o in operations)
            share = sum(o.flops for o in operations if o.on_tensor_cores) / flops if flops else 0.0
            half = sum(o.in_half for o in operations)
            rows.append((module or "/", f"{len(operations):,}", f"{half:,}", f"{flops:.3g}", f"{share:.1%}"))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [self.summary(), ""]
        for first, *rest in rows:
            columns = (f"{text:>{width}}" for text, width in zip(rest, widths[1:]))
            lines.append("  ".join((f"{first:<{widths[0]}}", *columns)))
        left = self.in_float32()
        if left:
            lines += ["", "Products that are not in half:", *map(str, left)]
        unknown = sorted({o.name for o in self.operations if o.reason.endswith("is on no list")})
        if unknown:
            lines += ["", f"On no list, kept as they were traced: {', '.join(unknown)}"]
        return "\n".join(lines)


def explain(fun: Callable[..., Any], dtype: DTypeLike | None = None) -> Callable[..., Report]:
    """Returns a function that tells what autocast does to each operation of `fun`, and why.

    It computes nothing; a `jax.ShapeDtypeStruct` may stand for an array. To see the backward pass too,
    explain `autocast(jax.value_and_grad(loss_fn))`, which runs as `jax.value_and_grad(autocast(loss_fn))`.

    Args:
        fun: a function that `autocast` returned. For any other function it tells what `autocast(fun, dtype)`
            would do.
        dtype: the dtype for a function that `autocast` did not return; bfloat16 by default.

    Returns:
        A function of the arguments of `fun` that returns a `Report`.

    Raises:
        TypeError: `fun` is no function, or a transform of a function that autocast returned.
        ValueError: autocast returned `fun`, which has a dtype of its own, and `dtype` is given as well.

    >>> import jmp_lite as jmp
    >>> w, x = jnp.ones((8, 4)), jnp.ones((2, 8))
    >>> report = jmp.explain(jmp.autocast(lambda w, x: jnp.exp(x @ w)))(w, x)
    >>> print(report.summary())
    1 of 2 operations in bfloat16, 3 casts, 94.1% of FLOPs on Tensor Cores
    >>> [(operation.name, operation.reason) for operation in report.operations]
    [('dot_general', 'dot_general is on the allow list'), ('exp', 'exp is on the deny list')]

    Guide: docs/autocast.md.
    """
    if not callable(fun):
        raise TypeError(f"explain takes a function. Got {fun!r}.")
    settings = settings_of(fun)
    if settings is not None and dtype is not None:
        raise ValueError(
            "explain takes a dtype for a plain function. autocast returned this function, with the dtype "
            f"{settings[1].dtype.name}; leave dtype out."
        )
    wrapped, rules = settings or (fun, make_rules(jnp.bfloat16 if dtype is None else dtype))

    @functools.wraps(fun)
    def explain_fun(*args: Any, **kwargs: Any) -> Report:
        traced, planner, plan = prepare(wrapped, rules, args, kwargs, for_report=True)
        after = jax.make_jaxpr(lambda *arrays: run(planner, plan, arrays))(*traced.arrays)
        return Report(
            rules.dtype,
            tuple(_operations(plan, rules.dtype, scope="", times=1, origins=traced.names)),
            _casts(after, rules.dtype) - _casts(plan.jaxpr, rules.dtype),
            plan.jaxpr,
            after,
        )

    return explain_fun


def _operations(plan: Plan, half: Any, scope: str, times: int, origins: Sequence[str]) -> Iterator[Operation]:
    """Yields the operations of a plan and of the plans inside it.

    Args:
        plan: the plan.
        half: the half dtype.
        scope: the scope around it.
        times: how often it is run.
        origins: for each input, the path of the argument that it is; empty for a computed value.
    """
    inside = open_jaxpr(plan.jaxpr)
    states: dict[Var, State] = dict(zip((*inside.constvars, *inside.invars), plan.states))
    paths = dict(zip(inside.invars, origins, strict=True))
    for equation, decision in zip(equations(inside), plan.decisions):
        path = scope_of(equation, scope)
        taken = ["" if is_literal(var) else paths.get(var, "") for var in equation.invars]
        if decision.which is List.CALL:
            path = call_scope(path, equation)
            for inner, inner_plan in zip(inner_jaxprs(equation), decision.inner):
                looped = Role.CARRY in inner.roles or Role.ELEMENT in inner.roles
                runs = equation.params.get("length", 1) if looped else 1
                entering = [taken[index] for index in inner.operands]
                yield from _operations(inner_plan, half, path, times * runs, entering)
        elif _is_floating(equation):
            arguments = tuple(dict.fromkeys(filter(None, taken)))
            yield _operation(equation, decision, states, half, visible_scope(path), arguments, times)
        if decision.which is List.MOVE or equation.primitive.name == "convert_element_type":
            paths[equation.outvars[0]] = taken[0]
        states.update(zip(equation.outvars, decision.results))


def _operation(
    equation: Equation,
    decision: Decision,
    states: dict[Var, State],
    half: np.dtype,
    scope: str,
    arguments: tuple[str, ...],
    times: int,
) -> Operation:
    def described(var: Var, as_half: bool) -> str:
        dtype = half if as_half and is_float32(var) else var.aval.dtype
        return f"{dtype.name}[{','.join(map(str, var.aval.shape))}]"

    taken = [_taken_in_half(equation, decision, var, states) for var in equation.invars]
    traced = {var.aval.dtype.name for var in floating_operands(equation)}
    return Operation(
        equation.primitive.name,
        decision.which.value,
        decision.reason,
        tuple(map(described, equation.invars, taken)),
        tuple(
            described(var, state.kind == Kind.HALF) for var, state in zip(equation.outvars, decision.results)
        ),
        scope,
        arguments,
        source_line(equation),
        times,
        _flops(equation) * times,
        any(taken) or traced in ({"float16"}, {"bfloat16"}),
    )


def _taken_in_half(equation: Equation, decision: Decision, var: Var, states: dict[Var, State]) -> bool:
    """Whether an operation takes an operand in half."""
    if decision.which is List.MOVE or equation.primitive.name == "convert_element_type":
        return not is_literal(var) and states[var].kind == Kind.HALF
    return decision.takes_half


def _is_floating(equation: Equation) -> bool:
    return any(
        jnp.issubdtype(getattr(var.aval, "dtype", np.int32), jnp.inexact)
        for var in (*equation.invars, *equation.outvars)
    )


def _flops(equation: Equation) -> int:
    """Floating point operations: two for each multiply and add of a product, else one an element."""
    name, params = equation.primitive.name, equation.params
    if name == "conv_general_dilated":
        kernel, out = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
        features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(out) * math.prod(kernel) // features
    if name in ("dot_general", "ragged_dot_general"):
        numbers = params.get("dimension_numbers")
        if numbers is None:
            numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in numbers[0][0])
    sizes = [math.prod(getattr(var.aval, "shape", ())) for var in (*equation.invars, *equation.outvars)]
    return 0 if traits_of(name).list is List.MOVE or name == "convert_element_type" else max(sizes, default=0)


def _casts(jaxpr: Jaxpr, half: np.dtype) -> int:
    """Counts the casts between float32 and `half` in a jaxpr and in those inside it."""
    count = 0
    for equation in equations(open_jaxpr(jaxpr)):
        if equation.primitive.name == "convert_element_type":
            dtypes = {equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype}
            count += dtypes == {np.dtype(np.float32), half}
        count += sum(_casts(inner, half) for inner in jaxprs_in_params(equation.params))
    return count

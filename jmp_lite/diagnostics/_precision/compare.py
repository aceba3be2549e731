"""Measures the accuracy that each module costs in half: `compare_precision`."""

import dataclasses
import functools
import glob
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from ..._autocast.api import given_rules, prepare, run
from ..._autocast.planning.rules import Rules, make_rules
from ..._autocast.report.operations import Operation, operations_of
from ..._dtypes import DTypeLike
from ..._jaxpr.read import Array
from .._values.trace import EVERY_CAST, Call, Program, only_by_name, scale_of, trace
from .fewest import EXACT, Kept, fewest
from .report import Difference, ModuleDifference, PrecisionReport

P = ParamSpec("P")

_MEASURES = ("gradients", "loss")


def compare_precision(
    fun: Callable[P, Any],
    dtype: DTypeLike | None = None,
    *positional: Any,
    loss_scale: Any = None,
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
    depth: int = 1,
    tolerance: float | None = None,
    measure: str = "gradients",
) -> Callable[P, PrecisionReport]:
    """Returns a function that measures the accuracy that each module costs in half, and finds rules for it.

    It runs the loss and its gradients in float32, under `autocast` with everything in half, and once for each
    module with that module alone in half. A module is a scope with products in half. If the scopes tell no
    modules apart (NNX, Equinox, plain functions), a module is the argument that holds the parameters.
    `rules=` of `autocast` selects both.

    If the error is above the tolerance, it searches the fewest modules to keep in float32. With up to 6
    modules it tries all sets, 64 runs at most. With more modules it adds the module with the largest error
    until the error is small enough, and then leaves out each module that is not needed.

    Each run is a program of its own, which is compiled. The gradients in float32 stay on the device; only
    sums come back. On a GPU products in float32 run at the highest precision, not in TF32.

    Args:
        fun: the loss function, as it is given to `jmp_lite.value_and_grad`. It is not changed. Products that
            are half by casts of its own, such as those of a policy, stay so in all runs.
        dtype: `jnp.float16` or `jnp.bfloat16`, or a name. For a function that `autocast` returned it is the
            dtype of that autocast, for any other float16 by default.
        positional: empty. What follows is given by its name.
        loss_scale: the scale of the runs in half: a loss scale, a number, or None for 1.
        argnums: as in `jmp_lite.value_and_grad`.
        has_aux: whether `fun` returns `(loss, aux)`.
        transform: as in `jmp_lite.value_and_grad`.
        depth: how many names of a path make a module, after those that all paths with the same first name
            share. An index, as in `blocks/0`, counts with the name before it.
        tolerance: the largest relative error that is allowed; by default 8 times the `eps` of the dtype.
        measure: which error the tolerance is for, `gradients` or `loss`.

    Returns:
        A function of the arguments of `fun` that returns a `PrecisionReport`. Call it outside `jit`.

    Raises:
        TypeError: `fun` is no function; the loss is no floating scalar; `loss_scale` is not a loss scale; an
            argument is traced.
        ValueError: `dtype` is no half dtype, or is given for a function of autocast; the scale is not above 0
            and finite; `depth`, `tolerance` or `measure` is out of range; a rule of the autocast selects
            nothing; the loss or a gradient is not finite in float32.

    Source: the float16 debugging of ONNX Runtime, and the accuracy-driven tuning of Intel's Neural
    Compressor; both are for inference.

    Examples:
        >>> w, x = {"a": jnp.full((4, 4), 0.3), "b": jnp.full((4, 1), 1e5)}, jnp.ones((2, 4))
        >>> report = compare_precision(lambda w, x: jnp.mean(x @ w["a"] @ w["b"] / 1e6))(w, x)
        >>> report.modules[0].module, report.modules[0].own.loss, report.rules
        ('w/b', inf, {'/w/b': 'float32'})

    Guide: docs/diagnosis.md.
    """
    if not callable(fun):
        raise TypeError(f"compare_precision takes a loss function first. Got {fun!r}.")
    only_by_name("compare_precision", "loss_fn, dtype", positional)
    _check(depth, tolerance, measure)
    scale = scale_of("compare_precision", loss_scale)
    fun, rules = given_rules("compare_precision", fun, dtype, jnp.float16)
    if rules.dtype == jnp.float32:
        raise ValueError("compare_precision compares float16 or bfloat16 with float32. Got float32.")
    call = Call(fun, argnums, has_aux, transform)
    allowed = 8 * float(jnp.finfo(rules.dtype).eps) if tolerance is None else float(tolerance)

    @functools.wraps(fun)
    def compare(*args: Any, **kwargs: Any) -> PrecisionReport:
        reference = _Reference(call, args, kwargs)
        operations = _operations(fun, rules, args, kwargs)
        products = _cast_products(fun, operations, args, kwargs)
        modules = _modules(_paths(products, call.differentiated), depth)
        return _report(_Runs(reference, rules, modules, scale), operations, measure, allowed)

    return compare


def _check(depth: int, tolerance: float | None, measure: str) -> None:
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"compare_precision: depth should be a whole number, 1 or more. Got {depth!r}.")
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and 0 <= tolerance < math.inf):
        raise ValueError(
            f"compare_precision: tolerance should be a relative error, 0 or more, or None. Got {tolerance!r}."
        )
    if measure not in _MEASURES:
        raise ValueError(f"compare_precision: measure should be 'gradients' or 'loss'. Got {measure!r}.")


def _operations(
    fun: Callable[..., Any], rules: Rules, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Operation, ...]:
    traced, planner, plan = prepare(fun, rules, args, kwargs, (np.ndarray,))
    planner.scopes.check()
    return tuple(operations_of(plan, rules.dtype, "", 1, traced.names, {}))


def _cast_products(
    fun: Callable[..., Any],
    operations: Sequence[Operation],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Operation, ...]:
    """Returns the products that autocast brings to half, and not the program itself."""
    plain = make_rules(jnp.float32)
    traced, _, plan = prepare(fun, plain, args, kwargs, (np.ndarray,))
    before = operations_of(plan, plain.dtype, "", 1, traced.names, {})
    pairs = zip(operations, before, strict=True)
    return tuple(now for now, own in pairs if now.on_tensor_cores and not own.in_half)


def _paths(products: Sequence[Operation], parameters: Sequence[str]) -> list[str]:
    """Returns for each product the path of the module or of the argument that it belongs to."""
    paths = [_path(product, parameters) for product in products]
    if len(set(paths)) < 2:  # A jitted loss has one scope for all.
        paths = [_argument(product, parameters) or product.scope for product in products]
    return paths


def _modules(product_paths: Sequence[str], depth: int) -> tuple[str, ...]:
    """Returns the modules of the products at some paths, in the order of the program."""
    paths = [path.split("/") for path in product_paths if path]
    shared = {first: _shared([path for path in paths if path[0] == first]) for first, *_ in paths}
    return tuple(dict.fromkeys("/".join(path[: _end(path, shared[path[0]], depth)]) for path in paths))


def _path(operation: Operation, parameters: Sequence[str]) -> str:
    """Returns the scope of an operation; the argument where the scope is that of a class or of an einsum."""
    names = operation.scope.split("/")
    if "->" in names[-1]:  # `jnp.einsum` names a scope by its equation, such as `bi,io->bo`.
        names = names[:-1]
    scope = "/".join(names)
    is_class = "." in scope.rpartition("/")[2]  # All layers of Equinox share such a scope.
    return (_argument(operation, parameters) if is_class or not scope else "") or scope or operation.scope


def _argument(operation: Operation, parameters: Sequence[str]) -> str:
    """Returns the path of the object that holds a parameter of an operation, or of a lone parameter."""
    own = [argument for argument in operation.arguments if argument.split("/")[0] in parameters]
    last = next(reversed(own or operation.arguments), "")
    holder = last.rpartition("/")[0]
    return holder if "/" in holder else last


def _shared(paths: Sequence[list[str]]) -> int:
    """Returns how many names some paths begin with in common."""
    same = (len(set(names)) == 1 for names in zip(*paths))
    return sum(itertools.takewhile(bool, same))


def _end(path: list[str], shared: int, depth: int) -> int:
    """Returns where a path is cut: after `depth` names, and the index after the last of them."""
    count = 0
    for position in range(shared, len(path)):
        count += position == shared or not path[position].isdigit()
        if count > depth:
            return position
    return len(path)


def _scopes_for(kept: Kept, modules: Sequence[str]) -> tuple[tuple[str, bool], ...]:
    """Returns rules that keep some modules in float32, and the others in half, also those within them."""
    scopes = []
    for module in sorted(modules, key=lambda name: -name.count("/")):  # The first that matches wins.
        around = max((name for name in modules if module.startswith(f"{name}/")), key=len, default="")
        if (module in kept) != (around in kept):
            scopes.append((_pattern(module), module in kept))
    return tuple(scopes)


def _pattern(module: str) -> str:
    return "/" + glob.escape(module)


class _Reference:
    """A loss and its gradients in float32."""

    def __init__(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call, self._args, self._kwargs = call, args, kwargs
        program = self._trace(call)
        loss, *self._gradients = _compiled(program, lambda outputs: outputs)(program.arrays)
        self.loss = float(loss)
        self._sizes = [float(jnp.max(jnp.abs(gradient), initial=0)) for gradient in self._gradients]
        bad = [name for name, size in zip(program.gradients, self._sizes) if not math.isfinite(size)]
        if bad or not math.isfinite(self.loss):
            names = f"; these gradients are not finite: {', '.join(bad[:4])}" if bad else ""
            raise ValueError(
                f"compare_precision compares with float32, in which the loss is {self.loss:.6g}{names}. Find "
                "the cause first: jmp_lite.diagnostics.find_nonfinite(loss_fn)(*args)."
            )

    def _trace(self, call: Call) -> Program:
        # By default a GPU runs float32 products in TF32, whose error is that of float16.
        with jax.default_matmul_precision("highest"):
            return trace("compare_precision", call, self._args, self._kwargs)

    def half(self, rules: Rules) -> Program:
        """Returns the loss and its gradients as one jaxpr, under autocast with some rules."""

        @functools.wraps(self._call.fun)
        def half(*args: Any, **kwargs: Any) -> Any:
            traced, planner, plan = prepare(self._call.fun, rules, args, kwargs, (np.ndarray,))
            return traced.outputs(run(planner, plan, traced.arrays))

        return self._trace(dataclasses.replace(self._call, fun=half))

    def sums(self, program: Program, scale: float) -> tuple[float, np.ndarray]:
        """Returns the loss of a program in half, and for each gradient three squares, float64.

        They are the squares of three norms: the difference, the gradient in half, the gradient in float32.
        """
        arrays = list(program.arrays)
        arrays[program.scale] = jnp.float32(scale)
        units = [size or 1.0 for size in self._sizes]  # The squares of small gradients would be zero.
        measure = lambda outputs, full: (outputs[0], list(map(_sums, outputs[1:], full, units)))
        loss, sums = _compiled(program, measure)(arrays, self._gradients)
        return float(loss), np.square(units)[:, None] * np.asarray(sums, np.float64).reshape(-1, 3)


def _compiled(program: Program, read: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles the jaxpr of a loss and its gradients, and a function `read` of them.

    Returns:
        A function of the arrays of the jaxpr, and of what `read` takes beside the outputs.
    """
    outputs: Any = lambda arrays, *others: read(program.run(arrays), *others)
    return jax.jit(outputs, compiler_options=EVERY_CAST)


def _sums(half: Array, full: Array, unit: float) -> Array:
    """Returns the squares of three norms in units: the difference, the gradient in half and in float32."""
    half, full = half / unit, full / unit
    square = lambda x: jnp.sum(jnp.real(x * jnp.conj(x)))
    return jnp.stack([square(half - full), square(half), square(full)])


def _difference(half: float, full: float, sums: np.ndarray) -> Difference:
    """Returns the errors of a loss and its gradients.

    Args:
        half: the loss in half.
        full: the loss in float32.
        sums: for each gradient the three squares of `_Reference.sums`.
    """
    distance = abs(half - full)
    loss_error = distance / abs(full) if full else distance
    return Difference(loss_error if math.isfinite(loss_error) else math.inf, *_error(*sums.sum(axis=0)))


def _error(difference: float, half: float, full: float) -> tuple[float, float]:
    """Returns the relative error and the cosine of a vector, from three squares of norms.

    Args:
        difference: the square of the difference of the vector in half and the vector in float32.
        half: the square of the vector in half.
        full: the square of the vector in float32.
    """
    if not math.isfinite(difference + half + full):
        return math.inf, math.nan
    if not full:
        return (math.inf, 0.0) if difference else (0.0, 1.0)
    cosine = (half + full - difference) / 2 / math.sqrt(half * full) if half else 0.0
    return math.sqrt(difference / full), min(1.0, max(-1.0, cosine))


class _Runs:
    """The errors with some modules in float32; each set of modules is run once."""

    def __init__(self, reference: _Reference, rules: Rules, modules: Sequence[str], scale: float) -> None:
        self.reference, self.rules, self.modules, self.scale = reference, rules, modules, scale
        self.differences: dict[Kept, Difference] = {}

    def _rules(self, kept: Kept) -> Rules:
        scopes = (*_scopes_for(kept, self.modules), *self.rules.scopes)
        return dataclasses.replace(self.rules, scopes=scopes)

    def keeping(self, modules: Iterable[str]) -> Difference:
        """Returns the error with these modules in float32 and the others in half."""
        kept = frozenset(modules)
        if kept not in self.differences:
            loss, sums = self.reference.sums(self.reference.half(self._rules(kept)), self.scale)
            self.differences[kept] = _difference(loss, self.reference.loss, sums)
        return self.differences[kept]

    def pasted(self, modules: Iterable[str], operations: Iterable[Operation]) -> dict[str, str]:
        """Returns the rules for these modules and those of the function that still select something."""
        rules = self._rules(frozenset(modules))
        paths = {path for operation in operations for path in (operation.scope, *operation.arguments)}
        used = {match[0] for path in paths if path and (match := rules.pattern_for(path))}
        # A pattern may occur twice: the first one counts.
        dtypes = {
            pattern: "float32" if full else rules.dtype.name for pattern, full in reversed(rules.scopes)
        }
        return {pattern: dtypes[pattern] for pattern, _ in rules.scopes if pattern in used}


def _report(
    runs: _Runs,
    operations: Sequence[Operation],
    measure: str,
    tolerance: float,
) -> PrecisionReport:
    half, rest = runs.keeping(()), runs.keeping(runs.modules)
    own = {name: runs.keeping(set(runs.modules) - {name}) for name in runs.modules}
    other = "loss" if measure == "gradients" else "gradients"
    size = lambda name: (getattr(own[name], measure), getattr(own[name], other))
    order = sorted(runs.modules, key=size, reverse=True)
    kept = fewest(order, lambda modules: getattr(runs.keeping(modules), measure), tolerance)
    return PrecisionReport(
        runs.rules.dtype,
        runs.scale,
        runs.reference.loss,
        tuple(ModuleDifference(name, own[name], _pattern(name)) for name in order),
        half,
        rest,
        measure,
        tolerance,
        None if kept is None else runs.pasted(kept, operations),
        None if kept is None else runs.keeping(kept),
        len(order) <= EXACT,
    )

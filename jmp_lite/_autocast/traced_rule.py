"""Custom derivatives: the rule of the user is traced at the dtypes for which it was written, planned and run.

A rule of `jax.custom_jvp` or `jax.custom_vjp` is a function of float32 values like any other. The equation
does not hold it in a form that autocast can read: autocast differentiates the equation as it was traced.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .._jaxpr.bind import bind, cast
from .._jaxpr.precision import only_own_precisions
from .._jaxpr.read import Array, Equation, Jaxpr, Var, is_float32, sources_of_outputs
from .interpreter import Interpreter
from .planning.op import Context
from .planning.plan import Call, conversion
from .planning.states import FLOAT32, HALF, OTHER, State
from .planning.wanted import Wanted
from .value import Value


class _Operand(NamedTuple):
    """An operand of the function, and what its derivatives need to know of it."""

    var: Var
    state: State
    # Whether the rule gives a gradient of it. JAX gives none of what the function closes over.
    is_differentiable: bool
    has_path: bool  # Whether it is a pair (`planning.passes.pairs`).


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["structure", "states", "perturbed"],
)
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """What the forward rule of a `custom_vjp` leaves for the backward rule."""

    arrays: list[Array]
    structure: Any  # How to build the pushforward: a function of tangents that gives tangents.
    states: tuple[State, ...]  # The states of the arrays.
    perturbed: tuple[bool, ...]  # For each operand, whether the rule differentiates with respect to it.


class TracedRule:
    """A function with a custom derivative, and its rules, each run by a plan of its own.

    With symbolic zeros, JAX says which operands are perturbed; the rule is differentiated with respect to
    those only.

    The paths of the operands that are pairs follow the operands, and the paths of such results the results.
    The tangent of a pair is that of its path, in float32; JAX adds nothing of the half operand to it.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        equation: Equation,
        action: Call,
        closed_over: list[Array],
        pairs: tuple[int, ...],
    ) -> None:
        (self._inside,) = action.inner
        self._interpreter, self._equation = interpreter, equation
        self._name = str(equation.params.get("name", "fun"))
        self._closed_over, self._pairs, self._paired = closed_over, pairs, action.paired
        states = self._inside.plan.inputs
        self._operands = tuple(
            _Operand(var, state, n >= len(closed_over) and _is_differentiable(var), n in pairs)
            for n, (var, state) in enumerate(zip(equation.invars, states, strict=True))
        )

    @property
    def primal(self) -> Callable[..., list[Array]]:
        """The function itself, by its plan."""
        run = self._interpreter.body(self._inside, (), self._pairs, self._paired)

        def fun(*arrays: Array) -> list[Array]:
            return run(*self._closed_over, *arrays)[0]

        fun.__name__ = self._name  # JAX prints it.
        return fun

    # The forward-mode rule.

    def jvp(self, primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Any]]:
        """The rule of a `custom_jvp`."""
        given = self._by_operand(tangents)
        perturbed = self._differentiable(not isinstance(tangent, SymbolicZero) for tangent in given)
        moving = itertools.compress(zip(given, self._operands), perturbed)
        directions = [_tangent(tangent, operand.var) for tangent, operand in moving]
        states, outvars = self._inside.plan.results, self._equation.outvars
        moved = [index for index, var in enumerate(outvars) if _is_differentiable(var)]
        results = _Results(
            (*states, *(states[index] for index in moved)),
            (*self._paired, *(len(states) + moved.index(index) for index in self._paired)),
        )
        rule = functools.partial(self._pushforward, perturbed)
        with self._interpreter.in_linear_rule():
            arrays, _, paths = self._run(rule, self._inputs(primals), directions, results)
        changes = dict(zip(moved, arrays[len(states) :], strict=True))
        of_results = [changes.get(index, _no_tangent(var)) for index, var in enumerate(outvars)]
        count = len(self._paired)
        return arrays[: len(states)] + paths[:count], of_results + paths[count:]

    def _pushforward(
        self, perturbed: Sequence[bool], primals: list[Array], directions: list[Array]
    ) -> tuple[list[Array], list[Array]]:
        """The rule at the dtypes for which it was written."""
        fun, operands = self._of_perturbed(primals, perturbed)
        results, changes = jax.jvp(fun, operands, tuple(directions))
        differentiable = map(_is_differentiable, self._equation.outvars)
        return results, [change for change, each in zip(changes, differentiable) if each]

    # The reverse-mode rules.

    def forward(self, *given: Any) -> tuple[list[Array], Any]:
        """The forward rule of a `custom_vjp`: the results, and the residuals."""
        perturbed = self._differentiable(True for _ in self._operands)
        if self._equation.params["symbolic_zeros"]:
            perturbed = self._differentiable(
                getattr(primal, "perturbed", False) for primal in self._by_operand(given)
            )
        structures: list[Any] = []

        def trace(arrays: list[Array], _: list[Array]) -> tuple[list[Array], list[Array]]:
            fun, operands = self._of_perturbed(arrays, perturbed)
            results, pushforward = jax.linearize(fun, *operands)
            leaves, structure = jax.tree.flatten(pushforward)
            structures.append(structure)
            return results, leaves

        states = self._inside.plan.results
        inputs = self._inputs([primal.value for primal in given])
        arrays, residual_states, paths = self._run(trace, inputs, [], _Results(states, self._paired))
        saved = _Residuals(arrays[len(states) :], structures[-1], tuple(residual_states), perturbed)
        return arrays[: len(states)] + paths, saved

    def backward(self, saved: _Residuals, cotangents: list[Any]) -> tuple[Array | None, ...]:
        """The backward rule of a `custom_vjp`."""
        is_given, arriving = self._arriving(cotangents)
        operands = [operand for operand, each in zip(self._operands, saved.perturbed) if each]

        def pullback(leaves: list[Array], arriving: list[Array]) -> list[Array]:
            pushforward = jax.tree.unflatten(saved.structure, leaves)

            def to_given(*tangents: Array) -> list[Array]:
                return [change for change, given in zip(pushforward(*tangents), is_given) if given]

            return list(jax.linear_transpose(to_given, *(operand.var.aval for operand in operands))(arriving))

        residuals = list(zip(map(Value, saved.arrays), saved.states, strict=True))
        states = tuple(FLOAT32 if operand.has_path else operand.state for operand in operands)
        # The gradient of an activation is read on; that of a parameter leaves the backward pass.
        intermediate = tuple(not state.wide_gradient for state in states)
        context = Context(self._inside.plan.analysis.context.scope, True, intermediate, of_gradient=True)
        try:
            arrays, _, _ = self._run(pullback, residuals, arriving, _Results(states), context)
        except jax.errors.UnexpectedTracerError as error:
            raise ValueError(_READS_TRACED) from error
        return self._gradients(arrays, saved.perturbed)

    def _arriving(self, cotangents: list[Any]) -> tuple[list[bool], list[tuple[Value, State]]]:
        """Returns for each result whether it has a cotangent, and these cotangents.

        The cotangents of a pair, in half and of its path, are summed in float32.
        """
        outvars = self._equation.outvars
        of_results, of_paths = cotangents[: len(outvars)], cotangents[len(outvars) :]
        for index, of_path in zip(self._paired, of_paths, strict=True):
            of_results[index] = _sum(of_results[index], of_path)
        is_given = [
            _is_differentiable(var) and not isinstance(cotangent, SymbolicZero)
            for cotangent, var in zip(of_results, outvars)
        ]
        arriving = zip(of_results, outvars, is_given)
        return is_given, [_tangent(cotangent, var) for cotangent, var, given in arriving if given]

    def _gradients(self, of_perturbed: Iterable[Array], perturbed: Sequence[bool]) -> tuple[Any, ...]:
        """Returns the gradient of each operand, then those of the paths. The half of a pair has none."""
        given = iter(of_perturbed)
        gradients = [next(given) if each else None for each in perturbed]
        of_paths = [gradients[index] for index in self._pairs]
        for index in self._pairs:
            gradients[index] = None
        return *gradients[len(self._closed_over) :], *of_paths

    # The batching rule.

    def batched(
        self, axis_size: int, in_batched: Sequence[bool], *arrays: Array
    ) -> tuple[list[Array], list[bool]]:
        """The rule of a `custom_vmap`: the results, and for each that it has a batch axis."""
        axes = [None] * len(self._closed_over) + [0 if is_batched else None for is_batched in in_batched]

        def rule(arrays: list[Array], _: list[Array]) -> list[Array]:
            run = jax.vmap(lambda *arrays: bind(self._equation, arrays), axes, axis_size=axis_size)
            return run(*arrays)

        results, _, _ = self._run(rule, self._inputs(arrays), [], _Results(self._inside.plan.results))
        return results, [True] * len(results)

    # All.

    def _inputs(self, arrays: Sequence[Array]) -> list[tuple[Value, State]]:
        """Returns all operands of the function, each with its state."""
        values = self._interpreter.with_paths((*self._closed_over, *arrays), self._pairs)
        return [(value, operand.state) for value, operand in zip(values, self._operands, strict=True)]

    def _by_operand(self, given: Sequence[Any]) -> list[Any]:
        """Returns one entry per operand, such as its tangent.

        It is that of the path if the operand is a pair, and None if the function closes over it.
        """
        count = len(given) - len(self._pairs)
        entries = [*(None for _ in self._closed_over), *given[:count]]
        for index, of_path in zip(self._pairs, given[count:], strict=True):
            entries[index] = of_path
        return entries

    def _differentiable(self, perturbed: Iterable[bool]) -> tuple[bool, ...]:
        """Restricts the operands that are perturbed to those that are differentiable."""
        pairs = zip(self._operands, perturbed, strict=True)
        return tuple(operand.is_differentiable and each for operand, each in pairs)

    def _of_perturbed(
        self, arrays: list[Array], perturbed: Sequence[bool]
    ) -> tuple[Callable[..., list[Array]], tuple[Array, ...]]:
        """Returns the equation as a function of its perturbed operands, and those operands."""

        def fun(*operands: Array) -> list[Array]:
            given = iter(operands)
            return bind(self._equation, [next(given) if each else x for x, each in zip(arrays, perturbed)])

        return fun, tuple(x for x, each in zip(arrays, perturbed) if each)

    def _run(
        self,
        rule: Callable[[list[Array], list[Array]], Any],
        inputs: Sequence[tuple[Value, State]],
        tangents: Sequence[tuple[Value, State]],
        results: "_Results",
        context: Context | None = None,
    ) -> tuple[list[Array], Sequence[State], list[Array]]:
        """Traces a rule in the dtypes for which it was written, plans it and runs it.

        Args:
            rule: the rule, a function of arrays in their traced dtypes.
            inputs: its operands, each with its state.
            tangents: its tangents or cotangents, each with its state.
            results: what is known of its first results. Those after them are residuals.
            context: the context of a backward rule; None for another rule.

        Returns:
            The results, the states of the residuals, and the paths of the pairs.
        """
        interpreter = self._interpreter
        arguments = [*inputs, *tangents]
        traced = [interpreter.take(value, conversion(state, FLOAT32)) for value, state in arguments]
        with only_own_precisions():
            closed = jax.make_jaxpr(rule)(traced[: len(inputs)], traced[len(inputs) :])
        result_of = _also_results(closed, len(results.states))
        wanted = [Wanted.INDIRECTLY if state.is_half else Wanted.NO for state in results.states]
        wanted += [Wanted.NO if number is None else wanted[number] for number in result_of]
        if context is None:  # The scopes around the function are around its rules too.
            around = self._inside.plan.analysis.context
            are_tangents = (False,) * len(inputs) + (True,) * len(tangents)
            context = Context(
                around.scope, streams=around.streams, decides=around.decides, tangents=are_tangents
            )
        plan = interpreter.planner.plan(closed, [state for _, state in arguments], wanted, context)
        residuals = [
            state if number is None else results.states[number]
            for state, number in zip(plan.results[len(results.states) :], result_of)
        ]
        leave = list(map(conversion, plan.results, (*results.states, *residuals)))
        values = interpreter.run(plan, [value for value, _ in arguments])
        paths = [values[index].to(jnp.float32) for index in results.paired]
        return interpreter.take_all(values, leave), residuals, paths


class _Results(NamedTuple):
    """What is known of the results of a rule before it is planned."""

    states: Sequence[State]  # The results take the dtypes of these.
    paired: Sequence[int] = ()  # The indexes of those that are pairs.


def _also_results(rule: Jaxpr, count: int) -> list[int | None]:
    """Returns for each residual which of the first `count` results it is; None for another value.

    Such a residual is the value that the readers of the result read.
    """
    sources = sources_of_outputs(rule)
    first = {source: number for number, source in reversed([*enumerate(sources[:count])])}
    return [first.get(source) for source in sources[count:]]


# JAX says "No constant handler for type Tracer" or names an escaped tracer, and not the rule:
# https://github.com/jax-ml/jax/pull/34216.
_READS_TRACED = (
    "The backward rule of a custom_vjp reads a traced value that is not among its residuals, such as an "
    "argument of the function around it. Such a rule fails under jax.grad(jax.jit(fun)), and under "
    "jax.grad(autocast(fun)). Return the value from the forward rule as a residual, or write "
    "autocast(jax.grad(fun))."
)


def _tangent(array: Array, var: Var) -> tuple[Value, State]:
    """Returns a tangent or cotangent of `var`, which may be half in the program itself, with its state."""
    if not is_float32(var):
        return Value(array), OTHER
    return Value(array), FLOAT32 if array.dtype == jnp.float32 else HALF


def _sum(of_half: Any, of_path: Any) -> Any:
    """Returns the cotangent of a result that is a pair, in float32. Both parts may be symbolic zeros."""
    if isinstance(of_path, SymbolicZero):
        return of_half
    return of_path if isinstance(of_half, SymbolicZero) else of_path + cast(of_half, jnp.float32)


def _no_tangent(var: Var) -> np.ndarray:
    return np.zeros(var.aval.shape, jax.dtypes.float0)


def _is_differentiable(var: Var) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)

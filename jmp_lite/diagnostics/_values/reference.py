"""The reference in float32: runs a jaxpr with its half values as float32 arrays, and rounds some of them.

`flagged` of `_jaxpr.read` has written the flags of each equation into it. If all of them are on, the equation
computes what it computes in the program. If one of them is off, it computes in float32, and a cast to half
does nothing.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._dtypes import HALF_DTYPES
from ..._jaxpr import (
    CALLS,
    PRIMITIVES,
    Array,
    Category,
    Equation,
    Inner,
    Jaxpr,
    Outputs,
    Var,
    all_equations,
    bind,
    constants,
    context_of,
    flags_of,
    inner_jaxprs,
    open_jaxpr,
    replay,
    traits_of,
    while_loop,
)
from .describe import INLINE
from .numbers import Numbers, written
from .sites import NARROW, line_of
from .tap import MOST_ITERATIONS

Flags = frozenset[int]
"""The numbers of the flags that an equation belongs to."""

_DIGITS = tuple(jnp.finfo(half).nmant for half in HALF_DTYPES)
# These run once, in float32, on rounded operands: Tensor Cores and XLA's CPU backend also sum in float32.
_PRODUCTS = ("conv_general_dilated", "dot_general", "ragged_dot_general")
_CALLS: dict[str, Any] = {**CALLS, "while": functools.partial(while_loop, most=MOST_ITERATIONS)}
_CASTS = ("convert_element_type", "reduce_precision", "bitcast_convert_type")
_OF_BITS = "bitcast_convert_type"  # Its result depends on the bits of a number.


class ReferenceValue(NamedTuple):
    """A value of the program, in float32 where the program has half."""

    array: Array
    rounded: Flags | None = None  # If all these flags are on, it is a half number; None if that is not known.


Values: TypeAlias = list[ReferenceValue]
Read: TypeAlias = Callable[[Var], ReferenceValue]


class Reference:
    """Runs jaxprs in float32, or another dtype `wide`, where all flags of an equation are not on.

    `is_on` has a bool for each set of flags in the jaxprs, and `numbers` those that half precision rounds.
    With `by_hand` it rounds the operands and the result of each half product to the digits of this dtype, as
    casts by hand around each matmul do, and keeps the range of float32. `sums` are the flags of the values
    whose gradients an equation adds up, by its `id`, and `lines` those of the numbers that a line converts.
    """

    def __init__(
        self,
        is_on: Mapping[Flags, Array],
        numbers: Numbers = MappingProxyType({}),
        wide: Any = np.float32,
        by_hand: Any = None,
        sums: Mapping[int, Flags] = MappingProxyType({}),
        lines: Mapping[str, Flags] = MappingProxyType({}),
    ) -> None:
        self._sums, self._lines = sums, lines
        self._is_on, self._numbers, self._wide, self._by_hand = is_on, numbers, np.dtype(wide), by_hand

    def run(self, jaxpr: Jaxpr, arrays: Sequence[Array]) -> list[Array]:
        """Runs a jaxpr on arrays; returns its outputs, in float32 where the jaxpr gives half."""
        return [value.array for value in self._run(jaxpr, [self._exact(array) for array in arrays], None)]

    def _run(self, jaxpr: Jaxpr, values: Values, around: Flags | None) -> Values:
        """Runs a jaxpr. Equations without flags of their own have those `around` it."""

        def action(_: int, equation: Equation, read: Read) -> Values:
            flags = flags_of(equation)
            return self._equation(equation, map(read, equation.invars), around if flags is None else flags)

        return replay(jaxpr, [*map(self._exact, constants(jaxpr)), *values], self._literal, action)

    def apply(self, equation: Equation, arrays: Sequence[Array]) -> list[Array]:
        """Runs one equation on arrays, as `run` does."""
        return [value.array for value in self._equation(equation, map(self._exact, arrays), None)]

    def _equation(self, equation: Equation, values: Iterable[ReferenceValue], flags: Flags | None) -> Values:
        operands = self._operands(equation, values, flags)
        name = equation.primitive.name
        with context_of(equation):
            # In bfloat16 JAX draws other numbers
            # (https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/random/core.py#L530): float16 ones,
            # once rounded, may leave their range.
            called = str(equation.params.get("name", ""))  # JAX jits `jax.random.normal` as `_normal`.
            if self._wide == jnp.bfloat16 and called[:1] == "_" and hasattr(jax.random, called[1:]):
                return list(map(self._exact, _as_written(equation, [value.array for value in operands])))
            if name in INLINE:
                (inner,) = (part for part in inner_jaxprs(equation) if None not in part.results)
                return self._run(inner.jaxpr, [operands[number] for number in inner.operands], flags)
            if name in _CALLS:
                return self._call(equation, operands, flags)
            if traits_of(name).category is Category.MOVE:
                return self._move(equation, operands)
            return self._operation(equation, operands, flags)

    def _operands(self, equation: Equation, values: Iterable[ReferenceValue], flags: Flags | None) -> Values:
        """Returns the operands; with the flags off numbers as they are written, which half had rounded."""
        operands = list(values)
        for position, value in enumerate(operands):
            if (number := written(self._numbers, equation, position)) is not None:
                own = self._lines.get(number.line, flags)
                var = equation.invars[position]
                exact = np.asarray(number.number, self._wide if is_narrow(var) else var.aval.dtype)
                array = self._choose(own, value.array, exact)
                operands[position] = ReferenceValue(array, own)
        return operands

    def _literal(self, var: Var) -> ReferenceValue:
        return self._exact(np.asarray(var.val, var.aval.dtype) if is_narrow(var) else var.val)

    def _exact(self, array: Array) -> ReferenceValue:
        """Returns an array of the program as a value that needs no rounding."""
        return ReferenceValue(self._widened(array), frozenset())

    def _widened(self, array: Array) -> Array:
        return lax.convert_element_type(array, self._wide) if is_narrow(array) else array

    def _call(self, equation: Equation, operands: Values, flags: Flags | None) -> Values:
        def body(inner: Inner) -> Callable[..., Outputs]:
            fixed = [operands[number] for number in inner.operands[: inner.constants]]

            def run(*arrays: Array) -> Outputs:
                results = self._run(inner.jaxpr, [*fixed, *map(ReferenceValue, arrays)], flags)
                return [jnp.asarray(value.array) for value in results], {}

            return run

        bodies = [body(inner) for inner in inner_jaxprs(equation)]
        arrays, _ = _CALLS[equation.primitive.name](equation, bodies, [value.array for value in operands])
        return list(map(ReferenceValue, arrays))

    def _move(self, equation: Equation, operands: Values) -> Values:
        """A move rounds nothing."""
        if equation.primitive.name == "optimization_barrier" and all(map(_is_number, operands)):
            return operands
        results = bind(equation, [value.array for value in operands], **self._wide_params(equation))
        rounded = [value.rounded for value in operands]
        is_one_each = len(results) == len(operands)
        return list(map(ReferenceValue, results, rounded if is_one_each else [rounded[0]] * len(results)))

    def _operation(self, equation: Equation, operands: Values, flags: Flags | None) -> Values:
        """Runs an operation in half and in float32, and selects one result by the flags."""
        # To round the float32 result would not be the same: in half, a sum may stop growing, and XLA divides
        # by a multiplication with the rounded reciprocal.
        name, arrays = equation.primitive.name, [value.array for value in operands]
        is_cast = name == "convert_element_type"
        if name == "reduce_precision" and equation.params["mantissa_bits"] in _DIGITS:
            rounded = self._widened(_as_written(equation, arrays)[0])
            return [ReferenceValue(self._choose(flags, rounded, arrays[0]), flags)]
        if is_cast and _is_number(operands[0]) and is_narrow(equation.outvars[0]):
            return [ReferenceValue(np.asarray(arrays[0], self._wide))]  # Each of its readers rounds it.
        if not any(map(is_narrow, (*equation.invars, *equation.outvars))):
            return list(map(ReferenceValue, bind(equation, arrays, **self._wide_params(equation))))
        if name in _PRODUCTS:
            return self._product(equation, operands, flags)
        # An operation that is not in the table may not exist in float32: it runs as written.
        if name == _OF_BITS or not (is_cast or name in PRIMITIVES):
            return list(map(self._exact, _as_written(equation, arrays)))
        if name == "add_any":
            flags = self._sums.get(id(equation), _flags_of_sum(operands, flags))
        return self._in_both(equation, arrays, flags)

    def _in_both(self, equation: Equation, arrays: Sequence[Array], flags: Flags | None) -> Values:
        results = bind(equation, arrays, **self._wide_params(equation))
        if flags in self._is_on:
            halves = map(self._widened, _as_written(equation, arrays))
            results = [self._choose(flags, half, array) for half, array in zip(halves, results)]
        return [ReferenceValue(array, flags) for array in results]

    def _product(self, equation: Equation, operands: Values, flags: Flags | None) -> Values:
        taken = []
        for value, var in zip(operands, equation.invars):
            # An operand that these flags have rounded already is not rounded twice.
            is_rounded = flags is not None and value.rounded is not None and value.rounded <= flags
            is_rounded &= self._by_hand is None
            taken.append(value.array if is_rounded else self._rounded(value.array, var, flags))
        (result,) = bind(equation, taken, **self._wide_params(equation))
        return [ReferenceValue(self._rounded(result, equation.outvars[0], flags), flags)]

    def _rounded(self, array: Array, var: Var, flags: Flags | None) -> Array:
        """Rounds an array to the dtype of a half variable if the flags are on, or by hand."""
        # With the 8 bits of the exponent of float32: by hand, the range is not that of half.
        if self._by_hand is not None and is_narrow(var):
            return lax.reduce_precision(array, 8, jnp.finfo(self._by_hand).nmant)
        if not is_narrow(var) or flags not in self._is_on:
            return array
        # `lax.reduce_precision` would flush the subnormal numbers of float16 to zero, as XLA's implementation
        # says:
        # https://github.com/openxla/xla/blob/001918b7024c/xla/service/elemental_ir_emitter.cc.
        return self._choose(flags, self._widened(lax.convert_element_type(array, var.aval.dtype)), array)

    def _choose(self, flags: Flags | None, on: Array, off: Array) -> Array:
        return off if flags is None or flags not in self._is_on else jnp.where(self._is_on[flags], on, off)

    def _wide_params(self, equation: Equation) -> dict[str, Any]:
        """Returns the parameters of an equation that change when its operands and results are float32."""
        name, changed = equation.primitive.name, dict[str, Any]()
        for key, value in equation.params.items():
            if isinstance(value, np.dtype) and value in NARROW:
                changed[key] = self._wide
            elif hasattr(open_jaxpr(value), "eqns"):  # The sum of a `reduce`, of a scatter.

                def wide_dtype(var):
                    return self._wide if is_narrow(var) else var.aval.dtype

                inputs = open_jaxpr(value).invars
                shapes = [jax.ShapeDtypeStruct(var.aval.shape, wide_dtype(var)) for var in inputs]
                wide = jax.make_jaxpr(lambda *arrays, value=value: self.run(value, arrays))(*shapes)
                changed[key] = wide if hasattr(value, "consts") else open_jaxpr(wide)
        if name in _PRODUCTS and (
            equation.params["precision"] is None or any(map(is_narrow, equation.invars))
        ):
            # By default a GPU runs float32 products in TF32, whose error is that of float16:
            # https://github.com/jax-ml/jax/issues/12008.
            changed["precision"] = (lax.Precision.HIGHEST,) * 2
        return changed


def flags_in(jaxpr: Jaxpr) -> Set[Flags]:
    return {flags for equation in all_equations(jaxpr) if (flags := flags_of(equation)) is not None}


def has_value(jaxpr: Jaxpr, dtypes: Collection[Any] = NARROW) -> bool:
    """Whether an equation of a jaxpr makes a value of one of some dtypes: by default half or fp8."""
    made = (var for equation in all_equations(jaxpr) for var in equation.outvars)
    return any(getattr(var.aval, "dtype", None) in dtypes for var in made)


def run_as_written(jaxpr: Jaxpr) -> list[str]:
    """Returns the operations that take half values and have no rule here, each with its line.

    They run in half in the reference as well.
    """
    known = {*PRIMITIVES, *_CALLS, *INLINE, *_CASTS}
    halves = (each for each in all_equations(jaxpr) if any(map(is_narrow, each.invars)))
    unknown = (each for each in halves if each.primitive.name not in known)
    lines = ((each.primitive.name, line_of(each).partition(" ")[0]) for each in unknown)
    return list(dict.fromkeys(f"{name} on {line}" if line else name for name, line in lines))


def has_loop(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr has a `while` loop, whose number of steps is not known."""
    return any(equation.primitive.name == "while" for equation in all_equations(jaxpr))


def is_narrow(value: Any) -> bool:
    """Whether an array, a variable of a jaxpr or its type is in half precision or fp8."""
    return getattr(getattr(value, "aval", value), "dtype", None) in NARROW


def _is_number(value: ReferenceValue) -> bool:
    """Whether a value is a literal scalar, which XLA knows."""
    return isinstance(value.array, (float, np.generic, np.ndarray)) and np.ndim(value.array) == 0


def _flags_of_sum(operands: Values, flags: Flags | None) -> Flags | None:
    """Returns the flags of an `add_any`: the gradients of a value are in half if all readers of it are."""
    # JAX makes this sum, so no module has it, and its flags are those of the gradients that meet in it.
    rounded = [value.rounded for value in operands if value.rounded is not None]
    return frozenset[int]().union(*rounded) if len(rounded) == len(operands) else flags


def _as_written(equation: Equation, arrays: Sequence[Array]) -> list[Array]:
    """Runs an operation in the dtypes that it has in the program."""

    def cast_back(x, var):
        return lax.convert_element_type(x, var.aval.dtype) if is_narrow(var) else x

    return bind(equation, list(map(cast_back, arrays, equation.invars)))

"""What is known of the variables: each is a linear function of the scores, `slope * scores + b`."""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jaxpr import (
    Equation,
    Inner,
    Jaxpr,
    Labels,
    Role,
    Var,
    bind,
    constants,
    equations,
    inner_jaxprs,
    is_literal,
    moved_axes,
    open_jaxpr,
    traits_of,
)

# A key has no weight if its score is this much less than that of another one: `exp` of it is zero in float32.
MASKED = -1e4
# Numbers so low are those of masks, and certainly lower than a bias.
BELOW_BIASES = -1e30

_LARGEST = 2**26  # The size of the largest mask that is computed while tracing: 8192 queries and keys.
# Operations that make masks, beside those that the table calls `pointwise`.
_LOGICAL = {"and", "or", "not", "xor", "convert_element_type"}


class NotFused(Exception):
    """Says why an attention stays as the program has it."""


# Between the product of queries and keys and the softmax, programs scale, mask and bias the scores in many
# ways. None of them is matched by its form: what a program computes from scores of zero is its mask or bias.
@dataclasses.dataclass(frozen=True)
class Fact:
    """What is known of a variable. Its base is its value at scores of zero."""

    varies: tuple[bool, ...]  # For each axis, whether the base may vary along it.
    base: Any = None  # An array, if it is known, with size 1 along the axes on which it does not vary.
    scores: Var | None = None  # The product; None for a variable that does not depend on one.
    slope: float = 0.0
    axes: Labels = ()  # For each axis, that of the scores; None for a new axis of size 1.
    fill: float | None = None  # The largest number that stands in place of some scores.
    added: bool = False  # Whether something has been added to the scores.
    # Whether it may hold the lowest numbers of a mask; for scores, whether what was added to them may.
    may_be_low: bool = False


class Facts:
    """The facts of the variables in a jaxpr, each found when it is asked for."""

    def __init__(self, jaxpr: Jaxpr, given: Callable[[Var], Fact], is_called: bool = False) -> None:
        """Takes a jaxpr and the facts of its inputs. `is_called` holds inside an operation on scores."""
        self.jaxpr, self.equations = jaxpr, equations(jaxpr)
        self.made_by = {out: index for index, each in enumerate(self.equations) for out in each.outvars}
        self.makers = {out: self.equations[index] for out, index in self.made_by.items()}
        self.on_scores: set[int] = set()  # The indexes of the operations on scores that were found.
        # For each variable the indexes of the operations that read it, and -1 for a result of the jaxpr.
        self.readers: dict[Var, set[int]] = collections.defaultdict(set)
        for index, each in ((-1, open_jaxpr(jaxpr)), *enumerate(self.equations)):
            for var in each.outvars if index < 0 else each.invars:
                if not is_literal(var):
                    self.readers[var].add(index)
        self._given, self._is_called = given, is_called
        self._constants = dict(zip(open_jaxpr(jaxpr).constvars, constants(jaxpr)))
        self._facts: dict[Var, Fact] = {}

    def inside(self, equation: Equation) -> Iterator[tuple["Facts", Inner]]:
        """Yields the facts of each jaxpr that an equation runs. They know masks from outside of a loop."""
        # `outer=outer`: the generator goes on to the next jaxpr before the fact of an input is asked for.
        for inner in inner_jaxprs(equation):
            operands = [equation.invars[index] for index in inner.operands]
            outer = dict(zip(open_jaxpr(inner.jaxpr).invars, zip(operands, inner.roles)))
            yield Facts(inner.jaxpr, lambda var, outer=outer: self._of_operand(var, *outer[var])), inner

    def _of_operand(self, var: Var, operand: Var, role: Role) -> Fact:
        # A carry or a slice is another array in each iteration. Scores from outside are not followed.
        if role in (Role.ONCE, Role.CONSTANT) and var.aval.shape == operand.aval.shape:
            with contextlib.suppress(NotFused):
                fact = self.of(operand)
                return fact if fact.scores is None else unknown(var)
        return unknown(var)

    def of(self, var: Var) -> Fact:
        """Returns the fact of a variable. Raises `NotFused` if the scores reach it in another way."""
        if is_literal(var):
            return _known(np.asarray(var.val, var.aval.dtype))
        if var not in self._facts:
            index = self.made_by.get(var)
            self._facts[var] = self._of_input(var) if index is None else self._of_result(index)
            if index is not None and self._facts[var].scores is not None:
                self.on_scores.add(index)
        return self._facts[var]

    def _of_input(self, var: Var) -> Fact:
        if var not in self._constants:
            return self._given(var)
        if math.prod(var.aval.shape) <= _LARGEST:
            # A constant may be a tracer of an outer `jax.jit`, or lie on the devices of other processes.
            with contextlib.suppress(jax.errors.TracerArrayConversionError, RuntimeError):
                return _known(np.asarray(self._constants[var]))
        return unknown(var)

    def _of_result(self, index: int) -> Fact:
        equation = self.equations[index]
        name, var = equation.primitive.name, equation.outvars[0]
        shape: Any = getattr(var.aval, "shape", ())
        if name == "dot_general" and not self._is_called:
            # Any product may be that of queries and keys. It is the variable itself at the scores zero.
            zero, axes = np.zeros((1,) * len(shape), np.float32), tuple(range(len(shape)))
            return Fact((False,) * len(shape), zero, scores=var, slope=1.0, axes=axes)
        if name == "iota":
            return _of_iota(equation)
        if name == "jit" and len(equation.outvars) == 1:
            return self._of_call(equation)
        if (moved := moved_axes(equation)) is not None:
            return _of_move(self.of(equation.invars[0]), moved, equation)
        if len(equation.outvars) == 1 and (traits_of(name).pointwise or name in _LOGICAL):
            return _of_pointwise(equation, list(map(self.of, equation.invars)))
        # In the outermost jaxpr the finder sees that another operation reads the scores.
        if self._is_called and any(self.of(each).scores is not None for each in equation.invars):
            raise NotFused(f"the scores pass through {name}")
        return unknown(var)

    def _of_call(self, equation: Equation) -> Fact:
        """Returns the fact of the result of a jitted function, such as `jnp.where`."""
        inside = open_jaxpr(equation.params["jaxpr"])
        outer = dict(zip(inside.invars, equation.invars))
        facts = Facts(equation.params["jaxpr"], lambda var: self.of(outer[var]), is_called=True)
        return facts.of(inside.outvars[0])


def unknown(var: Var) -> Fact:
    """Returns the fact of a variable of which only the shape is known."""
    return Fact(tuple(size != 1 for size in getattr(var.aval, "shape", ())))


def _known(array: Any) -> Fact:
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    may_be_low = is_float and float(array.min(initial=0)) < BELOW_BIASES
    return Fact(tuple(size != 1 for size in array.shape), array, may_be_low=may_be_low)


def _of_iota(equation: Equation) -> Fact:
    axis, aval = equation.params["dimension"], equation.outvars[0].aval
    if not all(isinstance(size, int) for size in aval.shape):  # `jax.export` with symbolic shapes.
        return unknown(equation.outvars[0])
    numbers = np.arange(aval.shape[axis], dtype=aval.dtype)
    return _known(numbers.reshape([-1 if n == axis else 1 for n in range(aval.ndim)]))


def _of_move(fact: Fact, moved: Labels, equation: Equation) -> Fact:
    name, out = equation.primitive.name, equation.outvars[0].aval
    # Scores that are repeated, or that no gradient reaches, are not those of an attention.
    copies = any(axis is None and size != 1 for axis, size in zip(moved, out.shape))
    if fact.scores is not None and (copies or name == "stop_gradient"):
        raise NotFused(f"the scores pass through {name}")

    def pick(items, new):
        return tuple(new if axis is None else items[axis] for axis in moved)

    base = fact.base
    if base is not None:
        kept = [axis for axis in moved if axis is not None]
        dropped = [axis for axis in range(base.ndim) if axis not in kept]  # Their size is 1.
        base = base.transpose(kept + dropped).reshape(pick(base.shape, 1))
    axes = pick(fact.axes, None) if fact.scores is not None else ()
    return dataclasses.replace(fact, varies=pick(fact.varies, False), base=base, axes=axes)


def _of_pointwise(equation: Equation, operands: Sequence[Fact]) -> Fact:
    # A literal or scalar operand has no axes, and varies along none.
    axes = range(equation.outvars[0].aval.ndim)
    varies = tuple(any(each.varies[axis] for each in operands if each.varies) for axis in axes)
    base = _base(equation, [each.base for each in operands])
    places = [place for place, each in enumerate(operands) if each.scores is not None]
    if not places:
        is_float = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
        return Fact(varies, base, may_be_low=is_float and any(each.may_be_low for each in operands))
    if len(places) > 1:
        raise NotFused("the scores are combined with those of another matmul")
    if equation.invars[places[0]].aval.shape != equation.outvars[0].aval.shape:
        raise NotFused(f"{equation.primitive.name} repeats the scores")
    others = [each for place, each in enumerate(operands) if place not in places]
    fact = _of_scores(equation, places[0], operands[places[0]], others)
    return dataclasses.replace(fact, varies=varies, base=base)


def _base(equation: Equation, bases: Sequence[Any]) -> Any:
    """Returns the base of the result of an operation, or None."""
    # NumPy broadcasts axes of size 1, so a causal mask is computed once for all examples and heads.
    known = [each for each in bases if each is not None]
    shape = np.broadcast_shapes(*(each.shape for each in known))
    if len(known) < len(bases) or math.prod(shape) > _LARGEST:
        return None
    # Under `jax.jit` the operation would be traced otherwise.
    with jax.ensure_compile_time_eval():
        pairs = zip(known, equation.invars)
        typed = [jnp.asarray(np.broadcast_to(each, shape), var.aval.dtype) for each, var in pairs]
        return np.asarray(bind(equation, typed)[0])


def _of_scores(equation: Equation, place: int, fact: Fact, others: Sequence[Fact]) -> Fact:
    """Returns the fact of an operation on scores, which are its operand `place`, but for the base."""
    name = equation.primitive.name
    if name == "convert_element_type" and equation.outvars[0].aval.dtype == jnp.float32:
        return fact
    # The predicate comes first; then the case for false and that for true.
    if name == "select_n" and place and len(others) == 2:
        return _masked(fact, others[1])
    # Behind a mask a sum or a factor may bring its numbers back into the range of scores.
    is_linear = name in ("add", "mul") or (name in ("sub", "div") and place == 0)
    if fact.fill is not None or not is_linear:
        raise NotFused(f"the scores pass through {name}")
    if name in ("add", "sub"):
        return dataclasses.replace(fact, added=True, may_be_low=fact.may_be_low or others[0].may_be_low)
    factor = _number(others[0])
    return dataclasses.replace(fact, slope=fact.slope * factor if name == "mul" else fact.slope / factor)


def _masked(fact: Fact, other: Fact) -> Fact:
    """Returns the fact of masked scores: `jnp.where` has replaced some of them with another operand."""
    largest = math.inf if other.base is None else float(other.base.max())
    return dataclasses.replace(fact, fill=largest if fact.fill is None else max(fact.fill, largest))


def _number(factor: Fact) -> float:
    # A learned temperature is not a number: cuDNN takes the scale while it compiles.
    if factor.base is None or factor.base.size != 1:
        raise NotFused("the factor of the scores is not a number")
    return factor.base.item()

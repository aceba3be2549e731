"""What a jaxpr says of dtypes: the products in it, and the values that are kept for the backward pass."""

import collections
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jmp_lite._jaxpr.inner import Role, inner_jaxprs
from jmp_lite._jaxpr.primitives import Category, traits_of

PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"}


def equations(jaxpr) -> Iterator:
    """Yields the equations of `jaxpr` and of every jaxpr inside it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_of(equation):
            yield from equations(inner)


def inner_of(equation) -> Iterator:
    """Yields the jaxprs inside an equation."""
    for value in equation.params.values():
        yield from filter(_is_jaxpr, _members(value))


def _members(value):
    return value if isinstance(value, (tuple, list)) else [value]


def _is_jaxpr(value) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def sums_nothing(equation) -> bool:
    """Whether a product is an outer product: no axis, or only axes of size 1, are contracted."""
    if equation.primitive.name != "dot_general":
        return False
    (contracted, _), _ = equation.params["dimension_numbers"]
    return all(equation.invars[0].aval.shape[axis] == 1 for axis in contracted)


def products(fun, *args, **kwargs) -> list[tuple[str, ...]]:
    """Returns the operand dtypes of every convolution and product, but for outer ones, that `fun` runs."""
    jaxpr = jax.make_jaxpr(fun)(*args, **kwargs)
    return [
        tuple(var.aval.dtype.name for var in equation.invars[:2])
        for equation in equations(jaxpr)
        if equation.primitive.name in PRODUCTS and not sums_nothing(equation)
    ]


def product_kinds(fun, *args) -> collections.Counter[tuple[str, ...]]:
    """Returns the number of `dot_general`s of each kind: the dtypes of the operands and of the result."""
    dots = [dot for dot in equations(jax.make_jaxpr(fun)(*args)) if dot.primitive.name == "dot_general"]
    return collections.Counter(
        tuple(var.aval.dtype.name for var in (*dot.invars[:2], *dot.outvars)) for dot in dots
    )


def primitives(fun, *args, **kwargs) -> list[str]:
    """Returns the names of the operations that `fun` runs."""
    return [equation.primitive.name for equation in equations(jax.make_jaxpr(fun)(*args, **kwargs))]


def operands_of(name, fun, *args) -> list[str]:
    """Returns the dtype of the first operand of every operation called `name` that `fun` runs."""
    found = equations(jax.make_jaxpr(fun)(*args))
    return [equation.invars[0].aval.dtype.name for equation in found if equation.primitive.name == name]


def casts(fun, *args, **kwargs) -> list[tuple[tuple[int, ...], str, str]]:
    """Returns the shape and both dtypes of every cast between floating dtypes that `fun` runs."""
    jaxpr = jax.make_jaxpr(fun)(*args, **kwargs)
    found = [
        (equation.invars[0].aval.shape, equation.invars[0].aval.dtype, equation.params["new_dtype"])
        for equation in equations(jaxpr)
        if equation.primitive.name == "convert_element_type"
    ]
    return [
        (shape, source.name, target.name)
        for shape, source, target in found
        if source != target and {source.kind, target.kind} <= {"f", "V"}
    ]


def text(fun, *args, **kwargs) -> str:
    """Returns the jaxpr of `fun` as text, without the addresses of functions.

    JAX prints an inner jaxpr once if two equations hold the same object. Here each equation prints its own.
    The number of constants of a custom_jvp is left out: JAX itself loses it when it runs a jaxpr again.
    """
    return re.sub(r"0x[0-9a-f]+", "", "\n".join(_lines(jax.make_jaxpr(fun)(*args, **kwargs))))


def _lines(jaxpr) -> Iterator[str]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    numbers: dict = {}

    def names(variables) -> list[str]:
        return [
            str(var) if hasattr(var, "val") else f"{numbers.setdefault(var, len(numbers))}:{var.aval}"
            for var in variables
        ]

    yield f"inputs {names((*jaxpr.constvars, *jaxpr.invars))}"
    for equation in jaxpr.eqns:
        params = {
            name: getattr(value, "__name__", value)
            for name, value in equation.params.items()
            if name != "num_consts" and not any(_is_jaxpr(each) for each in _members(value))
        }
        yield f"{names(equation.outvars)} = {equation.primitive.name}{params} {names(equation.invars)}"
        for value in equation.params.values():
            for inner in filter(_is_jaxpr, _members(value)):
                yield from (f"    {line}" for line in _lines(inner))
    yield f"outputs {names(jaxpr.outvars)}"


_PASS_ON = {"add_any", "broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "dynamic_update_slice"}
_PASS_ON |= {"gather", "optimization_barrier", "pad", "reduce_precision", "reduce_sum", "reshape", "rev"}
_PASS_ON |= {"scatter-add", "select_n", "slice", "split", "squeeze", "stack", "transpose", "unstack"}


def rounded_sums(closed, in_float32=False) -> list[str]:
    """Returns the sums of cotangents in half whose terms were each rounded from float32.

    The cotangents of a value that several float32 operations read should be rounded once, after their sum.

    Args:
        closed: the jaxpr of a function that takes gradients.
        in_float32: whether sums in float32 count too, if one of their terms was rounded to half. In a program
            that uses its parameters in several places, such terms are gradients of several values.
    """
    found: list[str] = []
    _follow(closed, [False] * len(closed.jaxpr.invars), found, in_float32)
    return found


def _follow(jaxpr, given: list[bool], found: list[str], in_float32: bool) -> list[bool]:
    """Returns for each output of a jaxpr whether it was rounded from float32, if `given` inputs were."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    rounded = dict(zip(jaxpr.invars, given, strict=True))
    is_rounded = lambda var: not hasattr(var, "val") and rounded.get(var, False)
    for equation in jaxpr.eqns:
        name, out = equation.primitive.name, equation.outvars[0] if equation.outvars else None
        taken = list(map(is_rounded, equation.invars))
        results = [False] * len(equation.outvars)
        if traits_of(name).category is Category.CALL:
            for inner in inner_jaxprs(equation):
                inputs = [taken[index] for index in inner.operands]
                for _ in range(2):  # Once more, with what a loop carries.
                    given = _follow(inner.jaxpr, inputs, [], in_float32)
                    for index, is_carry, each in zip(inner.results, inner.carries, given):
                        if index is not None:
                            results[index] |= each
                            if is_carry and name == "scan":
                                inputs[inner.constants + index] |= each
                _follow(inner.jaxpr, inputs, found, in_float32)
        elif name == "convert_element_type":
            source = equation.invars[0].aval.dtype
            results = [(_is_half(out) and source == jnp.float32) or taken[0]]
        elif name in _PASS_ON:
            results = [any(taken) for _ in equation.outvars]
            if name == "add_any" and (all(taken) if _is_half(out) else in_float32 and any(taken)):
                found.append(f"{equation.source_info.name_stack}: {equation}")
        rounded.update(zip(equation.outvars, results))
    return list(map(is_rounded, jaxpr.outvars))


def _is_half(var) -> bool:
    return getattr(var.aval, "dtype", None) in (jnp.float16, jnp.bfloat16)


def live_products(closed) -> collections.Counter[tuple[str, ...]]:
    """Returns how many products of each kind a jaxpr runs: the primitive, and its dtypes.

    Operations whose results nothing reads do not count, as XLA does not run them.
    """
    found: collections.Counter[tuple[str, ...]] = collections.Counter()
    _count_products(closed, None, found)
    return found


def _count_products(jaxpr, is_read, found) -> list[bool]:
    """Counts the live products of a jaxpr, and returns for each input whether something live reads it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    is_var = lambda var: not hasattr(var, "val")
    flags = [True] * len(jaxpr.outvars) if is_read is None else is_read
    live = {var for var, flag in zip(jaxpr.outvars, flags) if flag and is_var(var)}
    for equation in reversed(jaxpr.eqns):
        read = [var in live for var in equation.outvars]
        if not any(read) and not equation.effects:
            continue
        name, inner_reads = equation.primitive.name, None
        if traits_of(name).category is Category.CALL:
            inner_reads = set()
            for inner in inner_jaxprs(equation):
                looped = any(inner.carries) or name == "scan"
                flags = [looped or index is None or read[index] for index in inner.results]
                inputs = _count_products(inner.jaxpr, flags, found)
                inner_reads |= {
                    index for index, each in zip(inner.operands, inner_inputs(inner, inputs)) if each
                }
                inner_reads |= {0} if name == "cond" else set()
        elif name in PRODUCTS and not sums_nothing(equation):
            dtypes = sorted(var.aval.dtype.name for var in equation.invars[:2])
            found[name, *dtypes, equation.outvars[0].aval.dtype.name] += 1
        live |= {
            var
            for index, var in enumerate(equation.invars)
            if is_var(var) and (inner_reads is None or index in inner_reads)
        }
    return [var in live for var in jaxpr.invars]


def inner_inputs(inner, reads):
    """A loop reads all that it carries."""
    return [read or role in (Role.CARRY,) for read, role in zip(reads, inner.roles)]

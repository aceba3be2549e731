"""Reads equations. With `scopes`, `lines` and `bind`, the files that know the versions of JAX.

All objects are public: `jax.extend.core`, `jax.extend.source_info_util`, and the parameters that
`jax.make_jaxpr` prints. Some fields of these objects are not documented, and a release of JAX may change
them:

- `equation.ctx.manager`, the settings under which an equation was traced;
- `source_info.traceback.frames`, the lines that led to an equation;
- `var.aval.inner_aval`, which only a mutable array has;
- `primitive.get_bind_params`, which turns the parameters of an equation into those of `bind`;
- the names that JAX itself writes into a name stack: `jvp(`, `transpose(` and `rematted_computation`;
- the names of the parameters of the operations that run jaxprs.

`scopes` reads the first and the fifth, `lines` the second, and this file the third and the fourth. `inner`
and `calls` know the parameters of each operation that runs jaxprs, and other files read single ones, such as
the `jaxpr` of a `jit`. Other parameters, such as `dimension_numbers`, are those of the functions in
`jax.lax`, which documents them. tests/jaxpr/test_read.py has a test for each field and each parameter: these
tests fail first when a new JAX changes one.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Primitive, jaxprs_in_params

# JAX's own classes differ between versions (a Jaxpr is a ClosedJaxpr since JAX 0.11:
# https://github.com/jax-ml/jax/pull/39009), and their annotations do not know the shape and dtype of a
# variable. So the aliases say what a value is, and a type checker sees Any.
Jaxpr: TypeAlias = Any
"""A jaxpr, open or closed."""
Equation: TypeAlias = Any
"""One equation of a jaxpr: a primitive, its operands, results and parameters."""
Var: TypeAlias = Any
"""A variable of a jaxpr, or a literal among the operands."""
Array: TypeAlias = Any
"""A `jax.Array`, a tracer, or a NumPy array or number."""


def equations(jaxpr: Jaxpr) -> Sequence[Equation]:
    """Returns the equations of a jaxpr, closed or open."""
    return jaxpr.eqns


def open_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """Returns the jaxpr within a closed one; an open one as it is."""
    # From JAX 0.11 on they are one class, whose field `jaxpr` is the jaxpr itself.
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Jaxpr) -> tuple[Array, ...]:
    """Returns the values of the constants of a jaxpr; none for an open one."""
    return tuple(getattr(jaxpr, "consts", ()))


def without_constants(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a closed jaxpr as an open one that takes its constants as its first inputs."""
    # A `remat2` takes no jaxpr with constants:
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/ad_checkpoint.py#L613.
    inside = open_jaxpr(jaxpr)
    return inside.replace(constvars=(), invars=[*inside.constvars, *inside.invars])


def with_equations(jaxpr: Jaxpr, equations: Sequence[Equation]) -> Jaxpr:
    inside = open_jaxpr(jaxpr).replace(eqns=list(equations))
    # An open jaxpr stays open. In a JAX before 0.11 a closed one is a pair of an open one and its constants.
    return jaxpr.replace(jaxpr=inside) if hasattr(jaxpr, "jaxpr") else inside


_FLOAT32 = np.dtype(np.float32)  # Dtypes are compared faster with it than with `jnp.float32`.


def is_float32(var: Var) -> bool:
    """Whether a variable or literal of a jaxpr holds float32, the one dtype that autocast changes."""
    # The tokens of effects have no dtype.
    return getattr(var.aval, "dtype", None) == _FLOAT32


def is_reference(var: Var) -> bool:
    """Whether a variable is a mutable array, as `jax.new_ref` makes them."""
    return hasattr(var.aval, "inner_aval")


def is_floating(var: Var) -> bool:
    """Whether a variable or literal holds floating-point or complex numbers, which have derivatives."""
    return jnp.issubdtype(getattr(var.aval, "dtype", np.bool_), jnp.inexact)


def floating_operands(equation: Equation) -> list[Var]:
    return list(filter(is_floating, equation.invars))


def describe(array: Array | Var | jax.ShapeDtypeStruct) -> str:
    """Returns the dtype and shape of anything that has them, such as `float16[8,128]`."""
    return f"{array.dtype.name}[{','.join(map(str, array.shape))}]"


def sources_of_outputs(jaxpr: Jaxpr) -> list[Any]:
    """Returns for each output what identifies its value."""

    # A jit gives each result a variable of its own, also where its jaxpr returns one value twice.
    def identity(var):
        return id(var) if is_literal(var) else var

    outvars = [identity(var) for var in open_jaxpr(jaxpr).outvars]
    within: dict[Any, Any] = {}
    for equation in equations(jaxpr):
        if equation.primitive.name == "jit" and not set(outvars).isdisjoint(equation.outvars):
            inner = sources_of_outputs(equation.params["jaxpr"])
            within.update((var, (id(equation), source)) for var, source in zip(equation.outvars, inner))
    return [within.get(var, var) for var in outvars]


def all_equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yields the equations of a jaxpr and those of all jaxprs inside it, each call before what it runs."""
    for equation in equations(jaxpr):
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from all_equations(inner)


def holds(jaxpr: Jaxpr, name: str) -> bool:
    return any(equation.primitive.name == name for equation in all_equations(jaxpr))


def holds_complex(jaxpr: Jaxpr) -> bool:
    """Whether an operation of a jaxpr, or of a jaxpr inside it, gives complex numbers."""
    results = (var.aval for equation in all_equations(jaxpr) for var in equation.outvars)
    return any(jnp.issubdtype(getattr(aval, "dtype", bool), jnp.complexfloating) for aval in results)


def is_literal(var: Var) -> bool:
    """Whether an operand is a constant written into the equation."""
    return type(var) is Literal


def name_of(equation: Equation) -> str:
    """Returns the name of an operation in the table: that of its primitive, or of the kind of operation."""
    name = equation.primitive.name
    # `x * x` leaves the range of float16 as `x ** 2` does, and `1 / x` as `x ** -1` does.
    if name == "mul" and equation.invars[0] is equation.invars[1] and not is_literal(equation.invars[0]):
        return "square"
    if name == "div" and is_literal(equation.invars[0]):
        return "reciprocal"
    return _kind_of_product(equation) if name == "dot_general" else name


def _kind_of_product(equation: Equation) -> str:
    """Returns the name in the table of a `dot_general`, by its axes that are longer than 1."""
    # A product sums over some axes, and each operand has some axes of its own. The gradients of a product
    # have the same three groups of axes in other places. With one group or none no Tensor Core runs it: it is
    # an inner product, or with no sum an element-wise product.
    contracted, batch = equation.params["dimension_numbers"]
    shapes = [var.aval.shape for var in equation.invars]
    summed = math.prod(shapes[0][axis] for axis in contracted[0])
    own = [
        math.prod(size for axis, size in enumerate(shape) if axis not in (*sums, *shares))
        for shape, sums, shares in zip(shapes, contracted, batch)
    ]
    # A symbolic size can be compared only with `==` and `!=`:
    # https://docs.jax.dev/en/latest/export/shape_poly.html.
    if sum(size != 1 for size in (summed, *own)) < 2:
        return "elementwise_product" if summed == 1 else "inner_product"
    return "outer_product" if summed == 1 else "dot_general"


def bind_params(primitive: Primitive, params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of an equation as `primitive.bind` takes them: functions in place of jaxprs."""
    # A `custom_jvp_call`, a `custom_vjp_call` and a `shard_map` take functions:
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/custom_derivatives.py#L425.
    return primitive.get_bind_params(params)

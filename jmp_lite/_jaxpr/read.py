"""Reads equations. With `bind`, this is the one file that knows the versions of JAX.

All objects are public: `jax.extend.core`, `jax.extend.source_info_util`, and the parameters that
`jax.make_jaxpr` prints. Some fields of these objects are not documented, and a release of JAX may change
them:

- `equation.ctx.manager`, the settings under which an equation was traced;
- `source_info.traceback.frames`, the lines that led to an equation;
- `var.aval.inner_aval`, which only a mutable array has;
- `primitive.get_bind_params`, which turns the parameters of an equation into those of `bind`;
- the names that JAX itself writes into a name stack: `jvp(`, `transpose(` and `rematted_computation`;
- the names of the parameters of the operations that run jaxprs.

Only this file reads the first five. `inner` and `calls` know the parameters of each operation that runs
jaxprs, and other files read single ones, such as the `jaxpr` of a `jit`. Other parameters, such as
`dimension_numbers`, are those of the functions in `jax.lax`, which documents them. tests/jaxpr/test_read.py
has a test for each field and each parameter: these tests fail first when a new JAX changes one.
"""

import contextlib
import functools
import inspect
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence, Set
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Literal, Primitive, jaxprs_in_params

from .._paths import RECOMPUTED, join, plain_scope
from .primitives import Category, traits_of

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

# Scopes that survive every transform of JAX (https://github.com/jax-ml/jax/pull/8395), and `jax.jit`. They
# tell autocast where it keeps out.
AUTOCAST_SCOPE = "jmp_lite.autocast"
FULL_PRECISION_SCOPE = "jmp_lite.full_precision"
SOLVER_SCOPE = "jmp_lite.solver"
FUSED_SCOPE = "jmp_lite.fused_attention"
# Such a name, with the numbers of flags, tells `compare_precision` the modules of an equation. The equations
# that JAX makes of its derivative have it as well.
_FLAGS = re.compile(r"/?jmp_lite\.flags((?:\.\d+)+)")


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


def scope_of(equation: Equation, around: str = "") -> str:
    """Returns the named scopes and Flax modules around an equation, joined by slashes.

    The names of transforms are left out: `transpose(jvp(decoder))/head` is `decoder/head`. So are those that
    JAX adds to what `jax.checkpoint` computes again: its scope is that of the forward pass.
    """
    scope = _scope_of_stack(equation.source_info.name_stack)
    if equation.primitive.name == "remat2" and is_differentiated(equation):
        # JAX writes its scope twice, `transpose(jvp(decoder))/jvp(decoder)`: that of the backward pass, in
        # which it is evaluated, and its own.
        names = scope.split("/")
        once = names[: len(names) // 2]
        scope = "/".join(once) if names == once * 2 else scope
    return join(around, scope) if scope else around


@functools.lru_cache(maxsize=4096)  # The operations of a layer share a few stacks.
def _scope_of_stack(name_stack: Any) -> str:
    return plain_scope(_FLAGS.sub("", str(name_stack)))


@functools.lru_cache(maxsize=4096)
def _is_in_stack(name: str, name_stack: Any) -> bool:
    return name in str(name_stack)


def is_by_autocast(equation: Equation) -> bool:
    """Whether an equation was made by a function that autocast returned."""
    return _is_in_stack(AUTOCAST_SCOPE, equation.source_info.name_stack)


@contextlib.contextmanager
def context_of(equation: Equation) -> Iterator[None]:
    """Gives operations that run inside it the scopes, source line, mesh and metadata of `equation`."""
    # As JAX's own `eval_jaxpr` does: https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/core.py#L791.
    source = equation.source_info
    stack = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=stack), equation.ctx.manager:
        yield


def flagged(equation: Equation, flags: Set[int]) -> Equation:
    """Returns an equation with the numbers of flags in its name stack, where every transform keeps them."""
    # A field of ours would be lost in the first `jax.grad`.
    source = equation.source_info
    return equation.replace(
        source_info=source.replace(name_stack=source.name_stack.extend(flag_scope(flags)))
    )


def flag_scope(flags: Set[int]) -> str:
    """Returns the name of the scope that gives the operations inside it the numbers of flags."""
    return ".".join(["jmp_lite.flags", *map(str, sorted(flags))])


def flags_of(equation: Equation) -> frozenset[int] | None:
    """Returns the numbers that `flagged` has written; None if it has written none."""
    return _flags_in_stack(equation.source_info.name_stack)


@functools.lru_cache(maxsize=4096)
def _flags_in_stack(name_stack: Any) -> frozenset[int] | None:
    found = _FLAGS.findall(str(name_stack))
    # The innermost flags are the last ones.
    return frozenset(map(int, found[-1][1:].split("."))) if found else None


def bind_params(primitive: Primitive, params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of an equation as `primitive.bind` takes them: functions in place of jaxprs."""
    # A `custom_jvp_call`, a `custom_vjp_call` and a `shard_map` take functions:
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/custom_derivatives.py#L425.
    return primitive.get_bind_params(params)


def is_transposed(equation: Equation) -> bool:
    """Whether JAX made an equation for a backward pass."""
    # Written at https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/interpreters/ad.py#L396.
    return _is_in_stack("transpose(", equation.source_info.name_stack)


def is_of_gradient(equation: Equation) -> bool:
    """Whether the program took a derivative of an equation, so that it has the backward pass too."""
    # Written at https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/interpreters/ad.py#L63 and #L306.
    return _is_in_stack("jvp(", equation.source_info.name_stack)


def is_recomputed(equation: Equation) -> bool:
    """Whether an equation of a backward pass computes a part of the forward pass again."""
    # Written at https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/ad_checkpoint.py#L809.
    return _is_in_stack(RECOMPUTED, equation.source_info.name_stack)


def is_differentiated(equation: Equation) -> bool:
    """Whether `jax.grad` has made a `remat2`, which computes a part of the forward pass again."""
    # Set at https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/ad_checkpoint.py#L674.
    return equation.params["differentiated"]


def call_scope(scope: str, equation: Equation) -> str:
    """Returns the scope inside a call: the name of a jitted function is a scope."""
    name = equation.params.get("name")
    return join(scope, name) if isinstance(name, str) else scope


def source_line(equation: Equation) -> str:
    """Returns the line that made an equation, as `file.py:12 (function)`.

    It may be one of ours, such as a cast of a policy.
    """
    # The matmuls under a policy are those of its layers.
    is_product = traits_of(equation.primitive.name).category is Category.ALLOW
    return users_line(equation) if is_product else source_info_util.summarize(equation.source_info)


def users_line(equation: Equation) -> str:
    """Returns the line of the user's program that made an equation, as `file.py:12 (function)`."""
    line = source_info_util.summarize(equation.source_info)
    if not line.startswith(_OURS):
        return line
    # A function of ours, such as a cast of a policy, that the user's program calls.
    frames = iter(equation.source_info.traceback.frames)
    while not next(frames).file_name.startswith(_OURS):
        pass
    return _first_line(frame for frame in frames if not frame.file_name.startswith((_OURS, _JAX))) or line


def calling_line(equation: Equation) -> str:
    """Returns the line outside of all packages that made an equation; empty if its own line is there."""
    line = source_line(equation)
    if not line.startswith(_OURS) and not any(name in line for name in _PACKAGES):
        return ""
    frames = equation.source_info.traceback.frames
    return _first_line(frame for frame in frames if not _is_of_package(frame.file_name))


def casting_line(equation: Equation) -> str:
    """Returns the line that calls a function of ours, such as a cast of a policy, that made an equation.

    Empty if no such function did, or if an adapter of ours called it for a model.
    """
    files = (frame.file_name for frame in equation.source_info.traceback.frames)
    inner = list(itertools.takewhile(lambda file: file.startswith((_OURS, _JAX)), files))
    is_ours = any(file.startswith(_OURS) for file in inner)
    is_adapter = any(f"{os.sep}_flax{os.sep}" in file for file in inner)
    return users_line(equation) if is_ours and not is_adapter else ""


def users_stacklevel() -> int:
    """Returns the `stacklevel` with which a warning of the caller names the line of the user's program."""
    # `skip_file_prefixes` of `warnings.warn` needs Python 3.12.
    files = [frame.filename for frame in inspect.stack(context=0)[1:]]
    return next((number for number, file in enumerate(files, 1) if not _is_of_package(file)), 1)


def _first_line(frames: Iterator[Any]) -> str:
    return next((f"{f.file_name}:{f.line_num} ({f.function_name})" for f in frames), "")


def _is_of_package(file: str) -> bool:
    return any(package in file for package in _PACKAGES) or file.startswith((_OURS, _JAX))


_PACKAGES = ("site-packages", "dist-packages")
_OURS, _JAX = (os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), inspect.getfile(jax)))

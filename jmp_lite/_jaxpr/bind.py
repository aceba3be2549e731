"""Runs equations again, on other operands."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, jaxprs_in_params

from .._tree import reuse_cast
from .precision import only_own_precisions
from .read import Array, Equation, bind_params, holds

# With this option jax.jit leaves no equation in the jaxpr around it
# (https://github.com/jax-ml/jax/pull/6584). Since JAX 0.12 `True` is something less.
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # pyright: ignore[reportAttributeAccessIssue]


def bind(equation: Equation, operands: Sequence[Array], **changed: Any) -> list[Array]:
    """Runs the primitive of `equation` on other operands, with some of its parameters changed."""
    primitive = equation.primitive
    params = equation.params | changed if changed else equation.params
    results = primitive.bind(*operands, **bind_params(primitive, dict(params)))
    return list(results) if primitive.multiple_results else [results]


def bind_repeated(equation: Equation, operands: Sequence[Array], **changed: Any) -> list[Array]:
    """Runs an operation that the program has several times, as `bind` does."""
    # Where a derivative is taken, it runs in an inlined `jax.jit`, as the functions of jnp do. JAX remembers
    # the derivative of a jitted function (https://github.com/jax-ml/jax/pull/9196). So it is differentiated
    # once; the jaxpr stays the same, and a deep model is traced in two thirds of the time. An operation that
    # occurs once is faster without.
    primitive = equation.primitive
    params = equation.params | changed if changed else equation.params
    if not (is_differentiated(operands) and _may_be_remembered(equation)):
        return bind(equation, operands, **changed)
    results = _inlined(primitive, tuple(params.items()))(*operands)
    return list(results) if primitive.multiple_results else [results]


def kind_of(equation: Equation) -> tuple[Any, ...]:
    """Returns a key that is the same for operations that look alike, such as those of equal layers."""
    # A hijax variable, such as that of a Flax `nnx.Variable`, has neither a shape nor a dtype.
    avals = [var.aval for var in equation.invars]
    return equation.primitive, *[(getattr(x, "shape", x), getattr(x, "dtype", None)) for x in avals]


def _may_be_remembered(equation: Equation) -> bool:
    """Whether an operation is one of `jax.lax`: equal parameters mean equal operations."""
    # JAX itself hashes them, for each call outside of `jit`. The parameters of other operations may be
    # functions, which a cache would keep alive, or 0.0 and -0.0, which are equal.
    own = getattr(lax, f"{equation.primitive.name}_p", None) is equation.primitive
    return own and not equation.effects and not any(True for _ in jaxprs_in_params(equation.params))


def is_differentiated(operands: Sequence[Array]) -> bool:
    """Whether a derivative, or another transform, may follow what happens to one of the operands."""
    # A tracer of `jax.jit` or `jax.make_jaxpr` only records. That of a transform is of another class.
    return any(isinstance(x, jax.Array) and not is_jaxpr_tracer(x) for x in operands)


def is_jaxpr_tracer(x: Array) -> bool:
    """Whether a value stands for an array of a jaxpr that is being traced."""
    return type(x) is _class_in_jaxprs()


@functools.cache
def _class_in_jaxprs() -> type:
    """Returns the class of the values that `jax.jit` and `jax.make_jaxpr` trace with."""
    # JAX has no public name for the class.
    classes: list[type] = []
    jax.make_jaxpr(lambda x: classes.append(type(x)))(np.float32(0))
    return classes[0]


@functools.lru_cache(maxsize=4096)
def _inlined(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    # JAX remembers derivatives by the function itself, so equal operations must give the same function.
    return jax.jit(_operation(primitive, params), inline=INLINE)


def _operation(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return functools.partial(primitive.bind, **bind_params(primitive, dict(params)))


def is_reverse_only(equation: Equation) -> bool:
    """Whether the rule of a `custom_jvp` differentiates a `custom_vjp`, which has no forward mode."""
    # JAX writes such a rule with the operation `custom_lin`
    # (https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/interpreters/ad.py#L683), whose backward rule
    # is not a jaxpr: autocast could not go inside. The rule is traced only if a `custom_vjp` is in the
    # function itself.
    (jaxpr,) = jaxprs_in_params(equation.params)
    if not holds(jaxpr, "custom_vjp_call"):
        return False

    def rule(*primals: Array) -> Any:
        floating = [jnp.issubdtype(x.dtype, jnp.inexact) for x in primals]
        dtypes = [x.dtype if moves else jax.dtypes.float0 for x, moves in zip(primals, floating)]
        # `jax.jvp` takes tangents of `float0` for integers: https://github.com/jax-ml/jax/pull/4039.
        zeros = [np.zeros(x.shape, dtype) for x, dtype in zip(primals, dtypes)]
        return jax.jvp(lambda *arrays: bind(equation, arrays), primals, tuple(zeros))

    with only_own_precisions():  # JAX keeps this trace of the rule, and autocast reads it again.
        traced = jax.make_jaxpr(rule)(*(var.aval for var in equation.invars))
    return holds(traced, "custom_lin")


def cast(x: Array, dtype: Any) -> Array:
    """Returns `x` in `dtype`. Where a derivative is taken, JAX remembers it, as in `bind_repeated`."""
    run = _inlined_cast if is_differentiated([x]) else lax.convert_element_type
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or mesh == jax.sharding.get_abstract_mesh():
        return run(x, dtype)
    # The value comes from the inside of `jax.sharding.auto_axes`, or goes there, where the axes of the mesh
    # have other types. JAX refuses an operation on a value of another mesh than that of the context, with the
    # error of https://github.com/jax-ml/jax/issues/33226.
    with jax.sharding.use_abstract_mesh(mesh):
        return run(x, dtype)


_inlined_cast = jax.jit(lax.convert_element_type, static_argnums=1, inline=INLINE)


@functools.partial(jax.jit, inline=INLINE)
def reuse(x: Array, cast: Array) -> Array:
    """Returns `reuse_cast(x, cast)`. JAX remembers its trace and its derivative, as in `bind`."""
    return reuse_cast(x, cast)


@functools.partial(jax.jit, inline=INLINE)
def widen(half: Array, path: Array) -> Array:
    """Returns `half` in float32, with a gradient that goes to `path`, the same value in float32."""
    # Nothing reads the value of `path`, so JAX and XLA drop what computes it. Only gradients go through it.
    # They stay float32 where the program moves `half`, or passes it to a call.
    return _widen(half, path)


@jax.custom_jvp
def _widen(half: Array, path: Array) -> Array:
    wide = lax.convert_element_type(half, path.dtype)
    # By default XLA leaves out a cast down and up again where both are in one kernel, on GPUs too
    # (https://github.com/openxla/xla/issues/41605). A reader there would read the value before its rounding,
    # and others the rounded value: a softmax would be normalized by other logits than the one that the label
    # selects. XLA never leaves out a `reduce_precision` (https://github.com/openxla/xla/pull/19038); JAX
    # protects the values that a `jax.checkpoint` saves in the same way
    # (https://github.com/jax-ml/jax/pull/22244).
    return round_to(wide, half.dtype)


@_widen.defjvp
def _widen_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    # The function within `_widen`: a policy of `jax.checkpoint` should see a cast.
    return _widen.fun(*primals), tangents[1]


def round_to(x: Array, half: Any) -> Array:
    """Returns a float32 array rounded to the digits of `half`."""
    # Keep the 8 exponent bits of float32: with fewer, XLA would flush subnormal numbers of float16 to zero.
    return lax.reduce_precision(x, 8, int(jnp.finfo(half).nmant))


@jax.custom_jvp
def bar_cotangent(x: Array) -> Array:
    """Returns `x`. Its cotangent passes an optimization barrier."""
    # The barriers of `jax.checkpoint` hold the cotangents that enter a function, and not those that leave it
    # (https://github.com/jax-ml/jax/pull/39520).
    return x


@bar_cotangent.defjvp
def _bar_cotangent_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return primals[0], lax.optimization_barrier(tangents[0])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_cotangent(x: Array, half: Any) -> Array:
    """Returns `x`, a float32 array, whose cotangent is rounded to `half`, so that XLA stores it in half."""
    del half
    return x


@round_cotangent.defjvp
def _round_cotangent_jvp(half: Any, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    # Without the barrier, XLA would leave out the cast down and up again, as in `_widen`.
    return primals[0], cast(lax.optimization_barrier(cast(tangents[0], half)), jnp.float32)


def recomputed(fun: Callable[..., Array]) -> Callable[..., Array]:
    """Returns `fun` with a derivative that computes it again, with barriers on the first argument."""
    # Each array has a barrier of its own: JAX cannot transpose one barrier around several tangents if the
    # function is not differentiated with respect to all of them. (From
    # https://github.com/jax-ml/jax/pull/39429 on, a barrier leaves symbolic zeros alone.)
    bar = functools.partial(jax.tree.map, lax.optimization_barrier)

    @jax.custom_jvp
    def run(*arguments: Any) -> Array:
        return fun(*arguments)

    @run.defjvp
    def run_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Any]:
        # The barrier on the values keeps XLA from merging what `jax.checkpoint` recomputes with the forward
        # pass (https://github.com/jax-ml/jax/issues/13999). That on the tangents, whose transpose is one on
        # the cotangents (https://github.com/jax-ml/jax/pull/27174), keeps XLA from storing them in float32.
        def bar_first(arguments):
            return (bar(arguments[0]), *arguments[1:])

        return fun(*primals), jax.jvp(fun, bar_first(primals), bar_first(tangents))[1]

    del run_jvp
    return run

"""Rules of custom derivatives that make half values by themselves, whatever their function computes in."""

from typing import Any

import jax
import jax.numpy as jnp

from ..._jaxpr import Array, Equation, all_equations, bind, inner_jaxprs, open_jaxpr
from .reference import is_narrow
from .sites import line_of


def casts_in_rule(equation: Equation) -> bool:
    """Whether the user's rule of a custom derivative casts to half where its function does not."""
    if equation.primitive.name not in ("custom_jvp_call", "custom_vjp_call"):
        return False
    function = open_jaxpr(inner_jaxprs(equation)[0].jaxpr)
    # Those of JAX follow the dtypes of the operands: "relu at /site-packages/jax/_src/nn/functions.py:60".
    is_of_library = "site-packages" in str(function.debug_info.func_src_info)
    if is_of_library or any(map(is_narrow, equation.invars)):
        return False

    def floating(*arrays: Array) -> list[Array]:
        return [result for result in bind(equation, arrays) if jnp.issubdtype(result.dtype, jnp.inexact)]

    def derivative(*arrays: Array) -> Any:
        results, pullback = jax.vjp(floating, *arrays)
        return pullback(list(map(jnp.ones_like, results)))

    traced = jax.make_jaxpr(derivative)(*(var.aval for var in equation.invars))
    # JAX gives the operations of a backward rule the line of the call.
    own = set(map(line_of, all_equations(function)))
    return any(_casts(each) and line_of(each) not in own for each in all_equations(traced))


def _casts(equation: Equation) -> bool:
    is_cast = equation.primitive.name == "convert_element_type"
    return is_cast and is_narrow(equation.outvars[0]) and not is_narrow(equation.invars[0])

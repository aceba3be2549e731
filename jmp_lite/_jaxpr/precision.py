"""The precision of products: that for which a program asks, and that of `jax_default_matmul_precision`."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .primitives import Category, traits_of
from .read import Equation, equations, with_equations


def precisions(equation: Equation) -> frozenset[str]:
    """Returns the names of the precisions that a product has for its operands; none for the default."""
    # One for both operands or a pair, of `lax.Precision`s or presets of `lax.DotAlgorithmPreset`. A
    # `lax.DotAlgorithm` has no name.
    precision = equation.params.get("precision")
    both = precision if isinstance(precision, tuple) else (precision,)
    return frozenset(str(getattr(value, "name", value)) for value in both) - {"DEFAULT", "None"}


def only_own_precisions() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which JAX traces products without `jax_default_matmul_precision`.

    An option that the program itself sets, around a part of it, still holds there.
    """
    # JAX writes the option into each product without a precision while it traces the product
    # (https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/lax/lax.py#L9559). A product that asks for the
    # same precision then looks the same. So autocast traces a program without the option: each precision in
    # the jaxpr is one for which the program asks. The products that stay in float32 get that of the option
    # when they run (`passes.precision`).
    return jax.default_matmul_precision(None)


def configured_precision() -> Any:
    """Returns the parameter `precision` that a product has here if the program asks for none, or None."""
    if jax.config.jax_default_matmul_precision is None:  # type: ignore[attr-defined]
        return None
    # The option is a string with synonyms, such as "float32" for "highest". JAX reads it.
    x = jax.ShapeDtypeStruct((1,), jnp.float32)
    return jax.make_jaxpr(lax.dot)(x, x).eqns[-1].params["precision"]


def params_with_precision(equation: Equation, precision: Any) -> dict[str, Any]:
    """Returns the parameters of an equation that change if each product without a precision gets one."""

    # Of another operation than a product, the jaxprs inside, such as that of a Pallas kernel.
    def changed(value: Any) -> Any:
        if not hasattr(value, "eqns"):
            return value
        found = [params_with_precision(each, precision) for each in equations(value)]
        if not any(found):  # The jaxpr itself, so that JAX finds what it remembers of it.
            return value
        replaced = zip(equations(value), found)
        return with_equations(value, [each.replace(params=each.params | params) for each, params in replaced])

    params = equation.params
    if traits_of(equation.primitive.name).category is Category.ALLOW:
        return {"precision": precision} if params.get("precision", precision) is None else {}
    return {name: new for name, old in params.items() if (new := changed(old)) is not old}

"""What a jaxpr says of dtypes: the products in it, and the values that are kept for the backward pass."""

from collections.abc import Iterator

import jax

PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"}


def equations(jaxpr) -> Iterator:
    """Yields the equations of `jaxpr` and of every jaxpr inside it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                if hasattr(inner, "eqns") or hasattr(getattr(inner, "jaxpr", None), "eqns"):
                    yield from equations(inner)


def products(fun, *args, **kwargs) -> list[tuple[str, ...]]:
    """Returns the operand dtypes of every matrix product and convolution that `fun` runs."""
    jaxpr = jax.make_jaxpr(fun)(*args, **kwargs)
    return [
        tuple(var.aval.dtype.name for var in equation.invars[:2])
        for equation in equations(jaxpr)
        if equation.primitive.name in PRODUCTS
    ]

"""What the Linen and the NNX wrapper share: which module does what, and attributes set for a call.

A Flax layer has a `dtype` attribute and casts its own parameters where it uses them; a policy sets
that attribute. A module that users write may own parameters and know nothing of dtypes; a policy
hands it parameters that are cast already. In both the cast stands where the parameter is used, inside
a scan if the use is inside, so that the gradients of many uses are summed in float32.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._paths import join
from .._policy import Policy
from .._tree import cast_leaf, reuse_cast

_MISSING: Any = object()


@contextlib.contextmanager
def attributes(module: Any, changes: dict[str, Any]) -> Iterator[None]:
    """Sets attributes of `module` for the length of a call.

    They go into its `__dict__`, past the checks with which Flax keeps users from assigning to a
    module that is frozen or from another trace: what is set here is gone before anyone sees it.
    """
    values = vars(module)
    before = {name: values.get(name, _MISSING) for name in changes}
    values.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if values.get(name, _MISSING) is not changes[name]:
                continue  # The call itself set it anew.
            if value is _MISSING:
                del values[name]
            else:
                values[name] = value


def is_layer(module: Any, base: type) -> bool:
    """Whether the class of `module` is Flax's own, so that it casts its own parameters."""
    classes = type(module).__mro__[: type(module).__mro__.index(base)]
    return all(cls.__module__.startswith("flax.") for cls in classes)


def has_compute_dtype(module: Any) -> bool:
    """Whether `module` has a `dtype` attribute that is a floating dtype or left open."""
    dtype = getattr(module, "dtype", _MISSING)
    if dtype is None:
        return True
    try:
        return dtype is not _MISSING and jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        return False


def look_up(read: Callable[[np.dtype], jax.Array], policy: Policy) -> jax.Array:
    """Reads rows of an embedding table in half, with gradients that are summed in float32, or wider.

    The gradient of a lookup adds up the gradients of all uses of a row. In half precision the sum stops
    growing: 256 + 1 is 256 in bfloat16. So it takes the way of a lookup in float32, of which nothing else is
    left in the program: where the table is split over devices, it is gathered in half.

    Args:
        read: does the lookup in the dtype given.
        policy: that of the layer.
    """
    dtype = policy.compute_dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    rows = read(wide)
    return rows if dtype == wide else reuse_cast(rows, read(dtype))


def add_bias(output: jax.Array, bias: Any) -> jax.Array:
    """Adds a float32 bias to the half precision output of a layer; the last dimensions are the bias's.

    Broadcast first and cast then: so the gradient of the bias is cast first and summed then, in
    float32. The layers of Flax cast first, and their gradients are sums of half precision numbers:
    XLA for the CPU adds 40,960 ones to 4,096 in float16.
    """
    return output + jnp.broadcast_to(bias, output.shape).astype(output.dtype)


def cast_cell_output(output: Any, carry: Any, policy: Policy) -> Any:
    """Casts what a recurrent cell returns: `(carry, y)`.

    The carry keeps the dtypes that it came with, as a scan demands: float32, so that a long memory
    is not rounded at every step. What goes on to other layers has the compute dtype.
    """
    new_carry, y = output
    new_carry = jax.tree.map(lambda new, old: cast_leaf(new, jnp.result_type(old)), new_carry, carry)
    return new_carry, jax.tree.map(lambda leaf: cast_leaf(leaf, policy.compute_dtype), y)


def cast_inputs(cast: Any, is_cell: bool, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Casts the arguments of a model, but for a recurrent carry, which keeps its dtype."""
    carry, args = (args[:1], args[1:]) if is_cell else ((), args)
    kept = {name: value for name, value in kwargs.items() if name in ("carry", "initial_carry")}
    return (*carry, *cast(tuple(args))), {**cast(kwargs), **kept}


def cast_outputs(cast: Any, is_cell: bool, output: Any) -> Any:
    """Casts what a model returns, but for the carry of a cell."""
    return (output[0], cast(output[1])) if is_cell else cast(output)


def check_layer_rules(policy: Policy, path: str, parameters: list[str], module: Any) -> None:
    """Raises a ValueError if a rule names one parameter of a layer that computes in one dtype."""
    wanted = policy.at(path).compute_dtype
    for name in parameters:
        dtype = policy.at(join(path, name)).compute_dtype
        if dtype != wanted:
            raise ValueError(
                f"A rule gives '{path}/{name}' the compute dtype {dtype.name}, but its layer, a "
                f"{type(module).__name__}, computes in one dtype, {wanted.name}. Let the rule name the "
                f"layer, '{path}'."
            )

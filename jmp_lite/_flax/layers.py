"""The kinds of modules, and attributes that are set for the length of a call.

A Flax layer has a `dtype` attribute and casts its own parameters where it uses them: a policy sets this
attribute. A module that a user wrote may have parameters and no `dtype`: a policy gives it cast parameters.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._dtypes import FLOAT8_ADVICE
from .._paths import join
from .._policy import Policy

_MISSING: Any = object()


@dataclasses.dataclass(frozen=True)
class Library:
    """The classes of Linen, or of NNX, for which a policy does more than set a dtype."""

    module: type  # The base class of all modules.
    embedding: type  # The layer that looks up the rows of a table.
    cell: type  # The base class of recurrent cells.
    products: tuple[type, ...]  # The layers that multiply by a weight with their `dot_general` attribute.
    biased: tuple[type, ...]  # The layers that add a bias to the last dimensions of their output.
    rewriters: tuple[type, ...]  # They change the parameters of another layer, which then casts them.
    # Of a layer of `biased`; None without one or with a batch axis.
    read_bias: Callable[[Any], jax.Array | None]
    no_bias: Mapping[str, Any]  # The attributes with which a layer of `biased` adds no bias.


def is_layer(library: Library, module: Any) -> bool:
    """Whether the class of `module` is one of Flax, which casts its own parameters."""
    # A subclass of a layer that a user wrote may use its parameters without a cast.
    classes = type(module).__mro__[: type(module).__mro__.index(library.module)]
    return all(cls.__module__.startswith("flax.") for cls in classes)


def is_cell_call(library: Library, module: Any, method: str) -> bool:
    """Whether the call is a step of a recurrent cell, from a carry to `(carry, output)`."""
    return isinstance(module, library.cell) and method == "__call__"


def takes_dtype(library: Library, module: Any) -> bool:
    """Whether a policy sets the `dtype` attribute of `module`, because it is a floating dtype or None."""
    dtype = getattr(module, "dtype", _MISSING)
    if dtype is _MISSING or isinstance(module, library.rewriters):
        return False
    try:
        return dtype is None or jnp.issubdtype(dtype, jnp.floating)
    except TypeError:  # The `dtype` of a user's module may be anything.
        return False


def check_arguments(function: str, base: str, library: Library, module: Any, policy: Any) -> None:
    """Raises an error if a `with_policy` was given no module of `base`, or no policy that it can run."""
    if not isinstance(module, library.module):
        raise TypeError(f"{function} takes a {base}. Got {type(module).__name__}.")
    if not isinstance(policy, Policy):
        raise TypeError(f"{function} takes a jmp.Policy. Got {policy!r}. See jmp.get_policy.")
    for dtype in (policy.compute_dtype, *(rule.policy.compute_dtype for rule in policy.rules)):
        if np.dtype(dtype).itemsize == 1:
            raise ValueError(
                f"{function}: the policy computes in {np.dtype(dtype).name}, and fp8 needs a scale for each "
                f"tensor. {FLOAT8_ADVICE}"
            )


def check_layer_rules(policy: Policy, path: str, parameters: list[str], module: Any) -> None:
    """Raises a ValueError if a rule names one parameter of a layer that computes in one dtype."""
    wanted = np.dtype(policy.at(path).compute_dtype)
    for name in parameters:
        dtype = np.dtype(policy.at(join(path, name)).compute_dtype)
        if dtype != wanted:
            raise ValueError(
                f"A rule gives '{path}/{name}' the compute dtype {dtype.name}, but its layer, a "
                f"{type(module).__name__}, computes in one dtype, {wanted.name}. Let the rule name the "
                f"layer, '{path}'."
            )


@contextlib.contextmanager
def attributes(module: Any, changes: dict[str, Any]) -> Iterator[None]:
    """Sets attributes of a module, or of its scope, for the length of a call, in its `__dict__`."""
    # Assigning them would raise an error of Flax, because the module is frozen
    # (https://github.com/google/flax/blob/v0.12.8/flax/linen/module.py#L1287) or from another trace
    # (https://github.com/google/flax/blob/v0.12.8/flax/nnx/pytreelib.py#L653).
    values = vars(module)
    before = {name: values.get(name, _MISSING) for name in changes}
    values.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if values.get(name, _MISSING) is not changes[name]:
                continue  # The call has assigned a value of its own.
            if value is _MISSING:
                del values[name]
            else:
                values[name] = value

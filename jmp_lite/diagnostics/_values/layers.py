"""Runs layers of Flax with float32 as their `dtype`, as if the model said so."""

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from .edited import UnknownFunctionError

_FLOAT32 = np.dtype(np.float32)


@contextlib.contextmanager
def in_float32(paths: Collection[str], arguments: Mapping[str, Any]) -> Iterator[None]:
    """Runs the layers at some paths, and those inside of them, with `dtype=jnp.float32`.

    The path of a Linen layer is its scope, as `Net/encoder/Dense_0`; that of an NNX layer begins with the
    name of the argument that holds it.

    Raises:
        UnknownFunctionError: no layer with a dtype is found at one of the paths, or it did not run.
    """
    found = set[str]()
    with contextlib.ExitStack() as stack:
        for path in paths:
            for layer in _layers_at(path, arguments):
                stack.enter_context(_changed(layer))
                found.add(path)
        linen = sys.modules.get("flax.linen")
        if linen is not None:
            stack.enter_context(linen.intercept_methods(_interceptor(paths, found)))
        try:
            yield
        finally:
            # Also where JAX refuses the program: it may be one in which the other edits alone were made.
            if missing := set(paths) - found:
                raise UnknownFunctionError(f"No layer with a dtype ran in {', '.join(sorted(missing))}.")


def _interceptor(paths: Collection[str], found: set[str]) -> Callable[..., Any]:
    """Returns what runs the methods of Linen modules. Those paths that it changes are added to `found`."""
    names = list[str]()

    def run(method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        # As Linen names the scope of a method:
        # https://github.com/google/flax/blob/v0.12.0/flax/linen/module.py#L134.
        name, module = context.method_name, context.module
        suffix = "" if name == "__call__" else f".{name}"
        names.append(f"{module.name or type(module).__name__}{suffix}")
        own = {path for path in paths if f"{'/'.join(names)}/".startswith(f"{path}/")}
        try:
            if not own or not hasattr(module, "dtype"):
                return method(*args, **kwargs)
            found.update(own)
            with _changed(module):
                return method(*args, **kwargs)
        finally:
            names.pop()

    return run


def _layers_at(path: str, arguments: Mapping[str, Any]) -> list[Any]:
    """Returns the NNX layers with a dtype at a path, and inside of it."""
    name, *keys = path.split("/")
    each: Any = arguments.get(name)
    nnx = sys.modules.get("flax.nnx")
    for key in keys:
        is_index = hasattr(each, "__getitem__") and key.isdigit()
        each = dict(enumerate(each)).get(int(key)) if is_index else getattr(each, key, None)
    if nnx is None or not isinstance(each, nnx.Module):
        return []
    return [layer for _, layer in nnx.iter_modules(each) if hasattr(layer, "dtype")]


@contextlib.contextmanager
def _changed(layer: Any) -> Iterator[None]:
    old = layer.dtype
    object.__setattr__(layer, "dtype", _FLOAT32)  # A Linen module is frozen.
    try:
        yield
    finally:
        object.__setattr__(layer, "dtype", old)

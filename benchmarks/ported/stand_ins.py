"""Stand-ins for modules that a program imports and a tiny run does not need, and for old names of JAX."""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class Anything:
    """A value that can be called and read, and is then another `Anything`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes any arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> "Anything":
        return Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Anything,), {}) if name[:1].isupper() else Anything()


class StandIn(types.ModuleType):
    """A module in which every name is defined: a class if it begins with a capital."""

    def __getattr__(self, name: str) -> Any:
        return getattr(Anything(), name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for the modules with these names, and for the modules inside of them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        """A stand-in has no code."""


def stand_in(*names: str) -> None:
    """Makes stand-ins for modules, also where they are installed."""
    sys.meta_path.insert(0, Finder(names))


def restore_jax_names() -> None:
    """Gives JAX the names that it has removed, for programs of 2023 and 2024."""
    import jax
    import jax.interpreters.xla
    import jax.numpy as jnp
    from jax import core

    clip = jnp.clip

    def clip_with_old_names(x: Any, *args: Any, a_min: Any = None, a_max: Any = None, **kwargs: Any) -> Any:
        if a_min is not None or a_max is not None:
            kwargs |= {"min": a_min, "max": a_max}
        return clip(x, *args, **kwargs)

    setattr(jnp, "clip", clip_with_old_names)  # noqa: B010
    setattr(jax, "tree_map", jax.tree.map)  # noqa: B010
    setattr(jax.interpreters.xla, "pytype_aval_mappings", core.pytype_aval_mappings)  # noqa: B010

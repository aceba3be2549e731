"""Flax Linen: `with_policy` runs a module under a policy, with the same parameter tree."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

try:
    import flax.linen as nn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("jmp_lite.linen needs Flax: pip install flax.") from error

from .._dtypes import DTypeLike, parse_reduce_dtype
from .._paths import join
from .._policy import Policy
from .._tree import cast_floating
from . import layers
from .calls import Args, Kwargs, Precision, run_call, run_model


def _read_bias(module: Any) -> jax.Array | None:
    batched = getattr(module, "batch_dims", ()) not in ((), [])  # 0 is an axis.
    return nn.unbox(module.get_variable("params", "bias")) if module.use_bias and not batched else None


_LINEN = layers.Library(
    module=nn.Module,
    embedding=nn.Embed,
    cell=nn.RNNCellBase,
    products=(nn.Dense, nn.DenseGeneral),
    biased=(nn.Dense, nn.DenseGeneral, nn.Conv, nn.ConvLocal, nn.ConvTranspose),
    rewriters=(nn.WeightNorm, nn.SpectralNorm),
    read_bias=_read_bias,
    no_bias={"use_bias": False},
)
# Methods that only pass calls on: the outer function of a lifted transform, and the lookup of an attribute.
_CASTS_NOTHING = ("<lambda>", "__getattr__")


def with_policy(module: nn.Module, policy: Policy, *, reduce_dtype: DTypeLike | None = None) -> WithPolicy:
    """Returns `module` under a policy.

    The layers of the model compute in the compute dtype, and its outputs are cast to the output dtype. Inputs
    keep their dtype until a layer casts them, as with Flax's own `dtype`. Each parameter is cast where it is
    used. Parameters keep their paths, so checkpoints of the plain module fit. `init` returns parameters in
    the parameter dtype.

    Normalization layers compute their statistics in float32. Batch statistics, other collections, and the
    carries of loops keep their dtype. Gradients of biases and embeddings are summed in float32.

    Args:
        module: any Linen module. It is not changed. The policy overrides the `dtype` that a layer was given:
            to keep a layer in float32, write a rule.
        policy: its rules name modules, or single parameters of modules that you wrote. The rule `head` covers
            everything in `head`.
        reduce_dtype: the dtype in which devices sum the weight gradients of `Dense` and `DenseGeneral`:
            float32, or None for the compute dtype, which moves half the bytes. With float32 these layers have
            no forward-mode derivative (`jax.jvp`), and the rows of an embedding that indices without a batch
            look up, such as positions, are float32.

    Returns:
        A module with the parameter tree of `module`. Call its methods by name, as in
        `apply(variables, x, method="encode")`: a function given as `method` does not run under the policy.
        Attributes can be read, except for submodules.

    Raises:
        TypeError: `module` is not a Linen module, or `policy` is not a policy.
        ValueError: `reduce_dtype` is another dtype; the model is under a policy already; or, when the model
            is called, a rule matches no parameter (the message names the nearest paths), or names a single
            parameter of a layer of Flax.

    Examples:
        >>> policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
        >>> model = jmp_lite.linen.with_policy(nn.Dense(3), policy)
        >>> variables = model.init(jax.random.key(0), jnp.ones((1, 2)))
        >>> variables["params"]["kernel"].dtype, model.apply(variables, jnp.ones((1, 2))).dtype
        (dtype('float32'), dtype('float32'))
    """
    layers.check_arguments("linen.with_policy", "flax.linen.Module", _LINEN, module, policy)
    if isinstance(module, WithPolicy):
        raise ValueError("The model is under a policy already. Give the plain model to linen.with_policy.")
    return WithPolicy(_Plain(module), policy, parse_reduce_dtype(reduce_dtype))


@dataclasses.dataclass(frozen=True)
class _Plain:
    """Holds the plain module."""

    # Linen would give a module that is itself a field of another one a path as a child.
    module: nn.Module


class WithPolicy(nn.Module):
    """A module under a policy; see `with_policy`.

    Attributes:
        plain: the plain module.
        policy: the policy.
        reduce_dtype: the dtype in which devices sum weight gradients; None for the compute dtype.

    Examples:
        >>> model = jmp_lite.linen.with_policy(nn.Dense(3), jmp.get_policy("mixed_bfloat16"))
        >>> model.policy, model.features
        (get_policy('p=full,c=bf16,o=full'), 3)
    """

    plain: _Plain
    policy: Policy
    reduce_dtype: np.dtype | None = None

    def setup(self) -> None:
        # A module from a compact method is bound already, under its own name. Any other module takes the
        # scope of this one, so that its parameters keep the paths that they have without a policy.
        module = self.plain.module
        bound = module if module.scope is not None else module.clone(parent=self.scope)
        object.__setattr__(self, "_bound", bound)

    # `nowrap` hides the methods of this class from Linen, which would list one call as two, of this module
    # and of the plain one, and would take this module for the parent of others:
    # https://github.com/google/flax/blob/v0.12.8/flax/linen/module.py#L505.
    @nn.nowrap
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("__call__", args, kwargs)

    @nn.nowrap
    def clone(
        self, *, parent: Any = None, _deep_clone: Any = False, _reset_names: bool = False, **updates: Any
    ) -> WithPolicy:
        """Returns a clone, as `nn.Module.clone`. `updates` may name fields of the plain module too."""
        own = {field.name for field in dataclasses.fields(self)}
        changes = {name: updates.pop(name) for name in [*updates] if name not in own}
        module = self.plain.module
        if module.scope is not None and "name" in updates:  # The plain module is bound under its own name.
            changes |= {"parent": parent, "name": updates["name"]}
            updates["name"] = None
        if changes:
            updates["plain"] = _Plain(module.clone(**changes))
        return super().clone(parent=parent, _deep_clone=_deep_clone, _reset_names=_reset_names, **updates)

    @nn.nowrap
    def __getattr__(self, name: str) -> Any:
        """Returns a method of the plain module, run under the policy, or an attribute of it."""
        plain = vars(self).get("plain")
        # Without `plain`, the object is being built or copied. `_bound` is missing until `setup` has run.
        if plain is None or name.startswith("__") or name == "_bound":
            return super().__getattr__(name)
        cls = type(plain.module)
        # `getattr_static` does not call a property.
        member: Any = None if name in vars(plain.module) else inspect.getattr_static(cls, name, None)
        if isinstance(member, types.FunctionType):
            return types.MethodType(functools.partial(_call_method, name), self)
        if self.scope is None and hasattr(member, "__get__"):  # A property, which may call `self.init`.
            return member.__get__(self, cls)
        value = getattr(plain.module if self.scope is None else self._bound, name)
        if any(isinstance(leaf, nn.Module) for leaf in jax.tree.leaves(value)):
            raise ValueError(
                f"'{name}' holds submodules, which would run outside the policy. Write a method of the "
                "model that uses them and call it by its name, as in apply(..., method='encode'); a "
                "function or an unbound method does not go through with_policy."
            )
        return value

    @nn.nowrap
    def _run(self, method: str, args: Args, kwargs: Kwargs) -> Any:
        """Calls a method of the plain module; every call inside it goes through `_intercept`."""
        module: nn.Module = self._bound

        def run(precision: Precision) -> Any:
            module: nn.Module = self._bound
            if not module.is_initializing():
                self.policy.check_rules(module.variables.get("params", {}))
            # The scopes of submodules inherit the flags. `nn.jit` traces a module again if they differ
            # (https://github.com/google/flax/blob/v0.12.8/flax/linen/transforms.py#L516), and knows nothing
            # else of the policy.
            scope: Any = module.scope
            flags = {**scope.flags, "jmp_lite.precision": repr(precision)}
            intercept = functools.partial(_intercept, precision, len(module.path))
            with layers.attributes(scope, {"flags": flags}), nn.intercept_methods(intercept):
                output = getattr(module, method)(*args, **kwargs)
            # Flax has made the parameters in float32, or in the `param_dtype` of a layer.
            if module.is_initializing():
                params = self.policy.cast_to_param(module.variables.get("params", {}))
                for name, value in params.items():
                    module.put_variable("params", name, value)
            return output

        scope: Any = module.scope
        # What a run that fails has changed: variables of mutable collections, and how many keys were drawn.
        before, counters = _copy_dicts(module.variables), _copy_dicts(scope.rng_counters)

        def restore() -> None:
            scope: Any = self._bound.scope
            variables: Any = module.variables
            for name, values in variables.items():
                if scope.is_mutable_collection(name):
                    # In place: the scopes of other modules hold the same dictionary.
                    values.clear()
                    values.update(before.get(name, {}))
            scope.rng_counters.clear()
            scope.rng_counters.update(counters)
            # A new module, because the submodules of this one have counted random keys too.
            object.__setattr__(self, "_bound", module.clone(parent=scope.rewound()))

        is_cell = layers.is_cell_call(_LINEN, module, method)
        return run_model(run, restore, Precision(self.policy, self.reduce_dtype), cast_floating, is_cell)


def _copy_dicts(tree: Any) -> dict[Any, Any]:
    """Copies nested dictionaries, whose keys `jax.tree.map` might not be able to sort."""
    return {name: _copy_dicts(value) if isinstance(value, dict) else value for name, value in tree.items()}


def _call_method(name: str, model: WithPolicy, *args: Any, **kwargs: Any) -> Any:
    if model.scope is None:  # Outside of `init` and `apply`: the method may call `self.init` or `self.apply`.
        return getattr(type(model.plain.module), name)(model, *args, **kwargs)
    return model._run(name, args, kwargs)


def _intercept(
    precision: Precision,
    depth: int,
    call: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    context: nn.module.InterceptorContext,
) -> Any:
    """Calls one method of one module inside of a model, whose own path has `depth` names."""
    module, policy = context.module, precision.policy
    if context.method_name in _CASTS_NOTHING or isinstance(module, WithPolicy):
        return call(*args, **kwargs)
    path, changes = "/".join(module.path[depth:]), dict[str, Any]()
    if layers.takes_dtype(_LINEN, module):
        changes["dtype"] = np.dtype(policy.at(path).compute_dtype)
    if not layers.is_layer(_LINEN, module):
        changes["param"] = functools.partial(_cast_param, module, path, precision)
    elif policy.rules and changes:
        own = [name for name, value in module.variables.get("params", {}).items() if hasattr(value, "dtype")]
        layers.check_layer_rules(policy, path, own, module)
    return run_call(_LINEN, module, context.method_name, path, precision, changes, call, args, kwargs)


def _cast_param(
    module: nn.Module, path: str, precision: Precision, name: str, *args: Any, **kwargs: Any
) -> Any:
    """Runs `module.param` and casts what it returns. The stored parameter stays as it is."""
    # The method of the class: the attribute `param` of the module is this function, for the length of the
    # call.
    value = type(module).param(module, name, *args, **kwargs)
    return precision.cast_param(value, join(path, name))

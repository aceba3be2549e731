"""Flax Linen: `with_policy` runs a module under a policy, the module and its parameters unchanged.

Importing this module also teaches `flax.serialization` the states of jmp_lite, so that
`to_bytes(train_state)` and Flax's own checkpoints hold the loss scale.
"""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import serialization

from ._dtypes import DTypeLike
from ._flax import layers
from ._flax.products import parse_reduce_dtype, wide_gradients
from ._paths import join
from ._policy import Policy
from ._scaling.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from ._scaling.state import SkipNonfiniteState
from ._tree import cast_floating, replace_leaves

# The outer half of a lifted transform, whose inner module comes next; and what looks an attribute up.
_CASTS_NOTHING = ("<lambda>", "__getattr__")
# Modules that rewrite the parameters of a layer: they must see them unrounded. The layer casts.
_REWRITES_PARAMS = (nn.WeightNorm, nn.SpectralNorm)
_PRODUCTS = (nn.Dense, nn.DenseGeneral)
_BIASED = (nn.Dense, nn.DenseGeneral, nn.Conv, nn.ConvLocal, nn.ConvTranspose)


def with_policy(module: nn.Module, policy: Policy, *, reduce_dtype: DTypeLike | None = None) -> "WithPolicy":
    """Returns `module` under a policy.

    The inputs and the parameters are cast to the compute dtype, each parameter where it is used; the
    outputs to the output dtype. Parameters keep their paths, so checkpoints of the plain module fit,
    and `init` gives them in the parameter dtype. Normalisation statistics are computed in float32,
    batch statistics and other collections keep their dtype, and so does a recurrent carry. Gradients of
    biases and of embeddings, which are sums, are summed in float32.

    Args:
        module: any Linen module; it is not changed. The policy wins over a `dtype` that a layer was
            given: to keep a layer in float32, write a rule.
        policy: its rules name modules, or single parameters of modules that users write. `head`
            covers all that lies in `head`.
        reduce_dtype: in what the gradients of the weights of `Dense` and `DenseGeneral` leave their
            products, to be summed over devices: float32, or None for the compute dtype, of half the
            bytes. Float32 has no forward-mode derivative (`jax.jvp`).

    Returns:
        A module with the parameter tree of `module`. Its methods and attributes can be reached, as in
        `apply(variables, x, method="encode")`: by name, since a function goes past the policy.

    Raises:
        TypeError: `module` is no Linen module, or `policy` no policy.
        ValueError: `reduce_dtype` is another dtype; when called, a rule matches no parameter (the
            nearest paths are named), or names one parameter of a layer that computes in one dtype.

    >>> import jax.numpy as jnp
    >>> from jmp_lite import get_policy
    >>> model = with_policy(nn.Dense(3), get_policy("params=float32,compute=bfloat16,output=float32"))
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 2)))
    >>> variables["params"]["kernel"].dtype, model.apply(variables, jnp.ones((1, 2))).dtype
    (dtype('float32'), dtype('float32'))
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"linen.with_policy takes a flax.linen.Module, got {type(module).__name__}.")
    if not isinstance(policy, Policy):
        raise TypeError(f"linen.with_policy takes a jmp.Policy, got {policy!r}. See jmp.get_policy.")
    return WithPolicy(_Plain(module), policy, parse_reduce_dtype(reduce_dtype))


@dataclasses.dataclass(frozen=True)
class _Plain:
    """Holds the plain module out of Linen's sight, which would adopt it as a child with a path."""

    module: nn.Module


class WithPolicy(nn.Module):
    """A module under a policy; see `with_policy`.

    Attributes:
        plain: the plain module.
        policy: the policy.
        reduce_dtype: in what weight gradients are summed over devices, if not in the compute dtype.
    """

    plain: _Plain
    policy: Policy
    reduce_dtype: Any = None

    def setup(self) -> None:
        # A module made in a compact method is bound already, under its own name. Any other takes
        # this module's scope, so that its parameters have the paths that they have without a policy.
        module = self.plain.module
        bound = module if module.scope is not None else module.clone(parent=self.scope)
        object.__setattr__(self, "_bound", bound)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self._run("__call__", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Gives the module's own methods, run under the policy, and its attributes."""
        plain = vars(self).get("plain")
        if plain is None or name.startswith("_"):
            return super().__getattr__(name)
        if isinstance(getattr(type(plain.module), name, None), types.FunctionType):
            return types.MethodType(lambda self, *args, **kwargs: self._run(name, args, kwargs), self)
        value = getattr(vars(self).get("_bound", plain.module), name)
        if any(isinstance(leaf, nn.Module) for leaf in jax.tree.leaves(value)):
            raise ValueError(
                f"'{name}' holds submodules, which would run outside the policy. Write a method of the "
                "model that uses them and call it by its name, as in apply(..., method='encode'); a "
                "function or an unbound method does not go through with_policy."
            )
        return value

    def _run(self, method: str, args: Any, kwargs: Any) -> Any:
        module: nn.Module = self._bound
        root = module.path
        is_cell = isinstance(module, nn.RNNCellBase) and method == "__call__"
        cast = lambda tree: cast_floating(tree, self.policy.compute_dtype)
        args, kwargs = layers.cast_inputs(cast, is_cell, args, kwargs)
        if not module.is_initializing():
            self.policy.check_rules(module.variables.get("params", {}))

        def interceptor(
            call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
        ) -> Any:
            if context.method_name in _CASTS_NOTHING or isinstance(context.module, WithPolicy):
                return call(*args, **kwargs)
            path = "/".join(context.module.path[len(root) :])
            return _call(context.module, context.method_name, path, self, call, args, kwargs)

        with nn.intercept_methods(interceptor):
            output = getattr(module, method)(*args, **kwargs)
        if module.is_initializing():
            self._cast_initial_params(module)
        return layers.cast_outputs(
            lambda tree: cast_floating(tree, self.policy.output_dtype), is_cell, output
        )

    def _cast_initial_params(self, module: nn.Module) -> None:
        params = module.variables.get("params", {})
        self.policy.check_rules(params)
        for name, value in self.policy.cast_to_param(params).items():
            module.put_variable("params", name, value)


def _call(
    module: nn.Module, method: str, path: str, settings: WithPolicy, call: Any, args: Any, kwargs: Any
) -> Any:
    """Calls one method of one module in the compute dtype that the policy gives it."""
    policy = settings.policy
    here = policy.at(path)
    changes: dict[str, Any] = {}
    is_layer = layers.is_layer(module, nn.Module)
    reads_embedding = is_layer and isinstance(module, nn.Embed) and method == "__call__"
    if layers.has_compute_dtype(module) and not isinstance(module, _REWRITES_PARAMS):
        changes["dtype"] = here.compute_dtype
    if not is_layer:
        changes["param"] = _casting_param(module, path, policy)
    elif policy.rules and changes:
        own = [name for name, value in module.variables.get("params", {}).items() if hasattr(value, "dtype")]
        layers.check_layer_rules(policy, path, own, module)
    bias = _bias(module) if is_layer and method == "__call__" else None
    if bias is not None:
        changes["use_bias"] = False
    if is_layer and isinstance(module, _PRODUCTS) and (bias is not None or not module.use_bias):
        changes |= wide_gradients(module, here.compute_dtype, settings.reduce_dtype)

    def run(dtype: Any = None) -> Any:
        with layers.attributes(module, changes if dtype is None else changes | {"dtype": dtype}):
            return call(*args, **kwargs)

    if reads_embedding:
        return layers.look_up(run, here)
    output = run()
    if bias is not None:
        output = layers.add_bias(output, bias)
    if isinstance(module, nn.RNNCellBase) and method == "__call__":
        return layers.cast_cell_output(output, args[0] if args else kwargs["carry"], here)
    return output


def _bias(module: nn.Module) -> Any:
    """The bias of a layer that adds one to its last dimensions, if it has one by now."""
    batched = getattr(module, "batch_dims", ()) not in ((), [])  # The number 0 is an axis.
    if not isinstance(module, _BIASED) or not module.use_bias or batched:
        return None
    return nn.unbox(module.get_variable("params", "bias"))


def _casting_param(module: nn.Module, path: str, policy: Policy) -> Callable[..., Any]:
    """`module.param`, whose result is cast; what is stored stays as it is."""

    def param(name: str, *args: Any, **kwargs: Any) -> Any:
        value = type(module).param(module, name, *args, **kwargs)
        dtype = policy.at(join(path, name)).compute_dtype
        return cast_floating(value, dtype)

    return param


def _register_serialization(cls: type) -> None:
    """Lets `flax.serialization` save the leaves of a state class by the names of its fields."""
    names = [field.name for field in dataclasses.fields(cls) if not field.metadata.get("static")]

    def to_state_dict(state: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(state, name)) for name in names}

    def from_state_dict(state: Any, saved: dict[str, Any]) -> Any:
        changes = {
            name: serialization.from_state_dict(getattr(state, name), saved[name], name=name)
            for name in names
        }
        return replace_leaves(state, **changes)

    serialization.register_serialization_state(cls, to_state_dict, from_state_dict)


for _cls in (NoOpLossScale, StaticLossScale, DynamicLossScale, SkipNonfiniteState):
    _register_serialization(_cls)

"""Flax NNX: `with_policy` returns a model that runs under a policy, with the same parameter tree."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("jmp_lite.nnx needs Flax: pip install flax.") from error

from .._dtypes import DTypeLike, parse_reduce_dtype
from .._paths import join, path_name
from .._policy import Policy
from .._tree import cast_leaf
from . import layers
from .calls import Args, Kwargs, Precision, run_call, run_model
from .objects import is_object

M = TypeVar("M", bound=nnx.Module)
T = TypeVar("T")


def _read_bias(module: Any) -> jax.Array | None:
    return None if module.bias is None or getattr(module, "batch_axis", None) else module.bias[...]


_NNX = layers.Library(
    module=nnx.Module,
    embedding=nnx.Embed,
    cell=nnx.RNNCellBase,
    products=(nnx.Linear, nnx.LinearGeneral),
    biased=(nnx.Linear, nnx.LinearGeneral, nnx.Conv, nnx.ConvTranspose),
    rewriters=(nnx.WeightNorm, nnx.SpectralNorm),
    read_bias=_read_bias,
    no_bias={"bias": None, "use_bias": False},
)
_NORMALIZATION = (nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.LayerNorm, nnx.RMSNorm)
_SETTING = "_jmp_lite_setting"


@dataclasses.dataclass(frozen=True)
class _Setting:
    """The policy of a module, held by the module itself."""

    precision: Precision  # That of the whole model.
    path: str  # That of the module in the model.
    is_model: bool  # Whether the module is the whole model, and is not called by its own methods.


def with_policy(model: M, policy: Policy, *, reduce_dtype: DTypeLike | None = None) -> M:
    """Returns a copy of `model` that runs under a policy.

    The layers of the copy compute in the compute dtype, and its outputs are cast to the output dtype. Inputs
    keep their dtype until a layer casts them, as with Flax's own `dtype`. Each parameter is cast where it is
    used. `nnx.state` of the copy has the paths of the original, with the parameters in the parameter dtype,
    so checkpoints of the plain model fit.

    Normalization layers compute their statistics in float32. Batch statistics, all other variables, and the
    carries of loops keep their dtype. Gradients of biases and embeddings are summed in float32.

    Args:
        model: any NNX module. It is not changed. The copy shares its arrays: a step that donates one of the
            two models deletes the buffers of the other. The policy overrides the `dtype` that a layer was
            given: to keep a layer in float32, write a rule.
        policy: its rules name modules, or single parameters of modules that you wrote. The rule `head` covers
            everything in `head`.
        reduce_dtype: as in `jmp_lite.linen.with_policy`, for `Linear` and `LinearGeneral`: the dtype in which
            devices sum their weight gradients, float32 or None for the compute dtype.

    Returns:
        A module of a subclass of the model's class, with the attribute `policy` unless the model has one. All
        public methods run under the policy. A call works on cast copies of the parameters, so that a value
        assigned to a parameter inside a call is lost: use another `nnx.Variable` for what calls change. The
        module cannot be pickled: save its `nnx.state`.

    Raises:
        TypeError: `model` is not an NNX module, or `policy` is not a policy.
        ValueError: `reduce_dtype` is another dtype; a rule matches no parameter (the message names the
            nearest paths), or names a single parameter of a layer of Flax; or the model is under a policy
            already.

    Examples:
        >>> plain = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
        >>> model = jmp_lite.nnx.with_policy(plain, policy)
        >>> model.kernel[...].dtype, model.dtype, model(jnp.ones((1, 2))).dtype
        (dtype('float32'), dtype(bfloat16), dtype('float32'))
    """
    layers.check_arguments("nnx.with_policy", "flax.nnx.Module", _NNX, model, policy)
    if hasattr(model, _SETTING):
        raise ValueError("The model is under a policy already. Give the plain model to nnx.with_policy.")
    wide = parse_reduce_dtype(reduce_dtype)
    model = nnx.clone(model)
    # A tree of arrays, whose paths have no `value` of a variable at their end.
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    nnx.update(model, policy.cast_to_param(params))
    modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    settled = tuple(f"{path}/" for path, module in modules.items() if hasattr(module, _SETTING))
    for path, module in modules.items():
        _check_bridge(path, module)
        if not f"{path}/".startswith(settled):  # A policy that a part of the model has already wins.
            _set(module, _Setting(Precision(policy, wide), path, module is model))
    return model


def _check_bridge(path: str, module: nnx.Module) -> None:
    """Raises a TypeError if a Linen module would run outside the policy."""
    if isinstance(module, nnx.bridge.ToNNX) and not hasattr(module.to_nnx__module, "policy"):
        raise TypeError(
            f"The Linen module in '{path}' would run outside an NNX policy. Give it one of its own: "
            "nnx.bridge.ToNNX(jmp_lite.linen.with_policy(module, policy))."
        )


def _set(module: Any, setting: _Setting) -> None:
    """Sets the dtype of one module, and lets its calls run through `_call` where they need it."""
    layer, policy, path = layers.is_layer(_NNX, module), setting.precision.policy, setting.path
    needs_plan = layers.takes_dtype(_NNX, module)
    if needs_plan:
        module.dtype = np.dtype(policy.at(path).compute_dtype)
        if layer:
            layers.check_layer_rules(policy, path, list(_own_params(module)), module)
    if isinstance(module, _NORMALIZATION):
        module.promote_dtype = _keep_dtypes
    if needs_plan or setting.is_model or (not layer and _own_params(module)):
        setattr(module, _SETTING, setting)
        # Python looks up `__call__` on the class, so the module gets a subclass. Flax would refuse a plain
        # assignment of `__class__`.
        object.__setattr__(module, "__class__", _subclass(type(module), layer))


def _keep_dtypes(args: T, /, *, dtype: Any = None, inexact: bool = True) -> T:
    """Replaces `promote_dtype` of normalization layers."""
    # That would round the input, the running statistics, scale and bias to half:
    # https://github.com/google/flax/blob/v0.12.8/flax/nnx/nn/normalization.py#L385.
    del dtype, inexact
    return args


def _own_params(module: nnx.Module) -> dict[str, Any]:
    """Returns the attributes of `module` that hold parameters, themselves or in a container."""

    def leaves(value):
        return jax.tree.leaves(value, is_leaf=_is_node)

    def is_param(leaf):
        return isinstance(leaf, nnx.Param)

    return {name: value for name, value in vars(module).items() if any(map(is_param, leaves(value)))}


def _is_node(value: Any) -> bool:
    """Whether a cast must not copy `value`: a module, variable or Rngs."""
    # A call changes these in place, and changes of a copy would be lost.
    is_container = isinstance(value, (nnx.List, nnx.Dict))  # Flax counts containers as modules.
    return isinstance(value, (nnx.Variable, nnx.Module, nnx.Rngs, nnx.RngStream)) and not is_container


# One subclass for each class, since `jit` compares types and would compile again. The cache has an end,
# because a notebook makes a new class each time that a cell is run.
@functools.lru_cache(maxsize=256)
def _subclass(cls: type, layer: bool) -> type:
    """Returns a subclass of `cls` with methods that run in `_call`: for a user's class, all public ones."""
    # `attend` of `nnx.Embed` is the only other method of a Flax layer that computes a product:
    # https://github.com/google/flax/blob/v0.12.8/flax/nnx/nn/linear.py#L1321.
    names = {"__call__", "attend"} & set(dir(cls))
    if not layer:
        own = cls.__mro__[: cls.__mro__.index(nnx.Module)]

        # Methods, also those under `nnx.jit`.
        def is_method(x):
            return callable(x) and not isinstance(x, (staticmethod, classmethod, type))

        methods = {name for c in own for name, value in vars(c).items() if is_method(value)}
        names |= {name for name in methods if not name.startswith("_")}
    body = {name: _under_policy(name, getattr(cls, name)) for name in names}
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    if not hasattr(cls, "policy"):
        body["policy"] = _PolicyAttribute()

    def show(self: Any) -> str:
        setting: _Setting = getattr(self, _SETTING)
        text: str = super(subclass, self).__repr__()
        return f"with_policy({text}, {setting.precision.policy!r})" if setting.is_model else text

    subclass: Any = type(cls.__name__, (cls,), body | {"__repr__": show, "__str__": show})
    return subclass


class _PolicyAttribute:
    """The attribute `policy` of a model. An attribute of that name that the model has itself wins."""

    # A `property` would win over the attribute of the model.
    def __get__(self, module: Any, cls: type) -> Policy:
        if module is None:
            raise AttributeError("The policy belongs to a model, not to its class.")
        setting: _Setting = getattr(module, _SETTING)
        return setting.precision.policy


def _under_policy(name: str, method: Callable[..., Any]) -> Any:

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _call(self, name, method, args, kwargs)

    return run


def _call(module: Any, name: str, method: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Calls one method of one module in the compute dtype that the policy gives it."""
    setting: _Setting = getattr(module, _SETTING)
    call = functools.partial(method, module)

    def run(setting: _Setting) -> Any:
        changes: dict[str, Any] = {}
        if not layers.is_layer(_NNX, module):
            changes = {n: _cast_params(value, setting, n) for n, value in _own_params(module).items()}
        if setting.is_model:  # Calls from inside of this call are calls of a part of the model.
            changes[_SETTING] = dataclasses.replace(setting, is_model=False)
        how = setting.path, setting.precision, changes
        return run_call(_NNX, module, name, *how, call, args, kwargs)

    def run_whole(precision: Precision) -> Any:
        with contextlib.ExitStack() as stack:
            if precision.returns_float32:
                for part in [part for _, part in nnx.iter_modules(module) if hasattr(part, _SETTING)]:
                    stack.enter_context(layers.attributes(part, {_SETTING: _returning_float32(part)}))
            return run(getattr(module, _SETTING))

    if not setting.is_model:
        return run(setting)
    # What a run that fails has changed: the variables of the model and of modules among the arguments.
    nodes = nnx.iter_graph([module, *filter(is_object, jax.tree.leaves((args, kwargs), is_leaf=is_object))])
    values = [(node, node.get_value()) for _, node in nodes if isinstance(node, nnx.Variable)]

    def restore() -> None:
        for variable, value in values:
            variable.set_value(value)

    return run_model(run_whole, restore, setting.precision, _cast, layers.is_cell_call(_NNX, module, name))


def _returning_float32(part: Any) -> _Setting:
    setting: _Setting = getattr(part, _SETTING)
    precision = dataclasses.replace(setting.precision, returns_float32=True)
    return dataclasses.replace(setting, precision=precision)


def _cast(tree: Any, dtype: np.dtype) -> Any:
    return jax.tree.map(lambda leaf: cast_leaf(leaf, dtype), tree, is_leaf=_is_node)


def _cast_params(tree: Any, setting: _Setting, attribute: str) -> Any:
    """Returns the tree of an attribute with a cast copy of each parameter."""

    def cast(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Param):
            return leaf
        name = join(setting.path, f"{attribute}/{path_name(path)}".rstrip("/"))
        return setting.precision.cast_param(leaf, name)

    return jax.tree_util.tree_map_with_path(cast, tree, is_leaf=_is_node)

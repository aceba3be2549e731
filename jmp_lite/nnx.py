"""Flax NNX: `with_policy` gives a model that runs under a policy, with the same parameter tree."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from ._dtypes import DTypeLike
from ._flax import layers
from ._flax.products import parse_reduce_dtype, wide_gradients
from ._paths import argument_names, join, path_name
from ._policy import Policy
from ._tree import cast_leaf

M = TypeVar("M", bound=nnx.Module)
T = TypeVar("T")

_NORMALISATION = (nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.LayerNorm, nnx.RMSNorm)
_PRODUCTS = (nnx.Linear, nnx.LinearGeneral)
_BIASED = (nnx.Linear, nnx.LinearGeneral, nnx.Conv, nnx.ConvTranspose)
# Modules that rewrite the parameters of a layer: they must see them unrounded. The layer casts.
_REWRITES_PARAMS = (nnx.WeightNorm, nnx.SpectralNorm)
_PLACE = "_jmp_lite_place"


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where in a model a module stands, under which policy, and in what weight gradients are summed."""

    policy: Policy
    path: str
    is_root: bool
    reduce_dtype: Any

    def at(self, name: str) -> Policy:
        return self.policy.at(join(self.path, name))


def with_policy(model: M, policy: Policy, *, reduce_dtype: DTypeLike | None = None) -> M:
    """Returns a copy of `model` that runs under a policy.

    The inputs and the parameters are cast to the compute dtype, each parameter where it is used; the
    outputs to the output dtype. `nnx.state` of the copy has the paths of the original, with the
    parameters in the parameter dtype, so checkpoints of the plain model fit. Normalisation statistics
    are computed in float32, batch statistics and all other variables keep their dtype, and so does a
    recurrent carry. Gradients of biases and of embeddings, which are sums, are summed in float32.

    Args:
        model: any NNX module; it is not changed. The copy shares its arrays, so a step that donates
            the one takes the other's buffers. The policy wins over a `dtype` that a layer was given:
            to keep a layer in float32, write a rule.
        policy: its rules name modules, or single parameters of modules that users write. `head`
            covers all that lies in `head`.
        reduce_dtype: in what the gradients of the weights of `Linear` and `LinearGeneral` leave their
            products, to be summed over devices: float32, or None for the compute dtype, of half the
            bytes. Float32 has no forward-mode derivative (`jax.jvp`).

    Returns:
        A module whose class is a subclass of the model's. All public methods run under the policy. What a
        call assigns to a parameter of its own is lost, since the call works on a cast copy; use another
        `nnx.Variable` for what calls change.

    Raises:
        TypeError: `model` is no NNX module, or `policy` no policy.
        ValueError: `reduce_dtype` is another dtype; a rule matches no parameter (the nearest paths are
            named), or names one parameter of a layer that computes in one dtype; or the model is under a
            policy already.

    >>> import jax.numpy as jnp
    >>> from jmp_lite import get_policy
    >>> plain = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> model = with_policy(plain, get_policy("params=float32,compute=bfloat16,output=float32"))
    >>> model.kernel[...].dtype, model.dtype, model(jnp.ones((1, 2))).dtype
    (dtype('float32'), dtype(bfloat16), dtype('float32'))
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"nnx.with_policy takes a flax.nnx.Module, got {type(model).__name__}.")
    if not isinstance(policy, Policy):
        raise TypeError(f"nnx.with_policy takes a jmp.Policy, got {policy!r}. See jmp.get_policy.")
    if hasattr(model, _PLACE):
        raise ValueError("The model is under a policy already. Give the plain model to nnx.with_policy.")
    reduce_dtype = parse_reduce_dtype(reduce_dtype)
    model = nnx.clone(model)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    policy.check_rules(params)
    nnx.update(model, policy.cast_to_param(params))
    modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    settled = [f"{path}/" for path, module in modules.items() if hasattr(module, _PLACE)]
    for path, module in modules.items():
        if isinstance(module, nnx.bridge.ToNNX) and not hasattr(module.to_nnx__module, "policy"):
            raise TypeError(
                f"The Linen module in '{path}' would run outside an NNX policy. Give it one of its own: "
                "nnx.bridge.ToNNX(jmp_lite.linen.with_policy(module, policy))."
            )
        if not f"{path}/".startswith(tuple(settled)):  # The innermost policy wins.
            _place(module, _Place(policy, path, module is model, reduce_dtype))
    return model


def _place(module: Any, place: _Place) -> None:
    """Sets the dtypes of one module, and makes its calls pass through `_call` if need be."""
    is_layer = layers.is_layer(module, nnx.Module)
    if layers.has_compute_dtype(module) and not isinstance(module, _REWRITES_PARAMS):
        module.dtype = place.policy.at(place.path).compute_dtype
        if is_layer:
            layers.check_layer_rules(place.policy, place.path, list(_own_params(module)), module)
    if isinstance(module, _NORMALISATION):
        module.promote_dtype = _keep_dtypes
    needs_care = isinstance(module, (*_BIASED, nnx.Embed, nnx.RNNCellBase))
    if needs_care or place.is_root or (not is_layer and _own_params(module)):
        setattr(module, _PLACE, place)
        object.__setattr__(module, "__class__", _subclass(type(module), is_layer))


def _keep_dtypes(args: T, /, *, dtype: Any = None, inexact: bool = True) -> T:
    """`promote_dtype` of normalisation layers: Flax's own would round running statistics to half."""
    del dtype, inexact
    return args


def _own_params(module: nnx.Module) -> dict[str, Any]:
    """The attributes of `module` that hold parameters, themselves or in a container."""

    def holds_param(value: Any) -> bool:
        return any(isinstance(leaf, nnx.Param) for leaf in jax.tree.leaves(value, is_leaf=_is_node))

    return {name: value for name, value in vars(module).items() if holds_param(value)}


def _is_node(value: Any) -> bool:
    """Modules, variables and Rngs go through a cast as they are: a copy would lose their updates."""
    is_container = isinstance(value, (nnx.List, nnx.Dict))  # Modules too, to Flax.
    return isinstance(value, (nnx.Variable, nnx.Module, nnx.Rngs, nnx.RngStream)) and not is_container


@functools.cache  # One subclass a class, so that jit finds the type that it has compiled for.
def _subclass(cls: type, is_layer: bool) -> type:
    """A class like `cls` whose `__call__`, and public methods if users wrote it, run in `_call`."""
    names = {"__call__", "attend"} & set(dir(cls))
    if not is_layer:
        own = cls.__mro__[: cls.__mro__.index(nnx.Module)]
        methods = {name for c in own for name, value in vars(c).items() if _is_method(value)}
        names |= {name for name in methods if not name.startswith("_")}

    def under_policy(name: str) -> Any:
        method = getattr(cls, name)

        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _call(self, name, method, args, kwargs)

        return run

    body = {name: under_policy(name) for name in names}
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), body)


def _is_method(value: Any) -> bool:
    """Whether a class attribute is called with the instance: a function, or one under `nnx.jit`."""
    return callable(value) and not isinstance(value, (staticmethod, classmethod, type))


def _call(module: Any, name: str, method: Any, args: Any, kwargs: Any) -> Any:
    """Calls one method of one module in the compute dtype that the policy gives it."""
    place: _Place = getattr(module, _PLACE)
    here = place.policy.at(place.path)
    changes: dict[str, Any] = {}
    is_layer = layers.is_layer(module, nnx.Module)
    is_cell = isinstance(module, nnx.RNNCellBase) and name == "__call__"
    if place.is_root:
        cast = lambda tree: _cast(tree, place.policy.compute_dtype)
        args, kwargs = layers.cast_inputs(cast, is_cell, args, kwargs)
        changes[_PLACE] = dataclasses.replace(place, is_root=False)  # For the calls inside this one.
    reads_embedding = is_layer and isinstance(module, nnx.Embed) and name == "__call__"
    if not is_layer:
        changes |= {n: _cast_params(value, place, n) for n, value in _own_params(module).items()}
    bias = _bias(module) if is_layer and name == "__call__" else None
    if bias is not None:
        changes |= {"bias": None, "use_bias": False}
    is_product = is_layer and isinstance(module, _PRODUCTS) and name == "__call__"
    if is_product and (bias is not None or vars(module)["bias"] is None):
        changes |= wide_gradients(module, here.compute_dtype, place.reduce_dtype)

    def run(dtype: Any = None) -> Any:
        with layers.attributes(module, changes if dtype is None else changes | {"dtype": dtype}):
            return method(module, *args, **kwargs)

    output = layers.look_up(run, here) if reads_embedding else run()
    if bias is not None:
        output = layers.add_bias(output, bias)
    if is_cell:
        output = layers.cast_cell_output(output, args[0] if args else kwargs["carry"], here)
    if not place.is_root:
        return output
    return layers.cast_outputs(lambda tree: _cast(tree, place.policy.output_dtype), is_cell, output)


def _bias(module: Any) -> Any:
    """The bias of a layer that adds one to its last dimensions, if it has one."""
    if not isinstance(module, _BIASED) or module.bias is None or getattr(module, "batch_axis", None):
        return None
    return module.bias[...]


def _cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: cast_leaf(leaf, dtype), tree, is_leaf=_is_node)


def _cast_params(tree: Any, place: _Place, attribute: str) -> Any:
    """The same tree with each parameter replaced by a cast copy, for the length of a call."""

    def cast(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Param):
            return leaf
        dtype = place.at(f"{attribute}/{path_name(path)}".rstrip("/")).compute_dtype
        return jax.tree.map(lambda value: cast_leaf(value, dtype), leaf)

    return jax.tree_util.tree_map_with_path(cast, tree, is_leaf=_is_node)


def is_object(node: Any) -> bool:
    """Whether a call may change `node` in place: an NNX module, variable or other graph node."""
    return isinstance(node, (nnx.Pytree, nnx.Variable))


def split_objects(
    fun: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., tuple[T, Any]], tuple[Any, ...], Callable[[tuple[T, Any]], T]]:
    """Turns a call whose arguments hold NNX modules into a call of a function of arrays, for `autocast`.

    Args:
        fun: the function called.
        args, kwargs: its arguments; the modules among them may be changed by the call.

    Returns:
        A function that returns the output of `fun` and the modules' state after the call; the arguments
        of that function; and one that takes what it returned, updates the modules and gives the output.
    """
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_object)
    named = dict(zip(argument_names(fun, args, kwargs, is_leaf=is_object), leaves, strict=True))
    # Together, so that what two of them share stays shared.
    objects = {name: leaf for name, leaf in named.items() if is_object(leaf)}
    graph, state = nnx.split(objects)

    def pure(state: Any, others: dict[str, Any]) -> tuple[T, Any]:
        copies = nnx.merge(graph, state)
        before = {path: _value(leaf) for path, leaf in nnx.to_flat_state(nnx.state(copies))}
        args, kwargs = jax.tree.unflatten(structure, [(copies | others)[name] for name in named])
        output = fun(*args, **kwargs)
        # What the call left alone is not written back: the modules may belong to an outer trace.
        after = nnx.to_flat_state(nnx.state(copies))
        changed = [(path, leaf) for path, leaf in after if before.get(path) is not _value(leaf)]
        return output, nnx.from_flat_state(changed)

    def update(returned: tuple[T, Any]) -> T:
        output, state = returned
        nnx.update(objects, state)
        return output

    return pure, (state, {name: leaf for name, leaf in named.items() if name not in objects}), update


def _value(leaf: Any) -> Any:
    """The array that a leaf of a state holds."""
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf

"""The arguments of a call: how they become arrays for a jaxpr, and what the arrays are called.

The arguments and outputs of a function may hold anything. Only `jax.Array`s and NumPy arrays of floating
numbers are traced; everything else reaches the function as it is, as in a plain call.
"""

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._paths import argument_names, positional_names, shown
from .._tree import without_nnx_variables
from .bind import is_jaxpr_tracer
from .read import Array, Jaxpr

# For each library whose objects a call may change, such as an NNX module, the adapter that splits them into
# arrays. This is a table of names: no import leads from here to the adapters, and autocast works whether or
# not the user has imported the adapter. A registry that an adapter fills at its import would make the result
# of a call depend on the order of imports. An adapter has two functions: `is_object(node)`, and
# `split_objects(fun, args, kwargs)`, which returns a function of arrays, its arguments, and a function that
# finishes the call with the output.
ADAPTERS = {"flax.nnx": "jmp_lite._flax.objects"}

P = ParamSpec("P")
R = TypeVar("R")

_ARRAY = object()  # Stands for an output that is an array. None and the like may be outputs themselves.
_KINDS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


def check_function(caller: str, fun: Any, otherwise: str = "") -> None:
    """Raises a TypeError if what was given as a function is a model, a dtype, or no function.

    `otherwise` ends the sentence that says what to write.
    """
    # A Flax Linen module, or a transformed function of Haiku.
    if hasattr(fun, "init") and hasattr(fun, "apply"):
        raise TypeError(
            f"{caller} takes a function first, and got the model {type(fun).__name__}. Give what computes: "
            f"{caller}(model.apply, ...), or the loss function that calls it."
        )
    is_scalar_type = isinstance(fun, type) and issubclass(fun, np.generic)
    # `jnp.float16` is an object of a class of JAX's own, and can be called: `autocast(jnp.float16)` would be
    # taken for a function.
    is_dtype = is_scalar_type or isinstance(fun, (type(jnp.float16), np.dtype))
    if is_dtype or not callable(fun):
        given = repr(fun) if is_dtype else shown(fun)
        raise TypeError(
            f"{caller} takes a function first. Got {given}; write {caller}(fun, ...)(*args){otherwise}."
        )
    # Its body runs after the call, where nothing traces it.
    if inspect.isgeneratorfunction(fun) or inspect.iscoroutinefunction(fun):
        kind = "generator" if inspect.isgeneratorfunction(fun) else "coroutine"
        raise TypeError(
            f"{caller} takes a function that returns arrays. Got a {kind} function, {shown(fun)}."
        )


def in_two_calls(make: Callable[P, R]) -> Callable[P, R]:
    """Makes `tool(fun, *args)`, in place of `tool(fun)(*args)`, an error in our words."""
    most = len(positional_names(make))

    @functools.wraps(make)
    def checked(*given: P.args, **options: P.kwargs) -> R:
        # An array where an option should be is an argument of the function.
        def holds_arrays(tree):
            return any(isinstance(leaf, _KINDS) for leaf in jax.tree.leaves(tree))

        if len(given) > most or any(map(holds_arrays, given[1:])):
            name = make.__name__
            raise TypeError(
                f"{name} takes a function, and returns one that takes its arguments: write "
                f"{name}(fun, ...)(*args). Got {', '.join(map(shown, given[1:]))} behind the function."
            )
        return make(*given, **options)

    return checked


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A call of a function, as a jaxpr and its inputs."""

    jaxpr: Jaxpr  # The function as it was traced.
    arrays: list[Array]  # The arrays among the arguments: the inputs of the jaxpr.
    names: tuple[str, ...]  # The path of each array among the arguments; empty strings if nobody asked.
    outputs: Callable[[Sequence[Array]], Any]  # Makes the outputs of the function from those of the jaxpr.
    # Makes the function again, for other arrays, with a function of arrays in place of its Python.
    replayed: Callable[[Callable[[Sequence[Array]], list[Array]]], Callable[..., Any]]


def trace(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    with_names: bool,
    kinds: tuple[type, ...] = (),
) -> Arguments:
    """Traces a call of `fun`.

    Args:
        fun: the function.
        args, kwargs: its arguments.
        with_names: whether the paths of the arrays are needed; they take time to make.
        kinds: further types of arguments that are traced as arrays.
    """
    # First without objects that the call may change, then without all that is not an array.
    given = fun
    fun, args, kwargs, finish = _without_objects(fun, args, kwargs)
    call = _Call(fun, args, kwargs, kinds)
    # JAX's errors of tracing name the function that was wrapped.
    closed = jax.make_jaxpr(functools.wraps(fun)(lambda *arrays: call.flat(*arrays)))(*call.arrays)
    names = [""] * len(call.leaves)
    if with_names:
        names = argument_names(fun, *without_nnx_variables((args, kwargs)))
        if fun is not given:  # A path is a parameter of the split function, and the path.
            names = [name.split("/", 1)[1] for name in names]

    return Arguments(
        jaxpr=closed,
        arrays=call.arrays,
        names=tuple(names[index] for index in call.indexes),
        outputs=lambda results: finish(call.outputs(results)),
        replayed=lambda run: _replayed(given, call, run),
    )


def _replayed(
    fun: Callable[..., Any], call: "_Call", run: Callable[[Sequence[Array]], list[Array]]
) -> Callable[..., Any]:
    """Returns a function of the arguments of `fun` that calls `run` with the arrays among them."""

    @functools.wraps(fun)
    def replay_fun(*args: Any, **kwargs: Any) -> Any:
        _, args, kwargs, finish = _without_objects(fun, args, kwargs)
        return finish(call.outputs(run(call.arrays_among((args, kwargs)))))

    return replay_fun


def _without_objects(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Callable[[Any], Any]]:
    """Returns a call as one of arrays, and a function that finishes it with the output."""
    adapter = _adapter((args, kwargs))
    if adapter is None:
        return fun, args, kwargs, lambda output: output
    fun, args, finish = adapter.split_objects(fun, args, kwargs)
    return fun, args, {}, finish


class _Call:
    """A call as a function of the arrays among its arguments, that returns the arrays among its outputs.

    Attributes:
        leaves: the leaves of the arguments.
        indexes: the indexes of the arrays among the leaves.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kinds: tuple[type, ...],
    ) -> None:
        self._fun = fun
        self.leaves, self._structure = jax.tree.flatten((args, kwargs))
        self.indexes = [
            index for index, leaf in enumerate(self.leaves) if _is_array(leaf) or isinstance(leaf, kinds)
        ]
        self._output_leaves: list[Any] = []
        self._output_structure: Any = None

    @property
    def arrays(self) -> list[Array]:
        return [self.leaves[index] for index in self.indexes]

    def arrays_among(self, tree: Any) -> list[Array]:
        """Returns the arrays among other arguments of the same structure."""
        # `jax.grad` passes tracers where it differentiates, also in place of a Python number, which the trace
        # has taken as a constant.
        leaves = jax.tree.leaves(tree)
        others = [leaf for index, leaf in enumerate(leaves) if index not in self.indexes]
        if len(leaves) != len(self.leaves) or any(isinstance(leaf, jax.Array) for leaf in others):
            raise TypeError(
                "An argument that is differentiated is a Python number. Give it as an array, such as "
                "jnp.asarray(2.0)."
            )
        return [leaves[index] for index in self.indexes]

    def flat(self, *arrays: Array) -> list[Array]:
        """Calls the function, and notes the structure of its output."""
        leaves = list(self.leaves)
        for index, array in zip(self.indexes, arrays, strict=True):
            leaves[index] = array
        args, kwargs = jax.tree.unflatten(self._structure, leaves)
        outputs, self._output_structure = jax.tree.flatten(self._fun(*args, **kwargs))
        for leaf in outputs:
            _check_output(self._fun, leaf)
        # The arrays go out through the trace; kept here they would leak from it:
        # https://docs.jax.dev/en/latest/errors.html#jax.errors.UnexpectedTracerError.
        self._output_leaves = [_ARRAY if _is_traced(leaf) else leaf for leaf in outputs]
        return list(filter(_is_traced, outputs))

    def outputs(self, results: Sequence[Array]) -> Any:
        """Returns the output of the function, of its arrays."""
        given = map(_as_array, results)
        leaves = [next(given) if leaf is _ARRAY else leaf for leaf in self._output_leaves]
        return jax.tree.unflatten(self._output_structure, leaves)


def _is_array(leaf: Any) -> bool:
    """Whether an argument is traced."""
    # A NumPy array of floating numbers is, since the function may index it by a traced integer, which NumPy
    # refuses. NumPy's integers and booleans stay: they may be sizes, or choose what the function does.
    is_numpy = isinstance(leaf, np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    return is_numpy or isinstance(leaf, jax.Array)


def _is_traced(leaf: Any) -> bool:
    """Whether an output is an array, or a tracer of something else, such as a token."""
    return isinstance(leaf, jax.Array) or is_jaxpr_tracer(leaf)


def _as_array(result: Any) -> Any:
    """Returns a result of a jaxpr as an array, also a number in it, such as `jnp.asarray(1.0)`."""
    # A token has no dtype, and is returned as it is.
    is_number = not isinstance(result, jax.Array) and hasattr(jax.typeof(result), "dtype")
    return jnp.asarray(result) if is_number else result


def _check_output(fun: Callable[..., Any], leaf: Any) -> None:
    """Raises a TypeError if an output is an object that holds arrays, and that JAX does not look into."""
    # The arrays are tracers, and dead as soon as the function has been traced.
    if isinstance(leaf, jax.Array) or callable(leaf):
        return
    held = jax.tree.leaves(dict(getattr(leaf, "__dict__", ())))
    if any(isinstance(value, jax.Array) and is_jaxpr_tracer(value) for value in held):
        kind, name = type(leaf).__name__, getattr(fun, "__name__", repr(fun))
        raise TypeError(
            f"autocast: the output of {name} has a {kind}, which holds arrays and is not a pytree: JAX would "
            f"lose them. Return the arrays, or register the class: jax.tree_util.register_dataclass({kind})."
        )


def has_objects(tree: Any) -> bool:
    """Whether some arguments hold objects that a function may change in place, such as NNX modules.

    A state of `nnx.split` is taken and returned, as an array is.
    """
    adapter = _adapter(tree)
    return adapter is not None and adapter.has_modules(tree)


def _adapter(tree: Any) -> ModuleType | None:
    """Returns the adapter for the objects in `tree`, if there are any."""
    for library, name in ADAPTERS.items():
        # The program that passes an object of a library has imported the library.
        if library in sys.modules:
            adapter = importlib.import_module(name)
            if any(map(adapter.is_object, jax.tree.leaves(tree, is_leaf=adapter.is_object))):
                return adapter
    return None

"""Traces a loss function or a step with its arguments to one program.

The program of a loss function returns the loss and its scaled gradients; that of a step, what the step
returns.
"""

import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from ..._dtypes import HALF_DTYPES
from ..._jaxpr import Array, Jaxpr, bind, constants, dependence, without_constants
from ..._jaxpr import trace as trace_call
from ..._paths import argument_names, named_leaves, positional_names
from ..._scaling.grad import value_and_grad
from ..._scaling.loss_scale import StaticLossScale, is_loss_scale
from ..._tree import has_dtype, without_nnx_variables
from .describe import Description, Value
from .sites import Path, Site, SiteKind
from .tap import Operate, Probe, Tap

_SCALE = "_jmp_lite_loss_scale"
_LEVEL = "xla_backend_optimization_level"
# By default XLA may remove a cast to half and back, which hides overflows:
# https://github.com/jax-ml/jax/issues/23007.
EVERY_CAST: Any = {"xla_allow_excess_precision": False}
"""Compiler options for diagnosis."""
if _LEVEL not in os.environ.get("XLA_FLAGS", ""):  # The option would override the user's own level.
    # It halves the compile time of a program that runs only a few times.
    EVERY_CAST[_LEVEL] = 1

ValueAndGrad: TypeAlias = Callable[..., Callable[..., Any]]
"""Returns a function for the value and the gradients of a loss function, as `jax.value_and_grad` does."""


@dataclasses.dataclass(frozen=True)
class LossCall:
    """A loss function or a step, and how it is differentiated, as in `jmp_lite.value_and_grad`."""

    fun: Callable[..., Any]
    argnums: int | Sequence[int] | Any
    has_aux: bool
    value_and_grad_fn: ValueAndGrad | None  # None for a step, which runs as it is.

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The names of the arguments that are differentiated, or that a step updates: the parameters."""
        argnums = self.argnums if isinstance(self.argnums, Sequence) else (self.argnums,)
        numbers = [getattr(each, "argnum", each) for each in argnums]  # `nnx.DiffState` has an attribute.
        names = positional_names(self.fun)
        return tuple(names[n] if n < len(names) else str(n) for n in numbers)


class Trees(NamedTuple):
    """The arguments and results of a call as trees, and where a jaxpr has their leaves."""

    arguments: Any
    inputs: list[int | None]  # For each leaf of the arguments its index among the inputs of the jaxpr.
    results: Any
    outputs: list[int | None]  # For each leaf of the results its index among the outputs of the jaxpr.


@dataclasses.dataclass(frozen=True)
class LossProgram:
    """A loss function and its backward pass, or a step, as one jaxpr without constants."""

    jaxpr: Jaxpr  # From the arrays to the outputs and then auxiliary results.
    arrays: tuple[Array, ...]  # The constants of the jaxpr, and the arrays among the arguments.
    names: tuple[str, ...]  # The path of each argument; empty for a constant.
    scale: int  # The index of the loss scale among the arrays. A step does not read it.
    # Empty for the loss, then the path of each gradient; for a step, of each result.
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]  # The arguments that are differentiated, or that a step updates.
    is_step: bool
    aux: tuple[str, ...]  # The path of each floating auxiliary result; they follow the outputs.
    loss_scales: tuple[str, ...]  # The paths of the loss scales that it takes: a step has its own.
    trees: Trees  # The arguments, and what a step returns or a loss function as its auxiliary results.

    @property
    def gradients(self) -> tuple[str, ...]:
        return () if self.is_step else self.outputs[1:]

    @property
    def floating_parameters(self) -> dict[str, Array]:
        """The floating arrays among the parameters, by their paths."""
        arrays = zip(self.names, self.arrays)
        own = {name: array for name, array in arrays if name.split("/")[0] in self.parameters}
        return {name: array for name, array in own.items() if has_dtype(array, jnp.floating)}

    @functools.cached_property
    def state(self) -> dict[int, int]:
        """For each result that is the new value of an argument, its index, and that of the argument."""
        return state_of(self.trees, self.jaxpr)

    @property
    def named_outputs(self) -> tuple[str, ...]:
        """The outputs, with the path of the argument in place of that of its new value."""
        named = enumerate(self.outputs)
        return tuple(self.names[self.state[n]] if n in self.state else name for n, name in named)

    def at_scale(self, scale: float) -> list[Array]:
        arrays = list(self.arrays)
        arrays[self.scale] = jnp.float32(scale)
        return arrays

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns the outputs: the loss and the gradients, or what a step returns."""
        # A Jaxpr is a ClosedJaxpr since JAX 0.11, and has an attribute `jaxpr` too.
        closed = self.jaxpr if hasattr(self.jaxpr, "jaxpr") else ClosedJaxpr(self.jaxpr, ())
        return jaxpr_as_fun(closed)(*arrays)[: len(self.outputs)]


def trace(call: LossCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LossProgram:
    """Traces a loss function and its backward pass, or a step; the loss scale is one more argument."""
    recorded = _Recorded()
    # An argument and no constant, so that one compiled program runs at every scale.
    scaled = {**kwargs, _SCALE: jnp.float32(1)}
    traced = trace_call(_run(call, recorded), args, scaled, True, (np.ndarray,))
    fixed = constants(traced.jaxpr)
    names = (*("" for _ in fixed), *traced.names)
    numbers = {name: number for number, name in enumerate(names) if name}
    paths = argument_names(call.fun, *without_nnx_variables((args, kwargs)))
    given = [numbers.get(path) for path in paths]
    return LossProgram(
        jaxpr=without_constants(traced.jaxpr),
        arrays=(*fixed, *traced.arrays),
        names=names,
        scale=numbers[_SCALE],
        outputs=recorded.outputs,
        parameters=call.differentiated,
        is_step=call.value_and_grad_fn is None,
        aux=recorded.aux,
        loss_scales=_loss_scales(call, args, kwargs) if call.value_and_grad_fn is None else (_SCALE,),
        trees=Trees((args, kwargs), given, recorded.results, recorded.order),
    )


def _loss_scales(call: LossCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Returns the paths of the values of the loss scales among some arguments."""
    tree = without_nnx_variables((args, kwargs))
    names = argument_names(call.fun, *tree, is_leaf=is_loss_scale)
    leaves = jax.tree.leaves(tree, is_leaf=is_loss_scale)
    return tuple(f"{name}/loss_scale" for name, leaf in zip(names, leaves) if is_loss_scale(leaf))


@dataclasses.dataclass
class _Recorded:
    """What a call returns, recorded while it is traced; the fields are those of `LossProgram` and `Trees`."""

    outputs: tuple[str, ...] = ()
    aux: tuple[str, ...] = ()
    results: Any = None
    order: list[int | None] = dataclasses.field(default_factory=list)

    def returned(self, tree: Any, first: int) -> list[Array]:
        """Records a tree of results, and returns its arrays, the floating ones first.

        `first` is the index of the first of them among all outputs.
        """
        leaves = jax.tree.leaves(tree)

        def is_array(leaf):
            return isinstance(leaf, (jax.Array, np.ndarray))

        floating = [number for number, leaf in enumerate(leaves) if has_dtype(leaf, jnp.inexact)]
        others = [n for n, leaf in enumerate(leaves) if is_array(leaf) and n not in set(floating)]
        places = {leaf: first + place for place, leaf in enumerate([*floating, *others])}
        self.order = [places.get(number) for number in range(len(leaves))]

        def shape(leaf):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf

        self.results = jax.tree.unflatten(jax.tree.structure(tree), map(shape, leaves))
        return [leaves[number] for number in places]


def _run(call: LossCall, recorded: _Recorded) -> Callable[..., Any]:
    """Returns a function that returns the outputs of `LossProgram`, and records what they are."""

    @functools.wraps(call.fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        scale = StaticLossScale(kwargs.pop(_SCALE))
        if call.value_and_grad_fn is None:
            results = call.fun(*args, **kwargs)
            recorded.outputs = tuple(_floating(results))
            return recorded.returned(results, 0)
        scaled = value_and_grad(call.fun, scale, call.argnums, call.has_aux, call.value_and_grad_fn)
        value, grads = scaled(*args, **kwargs)
        floating = _floating(grads)
        recorded.outputs = ("", *floating)
        loss, aux = value if call.has_aux else (value, None)
        recorded.aux = tuple(_floating(aux))
        # A constant loss may be a Python number.
        return jnp.asarray(loss), list(floating.values()), recorded.returned(aux, len(recorded.outputs))

    return run


def _floating(tree: Any) -> dict[str, Array]:
    leaves = named_leaves(without_nnx_variables(tree))
    return {name: leaf for name, leaf in leaves if has_dtype(leaf, jnp.inexact)}


def state_of(trees: Trees, jaxpr: Jaxpr) -> dict[int, int]:
    """Returns for each output of a jaxpr that is the new value of an input the index of that input.

    These are the largest subtrees of the results with the structure, the shapes and the dtypes of a subtree
    of the arguments that they depend on.
    """
    search = _States(trees, dependence(jaxpr))
    # The outer subtrees come first, so the largest ones are taken.
    every = list(_subtrees(trees.results))
    for tree, new in every:
        if not _is_lone_scalar(tree):
            search.add(tree, new)
    # A loss depends on the parameters. A counter or an average of the data that stands alone does not.
    states = {trees.inputs[old] for old in search.pairs.values()}
    for tree, new in every:
        if _is_lone_scalar(tree) and states.isdisjoint(search.inputs_of(new.start)):
            search.add(tree, new)
    state = ((trees.outputs[new], trees.inputs[old]) for new, old in search.pairs.items())
    return {output: number for output, number in state if output is not None and number is not None}


class _States:
    """Finds the arguments whose new values the results are. An argument has one new value."""

    def __init__(self, trees: Trees, depends: Sequence[Collection[int]]) -> None:
        self._trees, self._depends = trees, depends
        self.pairs: dict[
            int, int
        ] = {}  # The leaves of the results that are new values, each with its argument.
        self._candidates: dict[Any, list[range]] = collections.defaultdict(list)
        for tree, leaves in _subtrees(trees.arguments):
            self._candidates[_kind(tree)].append(leaves)

    def add(self, tree: Any, new: range) -> None:
        """Adds a subtree of the results, if an argument that no other has taken fits and it is not in one."""
        if new.start not in self.pairs:
            free = (old for old in self._candidates[_kind(tree)] if set(self.pairs.values()).isdisjoint(old))
            self.pairs.update(zip(new, next((old for old in free if self._depends_on(new, old)), ())))

    def inputs_of(self, leaf: int) -> Collection[int]:
        """Returns the inputs of the jaxpr on which a leaf of the results depends."""
        output = self._trees.outputs[leaf]
        return () if output is None else self._depends[output]

    def _depends_on(self, new: range, old: range) -> bool:
        return any(self._trees.inputs[i] in self.inputs_of(n) for n, i in zip(new, old))


def _subtrees(tree: Any, first: int = 0) -> Iterator[tuple[Any, range]]:
    """Yields a tree, and then its subtrees: those with leaves, and the indexes of these among all leaves."""
    if count := len(jax.tree.leaves(tree)):
        yield tree, range(first, first + count)
    if not jax.tree_util.all_leaves([tree]):
        for child in jax.tree.leaves(tree, is_leaf=lambda node: node is not tree):
            yield from _subtrees(child, first)
            first += len(jax.tree.leaves(child))


def _kind(tree: Any) -> Any:
    """Returns the structure, and the shapes and dtypes of the leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves)


def _is_lone_scalar(tree: Any) -> bool:
    """Whether a tree is a scalar that is returned alone, as a loss is. One in half may be a counter."""
    is_scalar = jax.tree_util.all_leaves([tree]) and getattr(tree, "shape", ()) == ()
    return is_scalar and getattr(tree, "dtype", None) not in HALF_DTYPES


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of one run of a program."""

    program: LossProgram
    described: Description
    sites: dict[Path, Site]  # Those of the description that the probe wants.
    records: dict[Path, np.ndarray]  # With an axis for each loop around a site.
    cut: tuple[Path, ...]  # The sites of the while loops that were stopped, in the order of the program.
    # The site of each output, if it has one, and then of each auxiliary result.
    outputs: tuple[Path | None, ...]
    results: tuple[np.ndarray, ...]  # Their measurements.


class Tapped:
    """A program with a probe, compiled once for all loss scales."""

    def __init__(self, program: LossProgram, probe: Probe, operate: Operate = bind) -> None:
        def parameter(name):
            return name if name.split("/")[0] in program.parameters else ""

        scales = set(program.loss_scales)
        inputs = [Value(None, name, None, parameter(name), name in scales) for name in program.names]
        self._program, self._description = program, Description(program.jaxpr, inputs)
        self._tap = Tap(self._description, probe, operate)
        self._run = jax.jit(self._measure, compiler_options=EVERY_CAST)

    def __call__(self, scale: float) -> Measured:
        described, floating = self._description, len(self._program.outputs) + len(self._program.aux)
        records, results = jax.tree.map(np.asarray, self._run(self._program.at_scale(scale)))
        sites = self._tap.sites
        cuts = (path for path, site in sites.items() if site.kind is SiteKind.CUT)
        cut = tuple(path for path in sorted(cuts) if (records[path][..., 1] == 1).any())
        outputs = tuple(value.source for value in described.outputs[:floating])
        return Measured(self._program, described, sites, records, cut, outputs, tuple(results))

    def _measure(self, arrays: list[Array]) -> tuple[dict[Path, Array], list[Array]]:
        values, records = self._tap.run(self._program.jaxpr, arrays)
        outputs = values[: len(self._program.outputs) + len(self._program.aux)]
        return records, [self._tap.probe.measure(jnp.asarray(value)) for value in outputs]

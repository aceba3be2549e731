"""What users give, a loss function and its arguments, as one program: the loss and its scaled gradients."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from ..._autocast.planning.plan import Plan
from ..._jaxpr import arguments
from ..._jaxpr.read import Array, Jaxpr, constants, without_constants
from ..._paths import leaf_names
from ..._scaling.grad import value_and_grad
from ..._scaling.loss_scale import StaticLossScale, is_loss_scale
from .calls import HANDLERS
from .sites import Path, Site, Where
from .tap import STEPS, Probe, Tap, TapValue

_SCALE = "_jmp_lite_loss_scale"
EVERY_CAST: Any = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 1}
"""Options of XLA. XLA may leave out a cast to half and back, so an overflow or an error would not show.

A program of a diagnosis runs a few times at most. It is compiled in half of the time, and runs somewhat
slower.
"""


@dataclasses.dataclass(frozen=True)
class Call:
    """How a loss function is differentiated: what `jmp_lite.value_and_grad` takes.

    Attributes:
        fun: the loss function.
        argnums, has_aux, transform: as in `jmp_lite.value_and_grad`.
    """

    fun: Callable[..., Any]
    argnums: int | Sequence[int] | Any
    has_aux: bool
    transform: Callable[..., Callable[..., Any]]

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The names of the arguments that are differentiated: the parameters."""
        argnums = self.argnums if isinstance(self.argnums, Sequence) else (self.argnums,)
        numbers = [getattr(each, "argnum", each) for each in argnums]  # `nnx.DiffState` has an attribute.
        try:
            names = list(inspect.signature(self.fun).parameters)
        except (TypeError, ValueError):  # Some built-in functions have none.
            names = []
        return tuple(names[n] if n < len(names) else str(n) for n in numbers)


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss function and its backward pass as one jaxpr without constants.

    Attributes:
        jaxpr: takes the scale and the arrays, gives the loss, the gradients, and what else there is.
        arrays: the constants of the jaxpr and the arrays among the arguments.
        names: the path of each array among the arguments; empty for a constant.
        scale: the index of the loss scale among the arrays.
        gradients: the path of each gradient, as the outputs of the jaxpr after the first.
        parameters: the names of the arguments that are differentiated.
    """

    jaxpr: Jaxpr
    arrays: tuple[Array, ...]
    names: tuple[str, ...]
    scale: int
    gradients: tuple[str, ...]
    parameters: tuple[str, ...]

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns the loss and the gradients."""
        # A Jaxpr is a ClosedJaxpr since JAX 0.11.
        closed = self.jaxpr if hasattr(self.jaxpr, "jaxpr") else ClosedJaxpr(self.jaxpr, ())
        return jaxpr_as_fun(closed)(*arrays)[: 1 + len(self.gradients)]


def scale_of(caller: str, loss_scale: Any) -> float:
    """Returns the number of a loss scale: of None, of a number, or of a loss scale.

    Raises:
        TypeError: `loss_scale` is none of them.
        ValueError: the scale is not above 0 and finite.
    """
    value = 1.0 if loss_scale is None else loss_scale
    if is_loss_scale(loss_scale) and loss_scale is not None:
        value = loss_scale.loss_scale
    if isinstance(value, bool) or not isinstance(value, (int, float, np.generic, np.ndarray, jax.Array)):
        raise TypeError(
            f"{caller}: loss_scale should be None, a number, or a loss scale such as "
            f"jmp.get_loss_scale(opt_state) or jmp.DynamicLossScale(). Got {type(loss_scale).__name__}."
        )
    if _is_traced(value):
        raise TypeError(f"{caller} reads values. Call it outside jit, on arrays.")
    number = float(np.asarray(value).reshape(()))
    if not 0 < number < np.inf:
        raise ValueError(f"{caller}: loss_scale should be above 0 and finite. Got {number}.")
    return number


def _is_traced(leaf: Any) -> bool:
    """Whether an array has no value yet: only an array with values is on devices."""
    try:
        return isinstance(leaf, jax.Array) and not leaf.devices()
    except jax.errors.ConcretizationTypeError:
        return True


def trace(caller: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """Traces a loss function and its backward pass; the loss scale is an argument of the program.

    Raises:
        TypeError: an argument is traced.
    """
    if any(_is_traced(leaf) for leaf in jax.tree.leaves((args, kwargs))):
        raise TypeError(f"{caller} reads values. Call it outside jit, on arrays.")
    gradients: list[str] = []

    @functools.wraps(call.fun)
    def step(*args: Any, **kwargs: Any) -> Any:
        scale = StaticLossScale(kwargs.pop(_SCALE))
        run = value_and_grad(call.fun, scale, call.argnums, call.has_aux, call.transform)
        value, grads = run(*args, **kwargs)
        floating = {
            name: leaf
            for name, leaf in zip(leaf_names(grads), jax.tree.leaves(grads))
            if jnp.issubdtype(leaf.dtype, jnp.inexact)
        }
        gradients[:] = [name.removesuffix("/value") for name in floating]
        return (value[0] if call.has_aux else value), list(floating.values())

    kinds = (np.ndarray,)
    traced = arguments.trace(step, args, {**kwargs, _SCALE: jnp.float32(1)}, True, kinds)
    fixed = constants(traced.jaxpr)
    names = (*("" for _ in fixed), *traced.names)
    arrays = (*fixed, *traced.arrays)
    jaxpr = without_constants(traced.jaxpr)
    return Program(jaxpr, arrays, names, names.index(_SCALE), tuple(gradients), call.differentiated)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a probe has measured in one run of a program.

    Attributes:
        sites: every site, by its path.
        records: what was measured at each site, with an axis for each loop around it.
        steps: for the body of each while loop, the numbers of the iterations that were kept.
        carried: as in `Tap`.
        outputs: the site of the loss, and of each gradient; None where nothing was measured.
        results: what was measured of the loss, and of each gradient.
    """

    sites: dict[Path, Site]
    records: dict[Path, np.ndarray]
    steps: dict[Path, np.ndarray]
    carried: dict[Path, Path | None]
    outputs: tuple[Path | None, ...]
    results: tuple[np.ndarray, ...]


class Tapped:
    """A program with a probe, compiled once for all loss scales."""

    def __init__(self, program: Program, probe: Probe, plan: Plan | None = None) -> None:
        self._program, self._plan = program, plan
        self._tap = Tap(probe, HANDLERS)
        self._outputs: tuple[Path | None, ...] = ()
        self._order: list[Path] = []
        self._run = jax.jit(self._measure, compiler_options=EVERY_CAST)

    def __call__(self, scale: float) -> Measured:
        """Runs the program at a loss scale."""
        arrays = list(self._program.arrays)
        arrays[self._program.scale] = jnp.float32(scale)
        found, results = jax.tree.map(np.asarray, self._run(arrays))
        records = dict(zip(self._order, found, strict=True))
        return Measured(
            self._tap.sites,
            {path: record for path, record in records.items() if path[-1] != STEPS},
            {path[:-1]: record for path, record in records.items() if path[-1] == STEPS},
            self._tap.carried,
            self._outputs,
            tuple(results),
        )

    def _measure(self, arrays: list[Array]) -> tuple[list[Array], list[Array]]:
        with self._tap.recording() as records:
            values = self._values(arrays)
        outputs = values[: 1 + len(self._program.gradients)]
        self._outputs = tuple(value.source for value in outputs)
        self._order = list(records)
        results = [self._tap.probe.measure(jnp.asarray(value.array)) for value in outputs]
        return list(records.values()), results

    def _near(self, name: str) -> str:
        return name if name.split("/")[0] in self._program.parameters else ""

    def _values(self, arrays: list[Array]) -> list[TapValue]:
        tap, where = self._tap, Where(plan=self._plan)
        wanted = [0] * len(arrays) if self._plan is None else self._plan.is_wanted
        inputs = [
            tap.input(array, name, where, number, self._near(name), bool(wanted[number]), name == _SCALE)
            for number, (array, name) in enumerate(zip(arrays, self._program.names))
        ]
        return tap.run(self._program.jaxpr, inputs, where)

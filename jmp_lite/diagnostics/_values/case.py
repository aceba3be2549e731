"""The call that a diagnosis examines: its checked options, and one trace from which all programs are made.

The user's Python runs once, but for the edits of remedies (see `edited`). The program as it runs, the
same without autocast, and that with a flag for each module are made from the jaxpr of that run.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..._autocast import Plan, Planner, Rules, given_rules, make_plan, make_rules, run, settings_of
from ..._autocast.report import AutocastOperation, operations_of
from ..._dtypes import DTypeLike
from ..._jaxpr import (
    Array,
    all_equations,
    check_function,
    constants,
    only_own_precisions,
    users_places,
)
from ..._jaxpr import trace as trace_call
from ..._paths import argument_names
from ..._scaling.loss_scale import LossScaleLike, NoOpLossScale, as_loss_scale
from ..._tree import is_traced
from .edited import Functions, functions_in
from .numbers import unread_numbers
from .reference import is_narrow
from .tap import Probe
from .trace import LossCall, LossProgram, Measured, Tapped, ValueAndGrad, trace

P = ParamSpec("P")
T = TypeVar("T")


class Options(TypedDict, total=False):
    """The options of every tool, as `doctor` documents them."""

    loss_scale: LossScaleLike | None
    argnums: int | Sequence[int] | Any
    has_aux: bool
    value_and_grad_fn: ValueAndGrad | None


@dataclasses.dataclass(eq=False)
class Case:
    """One call that is examined, with its options after all checks."""

    call: LossCall  # Of the function without its autocast.
    given: Rules  # Those of its autocast; without one, those of the dtype that is given.
    is_autocast: bool
    has_dtype: bool  # Whether a dtype is given.
    scale: float
    arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __post_init__(self) -> None:
        args, kwargs = self.arguments
        self.arguments = _with_arrays(self.call, args), kwargs
        # Traced once: the user's Python may have side effects, and all programs are made from this jaxpr.
        with only_own_precisions():
            self.traced = trace_call(self.call.fun, *self.arguments, True, (np.ndarray,))
        self.plain = make_rules(jnp.float32)
        self._plans: dict[int, tuple[Planner, Plan]] = {}  # By the `id` of their rules, which `self` keeps.

    @functools.cached_property
    def is_own(self) -> bool:
        """Whether the function runs as it is: it has half products, or half values and no dtype was given."""
        own = (each.on_tensor_cores if self.has_dtype else gives_half(each) for each in self.before)
        return not self.is_autocast and any(own)

    @functools.cached_property
    def rules(self) -> Rules:
        """The rules by which autocast runs the function; those of float32 if it runs as it is."""
        is_plain = not self.is_autocast and (self.given.dtype == jnp.float32 or self.is_own)
        return self.plain if is_plain else self.given

    @property
    def numbers(self) -> dict[str, float]:
        """The Python numbers among the arguments, by their paths."""
        args, kwargs = self.arguments
        named = zip(argument_names(self.call.fun, args, kwargs), jax.tree.leaves(self.arguments))
        return {name: leaf for name, leaf in named if isinstance(leaf, float)}

    def exact(self, states: Collection[str]) -> list[str]:
        """Returns the half values whose rounding is not known: arguments but for states, and numbers."""
        named = zip(self.traced.names, self.traced.arrays, strict=True)
        halves = (name for name, array in named if is_narrow(array) and name not in states)
        names = dict.fromkeys(name.split("/")[0] for name in halves)
        has_constants = any(map(is_narrow, constants(self.traced.jaxpr)))
        numbers = (f"the number on {line}" for line in unread_numbers(self.traced.jaxpr))
        return [*names, *(["constants"] if has_constants else []), *numbers]

    def planned(self, rules: Rules) -> tuple[Planner, Plan]:
        """Returns the plan of autocast by some rules, made once for those of the function and for none."""
        # A search asks for the plans of many rules, once each.
        if rules is not self.plain and rules is not self.rules:
            return make_plan(self.traced, rules)
        if id(rules) not in self._plans:
            self._plans[id(rules)] = planner, _ = make_plan(self.traced, rules)
            planner.scopes.check()
        return self._plans[id(rules)]

    def operations(self, rules: Rules) -> list[AutocastOperation]:
        """Returns the operations of the function, as autocast runs them by some rules."""
        _, plan = self.planned(rules)
        return list(operations_of(plan, rules.dtype, "", 1, self.traced.names, {}))

    @functools.cached_property
    def before(self) -> list[AutocastOperation]:
        """The operations of the function as it is."""
        return self.operations(self.plain)

    @functools.cached_property
    def program(self) -> LossProgram:
        """The function as it runs, with its backward pass."""
        return self.program_of(functools.partial(run, *self.planned(self.rules)))

    @functools.cached_property
    def functions(self) -> Functions:
        """The functions in the files of the user that the function and its backward pass run."""
        jaxprs = self.traced.jaxpr, self.program.jaxpr
        every = itertools.chain.from_iterable(map(all_equations, jaxprs))
        files = {file for equation in every for file, *_ in users_places(equation)}
        return functions_in([self.call.fun, self.arguments], files)

    @functools.cached_property
    def tapped(self) -> Tapped:
        """The program, with the smallest and the largest element of every value."""
        return Tapped(self.program, Probe())

    @functools.cached_property
    def measured(self) -> Measured:
        """These elements at the loss scale of the call."""
        return self.tapped(self.scale)

    def program_of(self, run_arrays: Callable[[Sequence[Array]], list[Array]]) -> LossProgram:
        """Returns a program with its backward pass, of a function of the arrays among the arguments."""
        call = dataclasses.replace(self.call, fun=self.traced.replayed(run_arrays))
        return trace(call, *self.arguments)


def gives_half(operation: AutocastOperation) -> bool:
    """Whether an operation returns half values, or rounds to few digits."""
    return any(map(is_narrow, operation.results)) or operation.name == "reduce_precision"


def _with_arrays(call: LossCall, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns arguments with the Python numbers that `jax.value_and_grad` differentiates as arrays."""
    # It traces them. Left as they are, they would be constants of the program, without a gradient.
    if call.value_and_grad_fn is not jax.value_and_grad:
        return args
    argnums = call.argnums if isinstance(call.argnums, Sequence) else (call.argnums,)

    def is_number(leaf):
        return isinstance(leaf, (float, complex)) and not isinstance(leaf, np.generic)

    changed = list(args)
    for number in argnums:
        if any(map(is_number, jax.tree.leaves(args[number]))):  # `jax.tree.map` would copy modules of NNX.

            def as_array(leaf):
                return jnp.asarray(leaf) if is_number(leaf) else leaf

            changed[number] = jax.tree.map(as_array, args[number])
    return tuple(changed)


@contextlib.contextmanager
def without_debugging() -> Iterator[None]:
    """Switches off what makes JAX raise at a NaN or inf."""
    # Whoever looks for one may have it on, and JAX would check what each program here returns:
    # https://docs.jax.dev/en/latest/debugging/flags.html.
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def tool(
    caller: str,
    fun: Callable[P, Any],
    dtype: DTypeLike | None,
    default: DTypeLike,
    answer: Callable[[Case], T],
    loss_scale: LossScaleLike | None = None,
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    value_and_grad_fn: ValueAndGrad | None = jax.value_and_grad,
) -> Callable[P, T]:
    """Checks the options of a tool, and returns a function of the arguments of `fun` with its answer.

    Without a `dtype` it is the `default`: float32 for a tool that examines a function as it is.
    """
    check_function(caller, fun)
    if value_and_grad_fn is None and (dtype is not None or loss_scale is not None):
        raise ValueError(
            f"{caller}: a step has its own dtypes and loss scale. Leave dtype and loss_scale out, or give "
            f"the loss function without value_and_grad_fn=None. Got {dtype!r} and {loss_scale!r}."
        )
    scale = _scale_of(caller, loss_scale)
    default = jnp.float32 if value_and_grad_fn is None else default
    plain, rules = given_rules(caller, fun, dtype, default)
    if rules.dtype == jnp.float32 != np.dtype(default):
        raise ValueError(f"{caller} compares float16 or bfloat16 with float32. Got float32.")
    # `find_nonfinite` examines a function of autocast to fp8 as it is, and compares nothing.
    if rules.in_fp8 and default != jnp.float32:
        raise ValueError(
            f"{caller} compares float16 or bfloat16 with float32. Got float8: give the same function in "
            'bfloat16. jmp.explain(jmp.autocast(fun, "float8"))(*args) says which matmuls run in fp8.'
        )
    call, is_autocast = LossCall(plain, argnums, has_aux, value_and_grad_fn), settings_of(fun) is not None

    @functools.wraps(fun)
    def tool_fun(*args: P.args, **kwargs: P.kwargs) -> T:
        _check_outside_jit(caller, (args, kwargs))
        with without_debugging():
            return answer(Case(call, rules, is_autocast, dtype is not None, scale, (args, kwargs)))

    return tool_fun


def _check_outside_jit(caller: str, tree: Any) -> None:
    if any(map(is_traced, jax.tree.leaves(tree))):
        raise TypeError(f"{caller} reads values. Call it outside jit, on arrays.")


def _scale_of(caller: str, loss_scale: LossScaleLike | None) -> float:
    """Returns the value of a loss scale or a number; 1 for None."""
    scale = NoOpLossScale() if loss_scale is None else as_loss_scale(loss_scale)
    if scale is None:
        raise TypeError(
            f"{caller}: loss_scale should be None, a number, or a loss scale such as "
            f"jmp.get_loss_scale(opt_state) or jmp.DynamicLossScale(). Got {type(loss_scale).__name__}."
        )
    _check_outside_jit(caller, scale.loss_scale)
    number = float(np.asarray(scale.loss_scale).reshape(()))
    if not 0 < number < np.inf:
        raise ValueError(f"{caller}: loss_scale should be above 0 and finite. Got {number}.")
    return number

"""`autocast`, and the parts of a call that other rooms use."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from .._dtypes import DTypeLike
from .._jaxpr import arguments
from .._jaxpr.arguments import Arguments
from .._jaxpr.precision import only_own_precisions
from .._jaxpr.read import Array
from .._jaxpr.scopes import AUTOCAST_SCOPE
from .._paths import shown
from .calls import HANDLERS
from .interpreter import Interpreter
from .keep import full_precision
from .planner import Planner
from .planning.plan import Plan, conversion
from .planning.rules import Operations, Patterns, Rules, ScopeRules, make_rules
from .planning.states import FLOAT32
from .planning.wanted import Wanted
from .value import Value

P = ParamSpec("P")
R = TypeVar("R")


@overload
def autocast(
    fun: Callable[P, R],
    dtype: DTypeLike = ...,
    *,
    allow: Operations = ...,
    deny: Operations = ...,
    infer: Operations = ...,
    rules: ScopeRules = ...,
    reduce_dtype: DTypeLike | None = ...,
    float32_results: Patterns = ...,
    half_sums: Patterns = ...,
) -> Callable[P, R]: ...


@overload
def autocast(
    fun: None = None,
    dtype: DTypeLike = ...,
    *,
    allow: Operations = ...,
    deny: Operations = ...,
    infer: Operations = ...,
    rules: ScopeRules = ...,
    reduce_dtype: DTypeLike | None = ...,
    float32_results: Patterns = ...,
    half_sums: Patterns = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


@arguments.in_two_calls
def autocast(
    fun: Callable[..., Any] | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    allow: Operations = (),
    deny: Operations = (),
    infer: Operations = (),
    rules: ScopeRules = (),
    reduce_dtype: DTypeLike | None = None,
    float32_results: Patterns = (),
    half_sums: Patterns = (),
) -> Callable[..., Any]:
    """Returns a function that runs `fun` with its matmuls and convolutions in half precision.

    The returned function takes and returns what `fun` does, with the same structure and dtypes. autocast
    rewrites the jaxpr of `fun` operation by operation, also inside jit, loops, branches, rematerialization
    and custom derivatives:

    - *allow*: the operations that Tensor Cores run (`dot_general`, `conv_general_dilated`,
      `ragged_dot_general`) take half inputs and return half. The hardware accumulates in float32.
    - *deny*: the operations that lose range or precision in half (exp, log, rsqrt, sums, ...) run in
      float32.
    - *infer*: element-wise operations, and others such as `max` and `concatenate`, run in the widest dtype
      among their operands. Numbers, looked-up embeddings and broadcast operands (biases, scales, masks)
      adapt: `h + bias` is in half if `h` is. The result is in half only if all its readers take half.
    - Every other operation keeps the dtypes with which it was traced.

    autocast only ever changes float32. Integers, float64, complex, fp8 and the half values of your own stay
    as they are, and so does a matmul with its own `precision=`. The matmuls that stay float32 follow
    `jax_default_matmul_precision`. Weights stay float32 and are cast once, and the gradients of all uses of a
    weight are summed in float32. The matmuls of the backward pass run in half under both
    `jax.grad(autocast(fun))` and `autocast(jax.grad(fun))`. float16 needs loss scaling: `with_loss_scale`.

    NNX modules among the arguments are updated as `fun` updates them (batch statistics, RNG counts). Call the
    function under `jax.jit`, because outside of it every call traces `fun` again. A cast of a float32 value
    to float32 leaves no trace in a jaxpr, and neither does a branch on `x.dtype`: use `keep_float32`,
    `full_precision` or `rules` instead. Pallas kernels, callbacks and FFI calls run as they are.

    Args:
        fun: any function that JAX can trace: a loss, a model's apply, a whole train step. Its arguments
            and outputs may hold anything; only `jax.Array`s are traced. Without `fun`, autocast returns a
            decorator.
        dtype: `jnp.bfloat16` or `jnp.float16`, or one of their names. With float32 the function runs as
            under `full_precision`, so that one flag can set the precision of a program. `"float8"` means
            bfloat16 with large matmuls in fp8; it is experimental, and has no forward-mode derivative
            (`jax.jvp`).
        allow: operations to run with half inputs. An operation is the name of a primitive (`"tanh"`, as
            `jax.make_jaxpr` prints it) or the primitive itself (`jax.lax.tanh_p`). `"-tanh"` takes the
            operation off the list, so that it keeps the dtypes with which it was traced.
        deny: operations to run in float32, given as in `allow`.
        infer: operations to run in the widest dtype among their operands, given as in `allow`.
        rules: exceptions by scope, as pairs or a mapping, `{"decoder/head": "float32"}`, or as `Rule`s,
            whose compute dtype counts. A pattern selects `jax.named_scope`s, Flax Linen modules, names of
            jitted functions, and paths of arguments (the way to name an NNX or Equinox module), with
            everything inside them. `*` stands for part of one name, `**` for several names, and `"**"` alone
            selects everything, also what stands in no scope. Operations that take a selected argument run in
            float32. The half dtype makes an exception within a wider rule. The first rule that matches wins,
            whether it selects a scope or an argument. A rule has to select something, unless it is a `Rule`
            with `optional=True`. With dtype `"float8"`, a rule may also give bfloat16 (no fp8 here) or
            `"float8"` (fp8 even for small matmuls).
        reduce_dtype: the dtype in which the matmuls of weight gradients return their results, which are then
            summed over devices: float32, or None for the half dtype, which moves half the bytes. The inputs
            of these matmuls are half in both cases, and the gradients of activations stay in half. The option
            affects a `dot_general` one of whose operands is a float32 argument of `fun`, or a reshape,
            transpose or slice of one. It does not affect convolutions, because XLA widens the inputs of a
            convolution that returns float32. With float32 there is no forward-mode derivative (`jax.jvp`). A
            `jax.vmap` around the function makes one weight gradient for each example, so put it inside `fun`.
        float32_results: a pattern or several, as in `rules`. The matmuls (`dot_general`) that they select
            take half inputs and return float32, which costs no precision: Tensor Cores accumulate in float32
            anyway. Use it for logits. The matmuls of their gradients take half inputs and return half.
        half_sums: a pattern or several over scopes, as in `rules`. The residual sums that they select return
            half. A residual sum adds the result of a matmul to an array of its shape, and matmuls read it
            later, directly or through a norm; the sums of losses and accumulators stay float32. Biases that
            are added to the result of a matmul in front of a norm are added in half too. A residual stream in
            half moves fewer bytes, but its rounding errors accumulate across layers, so the stream of a
            transformer stays float32 by default. The carry of a `scan` that such a sum computes is half as
            well.

    Returns:
        A function with the signature of `fun`.

    Raises:
        ValueError, TypeError: an option is malformed. On a call: a rule that is not optional selects nothing;
            a pattern of `float32_results` selects no matmul with half inputs, or selects a convolution; a
            pattern of `half_sums` selects no residual sum.

    Examples:
        >>> def loss(w, x):
        ...     return jnp.mean(jax.nn.softmax(x @ w) ** 2)
        >>> w, x = jnp.ones((4, 8)), jnp.ones((2, 4))
        >>> jax.jit(jax.grad(jmp.autocast(loss, jnp.float16)))(w, x).dtype
        dtype('float32')
        >>> print(jmp.explain(jmp.autocast(loss, jnp.float16))(w, x).operations[0])  # doctest: +ELLIPSIS
        allow     dot_general          float16[2,4] float16[4,8] -> float16[2,8]
            dot_general is on the allow list; /; ...

        As a decorator:

        >>> @jmp.autocast(dtype="float16", deny=["tanh"])
        ... def apply(w, x):
        ...     return jnp.tanh(x @ w)
        >>> apply(w, x).dtype
        dtype('float32')

    Source: PyTorch's autocast (https://pytorch.org/docs/stable/amp.html), for its lists and its meaning.
    """
    settings = make_rules(dtype, allow, deny, infer, rules, reduce_dtype, float32_results, half_sums)
    return _Decorator(settings) if fun is None else _autocast(fun, settings)


@dataclasses.dataclass(frozen=True)
class _Decorator:
    """What `autocast` returns without a function."""

    settings: Rules

    def __call__(self, *given: Any, **options: Any) -> Callable[..., Any]:
        if len(given) != 1 or options:
            got = ", ".join([*map(shown, given), *(f"{name}=" for name in options)]) or "nothing"
            raise TypeError(
                f"autocast without a function returns a decorator, which takes one function. Got {got}; "
                "write autocast(fun, dtype)(*args)."
            )
        return _autocast(given[0], self.settings)

    def __enter__(self) -> None:
        raise TypeError(
            "autocast is not a context manager, as torch.autocast is: it rewrites a function, which JAX "
            "traces. Wrap the function, as in loss_fn = jmp.autocast(loss_fn, 'float16'), or decorate it: "
            "@jmp.autocast(dtype='float16')."
        )

    def __exit__(self, *error: object) -> None: ...


def _autocast(fun: Callable[..., Any], settings: Rules) -> Callable[..., Any]:
    arguments.check_function("autocast", fun, ", or as a decorator @autocast(dtype='float16')")

    @functools.wraps(fun)
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        if settings.dtype == jnp.float32:
            return full_precision(fun)(*args, **kwargs)
        traced, planner, plan = prepare(fun, settings, args, kwargs)
        planner.scopes.check()
        if plan.in_fp8:
            from .._float8.action import warn_without_float8  # Loaded when a user asks for fp8.

            warn_without_float8()
        with _forward_mode_explained(_option_without_forward_mode(settings, plan)):
            return traced.outputs(run(planner, plan, traced.arrays))

    # With the code: `functools.wraps` copies attributes, so a wrapper has that of another function. With the
    # function itself, its arrays would live until Python looks for cycles.
    autocast_fun._autocast = (autocast_fun.__code__, fun, settings)  # type: ignore[attr-defined]
    return autocast_fun


@contextlib.contextmanager
def _forward_mode_explained(option: str) -> Iterator[None]:
    """Replaces JAX's error for a forward-mode derivative by one that names the option which forbids it."""
    # JAX takes the derivative while the plan runs, so its errors about derivatives come out here.
    try:
        yield
    except TypeError as error:  # JAX: "can't apply forward-mode differentiation (jvp) to a ..."
        if "forward-mode" not in str(error) or not option:
            raise
        raise TypeError(
            f"autocast with {option} has no forward-mode derivative: no jax.jvp, jax.jacfwd, or "
            "jax.linearize. Use reverse mode (jax.grad, jax.jacrev), put autocast around the derivative, "
            "as in autocast(jax.jacfwd(fun), ...), or leave the option out there."
        ) from error


def _option_without_forward_mode(settings: Rules, plan: Plan) -> str:
    """Returns the option whose matmuls have reverse-mode derivatives alone; empty for none."""
    if plan.in_fp8:
        return "dtype 'float8'"
    return "" if settings.reduce_dtype is None else "reduce_dtype='float32'"


def settings_of(fun: Callable[..., Any]) -> tuple[Callable[..., Any], Rules] | None:
    """Returns the function and the rules that were given to the `autocast` which made `fun`, if one did.

    Raises:
        TypeError: `fun` is a transform of a function that autocast made.
    """
    code, *settings = getattr(fun, "_autocast", (None,))
    if code is None:
        return None
    # A wrapper around it, such as that of jax.grad, copies its attributes.
    if code != getattr(fun, "__code__", None):
        raise TypeError(
            f"{fun!r} is a transform of a function that autocast returned. Give the function within, as in "
            "explain(autocast(loss_fn))(params, batch). To see the backward pass as well, put autocast "
            "around the transform: explain(autocast(jax.value_and_grad(loss_fn)))."
        )
    wrapped, rules = settings
    return wrapped, rules


def given_rules(
    caller: str, fun: Callable[..., Any], dtype: DTypeLike | None, default: DTypeLike
) -> tuple[Callable[..., Any], Rules]:
    """Returns a function without its autocast, and the rules by which autocast runs it, or would run it.

    Args:
        caller: the name of the function that users call.
        fun: a function that autocast returned, or any other.
        dtype: the dtype for a function that autocast did not return; None for `default`.
        default: the default dtype.

    Raises:
        TypeError: `fun` is a transform of a function that autocast returned.
        ValueError: autocast returned `fun`, which has a dtype of its own, and `dtype` is given as well.
    """
    settings = settings_of(fun)
    if settings is not None and dtype is not None:
        raise ValueError(
            f"{caller} takes a dtype for a plain function. autocast returned this function, with the dtype "
            f"{settings[1].dtype.name}; leave dtype out."
        )
    return settings or (fun, make_rules(default if dtype is None else dtype))


def prepare(
    fun: Callable[..., Any],
    rules: Rules,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    report_kinds: tuple[type, ...] = (),
) -> tuple[Arguments, Planner, Plan]:
    """Traces a call of `fun` and plans it. `planner.scopes.check` says whether each rule selects something.

    For a report all arguments get names, and objects of `report_kinds` are traced beside arrays.
    """
    # Names take time to make, so a call has them only where an option selects arguments.
    named = bool(report_kinds or rules.scopes or rules.float32_results) or rules.reduce_dtype is not None
    # A precision in the jaxpr is then one for which the program asks (`_jaxpr/precision.py`).
    with only_own_precisions():
        traced = arguments.trace(fun, args, kwargs, named, report_kinds)
    return traced, *make_plan(traced, rules)


def make_plan(traced: Arguments, rules: Rules) -> tuple[Planner, Plan]:
    planner = Planner(rules)
    # The caller gets the dtypes of the program, so no output is wanted in half.
    states = [planner.argument(array, name) for array, name in zip(traced.arrays, traced.names)]
    return planner, planner.plan(traced.jaxpr, states, [Wanted.NO] * len(traced.jaxpr.jaxpr.outvars))


def run(
    planner: Planner, plan: Plan, arrays: Sequence[Array], kind: type[Interpreter] = Interpreter
) -> list[Array]:
    """Runs a plan of `planner` on arrays; returns the outputs of its jaxpr in the dtypes of the program."""
    with jax.named_scope(AUTOCAST_SCOPE):
        if not plan.changed:  # Nothing to carry out: the program runs as it was traced.
            return jaxpr_as_fun(plan.jaxpr)(*arrays)
        interpreter = kind(planner, HANDLERS)
        try:
            values = interpreter.run(plan, list(map(Value, arrays)))
            return interpreter.take_all(values, [conversion(state, FLOAT32) for state in plan.results])
        finally:  # JAX's caches keep the interpreter alive, see `Planner.forget`.
            interpreter.forget()

"""The functions that users call: `autocast`, `full_precision` and `keep_f32`."""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive, jaxpr_as_fun

from .._dtypes import DTypeLike
from .._paths import argument_names
from .calls import CALLS
from .interpreter import Interpreter, Value
from .jaxprs import AUTOCAST_SCOPE, FULL_PRECISION_SCOPE, KEEP_F32_NAME
from .plan import Planner
from .rules import Rules, make_rules
from .states import Plan, Wanted

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Operations = Iterable[str | Primitive]


def autocast(
    fun: F,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    allow: Operations = (),
    deny: Operations = (),
    infer: Operations = (),
    rules: Mapping[str, DTypeLike] | Iterable[tuple[str, DTypeLike]] = (),
) -> F:
    """Returns `fun` with its matrix products and convolutions in half precision, the model unchanged.

    The returned function takes and returns what `fun` does, with the same structure and dtypes. Its jaxpr is
    rewritten, operation by operation, inside jit, loops, branches, rematerialization and custom derivatives
    as well:

    - *allow*: what Tensor Cores run (`dot_general`, `conv_general_dilated`, `ragged_dot_general`) takes half
      operands and gives a half result; the hardware accumulates in float32.
    - *deny*: what loses range or precision in half (exp, log, rsqrt, sums, ...) takes and gives float32.
    - *infer*: element-wise operations run in the widest of their operands' types, where numbers, looked-up
      embeddings and what is broadcast (biases, scales, masks) take the type of what they meet; and in half
      only if all that reads the result takes half.
    - Everything else keeps the dtypes with which it was traced.

    Only float32 is ever changed: integers, float64, complex, fp8, and what the program made half itself stay
    as they are, and so does a product with a `precision=` of its own. Weights stay float32 and are cast once;
    the gradients of all their uses are summed in float32. Both `jax.grad(autocast(fun))` and
    `autocast(jax.grad(fun))` run their backward products in half. float16 needs loss scaling:
    `with_loss_scale`.

    NNX modules among the arguments are updated as `fun` would (batch statistics, RNG counts). Call it
    under `jax.jit`: outside, every call traces `fun` anew. A cast to float32 of what is float32 already
    leaves no trace in a jaxpr, and neither does a branch on `x.dtype`: use `keep_f32`, `full_precision` or
    `rules`. What is inside a Pallas kernel, a callback or an FFI call stays as it is.

    Args:
        fun: any function that JAX can trace: a loss, a model's apply, a whole train step. Its arguments
            and outputs may hold anything; only `jax.Array`s are traced.
        dtype: `jnp.bfloat16` or `jnp.float16`, or one of their names.
        allow, deny, infer: primitives to put on a list, by name (`"tanh"`, as `jax.make_jaxpr` prints it)
            or as the primitive itself (`jax.lax.tanh_p`). `"-tanh"` takes one off its list, after which it
            keeps the dtypes with which it was traced.
        rules: exceptions by scope, pairs or a mapping of pattern and dtype: `{"decoder/head": "float32"}`.
            A pattern selects `jax.named_scope`s, Flax Linen modules, names of jitted functions, and the
            path of an argument (the way to name an NNX or Equinox module), with all that lies within; `*`
            stands for part of one name, `**` for several names. What takes a selected argument runs in
            float32. The half dtype is an exception within a wider rule. The first that matches wins.

    Returns:
        A function with the signature of `fun`.

    Raises:
        ValueError, TypeError: an option is malformed; on a call, a rule selects nothing.

    Source: PyTorch's autocast (https://pytorch.org/docs/stable/amp.html), for its lists and its meaning.

    >>> import jmp_lite as jmp
    >>> def loss(w, x):
    ...     return jnp.mean(jax.nn.softmax(x @ w) ** 2)
    >>> w, x = jnp.ones((4, 8)), jnp.ones((2, 4))
    >>> jax.jit(jax.grad(jmp.autocast(loss, jnp.float16)))(w, x).dtype
    dtype('float32')
    >>> print(jmp.explain(jmp.autocast(loss, jnp.float16))(w, x).operations[0])  # doctest: +ELLIPSIS
    allow     dot_general          float16[2,4] float16[4,8] -> float16[2,8]
        dot_general is on the allow list; /; ...
    """
    settings = make_rules(dtype, allow, deny, infer, rules)

    @functools.wraps(fun)
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        traced = trace(fun, settings, args, kwargs)
        return traced.outputs(run(traced, traced.arrays))

    autocast_fun._autocast = (autocast_fun, fun, settings)  # type: ignore[attr-defined]
    return autocast_fun  # type: ignore[return-value]


def settings_of(fun: Callable[..., Any]) -> tuple[Callable[..., Any], Rules]:
    """Returns the function and the rules that were given to the `autocast` which made `fun`.

    Raises:
        TypeError: autocast did not make `fun`.
    """
    made, *settings = getattr(fun, "_autocast", (None,))
    if made is not fun:  # A wrapper around it, such as that of jax.grad, copies its attributes.
        raise TypeError(
            f"Expected a function that autocast returned, got {fun!r}. Give the function within, as in "
            "explain(autocast(loss_fn))(params, batch); to see the backward pass as well, "
            "explain(autocast(jax.value_and_grad(loss_fn)))."
        )
    wrapped, rules = settings
    return wrapped, rules


_ARRAY = object()  # Stands for an output that is an array.


class Traced(NamedTuple):
    """A function's jaxpr, and how autocast will run it.

    Attributes:
        planner: what made the plan.
        plan: how the jaxpr is run.
        names: the path of each input of the jaxpr among the arguments; empty if nobody asked.
        arrays: the arrays among the arguments, the inputs of the jaxpr.
        outputs: makes the function's outputs of those of the jaxpr.
    """

    planner: Planner
    plan: Plan
    names: tuple[str, ...]
    arrays: list[Any]
    outputs: Callable[[list[Any]], Any]


def trace(
    fun: Callable[..., Any],
    rules: Rules,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    with_names: bool = False,
) -> Traced:
    """Traces `fun`, whose arguments may hold anything, and plans it.

    Only `jax.Array`s are traced; everything else reaches the function as it is, as in a plain call. The names
    of the arguments, which take time to make, are there if the rules need them or `with_names`.
    """
    with_names = with_names or bool(rules.scopes)
    finish = None
    if _holds_nnx_objects((args, kwargs)):
        from .. import nnx  # Only here: whoever passes an NNX module has Flax.

        fun, args, finish = nnx.split_objects(fun, args, kwargs)
        kwargs = {}
    leaves, structure = jax.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    arrays = [leaves[place] for place in places]
    made: dict[str, Any] = {}

    def flat(*arrays: Any) -> list[Any]:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        args, kwargs = jax.tree.unflatten(structure, filled)
        outputs, made["structure"] = jax.tree.flatten(fun(*args, **kwargs))
        # The arrays go out through the trace; kept here they would leak from it.
        made["leaves"] = [_ARRAY if isinstance(output, jax.Array) else output for output in outputs]
        return [output for output in outputs if isinstance(output, jax.Array)]

    closed = jax.make_jaxpr(flat)(*arrays)

    def outputs(results: list[Any]) -> Any:
        given = iter(results)
        leaves = [next(given) if leaf is _ARRAY else leaf for leaf in made["leaves"]]
        output = jax.tree.unflatten(made["structure"], leaves)
        return finish(output) if finish else output

    planner = Planner(rules)
    names = [""] * len(leaves)
    if with_names:
        names = argument_names(fun, args, kwargs)
        if finish:  # Of an NNX module: a parameter of ours comes first, and its value last.
            names = [name.split("/", 1)[1].removesuffix("/value") for name in names]
    names = tuple(names[place] for place in places)
    states = [planner.argument(array, name) for array, name in zip(arrays, names)]
    plan = planner.plan(closed, states, [Wanted.NO] * len(closed.jaxpr.outvars))
    planner.scopes.check()
    return Traced(planner, plan, names, arrays, outputs)


def run(traced: Traced, arrays: Sequence[Any]) -> list[Any]:
    """Runs a traced function by its plan, on its arrays or others like them; returns the jaxpr's outputs."""
    with jax.named_scope(AUTOCAST_SCOPE):
        if not traced.plan.changed:
            return jaxpr_as_fun(traced.plan.jaxpr)(*arrays)
        interpreter = Interpreter(traced.planner, CALLS)
        values = interpreter.run(traced.plan, list(map(Value, traced.plan.inputs, arrays)))
        return [interpreter.traced(value) for value in values]


def _holds_nnx_objects(tree: Any) -> bool:
    """Whether an NNX module is in `tree`: what it is given to changes it in place."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    is_object = lambda node: isinstance(node, (nnx.Pytree, nnx.Variable))
    return any(map(is_object, jax.tree.leaves(tree, is_leaf=is_object)))


def full_precision(fun: F) -> F:
    """Returns `fun` kept out of any `autocast` around it: everything in it runs as it was written.

    What autocast made half before is cast up to float32 on the way in. An `autocast` inside it switches on
    again. It does nothing outside of autocast. Also a decorator.

    Args:
        fun: any function that JAX can trace.

    Source: torch's `autocast(enabled=False)`.

    >>> import jmp_lite as jmp
    >>> head = jmp.full_precision(lambda w, h: h @ w)
    >>> x = jnp.ones((2, 2))
    >>> report = jmp.explain(jmp.autocast(lambda x: head(x, x @ x)))(x)
    >>> [operation.inputs[0] for operation in report.operations]
    ['bfloat16[2,2]', 'float32[2,2]']
    """

    @functools.wraps(fun)
    def full_precision_fun(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(FULL_PRECISION_SCOPE):
            return fun(*args, **kwargs)

    return full_precision_fun  # type: ignore[return-value]


def keep_f32(x: T) -> T:
    """Returns the tree `x`, whose float32 values `autocast` keeps in float32 from here on.

    `x.astype(jnp.float32)` says nothing to autocast, since `x` is float32 already where the program is
    traced. A product of the value still takes half operands.

    Args:
        x: a tree of arrays of any dtype.

    >>> import jmp_lite as jmp
    >>> fun = jmp.autocast(lambda x: jnp.tanh(jmp.keep_f32(x @ x)) @ x)
    >>> report = jmp.explain(fun)(jnp.ones((2, 2)))
    >>> [(operation.name, operation.inputs[0]) for operation in report.operations][1:3]
    [('name', 'float32[2,2]'), ('tanh', 'float32[2,2]')]
    """
    return checkpoint_name(x, KEEP_F32_NAME)

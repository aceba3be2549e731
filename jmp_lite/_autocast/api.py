"""The functions that users call: `autocast`, `full_precision` and `keep_f32`."""

import difflib
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive, jaxpr_as_fun

from .._dtypes import DTypeLike
from .._path import leaf_names
from .interpreter import Interpreter, Value
from .jaxprs import AUTOCAST_SCOPE, FULL_PRECISION_SCOPE, KEEP_F32_NAME
from .plan import Plan, Planner
from .rules import Rules, make_rules

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
    """TODO."""
    settings = make_rules(dtype, allow, deny, infer, rules)

    @functools.wraps(fun)
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        traced = trace(fun, settings, args, kwargs)
        if not traced.plan.changed:
            return traced.outputs(jaxpr_as_fun(traced.plan.jaxpr)(*traced.arrays))
        with jax.named_scope(AUTOCAST_SCOPE):
            interpreter = Interpreter(traced.planner)
            values = interpreter.run(traced.plan, list(map(Value, traced.plan.inputs, traced.arrays)))
            return traced.outputs([interpreter.traced(value) for value in values])

    autocast_fun.settings = (fun, settings)  # type: ignore[attr-defined]
    return autocast_fun  # type: ignore[return-value]


class Traced(NamedTuple):
    """A function's jaxpr, and how autocast will run it.

    Attributes:
        planner: what made the plan.
        plan: how the jaxpr is run.
        arrays: the arrays among the arguments, the inputs of the jaxpr.
        outputs: makes the function's outputs of those of the jaxpr.
    """

    planner: Planner
    plan: Plan
    arrays: list[Any]
    outputs: Callable[[list[Any]], Any]


def trace(fun: Callable[..., Any], rules: Rules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Traces `fun`, whose arguments may hold anything, and plans it.

    Only `jax.Array`s are traced; everything else reaches the function as it is, as in a plain call.
    """
    finish = None
    if _holds_nnx_objects((args, kwargs)):
        from .. import nnx  # Only here: whoever passes an NNX module has Flax.

        fun, args, finish = nnx.split_objects(fun, args, kwargs)
        kwargs = {}
    leaves, structure = jax.tree.flatten((args, kwargs))
    names = leaf_names((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    arrays = [leaves[place] for place in places]
    made: dict[str, Any] = {}

    def flat(*arrays: Any) -> list[Any]:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        args, kwargs = jax.tree.unflatten(structure, filled)
        made["leaves"], made["structure"] = jax.tree.flatten(fun(*args, **kwargs))
        return [leaf for leaf in made["leaves"] if isinstance(leaf, jax.Array)]

    closed = jax.make_jaxpr(flat)(*arrays)
    # What is left in `made` must not hold on to the tracers of a trace that has ended.
    static = [None if isinstance(leaf, jax.Array) else (leaf,) for leaf in made["leaves"]]
    structure_out = made["structure"]
    made.clear()

    def outputs(results: list[Any]) -> Any:
        given = iter(results)
        output = jax.tree.unflatten(
            structure_out, [next(given) if leaf is None else leaf[0] for leaf in static]
        )
        return finish(output) if finish else output

    planner = Planner(rules)
    states = [planner.argument(array, names[place]) for place, array in zip(places, arrays)]
    plan = planner.plan(closed, states, [False] * len(closed.jaxpr.outvars))
    _check_rules(planner)
    return Traced(planner, plan, arrays, outputs)


def _holds_nnx_objects(tree: Any) -> bool:
    """Whether Flax NNX is in use and a module of it in `tree`: it is changed in place by what it is given to."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    is_object = lambda node: isinstance(node, (nnx.Pytree, nnx.Variable))
    return any(map(is_object, jax.tree.leaves(tree, is_leaf=is_object)))


def _check_rules(planner: Planner) -> None:
    """A rule that selects nothing is a mistake that would leave a part of the model in half."""
    for pattern, _ in planner.rules.scopes:
        if pattern not in planner.patterns_used:
            near = difflib.get_close_matches(pattern, planner.paths_seen, n=3, cutoff=0.3)
            hint = f" Close to it are {', '.join(map(repr, near))}." if near else ""
            raise ValueError(
                f"The rule for '{pattern}' selects nothing: no named scope, Flax module, jitted function or "
                f"argument that the function uses has that name.{hint} `explain` lists the scopes."
            )


def full_precision(fun: F) -> F:
    """TODO"""

    @functools.wraps(fun)
    def full_precision_fun(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(FULL_PRECISION_SCOPE):
            return fun(*args, **kwargs)

    return full_precision_fun  # type: ignore[return-value]


def keep_f32(x: T) -> T:
    """TODO"""
    return checkpoint_name(x, KEEP_F32_NAME)

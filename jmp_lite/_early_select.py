"""Chooses between a new and an old state at the place where each new value is computed.

Choosing afterwards, `select(finite, new, old)` over the results, leaves two versions of every moment in
the program: the one that the parameter update reads and the one that is stored. XLA must then keep the
old value until both are done, and on the CPU it copies every moment to do so. Chosen where it is born
there is one version, and the step is fused and runs in place as it does without a choice.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Literal

from ._tree import select_tree


def update_or_keep(
    update: Callable[..., tuple[Any, Any]], finite: jax.Array, updates: Any, state: Any, params: Any
) -> tuple[Any, Any]:
    """Returns `update(updates, state, params)`, with the old state where `finite` is false.

    Args:
        update: the update function of an optax transform.
        finite: a boolean scalar, shape `()`.
        updates, state, params: what `update` takes.

    Returns:
        The updates, meaningful only where `finite`, and the state, bit for bit the old one elsewhere.
    """
    jaxpr, shapes = jax.make_jaxpr(update, return_shape=True)(updates, state, params)
    old = [jnp.asarray(leaf) for leaf in jax.tree.leaves(state)]
    structures = [jax.tree.structure(tree) for tree in shapes]
    if structures[1] != jax.tree.structure(state):
        raise ValueError(
            "The optimizer's update returned a state of another structure than it was given: "
            f"{structures[1]}, not {jax.tree.structure(state)}."
        )
    outputs = jaxpr.jaxpr.outvars
    new = outputs[len(outputs) - len(old) :]
    computed = {var for equation in jaxpr.jaxpr.eqns for var in equation.outvars}
    born = {
        var: leaf
        for var, leaf in zip(new, old)
        if not isinstance(var, Literal)
        and var in computed
        and (var.aval.shape, var.aval.dtype) == (leaf.shape, leaf.dtype)
    }

    values = _evaluate(jaxpr, jax.tree.leaves((updates, state, params)), finite, born)

    def read(var: Any) -> Any:
        return jnp.asarray(var.val) if isinstance(var, Literal) else values[var]

    def kept(var: Any, leaf: Any) -> Any:
        chosen_already = not isinstance(var, Literal) and born.get(var) is leaf
        return read(var) if chosen_already else _select(finite, read(var), leaf)

    new_state = [kept(var, leaf) for var, leaf in zip(new, old)]
    new_updates = [read(var) for var in outputs[: len(outputs) - len(old)]]
    return jax.tree.unflatten(structures[0], new_updates), jax.tree.unflatten(structures[1], new_state)


def _evaluate(jaxpr: Any, arguments: list[Any], finite: jax.Array, born: dict[Any, Any]) -> dict[Any, Any]:
    """Runs the equations of `jaxpr`; a variable in `born` keeps its old value unless `finite`."""
    variables = (*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars)
    values = dict(zip(variables, (*jaxpr.consts, *arguments), strict=True))
    for equation in jaxpr.jaxpr.eqns:
        operands = [var.val if isinstance(var, Literal) else values[var] for var in equation.invars]
        source = equation.source_info
        stack = source_info_util.current_name_stack() + source.name_stack
        with source_info_util.user_context(source.traceback, name_stack=stack), equation.ctx.manager:
            parameters = equation.primitive.get_bind_params(equation.params)
            results = equation.primitive.bind(*operands, **parameters)
        for var, value in zip(
            equation.outvars, results if equation.primitive.multiple_results else [results]
        ):
            values[var] = select_tree(finite, value, born[var]) if var in born else value
    return values


def _select(finite: jax.Array, new: Any, old: Any) -> Any:
    """`select_tree` of one leaf, which may change dtype on the first step, as in some optax states."""
    if new is old:
        return old
    if not jnp.issubdtype(new.dtype, jax.dtypes.extended):
        dtype = jnp.result_type(new, old)
        new, old = new.astype(dtype), old.astype(dtype)
    return select_tree(finite, new, old)

"""Chooses between a new and an old state at the place where each new value is computed.

Choosing afterwards, `select(finite, new, old)` over the results, leaves two versions of every moment in
the program: the one that the parameter update reads and the one that is stored. XLA must then keep the
old value until both are done, and on the CPU it copies every moment to do so. Chosen where it is born
there is one version, and the step is fused and runs in place as it does without a choice.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Literal

from .._tree import has_dtype, select_tree
from .finite import is_inexact, leaves_finite
from .known_sums import find_known_sums


class TracedUpdate:
    """An optimizer's update, to be run in two parts: what tells if the gradients are finite, and the rest."""

    def __init__(
        self,
        update: Callable[..., tuple[Any, Any]],
        updates: Any,
        state: Any,
        params: Any,
        loss_scale: Any = None,
    ) -> None:
        """Traces `update(updates, state, params)`, the update function of an optax transform.

        Args:
            update: the function.
            updates, state, params: what it takes.
            loss_scale: the factor, shape `()`, by which it may divide the gradients.

        Raises:
            ValueError: the state that it returns has another structure than the one it was given.
        """
        closed, shapes = jax.make_jaxpr(update, return_shape=True)(updates, state, params)
        self._structures = [jax.tree.structure(tree) for tree in shapes]
        if self._structures[1] != jax.tree.structure(state):
            raise ValueError(
                "The optimizer's update returned a state of another structure than it was given: "
                f"{self._structures[1]}, not {jax.tree.structure(state)}."
            )
        self._jaxpr = closed.jaxpr
        self._updates = updates
        self._state = [jnp.asarray(leaf) for leaf in jax.tree.leaves(state)]
        variables = (*self._jaxpr.constvars, *self._jaxpr.invars)
        arguments = (*closed.consts, *jax.tree.leaves((updates, state, params)))
        self._values = dict(zip(variables, arguments, strict=True))
        self._scales = [var for var, value in self._values.items() if value is loss_scale]
        with contextlib.suppress(TypeError, jax.errors.ConcretizationTypeError):
            self._scales.append(float(loss_scale))  # Known while tracing, it is a number in the jaxpr.
        self._done: set[int] = set()

    def leaves_finite(self) -> tuple[jax.Array, jax.Array]:
        """Returns whether the gradients are finite, with no sum of our own if the optimizer makes one.

        Returns:
            For each leaf of the gradients whether it is finite, shape `(number of leaves,)`, and whether they
            all are, shape `()`.
        """
        leaves = jax.tree.leaves(self._updates)
        gradients = {
            place: var
            for place, (leaf, var) in enumerate(zip(leaves, self._jaxpr.invars))
            if is_inexact(leaf)
        }
        floating = all(has_dtype(leaves[place], jnp.floating) for place in gradients)
        updates = self._jaxpr.outvars[: len(self._jaxpr.outvars) - len(self._state)]
        known = None
        if floating:
            known = find_known_sums(self._jaxpr, list(gradients.values()), updates, self._scales)
        if known is None:
            flags = leaves_finite(self._updates)
            return flags, flags.all()
        self._evaluate(known.needed)
        finite = lambda var: jnp.isfinite(self._values[var].reshape(()))
        flags = [jnp.asarray(True)] * len(leaves)
        for place, var in zip(gradients, known.leaves):
            flags[place] = finite(var)
        return jnp.stack(flags), finite(known.total)

    def run(self, finite: jax.Array) -> tuple[Any, Any]:
        """Runs the update, which keeps the old state where `finite` is false.

        Args:
            finite: a boolean scalar, shape `()`.

        Returns:
            The updates, meaningful only where `finite`, and the state, bit for bit the old one elsewhere.
        """
        outputs, old = self._jaxpr.outvars, self._state
        new = outputs[len(outputs) - len(old) :]
        computed = {var for equation in self._jaxpr.eqns for var in equation.outvars}
        born = {
            var: leaf
            for var, leaf in zip(new, old)
            if not isinstance(var, Literal)
            and var in computed
            and var not in self._values
            and (var.aval.shape, var.aval.dtype) == (leaf.shape, leaf.dtype)
        }
        self._evaluate(range(len(self._jaxpr.eqns)), finite, born)

        def kept(var: Any, leaf: Any) -> Any:
            chosen_already = not isinstance(var, Literal) and born.get(var) is leaf
            return self._read(var) if chosen_already else _select(finite, self._read(var), leaf)

        new_state = [kept(var, leaf) for var, leaf in zip(new, old)]
        new_updates = [self._read(var) for var in outputs[: len(outputs) - len(old)]]
        return tuple(map(jax.tree.unflatten, self._structures, (new_updates, new_state)))

    def _read(self, var: Any) -> Any:
        return jnp.asarray(var.val) if isinstance(var, Literal) else self._values[var]

    def _evaluate(
        self, places: Iterable[int], finite: jax.Array | None = None, born: dict[Any, Any] | None = None
    ) -> None:
        """Runs equations, each once; a variable in `born` keeps its old value unless `finite`."""
        for place in places:
            if place in self._done:
                continue
            self._done.add(place)
            equation = self._jaxpr.eqns[place]
            operands = [var.val if isinstance(var, Literal) else self._values[var] for var in equation.invars]
            source = equation.source_info
            stack = source_info_util.current_name_stack() + source.name_stack
            with source_info_util.user_context(source.traceback, name_stack=stack), equation.ctx.manager:
                parameters = equation.primitive.get_bind_params(equation.params)
                results = equation.primitive.bind(*operands, **parameters)
            results = results if equation.primitive.multiple_results else [results]
            for var, value in zip(equation.outvars, results):
                self._values[var] = select_tree(finite, value, born[var]) if born and var in born else value


def _select(finite: jax.Array, new: Any, old: Any) -> Any:
    """`select_tree` of one leaf, which may change dtype on the first step, as in some optax states."""
    if new is old:
        return old
    if not jnp.issubdtype(new.dtype, jax.dtypes.extended):
        dtype = jnp.result_type(new, old)
        new, old = new.astype(dtype), old.astype(dtype)
    return select_tree(finite, new, old)

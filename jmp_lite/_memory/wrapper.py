"""The checks that all wrappers of an optax transform share."""

from typing import Any

import jax
import numpy as np
import optax

from .._paths import named_leaves
from .._tree import unwrap

RESUME = (
    "To go on from the state of a plain optimizer, of other wrappers or of other settings: "
    "opt_state = jmp.resume(tx, params, opt_state)."
)


def as_transform(made_by: str, inner: Any) -> optax.GradientTransformationExtraArgs:
    """Returns the optax transform `inner`, whose `update` takes extra arguments.

    Raises:
        TypeError: `inner` is no optax transform.
    """
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"{made_by}(inner) wraps an optax transform such as optax.adamw(3e-4). Got {inner!r}."
        )
    return optax.with_extra_args_support(inner)


def check_init(made_by: str, params: Any) -> None:
    """Raises a TypeError if `init` was given shapes in place of parameters."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        raise TypeError(
            f"{made_by}: init takes arrays. Got jax.ShapeDtypeStruct. For the shapes of the state: "
            "jax.eval_shape(tx.init, params)."
        )


def check_update(
    made_by: str, state_class: type, state: Any, params: Any, *, needs_params: bool = False
) -> None:
    """Checks what the `update` of the wrapper `made_by` was given.

    Raises:
        TypeError: `state` is not of `state_class`.
        ValueError: there are no parameters, and the wrapper needs them.
    """
    if not isinstance(state, state_class):
        hint = "The state comes before the parameters." if isinstance(params, state_class) else RESUME
        raise TypeError(
            f"{made_by}: update(grads, opt_state, params) takes the state that its init(params) returned. "
            f"Got {type(state).__name__}. {hint}"
        )
    if needs_params and params is None:
        raise ValueError(
            f"{made_by}: the update depends on the parameters: tx.update(grads, opt_state, params)."
        )


def update_inner(
    made_by: str,
    transform: optax.GradientTransformationExtraArgs,
    grads: Any,
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
    *,
    names: tuple[str, ...] = (),
    needs_all: bool = False,
) -> tuple[Any, Any]:
    """Calls the `update` of the wrapped transform, and names what does not fit.

    Args:
        made_by: the name of the wrapper.
        transform: the wrapped transform.
        grads, state, params, extra_args: what its `update` gets.
        names: the paths of the parameters, if the wrapper knows them.
        needs_all: whether the wrapper needs an update of each parameter.

    Raises:
        ValueError: the gradients are not those of the parameters, or the state is that of another transform.
    """
    given, known = _shapes(grads), {} if params is None else _shapes(differentiated(params))
    # Broadcasting would hide the error. The gradients of `optax.contrib.dpsgd` have a first axis more.
    error = _wrong_shape(known, {n: s for n, s in given.items() if s[1:] != known.get(n)})
    if error is None:
        try:
            updates, new_state = transform.update(grads, state, params, **extra_args)
        except Exception as caught:
            error = _cause(transform, given, known, state, params, names)
            if error is None or "jmp.resume" in str(caught):
                raise
            raise ValueError(f"{made_by}: {error}") from caught
        made = _shapes(updates)
        fits = _shapes(new_state) == _shapes(state) and (params is None or made.items() <= known.items())
        if fits and not (needs_all and len(made) < len(known)):
            return updates, new_state
        error = _cause(transform, given, known, state, params, names)
        if error is None:  # The updates of `optax.lookahead` are for two trees of parameters.
            return updates, new_state
    raise ValueError(f"{made_by}: {error}")


def differentiated(params: Any) -> Any:
    """Returns the parameters that have gradients."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _wrong_shape(known: dict[str, Any], given: dict[str, Any]) -> str | None:
    """Returns what to say of the first of the gradients `given` that has another shape than its parameter."""
    for name, shape in given.items():
        if name in known and known[name] != shape:
            return (
                f"The gradient {name!r} has the shape {shape}, and its parameter has {known[name]}. "
                "Give the gradients of these parameters."
            )
    return None


def _cause(
    transform: optax.GradientTransformationExtraArgs,
    given: dict[str, Any],
    known: dict[str, Any],
    state: Any,
    params: Any,
    names: tuple[str, ...],
) -> str | None:
    """Returns why an update failed, if the gradients or the state do not fit the parameters.

    Args:
        transform, state, params, names: as in `update_inner`.
        given, known: the shapes of the gradients and of the parameters by their paths.
    """
    names = tuple(known) or names
    if missing := [name for name in names if name not in given]:
        return f"The gradients lack the parameters {missing[:4]}. Give a gradient for each parameter."
    if names and (unknown := [name for name in given if name not in names]):
        return f"The gradients have leaves that are no parameters: {unknown[:4]}."
    if params is None:
        # An array of the state belongs to the gradient whose name ends its name: mu/head/kernel.
        arrays = [(path, shape) for path, shape in _shapes(state).items() if shape]
        known = {name: shape for name in given for path, shape in arrays if path.endswith(f"/{name}")}
    if error := _wrong_shape(known, given):
        return error
    if params is not None:
        expected = jax.tree.structure(jax.eval_shape(transform.init, params))
        if expected != jax.tree.structure(state):
            return f"The optimizer state is that of another optimizer or of other settings. {RESUME}"
    return None


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the leaves of `tree` by their paths."""
    return {name: np.shape(leaf) for name, leaf in named_leaves(unwrap(tree))}

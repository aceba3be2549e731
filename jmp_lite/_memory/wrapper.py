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
    names: tuple[str, ...] = (),
) -> tuple[Any, Any]:
    """Calls the `update` of the wrapped transform, and names what does not fit.

    The check comes after the call: the gradients of `optax.contrib.dpsgd` have an axis more than the
    parameters.

    Args:
        made_by: the name of the wrapper.
        transform: the wrapped transform.
        grads, state, params, extra_args: what its `update` gets.
        names: the paths of the parameters, if the wrapper knows them.

    Raises:
        ValueError: the gradients are not those of the parameters, or the state is that of another transform.
    """
    try:
        updates, new_state = transform.update(grads, state, params, **extra_args)
    except Exception as error:
        if "jmp.resume" not in str(error) and (cause := _cause(transform, grads, state, params, names)):
            raise ValueError(f"{made_by}: {cause}") from error
        raise
    # Broadcasting hides a gradient of another shape: the state, or the updates, take that shape.
    fits = _shapes(new_state) == _shapes(state)
    fits = fits and (params is None or _same_shapes(_shapes(updates), _shapes(differentiated(params))))
    if not fits and (cause := _cause(transform, grads, state, params, names)):
        raise ValueError(f"{made_by}: {cause}")
    return updates, new_state


def differentiated(params: Any) -> Any:
    """Returns the parameters that have gradients."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _cause(
    transform: optax.GradientTransformationExtraArgs,
    grads: Any,
    state: Any,
    params: Any,
    names: tuple[str, ...],
) -> str | None:
    """Returns why the update failed, if the gradients or the state do not fit the parameters."""
    shapes = _shapes(grads)
    if params is None:
        # An array of the state belongs to the gradient whose name ends its name: mu/head/kernel.
        known = {
            name: shape
            for name in shapes
            for path, shape in _shapes(state).items()
            if shape and path.endswith(f"/{name}")
        }
    else:
        known = _shapes(differentiated(params))
        names = tuple(known)
    if missing := [name for name in names if name not in shapes]:
        return f"The gradients lack the parameters {missing[:4]}. Give a gradient for each parameter."
    if names and (unknown := [name for name in shapes if name not in names]):
        return f"The gradients have leaves that are no parameters: {unknown[:4]}."
    for name, shape in known.items():
        if shapes[name] != shape:
            return (
                f"The gradient {name!r} has the shape {shapes[name]}, and its parameter has {shape}. "
                "Give the gradients of these parameters."
            )
    if params is not None:
        expected = jax.tree.structure(jax.eval_shape(transform.init, params))
        if expected != jax.tree.structure(state):
            return f"The optimizer state is that of another optimizer or of other settings. {RESUME}"
    return None


def _same_shapes(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return all(others.get(name, shape) == shape for name, shape in some.items())


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the leaves of `tree` by their paths."""
    return {name: np.shape(leaf) for name, leaf in named_leaves(unwrap(tree))}

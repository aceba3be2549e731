"""The checks that all wrappers of an optax transform share."""

from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from .._paths import named_leaves, shown, shown_difference
from .._tree import without_nnx_variables

Transform = optax.GradientTransformationExtraArgs
Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""The shape of each leaf of a tree, by the name of the leaf."""
MIGRATE = (
    "To go on from the state of the plain optimizer or of other settings: "
    "opt_state = jmp.migrate_state(tx, params, opt_state)."
)


class ChangedDtype(ValueError):
    """A parameter has another dtype than at the start. Wrappers further outside pass the error on."""


def as_transform(made_by: str, inner: Any, *, needs_all: bool = False) -> Transform:
    """Returns `inner` with checks of the parameters, gradients and state that the wrapper `made_by` gives it.

    `needs_all` says whether every parameter needs a gradient; `optax.sgd` accepts some of them.
    """
    transform = _transform_of(made_by, inner)

    def init(params: Any) -> Any:
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            raise TypeError(
                f"{made_by}: init takes arrays. Got jax.ShapeDtypeStruct. For the shapes of the state: "
                "jax.eval_shape(tx.init, params)."
            )
        return transform.init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        of_grads, of_params = shapes(updates), shapes(differentiated(params))
        if params is not None and not _are_of_examples(of_grads, of_params):
            _check_shapes(made_by, of_grads, of_params)
        if needs_all:
            _check_complete(made_by, of_grads, of_params)
        try:
            updates, new_state = transform.update(updates, state, params, **extra_args)
        except ChangedDtype:  # In our own words already.
            raise
        except Exception as error:
            # JAX's error would be about two tree structures: it names neither a missing gradient nor the
            # other optimizer that made the state.
            _check_complete(made_by, of_grads, of_params)
            if params is not None:
                _check_structure(made_by, state, jax.eval_shape(transform.init, params), error)
            raise
        if params is not None:
            # `optax.apply_updates` would broadcast an update of another shape.
            _check_shapes(made_by, shapes(differentiated(updates)), of_params, "update")
        return updates, new_state

    return Transform(init, update)


def _transform_of(made_by: str, inner: Any) -> Transform:
    """Returns the transform that was given to the wrapper `made_by`, in a form that takes extra arguments."""
    if isinstance(inner, optax.MultiSteps):
        # Its `gradient_transformation()` takes no extra arguments, such as the loss of `reduce_on_plateau`:
        # https://github.com/google-deepmind/optax/blob/v0.2.8/optax/transforms/_accumulation.py#L424.
        accumulation: Any = inner
        return Transform(accumulation.init, accumulation.update)
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"{made_by}(inner) wraps an optax transform such as optax.adamw(3e-4). Got {shown(inner)}."
        )
    return optax.with_extra_args_support(inner)


def _are_of_examples(of_grads: Shapes, of_params: Shapes) -> bool:
    """Whether the gradients have an axis of examples in front of those of their parameters."""
    # `optax.contrib.dpsgd` takes such gradients:
    # https://github.com/google-deepmind/optax/blob/v0.2.8/optax/contrib/_privacy.py#L59.
    return all(shape[1:] == of_params.get(name) for name, shape in of_grads.items())


def check_update(
    made_by: str, state_class: type, state: Any, params: Any, *, needs_params: bool = False
) -> None:
    """Raises an error if `update` was given another state, or no parameters where it needs them."""
    if not isinstance(state, state_class):
        hint = "The state comes before the parameters." if isinstance(params, state_class) else MIGRATE
        raise TypeError(
            f"{made_by}: update(grads, opt_state, params) takes the state that its init(params) returned. "
            f"Got {type(state).__name__}. {hint}"
        )
    if needs_params and params is None:
        needs = "the update depends on the parameters: tx.update(grads, opt_state, params)"
        raise ValueError(f"{made_by}: {needs}.")


def check_same_structure(new: Any, old: Any) -> None:
    """Raises a ValueError if an optimizer's `update` has changed the structure of its state."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            "The optimizer's update returned a state of another structure than it was given. Of these two: "
            f"{shown_difference(new, old)}. Wrap an optimizer whose update keeps the structure of its init: "
            "optax.snapshot does, optax.monitor does not."
        )


def _check_shapes(made_by: str, of_grads: Shapes, of_params: Shapes, kind: str = "gradient") -> None:
    """Raises a ValueError if a gradient has no parameter, or another shape, which JAX would broadcast."""
    if unknown := [name for name in of_grads if name not in of_params]:
        raise ValueError(f"{made_by}: The {kind}s have leaves that are no parameters: {unknown[:4]}.")
    is_update = kind == "update"
    do = "The optimizer inside has changed it." if is_update else "Give the gradients of these parameters."
    for name, shape in of_grads.items():
        if shape != (expected := of_params[name]):
            raise ValueError(
                f"{made_by}: The {kind} {name!r} has the shape {shape}, and its parameter has {expected}. "
                f"{do}"
            )


def _check_structure(made_by: str, state: Any, fresh: Any, error: Exception) -> None:
    """Raises a ValueError if the update failed because its state is not like a `fresh` one."""
    if jax.tree.structure(state) != jax.tree.structure(fresh):
        raise ValueError(
            f"{made_by}: The optimizer state is that of another optimizer or of other settings. {MIGRATE}"
        ) from error


def _check_complete(made_by: str, of_grads: Shapes, of_params: Shapes) -> None:
    if missing := [name for name in of_params if name not in of_grads]:
        raise ValueError(
            f"{made_by}: The gradients lack the parameters {missing[:4]}. Give a gradient for each parameter."
        )


def differentiated(params: Any) -> Any:
    """Returns the parameters, or their updates, that have gradients: `optax.lookahead` has two trees."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def shapes(tree: Any) -> Shapes:
    return {name: np.shape(leaf) for name, leaf in named_leaves(without_nnx_variables(tree))}

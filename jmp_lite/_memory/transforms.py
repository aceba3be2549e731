"""What every wrapper of an optax transform does with the transform and the trees that it is given."""

from typing import Any

import optax


def as_transform(made_by: str, inner: Any) -> optax.GradientTransformationExtraArgs:
    """Returns the optax transform `inner`, whose `update` takes extra arguments.

    Raises:
        TypeError: `inner` is no optax transform.
    """
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"{made_by}(inner) wraps an optax transform such as optax.adamw(3e-4), got {inner!r}."
        )
    return optax.with_extra_args_support(inner)


def check_state(made_by: str, state: Any, kind: type, params: Any) -> None:
    """Raises a TypeError if `update` of a wrapper was not given a state of its class `kind`."""
    if not isinstance(state, kind):
        hint = " The state comes before the parameters." if isinstance(params, kind) else ""
        raise TypeError(
            f"{made_by}: update(grads, opt_state, params) takes the state that its init(params) returned, "
            f"got {type(state).__name__}.{hint}"
        )


def check_params(made_by: str, params: Any) -> None:
    """Raises a ValueError if `update` of a wrapper was given no parameters."""
    if params is None:
        raise ValueError(
            f"{made_by}: the update depends on the parameters: tx.update(grads, opt_state, params)."
        )

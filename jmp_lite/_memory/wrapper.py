"""The checks that all wrappers of an optax transform share."""

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
            f"{made_by}(inner) wraps an optax transform such as optax.adamw(3e-4). Got {inner!r}."
        )
    return optax.with_extra_args_support(inner)


def check_update(
    made_by: str, state_class: type, state: Any, params: Any, *, needs_params: bool = False, advice: str = ""
) -> None:
    """Checks what the `update` of the wrapper `made_by` was given.

    Raises:
        TypeError: `state` is not of `state_class`. The message ends with `advice`.
        ValueError: there are no parameters, and the wrapper needs them.
    """
    if not isinstance(state, state_class):
        hint = " The state comes before the parameters." if isinstance(params, state_class) else ""
        raise TypeError(
            f"{made_by}: update(grads, opt_state, params) takes the state that its init(params) returned. "
            f"Got {type(state).__name__}.{hint}{advice}"
        )
    if needs_params and params is None:
        raise ValueError(
            f"{made_by}: the update depends on the parameters: tx.update(grads, opt_state, params)."
        )

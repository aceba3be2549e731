"""A search for few modules to keep in float32."""

import bisect
from collections.abc import Callable, Sequence
from typing import TypeVar

M = TypeVar("M")


def fewest(
    modules: Sequence[M], error: Callable[[Sequence[M]], float], tolerance: float
) -> tuple[M, ...] | None:
    """Returns a small set of modules which, kept in float32, brings an error to a tolerance or below.

    A module whose own error is above the tolerance is in each set. The others are added, the first of
    `modules` first, until the error is small enough. Then a module is left out again if the error stays
    small enough. So no module of the set can be left out, but another set may be smaller.

    Args:
        modules: the modules, that with the largest error of its own first.
        error: the error that is left if a set of modules stays in float32.
        tolerance: the error that is allowed.

    Returns:
        The modules of the set, in the order of `modules`. None if all modules together are not enough.

    Examples:
        >>> costs = {"head": 8.0, "stem": 4.0, "body": 1.0}
        >>> left = lambda kept: sum(cost for name, cost in costs.items() if name not in kept)
        >>> fewest(list(costs), left, 5.0), fewest(list(costs), left, 20.0), fewest(list(costs), left, -1.0)
        (('head',), (), None)
    """
    is_enough = lambda kept: error(kept) <= tolerance
    if not is_enough(modules):
        return None
    needed = tuple(module for module in modules if not is_enough(_without(modules, module)))
    others = [module for module in modules if module not in needed]
    in_order = lambda added: tuple(module for module in modules if module in (*needed, *added))
    # With each further module the error falls, by and large.
    enough_with = lambda count: is_enough(in_order(others[:count]))
    count = bisect.bisect_left(range(len(others)), True, key=enough_with)
    return _reduced(in_order(others[:count]), needed, is_enough)


def _without(modules: Sequence[M], module: M) -> tuple[M, ...]:
    return tuple(other for other in modules if other != module)


def _reduced(
    kept: tuple[M, ...], needed: tuple[M, ...], is_enough: Callable[[Sequence[M]], bool]
) -> tuple[M, ...]:
    """Leaves modules that are not needed out, the last first, as long as the error stays small enough."""
    for module in reversed(kept):
        if module not in needed and is_enough(_without(kept, module)):
            return _reduced(_without(kept, module), needed, is_enough)
    return kept

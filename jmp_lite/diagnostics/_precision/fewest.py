"""A search for few modules to keep in float32."""

import bisect
from collections.abc import Callable, Sequence
from typing import TypeVar

M = TypeVar("M")


def fewest(
    modules: Sequence[M], error: Callable[[Sequence[M]], float], tolerance: float
) -> tuple[M, ...] | None:
    """Returns a small set of modules to keep in float32, in order; None if all of them are not enough.

    `modules` come with the largest error of their own first. `error` returns the error that is left if a set
    of modules stays in float32. The set has each module without which the error is above the tolerance. The
    next modules are added until the error is small enough, and those that are not needed are dropped. So no
    module of the set can be left out, but another set may be smaller.


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
    # As a rule, the error falls with each module that is added.
    enough_with = lambda count: is_enough(in_order(others[:count]))
    count = bisect.bisect_left(range(len(others)), True, key=enough_with)
    return _reduced(in_order(others[:count]), needed, is_enough)


def _without(modules: Sequence[M], module: M) -> tuple[M, ...]:
    return tuple(other for other in modules if other != module)


def _reduced(
    kept: tuple[M, ...], needed: tuple[M, ...], is_enough: Callable[[Sequence[M]], bool]
) -> tuple[M, ...]:
    """Drops modules that are not needed, the last first, as long as the error stays small enough."""
    for module in reversed(kept):
        if module not in needed and is_enough(_without(kept, module)):
            return _reduced(_without(kept, module), needed, is_enough)
    return kept

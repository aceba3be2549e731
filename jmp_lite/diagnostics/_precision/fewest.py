"""Searches for a small set of modules to keep in float32."""

import bisect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

M = TypeVar("M")


def fewest(modules: Sequence[M], is_enough: Callable[[Sequence[Any]], bool]) -> tuple[M, ...] | None:
    """Returns a small set of modules to keep in float32, in order; None if all of them are not enough.

    `modules` come with the largest error of their own first. No module of the set can be left out, but
    another set may be smaller.
    """

    def without(kept, module):
        return tuple(other for other in kept if other != module)

    if not is_enough(modules):
        return None
    # First those without which all others are not enough. Then the shortest prefix of the others, and last
    # a search for members that can be left out after all.
    needed = [module for module in modules if not is_enough(without(modules, module))]
    others = [module for module in modules if module not in needed]

    def in_order(added):
        return tuple(module for module in modules if module in (*needed, *added))

    # As a rule, the error falls with each module that is added, as a bisection needs.
    def enough_with(count):
        return is_enough(in_order(others[:count]))

    kept = in_order(others[: bisect.bisect_left(range(len(others)), True, key=enough_with)])
    while True:  # Without one module, another that was needed before may not be: also one of `needed`.
        for module in reversed(kept):
            if len(kept) < len(modules) and is_enough(without(kept, module)):
                kept = without(kept, module)
                break
        else:
            return kept

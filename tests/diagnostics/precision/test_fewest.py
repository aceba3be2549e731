"""`_fewest` finds a smallest set of modules, compared with all sets."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmp_lite.diagnostics._precision.fewest import fewest

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.

costs = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def left_of(numbers):
    """An error that is a sum over the modules that are not kept."""
    return lambda kept: sum(cost for module, cost in enumerate(numbers) if str(module) not in kept)


@given(costs, st.integers(-1, 30))
def test_fewest_is_as_small_as_the_smallest_of_all_sets_where_errors_add_up(numbers, tolerance):
    order = sorted(map(str, range(len(numbers))), key=lambda name: -numbers[int(name)])
    error = left_of(numbers)
    found = fewest(order, lambda kept: error(kept) <= tolerance)
    sizes = [
        size
        for size in range(len(order) + 1)
        for kept in itertools.combinations(order, size)
        if error(kept) <= tolerance
    ]
    assert (found is None) == (not sizes)
    if found is not None:
        assert error(found) <= tolerance
        assert len(found) == min(sizes)


def test_the_greedy_search_leaves_out_what_a_later_module_makes_needless():
    is_enough = lambda kept: "b" in kept  # Module a has the largest error of its own.
    assert fewest(["a", "b", "c"], is_enough) == ("b",)


def test_the_greedy_search_tries_again_what_it_could_not_leave_out_before():
    # Any module alone may be in half. c is needed beside b, and needless once b and d are out.
    alone = [set("abcd") - {module} for module in "abcd"]
    enough = [set("abcd"), *alone, {"a", "c"}, {"a"}]
    assert fewest(["b", "c", "a", "d"], lambda kept: set(kept) in enough) == ("a",)


def test_what_is_needed_beside_all_others_may_be_needless_without_some_of_them():
    # Beside a and c, b is needed. a alone is enough.
    enough = [set("abc"), {"a", "b"}, {"a"}]
    assert fewest(["a", "b", "c"], lambda kept: set(kept) in enough) == ("a",)


def test_a_module_that_alone_is_above_the_tolerance_is_in_each_set_that_is_tried():
    tried = []
    costs = {"a": 9.0, "b": 8.0, "c": 1.0, "d": 1.0, "e": 1.0}

    def error(kept):
        tried.append(set(kept))
        return sum(cost for module, cost in costs.items() if module not in kept)

    assert fewest(list(costs), lambda kept: error(kept) <= 2) == ("a", "b", "c")
    own = [set(costs) - {module} for module in costs]
    last = [{"a", "b", "c"} - {module} for module in "abc"]
    assert all({"a", "b"} <= kept for kept in tried if kept not in own + last)
    tried.clear()
    assert fewest(list(costs), lambda kept: error(kept) <= 0) == tuple(costs)
    assert len(tried) == 1 + len(costs)  # All together, and each alone.

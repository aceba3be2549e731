"""The price of each mechanism of the plan: a law that falls without it.

`NUMBERS` in test_passes.py has those of the passes. A new condition of the plan enters with a row here.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from jmp_lite._autocast import planner
from jmp_lite._autocast.planning import (
    decide,
    demand,
    dependence,
    elementwise,
    op,
    operands,
    products,
    regions,
    wanted,
)
from jmp_lite._jaxpr.primitives import Category
from tests.autocast import (
    test_activations,
    test_casts,
    test_keeping_out,
    test_loops,
    test_one_result,
    test_precision,
    test_programs,
    test_reduce_dtype,
    test_rules,
    test_shardings,
    test_softmaxes,
)
from tests.jaxpr import test_picks
from tests.laws import test_chains, test_found


class Price(NamedTuple):
    """A mechanism, what stands in its place without it, and a law with its arguments."""

    place: Any
    name: str
    without: Any
    law: Any
    arguments: tuple[Any, ...] = ()


def may_be_rounded_alone(operation, states, half):
    pairs = zip(operation.equation.invars, states)
    return "" if all(elementwise.may_be_rounded(operation, var, state) for var, state in pairs) else "rounds"


def only_exact(operation, states, want, analysis):
    return products._EXACT if want is wanted.Wanted.EXACT else ""


def outer_as_elementwise(operation, states, want, rules):
    return decide.decide_elementwise(operation, states, want, rules.dtype)


def casts_want_nothing(operation, ruling, takes_half, gives_half, want, half):
    if operation.is_cast:
        return wanted.Wanted.NO
    return operands.wants(operation, ruling, takes_half, gives_half, want, half)


def no(*_, **__):
    return False


def yes(*_, **__):
    return True


PRICES = {
    "loops decide in float32": Price(
        *(dependence.LoopDecisions, "variables", lambda *_, **__: frozenset()),
        *(test_loops.test_a_vmapped_while_loop_stops_each_example_at_its_own_limit, ("inside",)),
    ),
    "what becomes integers is exact": Price(
        *(wanted.Uses, "is_exact", property(no)),
        *(test_found.test_a_product_of_which_only_integers_are_made_is_exact, ("float16",)),
    ),
    "gradients of weights are told apart": Price(
        *(demand.DemandWalk, "_tells_gradients", no),
        test_reduce_dtype.test_only_the_products_that_make_weight_gradients_give_float32_in_both_orders,
        ("plain",),
    ),
    "one-hot labels select": Price(
        *(products, "_why_float32", only_exact),
        test_found.test_a_product_by_one_hot_labels_is_half_if_a_matmul_reads_it,
    ),
    "gradients of lookups by one-hot labels": Price(
        *(demand.Analysis, "is_gradient_of_half", no),
        test_found.test_a_lookup_in_a_table_that_is_computed_has_the_same_products_in_both_orders,
        ("scaled", "float16"),
    ),
    "a pick needs no scatter": Price(
        *(decide, "_picks", no),
        test_picks.test_the_gradient_of_a_lookup_is_that_of_jax_and_needs_no_scatter,
        ("the last axis", test_picks.LABELS, "grad(autocast)"),
    ),
    "gradients of outer products": Price(
        *(decide, "decide_outer", outer_as_elementwise),
        *(
            test_one_result.test_the_products_near_outer_products_are_the_same_in_both_orders,
            ("two vectors",),
        ),
    ),
    "keep_float32 holds for outer products": Price(
        *(decide, "is_product", lambda operation: operation.category is Category.ALLOW),
        *(
            test_keeping_out.test_keep_float32_keeps_the_gradients_of_a_product_with_and_without_a_sum,
            (1,),
        ),
    ),
    "a sum upon a sum stays float32": Price(
        *(wanted.Demand, "note_sum", no),
        *(test_activations.test_a_sum_upon_a_sum_stays_in_float32, ("float16",)),
    ),
    "an overflow leaves a linear solver": Price(
        *(planner, "_solves", no),
        test_programs.test_an_inf_that_was_summed_in_float32_reaches_the_check_through_a_solver,
    ),
    "moves in both dtypes": Price(
        *(decide, "_moves_both", no),
        *(
            test_shardings.test_devices_send_half_and_sum_the_gradients_in_float32,
            (test_shardings.ORDERS[0],),
        ),
    ),
    "rows are looked up in half": Price(
        *(decide, "_looks_up_half", no),
        test_casts.test_rows_that_matmuls_alone_take_are_looked_up_in_half,
        ("grad(autocast)",),
    ),
    "constants and squares that half rounds badly": Price(
        *(elementwise, "_why_stored", may_be_rounded_alone),
        *(test_found.test_a_factor_that_half_rounds_badly_is_not_rounded, ("float16",)),
    ),
    "numbers that half does not hold": Price(
        *(elementwise, "fits", yes),
        test_precision.test_a_literal_that_float16_cannot_hold_keeps_its_operation_in_float32,
        (-1e9, lambda y, number: jnp.where(y > 0, y, number)),
    ),
    "a scalar argument is not rounded": Price(
        *(elementwise, "may_be_rounded", lambda *_: True),
        test_found.test_a_scalar_argument_that_is_added_is_not_rounded,
    ),
    "a loop computes again": Price(
        *(op, "_recomputes", no), test_loops.test_a_loop_that_says_what_it_keeps_keeps_that
    ),
    "a cast of the program to half wants half": Price(
        *(demand, "wants", casts_want_nothing),
        test_loops.test_a_loop_keeps_as_little_if_its_body_casts_to_half_by_itself,
    ),
    "chains are one function": Price(
        *(regions._Search, "chain", lambda *_: None),
        *(test_chains.test_a_chain_that_would_round_more_than_twice_computes_in_float32, (1, "float16")),
    ),
    "softmaxes are one function": Price(
        *(regions, "find_softmaxes", lambda *_: {}),
        test_softmaxes.test_the_backward_pass_keeps_half_weights_and_only_scores_that_it_needs,
        ("plain", "float16"),
    ),
    "the first rule decides": Price(
        *(decide, "by_first_rule", lambda _, ruling, *__: ruling),
        test_rules.test_rules_select_arguments_by_their_paths,
    ),
}


# The first one runs a loop.
@pytest.mark.parametrize("name", [pytest.param(next(iter(PRICES)), marks=pytest.mark.slow), *[*PRICES][1:]])
def test_a_law_falls_without_each_mechanism(name, monkeypatch):
    place, attribute, without, law, arguments = PRICES[name]
    monkeypatch.setattr(place, attribute, without)
    with pytest.raises(AssertionError):
        law(*arguments)

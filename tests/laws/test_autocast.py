"""The laws of autocast, over the product of programs, dtypes, options, orders and ways to run.

Each feature has tests of its own, mostly on float32 arrays. These tests put the features beside each other:

(a) What runs in float32 runs under every option, or the error is a sentence of ours.
(b) Results have the dtypes of the float32 program, and autocast changes nothing that is not float32.
(c) Both orders have the same products in the same dtypes.
(e) An option without effect is named by `explain`.
(f) No array of the user's outlives the call.

Here programs are only traced; tests/laws/test_numbers.py computes with them. A new option of autocast gets
its row in `OPTIONS` of tests/laws/cases.py, a new kind of program its function in tests/laws/programs.py.
"""

import gc
import inspect
import itertools
import traceback
import weakref
from collections.abc import Iterator

import hypothesis
import jax
import pytest
from hypothesis import strategies as st

import jmp_lite as jmp
from jmp_lite._autocast.api import prepare
from jmp_lite._autocast.planning.plan import Plan
from jmp_lite._autocast.planning.rules import make_rules
from jmp_lite._autocast.planning.states import Kind
from jmp_lite._jaxpr.read import is_float32
from tests.laws.cases import OPTIONS, ORDERS, WAYS, Case, cases
from tests.laws.programs import PROGRAMS
from tests.support.jaxprs import live_products, text

pytestmark = [
    pytest.mark.filterwarnings("ignore:autocast.*float8.*runs on cpu"),
    pytest.mark.usefixtures("whole_tracebacks"),
]


@pytest.fixture
def whole_tracebacks() -> Iterator[None]:
    """Shows the frames of JAX, by which a sentence of ours differs from one of JAX."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


class OurError(Exception):
    """autocast refused a case with a sentence of its own."""


def ours(function, *args, **kwargs):
    """Calls a function. An error that `jmp_lite` itself has raised becomes an `OurError`."""
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if "/jmp_lite/" in frames[-1].filename and frames[-1].line.startswith("raise"):
            raise OurError(str(error)) from None
        raise


def test_every_parameter_of_autocast_has_a_row():
    assert set(OPTIONS) == set(inspect.signature(jmp.autocast).parameters)


def may_differ(case) -> bool:
    """Whether the products of both orders may differ by an option: limits.md says so of each."""
    names_an_argument = any(
        name in ("rules", "float32_results") and any(path in str(value) for path in ("p/", "d/"))
        for name, value in case.options
    )
    # Then each example has a weight gradient of its own under `grad(autocast)`.
    return names_an_argument or (case.way == "vmap" and "reduce_dtype" in dict(case.options))


def check_traces(case) -> None:
    """Laws a, b (dtypes) and c."""
    with case.context:
        args = case.arguments()
        expected = jax.eval_shape(case.value_and_grad(ORDERS[0], lambda fun: fun), *args)
        found = []
        for order in ORDERS:
            try:
                fun = ours(case.value_and_grad, order)
                jaxpr, shapes = ours(jax.make_jaxpr(fun, return_shape=True), *args)
            except OurError:
                continue
            assert dtypes(shapes) == dtypes(expected)
            found.append(live_products(jaxpr))
        if len(found) == 2 and not may_differ(case):
            assert found[0] == found[1]


def dtypes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.cases(fast=1, slow=len(PROGRAMS) // 2)
@pytest.mark.parametrize("program", PROGRAMS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=3)
def test_a_program_runs_with_its_dtypes_and_the_same_products_in_both_orders(program, data):
    check_traces(data.draw(cases(program)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", PROGRAMS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=150)
def test_many_cases_run_with_their_dtypes_and_the_same_products_in_both_orders(program, data):
    check_traces(data.draw(cases(program)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("scope", ["none", "fuse_attention"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_pair_of_options_has_the_same_products_in_both_orders(program, scope):
    values = [(name, value) for name in OPTIONS if name != "dtype" for value in OPTIONS[name]]
    for pair in itertools.combinations(values, 2):
        if pair[0][0] != pair[1][0]:
            check_traces(Case(program, "", scope, (("dtype", "bfloat16"), *pair), "plain", ""))


@pytest.mark.cases(slow=len(PROGRAMS) // 4)
@pytest.mark.parametrize("program", PROGRAMS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=4)
def test_only_float32_values_have_a_state(program, data):
    case = data.draw(cases(program, way=st.just("plain")))
    with case.context:
        try:
            rules = ours(make_rules, **case.settings)
            _, _, plan = ours(
                prepare, case.value_and_grad(ORDERS[0], lambda fun: fun), rules, case.arguments(), {}
            )
        except OurError:
            return
        for var, state in states(plan):
            assert is_float32(var) or state.kind is Kind.OTHER


def states(plan: Plan) -> Iterator[tuple]:
    for decision in plan.decisions:
        yield from zip(decision.op.equation.outvars, decision.results, strict=True)
        for inner in decision.inner:
            yield from states(inner)


@pytest.mark.cases(slow=len(PROGRAMS) // 4)
@pytest.mark.parametrize("program", PROGRAMS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=4)
def test_an_option_without_effect_is_named(program, data):
    case = data.draw(cases(program, way=st.just("plain"), beside=st.just("")))
    try:
        report = ours(jmp.explain(ours(case.autocast, case.fun)), *case.arguments())
    except OurError:
        return
    after = text(case.autocast(case.fun), *case.arguments())
    for name, value in case.options[1:]:
        without = {key: each for key, each in case.settings.items() if key != name}
        if text(jmp.autocast(case.fun, **without), *case.arguments()) == after:
            entries = value if isinstance(value, list) else [value]
            assert len([each for each in report.without_effect if each.startswith(name)]) >= len(entries)


def closing_over(case, data):
    """The loss of a case as a function of the parameters alone: the data are constants of it."""
    return lambda params: WAYS[case.way](lambda p, _: case.fun(p, data))(params, {"x": data["x"]})[0].sum()


TRANSFORMS = {
    "autocast": lambda case, fun: case.autocast(fun),
    ORDERS[0]: lambda case, fun: jax.grad(case.autocast(fun)),
    ORDERS[1]: lambda case, fun: case.autocast(jax.grad(fun)),
    "fuse_attention": lambda case, fun: jax.grad(jmp.fuse_attention(fun, implementation="xla")),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("way", ["plain", "remat"])
@pytest.mark.cases(fast=3, slow=6)
@pytest.mark.usefixtures("only_new_garbage")
def test_no_array_of_the_users_outlives_a_trace(way, program):
    """Constants of the function, and its arguments."""
    case = Case(program, "", "none", (("dtype", "bfloat16"),), way, "")
    references = []
    for transform in TRANSFORMS.values():
        params, data = case.arguments()
        references += map(weakref.ref, jax.tree.leaves((params, data)))
        jax.jit(transform(case, closing_over(case, data))).lower(params)
        del params, data
    gc.collect()
    assert not [reference() for reference in references if reference() is not None]

"""How a loss scale moves: against an oracle, against jmp, event by event."""

import dataclasses
import math
import warnings

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jmp_lite
from tests.support.scales import LARGEST, TINY, assert_strong, f32, run_eagerly, state_of


def is_power_of_two(number):
    return math.frexp(number)[0] == 0.5


class Oracle:
    """The documented machine in Python numbers; shares no code with the source."""

    def __init__(
        self, scale, period, factor, minimum, backoff=None, maximum=LARGEST, hysteresis=0, refill="growth"
    ):
        self.scale, self.counter, self.left = f32(scale), 0, hysteresis
        self.period, self.factor, self.backoff = period, factor, backoff
        self.minimum, self.maximum = f32(max(minimum, TINY)), f32(maximum)
        self.hysteresis, self.refill = hysteresis, refill

    def lowered(self):
        if self.backoff is None:
            lowered, exact = f32(self.scale / f32(self.factor)), is_power_of_two(self.factor)
        else:
            lowered, exact = f32(self.scale * f32(self.backoff)), is_power_of_two(self.backoff)
        if lowered >= self.minimum:
            return lowered
        if exact and is_power_of_two(self.scale):
            return 2.0 ** math.ceil(math.log2(self.minimum))
        return min(self.minimum, self.scale)

    def step(self, finite):
        if not finite:
            self.counter = 0
            if self.left > 0:
                self.left -= 1
            else:
                self.scale = self.lowered()
            return
        self.counter += 1
        if self.counter >= self.period:
            self.counter = 0
            if self.refill == "growth":
                self.left = self.hysteresis
            grown = f32(self.scale * f32(self.factor))
            if grown <= self.maximum:
                self.scale = grown
        if self.refill == "finite":
            self.left = self.hysteresis

    def build(self):
        return jmp_lite.DynamicLossScale(
            self.scale,
            0,
            self.period,
            self.factor,
            self.minimum,
            backoff_factor=self.backoff,
            max_loss_scale=self.maximum,
            hysteresis=self.hysteresis,
            hysteresis_refill=self.refill,
        )

    def run(self, events):
        """The scale, counter and tolerance after each event."""
        trajectory = []
        for finite in events:
            self.step(finite)
            trajectory.append((self.scale, self.counter, self.left))
        return trajectory


@st.composite
def oracles(draw, exact=True):
    """Settings in which every quotient is a power of two, or any (`exact=False`)."""
    number = st.floats(2.0**-7, 2.0**20, width=32)
    minimum = draw(st.sampled_from([0.0, 0.37, 1.0, 3.0, 2.0**-120, 2.0**100]) | number)
    if exact:
        exponent = st.integers(math.ceil(math.log2(max(minimum, TINY))), 127)
        scale = 2.0 ** draw(exponent)
        factor = draw(st.sampled_from([2, 4, 8.0, 2.0**60]))
        backoff = draw(st.sampled_from([None, 0.5, 0.25, 2.0**-60]))
    else:
        scale = max(draw(number), f32(minimum))
        factor = draw(st.sampled_from([1.5, 3, 7.25, 2]))
        backoff = draw(st.sampled_from([None, 0.5, 0.9, 1 / 3]))
    maximum = draw(st.sampled_from([LARGEST, scale, min(5 * scale, LARGEST), 2.0**127]))
    return Oracle(
        scale,
        draw(st.integers(1, 5)),
        factor,
        minimum,
        backoff,
        max(maximum, scale),
        draw(st.integers(0, 3)),
        draw(st.sampled_from(["growth", "finite"])),
    )


# Runs of equal events as well as coin throws, so that a scale reaches both of its ends.
events_lists = st.lists(
    st.tuples(st.booleans(), st.integers(1, 12)).map(lambda run: [run[0]] * run[1]), min_size=1, max_size=8
).map(lambda runs: [event for run in runs for event in run])


def run_jitted(scale, events):
    step = jax.jit(lambda scale, finite: scale.adjust(finite))
    trajectory = []
    for finite in events:
        scale = step(scale, jnp.bool_(finite))
        assert_strong(scale)
        trajectory.append(state_of(scale))
    return trajectory


def run_scanned(scale, events):
    def step(scale, finite):
        scale = scale.adjust(finite)
        return scale, scale

    scales = jax.device_get(jax.lax.scan(step, scale, jnp.asarray(events))[1])
    return [state_of(jax.tree.map(lambda leaf, i=i: leaf[i], scales)) for i in range(len(events))]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("run", [run_scanned, run_eagerly, run_jitted])
@hypothesis.settings(max_examples=30)
@hypothesis.given(oracle=oracles(), events=events_lists)
def test_dynamic_scale_follows_the_oracle_bit_for_bit_on_powers_of_two(run, oracle, events):
    trajectory = run(oracle.build(), events)
    assert all(is_power_of_two(number) for number, _, _ in trajectory)
    assert trajectory == oracle.run(events)


@pytest.mark.slow
@hypothesis.given(oracle=oracles(exact=False), events=events_lists)
def test_dynamic_scale_follows_the_oracle_for_factors_that_round(oracle, events):
    # The last bit of a quotient may round otherwise, so the oracle goes on from where the scale went.
    scale = oracle.build()
    for finite in events:
        oracle.scale, oracle.counter, oracle.left = state_of(scale)
        oracle.step(finite)
        scale = scale.adjust(jnp.bool_(finite))
        number, *counts = state_of(scale)
        assert 0 < oracle.minimum <= number <= oracle.maximum < math.inf
        np.testing.assert_allclose(number, oracle.scale, rtol=2 * np.finfo(np.float32).eps)
        assert counts == [oracle.counter, oracle.left]


@pytest.mark.parametrize("refill", ["growth", "finite"])
def test_extremes_are_never_passed_however_many_events(refill):
    for settings in ({}, {"min_loss_scale": 0.0}, {"min_loss_scale": 0.37}, {"hysteresis": 2}):
        scale = jmp_lite.DynamicLossScale(2.0**15, period=1, hysteresis_refill=refill, **settings)
        down = run_scanned(scale, [False] * 300)
        up = run_scanned(scale, [True] * 300)
        lowest = {0.0: TINY, 0.37: 0.5}.get(settings.get("min_loss_scale"), 1.0)
        assert down[-1][0] == lowest
        assert up[-1][0] == 2.0**127


@pytest.mark.parametrize(
    ("settings", "events", "expected"),
    [
        # Growth on exactly the third finite step in a row; an overflow starts the count again.
        (
            {"period": 3},
            [True] * 4 + [False] + [True] * 3,
            [(8, 1, 0), (8, 2, 0), (16, 0, 0), (16, 1, 0), (8, 0, 0), (8, 1, 0), (8, 2, 0), (16, 0, 0)],
        ),
        # Growth beyond the maximum is left out.
        ({"period": 1, "factor": 4, "max_loss_scale": 100.0}, [True] * 3, [(32, 0, 0)] * 3),
        # The backoff factor is its own.
        ({"period": 1, "factor": 2, "backoff_factor": 0.125}, [False, True], [(1, 0, 0), (2, 0, 0)]),
        # Hysteresis tolerates two overflows, then backs off on each.
        ({"hysteresis": 2}, [False] * 4, [(8, 0, 1), (8, 0, 0), (4, 0, 0), (2, 0, 0)]),
        # It refills on growth, or on every finite step.
        (
            {"period": 2, "hysteresis": 1},
            [False, True, False, True, True, False],
            [(8, 0, 0), (8, 1, 0), (4, 0, 0), (4, 1, 0), (8, 0, 1), (8, 0, 0)],
        ),
        (
            {"period": 2, "hysteresis": 1, "hysteresis_refill": "finite"},
            [False, True, False, True, True, False],
            [(8, 0, 0), (8, 1, 1), (8, 0, 0), (8, 1, 1), (16, 0, 1), (16, 0, 0)],
        ),
        # A power of two stops at the last one above the minimum.
        ({"min_loss_scale": 3.0}, [False] * 2, [(4, 0, 0)] * 2),
        # A minimum that is one is reached, though a step may go beyond it.
        ({"factor": 4}, [False] * 3, [(2, 0, 0), (1, 0, 0), (1, 0, 0)]),
        # 8 / 3 lies above the minimum, so the minimum has no say, though 8 is a power of two.
        ({"factor": 3, "min_loss_scale": 2.5}, [False], [(f32(8 / 3), 0, 0)]),
        # With a factor of 1 the scale only falls.
        (
            {"period": 1, "factor": 1},
            [True, False, True, False],
            [(8, 0, 0), (4, 0, 0), (4, 0, 0), (2, 0, 0)],
        ),
        ({"factor": 1, "backoff_factor": 0.25}, [False], [(2, 0, 0)]),
    ],
)
def test_the_scale_moves_event_by_event(settings, events, expected):
    assert run_eagerly(jmp_lite.DynamicLossScale(8.0, **settings), events) == expected


@pytest.mark.slow
@hypothesis.given(
    exponent=st.integers(0, 127),
    counter=st.integers(0, 6),  # Also beyond the period.
    period=st.integers(1, 4),
    factor=st.sampled_from([2, 2.0, 3, 8]),
    events=events_lists,
)
def test_jmp_gives_the_same_bits(exponent, counter, period, factor, events):
    jmp = pytest.importorskip("jmp", reason="needs the extra [peers]")
    start = jnp.float32(2.0**exponent), jnp.int32(counter)  # jmp computes with NumPy's numbers, which warn.
    ours = jmp_lite.DynamicLossScale(*start, period, factor)
    theirs = jmp.DynamicLossScale(*start, period, factor)
    for finite in events:
        ours, theirs = ours.adjust(jnp.bool_(finite)), theirs.adjust(jnp.bool_(finite))
        assert np.asarray(ours.loss_scale).tobytes() == np.asarray(theirs.loss_scale, np.float32).tobytes()
        assert int(ours.counter) == int(theirs.counter)


# Settings


def test_defaults_are_those_of_jmp():
    scale = jmp_lite.DynamicLossScale()
    assert (float(scale.loss_scale), int(scale.counter)) == (2.0**15, 0)
    assert (scale.period, scale.factor, scale.min_loss_scale) == (2000, 2, 1.0)
    assert (scale.backoff_factor, scale.max_loss_scale, scale.hysteresis) == (None, LARGEST, 0)


@pytest.mark.parametrize(
    "value",
    [
        2.0**10,
        np.float64(2**10),
        np.float32(2**10),
        np.float16(2**10),
        jnp.bfloat16(2**10),
        jnp.asarray(2.0**10),
    ],
    ids=["float", "float64", "float32", "float16", "bfloat16", "weak"],
)
@pytest.mark.parametrize("cls", [jmp_lite.StaticLossScale, jmp_lite.DynamicLossScale])
def test_scale_is_strongly_typed_float32_from_construction_on(cls, value):
    scale = cls(value)
    for stage in (scale, scale.adjust(jnp.bool_(True)), scale.adjust(jnp.bool_(False))):
        leaf = jnp.asarray(stage.loss_scale)
        assert (leaf.dtype, leaf.weak_type, leaf.shape) == (np.float32, False, ())
    assert float(scale.loss_scale) == 2**10


@pytest.mark.parametrize("value", [2, np.int32(2), jnp.int32(2)])
def test_an_integer_scale_warns_and_becomes_float32(value):
    with pytest.warns(UserWarning, match=r"Expected floating type for loss_scale\. Got int32") as caught:
        scale = jmp_lite.DynamicLossScale(value)
    assert caught[0].filename == __file__
    assert_strong(scale)
    with pytest.warns(UserWarning, match=r"Expected floating type for min_loss_scale\. Got int32"):
        jmp_lite.DynamicLossScale(2.0, min_loss_scale=value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jmp_lite.StaticLossScale(value).loss_scale.dtype == np.float32


INVALID = {
    "loss_scale should be above 0 and finite": {
        "loss_scale": (0.0, -2.0, math.nan, math.inf, jnp.float32(0))
    },
    "loss_scale should be above 0 and finite in float32": {"loss_scale": (np.float64(1e39),)},
    r"loss_scale should be a scalar\. Got shape \(2,\)": {"loss_scale": (np.ones(2),)},
    "factor should be 1 or above": {"factor": (0.5, math.nan)},
    "factor should be 1 or above and finite": {"factor": (math.inf,)},
    "period should be a whole number from 1": {"period": (0, -1, 2.5, math.nan, math.inf)},
    r"period should be a whole number from 1 to 2\*\*31 - 1\. Got 2147483648": {"period": (2**31,)},
    "min_loss_scale should be 0 or above": {"min_loss_scale": (-1.0, math.nan)},
    "min_loss_scale should be 0 or above, and finite": {"min_loss_scale": (math.inf,)},
    "max_loss_scale should be above 0": {"max_loss_scale": (math.nan,)},
    "max_loss_scale should be above 0 and a finite float32": {"max_loss_scale": (math.inf,)},
    "backoff_factor should be None, or between 0 and 1": {"backoff_factor": (0.0, 1.0, math.nan)},
    "backoff_factor should be None, or between 0 and 1 and a normal float32": {"backoff_factor": (1e-39,)},
    "hysteresis should be": {"hysteresis": (1.5,)},
    "hysteresis should be a whole number from 0": {"hysteresis": (-1,)},
    r"hysteresis_refill should be 'growth' or 'finite'\. Got never": {"hysteresis_refill": ("never",)},
    r"counter should be a whole number from 0 to .*\. Got -1": {"counter": (-1,)},
    r"counter should be a whole number from 0 to .*\. Got 1\.5": {"counter": (1.5,)},
    r"counter should be a scalar\. Got shape \(2,\)": {"counter": (np.zeros(2, int),)},
}
# Settings that do not fit each other.
UNFIT = [
    ({"loss_scale": 1e-60, "min_loss_scale": 0.0}, "loss_scale should be above 0 and finite in float32"),
    (
        {"loss_scale": 64.0, "max_loss_scale": 32.0},
        r"loss_scale should be at most max_loss_scale, 32\.0\. Got 64",
    ),
    ({"min_loss_scale": 2.0, "max_loss_scale": 1.0}, "min_loss_scale should be at most max_loss_scale"),
    ({"max_loss_scale": 0.0, "min_loss_scale": 0.0}, "max_loss_scale should be above 0"),
]


NUMBERS = ("period", "factor", "min_loss_scale", "max_loss_scale", "hysteresis")


def test_invalid_settings_are_a_value_error_that_says_so():
    alone = [({name: value}, said) for said, of in INVALID.items() for name in of for value in of[name]]
    for settings, message in alone + UNFIT:
        with pytest.raises(ValueError, match=message):
            jmp_lite.DynamicLossScale(**settings)


def test_an_invalid_static_scale_is_a_value_error():
    for value in (0, 0.0, -1.0, math.nan, math.inf, np.float64(1e39)):
        with pytest.raises(ValueError, match="loss_scale should be above 0 and finite"):
            jmp_lite.StaticLossScale(value)
    with pytest.raises(ValueError, match=r"should be a scalar\. Got shape \(3,\)"):
        jmp_lite.StaticLossScale(jnp.ones(3))


@pytest.mark.parametrize("value", ["1024", True, None, [2.0]], ids=repr)
def test_a_setting_that_is_no_number_is_a_type_error(value):
    for setting in ("loss_scale", "counter", *NUMBERS):
        said = rf"{setting} should be a number\. Got .* of type {type(value).__name__}"
        with pytest.raises(TypeError, match=said):
            jmp_lite.DynamicLossScale(**{setting: value})
    with pytest.raises(TypeError, match="loss_scale should be a number"):
        jmp_lite.StaticLossScale(value)


def test_a_traced_setting_is_a_type_error_that_says_what_to_do():
    for setting in NUMBERS:
        build = lambda value, setting=setting: jmp_lite.DynamicLossScale(**{setting: value})
        said = f"{setting} is a traced value. It is a setting, part of the compiled"
        with pytest.raises(TypeError, match=said):
            jax.jit(build)(jnp.float32(3))


@pytest.mark.parametrize("bound", [0.1, 0.3, 0.7])
def test_a_scale_may_be_built_at_its_own_bounds(bound):
    # 0.7 is above the float32 nearest to it, 0.1 below.
    scale = jmp_lite.DynamicLossScale(bound, min_loss_scale=bound, max_loss_scale=bound)
    assert float(scale.loss_scale) == f32(bound)
    assert jmp_lite.DynamicLossScale(period=2**31 - 1).period == 2**31 - 1


def test_a_scale_that_backed_off_to_its_minimum_can_be_rebuilt():
    scale = jmp_lite.DynamicLossScale(0.75, min_loss_scale=0.7).adjust(jnp.bool_(False))
    assert float(scale.loss_scale) == f32(0.7)
    assert state_of(dataclasses.replace(scale)) == state_of(scale)


def test_settings_given_as_arrays_become_python_numbers():
    scale = jmp_lite.DynamicLossScale(
        8.0,
        period=np.int64(3),
        factor=jnp.float32(4),
        min_loss_scale=jnp.float32(2),
        max_loss_scale=jnp.float32(64),
        backoff_factor=jnp.float32(0.5),
        hysteresis=jnp.int32(1),
    )
    step = jax.jit(lambda scale: scale.adjust(jnp.bool_(False)))
    assert state_of(step(step(scale))) == (4.0, 0, 0)


def test_a_scale_can_be_built_from_a_traced_number():
    built = jax.jit(lambda value: jmp_lite.DynamicLossScale(value, counter=jnp.int32(value)))(jnp.float16(4))
    assert_strong(built)
    assert state_of(built) == (4.0, 4, 0)
    static = jax.jit(jmp_lite.StaticLossScale)(jnp.float16(4))
    assert (static.loss_scale.dtype, float(static.loss_scale)) == (np.float32, 4.0)


@pytest.mark.parametrize(
    ("flag", "said"),
    [(jnp.ones(2, bool), r"bool\[2\]"), (jnp.int32(1), r"int32\[\]"), (1.0, "1.0"), (None, "None")],
)
def test_adjust_takes_only_a_boolean_scalar(flag, said):
    with pytest.raises(ValueError, match=rf"adjust takes one boolean scalar.*Got {said}"):
        jmp_lite.DynamicLossScale().adjust(flag)
    for constant in (jmp_lite.NoOpLossScale(), jmp_lite.StaticLossScale(2)):
        assert constant.adjust(flag) is constant  # As in jmp, which looks at nothing.


def test_a_scale_that_starts_below_the_minimum_stays_until_it_grows():
    scale = jmp_lite.DynamicLossScale(0.5, period=2)
    scales = []
    for finite in (False, True, True, False, True, True, False, False):
        scale = scale.adjust(jnp.bool_(finite))
        scales.append(float(scale.loss_scale))
    assert scales == [0.5, 0.5, 1, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("make", [jmp_lite.StaticLossScale, jmp_lite.DynamicLossScale])
def test_a_subnormal_scale_is_refused(make):
    """A device may flush it to zero: the gradients would be NaN."""
    assert float(make(TINY).loss_scale) == TINY
    with pytest.raises(ValueError, match=r"above 0 and finite in float32, at least 1\.18e-38\. Got 1e-40"):
        make(1e-40)
    assert np.isnan(jax.jit(make)(jnp.float32(1e-40)).loss_scale)
    with pytest.raises(
        ValueError, match="max_loss_scale should be above 0 and a finite float32 that is not subnormal"
    ):
        jmp_lite.DynamicLossScale(TINY, min_loss_scale=0.0, max_loss_scale=1e-39)

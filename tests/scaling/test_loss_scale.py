"""How a loss scale moves: against an oracle, against jmp, event by event."""

import math

import hypothesis
import jax
import jax.numpy as jnp
import jmp
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


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_eagerly, run_jitted, run_scanned])
@hypothesis.settings(max_examples=30)
@hypothesis.given(oracle=oracles(), events=events_lists)
def test_dynamic_scale_follows_the_oracle_bit_for_bit(run, oracle, events):
    scale = oracle.build()
    assert run(scale, events) == oracle.run(events)


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
        np.testing.assert_allclose(number, oracle.scale, rtol=2 * np.finfo(np.float32).eps)
        assert counts == [oracle.counter, oracle.left]


@pytest.mark.slow
@hypothesis.given(oracle=oracles(exact=False) | oracles(), events=events_lists)
def test_scale_stays_between_its_bounds_and_finite(oracle, events):
    for number, _, _ in run_eagerly(oracle.build(), events):
        assert oracle.minimum <= number <= oracle.maximum
        assert 0 < number < math.inf


@pytest.mark.slow
@hypothesis.given(oracle=oracles(), events=events_lists)
def test_power_of_two_stays_a_power_of_two(oracle, events):
    assert all(is_power_of_two(number) for number, _, _ in run_eagerly(oracle.build(), events))


@pytest.mark.parametrize("refill", ["growth", "finite"])
def test_extremes_are_never_passed_however_many_events(refill):
    for settings in ({}, {"min_loss_scale": 0.0}, {"min_loss_scale": 0.37}, {"hysteresis": 2}):
        scale = jmp_lite.DynamicLossScale(2.0**15, period=1, hysteresis_refill=refill, **settings)
        down = run_scanned(scale, [False] * 300)
        up = run_scanned(scale, [True] * 300)
        lowest = {0.0: TINY, 0.37: 0.5}.get(settings.get("min_loss_scale"), 1.0)
        assert down[-1][0] == lowest
        assert up[-1][0] == 2.0**127


@pytest.mark.parametrize("period", [1, 2, 7, 2000])
def test_growth_happens_on_exactly_the_nth_finite_step_in_a_row(period):
    events = [True] * (3 * period)
    scale = jmp_lite.DynamicLossScale(8.0, period=period)
    numbers = [number for number, _, _ in run_scanned(scale, events)]
    grown_at = [i + 1 for i, pair in enumerate(zip([8.0, *numbers], numbers)) if pair[0] != pair[1]]
    assert grown_at == [period, 2 * period, 3 * period]
    assert numbers[-1] == 64.0


def test_an_overflow_starts_the_count_again():
    scale = jmp_lite.DynamicLossScale(8.0, period=3)
    trajectory = run_eagerly(scale, [True, True, False, True, True, True])
    assert trajectory == [(8, 1, 0), (8, 2, 0), (4, 0, 0), (4, 1, 0), (4, 2, 0), (8, 0, 0)]


def test_growth_beyond_the_maximum_is_left_out():
    scale = jmp_lite.DynamicLossScale(8.0, period=1, factor=4, max_loss_scale=100.0)
    assert [n for n, _, _ in run_eagerly(scale, [True] * 3)] == [32.0, 32.0, 32.0]


def test_backoff_factor_is_its_own():
    scale = jmp_lite.DynamicLossScale(2.0**10, period=1, factor=2, backoff_factor=0.125)
    assert [n for n, _, _ in run_eagerly(scale, [False, True])] == [2.0**7, 2.0**8]


def test_hysteresis_tolerates_n_overflows_then_backs_off_on_each():
    scale = jmp_lite.DynamicLossScale(8.0, hysteresis=2)
    assert run_eagerly(scale, [False] * 4) == [(8, 0, 1), (8, 0, 0), (4, 0, 0), (2, 0, 0)]


def test_hysteresis_refills_on_growth_or_on_every_finite_step():
    events = [False, True, False, True, True, False]
    on_growth = jmp_lite.DynamicLossScale(8.0, period=2, hysteresis=1)
    assert run_eagerly(on_growth, events) == [
        (8, 0, 0),
        (8, 1, 0),
        (4, 0, 0),
        (4, 1, 0),
        (8, 0, 1),
        (8, 0, 0),
    ]
    on_finite = jmp_lite.DynamicLossScale(8.0, period=2, hysteresis=1, hysteresis_refill="finite")
    assert run_eagerly(on_finite, events) == [
        (8, 0, 0),
        (8, 1, 1),
        (8, 0, 0),
        (8, 1, 1),
        (16, 0, 1),
        (16, 0, 0),
    ]


def test_a_power_of_two_minimum_that_is_not_one_stops_at_the_last_one_above():
    scale = jmp_lite.DynamicLossScale(32.0, min_loss_scale=3.0)
    assert [n for n, _, _ in run_eagerly(scale, [False] * 5)] == [16.0, 8.0, 4.0, 4.0, 4.0]


def test_a_backoff_that_keeps_above_the_minimum_is_not_bent():
    # 8 / 3 lies above the minimum, so the minimum has no say, though 8 is a power of two.
    scale = jmp_lite.DynamicLossScale(8.0, factor=3, min_loss_scale=2.5)
    assert float(scale.adjust(jnp.bool_(False)).loss_scale) == f32(8 / 3)


@pytest.mark.slow
@hypothesis.given(
    exponent=st.integers(0, 127),
    period=st.integers(1, 4),
    factor=st.sampled_from([2, 2.0, 3, 8]),
    events=events_lists,
)
def test_jmp_gives_the_same_bits(exponent, period, factor, events):
    start = jnp.float32(2.0**exponent), jnp.int32(0)  # jmp computes with NumPy's numbers, which warn.
    ours = jmp_lite.DynamicLossScale(*start, period, factor)
    theirs = jmp.DynamicLossScale(*start, period, factor)
    for finite in events:
        ours, theirs = ours.adjust(jnp.bool_(finite)), theirs.adjust(jnp.bool_(finite))
        assert np.asarray(ours.loss_scale).tobytes() == np.asarray(theirs.loss_scale, np.float32).tobytes()
        assert int(ours.counter) == int(theirs.counter)


# A factor of 1


def test_with_a_factor_of_1_the_scale_only_falls():
    scale = jmp_lite.DynamicLossScale(8.0, period=1, factor=1)
    scales = []
    for finite in (True, True, False, True, False, True):
        scale = scale.adjust(jnp.bool_(finite))
        scales.append(float(scale.loss_scale))
    assert scales == [8, 8, 4, 4, 2, 2]
    quarter = jmp_lite.DynamicLossScale(8.0, factor=1, backoff_factor=0.25)
    assert float(quarter.adjust(jnp.bool_(False)).loss_scale) == 2

"""The three loss scales: an oracle in plain Python, jmp beside it, and the laws they keep."""

import copy
import dataclasses
import math
import pickle
import struct
import warnings

import hypothesis
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from hypothesis import strategies as st

import jmp_lite

TINY = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)


def f32(number):
    """A Python number rounded to float32."""
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return math.inf


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


def state_of(scale):
    left = 0 if scale.hysteresis_left is None else int(scale.hysteresis_left)
    return float(scale.loss_scale), int(scale.counter), left


def assert_strong(scale):
    """Strongly typed scalars: float32 and int32."""
    scale = jax.tree.map(jnp.asarray, scale)
    assert scale.loss_scale.dtype == np.float32
    assert scale.counter.dtype == np.int32
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(scale))
    assert all(leaf.shape == () for leaf in jax.tree.leaves(scale))


def rebuilt(scale):
    leaves, structure = jax.tree.flatten(scale)
    return jax.tree.unflatten(structure, leaves)


def run_eagerly(scale, events):
    trajectory = []
    for finite in events:
        scale = rebuilt(scale.adjust(jnp.bool_(finite)))
        trajectory.append(state_of(scale))
    return trajectory


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


@pytest.mark.parametrize("run", [run_eagerly, run_jitted, run_scanned])
@hypothesis.settings(max_examples=30)
@hypothesis.given(oracle=oracles(), events=events_lists)
def test_dynamic_scale_follows_the_oracle_bit_for_bit(run, oracle, events):
    scale = oracle.build()
    assert run(scale, events) == oracle.run(events)


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


@hypothesis.given(oracle=oracles(exact=False) | oracles(), events=events_lists)
def test_scale_stays_between_its_bounds_and_finite(oracle, events):
    for number, _, _ in run_eagerly(oracle.build(), events):
        assert oracle.minimum <= number <= oracle.maximum
        assert 0 < number < math.inf


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


@hypothesis.given(
    exponent=st.integers(0, 127),
    period=st.integers(1, 4),
    factor=st.sampled_from([2, 2.0, 3, 8]),
    events=events_lists,
)
def test_jmp_gives_the_same_bits(exponent, period, factor, events):
    ours = jmp_lite.DynamicLossScale(np.float32(2.0**exponent), np.int32(0), period, factor)
    theirs = jmp.DynamicLossScale(np.float32(2.0**exponent), np.int32(0), period, factor)
    for finite in events:
        ours, theirs = ours.adjust(jnp.bool_(finite)), theirs.adjust(jnp.bool_(finite))
        assert np.asarray(ours.loss_scale).tobytes() == np.asarray(theirs.loss_scale, np.float32).tobytes()
        assert int(ours.counter) == int(theirs.counter)


# A factor of 1


def test_with_a_factor_of_1_the_scale_only_falls():
    scale = jmp_lite.DynamicLossScale(8.0, period=1, factor=1)
    found = []
    for finite in (True, True, False, True, False, True):
        scale = scale.adjust(jnp.bool_(finite))
        found.append(float(scale.loss_scale))
    assert found == [8, 8, 4, 4, 2, 2]
    quarter = jmp_lite.DynamicLossScale(8.0, factor=1, backoff_factor=0.25)
    assert float(quarter.adjust(jnp.bool_(False)).loss_scale) == 2


# Construction


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
    with pytest.warns(UserWarning, match="Expected floating type for loss_scale, got int32") as caught:
        scale = jmp_lite.DynamicLossScale(value)
    assert caught[0].filename == __file__
    assert_strong(scale)
    with pytest.warns(UserWarning, match="Expected floating type for min_loss_scale, got int32"):
        jmp_lite.DynamicLossScale(2.0, min_loss_scale=value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jmp_lite.StaticLossScale(value).loss_scale.dtype == np.float32


INVALID = [
    ({"loss_scale": 0.0}, "loss_scale should be above 0 and finite"),
    ({"loss_scale": -2.0}, "loss_scale should be above 0 and finite"),
    ({"loss_scale": math.nan}, "loss_scale should be above 0 and finite"),
    ({"loss_scale": math.inf}, "loss_scale should be above 0 and finite"),
    ({"loss_scale": jnp.float32(0)}, "loss_scale should be above 0 and finite"),
    ({"loss_scale": np.float64(1e39)}, "loss_scale should be above 0 and finite in float32"),
    ({"loss_scale": 1e-60, "min_loss_scale": 0.0}, "loss_scale should be above 0 and finite in float32"),
    ({"loss_scale": np.ones(2)}, r"loss_scale should be a scalar, got shape \(2,\)"),
    (
        {"loss_scale": 64.0, "max_loss_scale": 32.0},
        "loss_scale should be at most max_loss_scale, 32.0, got 64",
    ),
    ({"period": 2**31}, r"period should be a whole number from 1 to 2\*\*31 - 1, got 2147483648"),
    ({"backoff_factor": 1e-39}, "backoff_factor should be None, or between 0 and 1 and a normal float32"),
    ({"factor": 0.5}, "factor should be 1 or above"),
    ({"factor": math.nan}, "factor should be 1 or above"),
    ({"factor": math.inf}, "factor should be 1 or above and finite"),
    ({"period": 0}, "period should be a whole number from 1"),
    ({"period": -1}, "period should be a whole number from 1"),
    ({"period": 2.5}, "period should be a whole number from 1"),
    ({"period": math.nan}, "period should be a whole number from 1"),
    ({"period": math.inf}, "period should be a whole number from 1"),
    ({"min_loss_scale": -1.0}, "min_loss_scale should be 0 or above"),
    ({"min_loss_scale": math.nan}, "min_loss_scale should be 0 or above"),
    ({"min_loss_scale": math.inf}, "min_loss_scale should be 0 or above, and finite"),
    ({"min_loss_scale": 2.0, "max_loss_scale": 1.0}, "min_loss_scale should be at most max_loss_scale"),
    ({"max_loss_scale": math.inf}, "max_loss_scale should be above 0 and a finite float32"),
    ({"max_loss_scale": math.nan}, "max_loss_scale should be above 0"),
    ({"max_loss_scale": 0.0, "min_loss_scale": 0.0}, "max_loss_scale should be above 0"),
    ({"backoff_factor": 0.0}, "backoff_factor should be None, or between 0 and 1"),
    ({"backoff_factor": 1.0}, "backoff_factor should be None, or between 0 and 1"),
    ({"backoff_factor": math.nan}, "backoff_factor should be None, or between 0 and 1"),
    ({"hysteresis": -1}, "hysteresis should be a whole number from 0"),
    ({"hysteresis": 1.5}, "hysteresis should be"),
    ({"hysteresis_refill": "never"}, "hysteresis_refill should be 'growth' or 'finite', got never"),
    ({"counter": -1}, "counter should be a whole number from 0 to .*, got -1"),
    ({"counter": 1.5}, "counter should be a whole number from 0 to .*, got 1.5"),
    ({"counter": np.zeros(2, int)}, r"counter should be a scalar, got shape \(2,\)"),
]
NO_NUMBERS = ["1024", True, None, [2.0], (2.0,), b"2", 1j, {}]


@pytest.mark.parametrize(
    ("settings", "message"), INVALID, ids=lambda v: str(v) if isinstance(v, dict) else ""
)
def test_invalid_settings_are_a_value_error_that_says_so(settings, message):
    with pytest.raises(ValueError, match=message):
        jmp_lite.DynamicLossScale(**settings)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf, np.float64(1e39)])
def test_an_invalid_static_scale_is_a_value_error(value):
    with pytest.raises(ValueError, match="loss_scale should be above 0 and finite"):
        jmp_lite.StaticLossScale(value)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    "setting",
    ["loss_scale", "counter", "period", "factor", "min_loss_scale", "max_loss_scale", "hysteresis"],
)
def test_a_setting_that_is_no_number_is_a_type_error(setting, value):
    with pytest.raises(
        TypeError, match=f"{setting} should be a number, got .* of type {type(value).__name__}"
    ):
        jmp_lite.DynamicLossScale(**{setting: value})
    with pytest.raises(TypeError, match="loss_scale should be a number"):
        jmp_lite.StaticLossScale(value)


@pytest.mark.parametrize("setting", ["period", "factor", "min_loss_scale", "max_loss_scale", "hysteresis"])
def test_a_traced_setting_is_a_type_error_that_says_what_to_do(setting):
    build = lambda value: jmp_lite.DynamicLossScale(**{setting: value})
    with pytest.raises(
        TypeError, match=f"{setting} is a traced value. It is a setting, part of the compiled"
    ):
        jax.jit(build)(jnp.float32(3))


def test_a_static_scale_that_is_no_scalar_is_a_value_error():
    with pytest.raises(ValueError, match=r"should be a scalar, got shape \(3,\)"):
        jmp_lite.StaticLossScale(jnp.ones(3))


@pytest.mark.parametrize("bound", [0.1, 0.3, 0.7])
def test_a_scale_may_be_built_at_its_own_bounds(bound):
    # 0.7 is above the float32 nearest to it, 0.1 below.
    scale = jmp_lite.DynamicLossScale(bound, min_loss_scale=bound, max_loss_scale=bound)
    assert float(scale.loss_scale) == f32(bound)


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


@pytest.mark.parametrize("flag", [jnp.ones(2, bool), jnp.int32(1), 1.0, None])
def test_adjust_turns_down_what_is_no_boolean_scalar(flag):
    with pytest.raises(ValueError, match=r"adjust takes one boolean scalar.*Got shape"):
        jmp_lite.DynamicLossScale().adjust(flag)
    for constant in (jmp_lite.NoOpLossScale(), jmp_lite.StaticLossScale(2)):
        assert constant.adjust(flag) is constant  # As in jmp, which looks at nothing.


def test_a_scale_that_starts_below_the_minimum_stays_until_it_grows():
    scale = jmp_lite.DynamicLossScale(0.5, period=2)
    found = []
    for finite in (False, True, True, False, True, True, False, False):
        scale = scale.adjust(jnp.bool_(finite))
        found.append(float(scale.loss_scale))
    assert found == [0.5, 0.5, 1, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("counter", [0, 1, 2, 3, 4, 5, 8, 4500])
@pytest.mark.parametrize("finite", [True, False])
def test_a_counter_beyond_the_period_goes_on_as_in_jmp(counter, finite):
    ours = jmp_lite.DynamicLossScale(8.0, counter=counter, period=3)
    theirs = jmp.DynamicLossScale(jnp.float32(8), jnp.int32(counter), period=3)
    for _ in range(4):
        ours, theirs = ours.adjust(jnp.bool_(finite)), theirs.adjust(jnp.bool_(finite))
        assert (float(ours.loss_scale), int(ours.counter)) == (float(theirs.loss_scale), int(theirs.counter))


# The scale as a pytree

HYSTERESIS = {
    "loss_scale": 2.0**10,
    "counter": 1,
    "period": 3,
    "factor": 4.0,
    "min_loss_scale": 0.25,
    "backoff_factor": 0.5,
    "max_loss_scale": 2.0**20,
    "hysteresis": 2,
    "hysteresis_refill": "finite",
    "hysteresis_left": 1,
}


def fields_of(scale):
    return {
        field.name: (float(value) if hasattr(value, "dtype") else value)
        for field in dataclasses.fields(scale)
        for value in [getattr(scale, field.name)]
    }


def through_scan(scale):
    return jax.lax.scan(lambda carry, _: (carry, None), scale, None, length=2)[0]


def through_grad_aux(scale):
    return jax.grad(lambda x: (x, scale), has_aux=True)(1.0)[1]


@pytest.mark.parametrize(
    "passage",
    [
        rebuilt,
        jax.jit(lambda scale: scale),
        through_scan,
        through_grad_aux,
        lambda scale: pickle.loads(pickle.dumps(scale)),
        copy.copy,
        copy.deepcopy,
        jax.device_put,
        lambda scale: jax.tree.map(lambda leaf: leaf, scale),
        lambda scale: dataclasses.replace(scale),
        lambda scale: jax.vmap(lambda s, _: s, in_axes=(None, 0), out_axes=None)(scale, jnp.ones(2)),
    ],
    ids=[
        "flatten",
        "jit",
        "scan",
        "grad",
        "pickle",
        "copy",
        "deepcopy",
        "device_put",
        "map",
        "replace",
        "vmap",
    ],
)
@pytest.mark.parametrize("settings", [HYSTERESIS, dict(HYSTERESIS, hysteresis=0, hysteresis_left=None)])
def test_every_field_survives(passage, settings):
    scale = jmp_lite.DynamicLossScale(**settings)
    assert fields_of(scale) == settings
    passed = passage(scale)
    assert type(passed) is jmp_lite.DynamicLossScale
    assert fields_of(passed) == settings
    assert_strong(passed)
    static = passage(jmp_lite.StaticLossScale(8.0))
    assert (type(static), float(static.loss_scale)) == (jmp_lite.StaticLossScale, 8.0)
    assert type(passage(jmp_lite.NoOpLossScale())) is jmp_lite.NoOpLossScale


def test_leaves_are_the_scale_and_the_counter_with_hysteresis_off():
    scale = jmp_lite.DynamicLossScale(jnp.float32(8), jnp.int32(3))
    leaves = jax.tree.leaves(scale)
    assert [float(leaf) for leaf in leaves] == [8.0, 3.0]
    assert [leaf.dtype for leaf in leaves] == [np.float32, np.int32]
    adjusted = jax.tree.leaves(scale.adjust(jnp.bool_(True)))
    assert [float(leaf) for leaf in adjusted] == [8.0, 4.0]
    assert len(jax.tree.leaves(jmp_lite.DynamicLossScale(8.0, hysteresis=2))) == 3
    assert jax.tree.leaves(jmp_lite.NoOpLossScale()) == []
    assert [float(leaf) for leaf in jax.tree.leaves(jmp_lite.StaticLossScale(8.0))] == [8.0]


def test_leaves_have_the_names_of_the_fields():
    names = [
        jax.tree_util.keystr(path, simple=True)
        for path, _ in jax.tree_util.tree_leaves_with_path(jmp_lite.DynamicLossScale(hysteresis=1))
    ]
    assert names == ["loss_scale", "counter", "hysteresis_left"]


def test_mapping_to_axes_specs_zeros_and_shapes_runs_no_check():
    scale = jmp_lite.DynamicLossScale(8.0, hysteresis=1)
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), scale)
    axes = jax.tree.map(lambda _: 0, scale)
    adjusted = jax.vmap(lambda s, f: s.adjust(f), in_axes=(axes, 0))(batch, jnp.array([False, True]))
    assert adjusted.hysteresis_left.tolist() == [0, 1]
    assert adjusted.counter.tolist() == [0, 1]
    assert float(jax.tree.map(jnp.zeros_like, scale).loss_scale) == 0.0
    assert jax.tree.map(lambda _: jax.sharding.PartitionSpec(), scale).counter == jax.sharding.PartitionSpec()
    assert jax.tree.map(lambda _: object, scale).period == 2000
    assert jax.eval_shape(lambda s: s, scale).loss_scale == jax.ShapeDtypeStruct((), np.float32)


def test_one_compilation_whatever_the_scale_was_built_from():
    traces = []

    @jax.jit
    def step(scale, finite):
        traces.append(1)
        return scale.adjust(finite)

    for value in (4.0, np.float64(4), jnp.float16(4), jnp.asarray(4.0)):
        scale = jmp_lite.DynamicLossScale(value)
        for finite in (True, False, True):
            scale = step(scale, jnp.bool_(finite))
    assert len(traces) == 1


def test_each_member_of_a_batch_of_scales_adjusts_alone():
    events = [[True, True, False], [False, False, True], [True, True, True]]
    scales = jax.vmap(lambda n: jmp_lite.DynamicLossScale(n, period=2, hysteresis=1))(
        jnp.array([8.0, 16.0, 32.0])
    )
    for step in range(3):
        flags = jnp.array([member[step] for member in events])
        scales = jax.vmap(lambda scale, flag: scale.adjust(flag))(scales, flags)
    alone = [
        run_eagerly(jmp_lite.DynamicLossScale(n, period=2, hysteresis=1), member)[-1]
        for n, member in zip([8.0, 16.0, 32.0], events)
    ]
    assert [state_of(jax.tree.map(lambda leaf, i=i: leaf[i], scales)) for i in range(3)] == alone
    assert len({number for number, _, _ in alone}) == 3


def test_a_donated_scale_gives_its_buffers_to_the_next():
    step = jax.jit(lambda scale, finite: scale.adjust(finite), donate_argnums=0)
    scale = jax.tree.map(jnp.asarray, jmp_lite.DynamicLossScale(8.0, period=2, hysteresis=1))
    memory = step.lower(scale, jnp.bool_(True)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 12
    after = step(step(scale, jnp.bool_(True)), jnp.bool_(True))
    assert scale.loss_scale.is_deleted()
    assert state_of(after) == (16.0, 0, 1)


# scale and unscale

SCALES = [jmp_lite.StaticLossScale(2.0**16), jmp_lite.DynamicLossScale(2.0**16)]


@pytest.mark.parametrize("scale", SCALES, ids=["static", "dynamic"])
def test_a_half_loss_times_65536_is_not_inf(scale):
    for dtype in (jnp.float16, jnp.bfloat16):
        scaled = scale.scale(jnp.asarray(1, dtype))
        assert (scaled.dtype, float(scaled)) == (np.float32, 65536.0)


@pytest.mark.parametrize("scale", SCALES, ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float8_e4m3fn", "float32"),
        ("float32", "float32"),
        ("complex64", "complex64"),
    ],
)
def test_dtypes_after_scaling_and_unscaling(scale, given, expected):
    leaf = jnp.asarray([1, 2], given)
    for result, value in ((scale.scale(leaf), 2.0**17), (scale.unscale(leaf), 2.0**-15)):
        assert result.dtype == expected
        assert complex(result[1]) == value


@pytest.mark.parametrize("scale", SCALES, ids=["static", "dynamic"])
def test_float64_stays_float64(scale):
    with jax.enable_x64(True):
        tiny = 1 + 2.0**-40
        scaled = scale.scale({"jax": jnp.float64(tiny), "numpy": np.float64(tiny), "c": jnp.complex128(tiny)})
        assert [leaf.dtype.name for leaf in jax.tree.leaves(scaled)] == ["complex128", "float64", "float64"]
        assert all(complex(leaf) == tiny * 2.0**16 for leaf in jax.tree.leaves(scaled))
        assert scale.unscale(jnp.float16(1)).dtype == np.float32
        assert float(scale.unscale(scaled)["jax"]) == tiny


@pytest.mark.parametrize("scale", SCALES, ids=["static", "dynamic"])
def test_leaves_that_are_not_floating_pass_through(scale):
    def function():
        pass

    tree = {
        "int": jnp.arange(3),
        "numpy": np.arange(3),
        "bool": jnp.bool_(True),
        "key": jax.random.key(0),
        "old_key": jax.random.PRNGKey(0),
        "float0": np.zeros(2, jax.dtypes.float0),
        "function": function,
        "integer": 3,
        "truth": True,
    }
    for result in (scale.scale(tree), scale.unscale(tree)):
        assert all(result[name] is tree[name] for name in tree)
    assert scale.unscale({"none": None, "x": jnp.float32(2.0**16)}) == {"none": None, "x": 1.0}


@pytest.mark.parametrize("scale", SCALES, ids=["static", "dynamic"])
def test_python_numbers_scale_in_float32(scale):
    assert (scale.scale(2.0).dtype, float(scale.scale(2.0))) == (np.float32, 2.0**17)
    assert complex(scale.scale(2 + 1j)) == 2.0**17 + 2.0**16 * 1j


def test_complex_values_keep_inf_and_do_not_overflow():
    scale = jmp_lite.StaticLossScale(2.0**100)
    value = jnp.asarray(complex(math.inf, 1.0), jnp.complex64)
    unscaled = scale.unscale(value)
    assert (float(unscaled.real), float(unscaled.imag)) == (math.inf, 2.0**-100)
    scaled = scale.scale(value)
    assert (float(scaled.real), float(scaled.imag)) == (math.inf, 2.0**100)


@hypothesis.given(exponent=st.integers(-126, 127), number=st.floats(2.0**-14, 65504, width=16))
def test_scaling_there_and_back_is_exact_for_a_power_of_two(exponent, number):
    scale = jmp_lite.StaticLossScale(2.0**exponent)
    hypothesis.assume(TINY <= number * 2.0**exponent <= LARGEST)
    there = scale.scale(jnp.float16(number))
    assert float(there) == number * 2.0**exponent
    assert float(scale.unscale(there)) == number


def test_a_scale_of_the_largest_power_of_two_still_unscales():
    # The reciprocal of 2**127 is subnormal and flushed to zero: a division, not a product.
    scale = jmp_lite.StaticLossScale(2.0**127)
    assert float(jax.jit(lambda s, x: s.unscale(x))(scale, jnp.float32(2.0**127))) == 1.0


def test_no_op_scale_touches_nothing():
    scale = jmp_lite.NoOpLossScale()
    tree = {"h": jnp.float16(2), "n": 1, "x": object()}
    assert scale.scale(tree) is tree
    assert scale.unscale(tree) is tree
    assert scale.adjust(jnp.bool_(False)) is scale
    assert (scale.loss_scale, np.asarray(scale.loss_scale).dtype) == (1.0, np.float32)


def test_static_scale_never_changes():
    scale = jmp_lite.StaticLossScale(8.0)
    for flag in (True, False):
        assert scale.adjust(jnp.bool_(flag)) is scale


@pytest.mark.parametrize(
    "scale", [jmp_lite.NoOpLossScale(), jmp_lite.StaticLossScale(2.0), jmp_lite.DynamicLossScale()]
)
def test_the_three_and_a_class_of_ones_own_are_loss_scales(scale):
    class Own:
        loss_scale = np.float32(1)
        scale = unscale = adjust = lambda self, x: x

    assert isinstance(scale, jmp_lite.LossScale)
    assert isinstance(Own(), jmp_lite.LossScale)
    assert not isinstance(1.0, jmp_lite.LossScale)
    assert not isinstance(jmp_lite.get_policy("half"), jmp_lite.LossScale)


def test_scales_cannot_be_changed_in_place():
    for scale in (*SCALES, jmp_lite.NoOpLossScale()):
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
            scale.loss_scale = 1.0

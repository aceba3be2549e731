"""The settings of a loss scale: which are taken, and which are errors."""

import dataclasses
import math
import warnings

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import jmp_lite
from tests.support.scales import LARGEST, assert_strong, f32, state_of


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


INVALID = [
    ({"loss_scale": 0.0}, "loss_scale should be above 0 and finite"),
    ({"loss_scale": -2.0}, "loss_scale should be above 0 and finite"),
    ({"loss_scale": math.nan}, "loss_scale should be above 0 and finite"),
    ({"loss_scale": math.inf}, "loss_scale should be above 0 and finite"),
    ({"loss_scale": jnp.float32(0)}, "loss_scale should be above 0 and finite"),
    ({"loss_scale": np.float64(1e39)}, "loss_scale should be above 0 and finite in float32"),
    ({"loss_scale": 1e-60, "min_loss_scale": 0.0}, "loss_scale should be above 0 and finite in float32"),
    ({"loss_scale": np.ones(2)}, r"loss_scale should be a scalar\. Got shape \(2,\)"),
    (
        {"loss_scale": 64.0, "max_loss_scale": 32.0},
        r"loss_scale should be at most max_loss_scale, 32\.0\. Got 64",
    ),
    ({"period": 2**31}, r"period should be a whole number from 1 to 2\*\*31 - 1\. Got 2147483648"),
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
    ({"hysteresis_refill": "never"}, r"hysteresis_refill should be 'growth' or 'finite'\. Got never"),
    ({"counter": -1}, r"counter should be a whole number from 0 to .*\. Got -1"),
    ({"counter": 1.5}, r"counter should be a whole number from 0 to .*\. Got 1\.5"),
    ({"counter": np.zeros(2, int)}, r"counter should be a scalar\. Got shape \(2,\)"),
]


NO_NUMBERS = ["1024", True, None, [2.0]]


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
        TypeError, match=rf"{setting} should be a number\. Got .* of type {type(value).__name__}"
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
    with pytest.raises(ValueError, match=r"should be a scalar\. Got shape \(3,\)"):
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
def test_adjust_takes_only_a_boolean_scalar(flag):
    with pytest.raises(ValueError, match=r"adjust takes one boolean scalar.*Got shape"):
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


@pytest.mark.parametrize("counter", [0, 1, 2, 3, 4, 5, 8, 4500])
@pytest.mark.parametrize("finite", [True, False])
def test_a_counter_beyond_the_period_continues_as_in_jmp(counter, finite):
    ours = jmp_lite.DynamicLossScale(8.0, counter=counter, period=3)
    theirs = jmp.DynamicLossScale(jnp.float32(8), jnp.int32(counter), period=3)
    for _ in range(4):
        ours, theirs = ours.adjust(jnp.bool_(finite)), theirs.adjust(jnp.bool_(finite))
        assert (float(ours.loss_scale), int(ours.counter)) == (float(theirs.loss_scale), int(theirs.counter))

"""A loss scale is a pytree, and multiplies and divides pytrees."""

import copy
import dataclasses
import math
import pickle

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jmp_lite
from tests.support.finite_trees import NOT_FLOATING
from tests.support.scales import LARGEST, TINY, assert_strong, rebuilt

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


PASSAGES = {
    "flatten": rebuilt,
    "jit": jax.jit(lambda scale: scale),
    "scan": lambda scale: jax.lax.scan(lambda carry, _: (carry, None), scale, None, length=2)[0],
    "grad": lambda scale: jax.grad(lambda x: (x, scale), has_aux=True)(1.0)[1],
    "pickle": lambda scale: pickle.loads(pickle.dumps(scale)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "device_put": jax.device_put,
    "map": lambda scale: jax.tree.map(lambda leaf: leaf, scale),
    "replace": dataclasses.replace,
    "vmap": lambda scale: jax.vmap(lambda s, _: s, in_axes=(None, 0), out_axes=None)(scale, jnp.ones(2)),
}


@pytest.mark.parametrize("name", PASSAGES)
def test_every_field_survives(name):
    passage = PASSAGES[name]
    for settings in (HYSTERESIS, dict(HYSTERESIS, hysteresis=0, hysteresis_left=None)):
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


@pytest.mark.slow
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


# scale and unscale


SCALES = [jmp_lite.StaticLossScale(2.0**16), jmp_lite.DynamicLossScale(2.0**16)]


@pytest.mark.parametrize("scale", SCALES, ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [*((d, "float32") for d in ("float16", "bfloat16", "float8_e4m3fn", "float32")), ("complex64",) * 2],
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
    for result in (scale.scale(NOT_FLOATING), scale.unscale(NOT_FLOATING)):
        assert [name for name, leaf in NOT_FLOATING.items() if result[name] is not leaf] == []
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


def test_no_op_scale_touches_nothing():
    scale = jmp_lite.NoOpLossScale()
    tree = {"h": jnp.float16(2), "n": 1, "x": object()}
    assert scale.scale(tree) is tree
    assert scale.unscale(tree) is tree
    assert scale.adjust(jnp.bool_(False)) is scale
    assert (scale.loss_scale, np.asarray(scale.loss_scale).dtype) == (1.0, np.float32)


def test_the_three_and_a_class_of_ones_own_are_loss_scales():
    class Own:
        loss_scale = np.float32(1)
        scale = unscale = adjust = lambda self, x: x

    for scale in (*SCALES, jmp_lite.NoOpLossScale(), Own()):
        assert isinstance(scale, jmp_lite.LossScale)
    assert not isinstance(1.0, jmp_lite.LossScale)
    assert not isinstance(jmp_lite.get_policy("half"), jmp_lite.LossScale)


def test_scales_cannot_be_changed_in_place():
    for scale in (*SCALES, jmp_lite.NoOpLossScale()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            scale.loss_scale = 1.0

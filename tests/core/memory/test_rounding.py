"""Rounding to a narrower dtype, to nearest and stochastically."""

import hypothesis.extra.numpy as arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jmp_lite as jmp
from jmp_lite._memory.rounding import next_key, random_bits, round_to, rounding_key, update_to

DTYPES = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
HALF = ["bfloat16", "float16"]
# Float32 numbers as the 32 bits that they are: normal, subnormal, inf and NaN alike.
PATTERNS = arrays.arrays(np.uint32, 64, elements=st.integers(0, 2**32 - 1))
ROUND = {
    dtype: jax.jit(lambda x, seed, dtype=dtype: jmp.stochastic_round(x, dtype, jax.random.key(seed)))
    for dtype in DTYPES
}
NEAREST = {dtype: jax.jit(lambda x, dtype=dtype: round_to(x, np.dtype(dtype))) for dtype in DTYPES}


def as_numbers(patterns):
    """The numbers of these bit patterns without the subnormal ones of float32, which hardware may flush."""
    x = patterns.view(np.float32)
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


def numpy_cast(x, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def neighbours(x, dtype):
    """The largest number of `dtype` that is at most x, and the smallest that is at least x."""
    near = numpy_cast(x, dtype)
    wide = near.astype(np.float32)
    below = np.where(wide <= x, near, np.nextafter(near, np.array(-np.inf, dtype)))
    above = np.where(wide >= x, near, np.nextafter(near, np.array(np.inf, dtype)))
    return below.astype(np.float32), above.astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@given(patterns=PATTERNS)
def test_rounding_to_nearest_is_the_cast_of_numpy(dtype, patterns):
    x = as_numbers(patterns)
    got = numpy_cast(np.asarray(NEAREST[dtype](x)), dtype)
    np.testing.assert_array_equal(got.astype(np.float32), numpy_cast(x, dtype).astype(np.float32))
    number = ~np.isnan(x)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(x)[number])


@pytest.mark.parametrize("dtype", HALF)
@given(patterns=PATTERNS, seed=st.integers(0, 2**31 - 1))
def test_a_number_is_rounded_to_one_of_its_neighbours(dtype, patterns, seed):
    x = as_numbers(patterns)
    x = np.where(np.abs(x) <= float(jnp.finfo(dtype).max), x, np.float32(1.1))
    got = np.asarray(ROUND[dtype](x, seed))
    assert got.dtype == np.dtype(dtype)
    below, above = neighbours(x, dtype)
    got = got.astype(np.float32)
    assert ((got == below) | (got == above)).all()
    assert (np.abs(got) <= float(jnp.finfo(dtype).max)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 2**31 - 1))
def test_every_number_of_the_dtype_stays_as_it_is(dtype, seed):
    bits = np.dtype(dtype).itemsize * 8
    every = np.arange(2**bits, dtype=f"uint{bits}").view(dtype).astype(np.float32)
    every = np.where(np.abs(every) < np.finfo(np.float32).tiny, 0, every)
    got = np.asarray(ROUND[dtype](every, seed)).astype(np.float32)
    np.testing.assert_array_equal(got, every)


def test_subnormal_numbers_of_float32_are_rounded_as_the_others():
    """The hardware may flush such a number in a sum, but bfloat16 is made of bits."""
    x = np.array([2**-130 + 2**-140, -(2**-130)], np.float32)
    got = np.asarray(ROUND["bfloat16"](x, 0))
    assert got.view(np.uint16).tolist() == (x.view(np.uint32) >> 16).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_inf_and_nan_stay(dtype):
    x = np.array([np.inf, -np.inf, np.nan, -np.nan], np.float32)
    x = np.append(x, np.array([0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32))
    got = np.asarray(ROUND[dtype](x, 0)).astype(np.float32)
    np.testing.assert_array_equal(got, numpy_cast(x, dtype).astype(np.float32))


def test_beyond_the_largest_number_it_is_rounded_to_nearest():
    x = np.array([65504, 65519.99, -65519.99, 65520, -65520, 1e38], np.float32)
    for seed in range(20):
        got = np.asarray(ROUND["float16"](x, seed))
        assert got.tolist() == [65504, 65504, -65504, np.inf, -np.inf, np.inf]
    largest = float(jnp.finfo("bfloat16").max)
    for share, result in [(0.4, largest), (0.6, np.inf)]:
        x = jnp.full(100, largest + share * 2.0**120, jnp.float32)
        assert (np.asarray(ROUND["bfloat16"](x, 3)).astype(np.float32) == result).all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("exponent", [-25, -15, 0, 15])
def test_the_mean_of_the_results_is_the_number(dtype, exponent):
    """The count of the upper neighbours is binomial. Five standard deviations: one chance in 2 million."""
    draws = 40_000
    shares = np.array([0.02, 0.25, 0.5, 0.9], np.float32)
    below, above = neighbours(np.full(4, 1.000001 * 2.0**exponent, np.float32), dtype)
    x = (below + shares * (above - below)).astype(np.float32)
    exact = (x - below) / (above - below)
    got = ROUND[dtype](jnp.broadcast_to(x, (draws, 4)), exponent + 100)
    ups = np.mean(np.asarray(got).astype(np.float32) == above, axis=0)
    assert (np.abs(ups - exact) < 5 * np.sqrt(exact * (1 - exact) / draws)).all()


def test_the_same_key_gives_the_same_result_and_another_key_another_one():
    x = jnp.full(1000, 1 + 2.0**-9)
    first = ROUND["bfloat16"](x, 0)
    old_key = jax.jit(lambda x: jmp.stochastic_round(x, jnp.bfloat16, jax.random.PRNGKey(0)))
    assert (first == old_key(x)).all()
    assert 0.25 < float(jnp.mean(first != ROUND["bfloat16"](x, 1))) < 0.5  # 2 * 1/4 * 3/4 = 0.375.


@pytest.mark.slow
def test_a_raw_key_of_either_generator_is_the_key():
    x = jnp.full(1000, 1 + 2.0**-9)
    for name in ("threefry2x32", "rbg"):
        with jax.default_prng_impl(name):
            raw = jmp.stochastic_round(x, jnp.bfloat16, jax.random.PRNGKey(5))
            assert (raw == jmp.stochastic_round(x, jnp.bfloat16, jax.random.key(5))).all()


# The random bits


def test_the_bits_are_fair_and_those_of_steps_leaves_and_neighbours_do_not_depend_on_each_other():
    """Correlations of 20,000 fair bits have a standard deviation of 1 / sqrt(20,000)."""
    count = 20_000
    x = jnp.ones(count)
    key = rounding_key("", jax.random.key(0))
    draws = [
        random_bits(key, 0, x),
        random_bits(next_key(key), 0, x),
        random_bits(key, 1, x),
        random_bits(rounding_key("", jax.random.key(1)), 0, x),
        jnp.roll(random_bits(key, 0, x), 1),
    ]
    signs = np.array([2.0 * ((np.asarray(draw)[:, None] >> np.arange(32)) & 1) - 1 for draw in draws])
    signs = np.moveaxis(signs, 2, 1).reshape(-1, count)  # Every bit of every draw.
    correlations = signs @ signs.T / count
    np.testing.assert_array_less(np.abs(signs.mean(1)), 5 / np.sqrt(count))
    apart = correlations[~np.eye(len(signs), dtype=bool)]
    assert np.abs(apart).max() < 5.5 / np.sqrt(count)
    assert abs(apart.std() * np.sqrt(count) - 1) < 0.05


@pytest.mark.slow
def test_the_bits_of_an_array_do_not_depend_on_its_sharding():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    by_both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b"))
    key = rounding_key("", jax.random.key(0))
    x = jnp.ones((16, 6))
    whole = random_bits(key, 3, x)
    split = jax.jit(lambda key: random_bits(key, 3, x), out_shardings=by_both)
    np.testing.assert_array_equal(split(key), whole)
    assert "all-" not in split.lower(key).compile().as_text()
    np.testing.assert_array_equal(random_bits(key, 3, jnp.ones(96)), whole.ravel())


# The update


UPDATE = jax.jit(lambda old, new: old + update_to(old, new))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
@given(old=PATTERNS, new=PATTERNS)
def test_the_update_gives_the_new_number_up_to_a_unit_in_the_last_place_of_float32(dtype, old, new):
    finite = lambda x: np.where(np.abs(x) <= float(jnp.finfo(dtype).max) / 4, x, np.float32(1.1))
    old = finite(as_numbers(old)).astype(dtype)
    new = NEAREST[dtype](finite(as_numbers(new)))
    got = np.asarray(UPDATE(old, new))
    size = np.abs(old.astype(np.float32))
    flushed = np.abs(new - old.astype(np.float32)) < jnp.finfo(jnp.float32).tiny  # By XLA on a CPU.
    assert (np.abs(got - new) <= np.where(flushed, 2.0**-126, size * 2.0**-24)).all()
    near = (size * 2.0 ** (jnp.finfo(dtype).nmant - 23) <= np.abs(new)) & ~flushed
    np.testing.assert_array_equal(got[near], new[near])


# Misuse


def test_dtypes_that_need_no_rounding_are_an_error():
    with pytest.raises(
        ValueError, match=r"dtype is one of bfloat16, float16, .*Got float32. float32 needs no"
    ):
        jmp.stochastic_round(jnp.ones(2), "float32", jax.random.key(0))
    with pytest.raises(TypeError, match=r"Expected a floating dtype\. Got int8"):
        jmp.stochastic_round(jnp.ones(2), jnp.int8, jax.random.key(0))


@pytest.mark.parametrize("x", [jnp.arange(3), jnp.ones(2, jnp.complex64), jnp.bool_(True)])
def test_what_is_not_floating_is_an_error(x):
    with pytest.raises(TypeError, match=r"rounds floating numbers\. Got x of"):
        jmp.stochastic_round(x, "bfloat16", jax.random.key(0))


@pytest.mark.parametrize("key", [0, None, jnp.ones(2), jax.random.split(jax.random.key(0), 2)])
def test_what_is_no_key_is_an_error(key):
    with pytest.raises(TypeError, match=r"key is one PRNG key, such as jax.random.key\(0\)\. Got"):
        jmp.stochastic_round(jnp.ones(2), "bfloat16", key)


def test_an_axis_of_2_to_the_32_elements_has_random_bits():
    big = jax.ShapeDtypeStruct((2, 2**32), jnp.float16)
    bits = jax.eval_shape(lambda x: random_bits(rounding_key("", jax.random.key(0)), 0, x), big)
    assert (bits.shape, bits.dtype) == (big.shape, jnp.uint32)

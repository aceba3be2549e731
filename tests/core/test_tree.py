"""Casting and selecting: which leaves, which bits."""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite
from jmp_lite._tree import cast_floating, is_floating
from tests.support.finite_trees import NOT_FLOATING

# cast_floating


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32"])
def test_arrays_and_scalars_of_jax_and_numpy_are_cast_and_stay_what_they_are(target):
    dtype = np.dtype(target)
    for source in ("float16", "bfloat16", "float32", "float8_e4m3fn"):
        result = cast_floating({"x": jnp.ones((2, 3), source)}, target)["x"]
        assert isinstance(result, jax.Array)
        assert (result.dtype, result.shape) == (dtype, (2, 3))
    for array in (np.ones((2, 3)), np.ones(3, np.float16), np.zeros((), np.float32)):
        result = cast_floating([array], target)[0]
        assert isinstance(result, np.ndarray)
        assert (result.dtype, result.shape) == (dtype, array.shape)
    for scalar in (np.float16(1.5), np.float32(1.5), np.float64(1.5)):
        result = cast_floating(scalar, target)
        assert (type(result), float(result)) == (dtype.type, 1.5)


def test_shapes_are_cast_and_keep_their_sharding():
    sharding = NamedSharding(Mesh(np.asarray(jax.devices()[:8]), ("data",)), P("data"))
    shape = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding)
    result = cast_floating(shape, "f16")
    assert (type(result), result.shape, result.dtype) == (jax.ShapeDtypeStruct, (8, 2), np.float16)
    assert result.sharding == sharding
    whole = jax.ShapeDtypeStruct((8,), jnp.int32)
    assert cast_floating(whole, "f16") is whole


UNTOUCHED = {**NOT_FLOATING, "complex": jnp.ones(2, jnp.complex64), "float": 1.5, "imaginary": 1j}


def test_leaves_that_are_not_floating_do_not_change():
    result = cast_floating({**UNTOUCHED, "none": None, "x": jnp.ones(2)}, "f16")
    assert [name for name, leaf in UNTOUCHED.items() if result[name] is not leaf] == []
    assert result["none"] is None
    assert result["x"].dtype == np.float16


def test_a_leaf_that_has_the_dtype_is_returned_as_it_is():
    half, shape = np.ones(2, np.float16), jax.ShapeDtypeStruct((2,), jnp.float16)
    for leaf in (jnp.asarray(half), half, np.float16(1), shape):
        assert cast_floating({"x": leaf}, "f16")["x"] is leaf


def test_a_weak_type_becomes_strong():
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    result = cast_floating(weak, "f32")
    assert (result.dtype, result.weak_type) == (np.float32, False)
    shape = jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)
    assert not cast_floating(shape, "f32").weak_type
    # In arithmetic a weak float32 would have given way.
    assert (result * jnp.float16(1)).dtype == np.float32


def test_a_cast_that_is_not_needed_leaves_no_trace_in_the_jaxpr():
    jaxpr = jax.make_jaxpr(lambda x: cast_floating(x, "f16"))(jnp.ones(2, jnp.float16))
    assert jaxpr.eqns == []
    names = [
        eqn.primitive.name for eqn in jax.make_jaxpr(lambda x: cast_floating(x, "f16"))(jnp.ones(2)).eqns
    ]
    assert names == ["convert_element_type"]


def test_cast_to_half_and_full():
    tree = {"a": jnp.ones(2, jnp.bfloat16), "b": np.float64(1), "n": jnp.arange(2)}
    for cast, name in ((jmp_lite.cast_to_half, "float16"), (jmp_lite.cast_to_full, "float32")):
        assert [leaf.dtype.name for leaf in jax.tree.leaves(cast(tree))] == [name, name, "int32"]


def test_casting_to_no_dtype_is_an_error_even_for_an_empty_tree():
    with pytest.raises(ValueError, match="Unknown dtype 'f17'"):
        cast_floating({}, "f17")
    with pytest.raises(TypeError, match=r"Expected a floating dtype\. Got int32"):
        cast_floating({}, jnp.int32)


# select_tree


def test_select_tree_takes_one_tree_whole():
    a, b = {"x": jnp.float32(1), "y": [jnp.arange(2)]}, {"x": jnp.float32(2), "y": [jnp.arange(2) + 5]}
    chex.assert_trees_all_equal(jmp_lite.select_tree(jnp.bool_(True), a, b), a)
    chex.assert_trees_all_equal(jmp_lite.select_tree(jnp.bool_(False), a, b), b)
    chex.assert_trees_all_equal(jmp_lite.select_tree(np.bool_(True), a, b), a)
    chex.assert_trees_all_equal(jmp_lite.select_tree(True, a, b), a)
    assert jmp_lite.select_tree(jnp.bool_(True), None, None) is None


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_chosen_leaf_is_bit_identical(jit):
    # Minus zero, a NaN with a payload, a negative NaN, a subnormal, and the infinities.
    patterns = np.array([0x80000000, 0x7FC12345, 0xFFC00001, 0x00000001, 0x7F800000, 0xFF800000], np.uint32)
    odd = jnp.asarray(patterns.view(np.float32))
    assert np.asarray(odd).view(np.uint32).tolist() == patterns.tolist()
    select = jit(jmp_lite.select_tree)
    nan = jnp.full(6, np.nan)
    for pred, a, b in ((True, odd, nan), (False, nan, odd)):
        chosen = select(jnp.bool_(pred), {"x": a}, {"x": b})["x"]
        assert np.asarray(chosen).view(np.uint32).tolist() == patterns.tolist()


def test_keys_integers_and_booleans_are_selected():
    a = {"key": jax.random.key(1), "n": jnp.int8(1), "b": jnp.bool_(True), "np": np.float32(1)}
    b = {"key": jax.random.key(2), "n": jnp.int8(2), "b": jnp.bool_(False), "np": np.float32(2)}
    result = jmp_lite.select_tree(jnp.bool_(False), a, b)
    assert jax.random.key_data(result["key"]).tolist() == jax.random.key_data(b["key"]).tolist()
    assert (int(result["n"]), result["n"].dtype, bool(result["b"])) == (2, np.int8, False)
    assert (float(result["np"]), result["np"].dtype) == (2.0, np.float32)


def test_a_predicate_that_is_no_boolean_scalar_is_the_assertion_of_jmp():
    for pred in (jnp.ones(1, bool), jnp.int32(1), 1, jnp.float32(1), np.ones((1, 1), bool)):
        with pytest.raises(AssertionError, match="expected boolean scalar"):
            jmp_lite.select_tree(pred, None, None)


def test_the_predicate_is_checked_by_an_optimized_python_too():
    path = Path(jmp_lite.__file__).with_name("_tree.py")
    optimized = {"__name__": "jmp_lite._tree", "__package__": "jmp_lite"}
    exec(compile(path.read_text(), path, "exec", optimize=1), optimized)  # As `python -O` compiles it.
    with pytest.raises(AssertionError, match="expected boolean scalar"):
        optimized["select_tree"](jnp.ones(1, bool), None, None)


def test_nothing_is_broadcast_or_promoted():
    pred = jnp.bool_(True)
    with pytest.raises((TypeError, ValueError), match="shape"):
        jmp_lite.select_tree(pred, {"x": jnp.ones(3)}, {"x": jnp.ones(())})
    with pytest.raises((TypeError, ValueError), match=r"float16.*float32|float32.*float16"):
        jmp_lite.select_tree(pred, {"x": jnp.ones(3, jnp.float16)}, {"x": jnp.ones(3)})
    with pytest.raises((TypeError, ValueError)):
        jmp_lite.select_tree(pred, {"x": jnp.ones(3)}, {"y": jnp.ones(3)})


def test_each_member_of_a_batch_selects_for_itself():
    pred = jnp.array([True, False])
    result = jax.vmap(jmp_lite.select_tree)(pred, {"x": jnp.zeros((2, 3))}, {"x": jnp.ones((2, 3))})
    assert result["x"].tolist() == [[0.0] * 3, [1.0] * 3]


def test_no_branch_is_taken():
    jaxpr = jax.make_jaxpr(jmp_lite.select_tree)(jnp.bool_(True), {"x": jnp.ones(3)}, {"x": jnp.ones(3)})
    assert {eqn.primitive.name for eqn in jaxpr.eqns} == {"select_n"}


def test_floating_values_are_numbers_arrays_and_types_of_arrays():
    shape, aval = jax.ShapeDtypeStruct((2,), jnp.bfloat16), jax.typeof(jnp.ones(2))
    for value in (1.0, 1j, np.float16(1), jnp.ones(2, jnp.complex64), shape, aval):
        assert is_floating(value) is True
    zeros = np.zeros(2, jax.dtypes.float0)
    for value in (1, True, jnp.arange(2), jax.random.key(0), zeros, np.float32, jnp.float32, "float32", None):
        assert is_floating(value) is False

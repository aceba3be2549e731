"""Which leaves are finite: the flags of trees of any shape and dtype, and `all_finite`."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite
from jmp_lite._scaling.finite import leaves_finite
from tests.support.finite_trees import GROUP, SMALL, ones, spoiled

BAD = [np.nan, np.inf, -np.inf]


# Leaves in which there is nothing to check.
OTHERS = {
    "int32": jnp.arange(3),
    "uint8": np.arange(3, dtype=np.uint8),
    "numpy_int": np.int64(3),
    "bool": jnp.array([True]),
    "key": jax.random.key(0),
    "keys": jax.random.split(jax.random.key(0), 3),
    "old_key": jax.random.PRNGKey(0),
    "float0": np.zeros(2, jax.dtypes.float0),
    "int": 3,
    "truth": True,
    "string": "float32",
    "type": np.float32,
    "object_array": np.array([1.0, None], object),
    "none": None,
}


def is_inexact(leaf):
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    return isinstance(leaf, (float, complex)) or (is_array and jnp.issubdtype(leaf.dtype, jnp.inexact))


def is_finite(leaf):
    """What NumPy says of a leaf, in a dtype that holds every value of the others."""
    return not is_inexact(leaf) or bool(np.isfinite(np.asarray(leaf).astype(np.complex128)).all())


def expected(tree):
    return [is_finite(leaf) for leaf in jax.tree.leaves(tree)]


TREES = {
    # Shapes interleave, dtypes of one shape differ, and there are leaves with nothing in them or to check.
    "mixed": [
        *(np.ones(shape, dtype) for dtype in ("f2", "f4", "c8") for shape in ((), (1,), (3,), (2, 3))),
        *OTHERS.values(),
        *(
            np.ones(shape, jnp.bfloat16)
            for shape in ((3,), (2, 3), (), (0,), (3, 0), (2, 1, 2, 1), (1, 2, 2, 1))
        ),
        np.float32(1),
        np.float16(1),
        1.5,
        2j,
        *ones((0,), (3,), (3, 0), (2, 3), (3,)),
    ],
    "one": ones((3,)),
    "one scalar": ones(()),
    "one less than together": ones(*[(5,)] * (GROUP - 1)),
    "together": ones(*[(5,)] * GROUP),
    "one more than together": ones(*[(5,)] * (GROUP + 1), dtype=np.float16),
    "more than twice together": ones(*[(2, 3), ()] * (2 * GROUP + 1)),
    "about small": ones((SMALL,), (SMALL + 1,), (256, 256), (SMALL,), (257, 256), (SMALL + 1,), (257, 256)),
    # No axis but the first, no row that is long enough, none that is short enough.
    "large without rows": ones(
        *((SMALL + 2,), (1000, 100), (2, 2**17 + 1), (SMALL, 1, 2), (1, 2**17 + 1)) * 2, dtype=np.float16
    ),
    "large": ones(*((300, 256), (2, 2**17), (20, 20, 255), (3, 4, 5, 1200), (4, 1, 160, 200)) * 2),
    "large of two dtypes": [*ones((300, 257)), *ones((300, 257), (300, 257), dtype=np.float16)],
    "large, more than together": ones(*[(260, 256)] * (GROUP + 1), dtype=np.float16),
}


CHECK = jax.jit(leaves_finite)


def traceable(leaf):
    """Whether a leaf may be an argument of a compiled function."""
    is_odd = isinstance(leaf, np.ndarray) and leaf.dtype in (object, jax.dtypes.float0)
    return not is_odd and not isinstance(leaf, (str, type))


@pytest.mark.cases(fast=2)
@hypothesis.settings(max_examples=12)
@hypothesis.given(data=st.data(), value=st.sampled_from(BAD), where=st.floats(0, 1))
@pytest.mark.parametrize("name", TREES)
def test_one_bad_element_is_found_wherever_it_is(name, data, value, where):
    leaves = [leaf for leaf in jax.tree.leaves(TREES[name]) if traceable(leaf)]
    clean = CHECK(leaves)
    assert (clean.shape, clean.dtype) == ((len(leaves),), np.bool_)
    assert clean.tolist() == [True] * len(leaves)
    index = data.draw(st.sampled_from([i for i, x in enumerate(leaves) if np.size(x) and is_inexact(x)]))
    kind = type(leaves[index])
    leaves[index] = kind(value) if kind in (float, complex) else spoiled(leaves[index], value, where)
    flags = CHECK(leaves).tolist()
    assert flags == expected(leaves)
    assert [i for i, flag in enumerate(flags) if not flag] == [index]


SHAPES = [(), (1,), (3,), (0,), (2, 3), (3, 0), (2, 1, 2), (1, 2, 2, 1)]


DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "int32", "bool"]


@st.composite
def a_leaf(draw):
    if draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from([None, 1.5, np.inf, 2j, complex(0, np.nan), 7, *OTHERS.values()]))
    leaf = np.ones(draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES)))
    if leaf.size and is_inexact(leaf) and draw(st.integers(0, 3)) == 0:
        leaf = spoiled(leaf, draw(st.sampled_from(BAD)), draw(st.floats(0, 1)))
    return jnp.asarray(leaf) if draw(st.booleans()) else leaf


def containers(inner):
    return st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("dcba"), inner)


@pytest.mark.slow
@hypothesis.given(tree=a_leaf() | containers(a_leaf()) | containers(a_leaf() | containers(a_leaf())))
def test_every_leaf_of_any_tree_is_judged_as_by_numpy(tree):
    flags = leaves_finite(tree)
    assert isinstance(flags, jax.Array)
    assert (flags.shape, flags.dtype) == ((len(jax.tree.leaves(tree)),), np.bool_)
    assert flags.tolist() == expected(tree)
    assert bool(jmp_lite.all_finite(tree)) == all(expected(tree))


def test_the_flags_stand_in_the_order_of_the_leaves():
    tree = {"b": [np.ones(3), np.ones(2), np.ones(3)], "a": np.ones(2), "d": 1, "c": (np.ones(3), 0.5)}
    leaves, structure = jax.tree.flatten(tree)
    assert [np.shape(leaf) for leaf in leaves] == [(2,), (3,), (2,), (3,), (3,), (), ()]
    for index in range(6):
        bad = [np.inf * leaf if i == index else leaf for i, leaf in enumerate(leaves)]
        flags = leaves_finite(structure.unflatten(bad))
        assert flags.tolist() == [i != index for i in range(len(leaves))]


@pytest.mark.parametrize("tree", [None, {}, [], [None, ()]])
def test_no_leaves_have_no_flags(tree):
    for check in (leaves_finite, CHECK):
        assert (check(tree).shape, check(tree).dtype) == ((0,), np.bool_)


def test_float64_is_judged_as_float64_where_it_is_enabled():
    with jax.enable_x64(True):
        tree = [np.full(2, 1e300), jnp.float32(1), np.float64(1e300), 1e300, np.array([1, np.nan])]
        assert leaves_finite(tree).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_eight_bits_are_judged_too(dtype):
    tree = [jnp.ones(2, dtype), jnp.asarray([1, np.nan], dtype), jnp.ones(2)]
    assert leaves_finite(tree).tolist() == [True, False, True]


# all_finite


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_one_bad_element_makes_a_tree_not_finite(dtype, bad):
    tree = {"a": jnp.ones(3, dtype), "b": [jnp.ones((2, 2), dtype)]}
    assert bool(jmp_lite.all_finite(tree)) is True
    assert bool(jmp_lite.all_finite({**tree, "b": [tree["b"][0].at[1, 1].set(bad)]})) is False


def test_imaginary_parts_are_looked_at_too():
    assert not jmp_lite.all_finite(jnp.asarray(complex(0, np.inf), jnp.complex64))
    assert not jmp_lite.all_finite(complex(0, np.nan))


def test_the_answer_is_a_boolean_scalar():
    for tree in (None, {}, {"a": jnp.ones(3)}, {"a": np.inf}):
        answer = jmp_lite.all_finite(tree)
        assert isinstance(answer, jax.Array)
        assert (answer.shape, answer.dtype) == ((), np.bool_)


def test_trees_without_leaves_and_other_leaves_are_finite():
    assert jmp_lite.all_finite(None)
    assert jmp_lite.all_finite({})
    assert jmp_lite.all_finite(OTHERS)
    assert not jmp_lite.all_finite({**OTHERS, "x": float("inf")})
    assert not jmp_lite.all_finite({**OTHERS, "x": np.float64("nan")})


def test_the_largest_half_is_finite_and_its_double_is_not():
    largest = jnp.asarray(65504, jnp.float16)
    assert jmp_lite.all_finite(largest)
    assert not jmp_lite.all_finite(largest * 2)


def test_all_members_of_a_named_axis_agree():
    x = jnp.ones((8, 2)).at[3, 0].set(np.nan)
    alone = jax.vmap(jmp_lite.all_finite)(x)
    agreed = jax.vmap(lambda row: jmp_lite.all_finite(row, axis_name="i"), axis_name="i", out_axes=None)(x)
    assert alone.tolist() == [True] * 3 + [False] + [True] * 4
    assert (agreed.shape, bool(agreed)) == ((), False)
    both = jax.vmap(
        jax.vmap(lambda v: jmp_lite.all_finite(v, axis_name=("i", "j")), axis_name="j"), axis_name="i"
    )(x)
    assert not both.any()


@pytest.mark.slow
def test_all_devices_agree():
    mesh = Mesh(np.asarray(jax.devices()[:8]), ("data",))
    check = jax.shard_map(
        lambda x: jmp_lite.all_finite(x, axis_name="data")[None],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    assert check(jnp.ones(8)).tolist() == [True] * 8
    assert check(jnp.ones(8).at[5].set(np.inf)).tolist() == [False] * 8


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 512])
def test_leaves_of_one_shape_may_be_split_differently_over_explicit_axes(size):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        leaves = [
            jax.device_put(jnp.ones((size, size)).at[1, 1].set(value), NamedSharding(mesh, spec))
            for spec, value in ((P("data"), 1), (P(None, "data"), np.inf), (P("data"), 1), (P(), np.nan))
        ]
        expected = [True, False, True, False]
        assert leaves_finite(leaves).tolist() == jax.jit(leaves_finite)(leaves).tolist() == expected


@pytest.mark.slow
def test_no_rank_is_promoted():
    leaves = [jnp.ones((300, 300)), jnp.ones((300, 300)), jnp.ones((2, 256, 256)), jnp.ones((2, 256, 256))]
    with jax.numpy_rank_promotion("raise"):
        assert leaves_finite(leaves).tolist() == [True] * 4

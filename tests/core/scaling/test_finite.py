"""Which leaves are finite: the flags of trees of any shape and dtype, and `all_finite`."""

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jmp_lite
from jmp_lite._scaling.finite import leaves_finite
from tests.support.finite_trees import GROUP, NOT_FLOATING, SMALL, ones, spoiled
from tests.support.jaxprs import equations

BAD = [np.nan, np.inf, -np.inf]


OTHERS = {**NOT_FLOATING, "none": None}  # Nothing to check.


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
    "one more than together": ones(*[(5,)] * (GROUP + 1), dtype=np.float16),
    "about small": ones((SMALL,), (SMALL + 1,), (256, 256), (SMALL,), (257, 256), (SMALL + 1,), (257, 256)),
    # No axis but the first, no row that is long enough, none that is short enough.
    "large without rows": ones(
        *((SMALL + 2,), (1000, 100), (2, 2**17 + 1), (SMALL, 1, 2), (1, 2**17 + 1)) * 2, dtype=np.float16
    ),
    "large": ones(*((300, 256), (2, 2**17), (20, 20, 255), (3, 4, 5, 1200), (4, 1, 160, 200)) * 2),
    "together": ones(*[(5,)] * GROUP),
    "large, more than together": ones(*[(260, 256)] * (GROUP + 1), dtype=np.float16),
}


CHECK = jax.jit(leaves_finite)


def traceable(leaf):
    """Whether a leaf may be an argument of a compiled function."""
    odd = ("float0", "string", "type", "function", "object", "object_array")
    return not any(leaf is NOT_FLOATING[name] for name in odd)


@pytest.mark.cases(fast=2, slow=3)
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


def test_float64_is_judged_as_float64_where_it_is_enabled():
    with jax.enable_x64(True):
        tree = [np.full(2, 1e300), jnp.float32(1), np.float64(1e300), 1e300, np.array([1, np.nan])]
        assert leaves_finite(tree).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_eight_bits_are_judged_too(dtype):
    tree = [jnp.ones(2, dtype), jnp.asarray([1, np.nan], dtype), jnp.ones(2)]
    assert leaves_finite(tree).tolist() == [True, False, True]


# all_finite


def test_all_finite_is_one_boolean_of_all_leaves():
    half = jnp.asarray(65504, jnp.float16)
    finite = [None, {}, [None, ()], OTHERS, {"a": jnp.ones(3)}, half]
    bad = [float("inf"), np.float64("nan"), complex(0, np.nan), jnp.asarray(complex(0, np.inf)), 2 * half]
    for tree, wanted in [*((tree, True) for tree in finite), *(({**OTHERS, "x": x}, False) for x in bad)]:
        answer = jmp_lite.all_finite(tree)
        assert (answer.shape, answer.dtype, bool(answer)) == ((), np.bool_, wanted), tree
    for check in (leaves_finite, CHECK):
        assert (check(None).shape, check(None).dtype) == ((0,), np.bool_)


@pytest.mark.slow
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


# The check as a program: reductions, transformations, devices


def reductions(tree):
    """The operand shapes of the reductions."""
    return [
        equation.invars[0].aval.shape
        for equation in equations(jax.make_jaxpr(leaves_finite)(tree))
        if equation.primitive.name == "reduce_and" and equation.params["axes"]
    ]


def test_small_leaves_of_one_shape_are_reduced_together():
    tree = ones(*[(3,), (2, 3), ()] * 15, (SMALL,), (SMALL,))
    assert sorted(reductions(tree)) == sorted([(15, 3), (15, 2, 3), (2, SMALL)])
    assert reductions(ones(*[(3,)] * (GROUP + 2))) == [(GROUP, 3), (2, 3)]


LARGE = {
    (300, 256): (1,),
    (2, 2**17): (1,),
    (20, 20, 255): (1, 2),
    (3, 4, 5, 1200): (3,),
    (2, 2**17 + 1): (0, 1),
    (1000, 100): (0, 1),
    (SMALL + 1,): (0,),
}


@pytest.mark.parametrize("shape", LARGE)
def test_large_leaves_are_read_where_they_lie_in_rows_of_the_length_for_a_block_of_threads(shape):
    found = list(equations(jax.make_jaxpr(leaves_finite)(ones(shape, shape))))
    moves = ("concatenate", "reshape", "broadcast_in_dim", "transpose")
    moved = [math.prod(var.aval.shape) for e in found if e.primitive.name in moves for var in e.outvars]
    assert 0 < max(moved) <= 2**17 < 2 * math.prod(shape)
    reduced = [e for e in found if e.primitive.name == "reduce_and" and e.invars[0].aval.shape == shape]
    assert [e.params["axes"] for e in reduced] == [LARGE[shape]] * 2


# Transformations


def two_of_each():
    """Two leaves for each way in which leaves are checked, and an integer; three examples of each."""
    shapes = [(3,), (), (300, 256), (SMALL + 1,)]
    leaves = [np.ones((3, *shape), np.float16) for shape in shapes]
    return [*leaves, np.ones(3, np.int32), *(leaf.copy() for leaf in leaves)]


def test_each_member_of_a_batch_has_its_own_flags():
    def by_scan(trees):
        return jax.lax.scan(lambda carry, tree: (carry, leaves_finite(tree)), 0, trees)[1]

    for check in (jax.jit(jax.vmap(leaves_finite)), jax.jit(by_scan)):
        for index in (0, 1, 2, 3, 5, 6, 7, 8):
            trees = two_of_each()
            trees[index][(1, *[-1] * (trees[index].ndim - 1))] = np.nan
            want = np.ones((3, len(trees)), bool)
            want[1, index] = False
            assert check(trees).tolist() == want.tolist()


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_it_may_be_asked_of_values_that_are_being_differentiated(jit):
    def loss_fn(params):
        hidden = {"a": params["a"] * 2, "b": jnp.log(params["b"]), "c": params["c"] + 1}
        return sum(leaf.sum() for leaf in jax.tree.leaves(hidden)), leaves_finite(hidden)

    params = {"a": jnp.ones((300, 256)), "b": jnp.zeros((300, 256)), "c": jnp.ones(3)}
    grads, flags = jit(jax.grad(loss_fn, has_aux=True))(params)
    assert flags.tolist() == [True, False, True]
    assert float(grads["a"][0, 0]) == 2.0
    # And in the loss itself, where it has no gradient.
    guarded = lambda params: jnp.where(leaves_finite(params).all(), loss_fn(params)[0], 0.0)
    grads = jit(jax.grad(guarded))({**params, "b": jnp.ones((300, 256))})
    assert [float(grads[name].ravel()[0]) for name in "abc"] == [2.0, 1.0, 1.0]


# Devices


@pytest.mark.parametrize("shape", [(8, 12), (512, 256)], ids=["small", "large"])
def test_in_a_shard_map_each_device_judges_its_own_part(shape):
    """The leaves have one shape. All but one differ from device to device."""
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("data",))
    check = jax.jit(
        jax.shard_map(
            lambda *leaves: leaves_finite(leaves)[None],
            mesh=mesh,
            in_specs=(P("data"), P(None, "data"), P(), P("data")),
            out_specs=P("data"),
        )
    )
    rows, columns = shape
    whole = ones((4 * rows, columns), (rows, 4 * columns), shape, (4 * rows, columns))
    assert check(*whole).tolist() == [[True] * 4] * 4
    whole[0][2 * rows] = np.nan  # On device 2.
    whole[1][:, -1] = np.inf  # On device 3.
    assert np.argwhere(~np.asarray(check(*whole))).tolist() == [[2, 0], [3, 1]]
    whole[2][0, 0] = np.nan  # On each.
    found = np.argwhere(~np.asarray(check(*whole))).tolist()
    assert found == [[0, 2], [1, 2], [2, 0], [2, 2], [3, 1], [3, 2]]

"""The finite check as a program: its reductions, transformations and devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmp_lite._scaling.finite import agree, leaves_finite
from tests.support.finite_trees import GROUP, SMALL, ones, spoiled
from tests.support.jaxprs import equations


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


@pytest.mark.parametrize("shape", [(300, 256), (2, 2**17), (20, 20, 255), (2, 2**17 + 1), (SMALL + 1,)])
def test_large_leaves_are_read_where_they_lie(shape):
    jaxpr = jax.make_jaxpr(leaves_finite)(ones(shape, shape))
    moved = [
        math.prod(var.aval.shape)
        for equation in equations(jaxpr)
        if equation.primitive.name in ("concatenate", "reshape", "broadcast_in_dim", "transpose")
        for var in equation.outvars
    ]
    assert 0 < max(moved) <= 2**17 < 2 * math.prod(shape)
    assert reductions(ones(shape, shape)).count(shape) == 2


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((300, 256), (1,)),
        ((2, 2**17), (1,)),
        ((20, 20, 255), (1, 2)),
        ((3, 4, 5, 1200), (3,)),
        ((2, 2**17 + 1), (0, 1)),
        ((1000, 100), (0, 1)),
    ],
)
def test_a_row_is_long_enough_for_a_block_of_threads_and_not_too_long(shape, axes):
    jaxpr = jax.make_jaxpr(leaves_finite)(ones(shape, shape))
    reduced = [
        equation.params["axes"]
        for equation in equations(jaxpr)
        if equation.primitive.name == "reduce_and" and equation.invars[0].aval.shape == shape
    ]
    assert reduced == [axes, axes]


# Transformations


SHAPE_OF_EACH_WAY = [(3,), (), (300, 256), (SMALL + 1,)]


def two_of_each(batch=()):
    """Two leaves for each way in which leaves are checked, and an integer in between."""
    leaves = [np.ones(batch + shape, np.float16) for shape in SHAPE_OF_EACH_WAY]
    return [*leaves, np.ones(batch, np.int32), *(leaf.copy() for leaf in leaves)]


@pytest.mark.parametrize("index", [0, 1, 2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("over", ["vmap", "scan"])
def test_each_member_of_a_batch_has_its_own_flags(over, index):
    trees = two_of_each((3,))
    trees[index][(1, *[-1] * (trees[index].ndim - 1))] = np.nan
    flags = MEMBERS[over](trees)
    want = np.ones((3, len(trees)), bool)
    want[1, index] = False
    assert flags.tolist() == want.tolist()


MEMBERS = {
    "vmap": jax.jit(jax.vmap(leaves_finite)),
    "scan": jax.jit(
        lambda trees: jax.lax.scan(lambda carry, tree: (carry, leaves_finite(tree)), 0, trees)[1]
    ),
}


@pytest.mark.parametrize("index", [0, 1, 2, 3, 5, 6, 7, 8])
def test_without_jit_it_says_the_same(index):
    tree = two_of_each()
    tree[index] = spoiled(tree[index], np.inf, 0.5)
    want = [i != index for i in range(len(tree))]
    assert leaves_finite(tree).tolist() == want
    with jax.disable_jit():
        assert leaves_finite(tree).tolist() == want


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


def device_mesh(shape=(4,), names=("data",)):
    assert jax.device_count() >= 4
    return Mesh(np.asarray(jax.devices()[:4]).reshape(shape), names)


SPECS = [P("data"), P(None, "model"), P("model", "data"), P(("data", "model")), P()]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 12), (512, 256)], ids=["small", "large"])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_leaves_of_one_shape_may_be_split_each_its_own_way(shape, jit):
    mesh = device_mesh((2, 2), ("data", "model"))
    check = jit(leaves_finite)
    place_all = lambda leaves: [
        jax.device_put(leaf, NamedSharding(mesh, spec)) for leaf, spec in zip(leaves, SPECS)
    ]
    leaves = ones(*[shape] * len(SPECS))
    assert check(place_all(leaves)).tolist() == [True] * len(SPECS)
    for index, where in enumerate([0.0, 0.3, 0.6, 0.99, 0.5]):
        bad = [spoiled(leaf, np.inf, where) if i == index else leaf for i, leaf in enumerate(leaves)]
        assert check(place_all(bad)).tolist() == [i != index for i in range(len(SPECS))]


@pytest.mark.parametrize("shape", [(8, 12), (512, 256)], ids=["small", "large"])
def test_in_a_shard_map_each_device_judges_its_own_part(shape):
    """The leaves have one shape. All but one differ from device to device."""
    mesh = device_mesh()
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
    assert np.argwhere(~np.asarray(check(*whole))).tolist() == [
        [0, 2],
        [1, 2],
        [2, 0],
        [2, 2],
        [3, 1],
        [3, 2],
    ]


def test_in_a_shard_map_of_replicated_leaves_the_flags_are_replicated():
    check = jax.shard_map(leaves_finite, mesh=device_mesh(), in_specs=P(), out_specs=P())
    tree = [*ones((300, 256), (300, 256), (3,)), np.array([1, np.inf, 1])]
    assert jax.jit(check)(tree).tolist() == [True, True, True, False]


def test_agreed_flags_are_true_where_they_are_true_on_all():
    flags = jnp.array([[True, False, True], [True, True, True], [True, True, False]])
    agreed = jax.vmap(lambda row: agree(row, "i"), axis_name="i", out_axes=None)(flags)
    assert (agreed.dtype, agreed.tolist()) == (np.bool_, [True, False, False])

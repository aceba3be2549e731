"""Names, source lines, shardings and donation survive `autocast`."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend import source_info_util
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.jaxprs import equations, operands_of, products
from tests.support.small_programs import ORDERS, B, W, X


def stacks(fun, *args):
    return {
        (str(e.source_info.name_stack), e.primitive.name)
        for e in equations(jax.make_jaxpr(fun)(*args))
        if e.primitive.name in ("dot_general", "tanh")
    }


def test_named_scopes_survive():
    def fun(x, w):
        with jax.named_scope("encoder"):
            with jax.named_scope("first"):
                x = jnp.tanh(x @ w)
            x = jax.jit(jax.named_scope("inner")(lambda x: x @ w))(x)
        return lax.scan(lambda x, _: (jax.named_scope("step")(jnp.tanh)(x @ w), None), x, length=2)[0]

    ours = {name.split("jmp_lite.autocast/")[-1] for name, _ in stacks(jmp.autocast(fun), X, W)}
    plain = {name for name, _ in stacks(fun, X, W)}
    assert {name for name in plain if name} <= ours
    assert any("encoder/first" in name for name in ours)
    compiled = jax.jit(jmp.autocast(fun)).lower(X, W).compile().as_text()
    assert "encoder/first/dot_general" in compiled


def test_source_lines_survive():
    def fun(x, w):
        return x @ w  # This line.

    def line_of_the_product(f):
        found = equations(jax.make_jaxpr(f)(X, W))
        product = next(e for e in found if e.primitive.name == "dot_general")
        return source_info_util.summarize(product.source_info)

    assert line_of_the_product(jmp.autocast(fun)) == line_of_the_product(fun)
    assert "test_shardings.py" in line_of_the_product(fun)


def aliases(fun, *args):
    return jax.jit(fun, donate_argnums=0).lower(*args).compile().memory_analysis().alias_size_in_bytes


def test_donation_to_an_outer_and_to_an_inner_jit_survives():
    step = lambda w, x: w - 0.1 * (x.T @ (x @ w))
    assert aliases(jmp.autocast(step), W, X) == aliases(step, W, X) == W.nbytes
    inner = jax.jit(step, donate_argnums=0)

    def donated(f):
        return next(
            e.params["donated_invars"]
            for e in equations(jax.make_jaxpr(f)(W, X))
            if e.primitive.name == "jit"
        )

    program = lambda w, x: inner(w * 1.0, x)
    assert donated(jmp.autocast(program))[:2] == donated(program)[:2] == (True, False)
    assert not any(donated(jmp.autocast(program))[2:])
    twice = lambda w, x: inner(inner(w * 1.0, x), x)
    assert_close(jmp.autocast(twice)(W, X), twice(W, X), "bfloat16", factor=16)
    assert_close(jax.jit(jmp.autocast(twice))(W, X), twice(W, X), "bfloat16", factor=16)


@pytest.mark.parametrize("order", ORDERS)
def test_devices_send_half_and_sum_the_gradients_in_float32(order):
    """Fully sharded weights, and activations that each device gathers."""

    def layer(w, x):
        w = lax.all_gather(w, "i", tiled=True)
        hidden = lax.all_gather(x @ w, "i", tiled=True)
        return lax.psum(jnp.sum(jnp.tanh(hidden) @ w), "i")

    split = P("i"), P("i")
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    loss = jax.shard_map(layer, mesh=mesh, in_specs=split, out_specs=P(), check_vma=False)
    grad = jax.grad(jmp.autocast(loss)) if order == "inside" else jmp.autocast(jax.grad(loss))
    # XLA drops the copies in float32, which only carry the gradients.
    assert sorted(operands_of("all_gather", grad, W, X)) == ["bfloat16"] * 2 + ["float32"] * 2
    assert operands_of("reduce_scatter", grad, W, X) == ["float32"] * 2


@pytest.mark.slow
def test_shardings_inside_survive():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())

    def fun(x, w):
        x = lax.with_sharding_constraint(x @ w, rows)
        x = jax.jit(lambda x, w: jnp.tanh(x @ w), in_shardings=(rows, whole), out_shardings=rows)(x, w)
        return lax.with_sharding_constraint(x @ w, whole)

    def found(f):
        jaxpr = jax.make_jaxpr(f)(X, W)
        constraints = [
            e.params["sharding"] for e in equations(jaxpr) if e.primitive.name == "sharding_constraint"
        ]
        inner = next(
            e for e in equations(jaxpr) if e.primitive.name == "jit" and "<lambda>" in e.params["name"]
        )
        return constraints, inner.params["in_shardings"][:2], inner.params["out_shardings"]

    assert found(jmp.autocast(fun)) == found(fun)
    assert_close(jax.jit(jmp.autocast(fun))(X, W), jax.jit(fun)(X, W), "bfloat16", factor=8)
    placed = jax.device_put(X, rows)
    plain = jax.jit(lambda x: x @ W)(placed).sharding
    assert jax.jit(jmp.autocast(lambda x: x @ W))(placed).sharding.is_equivalent_to(plain, 2)


def four_devices():
    auto = (AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=auto, devices=jax.devices()[:4])


def tensor_parallel(x, w, b, check_vma):
    def block(x, w, b):
        hidden = jnp.tanh(x @ w + b)
        gathered = lax.all_gather(hidden, "model", axis=1, tiled=True)
        return lax.psum(gathered @ gathered.T @ hidden, "model") * 0.1

    specs = {"in_specs": (P("data"), P(None, "model"), P("model")), "out_specs": P("data", None)}
    return jax.shard_map(block, mesh=four_devices(), check_vma=check_vma, **specs)(x, w, b)


def data_parallel(x, w, b, check_vma):
    def loss(x, w, b):
        for _ in range(2):
            x = jax.nn.relu(x @ w + b)
        return lax.pmean(jnp.sum(x * x), ("data", "model")).reshape(1)

    specs = {"in_specs": (P(("data", "model")), P(), P()), "out_specs": P()}
    return jax.shard_map(loss, mesh=four_devices(), check_vma=check_vma, **specs)(x, w, b)


def scanned(x, w, b, check_vma):
    def block(x, w, b):
        return lax.scan(lambda x, _: (jnp.tanh(x @ w + b), x.mean()), x, length=3)[0]

    specs = {"in_specs": (P("data"), P(), P()), "out_specs": P("data")}
    return jax.shard_map(block, mesh=four_devices(), check_vma=check_vma, **specs)(x, w, b)


def partly_manual(x, w, b, check_vma):
    specs = {"in_specs": (P("data"), P()), "out_specs": P("data"), "axis_names": {"data"}}
    block = lambda x, w: jnp.tanh(x @ w)
    return jax.shard_map(block, mesh=four_devices(), check_vma=check_vma, **specs)(x, w) + b


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("program", [tensor_parallel, data_parallel, scanned, partly_manual])
def test_shard_map_over_four_devices(program, check_vma):
    args = jnp.concatenate([X, -X[:, ::-1]]), W, B
    fun = functools.partial(program, check_vma=check_vma)
    loss = lambda *args: jnp.sum(jnp.sin(fun(*args)))
    expected = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args)
    for half, order in (
        ("float16", jax.value_and_grad(jmp.autocast(loss, "float16"), (0, 1, 2))),
        ("bfloat16", jmp.autocast(jax.value_and_grad(loss, (0, 1, 2)), "bfloat16")),
    ):
        assert set(products(jmp.autocast(fun, half), *args)) == {(half, half)}
        assert set(products(order, *args)) == {(half, half)}
        value, grads = jax.jit(order)(*args)
        assert_close(value, expected[0], half, factor=32)
        assert_close(grads, expected[1], half, factor=48)
        names = ("psum", "reduce_scatter")
        sums = [e for e in equations(jax.make_jaxpr(order)(*args)) if e.primitive.name.startswith(names)]
        assert {var.aval.dtype.name for e in sums for var in e.invars} <= {"float32"}

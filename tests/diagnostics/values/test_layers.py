"""Layers of Flax run with float32 as their `dtype`, and are as before afterwards."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jmp_lite.diagnostics import find_nonfinite
from jmp_lite.diagnostics._values.edited import UnknownFunctionError
from jmp_lite.diagnostics._values.layers import in_float32

F16, F32 = jnp.float16, jnp.float32
X = 300 * jax.random.normal(jax.random.key(0), (16, 8))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, dtype=F16, name="l")(x)

    @nn.compact
    def encode(self, x):
        return nn.Dense(8, dtype=F16, name="e")(x)


class Net(nn.Module):
    def setup(self):
        self.a, self.b = Block(), nn.Dense(8, dtype=F16)

    def __call__(self, x):
        first = self.a(x)
        return first, self.a.encode(x), self.b(x)


class Layers(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(8, 8, dtype=F16, rngs=rngs)
        self.several = nnx.List([nnx.Linear(8, 8, dtype=F16, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        return self.a(x), self.several[0](x), self.several[1](x)


def dtypes(results):
    return ["float32" if each.dtype == F32 else "half" for each in results]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["Net/a/l"], ["float32", "half", "half"]),
        (["Net/a"], ["float32", "half", "half"]),
        (["Net/a.encode"], ["half", "float32", "half"]),
        (["Net/b", "Net/a/l"], ["float32", "half", "float32"]),
        (["Net"], ["float32", "float32", "float32"]),
    ],
)
def test_the_layers_of_linen_inside_of_a_path_run_in_float32(paths, expected):
    params = Net().init(jax.random.key(0), X)
    with in_float32(paths, {}):
        found = dtypes(jax.eval_shape(Net().apply, params, X))
    assert (found, dtypes(Net().apply(params, X))) == (expected, ["half"] * 3)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["m/a"], ["float32", "half", "half"]),
        (["m/several/1"], ["half", "half", "float32"]),
        (["m/a", "m/several"], ["float32", "float32", "float32"]),
        (["m"], ["float32", "float32", "float32"]),
    ],
)
def test_the_layers_of_nnx_inside_of_a_path_run_in_float32(paths, expected):
    model = Layers()
    with in_float32(paths, {"m": model}):
        found = dtypes(model(X))
    assert (found, dtypes(model(X))) == (expected, ["half"] * 3)


@pytest.mark.parametrize("path", ["Net/c", "Net/a/l/kernel", "m/b", "m/several/7", "other/a"])
def test_a_path_without_a_layer_is_not_taken_for_one(path):
    model, params = Layers(), Net().init(jax.random.key(0), X)
    with pytest.raises(UnknownFunctionError, match="No layer"), in_float32([path, "m/a"], {"m": model}):
        Net().apply(params, X)
    assert dtypes(model(X)) == ["half"] * 3


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        large = nn.initializers.constant(100.0)
        h = nn.Dense(8, dtype=F16, kernel_init=large, name="a")(x).astype(F16)  # JAX leaves this cast out.
        return h.astype(F32) / 1e6


class OfNNX(nnx.Module):
    def __init__(self):
        large = nnx.initializers.constant(100.0)
        self.a = nnx.Linear(8, 8, dtype=F16, kernel_init=large, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.again({"h": self.a(x)})["h"].astype(F32) / 1e6

    def again(self, tree):
        return jax.tree.map(lambda h: h.astype(F16), tree)


def of_linen():
    params = OfLinen().init(jax.random.key(0), X)
    return find_nonfinite(lambda p, x: jnp.mean(OfLinen().apply(p, x)))(params, X)


def of_nnx():
    def loss(m, x):
        return jnp.mean(m(x))

    return find_nonfinite(loss, value_and_grad_fn=nnx.value_and_grad)(OfNNX(), X)


@pytest.mark.slow
@pytest.mark.parametrize("report", [of_linen, of_nnx])
def test_a_layer_that_is_cast_again_is_mended_with_that_cast(report):
    (trial,) = (trial for trial in report().tried if not trial.dtype)
    assert trial.helps
    assert "dtype=jnp.float32 in" in trial.change
    assert len(trial.lines) == 1
    assert "test_layers.py" in trial.lines[0]


@pytest.mark.slow
def test_a_layer_that_cannot_be_changed_has_no_remedy_that_jax_refuses():
    large = nnx.initializers.constant(100.0)
    graph, state = nnx.split({"a": nnx.Linear(8, 8, dtype=F16, kernel_init=large, rngs=nnx.Rngs(0))})

    def loss(p, x, join):
        h = nnx.merge(graph, p)["a"](x)
        return jnp.mean(join([h, (0.1 * x).astype(F16)], 0).astype(F32) / 1e6)

    def tried(join):
        report = find_nonfinite(lambda p, x: loss(p, x, join))(state, X)
        return [trial for trial in report.tried if not trial.dtype and trial.helps]

    (trial,) = tried(jnp.concatenate)
    assert trial.change == "dtype=jnp.float32 in p/a"
    # Those of `jax.lax` have one dtype.
    (trial,) = tried(jax.lax.concatenate)
    assert trial.change.endswith("; dtype=jnp.float32 in p/a")
    assert len(trial.lines) == 1

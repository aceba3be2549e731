"""The short autocast of docs/how-autocast-works.md has the matmuls of the library, in the same dtypes."""

import collections
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from examples.models import FAMILIES
from tests.support.jaxprs import PRODUCTS, equations

PAGE = Path(__file__).parents[2] / "docs" / "how-autocast-works.md"


@pytest.fixture(scope="module")
def short():
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), namespace)
    return namespace["autocast"]


def family(name):
    """The loss of one of the models of the benchmarks at a small size, and abstract arguments."""
    workload = FAMILIES[name].small()
    variables = dict(jax.eval_shape(workload.init, 0))
    params = variables.pop("params")
    inputs, targets = jax.eval_shape(lambda: workload.batch(0))

    def loss(params, stats, inputs, targets):
        outputs, new = workload.model.apply({"params": params, **stats}, *inputs, mutable=list(stats))
        return workload.loss(outputs, targets), new

    return loss, (params, variables, inputs, targets)


def layers(wrap):
    """A stack of layers with attention, each under `wrap`, or in a scan."""
    norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def layer(x, p):
        q, k, v = jnp.split(norm(x) @ p["qkv"], 3, -1)
        x = x + jax.nn.softmax(q @ k.mT / 4.0) @ v @ p["out"]
        return x + jax.nn.gelu(norm(x) @ p["up"] + p["bias"]) @ p["down"], None

    def loss(params, x):
        if wrap is None:
            x, _ = jax.lax.scan(layer, x, params)
        else:
            for index in range(3):
                x, _ = wrap(layer)(x, jax.tree.map(lambda p, index=index: p[index], params))
        return jnp.mean(jnp.square(x)), None

    shapes = {"qkv": (16, 48), "out": (16, 16), "up": (16, 64), "bias": (64,), "down": (64, 16)}
    params = {name: jax.ShapeDtypeStruct((3, *shape), jnp.float32) for name, shape in shapes.items()}
    return loss, (params, jax.ShapeDtypeStruct((2, 8, 16), jnp.float32))


PROGRAMS = {name: (family, name) for name in FAMILIES}
PROGRAMS |= {"scanned": (layers, None), "checkpointed": (layers, jax.checkpoint)}


def matmuls(fun, args):
    found = collections.Counter()
    for each in equations(jax.make_jaxpr(jax.value_and_grad(fun, has_aux=True))(*args)):
        if each.primitive.name in PRODUCTS:
            dtypes = (var.aval.dtype.name for var in (*each.invars, *each.outvars))
            found[each.primitive.name, *dtypes] += 1
    return found


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", sorted(PROGRAMS, key=lambda name: (name != "unet", name)))
def test_the_short_autocast_has_the_matmuls_of_the_library(short, name, half):
    make, argument = PROGRAMS[name]
    loss, args = make(argument)
    assert matmuls(short(loss, half), args) == matmuls(jmp.autocast(loss, half), args)


def test_it_is_as_short_as_the_page_says():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line for block in blocks[:-2] for line in block.splitlines() if line.strip()]
    assert 150 < len(lines) < 200
    assert f"about {round(len(lines), -1)} lines" in PAGE.read_text()
    files = (PAGE.parents[1] / "jmp_lite" / "_autocast").rglob("*.py")
    whole = sum(len(path.read_text().splitlines()) for path in files)
    said = int(re.search(r"`_autocast/` has ([\d,]+) lines", PAGE.read_text())[1].replace(",", ""))
    assert abs(said - whole) < 0.1 * whole

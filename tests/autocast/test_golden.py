"""The jaxprs of three small programs under autocast, to look at in a diff.

A change that means to move a cast shows here what it moves, and one that means to move none must leave the
files as they are. `PYTHONPATH=. python -m tests.autocast.test_golden` writes them again.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from tests.support.jaxprs import inner_of

FOLDER = Path(__file__).parent / "golden"


def network(params, x):
    """Two matmuls with a bias and an activation function between them, and a loss."""
    hidden = jax.nn.gelu(x @ params["first"] + params["bias"])
    return jnp.mean(jnp.square(hidden @ params["second"]))


def attention(params, x):
    """One head with a causal mask."""
    q, k, v = (x @ params[name] for name in ("first", "second", "third"))
    scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), q @ k.T / 2.0, -jnp.inf)
    return jnp.sum(jax.nn.softmax(scores) @ v)


def layers(params, x):
    """A loop over layers with a residual stream."""
    layer = lambda x, w: (x + jnp.tanh(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) @ w), None)
    return jnp.sum(jax.lax.scan(layer, x, params["stacked"])[0])


PROGRAMS = {"network": network, "attention": attention, "layers": layers}
PARAMS = {name: jnp.eye(8) for name in ("first", "second", "third")}
PARAMS |= {"bias": jnp.ones(8), "stacked": jnp.stack([jnp.eye(8)] * 3)}


def described(var):
    aval = var.aval
    return f"{jnp.dtype(aval.dtype).name}[{','.join(map(str, aval.shape))}]"


def lines(jaxpr, indent=""):
    """Yields a line for each equation: dtypes and shapes. Versions of JAX write parameters differently."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        results, operands = (" ".join(map(described, each)) for each in (equation.outvars, equation.invars))
        yield f"{indent}{results} = {equation.primitive.name} {operands}".rstrip()
        for inner in inner_of(equation):
            yield from lines(inner, indent + "    ")


def golden(name):
    """The forward pass of a program under autocast, and that of its gradients."""
    fun = jmp.autocast(PROGRAMS[name], jnp.float16)
    x = jnp.ones((4, 8))
    forward = lines(jax.make_jaxpr(fun)(PARAMS, x))
    gradients = lines(jax.make_jaxpr(jax.grad(fun))(PARAMS, x))
    return "\n".join(["forward:", *forward, "", "with gradients:", *gradients, ""])


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_jaxpr_is_the_one_that_was_looked_at(name):
    if jax.__version_info__[:2] != (0, 12):
        pytest.skip("the files are of JAX 0.12; others write some equations in another way")
    assert golden(name) == (FOLDER / f"{name}.txt").read_text()


if __name__ == "__main__":
    for name in PROGRAMS:
        (FOLDER / f"{name}.txt").write_text(golden(name))

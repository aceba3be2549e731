"""The two earlier attempts at autocast in JAX, run on the programs that ours puts in half precision.

Versions: jaxamp 0.0.4, and grampax 0.1.0 with quax 0.4.6 (older ones cannot be imported on this JAX).
A test that fails here says that a peer has been mended: take its line out of the README's table.
"""

import jax.numpy as jnp
import pytest
from jax import lax

import jmp_lite as jmp
from tests.support.jaxprs import products

W, X = jnp.eye(8), jnp.ones((4, 8))
HALF = ("bfloat16", "bfloat16")


PROGRAMS = {
    "a product alone": lax.dot,
    "in scan": lambda x, w: lax.scan(lambda x, _: (x @ w, None), x, length=2)[0],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_jaxamp_crashes_where_ours_is_half(name):
    jaxamp = pytest.importorskip("jaxamp", reason="needs the extra [peers]")
    theirs = jaxamp.amp(compute_dtype=jnp.bfloat16)(PROGRAMS[name])
    # It unpacks what Primitive.get_bind_params returned before JAX 0.10.
    with pytest.raises(ValueError, match="too many values to unpack"):
        theirs(X, W)
    assert products(jmp.autocast(PROGRAMS[name]), X, W) == [HALF]


@pytest.mark.filterwarnings("ignore:Implicit conversion of an array to a dtype")
@pytest.mark.parametrize("name", PROGRAMS)
def test_grampax_crashes_where_ours_is_half(name):
    grampax = pytest.importorskip("grampax", reason="needs the extra [peers]")
    theirs = grampax.autocast(PROGRAMS[name], dtype=jnp.bfloat16)
    # It reads quax._core, which the versions of quax that run on this JAX do not have.
    with pytest.raises(AttributeError, match="_core"):
        theirs(X, W)
    assert products(jmp.autocast(PROGRAMS[name]), X, W) == [HALF]

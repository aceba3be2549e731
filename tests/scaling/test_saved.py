"""The call of a failed step in a file: it is read back as it was, and `doctor` examines it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from jmp_lite.diagnostics import find_nonfinite

PARAMS = {"w": jnp.linspace(-1, 1, 4), "half": jnp.ones((2, 3), jnp.bfloat16)}
CALL = (
    PARAMS,
    optax.adam(1e-3).init(PARAMS),
    {"x": np.eye(2), "label": jnp.int32(3), "fp8": jnp.ones(2, ml_dtypes.float8_e4m3fn), "name": "train"},
    jax.random.key(7, impl="rbg"),
    jnp.zeros((0, 2)),
)


def test_every_array_comes_back_with_its_dtype_and_bits(tmp_path):
    jmp.save_call(tmp_path / "call.npz", *CALL)
    like = (jax.tree.map(jnp.zeros_like, PARAMS), *CALL[1:3], jax.random.key(0, impl="rbg"), CALL[4])
    found = jmp.load_call(tmp_path / "call.npz", *like)
    assert jax.tree.structure(found) == jax.tree.structure(CALL)
    for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(CALL)):
        if isinstance(old, str):
            assert new == old
        elif jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(new) == "rbg"
            assert (jax.random.key_data(new) == jax.random.key_data(old)).all()
        else:
            assert (new.dtype, new.shape) == (jnp.asarray(old).dtype, old.shape)
            assert (np.asarray(new) == np.asarray(old)).all()


@pytest.mark.parametrize("name", ["call.npz", "call"])
def test_the_first_call_is_kept(tmp_path, name):
    path = tmp_path / name
    jmp.save_call(path, jnp.float32(1))
    jmp.save_call(path, jnp.float32(2))
    assert float(jmp.load_call(path, jnp.float32(0))[0]) == 1
    with pytest.raises(ValueError, match=r"has no array '1'"):
        jmp.load_call(path, jnp.float32(0), jnp.float32(0))


def test_a_stuck_run_is_examined_from_its_file(tmp_path):
    tx, path = jmp.with_loss_scale(optax.sgd(0.1), jmp.StaticLossScale(8.0)), tmp_path / "stuck.npz"
    loss = lambda w, x: jnp.sum(jnp.log(w * x))

    def train(w, opt_state, x):
        for _ in range(3):
            _, grads = jmp.value_and_grad(loss, jmp.get_loss_scale(opt_state))(w, x)
            updates, opt_state = tx.update(grads, opt_state, w)
            w = optax.apply_updates(w, updates)
            jmp.raise_if_stuck(opt_state, max_consecutive_skips=2, save=(path, w, opt_state, x))

    w, good, bad = jnp.ones(2), jnp.array([1.0, 3.0]), jnp.array([2.0, 0.0])
    train(w, tx.init(w), good)
    assert not path.exists()
    with pytest.raises(FloatingPointError, match="The last 2 steps were skipped"):
        train(w, tx.init(w), bad)
    w, opt_state, x = jmp.load_call(path, w, tx.init(w), good)
    assert x.tolist() == [2, 0]
    assert find_nonfinite(loss, loss_scale=jmp.get_loss_scale(opt_state))(w, x).cause.operation == "log"

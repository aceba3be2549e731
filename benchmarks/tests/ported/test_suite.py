"""The tests of another package, run through us: which fail by us, which by themselves."""

import subprocess
import sys

import pytest

SUITE = """
import jax
import jax.numpy as jnp
import numpy as np
import pytest

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def test_a_sum():
    np.testing.assert_allclose(jax.jit(jnp.sum)(jnp.ones(4)), 4)


def test_a_matmul():
    np.testing.assert_allclose(jax.jit(lambda x: x @ x.T)(X), X @ X.T, rtol=1e-4)


def test_a_branch():
    assert jax.grad(lambda x: x if x > 0 else -x)(2.0) == 1.0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sizes(size):
    assert jax.vmap(jnp.sin)(jnp.ones(size)).shape == (size,)
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a_test.py").write_text(SUITE)

    def run(*options):
        command = [
            sys.executable,
            "-m",
            "benchmarks.ported.suite",
            str(tmp_path),
            "tests/a_test.py",
            *options,
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout, done.stderr

    return run


@pytest.mark.slow
def test_what_fails_with_jit_fails_by_itself(run):
    table, failures = run("--modes", "bf16")
    assert "| bf16 | 6 | 5 | 0 | 1 |" in table
    assert "a_test.py" not in failures


@pytest.mark.slow
def test_what_fails_only_through_us_fails_by_us(run):
    table, failures = run("--modes", "bf16", "fuse", "--tolerance", "0", "--keep", "2")
    assert "| bf16 | 5 | 3 | 1 | 1 |" in table
    assert "| fuse | 5 | 4 | 0 | 1 |" in table
    assert failures.startswith("bf16: tests/a_test.py::test_a_matmul: AssertionError")

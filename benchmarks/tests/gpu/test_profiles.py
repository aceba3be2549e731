"""The times of kernels and modules, read from a profile."""

from pathlib import Path

import jax
import pytest

from benchmarks.gpu.profiles import read_profile, seconds_by_module, table
from jmp_lite.programs import read_program, roofline
from tests.support.compiled_programs import ROWS, TWO_WEIGHTS, two_modules


def test_a_profile_gives_the_seconds_of_the_programs_kernels_and_modules(tmp_path):
    compiled = jax.jit(jax.grad(two_modules)).lower(TWO_WEIGHTS, ROWS).compile()
    jax.block_until_ready(compiled(TWO_WEIGHTS, ROWS))
    with jax.profiler.trace(tmp_path):
        for _ in range(4):
            jax.block_until_ready(compiled(TWO_WEIGHTS, ROWS))
    kernels = read_profile(tmp_path, runs=4)
    program = read_program(compiled)
    named = [launch for launch in program.launches if launch.name in kernels]
    assert {launch.name for launch in program.launches if launch.flops} <= {launch.name for launch in named}
    assert read_profile(tmp_path)[named[0].name] == pytest.approx(4 * kernels[named[0].name])
    measured = seconds_by_module(program, kernels, depth=1)
    assert measured["up"] > 0
    assert sum(measured.values()) == pytest.approx(sum(kernels[launch.name] for launch in named))
    lines = table(roofline(program, depth=1), measured).splitlines()
    (up,) = [line for line in lines if line.startswith("up ")]
    assert lines[0].split() == ["milliseconds", "float32", "tf32", "bfloat16", "float16", "measured"]
    assert up.split()[-1] == f"{1e3 * measured['up']:.3f}"


def test_a_stored_profile_is_read():
    """Two runs of `jnp.sum(jnp.sort(jnp.sort(x) @ x))` on a CPU, JAX 0.12; seconds of one run."""
    seconds = read_profile(Path(__file__).parent / "profiles", runs=2)
    expected = {"sort.6": 238.415e-6, "ynn_fusion.1": 16.82e-6, "sort.7": 231.72e-6, "ynn_fusion": 2.88e-6}
    assert seconds == pytest.approx(expected)


def test_a_folder_without_a_profile_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="There is no profile"):
        read_profile(tmp_path)

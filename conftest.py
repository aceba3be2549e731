"""Settings for JAX that must be there before it starts, the names of the doctests, and the mark `cases`.

JAX gets eight virtual CPU devices, a fast compiler, and a cache of compiled programs for the run.
`--cpu-limit` fails a fast test that would be slow on an idle core.
"""

import atexit
import collections
import gc
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

# The tests spend their time in the compiler, not in the programs that it makes.
_FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # Later versions do not know the flag.
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_FLAGS))
os.environ.setdefault("KERAS_BACKEND", "jax")
if Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists():
    # The GPU is for the tests that ask for it; several processes share it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
else:
    # Without it JAX looks for a driver as soon as its CUDA plugin (the extra `[h100]`) is installed.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

# What one process has compiled, the others of the run read, and so do the programs that tests start. The key
# holds the scopes of the program, which `read_program` reads, but no source lines, which differ from test to
# test. .ci/run names a folder that its parts share.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jmp_lite-compiled-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY", "true")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# JAX makes many objects that live long: at the usual threshold of 700 a tenth of the time goes to garbage.
gc.set_threshold(50_000)

# What reads jaxprs, or names JAX's own functions, types and modules: CI runs it on the oldest JAX too. It
# also runs there what needs the extra [peers].
_BY_VERSION = (
    *("jaxpr", "autocast", "laws/test_found.py", "test_imports.py", "test_types.py"),
    *("core/test_jmp_compatibility.py", "core/scaling/test_peers.py"),
)

# The CPU seconds of the compilation in `_slowdown` on an idle core.
_IDLE_COMPILATION = 0.05

# A program of its own, which a test starts.
collect_ignore = ["tests/support/poisoned_training.py"]

hypothesis.settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.register_profile("exhaustive", deadline=None, max_examples=200)
hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def names_of_doctests(request: pytest.FixtureRequest) -> None:
    """Examples in docstrings use these names without an import, as the API pages say."""
    if isinstance(request.node, pytest.DoctestItem):
        import jax
        import jax.numpy as jnp
        import optax

        import jmp_lite
        from jmp_lite import diagnostics, programs, testing

        namespace = request.getfixturevalue("doctest_namespace")
        for module in (diagnostics, programs, testing):
            namespace.update((name, value) for name, value in vars(module).items() if name[0] != "_")
        namespace.update(jax=jax, jnp=jnp, optax=optax, jmp=jmp_lite, jmp_lite=jmp_lite)


def _freeze_objects() -> None:
    """Excludes all objects that exist, a million of modules and tests, from later collections of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def only_new_garbage() -> None:
    """Freezes all objects that exist, so that a `gc.collect()` of a test takes 0.3 s less."""
    _freeze_objects()


@pytest.hookimpl(tryfirst=True)  # Before pytest selects by marks.
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Marks the tests of `_BY_VERSION`, and the cases of a test that has the mark `cases(fast, slow)`.

    The first `fast` cases get no mark, 0 if it is not given. The next `slow` cases are slow, all if it is not
    given. All others are exhaustive.
    """
    seen: collections.Counter[tuple[Path, str]] = collections.Counter()
    versioned = [Path(__file__).with_name("tests") / name for name in _BY_VERSION]
    paths = {item.path for item in items}
    versioned = {path for path in paths if any(path.is_relative_to(each) for each in versioned)}
    for item in items:
        if item.path in versioned:
            item.add_marker("by_version")
        mark = item.get_closest_marker("cases")
        if mark is not None:
            test = (item.path, item.originalname)
            seen[test] += 1
            fast, slow = mark.kwargs.get("fast", 0), mark.kwargs.get("slow", len(items))
            if seen[test] > fast:
                item.add_marker("slow" if seen[test] <= fast + slow else "exhaustive")


def pytest_collection_finish() -> None:
    _freeze_objects()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-limit",
        type=float,
        help="fail each test without a mark that takes more CPU seconds on an idle core",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Measures the time of this process, compilation included, whatever else the machine does."""
    start = time.process_time()
    yield
    spent, limit = time.process_time() - start, item.config.getoption("--cpu-limit")
    marked = any(item.get_closest_marker(mark) for mark in ("slow", "exhaustive", "gpu"))
    marked |= isinstance(item, pytest.DoctestItem)  # An example shows what its function does, at its cost.
    if limit is None or marked or spent <= limit:
        return
    limit *= _slowdown()
    if spent > limit:
        pytest.fail(
            f"took {spent:.1f} s of CPU time, more than {limit:.1f} s: compile less, or mark the test slow.",
            pytrace=False,
        )


def _slowdown() -> float:
    """How many times longer a test may take now than on an idle core."""
    import jax
    import jax.numpy as jnp

    def seconds() -> float:
        start = time.process_time()

        def loss(w, x):
            return jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w))

        jax.jit(jax.grad(loss)).lower(jnp.ones((8, 8)), jnp.ones((4, 8))).compile()
        return time.process_time() - start

    # Three times as long, since the machine may have been busier during the test than it is now.
    return 3 * max(1.0, sorted(seconds() for _ in range(3))[1] / _IDLE_COMPILATION)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Gives a process all tests of a file: what they share is compiled once."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)

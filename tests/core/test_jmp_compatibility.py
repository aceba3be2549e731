"""Programs written for jmp 0.0.4 run unchanged with the import replaced."""

import importlib.util
import inspect
import pathlib
import types
import unittest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite

jmp = pytest.importorskip("jmp", reason="needs the extra [peers]")

# jmp's own tests, from where jmp is installed; its source is neither copied nor imported here.
SUITES = {
    "loss_scale_test": "from jmp._src import loss_scale as jmp",
    "policy_test": "from jmp._src import policy as jmp",
}

# What jmp tests and does not hold here, each with its reason.
DEVIATIONS = {
    "test_static_empty_trees_StaticLossScale": "a scale of 0 is an error; a scale is a leaf, for jit",
}

# jmp's `test_str` reads the names of dtypes from a private table.
PRIVATE = {
    "dtype_to_names": {
        jnp.bfloat16: ("bf16",),
        jnp.float16: ("f16",),
        np.float16: ("f16",),
        jnp.float32: ("full",),
        np.float32: ("full",),
    }
}


def load_suite(name, private=PRIVATE):
    """The TestCases of one of jmp's test modules, with jmp_lite for the module that they test."""
    pytest.importorskip("absl.testing")
    path = pathlib.Path(jmp.__file__).parent / "_src" / f"{name}.py"
    if not path.exists():
        pytest.skip("jmp was installed without its tests")
    source = path.read_text()
    assert source.count(SUITES[name]) == 1
    stand_in = types.SimpleNamespace(
        **{public: getattr(jmp_lite, public) for public in jmp.__all__}, **private
    )
    module = types.ModuleType(f"jmp_{name}")
    module.jmp = stand_in
    exec(compile(source.replace(SUITES[name], ""), str(path), "exec"), module.__dict__)
    return unittest.defaultTestLoader.loadTestsFromModule(module)


def run_suite(name, private=PRIVATE):
    suite = [case for group in load_suite(name, private) for case in group]
    result = unittest.TestResult()
    for case in suite:
        case.run(result)
    return suite, result


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # In jmp's test itself.
@pytest.mark.parametrize(("name", "count"), [("loss_scale_test", 25), ("policy_test", 60)])
def test_the_tests_of_jmp_pass(name, count):
    suite, result = run_suite(name)
    assert result.testsRun == len(suite) >= count
    failed = {case.id().rsplit(".", 1)[1]: text for case, text in [*result.failures, *result.errors]}
    unexpected = [text for case, text in failed.items() if case not in DEVIATIONS]
    assert not unexpected, "\n".join(unexpected)
    # A deviation that has gone away should go from the list.
    assert set(failed) == {
        case for case in DEVIATIONS if any(case == c.id().rsplit(".", 1)[1] for c in suite)
    }


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_the_page_says_how_many_of_the_tests_of_jmp_pass():
    results = [run_suite(name, private={})[1] for name in SUITES]
    failed = [case.id() for result in results for case, _ in result.failures + result.errors]
    table = [name for name in failed if ".test_str" in name]  # They read the private table.
    run = sum(result.testsRun for result in results)
    assert (len(table), len(failed)) == (5, 6)
    page = pathlib.Path(__file__).parents[2] / "docs/migrating/jmp.md"
    assert f"Of jmp's own {run} tests {run - len(failed)} pass; five others" in page.read_text()


# Names and signatures


def parameters(function):
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]


def default_of(parameter):
    return parameter.default is not inspect.Parameter.empty


CALLABLES = [name for name in jmp.__all__ if name != "LossScale"]
METHODS = [
    (name, method)
    for name in ("Policy", "NoOpLossScale", "StaticLossScale", "DynamicLossScale")
    for method in vars(getattr(jmp, name))
    if not method.startswith("_") and callable(getattr(getattr(jmp, name), method)) and "tree_" not in method
]


def assert_same_call(ours, theirs):
    """Every call of theirs, by position or by keyword, is a call of ours."""
    ours, theirs = parameters(ours), parameters(theirs)
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    for our, their in zip(ours, theirs):
        assert our.kind == their.kind
        assert default_of(our) or not default_of(their)
    assert all(default_of(p) for p in ours[len(theirs) :])


def test_public_names_and_methods_take_the_arguments_of_jmp():
    assert [name for name in jmp.__all__ if not hasattr(jmp_lite, name)] == []
    for name in CALLABLES:
        assert_same_call(getattr(jmp_lite, name), getattr(jmp, name))
    for name, method in METHODS:
        assert_same_call(getattr(getattr(jmp_lite, name), method), getattr(getattr(jmp, name), method))
    assert len(METHODS) == 13


def test_attributes_of_jmp_are_here():
    assert jmp_lite.NoOpLossScale().loss_scale == jmp.NoOpLossScale().loss_scale
    assert jmp_lite.StaticLossScale(8).loss_scale == jmp.StaticLossScale(8).loss_scale
    assert jmp_lite.half_dtype() == jmp.half_dtype()
    assert jmp_lite.half_dtype()(2).dtype == jmp.half_dtype()(2).dtype  # As in jmp's README.


# A whole program, as jmp's README puts one together


def train(library, policy_text, steps=40):
    """A regression in mixed precision with the scale threaded by hand, an overflow on step 7."""
    policy = library.get_policy(policy_text)
    key = jax.random.key(0)
    inputs = jax.random.normal(key, (32, 8))
    targets = inputs @ jnp.arange(8.0) / 8
    params = policy.cast_to_param({"w": jnp.zeros(8), "b": jnp.zeros(())})

    def loss_fn(params, x, y, loss_scale):
        params, x = policy.cast_to_compute((params, x))
        prediction = policy.cast_to_output(x @ params["w"] + params["b"])
        return loss_scale.scale(jnp.mean((prediction - y) ** 2))

    @jax.jit
    def update(params, loss_scale, x, y):
        grads = jax.grad(loss_fn)(params, x, y, loss_scale)
        grads = policy.cast_to_compute(grads)
        grads = loss_scale.unscale(grads)
        grads = policy.cast_to_param(grads)
        new_params = jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads)
        grads_finite = library.all_finite(grads)
        loss_scale = loss_scale.adjust(grads_finite)
        return library.select_tree(grads_finite, new_params, params), loss_scale, grads_finite

    loss_scale = library.DynamicLossScale(jnp.float32(2.0**12), period=10)
    history = []
    for step in range(steps):
        x = inputs.at[3, 3].set(jnp.inf) if step == 7 else inputs
        params, loss_scale, finite = update(params, loss_scale, x, targets)
        history.append((float(loss_scale.loss_scale), int(loss_scale.counter), bool(finite)))
    loss = float(loss_fn(library.cast_to_full(params), inputs, targets, library.NoOpLossScale()))
    return params, history, loss


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("policy", ["params=float32,compute=float16,output=float32", "full", "c=bf16,o=f32"])
def test_a_training_program_gives_the_same_numbers_under_both(policy):
    params, history, loss = train(jmp_lite, policy)
    their_params, their_history, their_loss = train(jmp, policy)
    assert history == their_history
    assert [finite for _, _, finite in history].count(False) >= 1
    assert loss < 0.05
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(their_params)):
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    assert loss == their_loss


def test_jmp_itself_is_the_version_compared_with():
    assert jmp.__version__ == "0.0.4"
    assert importlib.util.find_spec("jmp") is not None


@pytest.mark.parametrize("library", [jmp, jmp_lite], ids=["jmp", "jmp_lite"])
def test_the_program_of_jmps_issue_47_runs_here(library):
    """https://github.com/google-deepmind/jmp/issues/47: a scale in float16, adjusted."""
    scale = library.DynamicLossScale(jnp.float16(2**15), period=2)
    finite = library.all_finite(jnp.ones(5, jnp.float16))
    if library is jmp:
        with pytest.raises(TypeError, match="same dtypes"):
            scale.adjust(~finite)
    else:
        assert scale.adjust(~finite).loss_scale == 2**14
        for _ in range(4):  # Past 2**16, which float16 does not hold.
            scale = scale.adjust(finite)
        assert scale.loss_scale == 2**17

"""A pytest plugin of `suite`: functions that tests give to `jax.jit`, `jax.grad` and others go through us."""

import functools
import importlib
import inspect
import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from benchmarks.ported.suite import MODES

SETTINGS = json.loads(os.environ.get("JMP_THROUGH", "{}"))  # As `suite` gives them.
TRANSFORMS = "jit vmap eval_shape grad value_and_grad vjp jvp linearize jacfwd jacrev hessian".split()  # noqa: SIM905
ASSERTIONS = ["assert_allclose", "assert_array_almost_equal", "assert_almost_equal"]


def through(fun: Any) -> Any:
    """Returns a function as the mode runs it; what is no function, or comes from us already, as it is."""
    with suppress(TypeError, ValueError):
        return fun if inspect.isclass(fun) else MODES[SETTINGS["mode"]](fun)
    return fun


def given(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a transform of JAX whose function goes through us, unless it is the library that calls it."""

    @functools.wraps(transform)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not args:
            return lambda fun: transform(through(fun), **kwargs)
        ours = sys._getframe(1).f_globals.get("__name__", "").startswith("jmp_lite")
        return transform(args[0] if ours else through(args[0]), *args[1:], **kwargs)

    return call


def called(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method, such as `flax.linen.Module.apply`, that goes through us wherever it is called."""
    return lambda self, *args, **kwargs: through(functools.partial(method, self))(*args, **kwargs)


def relaxed(strict: Callable[..., Any], tolerant: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a comparison that lets numbers differ by a share of themselves and of the largest one."""

    def compare(found: Any, wanted: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            dtype = np.result_type(wanted, np.float64)
            x, y = np.asarray(found).astype(dtype), np.asarray(wanted).astype(dtype)
            assert np.asarray(found).dtype.kind in "fcV"  # V is bfloat16.
            largest = float(np.abs(y[np.isfinite(y)]).max(initial=1e-6))
        except Exception:  # Integers, tracers, strings.
            return strict(found, wanted, *args, **kwargs)
        near = {"rtol": SETTINGS["tolerance"], "atol": SETTINGS["tolerance"] * largest}
        return tolerant(x, y, **{name: max(near[name], kwargs.get(name) or 0) for name in near})

    return functools.update_wrapper(compare, strict)


def pytest_load_initial_conftests() -> None:
    """Replaces the functions before the suite is imported."""
    jvp = jax.jvp
    jax.__dict__.update({name: given(getattr(jax, name)) for name in TRANSFORMS})
    with suppress(ImportError):  # JAX's suite takes derivatives by these; finite differences need float32.
        checks, tests = (importlib.import_module(f"jax._src.{name}test_util") for name in ("public_", ""))
        checks.__dict__["api"] = tests.__dict__["api"] = jax
        checks.__dict__["numerical_jvp"] = lambda fun, x, t, eps=0: jvp(fun, tuple(x), tuple(t))[1]
    for module, owner, method in (name.rsplit(".", 2) for name in SETTINGS["call"]):
        owner = getattr(importlib.import_module(module), owner)
        setattr(owner, method, called(getattr(owner, method)))
    if SETTINGS["tolerance"]:
        asserts = {name: getattr(np.testing, name) for name in ASSERTIONS}
        np.testing.__dict__.update({n: relaxed(f, np.testing.assert_allclose) for n, f in asserts.items()})
        jax.numpy.allclose = relaxed(jax.numpy.allclose, np.allclose)
        np.allclose = relaxed(np.allclose, np.allclose)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keeps some cases of each test, in an order drawn once: a run that is cut is a sample."""
    seen: dict[Any, int] = {}
    for item in list(items):
        test = item.parent, getattr(inspect.unwrap(getattr(item, "function", item)), "__code__", item)
        seen[test] = seen.get(test, 0) + 1
        if seen[test] > SETTINGS["keep"]:
            items.remove(item)
    random.Random(0).shuffle(items)


def pytest_runtest_logreport(report: Any) -> None:
    """Writes each outcome at once."""
    if report.failed or (report.when == "call" and report.passed):
        message = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
        with open(SETTINGS["output"], "a") as file:
            print(json.dumps([report.nodeid, report.failed, message]), file=file)

"""Who may import whom, what an import costs, and that every public name is documented."""

import ast
import inspect
import pathlib
import subprocess
import sys

import pytest

import jmp_lite

ROOT = pathlib.Path(jmp_lite.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__init__.py"
}


def autocast(*names):
    return (f"_autocast.{name}" for name in names)


# Of design.md. What a module may import of this package; what is not listed may import none of it.
ALLOWED = {
    "_dtypes": set(),
    "_path": set(),
    "_tree": {"_dtypes"},
    "_casts": set(),
    "_finite": {"_tree"},
    "_known_sums": set(),
    "_policy": {"_dtypes", "_tree", "_path"},
    "_scalars": set(),
    "_loss_scale": {"_scalars", "_tree"},
    "_grad": {"_loss_scale", "_tree"},
    "_optimizer_state": {"_tree"},
    "_early_select": {"_finite", "_known_sums", "_tree"},
    "_optimizer": {"_early_select", "_finite", "_loss_scale", "_tree", "_path", "_optimizer_state"},
    "_flax": {"_casts", "_policy", "_tree", "_path", "_dtypes"},
    "_wide_gradients": {"_dtypes"},
    # The states, to register how Flax's serialization writes them.
    "linen": {
        "_dtypes",
        "_wide_gradients",
        "_policy",
        "_tree",
        "_path",
        "_flax",
        "_loss_scale",
        "_optimizer_state",
    },
    "nnx": {"_dtypes", "_wide_gradients", "_policy", "_tree", "_path", "_flax"},
    "_autocast.rules": {"_dtypes", "_path"},
    "_autocast.jaxprs": {"_path"},
    "_autocast.scopes": {*autocast("rules", "jaxprs")},
    "_autocast.activations": {*autocast("rules", "jaxprs")},
    "_autocast.states": {*autocast("rules", "jaxprs", "activations")},
    "_autocast.demand": {*autocast("rules", "jaxprs", "activations", "states", "plan")},  # Its types.
    "_autocast.plan": {*autocast("rules", "jaxprs", "scopes", "activations", "states", "demand")},
    "_autocast.interpreter": {"_casts", *autocast("rules", "jaxprs", "states", "plan")},
    "_autocast.custom_rules": {*autocast("jaxprs", "states", "interpreter")},
    "_autocast.calls": {*autocast("jaxprs", "states", "interpreter", "custom_rules")},
    # `nnx` only within a call that was given an NNX module.
    "_autocast.api": {
        *autocast("rules", "jaxprs", "states", "plan", "interpreter", "calls"),
        *("_dtypes", "_path", "nnx"),
    },
    "_autocast.report": {*autocast("rules", "jaxprs", "states", "api")},
    "diagnostics._hlo": set(),
    "diagnostics._products": {"diagnostics._hlo"},
    "diagnostics._traffic": {"diagnostics._hlo"},
    "diagnostics._program": {"diagnostics._hlo", "diagnostics._products", "diagnostics._traffic"},
}
STANDARD = set(sys.stdlib_module_names)
THIRD_PARTY = {name: {"jax", "numpy"} for name in ALLOWED}
THIRD_PARTY["_path"] = {"jax"}
THIRD_PARTY["_optimizer"] = {"jax", "numpy", "optax"}
for flax_module in ("_flax", "linen", "nnx"):
    THIRD_PARTY[flax_module] = {"jax", "numpy", "flax"}


def imports_of(path):
    """The absolute names that a file imports, those of this package from a dot on."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            found += [f"{start}{alias.name}" if node.module is None else start for alias in node.names]
    return sorted(set(found))


def ours(name):
    """The modules of this package that the module `name` imports."""
    package = name.split(".")[:-1]
    for module in imports_of(MODULES[name]):
        if module.startswith("."):
            level = len(module) - len(module.lstrip("."))
            yield ".".join((*package[: len(package) - level + 1], module.lstrip(".")))


CORE = [name for name in MODULES if name in ALLOWED]


def test_the_rules_name_every_module_of_the_core():
    assert set(ALLOWED) == set(MODULES)


@pytest.mark.parametrize("name", CORE)
def test_a_module_imports_only_whom_it_may(name):
    assert set(ours(name)) <= ALLOWED[name]


@pytest.mark.parametrize("name", CORE)
def test_a_module_imports_only_the_libraries_it_may(name):
    others = {module.split(".")[0] for module in imports_of(MODULES[name]) if not module.startswith(".")}
    assert others - STANDARD <= THIRD_PARTY[name]


@pytest.mark.parametrize("name", MODULES)
def test_nobody_imports_the_inside_of_jax(name):
    modules = imports_of(MODULES[name])
    assert not [module for module in modules if module.startswith(("jax._src", "jaxlib"))]
    reads_jaxprs = name.startswith(("_autocast", "_early_select", "_known_sums", "diagnostics"))
    assert reads_jaxprs or not [module for module in modules if module.startswith("jax.extend")]
    assert "jax._src" not in MODULES[name].read_text()


@pytest.mark.parametrize("name", [name for name in MODULES if name not in {"linen", "nnx", "_flax"}])
def test_only_the_flax_modules_import_flax(name):
    modules = imports_of(MODULES[name])
    assert not [m for m in modules if m.split(".")[0] == "flax"]
    allowed = {"nnx"} if name == "_autocast.api" else set()
    assert {"linen", "nnx", "_flax"} & set(ours(name)) <= allowed


def test_the_table_of_contents_holds_only_imports():
    body = ast.parse((ROOT / "__init__.py").read_text()).body
    docstring, *statements = body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(docstring.value, ast.Constant)
    assert statements
    for statement in statements:
        assert isinstance(statement, ast.ImportFrom)
        assert statement.level == 1
        assert [alias.asname == alias.name for alias in statement.names] == [True]


@pytest.fixture(scope="module")
def fresh_import():
    """What a new Python holds after `import jmp_lite`."""
    script = (
        "import sys, warnings; warnings.simplefilter('error'); import jmp_lite; "
        "scale = jmp_lite.DynamicLossScale(2.0**10, hysteresis=1), jmp_lite.StaticLossScale(2.0); "
        "tx = jmp_lite.with_loss_scale(__import__('optax').sgd(1.0)); "
        "policy = jmp_lite.Policy('f32', 'bf16', 'f32'); "
        "from jax._src import xla_bridge; "
        "print(xla_bridge.backends_are_initialized(), *sorted(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    initialized, *modules = run.stdout.split()
    return initialized, set(modules)


def test_importing_does_not_import_flax(fresh_import):
    modules = fresh_import[1]
    assert "jmp_lite._optimizer" in modules
    assert not modules & {
        "flax",
        "jmp_lite.linen",
        "jmp_lite.nnx",
        "jmp_lite._flax",
        "equinox",
        "keras",
        "jmp",
    }


def test_importing_and_building_scales_and_policies_starts_no_backend(fresh_import):
    # A process that starts a backend too early cannot set its flags or distribute any more.
    assert fresh_import[0] == "False"


PUBLIC = {
    name: value
    for name, value in vars(jmp_lite).items()
    if not name.startswith("_") and not inspect.ismodule(value)
}


def documented():
    for name, value in PUBLIC.items():
        yield name, value
        if inspect.isclass(value):
            for attribute, member in vars(value).items():
                member = getattr(member, "fget", member)
                if not attribute.startswith("_") and inspect.isfunction(member):
                    yield f"{name}.{attribute}", member


def test_there_are_public_names():
    assert len(PUBLIC) >= 22


@pytest.mark.parametrize(("name", "value"), list(documented()), ids=lambda v: v if isinstance(v, str) else "")
def test_every_public_name_has_a_docstring(name, value):
    assert (inspect.getdoc(value) or "").strip()
    # That of the class itself, and not the one that `dataclass` makes of its signature.
    assert not value.__doc__.startswith(f"{name}(")


# What is read, or implemented, and not called: a protocol and a state have no example of their own.
WITHOUT_EXAMPLE = {"LossScale", "SkipNonfiniteState"}


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - WITHOUT_EXAMPLE))
def test_every_public_name_has_an_example(name):
    assert ">>>" in PUBLIC[name].__doc__

"""Who may import whom, what an import costs, and that every public name is documented."""

import ast
import importlib
import importlib.metadata
import inspect
import operator
import pathlib
import re
import subprocess
import sys

import pytest

import jmp_lite
from jmp_lite._names import LAZY, OTHERWISE, RESULTS, SUBMODULES, UNLISTED

ROOT = pathlib.Path(jmp_lite.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__init__.py"
}

# The rooms that export names, and those that take more of them: all their files.
EXPORTING = {
    "_jaxpr": ("_jaxpr", "_autocast"),
    "_autocast": ("_autocast",),
    "_autocast.report": ("_autocast",),
}
# The rooms, and the rooms below each that it may import.
ROOMS = {
    "_version": (),
    "_names": (),
    "_dtypes": (),
    "_paths": (),
    "_text": (),
    "_tree": ("_dtypes",),
    "_policy": ("_dtypes", "_paths", "_text", "_tree"),
    "_cast_params": ("_paths", "_tree", "_policy"),
    "_jaxpr": ("_paths", "_tree"),
    "_memory": ("_dtypes", "_paths", "_tree", "_jaxpr"),
    "_scaling": ("_dtypes", "_paths", "_text", "_tree", "_memory"),
    "_attention": ("_dtypes", "_jaxpr"),
    "_float8": ("_dtypes", "_jaxpr"),
    "_autocast.planning": ("_dtypes", "_paths", "_tree", "_policy", "_jaxpr", "_float8"),
    "_autocast.planning.passes": ("_jaxpr", "_autocast.planning"),
    "_autocast": (
        *("_dtypes", "_paths", "_tree", "_jaxpr", "_attention", "_float8"),
        *("_autocast.planning", "_autocast.planning.passes"),
    ),
    "_autocast.report": (
        *("_dtypes", "_paths", "_text", "_tree", "_jaxpr", "_attention", "_float8"),
        *("_autocast.planning", "_autocast"),
    ),
    "_flax": ("_dtypes", "_paths", "_tree", "_policy", "_scaling", "_jaxpr"),
    "linen": ("_flax",),
    "nnx": ("_flax",),
    "diagnostics._values": (
        *("_dtypes", "_paths", "_tree", "_scaling", "_jaxpr", "_autocast", "_autocast.report"),
    ),
    "diagnostics._precision": (
        *(
            "_dtypes",
            "_paths",
            "_text",
            "_scaling",
            "_jaxpr",
            "_autocast",
            "_autocast.report",
            "diagnostics._values",
        ),
    ),
    "diagnostics._nonfinite": (
        *("_dtypes", "_text", "_scaling", "_jaxpr", "_autocast", "_autocast.report"),
        *("diagnostics._values", "diagnostics._precision"),
    ),
    "diagnostics._ranges": (
        *(
            "_dtypes",
            "_text",
            "_tree",
            "_scaling",
            "_jaxpr",
            "_autocast",
            "_autocast.report",
            "diagnostics._values",
        ),
    ),
    "programs": ("_paths", "_text"),
    "diagnostics": (
        *("_dtypes", "_text", "_tree", "_scaling", "_jaxpr", "_autocast", "_autocast.report"),
        *("diagnostics._values", "diagnostics._nonfinite"),
        *("diagnostics._ranges", "diagnostics._precision", "programs"),
    ),
    "testing": (
        "_dtypes",
        "_paths",
        "_text",
        "_tree",
        "_scaling",
        "_autocast",
        "_autocast.report",
        "programs",
    ),
}


def files_of(room):
    """The files of a room in the order of its docstring: a file imports only files before it."""
    path = ROOT.joinpath(*room.split("."), "__init__.py")
    if not path.exists():
        return []
    files = {each.stem for each in path.parent.glob("*.py")} - {"__init__"}
    named = re.findall(r"`(\w+)(?:\.py)?`", ast.get_docstring(ast.parse(path.read_text())))
    return [name for name in dict.fromkeys(named) if name in files]


FILES = {room: files_of(room) for room in ROOMS}
THIRD_PARTY = {"_paths": {"jax"}, "_scaling": {"jax", "numpy", "optax"}, "_memory": {"jax", "numpy", "optax"}}
THIRD_PARTY |= {room: {"jax", "numpy", "flax"} for room in ("_flax", "linen", "nnx")}
THIRD_PARTY |= {"testing": {"jax", "numpy", "chex"}}
STANDARD = set(sys.stdlib_module_names)


def room_of(name):
    """The room in which a module lies; a module without a room is one of its own."""
    return name.rpartition(".")[0] or name


def allowed(name):
    """The modules of this package that the module `name` may import."""
    room, file = room_of(name), name.rpartition(".")[2]
    below = {module for module in MODULES if room_of(module) in ROOMS[room]}
    below |= EXPORTING.keys() & set(ROOMS[room])
    files = FILES[room]
    return below | {f"{room}.{before}" for before in files[: files.index(file)]} if files else below


def others(name):
    """The modules of other libraries that the module `name` imports."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def taken(name):
    """Where in this package the module `name` imports from, and which name, for each import."""
    package = name.split(".")[:-1]
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            start = ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))
            yield from ((start, alias.name) for alias in node.names)


def ours(name):
    """The modules of this package that the module `name` imports."""
    for start, each in taken(name):
        inside = f"{start}.{each}".lstrip(".")
        yield inside if inside in MODULES else start


def exported(room):
    """The names that a room exports."""
    imports = ast.parse(ROOT.joinpath(*room.split("."), "__init__.py").read_text()).body[1:]
    return {alias.asname for statement in imports for alias in statement.names}


def public(module):
    """The names that `dir(module)` shows, without modules, which an import adds to a package."""
    return {name for name in dir(module) if name[0] != "_" and not inspect.ismodule(getattr(module, name))}


def test_the_rooms_and_their_files_are_those_that_there_are():
    assert {room_of(name) for name in MODULES} == set(ROOMS)
    for room, files in FILES.items():
        modules = {name for name in MODULES if room_of(name) == room} - {room}
        assert modules == {f"{room}.{file}" for file in files}, f"the docstring of {room} names its files"


def test_a_room_stands_above_all_that_it_imports():
    order = list(ROOMS)
    assert all(order.index(below) < order.index(room) for room, rooms in ROOMS.items() for below in rooms)


def test_a_module_imports_only_lower_modules():
    assert not {name: found for name in MODULES if (found := set(ours(name)) - allowed(name))}


@pytest.mark.parametrize("room", EXPORTING)
def test_other_rooms_take_the_names_that_a_room_exports_and_each_is_taken(room):
    outside = {name for name in MODULES if not name.startswith(EXPORTING[room])}
    faces = [other for other in EXPORTING if other.startswith(f"{room}.")]
    inside = lambda start: start == room or start.startswith(f"{room}.")
    from_room = {
        name: {each for each in taken(name) if inside(each[0]) and each[0] not in faces} for name in outside
    }
    names = exported(room)
    assert not {
        name: found
        for name, each in from_room.items()
        if (found := {(start, word) for start, word in each if start != room or word not in names})
    }
    assert names == {word for each in from_room.values() for _, word in each}


def test_a_module_imports_only_the_libraries_that_its_room_may():
    def forbidden(name):
        libraries = {module.split(".")[0] for module in others(name)}
        return libraries - STANDARD - THIRD_PARTY.get(name.split(".")[0], {"jax", "numpy"})

    assert not {name: found for name in MODULES if (found := forbidden(name))}


def test_no_module_imports_private_modules_of_jax():
    def private(name):
        found = [module for module in others(name) if module.startswith(("jax._src", "jaxlib"))]
        if not name.startswith(("_jaxpr", "_autocast", "diagnostics")):  # These read jaxprs.
            found += [module for module in others(name) if module.startswith("jax.extend")]
        # These change between releases without a word.
        text = MODULES[name].read_text()
        return found + [
            word for word in ("jax._src", "jax.core", "jax.interpreters", "jax._") if word in text
        ]

    assert not {name: found for name in MODULES if (found := private(name))}


@pytest.mark.parametrize("file", ["__init__", "linen", "nnx"])
def test_a_table_of_contents_holds_only_imports(file):
    body = ast.parse((ROOT / f"{file}.py").read_text()).body
    docstring, *statements = body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(docstring.value, ast.Constant)
    if file == "__init__":  # What type checkers see of the submodules, and what finds them at run time.
        typing, *statements, lazily = statements
        assert ast.unparse(typing) == "import typing"
        assert isinstance(lazily, ast.If)
        assert ast.unparse(lazily.test) == "typing.TYPE_CHECKING"
        assert {ast.unparse(each) for each in lazily.body} == {
            *(f"from . import {each} as {each}" for each in SUBMODULES),
            *(f"from .{module} import {each} as {each}" for each, module in LAZY.items()),
        }
        assert {ast.unparse(each) for each in lazily.orelse} == {
            f"from ._names import {each} as {each}" for each in ("__dir__", "__getattr__")
        }
    assert statements
    for statement in statements:
        assert isinstance(statement, ast.ImportFrom)
        assert statement.level == 1
        assert [alias.asname == alias.name for alias in statement.names] == [True]
    module = importlib.import_module(f"jmp_lite.{file}".removesuffix(".__init__"))
    names = {alias.name for statement in statements for alias in statement.names}
    hidden = UNLISTED if file == "__init__" else set()
    names |= {*LAZY} if file == "__init__" else set()
    assert hidden < names
    assert names - hidden - {"__version__"} == public(module)


@pytest.mark.parametrize("name", SUBMODULES)
def test_a_name_of_a_submodule_says_in_which_it_is(name):
    """The list in `_names` is that of the submodule: an error loads none of them to look."""
    names = public(importlib.import_module(f"jmp_lite.{name}"))
    assert names == set(SUBMODULES[name])
    for each in names:
        with pytest.raises(AttributeError, match=rf"write .*`jmp_lite\.{name}\.{each}`"):
            getattr(jmp_lite, each)


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_name_of_a_peer_says_what_to_write(name):
    with pytest.raises(AttributeError, match=f"`{name}`") as error:
        getattr(jmp_lite, name)
    written = re.findall(r"`jmp_lite\.([\w.]+)", str(error.value))
    assert written
    for each in written:
        assert operator.attrgetter(each)(jmp_lite) is not None


def test_another_name_is_an_attribute_error_as_of_any_module():
    with pytest.raises(AttributeError, match=r"^module 'jmp_lite' has no attribute 'no_such_name'$"):
        jmp_lite.no_such_name  # noqa: B018  # pyright: ignore
    assert not hasattr(jmp_lite, "__wrapped__")


def test_what_a_person_types_is_listed_and_types_of_results_are_not():
    assert dir(jmp_lite) == sorted(dir(jmp_lite))
    assert {*SUBMODULES, "autocast", "value_and_grad", "__version__"} <= set(dir(jmp_lite))
    assert not {each for each in dir(jmp_lite) if each[0] == "_" and not each.startswith("__")}
    assert not UNLISTED & set(dir(jmp_lite))
    assert all(inspect.isclass(getattr(jmp_lite, each)) for each in RESULTS)


def test_a_submodule_without_its_library_says_what_to_install(monkeypatch):
    """`help(jmp_lite)` and a completion ask for each name, and must not end in an import error."""
    monkeypatch.delitem(sys.modules, "jmp_lite.testing", raising=False)
    monkeypatch.delattr(jmp_lite, "testing", raising=False)
    for each in [name for name in sys.modules if name.startswith("jmp_lite.testing.")]:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.setitem(sys.modules, "chex", None)
    with pytest.raises(AttributeError, match=r"jmp_lite\.testing .*needs chex: pip install chex"):
        jmp_lite.testing  # noqa: B018


@pytest.fixture(scope="module")
def fresh_import():
    """What a new Python holds after `import jmp_lite`."""
    script = (
        "import sys, warnings; warnings.simplefilter('error'); import jmp_lite; "
        "modules = sorted(sys.modules); "
        "assert callable(jmp_lite.diagnostics.doctor) and callable(jmp_lite.programs.read_program); "
        # The first scale imports Flax, to be saved by it.
        "scale = jmp_lite.DynamicLossScale(2.0**10, hysteresis=1), jmp_lite.StaticLossScale(2.0); "
        "tx = jmp_lite.with_loss_scale(__import__('optax').sgd(1.0)); "
        "policy = jmp_lite.Policy('f32', 'bf16', 'f32', rules={'head': 'f32'}); repr(policy); "
        "from jax._src import xla_bridge; "
        "print(xla_bridge.backends_are_initialized(), *modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    initialized, *modules = run.stdout.split()
    return initialized, set(modules)


@pytest.mark.slow
def test_importing_does_not_import_flax(fresh_import):
    modules = fresh_import[1]
    assert "jmp_lite._scaling.optimizer" in modules
    assert not modules & {
        "flax",
        "chex",
        *(f"jmp_lite.{name}" for name in SUBMODULES),
        *(f"jmp_lite.{module.rpartition('.')[0]}" for module in LAZY.values()),
        "jmp_lite._float8",
        "jmp_lite._flax",
        "equinox",
        "keras",
        "jmp",
    }


@pytest.mark.slow
def test_importing_and_building_scales_and_policies_starts_no_backend(fresh_import):
    # A process that starts a backend too early cannot set its flags or distribute any more.
    assert fresh_import[0] == "False"


def test_the_version_is_that_of_the_package():
    assert jmp_lite.__version__ == importlib.metadata.version("jmp_lite")

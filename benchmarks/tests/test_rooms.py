"""The rooms of the benchmarks: a room imports only rooms below it, a file only files before it."""

import ast
import importlib
import pathlib
import re

import pytest

import benchmarks

ROOT = pathlib.Path(benchmarks.__file__).parent
BELOW = {"arms": set(), "ported": set(), "compiled": {"arms", "ported"}, "timed": {"arms"}}
BELOW["gpu"] = set(BELOW)


def order(room):
    """The files of a room, in the reading order of its docstring."""
    return re.findall(r"^`(\w+)`:", importlib.import_module(f"benchmarks.{room}").__doc__, re.MULTILINE)


def imported(path):
    """The room and the file of each import from the benchmarks."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks."):
            _, room, *file = node.module.split(".")
            yield room, file[0] if file else node.names[0].name


@pytest.mark.parametrize("room", BELOW)
def test_a_docstring_lists_the_files_of_its_room(room):
    found = {path.stem for path in (ROOT / room).glob("*") if path.stem not in ("__init__", "__pycache__")}
    assert set(order(room)) == found


@pytest.mark.parametrize("room", BELOW)
def test_a_file_imports_only_files_before_it_and_rooms_below(room):
    files = order(room)
    for path in (ROOT / room).rglob("*.py"):
        name = path.relative_to(ROOT / room).parts[0].removesuffix(".py")
        before = files[: files.index(name)] if name in files else []
        for other, file in imported(path):
            assert other in BELOW[room] | {room, "device", "command"}, path
            assert other != room or file in before, (path, file)


def test_the_library_does_not_import_the_benchmarks():
    assert not [path for path in (ROOT.parent / "jmp_lite").rglob("*.py") for _ in imported(path)]

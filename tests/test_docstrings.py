"""The docstrings that the API pages show: sections, arguments, examples and the names that examples use."""

import ast
import builtins
import importlib
import inspect
import re
from pathlib import Path

import flax.linen as nn
import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "jmp_lite").rglob("*.py"))
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Examples")


def listed():
    """Yields the page and the public object of each entry of the API pages, and its full name."""
    for page in sorted((ROOT / "docs/api").glob("*.md")):
        for module, name in re.findall(r"^::: (.*)\.(\w+)$", page.read_text(), re.MULTILINE):
            yield pytest.param(page, getattr(importlib.import_module(module), name), id=f"{module}.{name}")


def methods(entries):
    """Yields the page and the function of each public method and property of the classes in `entries`."""
    for entry in entries:
        page, value = entry.values
        own = vars(value) if inspect.isclass(value) and not issubclass(value, nn.Module) else {}
        for name, member in own.items():
            member = getattr(member, "fget", member) or getattr(member, "func", None)
            if not name.startswith("_") and inspect.isfunction(member):
                yield pytest.param(page, member, id=f"{entry.id}.{name}")


PUBLIC = list(listed())
METHODS = list(methods(PUBLIC))


def sections(value):
    """Returns the text of each section of a docstring; what belongs to no section is under an empty name."""
    texts, current = {"": ""}, ""
    for line in (inspect.getdoc(value) or "").split("\n"):
        if line and not line.startswith(" "):
            current = line[:-1] if line[:-1] in SECTIONS and line.endswith(":") else ""
        texts[current] = texts.get(current, "") + line + "\n"
    return texts


def described(section):
    """Returns the names that a section describes."""
    return re.findall(r"^ {4}(\S[^:\n]*): ", section, re.MULTILINE)


def arguments(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def code_of(value):
    """Returns the code of the examples of a docstring, the blocks of the page and what follows a prompt."""
    text = sections(value).get("Examples", "")
    lines = re.findall(r"^ *(?:>>>|\.\.\.) (.*)$", text, re.MULTILINE)
    blocks = [inspect.cleandoc(block) for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    return "\n".join([*lines, *blocks])


@pytest.mark.parametrize(("page", "value"), PUBLIC)
def test_every_public_name_has_an_example(page, value):
    assert code_of(value)


@pytest.mark.parametrize(("page", "value"), PUBLIC)
def test_each_argument_of_a_public_name_has_an_entry_of_its_own(page, value):
    texts = sections(value)
    if not inspect.isclass(value):
        assert described(texts.get("Args", "")) == arguments(value)
    else:
        # `_` is `dataclasses.KW_ONLY`. Flax adds `parent` and `name` to the fields of a module.
        others = {"_", *(("parent", "name") if issubclass(value, nn.Module) else ())}
        fields = set(inspect.get_annotations(value)) - others
        assert sorted(described(texts.get("Attributes", ""))) == sorted(fields)


@pytest.mark.parametrize(("page", "method"), METHODS)
def test_a_method_says_what_its_arguments_are(page, method):
    texts = sections(method)
    names = described(texts.get("Args", ""))
    assert names in ([], arguments(method))
    code = " ".join(re.findall(r"`[^`]*`", texts[""]))
    assert set(arguments(method)) <= {*names, *re.findall(r"\w+", code)}


@pytest.mark.parametrize(("page", "value"), [*PUBLIC, *METHODS])
def test_examples_use_the_names_that_the_page_gives(page, value):
    imports = ast.parse(re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1]).body
    given = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    nodes = list(ast.walk(ast.parse(code_of(value))))
    given |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    given |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    given |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert {node.id for node in nodes if isinstance(node, ast.Name)} <= given | set(dir(builtins))


@pytest.mark.parametrize(("page", "value"), [*PUBLIC, *METHODS])
def test_the_text_of_a_public_docstring_is_no_markup_by_accident(page, value):
    """Two powers in one paragraph, 2**e and 2**n, are bold text between them; x[1][2] is a link."""
    texts = sections(value)
    text = re.sub(r"^    .*$", "", texts[""], flags=re.MULTILINE)  # Without the blocks of code.
    text += "".join(texts[name] for name in texts if name not in ("", "Examples"))
    text = re.sub(r"`[^`]*`", "", text)
    assert "**" not in text
    assert "][" not in text


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_prompt_stands_in_an_examples_section(path):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    for node in nodes:
        doc = ast.get_docstring(node) or ""
        examples = re.findall(r"^Examples:\n((?: +.*\n|\n)*)", doc + "\n", re.MULTILINE)
        assert len(examples) <= 1
        assert doc.count(">>> ") == "".join(examples).count(">>> "), doc


def test_the_tests_see_methods_and_names():
    assert len(PUBLIC) > 50
    assert len(METHODS) > 40

"""The docstrings that the API pages show: sections, arguments, examples and the names that examples use."""

import ast
import builtins
import importlib
import inspect
import re
from pathlib import Path

import flax.linen as nn

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "jmp_lite").rglob("*.py"))
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Examples")


def listed():
    """Yields the full name, the page and the public object of each entry of the API pages."""
    for page in sorted((ROOT / "docs/api").glob("*.md")):
        for module, name in re.findall(r"^::: (.*)\.(\w+)$", page.read_text(), re.MULTILINE):
            yield f"{module}.{name}", page, getattr(importlib.import_module(module), name)


def methods(entries):
    """Yields the full name, the page and the function of each public method of the classes in `entries`."""
    for full_name, page, value in entries:
        own = vars(value) if inspect.isclass(value) and not issubclass(value, nn.Module) else {}
        for name, member in own.items():
            member = getattr(member, "fget", member) or getattr(member, "func", None)
            if not name.startswith("_") and inspect.isfunction(member):
                yield f"{full_name}.{name}", page, member


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


def test_every_public_name_has_an_example():
    assert not [name for name, _, value in PUBLIC if not code_of(value)]


def undescribed(value):
    """Returns the arguments, or the fields of a class, that have no entry, and the entries for nothing."""
    texts = sections(value)
    if not inspect.isclass(value):
        names, entries = arguments(value), described(texts.get("Args", ""))
        return set() if names == entries else {*names, *entries}
    # `_` is `dataclasses.KW_ONLY`. Flax adds `parent` and `name` to the fields of a module.
    others = {"_", *(("parent", "name") if issubclass(value, nn.Module) else ())}
    return set(described(texts.get("Attributes", ""))) ^ (set(inspect.get_annotations(value)) - others)


def test_each_argument_of_a_public_name_has_an_entry_of_its_own():
    assert not {name: found for name, _, value in PUBLIC if (found := undescribed(value))}


def test_a_method_says_what_its_arguments_are():
    offenders = []
    for name, _, method in METHODS:
        texts = sections(method)
        names = described(texts.get("Args", ""))
        code = " ".join(re.findall(r"`[^`]*`", texts[""]))
        said = {*names, *re.findall(r"\w+", code)}
        if names not in ([], arguments(method)) or not set(arguments(method)) <= said:
            offenders.append(name)
    assert not offenders


def unknown_names(page, value):
    """Returns the names that the examples of `value` use and neither define nor get from the page."""
    shared = page.with_name("index.md")  # For the pages of `jmp_lite` itself.
    blocks = re.findall(r"```python\n(.*?)```", page.read_text() + shared.read_text(), re.DOTALL)
    imports = ast.parse(blocks[0]).body
    given = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    nodes = list(ast.walk(ast.parse(code_of(value))))
    given |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    given |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    given |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {node.id for node in nodes if isinstance(node, ast.Name)} - given - set(dir(builtins))


def test_examples_use_the_names_that_the_page_gives():
    entries = [*PUBLIC, *METHODS]
    assert not {name: found for name, page, value in entries if (found := unknown_names(page, value))}


def test_the_text_of_a_public_docstring_is_no_markup_by_accident():
    """Two powers in one paragraph, 2**e and 2**n, are bold text between them; x[1][2] is a link."""
    offenders = []
    for name, _, value in [*PUBLIC, *METHODS]:
        texts = sections(value)
        text = re.sub(r"^    .*$", "", texts[""], flags=re.MULTILINE)  # Without the blocks of code.
        text += "".join(texts[section] for section in texts if section not in ("", "Examples"))
        text = re.sub(r"`[^`]*`", "", text)
        if "**" in text or "][" in text:
            offenders.append(name)
    assert not offenders


def test_a_prompt_stands_in_an_examples_section():
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    offenders = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            doc = (ast.get_docstring(node) if isinstance(node, kinds) else "") or ""
            examples = re.findall(r"^Examples:\n((?: +.*\n|\n)*)", doc + "\n", re.MULTILINE)
            if len(examples) > 1 or doc.count(">>> ") != "".join(examples).count(">>> "):
                offenders.append((path, doc))
    assert not offenders


def test_the_tests_see_methods_and_names():
    assert len(PUBLIC) > 50
    assert len(METHODS) > 40


def test_a_signature_names_the_types_that_it_spells_out_elsewhere():
    """`help(jmp.autocast)` begins with one line for each argument, not with every name of a dtype."""
    spelled = {
        name: found
        for name, _, value in PUBLIC
        if callable(value) and not issubclass(type(value), type(nn.Module))
        if "Literal[" in (found := str(inspect.signature(value))) or "Union[" in found or "<object" in found
    }
    assert not spelled
    for name, longest in (("autocast", 600), ("value_and_grad", 300)):
        (value,) = (value for full_name, _, value in PUBLIC if full_name == f"jmp_lite.{name}")
        assert len(str(inspect.signature(value))) < longest

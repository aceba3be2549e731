"""The code of README and of every page runs. Tables show the results. Every public name has an entry."""

import importlib
import inspect
import linecache
import re
import tomllib
from pathlib import Path

import pytest

import jmp_lite

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIRST_PAGES = (ROOT / "README.md", ROOT / "docs" / "getting-started.md")
BLOCKS = {page: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in PAGES}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("page", [page for page in PAGES if BLOCKS[page]], ids=lambda page: page.name)
@pytest.mark.filterwarnings("ignore:Expected floating type")
def test_the_python_blocks_of_a_page_run(page):
    namespace = {}
    for block in BLOCKS[page]:
        exec(compile(block, str(page), "exec"), namespace)


def test_most_guides_have_code():
    assert sum(bool(blocks) for blocks in BLOCKS.values()) >= 7


def test_the_report_of_the_readme_is_the_one_that_its_example_prints():
    namespace = {}
    for block in BLOCKS[ROOT / "README.md"]:
        exec(compile(block, "README.md", "exec"), namespace)
    arguments = (namespace[name] for name in ("params", "x", "y"))
    report = jmp_lite.explain(namespace["loss_fn"])(*arguments)
    assert f"```text\n{report.summary()}\n```" in (ROOT / "README.md").read_text()
    assert namespace["loss"].dtype == "float32"


def test_the_failures_of_the_testing_page_are_those_that_its_assertions_print(capsys):
    """Its assertion about Tensor Cores fails in `benchmarks/tests/compiled/test_docstrings.py`."""
    page, namespace = ROOT / "docs/testing.md", {}
    for block in BLOCKS[page]:
        linecache.cache["loss.py"] = (len(block), None, block.splitlines(keepends=True), "loss.py")
        exec(compile(block, "loss.py", "exec"), namespace)
    namespace["test_the_router_alone_is_float32"]()
    messages = capsys.readouterr().out.split("[jmp_lite] ")[1:]
    assert len(messages) == 2
    for message in messages:
        assert f"```text\n[jmp_lite] {message}```" in page.read_text()


def test_the_tables_are_those_of_the_results():
    """`python -m benchmarks.compiled.pages` writes them."""
    pytest.importorskip("jmp")
    from benchmarks.compiled import pages

    for page in pages.PAGES:
        text = page.read_text()
        assert text.count("<!-- begin ") == text.count("<!-- end -->") >= 1
        assert pages.filled(text) == text


def test_the_links_of_the_readme_hold_on_a_package_index():
    """pyproject.toml has the substitutions that hatch-fancy-pypi-readme makes at build time."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    address = project["project"]["urls"]["Repository"]
    text = (ROOT / "README.md").read_text()
    for substitution in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    links = re.findall(r"\]\((.*?)\)", text)
    assert len(links) > 15
    own = [link for link in links if link.startswith(address)]
    assert all(link.startswith("https://") for link in links)
    for link in own:
        kind, path = link.removeprefix(f"{address}/").split("/main/")
        assert kind == ("raw" if path.endswith(".png") else "blob")
        assert (ROOT / path.split("#")[0]).is_file()
    assert {link.split("/")[-1] for link in own} >= {"digits.png", "diagnosis.md", "CHANGELOG.md"}


def test_the_first_diff_of_the_readme_is_the_one_of_getting_started():
    first = [re.search(r"```diff\n.*?```", page.read_text(), re.DOTALL)[0] for page in FIRST_PAGES]
    assert first[0] == first[1]
    assert first[0].count("\n+") == 4  # An import and three lines.


def test_the_readme_teaches_in_two_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("index", "jmp_lite"),
        ("linen", "jmp_lite.linen"),
        ("nnx", "jmp_lite.nnx"),
        ("testing", "jmp_lite.testing"),
        ("diagnostics", "jmp_lite.diagnostics"),
        ("programs", "jmp_lite.programs"),
    ],
)
def test_the_api_pages_have_every_public_name_once(page, module):
    listed = re.findall(rf"^::: {module}\.(\w+)$", (ROOT / f"docs/api/{page}.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    found = importlib.import_module(module)
    assert all(hasattr(found, name) for name in listed)
    if module in ("jmp_lite", "jmp_lite.diagnostics", "jmp_lite.programs"):
        public = {
            name for name, value in vars(found).items() if name[0] != "_" and not inspect.ismodule(value)
        }
        assert set(listed) == public


@pytest.mark.parametrize("page", ["index", "linen", "nnx", "diagnostics", "programs", "testing"])
def test_an_api_page_links_to_the_guide_of_each_group_of_names(page):
    """In the group itself, or at the head of the page for all of its groups."""
    head, *groups = re.split(r"^## .*$", (ROOT / f"docs/api/{page}.md").read_text(), flags=re.MULTILINE)
    guides = lambda text: re.findall(r"\]\(\.\./([\w-]+\.md)[)#]", text)
    assert guides(head) or (groups and all(map(guides, groups)))
    assert all((ROOT / "docs" / guide).exists() for guide in guides("".join([head, *groups])))


def test_the_files_that_the_tour_of_the_code_names_exist():
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs/development.md").read_text()))
    rooms = ("jmp_lite", "tests", "benchmarks", "examples")
    files = [f"/{path.relative_to(ROOT)}" for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert len(named) > 40
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


TOPICS = (
    *("accumulation", "DDP", "resume", "evaluate", "log", "clip gradients", "schedule", "several optimizers"),
    *("moving average", "export", "float32 and half", "freeze", "BatchNorm", "rematerialize"),
    *("scan over layers", "gradient penalty", "FSDP", "checkpoints", "custom kernel", "mix modules"),
    *("inside the backward pass", "random keys", "dtype argument", "LoRA", "first skipped", "mean loss NaN"),
    *("OOM", "Apple, AMD", "fp8", "to a tolerance", "K-FAC"),
)


def test_each_question_has_a_heading_of_its_own():
    headings = re.findall(r"^### (.*)$", (ROOT / "docs/questions.md").read_text(), re.MULTILINE)
    assert len(headings) == len(TOPICS)
    for topic in TOPICS:
        assert sum(topic in heading for heading in headings) == 1, topic


def test_every_python_block_of_a_page_is_one_that_runs():
    """A block in another spelling of Python would not run above.

    `py` is PyTorch's side of its page, which `benchmarks/tests/arms/test_torch_page.py` runs.
    """
    for page in PAGES:
        languages = set(re.findall(r"^```(\S+)", page.read_text(), re.MULTILINE))
        allowed = {"python", "sh", "text", "diff"} | ({"py"} if page.name == "torch.md" else set())
        assert languages <= allowed, page.name


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        assert f" {page.relative_to(ROOT / 'docs').as_posix()}\n" in navigation

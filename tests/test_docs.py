"""The code of README and of every page runs. Tables show the results. Every public name has an entry."""

import importlib
import inspect
import linecache
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = {page: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in PAGES}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if BLOCKS[page]], ids=lambda page: page.name)
@pytest.mark.filterwarnings("ignore:Expected floating type")
def test_the_python_blocks_of_a_page_run(page):
    namespace = {}
    for block in BLOCKS[page]:
        exec(compile(block, str(page), "exec"), namespace)


def test_most_guides_have_code():
    assert sum(bool(blocks) for blocks in BLOCKS.values()) >= 7


def test_the_report_of_getting_started_is_the_one_that_its_first_program_prints(capsys):
    """`.ci/run` runs this program with the wheel and its dependencies alone."""
    page, namespace = ROOT / "docs/getting-started.md", {}
    exec(compile(BLOCKS[page][0], "getting-started.md", "exec"), namespace)
    assert f"```text\n{capsys.readouterr().out}```" in page.read_text()
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


def test_the_address_of_the_repository_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    address = project["project"]["urls"]["Repository"]
    assert f"git clone {address}\n" in (ROOT / "README.md").read_text()
    for page in [*PAGES, ROOT / "mkdocs.yml", ROOT / "docs/hooks.py"]:  # docs/hooks.py reads it.
        own = page.read_text().replace(f"git clone {address}\n", "")
        assert address not in own or page.name == "changelog.md", page


def test_the_links_of_the_readme_hold_on_a_package_index():
    """pyproject.toml has the substitutions that hatch-fancy-pypi-readme makes at build time."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    address = project["project"]["urls"]["Repository"]
    text = (ROOT / "README.md").read_text()
    for substitution in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    links = [*re.findall(r"\]\((.*?)\)", text), *re.findall(r'src(?:set)?="(.*?)"', text)]
    assert len(links) > 15
    own = [link for link in links if link.startswith(address)]
    assert all(link.startswith("https://") for link in links)
    for link in own:
        kind, path = link.removeprefix(f"{address}/").split("/main/")
        assert kind == ("raw" if path.endswith(".png") else "blob")
        assert (ROOT / path.split("#")[0]).is_file()
    assert {link.split("/")[-1] for link in own} >= {
        "digits.png",
        "digits_dark.png",
        "diagnosis.md",
        "CHANGELOG.md",
    }


def test_the_lines_that_the_diff_of_the_readme_adds_are_those_of_the_first_program():
    diff = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1].splitlines()
    added = [line[1:].partition("  #")[0].rstrip() for line in diff if line.startswith("+")]
    program = BLOCKS[ROOT / "docs/getting-started.md"][0].splitlines()
    assert len(added) == 5  # An import and four lines.
    assert set(added) <= {line.partition("  #")[0] for line in program}
    assert max(map(len, diff)) <= 80  # A wider line is cut off beside the navigation.


def test_the_readme_teaches_in_two_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


API = {page.stem: page.read_text() for page in sorted((ROOT / "docs/api").glob("*.md"))}
MODULES = ("", ".linen", ".nnx", ".testing", ".diagnostics", ".programs")


@pytest.mark.parametrize("module", [f"jmp_lite{name}" for name in MODULES])
def test_the_api_pages_have_every_public_name_once(module):
    listed = re.findall(rf"^::: {module}\.(\w+)$", "\n".join(API.values()), re.MULTILINE)
    assert len(listed) == len(set(listed))
    found = importlib.import_module(module)
    assert all(hasattr(found, name) for name in listed)
    if module in ("jmp_lite", "jmp_lite.diagnostics", "jmp_lite.programs"):
        public = {
            name for name, value in vars(found).items() if name[0] != "_" and not inspect.ismodule(value)
        }
        assert set(listed) == public


@pytest.mark.parametrize("page", [page for page in API if page != "index"])
def test_an_api_page_names_its_guide_and_has_a_table_of_its_names(page):
    head = API[page].partition("```python")[0]
    guides = re.findall(r"\]\(\.\./([\w-]+\.md)[)#]", head)
    assert guides
    assert all((ROOT / "docs" / guide).exists() for guide in guides)
    assert "\n<!-- summaries -->\n" in head


def test_the_files_that_the_tour_of_the_code_names_exist():
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs/development.md").read_text()))
    rooms = ("jmp_lite", "tests", "benchmarks", "examples")
    files = [f"/{path.relative_to(ROOT)}" for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert len(named) > 40
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


TOPICS = (
    *("use gradient accumulation", "DDP", "resume", "evaluate", "log", "-1e9"),
    *("clip gradients", "schedule", "two optimizers", "moving average", "export", "float32 and half"),
    *("freeze", "train with BatchNorm", "rematerialize", "gradient penalty"),
    *("custom kernel", "mix modules", "inside the backward pass", "UnexpectedTracerError"),
    *("dtype argument", "LoRA", "first skipped", "mean loss NaN", "OOM", "Apple, AMD", "fp8"),
    *("to a tolerance", "K-FAC", "updates", "one layer in float32", "gradients accumulate"),
    *("compute an index",),
    *("bfloat16 weights", "preferred_element_type", "without jit", "flash attention", "Hugging Face"),
)


def test_each_question_has_a_heading_of_its_own():
    headings = re.findall(r"^### (.*)$", (ROOT / "docs/questions.md").read_text(), re.MULTILINE)
    assert len(headings) == len(TOPICS)
    for topic in TOPICS:
        assert sum(topic in heading for heading in headings) == 1, topic


def test_every_python_block_of_a_page_is_one_that_runs():
    """A block in another spelling of Python would not run above."""
    for page in PAGES:
        languages = set(re.findall(r"^```(\S+)", page.read_text(), re.MULTILINE))
        assert languages <= {"python", "sh", "text", "diff"}, page.name


def test_the_tests_that_a_page_names_are_there():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        assert f" {page.relative_to(ROOT / 'docs').as_posix()}\n" in navigation

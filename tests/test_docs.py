"""The code of README and of every page runs. Tables show the results. Every public name has an entry."""

import importlib
import inspect
import json
import linecache
import re
import tomllib
from pathlib import Path

import pytest

from jmp_lite.programs._gpus import DEVICES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = {page: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in PAGES}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if BLOCKS[page]], ids=lambda page: page.name)
@pytest.mark.filterwarnings("ignore:Expected floating type")
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # A page may save a file.
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


@pytest.mark.parametrize("name", ["float16_in_ten_minutes", "is_it_faster"])
def test_a_notebook_for_colab_is_that_of_the_site_with_its_outputs(name):
    from benchmarks.compiled import pages

    script, path = ROOT / f"docs/notebooks/{name}.py", ROOT / f"examples/{name}.ipynb"
    assert pages.NOTEBOOKS[script] == path
    made = json.loads(path.read_text())
    assert pages.without_outputs(made) == pages.notebook(script.read_text())
    install, *cells = [cell for cell in made["cells"] if cell["cell_type"] == "code"]
    assert install["source"][0].startswith("%pip install")
    assert all("".join(cell["source"]) in script.read_text() for cell in cells)
    assert any(cell["outputs"] for cell in cells)
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
    assert path.name in (ROOT / "docs/index.md").read_text() + (ROOT / "docs/examples.md").read_text()
    text = ["".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "markdown"]
    assert not any(re.search(r"\]\((?!https:)", source) for source in text)  # Colab has no other files.


def test_the_address_of_the_repository_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    address = project["project"]["urls"]["Repository"]
    assert f"git+{address}" in (ROOT / "README.md").read_text()
    owner, name = address.rsplit("/", 2)[-2:]
    assert project["project"]["urls"]["Documentation"] == f"https://{owner}.github.io/{name}/"
    for page in [
        *PAGES,
        ROOT / "pyproject.toml",
        ROOT / "CITATION.cff",
        *(ROOT / "examples").glob("*.ipynb"),
    ]:
        named = re.findall(r"(?:github\.com|/workflow/status)/([\w-]+)/jmp_lite", page.read_text())
        sites = re.findall(r"https://([\w-]+)\.github\.io/jmp_lite", page.read_text())
        assert {*named, *sites} <= {owner}, page


def test_the_links_of_the_readme_hold_on_a_package_index():
    """pyproject.toml has the substitutions that hatch-fancy-pypi-readme makes at build time."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    address = project["project"]["urls"]["Repository"]
    text = (ROOT / "README.md").read_text()
    for substitution in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    links = [*re.findall(r"\]\((.*?)\)", text), *re.findall(r'src(?:set)?="(.*?)"', text)]
    assert len(links) > 15
    own = [link for link in links if link.startswith(address) and "/main/" in link]
    assert all(link.startswith("https://") for link in links)
    for link in own:
        kind, path = link.removeprefix(f"{address}/").split("/main/")
        assert kind == ("raw" if path.endswith(".png") else "blob")
        assert (ROOT / path.split("#")[0]).is_file()
    assert {link.split("/")[-1] for link in own} >= {
        "digits.png",
        "digits_dark.png",
        "precision.png",
        "precision_dark.png",
        "getting-started.md",
        "autocast.md",
        "questions.md",
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


def headings(page):
    """The ids that GitHub makes from the headings of a page; those of the site are the same."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).strip().lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_to_headings_hold_on_github(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert not re.search(r"^#.*\{ #", text, re.MULTILINE)
    for path, heading in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", text):
        target = page.parent / path if path else page
        if target.suffix == ".md" and target.parent.name != "api":
            assert heading in headings(target), f"{page.name} links {path}#{heading}"


def test_the_pages_that_the_readme_links_read_well_as_files():
    """GitHub shows a snippet or an entry of the API as the line that names it."""
    for page in PAGES:
        if page.parent.name != "api" and page.name != "changelog.md":
            assert not re.search(r"^(--8<--|:::|<!-- all)", page.read_text(), re.MULTILINE), page
    linked = re.findall(r"\]\((docs/.*?)[#)]", (ROOT / "README.md").read_text())
    assert linked
    assert not [page for page in linked if page.startswith("docs/api/") or page == "docs/changelog.md"]


def test_the_home_page_has_the_diff_the_installation_and_the_citation_of_the_repository():
    home, readme = ((ROOT / name).read_text() for name in ("docs/index.md", "README.md"))
    for language in ("diff", "sh"):
        block = re.search(rf"```{language}\n.*?```", readme, re.DOTALL)[0]
        assert block in home
    citation = (ROOT / "CITATION.cff").read_text()
    version, year = (
        re.search(rf"^{key}: (.*)$", citation, re.MULTILINE)[1] for key in ("version", "date-released")
    )
    assert f"version = {{{version}}}" in home
    assert f"year    = {{{year[:4]}}}" in home


def test_the_readme_teaches_in_two_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_guides_stay_short():
    """What takes longer is told twice, or is a reference."""
    long = {"diagnosis.md", "flax.md", "many-devices.md", "autocast.md"}
    guides = re.search(r"- How-to:\n(.*?)\n  - \w", (ROOT / "mkdocs.yml").read_text(), re.DOTALL)[1]
    for name in re.findall(r": (.*\.md)", guides):
        lines = len((ROOT / "docs" / name).read_text().splitlines())
        assert lines <= (245 if name in long else 145), name


def test_sections_between_two_comments_are_tabs_on_the_site(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    hooks = importlib.import_module("hooks")
    page = "<!-- tabs -->\n\n### One\n\n```python\nx = 1\n```\n\n### Two\n\ntext\n\n<!-- end of tabs -->"
    made = re.sub(r"<!-- tabs -->(.*?)<!-- end of tabs -->", hooks.in_tabs, page, flags=re.DOTALL)
    assert made == '=== "One"\n\n    ```python\n    x = 1\n    ```\n\n=== "Two"\n\n    text'
    assert "<!-- tabs -->" in (ROOT / "docs/getting-started.md").read_text()


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


def test_the_names_that_the_guide_for_contributors_gives_are_those_of_the_code():
    page = (ROOT / "docs/development.md").read_text()
    dotted = re.findall(r"`([\w.]*[A-Z_]\w+)(?:\(.*?\))?`", page)
    named = {part for name in dotted if not name.endswith(".py") for part in name.split(".")}
    files = [
        path.read_text()
        for room in ("jmp_lite", "tests", "benchmarks")
        for path in (ROOT / room).rglob("*.py")
    ]
    known = set(re.findall(r"\w+", "".join(files)))
    assert len(named) > 60
    assert sorted(named - known) == []


TOPICS = (
    *(
        "gradient accumulation",
        "clip gradients",
        "two optimizers",
        "freeze",
        "moving average",
        "log the loss",
    ),
    *("mean loss NaN", "first steps skipped", "learning rate", "donate", "ensemble", "accumulators"),
    *("one layer in float32", "dtype argument", "same dtypes", "-1e9", "epsilon", "compute an index"),
    *("FFT", "without jit", "train with BatchNorm", "remat", "gradient penalty", "PINN", "diffusion"),
    *("inside the backward pass", "to a tolerance", "UnexpectedTracerError", "custom kernel", "LoRA"),
    *("evaluate", "spikes or diverges", "reproducible", "OOM", "Apple, AMD"),
)


def test_each_question_has_a_heading_of_its_own():
    headings = re.findall(r"^### (.*)$", (ROOT / "docs/questions.md").read_text(), re.MULTILINE)
    assert len(headings) == len(TOPICS)
    for topic in TOPICS:
        assert sum(topic in heading for heading in headings) == 1, topic


def test_an_answer_is_short():
    text = (ROOT / "docs/questions.md").read_text()
    answers = re.split(r"^##+ .*\n", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)[1:]
    assert max(len(answer.strip().splitlines()) for answer in answers) <= 8
    assert len(text.splitlines()) <= 330


def test_every_python_block_of_a_page_is_one_that_runs():
    """A block in another spelling of Python would not run above."""
    for page in PAGES:
        languages = set(re.findall(r"^```(\S+)", page.read_text(), re.MULTILINE))
        assert languages <= {"python", "sh", "text", "diff", "bibtex"}, page.name


def test_the_tests_that_a_page_names_are_there():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []


def test_the_support_page_has_the_versions_and_the_rates_of_the_library():
    page = (ROOT / "docs/support.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in (*project["dependencies"], *project["optional-dependencies"]["flax"]):
        name, lowest = requirement.split(">=")
        assert re.search(rf"^\| {name}.* \| {re.escape(lowest)} \| ", page, re.MULTILINE | re.IGNORECASE)
    rows = re.findall(
        r"^\| ([\w, ()]+) \| ([\d.,]+) \| ([\d.,]+) \| ([\d.]+)x \| (.*) \|$", page, re.MULTILINE
    )
    rows = [(name.partition(" (")[0].lower(), *row) for names, *row in rows for name in names.split(", ")]
    assert {name for name, *_ in rows} == {*DEVICES}
    for name, full, half, gain, use in rows:
        rates = DEVICES[name].flops
        default = max(rates["float32"], rates["tf32"])
        assert float(full.replace(",", "")) == pytest.approx(default / 1e12, rel=1e-3)
        assert float(half.replace(",", "")) == pytest.approx(rates["float16"] / 1e12, rel=1e-3)
        assert float(gain) == pytest.approx(rates["float16"] / default, abs=0.05)
        assert ("float16 with a loss scale" in use) == (rates["bfloat16"] == rates["float32"])
        assert ("fp8" in use) == (rates["float8"] > rates["float16"])


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        assert f" {page.relative_to(ROOT / 'docs').as_posix()}\n" in navigation


def test_the_bytes_of_the_readme_are_those_of_the_table_of_models():
    page = (ROOT / "docs/performance.md").read_text()
    row = re.search(r"\| gpt2-small \|[^|]*\| ([\d.]+) / [\d.]+ / ([\d.]+) \|", page)
    assert re.findall(r"moves (\d+) GB instead of (\d+) GB", (ROOT / "README.md").read_text()) == [
        (f"{float(row[2]):.0f}", f"{float(row[1]):.0f}")
    ]

"""What mkdocs.yml cannot say: the address of the repository, links into it, tables of the API pages."""

import importlib
import inspect
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
# How a search ranks pages: a guide before the evidence, what users read before what contributors do.
RANKS = {"questions.md": 1.5, "diagnosis.md": 2, "fp8.md": 1.5, "memory.md": 1.5, "migrating/torch.md": 1.5}
RANKS |= {"index.md": 0.7, "ported-programs.md": 0.3, "changelog.md": 0.3, "development.md": 0.2}
RANKS |= {"how-autocast-works.md": 0.2, "differences.md": 0.5}
API_RANK = 0.5


def on_config(config: Any) -> Any:
    """The address stands in pyproject.toml."""
    config.repo_url = REPOSITORY
    config.repo_name = REPOSITORY.removeprefix("https://github.com/")
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Resolves links to files outside `docs/`, which the site does not have, and fills the API's tables."""
    markdown = re.sub(
        r"\]\((?:\.\./)+((?:examples|benchmarks|tests)/[^)]*)\)", rf"]({REPOSITORY}/blob/main/\1)", markdown
    )
    markdown = re.sub(r"<!-- tabs -->(.*?)<!-- end of tabs -->", in_tabs, markdown, flags=re.DOTALL)
    rank = API_RANK if page.file.src_uri.startswith("api/") else RANKS.get(page.file.src_uri, 1)
    page.meta["search"] = {"boost": rank}
    if page.file.src_uri == "cheat-sheet.md":
        page.meta["hide"] = ["toc"]  # Its five columns need the width.
    own = Path(page.file.src_uri).stem
    if "<!-- all summaries -->" in markdown:
        names = re.findall(r" api/(.*)\.md$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE)
        tables = (f"## [{title(name)}]({name}.md)\n\n{summaries(name)}" for name in names if name != own)
        return markdown.replace("<!-- all summaries -->", "\n\n".join(tables))
    if "<!-- summaries -->" in markdown:
        return markdown.replace("<!-- summaries -->", summaries(own))
    return markdown


def in_tabs(found: re.Match[str]) -> str:
    """Returns the sections between two comments, which GitHub shows one below the other, as tabs."""
    sections = re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", found[1], re.MULTILINE | re.DOTALL)
    return "\n\n".join(f'=== "{name}"\n\n{textwrap.indent(text.strip(), "    ")}' for name, text in sections)


def title(page: str) -> str:
    """Returns the heading of an API page."""
    return re.match("# (.*)", (DOCS / f"api/{page}.md").read_text())[1]


def summaries(page: str) -> str:
    """Returns a table of the names on an API page, each with the first sentence of its docstring."""
    rows = ["| Name | What it is |", "| --- | --- |"]
    for module, name in re.findall(r"^::: (.*)\.(\w+)$", (DOCS / f"api/{page}.md").read_text(), re.MULTILINE):
        text = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
        first = re.split(r"(?<=\.)\s", text, maxsplit=1)[0].replace("\n", " ")
        rows.append(f"| [`{name}`][{module}.{name}] | {first} |")
    return "\n".join(rows)


def on_post_page(output: str, **_: Any) -> str:
    """mkdocs-jupyter loads MathJax from another server. The notebooks have no formulas."""
    return re.sub(r"<script data-mkdocs-jupyter-mathjax=.*?</script>", "", output, flags=re.DOTALL)

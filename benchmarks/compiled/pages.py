"""Writes the tables of the documentation from the files of results.

    python -m benchmarks.compiled.pages

A table stands in a page between `<!-- begin NAME ARGUMENTS -->` and `<!-- end -->`.
"""

import json
import pathlib
import re

from benchmarks.compiled import loss_scale_cost, memory, predict

ROOT = pathlib.Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("performance", "accuracy", "memory")),
)


def cost(*cases: str) -> str:
    """Returns the tables of what a loss scale costs, and the versions with which it was compiled."""
    found = json.loads((RESULTS / "loss_scale_cost.json").read_text())
    tables = [
        loss_scale_cost.table(case["title"], [loss_scale_cost.Row(**row) for row in case["rows"]])
        for case in (found["cases"][name] for name in cases)
    ]
    body = "\n\n".join(tables)
    versions = ", ".join(f"{library} {version}" for library, version in found["versions"].items())
    return f"```text\n{body}\n```\n\nCompiled with {versions}."


def models() -> str:
    """Returns the table of the nine models."""
    return "\n".join(predict.summary(RESULTS))


def memory_table(which: str) -> str:
    """Returns a table of the arms with fewer bytes a parameter: of their cost, or of their accuracy."""
    if which == "accuracy":
        return "\n".join(memory.accuracy_table(json.loads((RESULTS / "cpu" / "memory.json").read_text())))
    found = json.loads((RESULTS / "memory.json").read_text())
    versions = ", ".join(f"{library} {version}" for library, version in found["versions"].items())
    return "\n".join([*memory.cost_table(found), "", f"Compiled with {versions}."])


def text(name: str) -> str:
    """Returns what a command has printed: of `benchmarks.compiled.step`, of `examples/digits.py`."""
    return f"```text\n{(RESULTS / name).read_text()}```"


TABLES = {"cost": cost, "models": models, "memory": memory_table, "text": text}


def filled(text: str) -> str:
    """Returns the text of a page with its tables from the files of results."""

    def table(found: re.Match[str]) -> str:
        name, *arguments = found[1].split()
        return f"<!-- begin {found[1]} -->\n\n{TABLES[name](*arguments)}\n\n<!-- end -->"

    return re.sub(r"<!-- begin (.*?) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))

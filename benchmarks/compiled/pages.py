"""Writes the tables of the documentation from the files of results.

    python -m benchmarks.compiled.pages

A table stands in a page between `<!-- begin NAME ARGUMENTS -->` and `<!-- end -->`. The command also makes
the notebooks for Colab from their scripts, and runs those that have changed.
"""

import json
import pathlib
import re
import statistics
import tomllib
from typing import Any

from PIL import Image

from benchmarks.command import compiled_with
from benchmarks.compiled import float8, loss_scale_cost, memory, predict
from benchmarks.ported import page as ported

ROOT = pathlib.Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NAMES = ("performance", "accuracy", "choosing", "ported-programs", "fp8")
PAGES = [*(ROOT / "docs" / f"{name}.md" for name in NAMES), ROOT / "benchmarks" / "ported" / "diffs.md"]


def cost(*cases: str) -> str:
    """Returns the tables of what a loss scale costs, and the versions with which it was compiled."""
    found = json.loads((RESULTS / "loss_scale_cost.json").read_text())
    tables = [
        loss_scale_cost.table(case["title"], [loss_scale_cost.Row(**row) for row in case["rows"]])
        for case in (found["cases"][name] for name in cases)
    ]
    body = "\n\n".join(tables)
    return f"```text\n{body}\n```\n\n{compiled_with(found)}"


def models() -> str:
    """Returns the table of the nine models."""
    return "\n".join(predict.summary(RESULTS))


def memory_table(which: str) -> str:
    """Returns a table of the arms with fewer bytes a parameter: of their cost, or of their accuracy."""
    if which == "accuracy":
        return "\n".join(memory.accuracy_table(json.loads((RESULTS / "cpu" / "memory.json").read_text())))
    found = json.loads((RESULTS / "memory.json").read_text())
    return "\n".join([*memory.cost_table(found), "", compiled_with(found)])


def float8_cost() -> str:
    """Returns the table of a block in bfloat16 and in fp8."""
    return "\n".join(float8.table(json.loads((RESULTS / "float8.json").read_text())))


def convergence() -> str:
    """Returns the table of the gradients that float16 loses without a scale, and of the losses."""
    found = json.loads((RESULTS / "cpu" / "convergence.json").read_text())
    arms = ("float32", "bfloat16", "float16, scaled", "float16, unscaled")
    lines = [
        "| Model | zero at the start | at the end | " + " | ".join(arms) + " |",
        "| --- | --- | --- |" + " --- |" * len(arms),
    ]
    for family in found["families"].values():
        start, end = family["arms"]["float32"][0]["share_lost"]
        means = [statistics.mean(run["held_out_loss"] for run in family["arms"][arm]) for arm in arms]
        cells = [f"{start:.2%}", f"{end:.2%}", *(f"{mean:.3g}" for mean in means)]
        lines.append(f"| {family['title']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def precisions(family: str) -> str:
    """Returns the table of a model's training step in each precision."""
    arms = json.loads((RESULTS / "h100-pretended" / f"{family}.json").read_text())["arms"]
    lines = ["| Precision | matmuls | traffic GB | peak GB |", "| --- | --- | --- | --- |"]
    for name, arm in arms.items():
        products = ", ".join(f"{count} {kind}" for kind, count in arm["products"].items())
        sizes = f"{arm['bytes_moved'] / 1e9:.1f} | {arm['program_bytes'] / 1e9:.1f}"
        lines.append(f"| {name} | {products} | {sizes} |")
    return "\n".join(lines)


def text(name: str) -> str:
    """Returns what a command has printed, such as `benchmarks.compiled.step`."""
    return f"```text\n{(RESULTS / name).read_text()}```"


def picture(name: str) -> str:
    """Returns the table that a picture of the documentation holds as its description."""
    with Image.open(ROOT / "docs" / name) as opened:
        return f"```text\n{opened.info['Description']}\n```"


TABLES = {"cost": cost, "models": models, "memory": memory_table, "text": text, "picture": picture}
TABLES |= {"convergence": convergence, "precisions": precisions, "float8_cost": float8_cost}
TABLES |= {"ported": ported.table, "ported-diffs": ported.sections, "ported-versions": ported.versions}


def filled(text: str) -> str:
    """Returns the text of a page with its tables from the files of results."""

    def table(found: re.Match[str]) -> str:
        name, *arguments = found[1].split()
        return f"<!-- begin {found[1]} -->\n\n{TABLES[name](*arguments)}\n\n<!-- end -->"

    return re.sub(r"<!-- begin (.*?) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def notebook(script: str) -> dict[str, Any]:
    """Returns a script with cells as a notebook that first installs the library, for Colab."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    install = f'%pip install -q "jmp_lite[flax] @ git+{urls["Repository"]}" matplotlib scikit-learn'
    # Colab has no other files: a link leads to the site.
    script = re.sub(r"\]\(\.\./([\w-]+)\.md\)", rf"]({urls['Documentation']}\1.html)", script)
    script = re.sub(r"\]\((\w+)\.py\)", rf"]({urls['Documentation']}notebooks/\1.html)", script)
    cells: list[dict[str, Any]] = []
    for number, (kind, body) in enumerate([("", install), *_CELL.findall(script)]):
        text = body.strip() if not kind else re.sub("^# ?", "", body.strip(), flags=re.MULTILINE)
        cell = {"id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        code = {"cell_type": "code", "execution_count": None, "outputs": []}
        cells.append(cell | ({"cell_type": "markdown"} if kind else code))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


_CELL = re.compile(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", re.MULTILINE | re.DOTALL)
NAMES_OF_NOTEBOOKS = ("float16_in_ten_minutes", "is_it_faster")
NOTEBOOKS = {
    ROOT / "docs" / "notebooks" / f"{name}.py": ROOT / "examples" / f"{name}.ipynb"
    for name in NAMES_OF_NOTEBOOKS
}


def without_outputs(made: dict[str, Any]) -> dict[str, Any]:
    """Returns a notebook as `notebook` makes it, without what its cells have printed and drawn."""
    clean = {"execution_count": None, "outputs": []}
    cells = [cell | clean if cell["cell_type"] == "code" else cell for cell in made["cells"]]
    return made | {"cells": cells}


def executed(made: dict[str, Any]) -> dict[str, Any]:
    """Returns a notebook with its outputs, which GitHub shows. It needs `pip install -e ".[docs]"`."""
    import nbformat  # pyright: ignore[reportMissingImports]
    from nbclient import NotebookClient  # pyright: ignore[reportMissingImports]

    install, *cells = made["cells"]
    run: Any = nbformat.reads(json.dumps(made | {"cells": cells}), as_version=4)
    NotebookClient(run, resources={"metadata": {"path": str(ROOT)}}).execute()
    for cell in run["cells"]:
        cell["metadata"] = {}
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(
                "text/html", None
            )  # GitHub shows no page of `explain`; text is there too.
    return made | {"cells": [install, *json.loads(nbformat.writes(run))["cells"]]}


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
    for script, path in NOTEBOOKS.items():
        made = notebook(script.read_text())
        if not path.exists() or without_outputs(json.loads(path.read_text())) != made:
            path.write_text(json.dumps(executed(made), indent=1) + "\n")

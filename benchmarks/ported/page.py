"""The table of docs/ported-programs.md and the diffs of ported/diffs.md, from the ports and their results."""

import difflib
import importlib
import json
import pathlib
import re
import statistics
import textwrap
from types import ModuleType
from typing import Any

from benchmarks.ported.port import Edit, Lines, Port
from benchmarks.ported.programs import NAMES

RESULTS = pathlib.Path(__file__).parent.parent / "results" / "ported"


def program(name: str) -> ModuleType:
    """Returns the module of a ported program."""
    return importlib.import_module(f"benchmarks.ported.programs.{name}")


def result(name: str) -> dict[str, Any]:
    """Returns the row that the command wrote for a program."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def blob(repository: str, revision: str, file: str) -> str:
    """Returns the address of a file at a revision."""
    return f"https://github.com/{repository}/blob/{revision}/{file}"


def losses(values: list[float]) -> str:
    """Returns the mean of some losses, or returns, as text."""
    mean = statistics.mean(values)
    return f"{mean:.0f}" if mean >= 10 else f"{mean:.3f}"


def heading_id(title: str) -> str:
    """Returns the id that GitHub and the site make from a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def row(name: str) -> str:
    """Returns the row of a program in the table."""
    port, measured = program(name).PORT, result(name)
    full, half = measured["float32"], measured["float16"]
    tried = {True: "unchanged", False: "**changed**", None: "not tried"}[half["bad_step_left_params"]]
    cells = (
        f"[{port.title}](../benchmarks/ported/diffs.md#{heading_id(port.title)})",
        f"+{measured['added']}/-{measured['removed']}",
        "; ".join(map(other, program(name).OTHERS)),
        losses(full["losses"][:1]),
        losses(full["losses"][-10:]),
        losses(half["losses"][-10:]),
        f"{half['share']:.1%}",
        str(half["skipped"]),
        tried,
        f"{half['first_call_seconds'] / full['first_call_seconds']:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Returns a sentence on all programs, and their table."""
    added = [result(name)["added"] for name in NAMES]
    summary = (
        f"Each of these {len(NAMES)} public JAX programs trains in float16 after adding {min(added)} to "
        f"{max(added)} lines; no model was changed."
    )
    head = (
        "| program | lines | another library | first loss | float32 | float16 | in half | skipped | an inf "
        "| first call |\n| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |"
    )
    return "\n".join([summary, "", head, *map(row, NAMES)])


def hunk(edit: Edit) -> str:
    """Returns an edit as lines of a diff."""
    old, new = (textwrap.dedent(text.rstrip("\n")).splitlines() for text in (edit.old, edit.new))
    lines = difflib.ndiff(old, new)
    return "\n".join(line[0] + line[2:] for line in lines if line[0] != "?").rstrip()


def is_import(edit: Edit) -> bool:
    """Whether an edit only imports jmp_lite, which every program does and the page says once."""
    return edit.new.replace("import jmp_lite as jmp\n", "") == edit.old


def section(name: str) -> str:
    """Returns the section of a program: where it is, its diff, its size."""
    port: Port = program(name).PORT
    measured = result(name)
    address = blob(port.repository, port.revision, port.file)
    source = f"[`{port.file}`]({address}) of {port.repository}"
    if port.own is not None:
        commit = f"https://github.com/{port.repository}/tree/{port.revision}"
        source = f"[{port.repository}]({commit}), with a train step of ours"
    packages = f" It needs `pip install {port.packages}`." if port.packages else ""
    intro = (
        f"{source}: +{measured['added']}/-{measured['removed']}. {port.size}, "
        f"{measured['steps']} {port.unit}. {port.note}{packages}"
    )
    edits = [(line, edit) for line, edit in zip(measured["lines"], port.edits) if not is_import(edit)]
    diff = "\n".join(f"@@ {line} @@\n{hunk(edit)}" for line, edit in edits)
    parts = (
        f"## {port.title}",
        textwrap.fill(intro.strip(), 120, break_long_words=False, break_on_hyphens=False),
        f"```diff\n{diff}\n```",
    )
    return "\n\n".join(parts)


def other(lines: Lines) -> str:
    """Returns how many lines another library takes, with the address of the program."""
    return f"[{lines.library}: {lines.count}]({blob(lines.repository, lines.revision, lines.file)})"


def versions() -> str:
    """Returns the versions with which the programs were run."""
    first, *others = (result(name)["versions"] for name in NAMES)
    assert all(row == first for row in others), "The programs were run with different versions."
    return "Measured on a CPU with " + ", ".join(f"{name} {version}" for name, version in first.items()) + "."


def sections() -> str:
    """Returns the sections of all programs."""
    return "\n\n".join(map(section, NAMES))

"""A port: the substitutions that bring one file of a public program to float16."""

import dataclasses
import difflib
import hashlib
import json
import pathlib
import subprocess
from typing import Any

CELL = "\n# %%\n"  # Between the cells of a notebook that was written as a script.


@dataclasses.dataclass(frozen=True)
class Edit:
    """One substitution.

    Attributes:
        old: the fragment that is replaced: no more of the program's text than tells the line.
        new: the text that replaces it.
        times: how often the fragment stands in the file.
    """

    old: str
    new: str
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Lines:
    """The lines that mixed precision takes in a program of another library, counted by hand.

    Attributes:
        library: the library that these lines use.
        program: the program, in words.
        repository, revision, file: where the lines are.
        ranges: the first and the last line of each group. They are lines of code: no comment, no empty line.
    """

    library: str
    program: str
    repository: str
    revision: str
    file: str
    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """How many lines these are."""
        return sum(last - first + 1 for first, last in self.ranges)


@dataclasses.dataclass(frozen=True)
class Port:
    """How one program is brought to float16, and the tiny size at which it is run.

    Attributes:
        title: the name of the program on the page.
        repository: `owner/name` on GitHub.
        revision: the commit, 40 hex digits.
        file: the changed file. A notebook is changed as the script of its code cells.
        edits: the substitutions.
        size: model, data and steps of the run, in words.
        folder: the folder of the repository that the program needs.
        own: the text of the changed file where it is ours, because the repository has a model and no train
            step.
        unit: what the run counts.
        packages: what the program needs and jmp_lite's tests do not, as arguments of pip.
        note: what a reader must know of this run.
    """

    title: str
    repository: str
    revision: str
    file: str
    edits: tuple[Edit, ...]
    size: str
    folder: str = "."
    own: str | None = None
    unit: str = "steps"
    packages: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Diff:
    """The diff of a port: how many lines it adds and removes, and the line of each edit's first fragment."""

    added: int
    removed: int
    lines: tuple[int, ...]


def digest(port: Port) -> str:
    """Returns a digest of the revision and the edits: results belong to one port."""
    return hashlib.sha256(repr((port.revision, port.file, port.own, port.edits)).encode()).hexdigest()[:16]


def check_revision(port: Port, clone: pathlib.Path) -> None:
    """Raises a ValueError if the clone is not at the revision of the port."""
    command = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if head != port.revision:
        raise ValueError(
            f"The port of {port.title} is for revision {port.revision} of {port.repository}. Got a clone at "
            f"{head}: run `git -C {clone} checkout {port.revision}`."
        )


def original(port: Port, clone: pathlib.Path) -> str:
    """Returns the text of the port's file as the program has it; the script of its cells for a notebook."""
    if port.own is not None:
        return port.own
    text = (clone / port.file).read_text()
    if not port.file.endswith(".ipynb"):
        return text
    cells = (cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    return CELL.join("".join(cell["source"]) for cell in cells) + "\n"


def apply(port: Port, text: str) -> str:
    """Returns the text with the substitutions of the port.

    Raises:
        ValueError: a fragment does not stand in the text as often as the edit says.
    """
    for edit in port.edits:
        count = text.count(edit.old)
        if count != edit.times:
            raise ValueError(
                f"{port.file} of {port.repository} must have the text "
                f"{edit.old!r} {edit.times} times. Got {count} times."
            )
        text = text.replace(edit.old, edit.new)
    return text


def diff(port: Port, text: str) -> Diff:
    """Returns the diff of the port, where the file has this text."""
    before, after = text.splitlines(), apply(port, text).splitlines()
    changes = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]  # Without the two file names.
    added = sum(line.startswith("+") for line in changes)
    removed = sum(line.startswith("-") for line in changes)
    lines = tuple(text[: text.index(edit.old)].count("\n") + 1 for edit in port.edits)
    return Diff(added, removed, lines)


def cells(script: str, first: str, end: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Runs some cells of a notebook that was written as a script, and returns the names they define.

    Args:
        script: the file of the script.
        first, end: fragments of the first cell that is run, and of the first one after it that is not.
        names: the names that the cells may use.
    """
    text = pathlib.Path(script).read_text().split(CELL)
    start = next(index for index, cell in enumerate(text) if first in cell)
    stop = next(index for index, cell in enumerate(text) if end in cell and index > start)
    names = {} if names is None else names
    names.setdefault("__name__", pathlib.Path(script).stem)
    exec(compile(CELL.join(text[start:stop]), script, "exec"), names)
    return names

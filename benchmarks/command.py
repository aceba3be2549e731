"""What the commands share: a parser that shows the docstring of a command, and its file of results."""

import argparse
import json
import os
import pathlib
from typing import Any


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help shows the docstring of a command as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def to_json(content: Any) -> str:
    """Returns JSON with a line a value: small enough, and readable."""
    return json.dumps(content, indent=1) + "\n"


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file. A process that is killed meanwhile leaves the old file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes results, as `write_atomically` does."""
    write_atomically(path, to_json(content))


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns what `write_json` has written; an empty dict without such a file."""
    return json.loads(path.read_text()) if path.exists() else {}


def compiled_with(found: dict[str, Any]) -> str:
    """Returns the sentence of a page that names the versions of some results."""
    versions = ", ".join(f"{library} {version}" for library, version in found["versions"].items())
    return f"Compiled with {versions}."

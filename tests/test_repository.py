"""The files around the package: the workflows, the citation, the extras."""

import re
import tomllib
from pathlib import Path

import pytest

import jmp_lite

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# The sdist has no .github/ and no .ci/.
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_hash_with_their_tag_beside_it(path):
    used = re.findall(r"uses: (.*)", path.read_text())
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in used)


@pytest.mark.skipif(not WORKFLOWS, reason="in the sdist")
def test_every_part_of_the_ci_has_a_job():
    parts = re.search(r"part: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())[1]
    functions = re.findall(
        r"^run_(\w+)\(\) \{\n  (?:cd|section)", (ROOT / ".ci/run").read_text(), re.MULTILINE
    )
    assert {part.strip('" ').replace(".", "_") for part in parts.split(",")} == set(functions)


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {jmp_lite.__version__}\n" in citation
    assert re.search(r"^date-released: \d{4}-\d\d-\d\d$", citation, re.MULTILINE)


def test_the_extra_docs_has_what_the_modules_of_the_api_pages_import():
    assert "jmp_lite[examples,testing]" in EXTRAS["docs"]
    assert EXTRAS["testing"] == ["chex"]
    assert "jmp_lite[flax]" in EXTRAS["examples"]

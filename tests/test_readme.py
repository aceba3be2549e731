"""The README's Python blocks run, in order, in one namespace."""

import json
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_python_blocks_of_the_readme_run():
    assert len(BLOCKS) >= 6
    namespace = {}
    for block in BLOCKS:
        exec(compile(block, str(README), "exec"), namespace)
    assert namespace["loss"].dtype == "float32"
    assert namespace["loss_scale"].loss_scale in (2.0**14, 2.0**15)


def test_the_table_of_what_a_loss_scale_costs_is_that_of_the_last_run():
    """`python -m benchmarks.compiled.loss_scale_cost --json benchmarks/results/loss_scale_cost.json`."""
    pytest.importorskip("jmp")
    from benchmarks.compiled import loss_scale_cost

    found = json.loads((README.parent / "benchmarks/results/loss_scale_cost.json").read_text())
    text = README.read_text()
    for name in ("adamw", "clip", "small", "gpt", "gpt-bf16"):
        case = found["cases"][name]
        rows = [loss_scale_cost.Row(**row) for row in case["rows"]]
        assert loss_scale_cost.table(case["title"], rows) in text
    assert ", ".join(f"{library} {version}" for library, version in found["versions"].items()) in text


def test_the_table_of_the_models_programs_is_that_of_the_last_run():
    """`python -m benchmarks.compiled.predict` writes the files, `--summary` prints the table."""
    pytest.importorskip("jmp")
    from benchmarks.compiled import predict

    lines = predict.summary(README.parent / "benchmarks/results")
    assert len(lines) == 2 + len(predict.FAMILIES)
    assert "\n".join(lines) in README.read_text()

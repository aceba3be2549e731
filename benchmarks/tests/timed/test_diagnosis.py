"""The costs of the diagnosis tools."""

import re

import pytest

from benchmarks.timed import diagnosis


@pytest.mark.exhaustive
def test_each_tool_runs_in_a_process_of_its_own_and_prints_its_costs(capfd):
    diagnosis.main(["--size", "small", "--tools", "gradient", "profile_ranges"])
    rows = re.findall(
        r"^(\w+) +\d+ s +\d+ s of CPU time +([\d.]+) GiB$", capfd.readouterr().out, re.MULTILINE
    )
    assert [name for name, _ in rows] == ["gradient", "profile_ranges"]
    assert all(float(memory) > 0.1 for _, memory in rows)

"""Ratios, utilization and targets are computed from the files, and from nothing else."""

import json

import pytest

from benchmarks.timed import table


def measured(device="nvidia-h100-80gb-hbm3", **times):
    arms = {
        arm: {
            "ms": ms,
            "ms_quartiles": [ms, ms],
            "reference": "float16",
            "times_reference": [ms / 10.0] * 3,
            "peak_bytes": 2_000_000_000,
        }
        for arm, ms in times.items()
    }
    return {
        "family": "resnet50",
        "size": "full",
        "batch_size": 100,
        "flops_a_step": 3 * 10**12,
        "device": device,
        "versions": {"jax": "1"},
        "date": "2026-01-01",
        "protocol": {"warm_up": 10, "blocks": 5, "steps": 20},
        "clocks": [{"clocks.sm": "1980"}],
        "arms": arms,
    }


def test_ratios_utilisation_and_targets_are_computed_from_the_file():
    found = measured(**{"float16": 10.0, "float32": 40.0, "torch float16": 9.0, "TF32": 15.0})
    assert table.faster(found, "float16", "float32") == 4
    assert table.faster(found, "float16", "bfloat16") is None
    assert table.utilisation(found, "float16") == pytest.approx(3e12 / 0.010 / 989.4e12)
    assert table.utilisation(found, "float32") == pytest.approx(3e12 / 0.040 / 66.9e12)
    assert table.utilisation(measured("cpu", float16=1.0), "float16") is None
    assert list(table.targets(found)) == [
        ("float16 over float32", [4.0] * 3, 3.47),
        ("float16 over TF32", [1.5] * 3, pytest.approx(0.85 * 1.9)),
        ("jmp_lite over torch.amp", [0.9] * 3, 1.0),
    ]
    found["arms"]["torch float16"]["times_reference"] = [0.8, 0.9, 1.2, 1.2]
    found["arms"]["float16"]["times_reference"] = [1.0] * 4
    verdicts = [line.split(" | ")[-1] for line in table.target_table([found])][2:]
    assert verdicts == ["met |", "missed |", "within the noise |"]
    assert "| float32 | 40.00 (40.00-40.00) | 2,500 | 1.00 |" in "\n".join(table.family_table(found))


def test_an_arm_that_failed_is_shown_and_counts_for_nothing():
    found = measured(float16=10.0, float32=40.0)
    found["arms"]["float16"] = {**found["arms"]["float16"], "error": "AssertionError: claimed f16"}
    assert table.faster(found, "float16", "float32") is None
    assert not list(table.targets(found))
    assert "| float16 | AssertionError: claimed f16 |" in "\n".join(table.family_table(found))


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ("float16 Flax DynamicScale", "f16"),
        ("torch bfloat16, flash", "bf16"),
        ("TF32", "tf32"),
        ("torch float32", "f32"),
    ],
)
def test_the_peak_of_an_arm_is_that_of_its_dtype(arm, expected):
    assert table.arithmetic(arm) == expected


def test_the_tables_of_a_gpu_are_written_into_the_page(tmp_path):
    page, output = tmp_path / "page.md", tmp_path / "speed.png"
    page.write_text("before\n<!-- times -->\nold\n<!-- end of times -->\nafter\n")
    arguments = ["--results", str(tmp_path), "--output", str(output), "--page", str(page)]
    for device in ("cpu", "nvidia-h100-80gb-hbm3"):
        (tmp_path / device).mkdir()
        found = measured(device, **{"float16": 10.0, "float32": 40.0})
        (tmp_path / device / "resnet50.json").write_text(json.dumps(found))
        table.main(arguments)
        if device == "cpu":
            assert "\nold\n" in page.read_text()
    text = page.read_text()
    assert text.startswith("before\n<!-- times -->\n\n| family | ratio |")
    assert "| resnet50 | float16 over float32 | 4.000 (4.000-4.000) | 3.47 | met |" in text
    assert "**resnet50**, full size, batch 100, nvidia-h100-80gb-hbm3:" in text
    assert "batch 100, cpu:" not in text
    assert text.endswith("<!-- end of times -->\nafter\n")
    table.main(arguments)
    assert page.read_text() == text
    with pytest.raises(ValueError, match="no place for the tables"):
        table.filled("a page", "tables")


def test_without_results_nothing_is_drawn(tmp_path, capsys):
    table.main(["--results", str(tmp_path), "--output", str(tmp_path / "speed.png")])
    assert "Nothing was measured" in capsys.readouterr().out
    assert not (tmp_path / "speed.png").exists()

"""The real programs of a GPU beside those that were compiled for an H100 that was not there.

python -m benchmarks.gpu.programs out/gpu/FILE.json
"""

import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

Files = dict[str, Any]
HALF = {"float16": "f16", "bfloat16": "bf16"}


def pairs(files: Files) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any] | None, dict[str, Any]]]:
    """Yields the family, the arm, the real program, the pretended program and the times; `{}` without times.

    Args:
        files: the contents of the files that pieces wrote, by path.
    """
    families = dict.fromkeys(name.split("/")[1] for name in files if name.startswith("compiled/"))
    for family in families:
        pretended = files.get(f"results/h100-pretended/{family}.json", {}).get("arms", {})
        timed = next((content for name, content in files.items() if _is_timed(name, family)), {})
        for name, content in files.items():
            if name.startswith(f"compiled/{family}/") and "targets" in content:
                arm = content["arm"]
                yield family, arm, content, pretended.get(arm), timed.get("arms", {}).get(arm, {})


def _is_timed(name: str, family: str) -> bool:
    folder, _, file = name.rpartition("/")
    return file == f"{family}.json" and folder.startswith("results/") and not folder.endswith("-pretended")


def faults(arm: str, real: dict[str, Any], pretended: dict[str, Any] | None) -> list[str]:
    """Returns the faults of the products of a real program: a wrong number, a wrong dtype, a missing name."""
    found = []
    count = sum(real["products"].values())
    if pretended is not None and count != sum(pretended["products"].values()):
        found.append(f"{count} products, not {sum(pretended['products'].values())}")
    if half := HALF.get(arm.split()[0]):
        wide = {kind for kind in real["products"] if kind.split()[-1] != half}
        found += [f"not in half: {kind}" for kind in sorted(wide)]
    if unnamed := real["targets"].get("without a name"):
        found.append(f"{unnamed} without a name")
    return found


def table(files: Files) -> str:
    """Returns the table, real / pretended: kernels, MB moved, MB held, and the measured peak; and faults."""
    lines = [
        "| | arm | kernels | MB moved | MB held | peak MB | products by XLA's own kernels | faults |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for family, arm, real, pretended, timed in pairs(files):
        other = pretended or {}
        cells = [
            family,
            arm,
            _both(real["kernels"], other.get("kernels"), 1),
            _both(real["bytes_moved"], other.get("bytes_moved"), 1e6),
            _both(real["program_bytes"], other.get("program_bytes"), 1e6),
            f"{timed['peak_bytes'] / 1e6:,.0f}" if timed.get("peak_bytes") else "",
            str(
                sum(
                    count
                    for target, count in real["targets"].items()
                    if target.split()[0] in ("dot", "convolution")
                )
            ),
            "; ".join(faults(arm, real, pretended)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _both(real: float, pretended: float | None, unit: float) -> str:
    return f"{real / unit:,.0f} / {'' if pretended is None else f'{pretended / unit:,.0f}'}"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(table(json.loads(pathlib.Path(path).read_text())["files"]))

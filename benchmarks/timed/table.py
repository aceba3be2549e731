"""The tables and the bar chart of the results of `benchmarks.timed.run`.

    python -m benchmarks.timed.table                      # From benchmarks/results, into docs/speed.png.
    python -m benchmarks.timed.table --results out/quick --output out/speed.png

Ratios are between arms of one file, which took turns on one device. A device without a file is not drawn.
The tables of a GPU are also written into docs/performance.md, after `<!-- times -->`.
"""

import json
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.command import make_parser

# NVIDIA's measurements on V100s, mixed precision over float32: "Training with Mixed Precision", section 1,
# and the table of examples. Of a range this is the lower end.
NVIDIA = {
    "resnet50": 3.47,
    "bert-base": 1.94,
    "seq2seq": 2.35,
    "neumf": 1.81,
    "ssd": 1.32,
    "unet": 1.10,
    "waveglow": 1.94,
}
# Remarks on the ratios of a family.
REMARKS = {
    "seq2seq": "PyTorch's LSTM is cuDNN's, JAX's is a loop of XLA's (`lax.scan`): kernels are not matched."
}
# float16 over TF32: 0.85 of the ratio that the roofline of the compiled program allows.
ROOFLINE = {"gpt2-small": 1.8, "gpt2-medium": 1.8, "resnet50": 1.9, "bert-base": 1.8, "seq2seq": 1.45}
ROOFLINE |= {"neumf": 1.7, "ssd": 1.8, "unet": 1.9, "waveglow": 1.9}
TF32_TARGET = {family: 0.85 * allowed for family, allowed in ROOFLINE.items()}

# Dense peaks in FLOP/s: NVIDIA's data sheets of the H100 SXM and the H200, without sparsity.
_HOPPER = {"f16": 989.4e12, "bf16": 989.4e12, "tf32": 494.7e12, "f32": 66.9e12}
PEAKS = {"nvidia-h100-80gb-hbm3": _HOPPER, "nvidia-h200": _HOPPER}

Found = dict[str, Any]


def arithmetic(arm: str) -> str:
    """Returns the dtype that the products of an arm multiply: `f16`, `bf16`, `tf32` or `f32`."""
    name = arm.removeprefix("torch ").split(",")[0].split()[0]
    return {"float16": "f16", "bfloat16": "bf16", "TF32": "tf32", "float32": "f32"}[name]


def ratios(found: Found, arm: str, other: str) -> list[float]:
    """Returns how many times faster one arm is than another, for each block; none if one was not timed."""
    both = [found["arms"].get(each, {}) for each in (arm, other)]
    if any("ms" not in each or "error" in each for each in both):
        return []
    if both[0]["reference"] != both[1]["reference"]:
        return []
    return [slow / fast for fast, slow in zip(*(each["times_reference"] for each in both))]


def faster(found: Found, arm: str, other: str) -> float | None:
    """Returns the median of the `ratios`; None if there are none."""
    found_ratios = ratios(found, arm, other)
    return statistics.median(found_ratios) if found_ratios else None


def utilisation(found: Found, arm: str) -> float | None:
    """Returns the share of the device's dense peak that the model's FLOPs reach; None if it is not known."""
    peaks = PEAKS.get(found["device"])
    if peaks is None or "ms" not in found["arms"][arm]:
        return None
    return found["flops_a_step"] / (found["arms"][arm]["ms"] / 1000) / peaks[arithmetic(arm)]


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def family_table(found: Found) -> Iterator[str]:
    """Yields the lines of one family's table, in Markdown."""
    protocol, versions = found["protocol"], found["versions"]
    yield f"**{found['family']}**, {found['size']} size, batch {found['batch_size']}, {found['device']}:"
    yield ""
    yield "| arm | ms a step (quartiles) | examples/s | x float32 | MFU | peak GB | overflow |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | --- |"
    for arm, each in found["arms"].items():
        if "error" in each:
            yield f"| {arm} | {each['error'].splitlines()[0][:80].replace('|', ' ')} | | | | | |"
            continue
        low, high = each["ms_quartiles"]
        overflow = each.get("overflow")
        cells = (
            arm,
            f"{each['ms']:.2f} ({low:.2f}-{high:.2f})",
            f"{found['batch_size'] / each['ms'] * 1000:,.0f}",
            _cell(faster(found, arm, "float32"), ".2f"),
            _cell(utilisation(found, arm), ".1%"),
            _cell((each["peak_bytes"] or 0) / 1e9 or None, ".1f"),
            f"{overflow['skipped_steps']} skipped, then trained" if overflow else "",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    clock = found["clocks"][-1]["clocks.sm"] if found["clocks"] else None
    yield (
        f"{protocol['blocks']} blocks of {protocol['steps']} steps after {protocol['warm_up']}, in turn; "
        + (f"SM clock {clock} MHz; " if clock else "")
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f"; {found['date'][:10]}. PyTorch is compiled in its default mode: no CUDA graphs, which XLA has. "
        + REMARKS.get(found["family"], "")
    )


def targets(found: Found) -> Iterator[tuple[str, list[float], float]]:
    """Yields the targets: a name, the measured ratios, and the smallest ratio that is wanted."""
    family = found["family"]
    wanted = [
        ("float16 over float32", "float16", "float32", NVIDIA.get(family)),
        ("float16 over TF32", "float16", "TF32", TF32_TARGET.get(family)),
        ("float16 with scaling over bfloat16", "float16", "bfloat16", 0.99),
        ("autocast over a policy", "float16 autocast", "float16", 0.99),
        ("with scaling over without", "float16", "float16 unchecked", 0.99),
        ("jmp_lite over torch.amp", "float16", "torch float16", 1.0),
        ("autocast over torch.amp", "float16 autocast", "torch float16", 1.0),
        (
            "jmp_lite over torch.amp, each side's fastest attention",
            "float16, cuDNN attention",
            "torch float16, flash",
            1.0,
        ),
        ("over jmp", "float16", "float16 jmp", 1.0),
        ("over Flax's DynamicScale", "float16", "float16 Flax DynamicScale", 1.0),
    ]
    for name, arm, other, least in wanted:
        measured = ratios(found, arm, other)
        if least is not None and measured:
            yield name, measured, least


def target_table(results: list[Found]) -> Iterator[str]:
    """Yields the lines of the table of targets, in Markdown."""
    yield "| family | ratio | measured (quartiles) | target | |"
    yield "| --- | --- | ---: | ---: | --- |"
    for found in results:
        for name, measured, least in targets(found):
            low, ratio, high = statistics.quantiles(measured, n=4, method="inclusive")
            met = "met" if low >= least else "missed" if high < least else "within the noise"
            cells = found["family"], name, f"{ratio:.3f} ({low:.3f}-{high:.3f})", f"{least:.2f}", met
            yield f"| {' | '.join(cells)} |"


def draw(results: list[Found], output: pathlib.Path) -> None:
    """Draws how many times faster than float32 each arm is, with a group of bars for each family."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = ("TF32", "bfloat16", "float16", "float16 autocast", "torch float16")
    colours = ("#b8b8b8", "#7fb3d5", "#1f618d", "#148f77", "#e59866")
    figure, axes = plt.subplots(figsize=(max(7.0, 1.3 * len(results)), 3.8), layout="constrained")
    width = 0.8 / len(arms)
    for index, (arm, colour) in enumerate(zip(arms, colours)):
        heights = [faster(found, arm, "float32") or 0.0 for found in results]
        middles = [group + (index - (len(arms) - 1) / 2) * width for group in range(len(results))]
        bars = axes.bar(middles, heights, width, color=colour, label=arm)
        axes.bar_label(bars, [f"{height:.1f}" if height else "" for height in heights], fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    for group, found in enumerate(results):
        if published := NVIDIA.get(found["family"]):
            axes.hlines(published, group - 0.4, group + 0.4, color="#c0392b", linestyle="--", linewidth=1)
    axes.plot([], [], color="#c0392b", linestyle="--", linewidth=1, label="NVIDIA, on V100")
    axes.set_xticks(range(len(results)), [found["family"] for found in results])
    axes.set_ylabel("times as fast as float32")
    axes.set_title(f"A training step, {results[0]['device']}", fontsize=10)
    axes.legend(
        fontsize=7, ncols=len(arms) + 1, loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False
    )
    axes.spines[["top", "right"]].set_visible(False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
    plt.close(figure)


def read(folder: pathlib.Path) -> dict[str, list[Found]]:
    """Returns the results of `benchmarks.timed.run`, by device."""
    devices: dict[str, list[Found]] = {}
    for path in sorted(folder.glob("*/*.json")):
        found = json.loads(path.read_text())
        if "protocol" in found:
            devices.setdefault(found["device"], []).append(found)
    return devices


def filled(page: str, tables: str) -> str:
    """Returns the text of a page with new tables of times.

    Raises:
        ValueError: the page has no place for them.
    """
    begin, end = "<!-- times -->", "<!-- end of times -->"
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"The page has no place for the tables. Write {begin} and {end} into it.")
    return f"{before}{begin}\n\n{tables}\n\n{end}{after}"


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables and draws the picture of each device."""
    parser = make_parser(__doc__)
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("docs/speed.png"))
    parser.add_argument("--page", type=pathlib.Path, default=pathlib.Path("docs/performance.md"))
    options = parser.parse_args(arguments)
    devices = read(options.results)
    if not devices:
        print(f"Nothing was measured: {options.results} has no file of benchmarks.timed.run.")
    pages = []
    for index, (device, results) in enumerate(devices.items()):
        tables = ["\n".join(family_table(found)) for found in results]
        if device in PEAKS:  # On a CPU half precision is slower.
            tables.insert(0, "\n".join(target_table(results)))
            pages += tables
        print("\n\n".join(tables), end="\n\n")
        output = options.output.with_stem(f"{options.output.stem}-{device}") if index else options.output
        draw(results, output)
        print(f"drawn to {output}")
    if pages:
        options.page.write_text(filled(options.page.read_text(), "\n\n".join(pages)))
        print(f"written into {options.page}")


if __name__ == "__main__":
    main()

"""Whether an arm learns as float32 does: a comparison with the spread of float32's seeds, a table, a picture.

Everything is read from the JSON that `benchmarks.timed.convergence` writes.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

PARTS = 10  # A run is compared with float32's spread in this many parts.


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An arm compared with float32.

    Attributes:
        parts_within: the number of parts of the run in which the mean of the arm's seeds lies between the
            lowest and the highest float32 seed.
        parts: the number of parts.
        held_out_within: the same for the loss on held-out data.
    """

    parts_within: int
    parts: int
    held_out_within: bool

    @property
    def within(self) -> bool:
        """Whether the arm lies within float32's spread."""
        return self.parts_within == self.parts and self.held_out_within


def part_means(runs: list[dict[str, Any]]) -> np.ndarray:
    """Returns the mean training loss of each part of each run, shape `(seeds, parts)`."""
    losses = np.array([run["losses"] for run in runs], float)
    return np.stack([part.mean(1) for part in np.array_split(losses, min(PARTS, losses.shape[1]), axis=1)], 1)


def held_out_losses(runs: list[dict[str, Any]]) -> np.ndarray:
    """Returns the loss on held-out data of each run, shape `(seeds,)`."""
    return np.array([run["held_out_loss"] for run in runs], float)


def compare(arms: dict[str, list[dict[str, Any]]], arm: str) -> Comparison:
    """Compares an arm with the spread of float32's seeds. A loss that is NaN or inf lies outside."""

    def inside(of: Callable[[list[dict[str, Any]]], np.ndarray]) -> np.ndarray:
        full, mean = of(arms["float32"]), of(arms[arm]).mean(0)
        return (full.min(0) <= mean) & (mean <= full.max(0))

    parts = inside(part_means)
    return Comparison(int(parts.sum()), parts.size, bool(inside(held_out_losses)))


def table(family: dict[str, Any]) -> str:
    """Returns the table of one family as text."""
    arms = family["arms"]
    start, end = arms["float32"][0]["share_lost"]
    lines = [
        f"{family['title']}, {family['steps']} steps; of the gradients of its outputs float16 rounds to zero "
        f"{start:.0%} at the start, {end:.0%} at the end",
        f"{'':18}{'training loss':>24}{'held-out loss':>24}{'within float32':>16}{'skipped':>9}{'scale':>9}",
    ]
    for arm, runs in arms.items():
        found = compare(arms, arm)
        held_out = "yes" if found.held_out_within else "no"
        within = "" if arm == "float32" else f"{found.parts_within}/{found.parts}, {held_out}"
        skipped = np.mean([run["skipped_steps"] for run in runs])
        lines.append(
            f"{arm:18}{_spread(part_means(runs)[:, -1]):>24}{_spread(held_out_losses(runs)):>24}{within:>16}"
            f"{skipped:>9.1f}{runs[-1]['scales'][-1]:>9,.0f}"
        )
    return "\n".join(lines)


def _spread(values: np.ndarray) -> str:
    return f"{values.mean():.3f} ({values.min():.3f}-{values.max():.3f})"


def draw(found: dict[str, Any], path: pathlib.Path) -> None:
    """Draws a panel for each family: the mean of each arm's seeds, and the range of float32's seeds."""
    styles = {"float32": ("0.5", "-", 4.5), "float16, unscaled": ("tab:red", "-", 1.8)}
    styles |= {"bfloat16": ("tab:blue", (0, (4, 2)), 1.8), "float16, scaled": ("tab:green", "-", 1.3)}
    families = found["families"].values()
    figure = Figure(figsize=(3.4 * len(families), 3.7), layout="constrained")
    panels = figure.subplots(1, len(families), squeeze=False)[0]
    for axes, family in zip(panels, families):
        for arm, runs in family["arms"].items():
            curves = np.array([run["losses"] for run in runs], float)
            points = curves.shape[1]
            sizes = [len(part) for part in np.array_split(np.arange(family["steps"]), points)]
            steps = np.cumsum(sizes) - (np.array(sizes) - 1) / 2
            color, line, width = styles[arm]
            height = 2 + list(styles).index(arm) / 10  # Wide lines lie under narrow ones.
            if arm == "float32":
                axes.fill_between(steps, curves.min(0), curves.max(0), color="0.85", linewidth=0)
            axes.plot(
                steps, curves.mean(0), color=color, linestyle=line, linewidth=width, label=arm, zorder=height
            )
        name, _, of_what = family["title"].partition(", ")
        axes.set_title(f"{name}\n", loc="left", weight="bold", fontsize=12)
        axes.text(0, 1.03, of_what, transform=axes.transAxes, fontsize=10, color="0.3")
        axes.set(xlabel="step", xlim=(1, family["steps"]), yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 5, 6, 8) if name == "GPT-2" else (1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    panels[0].set_ylabel("training loss, mean of the seeds")
    lines, labels = panels[0].get_legend_handles_labels()
    lines.insert(1, panels[0].collections[0])
    labels.insert(1, "float32, lowest to highest seed")
    figure.legend(
        lines,
        labels,
        loc="outside lower center",
        ncols=min(2 * len(families), 5),
        frameon=False,
        fontsize=9.5,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)

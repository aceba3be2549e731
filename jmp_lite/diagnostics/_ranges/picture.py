"""The picture of a `RangeReport`."""

import importlib
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from .scales import Scales


def draw(report: Any, path: str | pathlib.Path) -> None:
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            "The picture of a RangeReport needs matplotlib. Install it: pip install matplotlib. "
            "print(report) needs nothing."
        ) from error
    figure = figures.Figure(figsize=(10, 8), layout="constrained")
    top, bottom = figure.subplots(2, 1)
    _draw_histogram(top, report)
    _draw_curve(bottom, report.scales, report.loss_scale)
    figure.savefig(path)


def _draw_histogram(axes: Any, report: Any) -> None:
    """Draws the gradients by magnitude at a scale of 1, and the range of the dtype (NVIDIA's figure 2)."""
    histogram, info = report.pooled.histogram, jnp.finfo(report.dtype)
    total = report.pooled.values
    shares = [count / total for count in histogram.values()]
    axes.bar(list(histogram), shares, width=0.9, align="edge", label="gradients")
    shift = int(np.log2(report.loss_scale))
    first, last = int(info.minexp) - shift, int(info.maxexp) - shift
    name = report.dtype.name
    axes.axvspan(first - int(info.nmant), first, color="tab:orange", alpha=0.15, label=f"{name}, subnormal")
    axes.axvspan(first, last, color="tab:green", alpha=0.15, label=f"{name}, normal")
    axes.set(yscale="log", xlabel="log2 of the magnitude at a scale of 1", ylabel="share")
    axes.set_title(f"Gradients; {report.pooled.zeros / max(total, 1):.1%} are zero")
    axes.legend()


def _draw_curve(axes: Any, scales: Scales, loss_scale: float) -> None:
    """Draws the shares of the gradients that each loss scale loses (NVIDIA's figure 3)."""
    shown = range(-10, 41)
    fates = [scales.fates[exponent] for exponent in shown]
    labels = {"flushed": "become zero", "subnormal": "are subnormal", "overflowed": "overflow"}
    for name, label in labels.items():
        axes.plot(shown, [scaled.share(getattr(scaled, name)) for scaled in fates], label=label)
    axes.axvline(np.log2(loss_scale), color="gray", linestyle=":", label="the loss scale")
    for exponent, label in ((scales.suggested, "static"), (scales.largest_safe, "largest safe")):
        if exponent is not None:
            axes.axvline(exponent, color="black", linestyle="--" if label == "static" else "-", label=label)
    axes.set(xlabel="log2 of the loss scale", ylabel="share of gradients that are not zero")
    axes.legend()

"""Reads the times of kernels from a profile that JAX has written."""

import pathlib
import warnings
from typing import Any

from jax.profiler import ProfileData


def read_profile(folder: str | pathlib.Path, runs: int = 1) -> dict[str, float]:
    """Returns the seconds of each kernel in a profile, by the name of its instruction in the program.

    Args:
        folder: the folder that was given to `jax.profiler.start_trace` or `jax.profiler.trace`.
        runs: how many runs of the step it holds; the seconds are those of one run.

    Raises:
        ValueError: the folder holds no profile, or `runs` is below 1.

    Guide: docs/diagnosis.md.
    """
    if runs < 1:
        raise ValueError(f"runs is 1 or more; got {runs}.")
    files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
    if not files:
        raise ValueError(f"There is no profile (*.xplane.pb) in {folder}. Write one with jax.profiler.trace.")
    with warnings.catch_warnings():
        # JAX's own classes warn of themselves here. Where warnings are errors, the process would abort.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _seconds(ProfileData.from_file(str(files[-1])), runs)


def _seconds(profile: Any, runs: int) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name is not None:
                    seconds[str(name)] = seconds.get(str(name), 0.0) + event.duration_ns * 1e-9 / runs
    return seconds

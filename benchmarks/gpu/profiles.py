"""Reads the times of kernels from a profile that JAX has written, by kernel and by module."""

import pathlib
import warnings
from typing import Any

from jax.profiler import ProfileData

from jmp_lite._text import aligned
from jmp_lite.programs import Program, Roofline
from jmp_lite.programs._roofline import module_of


def read_profile(folder: str | pathlib.Path, runs: int = 1) -> dict[str, float]:
    """Returns the seconds of each kernel in a profile, by the name of its instruction in the program.

    Args:
        folder: the folder that was given to `jax.profiler.start_trace` or `jax.profiler.trace`.
        runs: how many runs of the step it holds; the seconds are those of one run.

    Raises:
        ValueError: the folder holds no profile.
    """
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


def seconds_by_module(program: Program, seconds: dict[str, float], depth: int) -> dict[str, float]:
    """Returns the measured seconds of each module of a program.

    Args:
        program: the program that ran.
        seconds: the seconds of its kernels, from `read_profile`.
        depth: how many names of a scope are one module, as in `roofline`.
    """
    modules: dict[str, float] = {}
    for launch in program.launches:
        module = module_of(launch.operation, depth)
        modules[module] = modules.get(module, 0.0) + seconds.get(launch.name, 0.0)
    return modules


def table(estimate: Roofline, measured: dict[str, float]) -> str:
    """Returns the measured time of each module beside its estimates, as text.

    Args:
        estimate: the estimate of `roofline`.
        measured: the seconds of each module, from `seconds_by_module`.
    """
    rows: list[tuple[str, ...]] = [("milliseconds", *estimate.seconds, "measured")]
    for row in estimate.modules:
        seconds = (*row.seconds.values(), measured[row.module])
        rows.append((row.module, *(f"{1e3 * number:.3f}" for number in seconds)))
    return "\n".join(aligned(rows))

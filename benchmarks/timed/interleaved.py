"""Times steps that take turns, by the CPU time of this process, so that other processes disturb little.

Run it on one core: `taskset -c 0 python -m ...`. Only ratios of one run mean anything.
"""

import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping


def milliseconds(steps: Mapping[str, Callable[[], object]], blocks: int, count: int) -> dict[str, float]:
    """Returns the median CPU time of each step.

    Args:
        steps: functions that take one step and wait for it.
        blocks: how often each has its turn. Two more turns come before, which do not count.
        count: how many steps are one turn.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(blocks + 2):
        for name, step in steps.items():
            began = time.process_time()
            for _ in range(count):
                step()
            times[name].append(1e3 * (time.process_time() - began) / count)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def machine() -> str:
    """Returns the name of the CPU and its instructions for bfloat16."""
    path = pathlib.Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    name = re.search(r"model name\s*: (.*)", text)
    flags = re.search(r"flags\s*: (.*)", text)
    has = set(flags[1].split() if flags else ()) & {"amx_bf16", "avx512_bf16"}
    return f"{name[1] if name else platform.machine()}, {', '.join(sorted(has)) or 'no bfloat16'}"
